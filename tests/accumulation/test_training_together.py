"""A training thread and its steps, held-back batches, newcomers, helpers, and the end."""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import safetensors.torch
import torch
import trio
from torch import Tensor, nn

from node.training.words import words_of
from protocols.accumulation import accumulator, state_download
from protocols.accumulation.batch_plan import MOST_SPARED
from protocols.accumulation.bridge import Bridge
from protocols.accumulation.cohorts_seen import CohortsSeen
from protocols.accumulation.collaboration import open_collaboration
from protocols.accumulation.driver import Driver, OtherModel
from protocols.accumulation.ended import CollaborationEnded
from protocols.accumulation.events import (
    CaughtUp,
    FetchingFailed,
    HeldBack,
    NoBatchFits,
    NoRunFound,
    ParametersAveraged,
    ScaleChanged,
    StepTaken,
)
from protocols.accumulation.optimizer import CollaborativeOptimizer
from protocols.accumulation.progress_slot import PROGRESS
from protocols.accumulation.state_manifest import StateRefused
from protocols.accumulation.training_state import TrainingState
from protocols.dht import open_dht
from protocols.errors import ProtocolMisuse
from protocols.guest import GuestCall
from protocols.moshpit.matchmaking import GROUP
from protocols.rpc import open_rpc
from protocols.tensors import unset_bytes
from protocols.testing.world import SimulatedNetwork
from tests.accumulation.training_peers import (
    SETTINGS,
    TrainingWorld,
    training_world,
    wait_for_company,
)
from tests.waiting import PATIENCE_SECONDS, until

SMALL = dataclasses.replace(SETTINGS, target_batch=8)
ENDS_WITHIN_SECONDS = 5.0


def model_of(outputs: int = 2) -> nn.Linear:
    model = nn.Linear(3, outputs)
    with torch.no_grad():
        for one in model.parameters():
            one.fill_(0.5)
    return model


def optimizer_of(model: nn.Module, bridge: Bridge, **options: object) -> CollaborativeOptimizer:
    sgd = partial(torch.optim.SGD, lr=0.1)
    return CollaborativeOptimizer(model.named_parameters(), sgd, bridge, **options)  # type: ignore[arg-type]


def constant(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _step: 1.0)


def set_gradients(model: nn.Module, value: float) -> None:
    for one in model.parameters():
        one.grad = torch.full_like(one, value)


def of_kind(bridge: Bridge, kind: type) -> list[object]:
    return [one for one in bridge.events if isinstance(one, kind)]


