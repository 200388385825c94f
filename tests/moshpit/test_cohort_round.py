"""Averaging by cohorts: all peers of several groups hold the same bits, whoever dies."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import trio
import trio.testing

from protocols.errors import Busy, DeadlineExceeded, PotluckError, RemoteMisbehaviour
from protocols.guard import Caller
from protocols.identity import PeerId
from protocols.moshpit import cohort_round, handing_on
from protocols.moshpit.agreement_messages import (
    Accepted,
    AgreementMessage,
    Decided,
    Held,
    Proof,
    Result,
)
from protocols.moshpit.ballots import Ballot, Seal, digest_of_parts
from protocols.moshpit.cohort_round import HEADS_ROUND, CohortRounds
from protocols.moshpit.cohorts import Cohort, cohort_of, in_order, turn_of
from protocols.moshpit.coordinator import Coordinator
from protocols.moshpit.encoded_result import chunks, encode_result, part_digests
from protocols.moshpit.group import group_key
from protocols.moshpit.group_round import ROUNDS_UNLED
from protocols.moshpit.handing_down import (
    DECISION,
    MOST_HELD_OF_PEER,
    MOST_SHOWN_TO_PEER,
    OPEN_SECONDS,
    AskBytes,
    AskResult,
    AskShown,
    DecidedPart,
    HandedResult,
    HandedTransfer,
    HandingDown,
    HeadsDecision,
    NoDecision,
    NotOfCohort,
    ResultShelf,
)
from protocols.moshpit.known_peers import WaitingJoins
from protocols.moshpit.layout import Layout, PartCut, ResultCut, Segment
from protocols.moshpit.outcome import Committed, Discarded, Verdict
from protocols.moshpit.roster import hash_order
from protocols.moshpit.round import Round
from protocols.moshpit.verdicts import StartExchange
from protocols.rpc import Empty
from protocols.testing.settings import WorldSettings
from protocols.testing.world import (
    NodeSettings,
    SimulatedNetwork,
    SimulatedWorld,
    run_simulation,
)
from tests.dht.members import simulated
from tests.moshpit.averagers import SETTINGS, VALUES, AveragingPeer, Ended, averagers, mean_of
from tests.moshpit.test_roster import GOOD

replaced = msgspec.structs.replace
COUNT = 4
ONE_MEGABIT = 125_000.0

DECIDED = HeadsDecision(
    GOOD,
    Ballot(0, 0),
    (0,),
    (DecidedPart(0, 0, 4, bytes(32)),),
    4096,
    Proof(Ballot(0, 0), (Seal(0, bytes(64), holds=True),)),
)


class Cohorts:
    """The peers by their cohorts, in the order in which they become head."""

    def __init__(self, peers: Sequence[AveragingPeer]) -> None:
        by_name = {one.peer: one for one in peers}
        numbers = defaultdict(list)
        for peer in in_order(SETTINGS.run, by_name):
            numbers[cohort_of(SETTINGS.run, peer, COUNT)].append(by_name[peer])
        self.of = dict(numbers)
        self.heads = frozenset(members[0].peer for members in self.of.values())
        self.largest = max(self.of.values(), key=len)

    def begin(
        self, one: AveragingPeer, weight: float = 1.0, epoch: int = 0, **more: Any
    ) -> trio.Event:
        number = cohort_of(SETTINGS.run, one.peer, COUNT)
        return one.begin(
            weight=weight,
            epoch=epoch,
            expected=len(self.of[number]),
            cohort=Cohort(number, COUNT, self.heads - {self.of[number][0].peer}),
            **more,
        )


async def ended(
    peers: Sequence[AveragingPeer], events: Sequence[trio.Event], seconds: float = 60.0
) -> list[Ended]:
    with trio.fail_after(seconds):
        for event in events:
            await event.wait()
    return [one.ended[-1] for one in peers]


def check_same(all_ended: Sequence[Ended]) -> None:
    for one in all_ended:
        assert isinstance(one.outcome, Committed), one.outcome
        assert one.result is not None
        assert all_ended[0].result is not None
        assert torch.equal(one.result, all_ended[0].result)
        assert one.outcome.digest == getattr(all_ended[0].outcome, "digest", None)


@simulated
async def test_all_peers_hold_the_average_of_all(world: SimulatedWorld) -> None:
    peers = await averagers(world, 14)
    cohorts = Cohorts(peers)
    found = await ended(peers, [cohorts.begin(one) for one in peers])
    check_same(found)
    for one in found:
        assert isinstance(one.outcome, Committed)
        assert one.outcome.weight == one.outcome.peers == 14
        assert set(one.outcome.members) == cohorts.heads
        assert one.result is not None
        torch.testing.assert_close(one.result.double(), mean_of(peers), rtol=1e-5, atol=1e-6)
    ended_of = dict(zip(peers, found, strict=True))
    for members in cohorts.of.values():  # each has sent its values to the others of its cohort
        sent = [getattr(ended_of[one].outcome, "sent", None) for one in members]
        assert all(one is not None for one in sent)
        assert {one.own for one in sent} == set(range(len(members)))
        assert len({one.cut for one in sent}) == 1


@pytest.mark.slow
@simulated
async def test_heads_that_leave_after_the_step_first_hand_it_down(world: SimulatedWorld) -> None:
    uplink = NodeSettings(upload_bytes_per_second=3 * 4 * VALUES)  # three copies need a second
    peers = await averagers(world, 14, machine=uplink)
    cohorts = Cohorts(peers)
    begun = {one.peer: cohorts.begin(one) for one in peers}

    async def leave(head: AveragingPeer) -> None:
        await begun[head.peer].wait()
        await head.averager.handed_on()
        head.kill()

    async with trio.open_nursery() as nursery:
        for members in cohorts.of.values():
            nursery.start_soon(leave, members[0])
    check_same(await ended(peers, list(begun.values())))


@pytest.mark.slow
@simulated
async def test_a_node_that_leaves_does_not_wait_for_members_that_have_the_result(
    world: SimulatedWorld,
) -> None:
    peers = await averagers(world, 14)
    cohorts = Cohorts(peers)
    await ended(peers, [cohorts.begin(one) for one in peers])
    began = trio.current_time()
    for one in peers:
        await one.averager.handed_on()
    assert trio.current_time() - began < 0.1, "only a last answer may be under way"


@pytest.mark.slow
@simulated
async def test_heads_wait_for_a_cohort_that_takes_longer_to_average(world: SimulatedWorld) -> None:
    """As one with slow links does, if the vector is large. Before, they went on without it after
    the matchmaking time, and most of a run could be in that cohort."""
    peers = await averagers(world, 14)
    for one in peers:
        one.values = 1 << 18  # a mebibyte: 34 s on links of 0.5 Mb/s
    cohorts = Cohorts(peers)
    late = cohorts.largest
    begun = [cohorts.begin(one) for one in peers if one not in late]
    await trio.sleep(SETTINGS.round_seconds / 2)
    begun += [cohorts.begin(one) for one in late]
    check_same(await ended(peers, begun))


@pytest.mark.slow
@simulated
async def test_the_next_in_order_takes_the_place_of_a_head_that_dies(world: SimulatedWorld) -> None:
    peers = await averagers(world, 14)
    cohorts = Cohorts(peers)
    cohort = cohorts.largest
    assert len(cohort) >= 3
    head, others = cohort[0], [one for one in peers if one is not cohort[0]]
    late = next(members[0] for members in cohorts.of.values() if members[0] is not head)
    events = {one: cohorts.begin(one) for one in peers if one is not late}
    await trio.sleep(1.0)  # the cohorts have averaged, and the heads wait for the late one
    head.kill()
    await trio.sleep(0.5)
    events[late] = cohorts.begin(late)
    found = await ended(others, [events[one] for one in others])
    check_same(found)
    assert isinstance(found[0].outcome, Committed)
    assert cohort[1].peer in found[0].outcome.members
    assert found[0].outcome.weight == 14.0, "also what the dead head had brought to its cohort"


@pytest.mark.slow
@simulated
async def test_a_peer_that_has_just_taken_its_state_is_head_after_all_others(
    world: SimulatedWorld,
) -> None:
    peers = await averagers(world, 14)
    cohorts = Cohorts(peers)
    cohort = cohorts.largest
    found = await ended(peers, [cohorts.begin(one, follows=one is cohort[0]) for one in peers])
    check_same(found)
    assert isinstance(found[0].outcome, Committed)
    assert cohort[1].peer in found[0].outcome.members
    assert cohort[0].peer not in found[0].outcome.members


@pytest.mark.slow
@simulated
async def test_who_loses_its_head_and_finds_no_other_does_not_know_whether_there_was_a_step(
    world: SimulatedWorld,
) -> None:
    peers = await averagers(world, 14)
    cohorts = Cohorts(peers)
    cohort = cohorts.largest
    events = [cohorts.begin(one) for one in cohort]
    await trio.sleep(1.0)  # the cohort has averaged, and its head waits for the other heads
    cohort[0].kill()
    found = await ended(cohort[1:], events[1:], 120.0)
    for one in found:
        assert isinstance(one.outcome, Discarded)
        assert one.outcome.in_doubt, "the dead head may have made the step with the others"
        known = set(one.outcome.rounds[-1].members)
        assert known >= cohorts.heads, "a peer that is further and one of these is followed"
        ended_at = [one.exchange_ended for one in one.outcome.rounds]
        assert ended_at[0] is not None
        assert ended_at[1:] == [None], "one exchange, not two"


PATIENCE_SECONDS = SETTINGS.matchmaking_seconds + SETTINGS.round_seconds + 1.1  # with the distance


def decide_nothing(monkeypatch: pytest.MonkeyPatch) -> set[PeerId]:
    """Heads in this set tell their cohort nothing, and stay."""
    silent: set[PeerId] = set()
    honest = HandingDown._decide

    async def decide(self: HandingDown, caller: Caller, request: AskResult) -> HeadsDecision:
        if self._me in silent:
            await trio.sleep_forever()
        return await honest(self, caller, request)

    monkeypatch.setattr(HandingDown, "_decide", decide)
    return silent


@pytest.mark.slow
def test_a_member_gives_up_after_the_time_of_two_heads_however_many_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It waited for each of them for as long as for the first: for an hour in a large cohort."""
    silent = decide_nothing(monkeypatch)

    @simulated
    async def scenario(world: SimulatedWorld) -> None:
        peers = await averagers(world, 14)
        cohorts = Cohorts(peers)
        cohort = cohorts.largest
        assert len(cohort) >= 5
        silent.update(one.peer for one in cohort[:-1])
        *_, event = [cohorts.begin(one) for one in cohort]
        await event.wait()
        ended = cohort[-1].ended[-1]
        assert isinstance(ended.outcome, Discarded)
        assert ended.outcome.in_doubt
        assert PATIENCE_SECONDS < ended.seconds < 2 * PATIENCE_SECONDS + 5.0

    scenario()


