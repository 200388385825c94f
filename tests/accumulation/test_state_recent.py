"""A donor keeps small states for peers that are a little late, and nothing more."""

from __future__ import annotations

import pytest
import torch
import trio

from protocols.accumulation.state_messages import MANIFEST, ManifestRequest, StateGone
from protocols.accumulation.state_serving import (
    LARGEST_BYTES,
    MOST_BYTES,
    MOST_STATES,
    SWEEP_SECONDS,
    WANTED_SECONDS,
    RecentStates,
    Snapshots,
    is_small,
)
from protocols.accumulation.training_state import LiveState, TrainingState, capture, look
from protocols.errors import Busy
from protocols.testing.world import SimulatedWorld
from tests.accumulation.states import (
    RUN,
    Donor,
    Newcomer,
    introduce,
    start_donors,
    with_newcomer,
)

STEPS = 20
STEP_SECONDS = 0.15


def state_of(size: int, epoch: int) -> TrainingState:
    values = torch.zeros(size, dtype=torch.uint8)
    return capture([("w", values)], run=RUN, epoch=epoch)


def live(size: int) -> LiveState:
    return look([("w", torch.zeros(size, dtype=torch.uint8))], run=RUN, epoch=0)


@pytest.mark.slow
def test_the_kept_states_are_bounded_in_number_and_bytes_and_the_oldest_goes_first() -> None:
    for size, most in ((1 << 10, MOST_STATES), (LARGEST_BYTES, MOST_BYTES // LARGEST_BYTES)):
        recent = RecentStates(lambda: 0.0)
        recent.wanted()
        states = [state_of(size, epoch) for epoch in range(MOST_STATES + 2)]
        for state in states:
            recent.keep(state)
            assert recent.held_bytes <= MOST_BYTES
        assert [one.epoch for one in recent.states()] == [one.epoch for one in states[-most:]]


def test_a_state_in_use_is_not_the_next_to_go() -> None:
    recent = RecentStates(lambda: 0.0)
    states = [state_of(1 << 10, epoch) for epoch in range(MOST_STATES + 1)]
    for state in states[:-1]:
        recent.keep(state)
    recent.keep(states[0])
    recent.keep(states[-1])
    assert recent.get(states[0].digest) is states[0]
    assert recent.get(states[1].digest) is None


def test_when_nobody_has_asked_for_long_no_state_is_kept() -> None:
    now = [0.0]
    recent = RecentStates(lambda: now[0])
    assert not recent.is_wanted
    recent.wanted()
    recent.keep(state_of(1 << 10, 0))
    now[0] += 0.9 * WANTED_SECONDS
    recent.forget_unwanted()
    assert recent.is_wanted
    assert len(recent) == 1
    now[0] += 0.2 * WANTED_SECONDS
    recent.forget_unwanted()
    assert not recent.is_wanted
    assert len(recent) == 0


def test_a_large_state_is_not_small() -> None:
    assert is_small(live(LARGEST_BYTES))
    assert not is_small(live(LARGEST_BYTES + 1))


async def go_on(donor: Donor) -> None:
    for _ in range(STEPS):
        donor.model.step()
        donor.server.advanced()
        await trio.sleep(STEP_SECONDS)


@pytest.mark.slow
def test_a_donor_copies_nothing_while_nobody_asks() -> None:
    async def scenario(world: SimulatedWorld, _newcomer: Newcomer) -> None:
        (donor,) = await start_donors(world, 1)
        await go_on(donor)
        assert donor.server.served_states() == []

    with_newcomer(scenario)


def test_a_state_is_named_only_while_somebody_may_want_it() -> None:
    """A digest costs as much as reading the whole state."""

    async def scenario(world: SimulatedWorld, newcomer: Newcomer) -> None:
        (donor,) = await start_donors(world, 1)
        introduce(world, newcomer, [donor])
        await trio.sleep(WANTED_SECONDS)
        first = donor.server.offer
        assert first is not None
        await go_on(donor)
        assert donor.server.offer == first, "nobody may want what came after it"
        wanted = ManifestRequest(RUN, first.digest)
        with pytest.raises(StateGone):
            await newcomer.rpc.call(donor.peer, MANIFEST, wanted, timeout=10.0)
        assert donor.server.copies == 0, "it is known without a copy that this is another state"
        with trio.fail_after(STEP_SECONDS):
            offer = await donor.server.offered(first)
        assert offer.epoch == donor.model.epoch
        donor.model.step()
        donor.server.advanced()
        with trio.fail_after(STEP_SECONDS):
            assert (await donor.server.offered(offer)).epoch == donor.model.epoch

    with_newcomer(scenario)


def test_a_donor_without_memory_for_a_copy_goes_on_and_says_that_it_is_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It ended, with "a bug in potluck", when a newcomer came."""

    def copied(_snapshots: Snapshots, _memory: object) -> TrainingState:
        raise MemoryError

    async def scenario(world: SimulatedWorld, newcomer: Newcomer) -> None:
        (donor,) = await start_donors(world, 1)
        introduce(world, newcomer, [donor])
        offer = donor.server.offer
        assert offer is not None
        wanted = ManifestRequest(RUN, offer.digest)
        with monkeypatch.context() as short_of_memory:
            short_of_memory.setattr(Snapshots, "_copy", copied)
            with pytest.raises(Busy, match="no memory"):
                await newcomer.rpc.call(donor.peer, MANIFEST, wanted, timeout=10.0)
        answer = await newcomer.rpc.call(donor.peer, MANIFEST, wanted, timeout=10.0)
        assert answer.manifest

    with_newcomer(scenario)


@pytest.mark.slow
def test_requests_for_states_that_never_existed_do_not_exceed_the_donors_bound() -> None:
    async def scenario(world: SimulatedWorld, newcomer: Newcomer) -> None:
        (donor,) = await start_donors(world, 1)
        introduce(world, newcomer, [donor])
        most = 0

        async def ask() -> None:
            nonlocal most
            while True:
                wanted = ManifestRequest(RUN, newcomer.network.random.randbytes(32))
                try:
                    await newcomer.rpc.call(donor.peer, MANIFEST, wanted, timeout=10.0)
                except StateGone:
                    await trio.sleep(0.0)
                most = max(most, len(donor.server.served_states()))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await go_on(donor)
            nursery.cancel_scope.cancel()
        assert most == MOST_STATES
        await trio.sleep(WANTED_SECONDS + 2 * SWEEP_SECONDS)
        assert donor.server.served_states() == []

    with_newcomer(scenario)
