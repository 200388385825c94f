"""Leaders that are alive but do not lead: they hold up one round, and are not followed again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import trio

from protocols.identity import PeerId
from protocols.moshpit.gathering import LeadOrFollow
from protocols.moshpit.group import group_key
from protocols.moshpit.group_round import ROUNDS_UNLED, Doubts
from protocols.moshpit.roster import hash_order
from protocols.moshpit.round import Round
from protocols.moshpit.verdicts import Effect, Send
from protocols.testing.world import SimulatedWorld
from tests.moshpit.averagers import (
    SETTINGS,
    AveragingPeer,
    Ended,
    average_all,
    averagers,
    check_no_private_mix,
    peer_in,
)
from tests.moshpit.gatherers import play
from tests.moshpit.rogues import KeepsItsValues

SOON_SECONDS = 12.0
AT_ONCE_SECONDS = 3.0
HONEST = 4

Misbehaves = Callable[[pytest.MonkeyPatch, PeerId], None]


def never_closes_its_list(monkeypatch: pytest.MonkeyPatch, rogue: PeerId) -> None:
    """It holds all joins, and says that it is there."""
    lead, reads = LeadOrFollow._lead, LeadOrFollow.next_deadline.fget
    assert reads is not None

    def leads(self: LeadOrFollow, now: float) -> None:
        if self._me != rogue:
            lead(self, now)
        elif now >= self._closing.gives_up_at + 1.0:
            self.end(self._why_nothing())

    def next_deadline(self: LeadOrFollow) -> float:
        return self._ticked + 0.5 if self._me == rogue and not self.ended else reads(self)

    monkeypatch.setattr(LeadOrFollow, "_lead", leads)
    monkeypatch.setattr(LeadOrFollow, "next_deadline", property(next_deadline))


def does_nothing_as_coordinator(monkeypatch: pytest.MonkeyPatch, rogue: PeerId) -> None:
    """It answers questions, but sends nothing that moves the others on."""
    do = Round._do

    def does(self: Round, effect: Effect) -> None:
        own = self._peers[self._task.group.me] == rogue
        moves_on = isinstance(effect, Send) and type(effect.message).__name__ in MOVES_ON
        if not (own and moves_on):
            do(self, effect)

    monkeypatch.setattr(Round, "_do", does)


MOVES_ON = {"Start", "Prepare", "Open", "Accept", "Decided"}


def starts_and_does_not_go_on(monkeypatch: pytest.MonkeyPatch, rogue: PeerId) -> None:
    """It sends no values either, and ignores the others' complaints about that."""
    do = Round._do

    def does(self: Round, effect: Effect) -> None:
        own = self._peers[self._task.group.me] == rogue
        goes_on = isinstance(effect, Send) and type(effect.message).__name__ in MOVES_ON - {"Start"}
        if not (own and goes_on):
            do(self, effect)

    monkeypatch.setattr(Round, "_do", does)


def led_by(rogue: AveragingPeer, peers: list[AveragingPeer], after: int) -> int:
    """The next epoch after this whose round this peer leads."""
    for epoch in range(after + 1, after + 1000):
        key = group_key(SETTINGS.run, epoch, 0, "all", "")
        if min(peers, key=lambda one: hash_order(key, one.peer)) is rogue:
            return epoch
    raise AssertionError


async def average(peers: list[AveragingPeer], rogue: AveragingPeer, epoch: int) -> list[Ended]:
    """Let all average, and wait for the outcomes of the honest ones."""
    events = {one.peer: one.begin(epoch=epoch, expected=len(peers)) for one in peers}
    for one in peers:
        if one is not rogue:
            await events[one.peer].wait()
    ended = [one.ended[-1] for one in peers if one is not rogue]
    with trio.move_on_after(60.0):
        await events[rogue.peer].wait()
    return ended


@pytest.mark.slow
@pytest.mark.parametrize(
    "misbehaves",
    [never_closes_its_list, does_nothing_as_coordinator, starts_and_does_not_go_on],
)
def test_a_leader_that_does_not_lead_holds_up_one_round_and_is_not_followed_again(
    misbehaves: Misbehaves, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(world: SimulatedWorld) -> None:
        honest = await averagers(world, HONEST)
        starts = misbehaves is starts_and_does_not_go_on
        kind = {"kind": KeepsItsValues} if starts else {}
        rogue = peer_in(world, "rogue", honest, **kind)  # type: ignore[arg-type]
        await rogue.ready.wait()
        peers = [*honest, rogue]
        misbehaves(monkeypatch, rogue.peer)
        epoch = led_by(rogue, peers, 0)
        first = await average(peers, rogue, epoch)
        assert max(one.seconds for one in first) < SOON_SECONDS
        for _ in range(2):
            epoch = led_by(rogue, peers, epoch)
            again = await average(peers, rogue, epoch)
            assert check_no_private_mix(again, honest) == HONEST
            assert max(one.seconds for one in again) < AT_ONCE_SECONDS

    play(scenario)


def test_two_peers_average_again_as_soon_as_both_are_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, the one did not close its list in time: its machine was busy. The other has nobody else
    to follow, and the tries after one and the same step are all led by the same peer."""

    async def scenario(world: SimulatedWorld) -> None:
        peers = await averagers(world, 2)
        epoch = led_by(peers[0], peers, 0)
        with monkeypatch.context() as busy:
            never_closes_its_list(busy, peers[0].peer)
            await average(peers, peers[0], epoch)
        for _ in range(2):
            ended = await average_all(peers, epoch=epoch)
        assert check_no_private_mix(ended, peers) == len(peers)

    play(scenario)


def test_a_doubt_that_left_its_peer_without_a_group_ends_and_grows_all_the_same() -> None:
    doubts, leader, member, elsewhere = Doubts(lambda: 0.0), PeerId("l"), PeerId("m"), PeerId("e")
    doubts.led_nowhere(leader)
    doubts.led_nowhere(elsewhere)
    doubts.held_up(member)
    doubts.round_begins()
    assert (doubts.unled, doubts.unwelcome) == ({leader, elsewhere}, {member})
    doubts.were_in_vain([leader, member, PeerId("somebody")])
    doubts.round_begins()
    assert (doubts.unled, doubts.unwelcome) == ({elsewhere}, frozenset())
    assert doubts.led_nowhere(leader) == 2 * ROUNDS_UNLED
    assert doubts.held_up(member) == 2


def test_a_leader_is_not_followed_for_growing_spans_until_it_has_led_a_round() -> None:
    doubts, peer = Doubts(lambda: 0.0), PeerId("leader")
    for times in range(2):
        assert doubts.led_nowhere(peer) == ROUNDS_UNLED << times
        for _ in range(ROUNDS_UNLED << times):
            doubts.round_begins()
            assert doubts.unled == {peer}
            assert not doubts.unwelcome
        doubts.was_in([peer])
        doubts.round_begins()
        assert not doubts.unled
    doubts.led_nowhere(peer)
    doubts.has_led(peer)
    assert not doubts.unled
    assert doubts.led_nowhere(peer) == ROUNDS_UNLED


def test_a_member_that_was_late_is_followed_all_the_same() -> None:
    doubts, peer = Doubts(lambda: 0.0), PeerId("late")
    doubts.held_up(peer)
    doubts.round_begins()
    assert doubts.unwelcome == {peer}
    assert not doubts.unled
