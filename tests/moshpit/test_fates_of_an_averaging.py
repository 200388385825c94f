"""A peer dies or stops at any of its messages in a whole averaging, with the search.

As test_fates_of_a_round.py, and with everything that a node has: the directory, matchmaking, the
averager. Here a leader can die when it has sent its list to some of the members only.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest
import trio

from protocols.testing.world import SimulatedWorld, run_simulation
from tests.dht.members import SETTINGS as WORLD
from tests.moshpit.averagers import SETTINGS as AVERAGERS
from tests.moshpit.averagers import Ended, averagers, check_same_result, counted
from tests.moshpit.rounds import Fate, How
from tests.moshpit.test_fates_of_a_round import HOWS, OVER_SECONDS

SETTLING_SECONDS = 2.0  # for what a directory says to itself at first
LONGEST_SECONDS = 120.0  # of virtual time


@dataclass(frozen=True)
class AveragingEnded:
    """The result: when the fault happened, and when the averaging was over for all others."""

    messages: tuple[int, ...]
    befell: float | None
    ended: float


async def averaging(world: SimulatedWorld, count: int, fate: Fate | None) -> AveragingEnded:
    """All average once. Checks that the survivors hold one result, if there is one."""
    peers = await averagers(world, count)
    await trio.sleep(SETTLING_SECONDS)
    befell: list[float] = []
    if fate is not None:
        node = peers[fate.member].network

        def strike() -> None:
            befell.append(trio.current_time())
            if fate.how == "stopped":
                world.stop(node)
            else:
                world.crash(node, heard_out=fate.how == "killed and heard out")

        world.at_message(node, fate.message, strike)
    before = [one.network.messages_sent for one in peers]
    events = [one.begin(expected=count) for one in peers]
    survivors = [one for place, one in enumerate(peers) if fate is None or place != fate.member]
    with trio.fail_after(LONGEST_SECONDS):
        for one, event in zip(peers, events, strict=True):
            if one in survivors:
                await event.wait()
    ended: list[Ended] = [one.ended[-1] for one in survivors]
    if count > 2:
        members = counted(ended, peers)
        assert set(survivors) <= set(members), fate
        check_same_result(ended, members)
    messages = (one.network.messages_sent - sent for one, sent in zip(peers, before, strict=True))
    return AveragingEnded(
        tuple(messages), befell[0] if befell else None, max(one.ended for one in ended)
    )


def one_averaging(count: int, fate: Fate | None = None) -> AveragingEnded:
    return run_simulation(averaging, count, fate, seed=0, settings=WORLD)


@functools.cache
def undisturbed(count: int) -> AveragingEnded:
    return one_averaging(count)


def check_all(count: int, how: How, every: int) -> None:
    struck, seconds = 0, OVER_SECONDS[how]
    if count == 2:
        seconds += AVERAGERS.matchmaking_seconds  # the survivors first look for other peers
    for member, messages in enumerate(undisturbed(count).messages):
        for message in range(1 + member * 3 % every, messages + 1, every):
            fate = Fate(member, message, how)
            ended = one_averaging(count, fate)
            if ended.befell is not None:
                struck += 1
                assert ended.ended < ended.befell + seconds, fate
    assert struck > count


@pytest.mark.slow
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize(("count", "every"), [(2, 13), (3, 17), (4, 41)])
def test_the_others_have_one_result_when_a_peer_goes(count: int, every: int, how: How) -> None:
    check_all(count, how, every)


@pytest.mark.soak
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_the_others_have_one_result_whenever_a_peer_goes(count: int, how: How) -> None:
    check_all(count, how, every=1)
