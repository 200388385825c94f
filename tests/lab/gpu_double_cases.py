"""The device double: what is launched is done in order, takes its time, and has real values. Run by
test_gpu_double.py in a process of its own."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lab import gpu_double
from lab.bench.size_task import SizeTask
from lab.bench.training_peer import plain_steps
from models.uncompiled import AdamW
from node.training.batch_size import PassClock
from protocols.accumulation.accumulator import Accumulator
from protocols.accumulation.parameters import Parameters
from protocols.accumulation.steps import GradientSteps
from tests.new_tensors import NewTensors

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="torch has one kind of GPU")

BLOCKS = 5
ROOM = BLOCKS * gpu_double.REPEATS
SECONDS = 0.05


@pytest.fixture(autouse=True)
def gpu() -> Any:
    gpu_double.register()
    module = torch.get_device_module(gpu_double.NAME)
    module.synchronize()
    return module


class Gate:
    """Holds up a stream until it is opened."""

    def __init__(self, stream: gpu_double.DoubleStream | None = None) -> None:
        self._opened = threading.Event()
        (stream or gpu_double.current_stream()).launch(self._wait, 0.0)

    def _wait(self) -> None:
        assert self._opened.wait(10.0)

    def open(self) -> None:
        self._opened.set()


def in_blocks(rest: int = 0) -> Tensor:
    return torch.cat([torch.randn(BLOCKS).repeat_interleave(gpu_double.REPEATS), torch.randn(rest)])


def there(values: Tensor) -> Tensor:
    return values.to(gpu_double.NAME)


def is_packed(tensor: Tensor) -> bool:
    packed: bool = tensor.untyped_storage().memory.is_packed  # type: ignore[attr-defined]
    return packed


# Values


@pytest.mark.parametrize("values", [in_blocks(), in_blocks(7), torch.randn(1000), torch.randn(3)])
def test_values_are_the_bits_that_torch_computes(values: Tensor) -> None:
    def compute(one: Tensor) -> list[Tensor]:
        changed = one * 3.0 - 0.25
        changed.lerp_(one, 0.125)
        torch._foreach_add_([changed, one], 1.5)
        return [changed, one, one[1:3], (one > 0.0).float(), one.sum()]

    here, gone = compute(values.clone()), compute(there(values))
    for own, double in zip(here, gone, strict=True):
        assert double.device.type == gpu_double.NAME
        assert torch.equal(double.cpu(), own)


def test_equal_neighbours_are_kept_once_until_they_differ() -> None:
    values, changed = in_blocks(7), in_blocks(7)
    double = there(values)
    double.add_(1.0)
    assert torch.equal(double.cpu(), values + 1.0)
    assert is_packed(double)
    changed[3] += 1.0
    double.copy_(changed)
    assert not is_packed(double)
    assert torch.equal(double.cpu(), changed)


@pytest.mark.parametrize("order", [1.0, 2.0, float("inf")])
def test_norms_count_each_value_that_is_kept_once(order: float) -> None:
    values = in_blocks(7)
    norm = partial(torch.linalg.vector_norm, ord=order, dtype=torch.float64)
    assert float(norm(there(values))) == pytest.approx(float(norm(values)), rel=1e-12)
    (found,) = torch._foreach_norm([there(in_blocks())], order)
    assert found.shape == ()


@pytest.mark.parametrize("delayed", [False, True])
def test_the_steps_of_a_peer_are_those_on_the_processor(delayed: bool) -> None:
    def train(device: str) -> list[Tensor]:
        generator = torch.Generator().manual_seed(3)
        model = [
            nn.Parameter(torch.randn(shape, generator=generator).to(device))
            for shape in ((4, gpu_double.REPEATS), (5,))
        ]
        named = [(f"p{number}", one) for number, one in enumerate(model)]
        steps = GradientSteps(
            Parameters(named), partial(AdamW, lr=0.1, foreach=True), None, delayed=delayed,
            max_norm=0.5, codec="none", scales_loss=False, buffers={},
        )  # fmt: skip
        assert steps.launches == (device != "cpu")
        for number in range(6):
            for one in model:
                one.grad = one.detach() * (1.0 + number)
            assert steps.add(4, loss=torch.tensor(0.5, device=device)) is None
            if number % 2:
                contribution = steps.take()
                steps.apply(contribution.values)
                steps.done_with(contribution)
                steps.take_over()
        return [one.detach().cpu() for one in model]

    for own, double in zip(train("cpu"), train(gpu_double.NAME), strict=True):
        assert torch.allclose(double, own, rtol=1e-6, atol=1e-7)


def test_a_contribution_is_copied_beside_the_next_passes_which_do_not_change_it() -> None:
    weight = nn.Parameter(there(torch.ones(ROOM)))
    accumulator = Accumulator(Parameters([("weight", weight)]))

    def add(value: float) -> None:
        weight.grad = torch.full_like(weight, value)
        assert accumulator.add(4) is None

    add(3.0)
    before = accumulator.take()  # makes the stream, and the memory on the host
    before.values.zero_()
    accumulator.done_with(before)
    add(5.0)
    gate = Gate(accumulator._copying)
    taken = accumulator.take()
    add(7.0)  # launched, and not done before the copy
    mark = gpu_double.current_stream().mark()
    assert not mark.reached.wait(SECONDS)
    assert not taken.memory[:ROOM].any()
    gate.open()
    assert taken.values[:ROOM].unique().tolist() == [5.0]
    assert accumulator.take().values[:ROOM].unique().tolist() == [7.0]


def test_a_contribution_is_copied_when_what_was_launched_before_is_done() -> None:
    weight = nn.Parameter(there(torch.ones(ROOM)))
    accumulator = Accumulator(Parameters([("weight", weight)]))
    weight.grad = torch.full_like(weight, 3.0)
    assert accumulator.add(4) is None
    before = accumulator.take()
    accumulator.done_with(before)
    gate = Gate()
    taken = accumulator.take()  # without samples: what is there is set to zero first
    threading.Timer(0.02, gate.open).start()
    assert not taken.values[:ROOM].any()


# Order and waiting


def test_the_host_goes_on_and_pinned_memory_is_written_when_its_turn_comes(gpu: Any) -> None:
    double, host = there(in_blocks()), torch.zeros(ROOM, pin_memory=True)
    assert host.is_pinned()
    gate, event = Gate(), gpu.Event()
    host.copy_(double.add_(1.0), non_blocking=True)
    event.record()
    assert not event.query()
    assert not host.any()
    gate.open()
    event.synchronize()
    assert torch.equal(host, double.cpu())


@pytest.mark.parametrize("pin", [True, False])
def test_a_copy_that_blocks_waits_for_all_before_it(pin: bool) -> None:
    double, host = there(in_blocks()), torch.zeros(ROOM, pin_memory=pin)
    gate = Gate()
    threading.Timer(0.02, gate.open).start()
    host.copy_(double, non_blocking=not pin)  # what is not pinned cannot be left to the device
    assert torch.equal(host, double.cpu())


def test_a_stream_waits_for_an_event_of_another(gpu: Any) -> None:
    value, beside, event = there(torch.zeros(3)), gpu.Stream(), gpu.Event()
    gate = Gate()
    value.add_(2.0)
    event.record()
    with gpu.stream(beside):
        beside.wait_event(event)
        value.mul_(3.0)
    done = beside.record_event()
    assert not done.query()
    gate.open()
    done.synchronize()
    assert value.cpu().tolist() == [6.0, 6.0, 6.0]


def test_a_pass_takes_the_time_that_it_is_given_and_kernels_share_the_device(gpu: Any) -> None:
    beside, started = gpu.Stream(), gpu.Event()
    value, other = (torch.zeros(3, device=gpu_double.NAME) for _ in range(2))
    gpu.synchronize()
    started.record()
    with gpu_double.passing(4 * SECONDS):
        value.add_(1.0)
    with gpu.stream(beside), gpu_double.passing(SECONDS):
        other.add_(1.0)
    ended = [one.record_event() for one in (gpu.current_stream(), beside)]
    for one in ended:
        one.synchronize()
    assert started.elapsed_time(ended[0]) >= 1000 * 5 * SECONDS
    assert started.elapsed_time(ended[1]) >= 1000 * 2 * SECONDS


def test_copies_go_beside_kernels(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_double, "PINNED_BYTES_PER_SECOND", 4 * ROOM / (6 * SECONDS))
    beside, started, ended = gpu.Stream(), gpu.Event(), gpu.Event()
    host, double = torch.zeros(ROOM, pin_memory=True), torch.zeros(ROOM, device=gpu_double.NAME)
    value = torch.zeros(3, device=gpu_double.NAME)
    gpu.synchronize()
    with gpu.stream(beside):
        host.copy_(double, non_blocking=True)
    for event in (started, ended):  # the second pass follows on the first, whenever it is launched
        with gpu_double.passing(2 * SECONDS):
            value.add_(1.0)
        event.record()
    gpu.synchronize()
    assert started.elapsed_time(ended) == pytest.approx(1000 * 2 * SECONDS, rel=1e-6)


def test_the_clock_of_passes_has_the_time_on_the_device(gpu: Any) -> None:
    clock = PassClock(torch.device(gpu_double.NAME))
    with clock.passing(), gpu_double.passing(SECONDS):
        torch.zeros(3, device=gpu_double.NAME)
    gpu.synchronize()
    seconds = clock.newest()
    assert seconds is not None
    assert seconds >= SECONDS


def test_what_fails_in_the_queue_is_raised_where_somebody_waits(gpu: Any) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    beside = gpu.Stream()
    beside.launch(fail, 0.0)
    with pytest.raises(ZeroDivisionError):
        beside.synchronize()


# Its account


def test_memory_is_counted_until_the_host_needs_it_no_more(gpu: Any) -> None:
    before = gpu.memory_allocated()
    gate, double = Gate(), torch.zeros(ROOM, device=gpu_double.NAME)
    double.view(BLOCKS, -1).add_(1.0)
    assert gpu.memory_allocated() == before + 4 * ROOM
    assert gpu.max_memory_allocated() >= before + 4 * ROOM
    del double
    assert gpu.memory_allocated() == before, "though the queue still has it"
    gate.open()


def test_only_time_in_which_the_double_stands_idle_is_lost() -> None:
    stream = gpu_double.current_stream()
    slow = partial(stream.launch, partial(time.sleep, SECONDS), 0.0)
    before = gpu_double.lateness()
    slow()
    mark = stream.mark()
    with gpu_double.passing(4 * SECONDS):
        torch.zeros(3, device=gpu_double.NAME)
    mark.wait()  # too late, but the device has something to do meanwhile
    torch.zeros(3, device=gpu_double.NAME)
    stream.synchronize()
    hidden = gpu_double.lateness() - before
    slow()
    stream.synchronize()
    torch.zeros(3, device=gpu_double.NAME)
    stream.synchronize()
    lost = gpu_double.lateness() - before - hidden
    assert hidden < lost
    assert lost >= 0.9 * SECONDS


def test_a_model_for_the_double_is_packed_and_takes_what_a_plain_loop_holds(gpu: Any) -> None:
    task = SizeTask(
        parameters=2 * 1024 * 1024 + 512, batch=2, tokens=1, device=gpu_double.NAME,
        pass_seconds=0.01,
    )  # fmt: skip
    before = gpu.memory_allocated()
    gpu_double.forget_most()
    seconds, late = plain_steps(task, 3, 2, max_norm=1.0)
    assert seconds >= 2 * 0.01
    assert late >= 0.0
    copies = (gpu.max_memory_allocated() - before) / 4 / task.parameters
    assert copies == pytest.approx(5.0, abs=0.1)  # with gradients of a pass, and two of AdamW
    assert all(is_packed(one) for one in task.model().parameters())


def test_a_model_for_the_double_is_made_in_one_place_of_the_host() -> None:
    """Each further one would leave a hole, where nothing else fits in."""
    task = SizeTask(parameters=3 * 1024 * 1024 + 512, batch=2, tokens=1, device=gpu_double.NAME)
    with NewTensors() as made:
        task.model()
    assert len([one for one in made.sizes if one >= 4 * 1024 * 1024]) == 1
    assert task.of_one_matrix.parameters == 1024 * 1024
