"""How many samples at once: by trying for a few seconds, and then by what batches take."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from node.core.caps.memory import TooLarge
from node.run.out_of_memory import is_out_of_memory
from node.training.batch_size import (
    ENOUGH_SECONDS,
    LONGEST_SECONDS,
    MOST_SECONDS,
    QUICK_SECONDS,
    SLOW_SECONDS,
    STEADY,
    TARGET_SHARE,
    BatchSize,
    MeasuredBatch,
    PassClock,
    choose,
    limit_of,
)
from tests.devices import DEVICES


class Machine:
    """It takes so long for a batch, and has room for so many samples."""

    def __init__(self, fixed: float, each: float, room: int = 1 << 20) -> None:
        self._fixed, self._each, self._room = fixed, each, room
        self.now = 0.0

    def seconds(self, size: int) -> float:
        if size > self._room:
            raise MemoryError
        seconds = self._fixed + size * self._each
        self.now += 2 * seconds  # each size is tried twice
        return seconds

    def clock(self) -> float:
        return self.now


@given(
    some.floats(0.0, 0.3),
    some.floats(1e-5, 3.0),
    some.integers(1, 300),
    some.integers(1, 1000),
)
def test_a_batch_is_long_enough_unless_something_is_in_the_way(
    fixed: float, each: float, room: int, limit: int
) -> None:
    machine = Machine(fixed, each, room)
    found = choose(machine.seconds, limit, clock=machine.clock)
    size = found.micro_batch
    assert 1 <= size <= min(limit, room)
    assert size == 1 or found.batch_seconds <= LONGEST_SECONDS
    if found.batch_seconds < ENOUGH_SECONDS:
        longer = fixed + min(2 * size, limit) * each
        assert size == limit or 2 * size > room or longer > LONGEST_SECONDS
    assert machine.now <= MOST_SECONDS + 2 * LONGEST_SECONDS + 2 * (fixed + each)


def test_compiled_passes_are_measured_from_the_size_of_the_plain_ones_on() -> None:
    plain, compiled = Machine(0.0, 0.1), Machine(0.0, 0.01)
    found = choose(plain.seconds, 64, clock=plain.clock)
    assert found.micro_batch == 2
    begun = MeasuredBatch(2, compiled.seconds(2), found.fits)
    faster = choose(compiled.seconds, 64, clock=compiled.clock, begun=begun)
    assert faster.micro_batch == 32
    assert faster.batch_seconds >= ENOUGH_SECONDS


def test_measuring_stops_when_the_node_is_told_to_leave() -> None:
    machine = Machine(0.0, 1e-4)
    assert choose(machine.seconds, 512, lambda: False, machine.clock).micro_batch == 1


def test_a_size_that_did_not_fit_is_not_tried_again_because_batches_are_quick() -> None:
    machine = Machine(0.0, QUICK_SECONDS / 20, room=11)
    found = choose(machine.seconds, 32, clock=machine.clock)
    assert (found.micro_batch, found.fits) == (8, 8)
    size = BatchSize(found.micro_batch, found.fits)
    for _ in range(5 * STEADY):
        size.took(machine.seconds(size.size))


def test_batches_that_are_quick_because_memory_is_short_do_not_grow() -> None:
    size = BatchSize(8, limit=64)
    for _ in range(5 * STEADY):
        size.took(QUICK_SECONDS / 10, may_grow=False)
    assert size.size == 8


def test_a_size_that_did_not_fit_is_the_limit_from_then_on() -> None:
    size = BatchSize(16, limit=32)
    size.did_not_fit(16)
    for _ in range(5 * STEADY):
        size.took(QUICK_SECONDS / 2)
    assert size.size == 8
    size.did_not_fit(1)
    assert size.size == 1


def test_a_run_of_which_no_sample_fits_is_too_large() -> None:
    with pytest.raises(TooLarge) as refused:
        choose(Machine(0.0, 1e-4, room=0).seconds, 32)
    assert "--device cpu" in refused.value.advice


def test_an_out_of_memory_error_is_told_from_others() -> None:
    with pytest.raises(RuntimeError) as of_torch:
        torch.empty(1 << 60)
    assert is_out_of_memory(of_torch.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(ValueError("out of memory"))


@pytest.mark.parametrize(("most", "target", "limit"), [(32, 1024, 32), (32, 64, 8), (32, 4, 1)])
def test_no_batch_is_a_large_part_of_the_whole_runs(most: int, target: int, limit: int) -> None:
    assert limit_of(most, target) == limit
    assert limit == 1 or limit <= target // TARGET_SHARE


def test_the_size_follows_what_batches_really_take() -> None:
    size = BatchSize(4, limit=10)
    for _ in range(STEADY - 1):
        size.took(QUICK_SECONDS / 2)
    assert size.size == 4
    size.took(0.5)  # an even count begins anew
    for _ in range(2 * STEADY):
        size.took(QUICK_SECONDS / 2)
    assert size.size == 10
    for _ in range(5 * STEADY):
        size.took(2 * SLOW_SECONDS)
    assert size.size == 1


def test_passes_on_the_second_gpu_are_timed_there(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[str] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None: ...

        def record(self, stream: str = "of the first GPU") -> None:
            recorded.append(stream)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", "of {}".format)
    with PassClock(torch.device("cuda:1")).passing():
        pass
    assert recorded == ["of cuda:1"] * 2


@pytest.mark.parametrize("device", DEVICES)
def test_the_time_of_each_pass_is_told_once_when_it_has_ended(device: str) -> None:
    clock = PassClock(torch.device(device))
    assert clock.newest() is None
    with clock.passing():
        torch.ones(4, device=device)
        time.sleep(0.05)
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = clock.newest()
    assert seconds is not None
    assert 0.04 < seconds < 5.0
    assert clock.newest() is None
