"""A peer that breaks the rules of matchmaking: the answers that it gets, and the harm it can do."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
import trio

from protocols.errors import PotluckError
from protocols.guard import Caller
from protocols.moshpit.gathering_effects import Reply
from protocols.moshpit.matchmaking import Matchmaker, group_key
from protocols.moshpit.matchmaking_messages import (
    INVITE,
    JOIN,
    STILL_THERE,
    Invitation,
    InvitationAnswer,
    JoinAnswer,
    JoinReply,
    JoinRequest,
    Place,
)
from protocols.moshpit.roster import (
    NONCE_BYTES,
    Entry,
    ImpossibleNumber,
    NotSigned,
    Offer,
    OtherLayout,
    Roster,
    StaleEpoch,
    Terms,
    WrongLeader,
    sign_entry,
    sign_roster,
)
from protocols.rpc import Empty
from protocols.testing.world import SimulatedWorld
from tests.moshpit.gatherers import (
    EPOCH,
    KEY,
    LAYOUT,
    Found,
    Gatherer,
    find,
    find_all,
    gatherers,
    in_order,
    simulated,
)

TERMS = Terms(KEY, EPOCH, LAYOUT)
NONCE = bytes(NONCE_BYTES)


def entry(who: Gatherer, leader: Gatherer, terms: Terms = TERMS) -> Entry:
    return sign_entry(who.network.identity, terms, leader.peer, Offer(1.0), NONCE)


async def refusal(who: Gatherer, leader: Gatherer, request: JoinRequest) -> PotluckError:
    with pytest.raises(PotluckError) as caught:
        await who.rpc.call(leader.peer, JOIN, request, timeout=5.0)
    assert caught.value.what
    assert caught.value.why
    assert caught.value.advice
    return caught.value


@simulated
async def test_bad_joins_are_refused_by_name(world: SimulatedWorld) -> None:
    leader, hostile, victim = in_order(await gatherers(world, 3))
    good = entry(hostile, leader)
    other = Terms(KEY, EPOCH, bytes(32))
    old_key = group_key("poem", EPOCH - 1, 0, "all")
    old = Terms(old_key, EPOCH - 1, LAYOUT)
    bad: list[tuple[type[PotluckError], JoinRequest]] = [
        (NotSigned, JoinRequest(TERMS, entry(victim, leader))),
        (NotSigned, JoinRequest(TERMS, entry(hostile, victim))),
        (NotSigned, JoinRequest(TERMS, msgspec.structs.replace(good, weight=1e9))),
        (ImpossibleNumber, JoinRequest(TERMS, msgspec.structs.replace(good, weight=float("inf")))),
        (OtherLayout, JoinRequest(other, entry(hostile, leader, other))),
        (StaleEpoch, JoinRequest(Terms(KEY, 3, LAYOUT), good)),
        (StaleEpoch, JoinRequest(old, entry(hostile, leader, old))),
    ]
    found = Found()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(find, leader, leader.search(expected=2), found)
        await trio.sleep(0.2)
        for error, request in bad:
            assert type(await refusal(hostile, leader, request)) is error
        nursery.start_soon(find, victim, victim.search(), found)
    assert len(found.groups) == 2


@simulated
async def test_an_invalid_key_is_refused(world: SimulatedWorld) -> None:
    one, other = await gatherers(world, 2)
    terms = Terms("abc", EPOCH, LAYOUT)
    answer = await one.rpc.call(other.peer, INVITE, Invitation(terms), timeout=5.0)
    assert answer == InvitationAnswer(Reply.NOT_HERE)
    join = JoinRequest(terms, entry(one, other, terms))
    assert (await one.rpc.call(other.peer, JOIN, join, timeout=5.0)).reply == JoinReply.NOT_HERE


@simulated
async def test_nobody_has_to_lead_out_of_turn(world: SimulatedWorld) -> None:
    first, second = in_order(await gatherers(world, 2))
    found = Found()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(find, second, second.search(seconds=1.0), found)
        await trio.sleep(0.2)
        request = JoinRequest(TERMS, entry(first, second))
        assert type(await refusal(first, second, request)) is WrongLeader


@simulated
async def test_a_flood_of_joins_of_one_peer_is_one_join(world: SimulatedWorld) -> None:
    leader, hostile, honest = in_order(await gatherers(world, 3))
    answers: list[JoinAnswer] = []

    async def join() -> None:
        request = JoinRequest(TERMS, entry(hostile, leader), patience_ms=60_000)
        answers.append(await hostile.rpc.call(leader.peer, JOIN, request, timeout=30.0))

    found = Found()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(find, leader, leader.search(expected=3), found)
        await trio.sleep(0.2)
        for _ in range(50):
            nursery.start_soon(join)
        await trio.sleep(0.2)
        assert sum(answer.reply == JoinReply.NOT_HERE for answer in answers) == 49
        nursery.start_soon(find, honest, honest.search(), found)
    assert len(found.groups) == 2
    assert sum(answer.reply == JoinReply.LISTED for answer in answers) == 1


Lie = Callable[[Gatherer, JoinRequest], JoinAnswer]


class LyingMatchmaker(Matchmaker):
    """Honest, until it is given a lie to answer joins with."""

    lie: Callable[[JoinRequest], JoinAnswer] | None = None

    async def _join(self, caller: Caller, request: JoinRequest) -> JoinAnswer:
        if self.lie is not None:
            return self.lie(request)
        return await super()._join(caller, request)


def changed_entry(hostile: Gatherer, request: JoinRequest) -> JoinAnswer:
    theirs = msgspec.structs.replace(request.entry, weight=0.0)
    entries = [entry(hostile, hostile), theirs]
    roster = sign_roster(hostile.network.identity, TERMS, entries, 1, NONCE)
    return JoinAnswer(JoinReply.LISTED, roster)


def without_us(hostile: Gatherer, _request: JoinRequest) -> JoinAnswer:
    roster = sign_roster(hostile.network.identity, TERMS, [entry(hostile, hostile)], 1, NONCE)
    return JoinAnswer(JoinReply.LISTED, roster)


def of_a_stranger(hostile: Gatherer, request: JoinRequest) -> JoinAnswer:
    roster: Roster = sign_roster(
        hostile.network.identity, TERMS, [entry(hostile, hostile), request.entry], 1, NONCE
    )
    return JoinAnswer(JoinReply.LISTED, msgspec.structs.replace(roster, signature=bytes(64)))


def an_empty_list(_hostile: Gatherer, _request: JoinRequest) -> JoinAnswer:
    return JoinAnswer(JoinReply.LISTED)


def an_unknown_answer(_hostile: Gatherer, _request: JoinRequest) -> JoinAnswer:
    return JoinAnswer(200)


def sent_back_to_itself(_hostile: Gatherer, request: JoinRequest) -> JoinAnswer:
    return JoinAnswer(JoinReply.SENT_ON, places=(Place(request.entry.peer),))


def a_group_of_others(hostile: Gatherer, _request: JoinRequest) -> JoinAnswer:
    return JoinAnswer(JoinReply.REGROUPED, places=(Place(hostile.peer),))


def always_regrouped(hostile: Gatherer, request: JoinRequest) -> JoinAnswer:
    places = (Place(hostile.peer), Place(request.entry.peer))
    return JoinAnswer(JoinReply.REGROUPED, places=places)


def an_invented_group(hostile: Gatherer, _request: JoinRequest) -> JoinAnswer:
    entries = [entry(hostile, hostile)] * 5
    roster = sign_roster(hostile.network.identity, TERMS, entries, 1, NONCE)
    return JoinAnswer(JoinReply.STARTED, roster)


LIES: list[Lie] = [
    changed_entry,
    without_us,
    of_a_stranger,
    an_empty_list,
    an_unknown_answer,
    sent_back_to_itself,
    a_group_of_others,
    always_regrouped,
    an_invented_group,
]


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
def test_a_leader_that_lies_is_passed_over(lie: Lie) -> None:
    @simulated
    async def scenario(world: SimulatedWorld) -> None:
        hostile, *honest = in_order(await gatherers(world, 3, matchmaker=LyingMatchmaker))
        assert isinstance(hostile.matchmaker, LyingMatchmaker)
        hostile.matchmaker.lie = lambda request: lie(hostile, request)
        with trio.move_on_after(0.5):  # its slot stays
            await hostile.matchmaker.find_group(hostile.search())
        found = await find_all(honest)
        assert len(found.groups) == 2
        for group in found.groups.values():
            assert hostile.peer not in group.members
        assert found.slowest < 2.0

    scenario()


@simulated
async def test_invitations_for_what_nobody_looks_for_are_answered_so(world: SimulatedWorld) -> None:
    one, other = await gatherers(world, 2)
    answer = await one.rpc.call(other.peer, INVITE, Invitation(TERMS), timeout=5.0)
    assert answer == InvitationAnswer(Reply.NOT_HERE)
    join = JoinRequest(TERMS, entry(one, other))
    assert (await one.rpc.call(other.peer, JOIN, join, timeout=5.0)).reply == JoinReply.NOT_HERE
    assert await one.rpc.call(other.peer, STILL_THERE, Empty(), timeout=5.0) == Empty()
