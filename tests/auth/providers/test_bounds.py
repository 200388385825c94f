"""How many logins may be open, in all, per address and per peer, and when places become free."""

from __future__ import annotations

from collections import Counter

import pytest
import trio
import trio.testing
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from auth.server.providers.errors import LoginExpired, LoginReason, LoginRefused, TooManyLogins
from auth.server.providers.flows import LoginAttempt
from auth.server.providers.identity import ProviderIdentity
from auth.server.providers.logins import CodeProvider, Logins
from auth.server.providers.sessions import (
    BROWSER_SECONDS,
    FEW_ENDS,
    MOST_HANDED_OUT,
    MOST_PER_ADDRESS,
    MOST_SESSIONS,
    REFUSAL_KEPT_SECONDS,
    Session,
    Sessions,
)
from auth.server.providers.settings import CodeSettings
from tests.auth.providers.conftest import ADDRESS, ask_again, start_device
from tests.auth.providers.openid_imitation import OpenIdImitation

PROVIDER = CodeProvider(CodeSettings(id="any"))
SOMEBODY = ProviderIdentity("any", "1", "alice")


def begin(table: Sessions, number: int, *, address: str | None = None, now: float = 0) -> Session:
    place = f"address {number}" if address is None else address
    return table.begin(number.to_bytes(32), PROVIDER, "browser", place, now)


def test_an_address_has_its_share_and_no_more() -> None:
    table = Sessions()
    for number in range(MOST_PER_ADDRESS):
        begin(table, number, address=ADDRESS)
    with pytest.raises(TooManyLogins) as full:
        begin(table, 1000, address=ADDRESS)
    assert full.value.status == 429
    assert full.value.retry_after > 0
    begin(table, 1000, address="192.0.2.8")


def test_all_addresses_together_have_a_bound() -> None:
    table = Sessions()
    for number in range(MOST_SESSIONS):
        begin(table, number)
    with pytest.raises(TooManyLogins):
        begin(table, MOST_SESSIONS)
    begin(table, 0)  # a peer that has a place takes its own again
    assert len(table) == MOST_SESSIONS
    begin(table, MOST_SESSIONS, now=BROWSER_SECONDS)  # and time frees them all
    assert len(table) == 1


def test_a_peer_has_one_login_and_the_newest_counts() -> None:
    table = Sessions()
    older = begin(table, 1)
    newer = begin(table, 1)
    assert older.over
    with pytest.raises(LoginExpired):
        table.found(older.id, 0)
    with pytest.raises(LoginExpired):
        table.at_page(older.page_id, 0)
    assert table.found(newer.id, 0) is newer


def test_ids_are_long_and_never_the_same() -> None:
    table = Sessions()
    found = [begin(table, number) for number in range(100)]
    ids = {each.id for each in found} | {each.page_id for each in found}
    assert len(ids) == 200
    assert all(len(each) == 43 for each in ids)


def test_a_refusal_holds_its_place_for_two_minutes_only() -> None:
    table = Sessions()
    session = begin(table, 1)
    table.refuse(session, LoginRefused("No.", reason=LoginReason.DENIED), 100)
    assert table.found(session.id, 100 + REFUSAL_KEPT_SECONDS - 1).refusal is not None
    with pytest.raises(LoginExpired):
        table.found(session.id, 100 + REFUSAL_KEPT_SECONDS)


def test_a_session_expires_at_its_time_and_not_before() -> None:
    table = Sessions()
    session = begin(table, 1)
    assert table.found(session.id, BROWSER_SECONDS - 0.001) is session
    with pytest.raises(LoginExpired):
        table.found(session.id, BROWSER_SECONDS)


def test_a_session_with_a_longer_life_outlives_its_first_end() -> None:
    table = Sessions()
    session = begin(table, 1)
    table.lasts_until(session, 2 * BROWSER_SECONDS)
    assert table.found(session.id, BROWSER_SECONDS) is session
    with pytest.raises(LoginExpired):
        table.found(session.id, 2 * BROWSER_SECONDS)


def test_an_end_forgets_every_way_to_the_session() -> None:
    table = Sessions()
    session = begin(table, 1)
    attempt = LoginAttempt("state", "nonce", "verifier")
    table.send_out(session, attempt, "cookie")
    assert table.on_the_way("state", 0) is session
    table.end(session)
    table.end(session)  # a second time does nothing
    with pytest.raises(LoginExpired):
        table.on_the_way("state", 0)
    assert len(table) == 0
    assert begin(table, 1)