@pytest.fixture
def launching(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches are added as on a GPU, which is not waited for."""
    monkeypatch.setattr(accumulator, "GPUS", ("cpu",))


def set_one_that_is_not_finite(model: nn.Linear) -> None:
    set_gradients(model, 9.0)
    model.bias.grad = torch.full_like(model.bias, math.nan)


@pytest.mark.usefixtures("launching")
def test_a_launched_batch_that_is_not_finite_is_taken_from_the_count_whatever_its_size() -> None:
    def train(bridge: Bridge, _number: int) -> None:
        model = model_of()
        optimizer = optimizer_of(model, bridge)
        set_one_that_is_not_finite(model)
        optimizer.step(samples=4)
        set_gradients(model, 1.0)
        optimizer.step(samples=2)
        assert optimizer.waiting_samples == 2
        held = [one for one in of_kind(bridge, HeldBack) if isinstance(one, HeldBack)]
        assert [(one.samples, one.parameter) for one in held] == [(4, "bias")]

    async def main() -> None:
        async with training_world() as world:
            await world.train(await world.peers(1, SMALL), train)

    trio.run(main)


@pytest.mark.usefixtures("launching")
def test_a_peer_whose_last_batch_is_not_finite_has_no_weight_for_it_in_the_step() -> None:
    settings = dataclasses.replace(SETTINGS, target_batch=12)
    has_both = threading.Event()

    def train(bridge: Bridge, number: int) -> Tensor:
        model = model_of()
        optimizer = optimizer_of(model, bridge)
        wait_for_company(bridge, 1)
        if number == 0:
            set_gradients(model, 1.0)
            optimizer.step(samples=4)
            set_one_that_is_not_finite(model)
            optimizer.step(samples=4)
            has_both.set()
        else:
            has_both.wait(PATIENCE_SECONDS)
            set_gradients(model, 4.0)
            optimizer.step(samples=8)
        while not optimizer.epoch:
            bridge.wait_for_news(1.0).wait()
            optimizer.see_out(1.0)
        return model.weight.detach()

    async def main() -> list[Tensor]:
        async with training_world() as world:
            return await world.train(await world.peers(2, settings), train)

    for weight in trio.run(main):
        torch.testing.assert_close(weight, torch.full((2, 3), 0.5 - 0.1 * (4 * 1.0 + 8 * 4.0) / 12))


@pytest.mark.slow
def test_step_returns_true_once_for_each_time_that_the_run_has_moved_on() -> None:
    """With `delayed` a step is made between two calls; no call once returned True for it."""

    def train(bridge: Bridge, _number: int) -> None:
        model = model_of()
        optimizer = optimizer_of(model, bridge, delayed=True)
        epoch, moved = optimizer.epoch, []
        while optimizer.epoch < 4:
            set_gradients(model, 1.0)
            time.sleep(0.1)  # a batch, in which a delayed round ends
            moved.append(optimizer.step(samples=8))
            assert moved[-1] == (optimizer.epoch > epoch)
            epoch = optimizer.epoch
        assert moved.count(True) >= 2
        optimizer.finish()
        steps = [one for one in of_kind(bridge, StepTaken) if isinstance(one, StepTaken)]
        in_steps = sum(one.own_samples for one in steps)
        assert in_steps + optimizer.waiting_samples == 8 * len(moved)

    async def main() -> None:
        async with training_world() as world:
            await world.train(await world.peers(2), train)

    trio.run(main)


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("value", [1.0, math.inf])
def test_a_torch_gradscaler_is_refused_by_name(delayed: bool, value: float) -> None:
    """It once failed with torch's own AssertionError, or skipped a batch without an error."""

    def train(bridge: Bridge, _number: int) -> None:
        model = model_of()
        optimizer = optimizer_of(model, bridge, delayed=delayed)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        scaler.scale(value * model(torch.ones(1, 3)).sum()).backward()
        with pytest.raises(ProtocolMisuse, match='precision="fp16"'):
            scaler.step(optimizer, samples=4)
        off = torch.amp.GradScaler("cpu", enabled=False)
        assert not off.step(optimizer, samples=4)  # which leaves everything to the optimizer

    async def main() -> None:
        async with training_world() as world:
            await world.train(await world.peers(1, SMALL), train)

    trio.run(main)


def test_a_batch_that_makes_a_round_due_is_measured() -> None:
    """Once, the slot of a begun round replaced the slot about the batch, and batches as large as a
    round were of unknown length for ever."""

    def train(bridge: Bridge, _number: int) -> float:
        model = model_of()
        optimizer = optimizer_of(model, bridge)
        for _ in range(2):
            set_gradients(model, 1.0)
            optimizer.step(samples=SMALL.target_batch)
        return bridge.estimate.own_batch_seconds

    async def main() -> float:
        async with training_world() as world:
            (seconds,) = await world.train(await world.peers(1, SMALL), train)
            return seconds

    assert trio.run(main) > 0.0


def test_a_peer_alone_trains_and_says_by_name_what_it_holds_back() -> None:
    def train(bridge: Bridge, _number: int) -> None:
        model = model_of()
        optimizer = optimizer_of(model, bridge)
        with pytest.raises(ProtocolMisuse, match="has an optimizer already"):
            optimizer_of(model_of(), bridge)
        with pytest.raises(ProtocolMisuse, match="cannot only assist"):
            optimizer.assist()
        with pytest.raises(ProtocolMisuse, match="A closure was given"):
            optimizer.step(lambda: None, samples=1)  # type: ignore[arg-type]
        with pytest.raises(ProtocolMisuse, match="A batch of 0 samples"):
            optimizer.step(samples=0)
        with pytest.raises(ProtocolMisuse, match="A param group cannot be added"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})

        set_gradients(model, 1.0)
        assert not optimizer.step(samples=4, loss=float("nan"))
        model.bias.grad = torch.full((2,), torch.inf)
        assert not optimizer.step(samples=4, loss=1.0)
        held = of_kind(bridge, HeldBack)
        assert [(one.reason, one.parameter) for one in held if isinstance(one, HeldBack)] == [
            ("The loss is nan.", ""),
            ("bias.grad is not finite.", "bias"),
        ]

        set_gradients(model, 1.0)
        assert not optimizer.step(samples=4)
        assert optimizer.epoch == 0
        saved = safetensors.torch.save(optimizer.state_dict())
        set_gradients(model, 2.0)
        assert optimizer.step(samples=4)
        assert optimizer.epoch == 1
        torch.testing.assert_close(model.weight.detach(), torch.full((2, 3), 0.5 - 0.1 * 1.5))
        step = of_kind(bridge, StepTaken)[0]
        assert isinstance(step, StepTaken)
        assert step.own_samples == step.samples == 8

        optimizer.load_state_dict(safetensors.torch.load(saved))
        assert optimizer.epoch == 0
        assert model.weight.detach().tolist() == [[0.5] * 3] * 2
        optimizer.param_groups[0]["lr"] = 0.25  # still those that steps are made with
        assert not optimizer.step(samples=4)
        assert optimizer.step(samples=4)
        torch.testing.assert_close(model.weight.detach(), torch.full((2, 3), 0.5 - 0.25 * 2.0))
        with pytest.raises(StateRefused, match="no state of a collaborative optimizer"):
            optimizer.load_state_dict({"state": {}, "param_groups": []})

    async def main() -> None:
        async with training_world() as world:
            await world.train([await world.peer("alone", SMALL)], train)

    trio.run(main)