@pytest.mark.slow
def test_the_next_head_has_as_much_time_as_one_that_fails_at_the_end_of_its_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    silent = decide_nothing(monkeypatch)

    @simulated
    async def scenario(world: SimulatedWorld) -> None:
        peers = await averagers(world, 14)
        cohorts = Cohorts(peers)
        cohort = cohorts.largest
        silent.add(cohort[0].peer)
        events = {one: cohorts.begin(one) for one in cohort}
        await trio.sleep(PATIENCE_SECONDS - 1.0)
        events |= {one: cohorts.begin(one) for one in peers if one not in cohort}
        others = [one for one in peers if one is not cohort[0]]
        found = await ended(others, [events[one] for one in others])
        check_same(found)
        assert getattr(found[0].outcome, "weight", 0.0) == len(peers)

    scenario()


def in_a_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of a tree, so that small cohorts have parents."""
    monkeypatch.setattr(handing_on, "LEADER_BYTES", 1)
    monkeypatch.setattr(handing_on, "FEWEST_IN_PARTS", 1)


def test_members_with_fast_links_hand_a_result_on_also_if_they_were_in_no_step() -> None:
    """They miss steps if they get results late, and got them late because they had missed steps."""
    fast, slow = 2, 1
    entries = [
        replaced(GOOD.entries[0], peer=PeerId(f"p{number}"), reduces=True, turn=turn)
        for number, turn in enumerate(
            (
                turn_of(follows=False, uplink=fast),
                *(turn_of(follows=False, uplink=slow) for _ in range(2)),
                *(turn_of(follows=True, uplink=fast) for _ in range(2)),
            )
        )
    ]
    half = 1 << 17
    parts = tuple(
        DecidedPart(place, start, start + half, bytes(32)) for place, start in enumerate((0, half))
    )
    decision = replaced(DECIDED, parts=parts)
    layout = Layout((Segment("values", 2 * half),))
    ways = HandedResult(decision, layout, memoryview(b"")).ways(entries, PeerId("p0"))
    assert [ways[PeerId(f"p{number}")].sources for number in range(1, 5)] == [
        ("p3",), ("p3",), (), (),
    ]  # fmt: skip


async def test_a_member_that_asks_while_a_result_is_taken_back_gets_the_next_one() -> None:
    first, next_one = (HandedResult(DECIDED, Layout(()), memoryview(b""), 0) for _ in range(2))
    shelf, found = ResultShelf(()), list[HandedResult]()

    async def ask() -> None:
        found.append(await shelf.found())

    with trio.fail_after(5.0):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await trio.testing.wait_all_tasks_blocked()
            shelf.offer(first)
            shelf.take_back()
            await trio.testing.wait_all_tasks_blocked()
            assert not found
            shelf.offer(next_one)
    assert found == [next_one]


async def test_a_head_that_may_still_receive_the_result_has_time_for_it() -> None:
    """Those that were in the heads' round have all of it."""
    decided, took_its_place, me, *_ = GOOD.members
    layout = Layout((Segment("values", VALUES),))
    decision = replaced(DECIDED, parts=(DecidedPart(0, 0, VALUES, bytes(32)),))
    assert decision.heads == (decided,)
    nobody = SimpleNamespace(serve=lambda *_: None, serve_bulk=lambda *_: None)
    down = HandingDown(SimpleNamespace(peer_id=me), nobody)  # type: ignore[arg-type]
    given: list[float] = []

    async def take(*arguments: Any) -> None:
        *_, offered, seconds, _longest = arguments
        given.append(seconds)
        offered.part_came()

    down._take = take  # type: ignore[method-assign]
    for head in (decided, took_its_place):
        await down.taken(bytes(32), ResultShelf(GOOD.entries), head, decision, layout)
    seconds = (
        HandedResult(decision, layout, memoryview(b"")).ways(GOOD.entries, decided)[me].seconds
    )
    assert seconds > 0.0
    assert given == [OPEN_SECONDS, pytest.approx(OPEN_SECONDS + seconds)]