def test_a_delivered_login_frees_its_place_and_can_be_taken_back_for_a_while() -> None:
    table = Sessions()
    session = begin(table, 1, address=ADDRESS)
    session.identity = SOMEBODY
    assert table.hand_out(session) == SOMEBODY
    assert len(table) == 0
    assert table.give_back(session.id, 1)
    assert not table.give_back(session.id, 1)
    assert table.found(session.id, 1).identity == SOMEBODY
    table.hand_out(session)
    begin(table, 1)
    assert not table.give_back(session.id, 1)  # its peer has begun another


def test_the_number_of_delivered_logins_is_bounded() -> None:
    table = Sessions()
    first = begin(table, 0)
    first.identity = SOMEBODY
    table.hand_out(first)
    for number in range(1, MOST_HANDED_OUT + 1):
        session = begin(table, number)
        session.identity = SOMEBODY
        table.hand_out(session)
    assert not table.give_back(first.id, 1)


def test_beginning_again_and_again_leaves_nothing_behind() -> None:
    table = Sessions()
    for number in range(10_000):
        begin(table, number % 3)
    assert len(table) == 3
    assert len(table._ends) <= 2 * 3 + FEW_ENDS + 1


class SessionsMachine(RuleBasedStateMachine):
    """After any events in any order, all indices of the table have the same sessions."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Sessions()
        self.now = 0.0
        self.ever: list[Session] = []

    @rule(peer=st.integers(0, 6), address=st.integers(0, 2))
    def begin(self, peer: int, address: int) -> None:
        self.ever.append(begin(self.table, peer, address=str(address), now=self.now))

    @rule(seconds=st.sampled_from([0.5, 60, 119, 120, 599, 600]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.table.forget_old(self.now)

    @rule(data=st.data(), what=st.sampled_from(["end", "refuse", "go", "back", "finish", "longer"]))
    def act(self, data: st.DataObject, what: str) -> None:
        if not self.ever:
            return
        session = data.draw(st.sampled_from(self.ever))
        if what == "end":
            self.table.end(session)
        elif what == "back":
            self.table.give_back(session.id, self.now)
        elif not session.over:
            if what == "refuse":
                refusal = LoginRefused("No.", reason=LoginReason.DENIED)
                self.table.refuse(session, refusal, self.now)
            elif what == "go":
                state = f"state {len(self.ever)}"
                self.table.send_out(session, LoginAttempt(state, "nonce", "verifier"), "cookie")
            elif what == "longer":
                self.table.lasts_until(session, self.now + 1800)
            elif session.refusal is None:
                session.identity = SOMEBODY
                self.table.hand_out(session)

    @invariant()
    def indices_agree(self) -> None:
        table = self.table
        live = [each for each in self.ever if not each.over]
        assert {id(each) for each in table.all()} == {id(each) for each in live}
        assert all(each.expires > self.now for each in live)
        assert table._by_peer == {each.peer: each for each in live}
        assert table._per_address == Counter(each.address for each in live)
        assert set(table._by_page.values()) <= set(live)
        assert set(table._by_state.values()) <= set(live)
        assert {each.id for each in live} <= {session_id for _, session_id in table._ends}

    def teardown(self) -> None:
        self.now += 10_000
        self.table.forget_old(self.now)
        assert not any(
            (self.table._by_id, self.table._by_page, self.table._by_peer, self.table._by_state)
        )
        assert not self.table._per_address
        assert not self.table._ends


TestSessionsMachine = SessionsMachine.TestCase
TestSessionsMachine.settings = settings(stateful_step_count=30, deadline=None)


async def test_a_thousand_starts_at_once_take_no_more_than_the_share(
    logins: Logins, imitation: OpenIdImitation
) -> None:
    refused = 0

    async def start(number: int) -> None:
        nonlocal refused
        try:
            await start_device(logins, number.to_bytes(32), ADDRESS)
        except TooManyLogins:
            refused += 1

    async with trio.open_nursery() as nursery:
        for number in range(1000):
            nursery.start_soon(start, number)
    assert refused == 1000 - MOST_PER_ADDRESS
    assert imitation.times_asked("/device") == MOST_PER_ADDRESS


async def test_a_second_start_of_a_peer_ends_the_first_even_while_it_starts(
    logins: Logins,
) -> None:
    ended = []

    async def start() -> None:
        try:
            await start_device(logins)
        except LoginExpired as expired:
            ended.append(expired)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(start)
        nursery.start_soon(start)
    assert len(ended) == 1
    assert logins.open_count() == 1


async def test_a_login_that_was_begun_again_does_not_finish_the_older_one(
    logins: Logins, clock: trio.testing.MockClock
) -> None:
    older = await start_device(logins)
    await start_device(logins)
    with pytest.raises(LoginExpired):
        await ask_again(logins, clock, older)