def test_the_end_wakes_a_waiting_thread_and_informs_a_computing_one() -> None:
    waits, computes = threading.Event(), threading.Event()
    ended: dict[int, float] = {}

    def go_on_for_ever(optimizer: CollaborativeOptimizer, model: nn.Module, number: int) -> None:
        if number == 0:
            waits.set()
            optimizer.assist()
        while True:
            set_gradients(model, 1.0)
            computes.set()
            optimizer.step(samples=1)

    def train(bridge: Bridge, number: int) -> None:
        model = model_of()
        optimizer = optimizer_of(model, bridge, auxiliary=number == 0)
        with pytest.raises(CollaborationEnded, match="has ended"):
            go_on_for_ever(optimizer, model, number)
        assert bridge.ended
        ended[number] = time.monotonic()
        with pytest.raises(CollaborationEnded):
            optimizer.step(samples=1) if number else optimizer.assist()

    async def main() -> None:
        async with training_world() as world, trio.open_nursery() as nursery:
            settings = dataclasses.replace(SETTINGS, target_batch=10**6)
            peers = [await world.peer(f"peer-{number}", settings) for number in range(2)]
            nursery.start_soon(world.train, peers, train)
            for event in (waits, computes):
                await trio.to_thread.run_sync(event.wait)
            began = time.monotonic()
            for one in peers:
                one.leaving.set()
            for one in peers:
                await one.left.wait()
            assert time.monotonic() - began < ENDS_WITHIN_SECONDS
        assert all(moment - began < ENDS_WITHIN_SECONDS for moment in ended.values())
        assert len(ended) == 2

    trio.run(main)


def test_a_request_that_the_end_overtakes_is_answered_and_harms_nobody() -> None:
    """It was requested before the end, and trio's thread handles it only after the end."""
    calls: list[GuestCall[None]] = []
    done = trio.Event()

    async def run(network: SimulatedNetwork) -> None:
        async with (
            open_rpc(network) as rpc,
            open_dht(network, rpc, families=[GROUP, PROGRESS]) as dht,
            open_collaboration(network, rpc, dht, SMALL) as collaboration,
        ):
            calls.append(collaboration.bridge.sleep(1.0))
        done.set()

    async def main() -> None:
        async with training_world() as world:
            world.world.start(world.world.add_node("one"), run)
            await done.wait()
        with pytest.raises(CollaborationEnded):
            calls[0].wait()

    trio.run(main)