@pytest.mark.slow
def test_a_result_is_handed_on_part_by_part_as_it_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that had to have all of it first would double the time at each level."""
    in_a_chain(monkeypatch)
    copy_seconds = 4.0
    uplink = NodeSettings(upload_bytes_per_second=4 * VALUES / copy_seconds)

    @simulated
    async def scenario(world: SimulatedWorld) -> None:
        peers = await averagers(world, 14, machine=uplink)
        cohorts = Cohorts(peers)
        found = await ended(peers, [cohorts.begin(one) for one in peers], 120.0)
        check_same(found)
        ended_at = {one.peer: it.ended for one, it in zip(peers, found, strict=True)}
        cohort = cohorts.largest
        took = ended_at[cohort[-1].peer] - ended_at[cohort[0].peer]
        below = len(cohort) - 1
        assert below >= 4
        in_parts = copy_seconds * (1 + (below - 1) / COUNT)
        assert copy_seconds < took < 1.2 * in_parts < 0.6 * below * copy_seconds

    scenario()


class TakesSlowly:
    """A transfer to a member that takes a KiB per second."""

    async def accept(self, _said: Empty) -> None:
        pass

    async def send_chunk(self, chunk: memoryview) -> None:
        await trio.sleep(len(chunk) / 1024)


async def test_a_member_that_reads_slowly_keeps_no_result_in_memory(
    autojump_clock: trio.testing.MockClock,  # noqa: ARG001 - an argument, or it is not used
) -> None:
    """It could keep those of four steps at once, for hours."""
    entries = [replaced(GOOD.entries[0], peer=PeerId(name)) for name in ("head", "slow")]
    values = 1 << 20
    part = DecidedPart(0, 0, values, bytes(32))
    decision = replaced(DECIDED, parts=(part,), chunk_bytes=1 << 18)
    layout = Layout((Segment("values", values),))
    network: Any = SimpleNamespace(peer_id=PeerId("head"))
    rpc: Any = SimpleNamespace(serve=lambda *_: None, serve_bulk=lambda *_: None)
    caller: Any = SimpleNamespace(peer=PeerId("slow"))
    transfer: Any = TakesSlowly()
    down = HandingDown(network, rpc)
    with down.shelf(bytes(32), entries) as shelf:
        shelf.offer(HandedResult(decision, layout, memoryview(bytes(4 * values))))
        with pytest.raises(DeadlineExceeded, match="too slowly"), trio.fail_after(600.0):
            await down._hand(caller, transfer, AskBytes(bytes(32), 0))


Hands = Callable[[HandingDown, Caller, HandedTransfer, AskBytes], Awaitable[None]]


def hands_like(liars: set[PeerId], hands: Hands) -> Hands:
    """How nodes hand the bytes down if these do it in a way of their own."""
    honest = HandingDown._hand

    async def hand(
        self: HandingDown, caller: Caller, transfer: HandedTransfer, request: AskBytes
    ) -> None:
        await (hands if self._me in liars else honest)(self, caller, transfer, request)

    return hand


async def nothing(
    _self: HandingDown, _caller: Caller, _transfer: HandedTransfer, _request: AskBytes
) -> None:
    await trio.sleep_forever()


async def other_bytes(
    self: HandingDown, caller: Caller, transfer: HandedTransfer, request: AskBytes
) -> None:
    async with self._offered_to(caller.peer, request.round_id) as (_, offered):
        await transfer.accept(Empty())
        end = 0
        for part in range(len(offered.decision.parts)):
            await offered.until_here(part)
        changed = bytearray(offered.memory)
        changed[-7] ^= 1  # in the last part, after the others are taken
        for chunk in chunks(offered.layout, offered.decision.cut):
            await transfer.send_chunk(changed[end : end + chunk.encoded_bytes])
            end += chunk.encoded_bytes
        await transfer.finish(Empty())


async def too_little(
    self: HandingDown, caller: Caller, transfer: HandedTransfer, request: AskBytes
) -> None:
    """It goes on, and is never seen to stall."""
    assert isinstance(self._network, SimulatedNetwork)
    self._network.world.throttle(self._network, upload_bytes_per_second=TOO_LITTLE)
    await HONEST(self, caller, transfer, request)


HONEST = HandingDown._hand
TOO_LITTLE = 6_000.0  # bytes per second: a chunk in 3 s, and all in 44 s
FAULTS: dict[str, Hands] = {
    "nothing": nothing,
    "other bytes": other_bytes,
    "too little": too_little,
}


@pytest.mark.slow
def test_a_member_whose_downlink_is_slow_takes_the_result_from_one_whose_uplink_is_fast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its downlink, too, says how long the bytes need to reach it."""
    settings = replace(SETTINGS, up_bytes_per_second=1e8)
    honest = HandingDown.taken

    async def taken(self: HandingDown, *what: Any) -> HandedResult:
        assert isinstance(self._network, SimulatedNetwork)
        if self._me in slow:
            self._network.world.throttle(self._network, download_bytes_per_second=ONE_MEGABIT)
        return await honest(self, *what)

    slow: set[PeerId] = set()
    monkeypatch.setattr(HandingDown, "taken", taken)

    async def scenario(world: SimulatedWorld) -> None:
        peers = await averagers(world, 14, settings=settings)
        for one in peers:
            one.values = 1 << 20  # 4 MiB: 34 s
        cohorts = Cohorts(peers)
        slow.add(cohorts.largest[1].peer)
        check_same(await ended(peers, [cohorts.begin(one) for one in peers]))

    run_simulation(scenario, settings=WorldSettings(window_bytes=64 << 10))


