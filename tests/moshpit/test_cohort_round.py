"""Averaging by cohorts: all peers of several groups hold the same bits, whoever dies."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
import trio

from protocols.moshpit.cohorts import Cohort, cohort_of, in_order
from protocols.moshpit.outcome import Committed
from protocols.testing.world import SimulatedWorld
from tests.dht.members import simulated
from tests.moshpit.averagers import SETTINGS, AveragingPeer, Ended, averagers, mean_of

COUNT = 4


class Cohorts:
    """The peers by their cohorts, in the order in which they become head."""

    def __init__(self, peers: Sequence[AveragingPeer]) -> None:
        by_name = {one.peer: one for one in peers}
        numbers = defaultdict(list)
        for peer in in_order(SETTINGS.run, by_name):
            numbers[cohort_of(SETTINGS.run, peer, COUNT)].append(by_name[peer])
        self.of = dict(numbers)
        self.heads = frozenset(members[0].peer for members in self.of.values())

    def begin(self, one: AveragingPeer, weight: float = 1.0, epoch: int = 0) -> trio.Event:
        number = cohort_of(SETTINGS.run, one.peer, COUNT)
        return one.begin(
            weight=weight,
            epoch=epoch,
            expected=len(self.of[number]),
            cohort=Cohort(number, COUNT, self.heads - {self.of[number][0].peer}),
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


@simulated
async def test_the_next_in_order_takes_the_place_of_a_head_that_dies(world: SimulatedWorld) -> None:
    peers = await averagers(world, 14)
    cohorts = Cohorts(peers)
    cohort = max(cohorts.of.values(), key=len)
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