def test_an_event_is_followed_before_what_the_training_thread_says_next() -> None:
    async def main() -> None:
        async with training_world() as world:
            one = await world.peer("one", SMALL)
            said: list[object] = []
            event = NoRunFound(1.0)
            one.collaboration.follow(said.append)
            one.collaboration.bridge.tell(event)
            trio.lowlevel.current_trio_token().run_sync_soon(said.append, "next")
            await until(lambda: len(said) == 2, PATIENCE_SECONDS)
            assert said == [event, "next"]

    trio.run(main)


@pytest.mark.slow
def test_a_peer_says_in_its_slot_that_it_is_a_client_and_how_fast_its_machine_is() -> None:
    """No peer can dial a client, so no peer should ask it for its state. The head of a cohort is
    the one with the fastest link. And who brings samples says what computes them."""

    def train(bridge: Bridge, number: int) -> None:
        optimizer_of(model_of(), bridge, auxiliary=number == 1)
        wait_for_company(bridge, 1)

    async def main() -> None:
        async with training_world() as world:
            client = dataclasses.replace(SMALL, client=lambda: True, up_bytes_per_second=125e3)
            peers = [await world.peer("usual", SMALL), await world.peer("client", client)]
            await world.train(peers, train)
            slots = await peers[0].slots()
            assert [slots[one.peer].client for one in peers] == [False, True]
            assert [slots[one.peer].uplink for one in peers] == [0, 2]
            assert not slots[peers[1].peer].state_digest
            assert [slots[one.peer].device for one in peers] == ["cpu", ""]

    trio.run(main)


async def three(world: TrainingWorld) -> list[Tensor]:
    """Two peers train, and one helps without data."""

    def train(bridge: Bridge, number: int) -> Tensor:
        model = model_of()
        optimizer = optimizer_of(model, bridge, auxiliary=number == 2)
        wait_for_company(bridge, 2)
        if number == 2:
            optimizer.assist(epochs=3)
            steps = [one for one in of_kind(bridge, StepTaken) if isinstance(one, StepTaken)]
            assert [one.own_samples for one in steps if len(one.members) == 3]
        while optimizer.epoch < 3:
            time.sleep(0.1)  # the peer's speed
            set_gradients(model, 1.0 + number)
            optimizer.step(samples=1)
        return model.weight.detach()

    settings = dataclasses.replace(SETTINGS, target_batch=24)
    return await world.train(await world.peers(3, settings), train)


@pytest.mark.slow
def test_a_helper_without_data_makes_the_same_steps() -> None:
    async def main() -> None:
        async with training_world() as world:
            first, second, helper = await three(world)
            assert torch.equal(first, second)
            assert torch.equal(first, helper)

    trio.run(main)


@pytest.mark.slow
def test_a_peer_that_claims_impossibly_many_samples_counts_with_four_batches() -> None:
    claimed, most = 10**5, 4 * SMALL.target_batch

    def train(bridge: Bridge, number: int) -> Tensor:
        model = model_of()
        optimizer = optimizer_of(model, bridge)
        wait_for_company(bridge, 1)
        while number and not bridge.estimate.others_samples:
            bridge.wait_for_news(1.0).wait()
        while not optimizer.epoch:
            set_gradients(model, -1.0 if number else 1.0)
            optimizer.step(samples=claimed if number else SMALL.target_batch)
        (step,) = (one for one in of_kind(bridge, StepTaken) if isinstance(one, StepTaken))
        honest = min(*(one.samples for one in step.shares), most)
        assert max(one.samples for one in step.shares) >= claimed  # as it was signed
        assert step.samples == honest + most
        after = 0.5 - 0.1 * (honest - most) / step.samples
        torch.testing.assert_close(model.weight.detach(), torch.full((2, 3), after))
        return model.weight.detach()

    async def main() -> None:
        async with training_world() as world:
            honest, other = await world.train(await world.peers(2, SMALL), train)
            assert torch.equal(honest, other)

    trio.run(main)