@pytest.mark.slow
@pytest.mark.parametrize("fault", [*FAULTS])
def test_a_parent_that_hands_down(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    in_a_chain(monkeypatch)
    liars: set[PeerId] = set()
    asked: list[PeerId] = []
    first_parts: list[int] = []
    honest = HandingDown._hand

    async def noted(
        self: HandingDown, caller: Caller, transfer: HandedTransfer, request: AskBytes
    ) -> None:
        first_parts.append(request.part)
        await honest(self, caller, transfer, request)

    async def hands(
        self: HandingDown, caller: Caller, transfer: HandedTransfer, request: AskBytes
    ) -> None:
        asked.append(caller.peer)
        await FAULTS[fault](self, caller, transfer, request)

    monkeypatch.setattr(HandingDown, "_hand", noted)
    monkeypatch.setattr(HandingDown, "_hand", hands_like(liars, hands))

    @simulated
    async def scenario(world: SimulatedWorld) -> None:
        peers = await averagers(world, 14)
        for one in peers:
            one.values = 4 * VALUES
        cohorts = Cohorts(peers)
        cohort = cohorts.largest
        liars.add(cohort[1].peer)
        check_same(await ended(peers, [cohorts.begin(one) for one in peers]))
        assert asked[0] == cohort[2].peer
        checked = {"nothing": {0}, "other bytes": {0, COUNT - 1}, "too little": {0, 1}}[fault]
        assert set(first_parts) == checked, "what was checked is not sent again"

    scenario()


Lie = Callable[[HeadsDecision], HeadsDecision]


def of_another_round(said: HeadsDecision) -> HeadsDecision:
    return replaced(said, roster=replaced(said.roster, nonce=bytes(16)))


def with_other_bytes(said: HeadsDecision) -> HeadsDecision:
    """As its reducer, it could sign other bytes for its own part."""
    return replaced(said, parts=(replaced(said.parts[0], digest=bytes(32)), *said.parts[1:]))


def of_one_part(said: HeadsDecision) -> HeadsDecision:
    end = said.parts[-1].stop
    return replaced(said, parts=(replaced(said.parts[0], stop=end, digest=bytes(32)),))


def cut_elsewhere(said: HeadsDecision) -> HeadsDecision:
    """With some codecs as many bytes, which then are other values."""
    first, second, *others = said.parts
    place = first.stop - 1
    cut = replaced(first, stop=place), replaced(second, start=place), *others
    return replaced(said, parts=cut)


def of_another_attempt(said: HeadsDecision) -> HeadsDecision:
    return replaced(said, attempt=replaced(said.attempt, number=said.attempt.number + 1))


def of_another_ballot(said: HeadsDecision) -> HeadsDecision:
    ballot = said.proof.ballot
    later = replaced(ballot, number=ballot.number + 1)
    return replaced(said, proof=replaced(said.proof, ballot=later))


def with_seals(said: HeadsDecision, seals: Sequence[Seal]) -> HeadsDecision:
    return replaced(said, proof=replaced(said.proof, seals=tuple(seals)))


def one_seal_for_all(said: HeadsDecision) -> HeadsDecision:
    first, *others = said.proof.seals
    return with_seals(said, [first, *(replaced(one, signature=first.signature) for one in others)])


LIES: dict[str, Lie] = {
    "a part less": lambda said: replaced(said, parts=said.parts[1:]),
    "members that are not listed": lambda said: replaced(said, members=(*said.members, 200)),
    "a member less": lambda said: replaced(said, members=said.members[1:]),
    "another round": of_another_round,
    "other bytes": with_other_bytes,
    "one part with values of its own": of_one_part,
    "parts that are cut elsewhere": cut_elsewhere,
    "another attempt": of_another_attempt,
    "another ballot": of_another_ballot,
    "too few seals": lambda said: with_seals(said, said.proof.seals[1:]),
    "one seal twice": lambda said: with_seals(said, [said.proof.seals[0]] * COUNT),
    "one seal for all": one_seal_for_all,
    "seals of heads that do not hold it": lambda said: with_seals(
        said, [replaced(one, holds=False) for one in said.proof.seals]
    ),
    "seals of strangers": lambda said: with_seals(
        said, [*said.proof.seals[1:], replaced(said.proof.seals[0], member=200)]
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("lie", LIES)
def test_a_head_that_hands_down(
    lie: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is named, and harms nobody but its own cohort. Its members have others show them the step,
    and do not believe what it shows."""
    liars: set[PeerId] = set()
    honest, honestly_shown = HandingDown._decide, HandingDown._show

    async def decide(self: HandingDown, caller: Caller, request: AskResult) -> HeadsDecision:
        decision = await honest(self, caller, request)
        return LIES[lie](decision) if self._me in liars else decision

    async def show(self: HandingDown, caller: Caller, request: AskShown) -> HeadsDecision:
        decision = await honestly_shown(self, caller, request)
        return LIES[lie](decision) if self._me in liars else decision

    monkeypatch.setattr(HandingDown, "_decide", decide)
    monkeypatch.setattr(HandingDown, "_show", show)

    @simulated
    async def scenario(world: SimulatedWorld) -> None:
        peers = await averagers(world, 14)
        cohorts = Cohorts(peers)
        cohort = cohorts.largest
        liars.add(cohort[0].peer)
        events = {one: cohorts.begin(one) for one in peers}
        others = [one for one in peers if one not in cohort[1:]]
        check_same(await ended(others, [events[one] for one in others]))
        for one in await ended(cohort[1:], [events[one] for one in cohort[1:]]):
            assert isinstance(one.outcome, Discarded)
            assert one.outcome.in_doubt or one.outcome.begun_without
        assert all(cohort[0].peer in one.averager.idle_heads for one in cohort[1:2])
        assert f"{cohort[0].peer}, the head of this peer's cohort, lies" in caplog.text
        made = next(one for one in others if one.peer not in cohorts.heads)
        asks, outcome = cohort[1].averager, made.ended[-1].outcome
        assert isinstance(outcome, Committed)
        assert await asks.step_shown_by(made.peer, 0) is None, "it has not made the step yet"
        for one in others:
            one.averager.confirm(applied=True)
        assert await asks.step_shown_by(made.peer, 0) == outcome.digest
        for one in cohort[0], cohort[2]:
            assert await asks.step_shown_by(one.peer, 0) is None
        with pytest.raises(NoDecision):
            await asks.step_shown_by(made.peer, 1)
        for _ in range(MOST_SHOWN_TO_PEER - 1):
            await asks.step_shown_by(made.peer, 0)
        with pytest.raises(Busy):
            await asks.step_shown_by(made.peer, 0)

    scenario()


def test_a_head_that_says_twice_that_nothing_was_decided_is_the_last_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others show the steps. It stayed the first, and its cohort missed one after the other."""
    liars: set[PeerId] = set()
    honest = HandingDown._decide

    async def decide(self: HandingDown, caller: Caller, request: AskResult) -> HeadsDecision:
        if self._me in liars:
            raise NoDecision("The heads of the cohorts made no step.")
        return await honest(self, caller, request)

    monkeypatch.setattr(HandingDown, "_decide", decide)

    @simulated
    async def scenario(world: SimulatedWorld) -> None:
        peers = await averagers(world, 14)
        cohorts = Cohorts(peers)
        cohort = cohorts.largest
        liars.add(cohort[0].peer)
        asks = cohort[1].averager
        for epoch in range(2):
            assert not asks.idle_heads, "an honest one comes too late to the others now and then"
            events = {one: cohorts.begin(one, epoch=epoch) for one in peers}
            others = [one for one in peers if one not in cohort[1:]]
            check_same(await ended(others, [events[one] for one in others]))
            for one in await ended(cohort[1:], [events[one] for one in cohort[1:]]):
                assert isinstance(one.outcome, Discarded)
                assert one.outcome.in_doubt
            made = next(one for one in others if one.peer not in cohorts.heads)
            made.averager.confirm(applied=True)
            for _ in range(2):
                assert await asks.step_shown_by(made.peer, epoch) is not None
        assert asks.idle_heads == liars

    scenario()


def two_of_a_cohort() -> list[PeerId]:
    names = (PeerId(f"p{number}") for number in itertools.count())
    of_one = (one for one in names if cohort_of(SETTINGS.run, one, COUNT) == 0)
    return [next(of_one), next(of_one)]


@simulated
async def test_nobody_makes_a_step_of_a_list_with_a_cohort_twice_so_a_head_without_it_asks_nobody(
    world: SimulatedWorld,
) -> None:
    (peer,) = await averagers(world, 1)
    for verdict in (Verdict.COMMITTED, Verdict.LEFT_OUT):
        found: Any = SimpleNamespace(
            verdict=verdict, group=SimpleNamespace(members=two_of_a_cohort())
        )
        mine: Any = SimpleNamespace(statistics=None)
        outcome = peer.averager._cohorts._outcome(
            mine, Cohort(0, COUNT, frozenset()), found, torch.empty(0)
        )
        assert isinstance(outcome, Discarded)
        assert "two heads" in outcome.reason
        assert not outcome.in_doubt


@pytest.mark.slow
def test_a_member_takes_nothing_of_a_list_with_two_of_one_cohort(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if only one of them is in the result: those of one cohort could be the quorum."""

    async def is_signed(*_: Any) -> None:
        pass

    monkeypatch.setattr(HeadsDecision, "check", is_signed)

    @simulated
    async def scenario(world: SimulatedWorld) -> None:
        (peer,) = await averagers(world, 1)
        rounds = peer.averager._cohorts
        twins = [replaced(GOOD.entries[0], peer=one) for one in two_of_a_cohort()]
        said = replaced(DECIDED, roster=replaced(GOOD, entries=tuple(twins)), members=(0,))
        asked: Any = SimpleNamespace(
            terms=None, layout=None, known=(), cohort=Cohort(0, COUNT, frozenset())
        )
        with pytest.raises(RemoteMisbehaviour, match="a cohort twice"):
            await rounds._check(said, asked)

    scenario()


def without_seal(message: AgreementMessage) -> AgreementMessage:
    return replaced(message, seal=None) if isinstance(message, Accepted) else message


def with_a_seal_of_nothing(message: AgreementMessage) -> AgreementMessage:
    if isinstance(message, Accepted) and message.seal is not None:
        return replaced(message, seal=replaced(message.seal, signature=bytes(64)))
    return message


def without_proof(message: AgreementMessage) -> AgreementMessage:
    return replaced(message, proof=None) if isinstance(message, Decided) else message


@pytest.mark.slow
@pytest.mark.parametrize("says", [without_seal, with_a_seal_of_nothing, without_proof])
def test_a_head_that_proves_nothing_to_the_other_heads(
    says: Callable[[AgreementMessage], AgreementMessage], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The acceptance of such a head does not count, or no cohort could check the result. And a
    decision is believed only if it is proven: another head coordinates then."""
    liars: set[PeerId] = set()
    honest = Round._sealed

    def sealed(self: Round, message: AgreementMessage) -> AgreementMessage:
        found = honest(self, message)
        return says(found) if self._peers[self._task.group.me] in liars else found

    monkeypatch.setattr(Round, "_sealed", sealed)

    @simulated
    async def scenario(world: SimulatedWorld) -> None:
        peers = await averagers(world, 14)
        cohorts = Cohorts(peers)
        in_order_of_lead = sorted(cohorts.heads, key=partial(hash_order, heads_key(0)))
        liars.add(in_order_of_lead[0 if says is without_proof else 1])
        found = await ended(peers, [cohorts.begin(one) for one in peers])
        check_same(found)
        assert getattr(found[0].outcome, "weight", 0.0) == len(peers)

    scenario()


@pytest.mark.slow
def test_a_head_that_lets_all_accept_what_nobody_holds_hands_nothing_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the middle of the exchange it coordinates a ballot of its own, and claims there that its
    values were proposed before. The others may not refuse that: it could be true."""
    liars: set[PeerId] = set()
    proposed: dict[int, Result] = {}
    attempt, choose = Round._attempt, Coordinator._choose

    async def take_over(self: Round, start: StartExchange) -> None:
        group, layout = self._task.group, self._task.layout
        if not self._task.sealed or self._peers[group.me] not in liars:
            await attempt(self, start)
            return
        assert self._buffers is not None
        values, agreement = self._buffers.result.fill_(7.0), self._agreement
        self._cut = ResultCut((PartCut(0, 0, layout.values),), SETTINGS.chunk_bytes)
        digests = part_digests(encode_result(values, layout, self._cut), layout, self._cut)
        result = Result(start.ballot, start.members, digest_of_parts(digests))
        agreement._exchange.running = None
        agreement._exchange.held = Held(start.ballot, result.digest, ())
        proposed[id(agreement._desk)] = result
        agreement.next_ballot()
        self._carry_out()

    def propose(self: Coordinator) -> None:
        result = proposed.get(id(self._desk))
        choose(self) if result is None else self._propose(result, "")

    monkeypatch.setattr(Round, "_attempt", take_over)
    monkeypatch.setattr(Coordinator, "_choose", propose)
    monkeypatch.setattr(cohort_round, "most_hold", lambda _: True)  # which it would not ask

    @simulated
    async def scenario(world: SimulatedWorld) -> None:
        peers = await averagers(world, 14)
        cohorts = Cohorts(peers)
        liars.add(cohorts.largest[0].peer)
        found = await ended(peers, [cohorts.begin(one) for one in peers], 200.0)
        assert proposed
        made = [
            one.peer
            for one, it in zip(peers, found, strict=True)
            if isinstance(it.outcome, Committed)
        ]
        assert made == [*liars]

    scenario()


@pytest.mark.slow
@pytest.mark.parametrize("was_in_a_step", [False, True])
def test_a_member_takes_nothing_of_heads_that_it_does_not_know(was_in_a_step: bool) -> None:
    """It knows those of the last step, too: what slots tell may be older. In a large run that was
    cut, most members refused the next step, and had to fetch it."""

    @simulated
    async def scenario(world: SimulatedWorld) -> None:
        peers = await averagers(world, 14)
        cohorts = Cohorts(peers)
        if was_in_a_step:
            check_same(await ended(peers, [cohorts.begin(one) for one in peers]))
        others = frozenset(one.peer for one in peers) - cohorts.heads
        events = {one: cohorts.begin(one, epoch=1) for one in peers if one.peer in cohorts.heads}
        for number, members in cohorts.of.items():
            told = Cohort(number, COUNT, others - {one.peer for one in members})
            for one in members[1:]:
                events[one] = one.begin(epoch=1, expected=len(members), cohort=told)
        found = await ended(list(events), list(events.values()))
        if was_in_a_step:
            check_same(found)
        for one, it in zip(events, found, strict=True):
            if one.peer not in cohorts.heads and not was_in_a_step:
                assert isinstance(it.outcome, Discarded)
                assert "too few of the heads that are known" in it.outcome.reason

    scenario()


@pytest.mark.parametrize("needs", [0, 5])
def test_heads_make_no_step_if_all_that_were_known_have_died(needs: int) -> None:
    """They may have decided, and have told a few. It ends with the wait for most of the last step,
    or heads that never come could stop the run for good."""

    @simulated
    async def scenario(world: SimulatedWorld) -> None:
        peers = await averagers(world, 14)
        cohorts = Cohorts(peers)
        heads = [members[0] for members in cohorts.of.values()]
        others = [one for one in peers if one not in heads]
        events = {one: cohorts.begin(one, fewest=needs) for one in peers if one is not heads[0]}
        await trio.sleep(1.0)  # the cohorts have averaged, and the heads wait for the first
        for one in heads:
            one.kill()
        found = await ended(others, [events[one] for one in others])
        made = [one for one in found if isinstance(one.outcome, Committed)]
        assert bool(made) is (needs == 0)
        reasons = [one.outcome.reason for one in found if isinstance(one.outcome, Discarded)]
        assert any("too few of the heads" in one for one in reasons), reasons

    scenario()


async def test_a_list_of_one_goes_without_the_known_heads_only_if_it_is_of_the_own_cohort() -> None:
    """Anybody can sign a list of peers of its own."""
    known = (frozenset(GOOD.members),)
    passed: list[object] = []

    async def check(_terms: object, _layout: object, heads: object) -> None:
        passed.append(heads)

    rounds = object.__new__(CohortRounds)
    rounds._run = SETTINGS.run
    own, other = (
        next(one for one in GOOD.members if cohort_of(SETTINGS.run, one, COUNT) == number)
        for number in range(2)
    )
    asked: Any = SimpleNamespace(
        terms=None, layout=None, known=known, may_be_one=True, cohort=Cohort(0, COUNT)
    )

    def list_of(*members: str) -> Any:
        return SimpleNamespace(check=check, roster=SimpleNamespace(members=members))

    await rounds._check(list_of(own), asked)
    with pytest.raises(NoDecision):
        await rounds._check(list_of(other), asked)
    await rounds._check(list_of(own, other), asked)
    assert passed == [(), known, known]


@simulated
async def test_a_cohort_that_is_all_that_is_left_makes_the_step_by_itself(
    world: SimulatedWorld,
) -> None:
    """But not those of it that wait for most of the last step."""
    peers = await averagers(world, 14)
    cohorts = Cohorts(peers)
    left = cohorts.largest
    assert len(left) > 3
    for one in peers:
        if one not in left:
            one.kill()
    cohort = Cohort(cohort_of(SETTINGS.run, left[0].peer, COUNT), COUNT)
    waits = left[1]
    events = [
        one.begin(expected=len(left), cohort=cohort, fewest=8 if one is waits else 0)
        for one in left
    ]
    found = await ended(left, events)
    refused = found.pop(1).outcome
    assert isinstance(refused, Discarded)
    assert "without any other head" in refused.reason
    check_same(found)
    assert isinstance(found[0].outcome, Committed)
    assert found[0].outcome.peers == len(left)


@pytest.mark.slow
@simulated
async def test_a_stranger_learns_no_decision(world: SimulatedWorld) -> None:
    peers = await averagers(world, 14)
    cohorts = Cohorts(peers)
    found = await ended(peers, [cohorts.begin(one) for one in peers])
    check_same(found)
    cohort, other = sorted(cohorts.of.values(), key=len)[-2:]
    round_id = next(iter(cohort[0].averager._cohorts._down._shelves))
    with pytest.raises(NotOfCohort):
        await other[1].rpc.call(cohort[0].peer, DECISION, AskResult(round_id), timeout=5.0)


@pytest.mark.slow
@pytest.mark.parametrize("lists_both", [False, True])
def test_a_cohort_counts_once_whoever_comes_as_its_head(
    lists_both: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A second peer of a cohort goes to the heads' round, out of turn. A leader that lists it costs
    all the round, and is not followed where it would lead the next."""
    if lists_both:
        monkeypatch.setattr(WaitingJoins, "seated", property(list))
    simulated(partial(a_second_head_comes, lists_both, caplog))()


def heads_key(epoch: int) -> str:
    return group_key(SETTINGS.run, epoch, HEADS_ROUND, f"{COUNT}.heads")


async def a_second_head_comes(
    lists_both: bool, caplog: pytest.LogCaptureFixture, world: SimulatedWorld
) -> None:
    peers = await averagers(world, 14)
    cohorts = Cohorts(peers)
    cohort = cohorts.largest
    intruder = cohort[-1]
    late = next(members[0] for members in cohorts.of.values() if members is not cohort)
    events = {one: cohorts.begin(one) for one in peers if one not in (intruder, late)}
    intruder.begin(
        epoch=0,
        expected=1,
        cohort=Cohort(COUNT, COUNT, cohorts.heads),  # of a cohort of its own
    )
    await trio.sleep(1.0)
    led = min(cohorts.heads, key=lambda one: hash_order(heads_key(0), one))
    for one in peers:
        doubts = one.averager._rounds._doubts
        doubts.led_nowhere(led)
        doubts.were_in_vain([led])
    events[late] = cohorts.begin(late)
    others = [one for one in peers if one is not intruder]
    found = await ended(others, [events[one] for one in others])
    if lists_both:
        assert all(isinstance(one.outcome, Discarded) for one in found)
        said = f"has listed two heads of a cohort. It is not followed here for {2 * ROUNDS_UNLED} "
        assert said in caplog.text, "it is not the first time"
        epoch = next(
            epoch
            for epoch in itertools.count(1)
            if led != min(cohorts.heads, key=lambda one: hash_order(heads_key(epoch), one))
        )
        found = await ended(others, [cohorts.begin(one, epoch=epoch) for one in others])
    check_same(found)
    assert getattr(found[0].outcome, "weight", 0.0) == len(others)


@simulated
async def test_a_peer_that_asks_for_unknown_rounds_takes_no_place_from_others(
    world: SimulatedWorld,
) -> None:
    stranger, other, asked = await averagers(world, 3)

    async def ask(one: AveragingPeer, number: int) -> None:
        request = AskResult(bytes([number]) * 32)
        with pytest.raises(PotluckError):
            await one.rpc.call(asked.peer, DECISION, request, timeout=60.0)

    async with trio.open_nursery() as nursery:
        for number in range(MOST_HELD_OF_PEER):
            nursery.start_soon(ask, stranger, number)
        await trio.sleep(1.0)
        with pytest.raises(Busy):
            await stranger.rpc.call(asked.peer, DECISION, AskResult(bytes(32)), timeout=60.0)
        with pytest.raises(DeadlineExceeded):  # after it was held, like the first
            await other.rpc.call(asked.peer, DECISION, AskResult(bytes(32)), timeout=60.0)