@pytest.mark.slow
def test_a_newcomer_takes_the_state_of_the_run_and_then_helps() -> None:
    """It has only its model, with other values in it; momentum comes with the state.

    Neither stops before both have brought samples to a step of two: a round may miss one's."""
    far = threading.Event()
    have_brought = threading.Event(), threading.Event()
    weights: tuple[dict[int, Tensor], dict[int, Tensor]] = ({}, {})

    def train(bridge: Bridge, number: int) -> int:
        """The epoch of the first step of two that its samples are in."""
        if number:
            far.wait()
        model = model_of()
        with torch.no_grad():
            model.weight.add_(number)
        momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
        optimizer = CollaborativeOptimizer(model.named_parameters(), momentum, bridge)
        if number:
            assert optimizer.epoch >= 2
            assert of_kind(bridge, CaughtUp)
        epochs: list[int] = []
        while not all(peer.is_set() for peer in have_brought):
            time.sleep(0.2)  # the peer's speed
            set_gradients(model, 1.0)
            before = optimizer.epoch
            assert optimizer.step(samples=2) == (optimizer.epoch > before)
            weights[number][optimizer.epoch] = model.weight.detach().clone()
            if optimizer.epoch >= 2:
                far.set()
            steps = [one for one in of_kind(bridge, StepTaken) if isinstance(one, StepTaken)]
            epochs = [one.epoch + 1 for one in steps if len(one.members) == 2 and one.own_samples]
            if epochs:
                have_brought[number].set()
        return epochs[0]

    async def main() -> None:
        async with training_world() as world:
            epochs = await world.train(await world.peers(2, SMALL), train)
            first, second = (weights[number][min(epochs)] for number in range(2))
            assert torch.equal(first, second)

    trio.run(main)


def away_for_a_moment(optimizer: CollaborativeOptimizer) -> None:
    with optimizer.away():
        pass


def seen_out(optimizer: CollaborativeOptimizer) -> None:
    assert not optimizer.see_out(0.0)  # its samples are too few for a step


@pytest.mark.parametrize("pause", [away_for_a_moment, seen_out, CollaborativeOptimizer.finish])
def test_local_steps_whose_samples_still_count_stay_in_the_model(
    pause: Callable[[CollaborativeOptimizer], None],
) -> None:
    """Or the peer would bring its samples to the next step, and nothing that it learned of them."""

    def train(bridge: Bridge, _number: int) -> None:
        model = model_of()
        optimizer = optimizer_of(model, bridge, local_steps=4)
        set_gradients(model, 1.0)
        optimizer.step(samples=4)
        pause(optimizer)
        assert optimizer.waiting_samples == 4
        torch.testing.assert_close(model.bias.detach(), torch.full((2,), 0.4))

    async def main() -> None:
        async with training_world() as world:
            await world.train(await world.peers(1, SMALL), train)

    trio.run(main)


def test_an_error_in_a_pause_leaves_nobody_away() -> None:
    """It was withdrawn from the run for good, and trained on alone."""

    def train(bridge: Bridge, _number: int) -> list[bool]:
        told: list[bool] = []
        optimizer = optimizer_of(model_of(), bridge)
        bridge.set_away = lambda *, is_away: told.append(is_away)  # type: ignore[method-assign]
        with pytest.raises(ZeroDivisionError), optimizer.away():
            raise ZeroDivisionError
        return told

    async def main() -> None:
        async with training_world() as world:
            assert await world.train(await world.peers(1, SMALL), train) == [[True, False]]

    trio.run(main)


def test_samples_of_a_delayed_round_that_makes_no_step_are_not_said_to_be_seen_out() -> None:
    life = SimpleNamespace(samples=4)
    driver: Any = SimpleNamespace(
        standing=SimpleNamespace(life=life, computes_no_more=lambda: None),
        finish=lambda: None,
        go_on=lambda: setattr(life, "samples", 0),  # the round has them
        _rounds=SimpleNamespace(join=lambda: setattr(life, "samples", 4)),
        _bridge=SimpleNamespace(
            estimate=SimpleNamespace(due_in_seconds_with=lambda _: 60.0, peers=())
        ),
    )
    assert not Driver.see_out(driver, 30.0)


@pytest.mark.slow
def test_a_peer_that_was_away_catches_up_and_reports_its_possible_samples_before_it_leaves() -> (
    None
):
    is_away, others_stepped, is_seen = threading.Event(), threading.Event(), threading.Event()

    def train(bridge: Bridge, number: int) -> int:
        model = model_of()
        optimizer = optimizer_of(model, bridge)
        wait_for_company(bridge, 1)
        if number == 0:
            with optimizer.away():
                is_away.set()
                assert others_stepped.wait(PATIENCE_SECONDS)
            epoch = optimizer.epoch
            assert optimizer.see_out(0.0)  # it has nothing
            set_gradients(model, 1.0)
            optimizer.step(samples=4)
            assert not optimizer.see_out(0.0)  # nobody computes what is missing
            assert is_seen.wait(PATIENCE_SECONDS)
            return epoch
        assert is_away.wait(PATIENCE_SECONDS)
        while bridge.estimate.peers:
            bridge.wait_for_news(1.0).wait()
        while optimizer.epoch < 2:  # alone: nobody counts on the one that is away
            while bridge.estimate.epoch != optimizer.epoch:  # or samples would be left over
                bridge.wait_for_news(1.0).wait()
            set_gradients(model, 1.0)
            optimizer.step(samples=8)
        others_stepped.set()
        while bridge.estimate.others_samples < 4:
            bridge.wait_for_news(1.0).wait()
        is_seen.set()
        return optimizer.epoch

    async def main() -> None:
        async with training_world() as world:
            assert await world.train(await world.peers(2, SMALL), train) == [2, 2]

    trio.run(main)


@pytest.mark.slow
def test_an_invented_state_of_one_peer_ends_nobodys_training() -> None:
    """It claims a later epoch, and its state has another schedule than those of all others."""
    ahead, done = threading.Event(), [threading.Event(), threading.Event()]
    made_up = 7

    def made_up_schedule(
        optimizer: torch.optim.Optimizer,
    ) -> torch.optim.lr_scheduler.LRScheduler:
        schedule = constant(optimizer)
        schedule.made_up = True  # type: ignore[attr-defined]
        return schedule

    def train(bridge: Bridge, number: int) -> None:
        model = model_of()
        if number == 2:
            optimizer = optimizer_of(model, bridge, scheduler=made_up_schedule)
            state = optimizer.capture()
            header = msgspec.structs.replace(
                state.manifest, epoch=made_up, history=b"x" * 16, pieces=b""
            )
            optimizer.restore(TrainingState(header, state.memory))
            ahead.set()
            for one in done:
                one.wait()
            return
        ahead.wait()
        optimizer = optimizer_of(model, bridge, scheduler=constant)
        wait_for_company(bridge, 1)
        while not 0 < optimizer.epoch < made_up:
            time.sleep(0.1)  # the peer's speed
            set_gradients(model, 1.0)
            optimizer.step(samples=1)
        assert of_kind(bridge, FetchingFailed)
        done[number].set()

    async def main() -> None:
        async with training_world() as world:
            await world.train(await world.peers(3, SMALL), train)

    trio.run(main)


@pytest.mark.slow
def test_a_peer_without_memory_for_the_state_says_so_and_tries_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The peer that offers the state is not to blame."""
    is_ahead, is_in = threading.Event(), threading.Event()
    sizes: list[int] = []

    def refused_once(size: int) -> torch.Tensor:
        sizes.append(size)
        return unset_bytes(size if len(sizes) > 1 else 1 << 60)

    monkeypatch.setattr(state_download, "unset_bytes", refused_once)

    def train(bridge: Bridge, number: int) -> None:
        model = model_of()
        if number:
            is_ahead.wait()
        optimizer = optimizer_of(model, bridge)
        if not number:
            while optimizer.epoch < 2:
                set_gradients(model, 1.0)
                optimizer.step(samples=8)
            is_ahead.set()
            is_in.wait()
            return
        while optimizer.epoch < 2:
            assert not bridge.estimate.ignored
            optimizer.step(samples=0)
        failed = of_kind(bridge, FetchingFailed)
        assert len(failed) == 1
        assert "no memory for" in failed[0].reason
        assert "--max-memory" in failed[0].reason
        is_in.set()

    async def main() -> None:
        async with training_world() as world:
            await world.train(await world.peers(2, SMALL), train)

    trio.run(main)
    assert len(sizes) == 2


@pytest.mark.slow
def test_nobody_waits_for_ever_for_a_round_that_is_only_said_to_be_nearly_due() -> None:
    """The other peer claims again and again that it computes fast, but has no samples yet."""
    lying, has_stepped = threading.Event(), threading.Event()

    def lie(bridge: Bridge, optimizer: CollaborativeOptimizer) -> None:
        slot = optimizer._driver.standing.slot()
        while not has_stepped.wait(0.1):
            bridge.note(msgspec.structs.replace(slot, samples=4), at_once=True)
            lying.set()
            has_stepped.wait(0.1)
            bridge.note(msgspec.structs.replace(slot, samples=0), at_once=True)

    def train(bridge: Bridge, number: int) -> None:
        model = model_of()
        optimizer = optimizer_of(model, bridge)
        if number:
            lie(bridge, optimizer)
            return
        lying.wait()
        time.sleep(1.5)  # the peer's speed
        set_gradients(model, 1.0)
        optimizer.step(samples=56)  # returns
        has_stepped.set()

    settings = dataclasses.replace(SETTINGS, target_batch=80, grace_seconds=0.6)

    async def main() -> None:
        async with training_world() as world:
            await world.train(await world.peers(2, settings), train)

    trio.run(main)


@pytest.mark.slow
def test_all_peers_agree_on_the_loss_scale() -> None:
    def train(bridge: Bridge, number: int) -> float:
        model = model_of()
        optimizer = optimizer_of(model, bridge, precision="fp16")
        wait_for_company(bridge, 1)
        batches = 0
        while optimizer.epoch < 2:
            time.sleep(0.1)  # the peer's speed
            scale = float(optimizer.scaled(torch.ones(())))
            set_gradients(model, scale if number or batches else torch.inf)
            optimizer.step(samples=1)
            batches += 1
        assert len(of_kind(bridge, ScaleChanged)) == 1
        return float(optimizer.scaled(torch.ones(())))

    async def main() -> None:
        async with training_world() as world:
            scales = await world.train(await world.peers(2, SMALL), train)
            assert scales == [2.0**15, 2.0**15]

    trio.run(main)


@pytest.mark.slow
def test_parameters_that_have_drifted_apart_are_averaged() -> None:
    def train(bridge: Bridge, number: int) -> tuple[Tensor, bytes]:
        model = model_of()
        optimizer = optimizer_of(model, bridge, average_parameters_every=2)
        wait_for_company(bridge, 1)
        with torch.no_grad():
            model.bias.add_(1e-3 * number)  # another machine rounds otherwise, only less
        while optimizer.epoch < 2:
            time.sleep(0.1)  # the peer's speed
            set_gradients(model, 1.0)
            optimizer.step(samples=1)
        averaged = of_kind(bridge, ParametersAveraged)[0]
        assert isinstance(averaged, ParametersAveraged)
        assert averaged.drift == pytest.approx(5e-4, rel=1e-2)
        return model.bias.detach(), optimizer.history

    async def main() -> None:
        async with training_world() as world:
            first, second = await world.train(await world.peers(2, SMALL), train)
            assert torch.equal(first[0], second[0])
            assert first[1] == second[1]

    trio.run(main)


@pytest.mark.slow
def test_a_peer_with_another_model_is_told_so() -> None:
    there, told = threading.Event(), threading.Event()

    def train(bridge: Bridge, number: int) -> None:
        if number:
            there.wait()
            words = "The only other peer trains something else in the run test: model/bias is 5 he"
            with pytest.raises(OtherModel, match=words):
                optimizer_of(model_of(outputs=5), bridge)
            told.set()
            return
        optimizer_of(model_of(), bridge)
        there.set()
        told.wait()

    async def main() -> None:
        async with training_world() as world:
            await world.train(await world.peers(2, SMALL), train)

    trio.run(main)


@pytest.mark.slow
def test_a_peer_that_begins_no_run_says_so_and_goes_on_when_one_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would be silent for ever where the run is over, or is of another version of potluck."""
    monkeypatch.setattr("protocols.accumulation.driver.NO_RUN_SECONDS", 0.2)
    monkeypatch.setattr("protocols.accumulation.driver.LONGEST_RETRY_SECONDS", 0.05)
    waiting, is_in = dataclasses.replace(SMALL, begins=False), threading.Event()

    async def main() -> None:
        async with training_world() as world:
            volunteer = await world.peer("volunteer", waiting)
            beginner = await world.peer("beginner", SMALL)

            def train(bridge: Bridge, number: int) -> None:
                if number:
                    while not of_kind(volunteer.bridge, NoRunFound):
                        time.sleep(0.01)  # until the volunteer has said that it waits
                model = model_of()
                optimizer = optimizer_of(model, bridge)
                if not number:
                    is_in.set()
                while not is_in.is_set():
                    time.sleep(0.05)  # the peer's speed
                    set_gradients(model, 1.0)
                    optimizer.step(samples=1)

            await world.train([volunteer, beginner], train)
            (told,) = of_kind(volunteer.bridge, NoRunFound)
            assert isinstance(told, NoRunFound)
            assert "another version of potluck" in words_of(told)

    trio.run(main)


@pytest.mark.slow
def test_a_run_begins_though_somebody_claims_to_be_further_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("protocols.accumulation.driver.UNPROVED_SECONDS", 0.5)
    monkeypatch.setattr("protocols.accumulation.driver.LONGEST_RETRY_SECONDS", 0.05)
    monkeypatch.setattr(CohortsSeen, "is_open", True)

    def train(bridge: Bridge, _number: int) -> None:
        began, model = time.monotonic(), model_of()
        optimizer = optimizer_of(model, bridge)
        assert time.monotonic() - began > 0.4
        while not optimizer.epoch:
            time.sleep(0.05)  # the peer's speed
            set_gradients(model, 1.0)
            optimizer.step(samples=1)

    async def main() -> None:
        async with training_world() as world:
            await world.train(await world.peers(1, SMALL), train)

    trio.run(main)


@pytest.mark.slow
def test_a_peer_whose_batches_do_not_fit_into_a_step_is_told_so_and_is_in_the_steps() -> None:
    """The others finish a step long before it would finish a batch."""
    heard: list[NoBatchFits] = []

    async def main() -> None:
        async with training_world() as world:
            peers = await world.peers(2, dataclasses.replace(SETTINGS, target_batch=4))

            def train(bridge: Bridge, number: int) -> None:
                model = model_of()
                if number:
                    with pytest.raises(CollaborationEnded):  # while it waits for its first batch
                        optimizer_of(model, bridge, batch=1, batch_seconds=600.0)
                    return
                optimizer = optimizer_of(model, bridge, batch=1, batch_seconds=0.05)
                wait_for_company(bridge, 1)
                while not heard:
                    time.sleep(0.05)  # the peer's speed
                    set_gradients(model, 1.0)
                    optimizer.step(samples=1)
                    events = tuple(peers[1].bridge.events)
                    heard.extend(one for one in events if isinstance(one, NoBatchFits))
                trio.from_thread.run_sync(peers[1].leaving.set)

            await world.train(peers, train)

    trio.run(main)
    assert [(one.steps, one.batch, one.batch_seconds) for one in heard] == [(MOST_SPARED, 1, 600.0)]
    assert "the last 8 steps were made without this machine" in words_of(heard[0])
