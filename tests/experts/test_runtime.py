"""The runtime: what is computed together and in which order, what a step is, and how it ends.

The first part is pure. In the second, a thread really computes beside trio.
"""

from __future__ import annotations

import copy
import math
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
import torch
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from models.experts import build_expert
from models.schedules import Schedule, ScheduleSettings
from protocols.errors import Busy, HandlerFailed, MalformedMessage, PotluckError, ProtocolMisuse
from protocols.experts import ExpertBackend, ExpertGrid, Rows, UnknownExpert, WrongUid, open_runtime
from protocols.experts.messages import (
    LARGEST_TENSOR_BYTES,
    EncodedTensor,
    decode_tensor,
    encode_tensor,
)
from protocols.experts.runtime import (
    MOST_BYTES,
    MOST_REQUESTS,
    Runtime,
    Work,
    WorkQueue,
    compute,
)
from protocols.identity import Identity
from protocols.tensors import NotFinite
from tests.waiting import PATIENCE_SECONDS, until

GRID = ExpertGrid("ffn", (16,))
WIDTH = 8
ROWS = Rows((WIDTH,))
ALICE, BOB = Identity.generate().peer_id, Identity.generate().peer_id


def expert(
    number: int = 0, *, largest_batch: int = 64, max_norm: float = math.inf
) -> ExpertBackend:
    network = build_expert({"name": "feed-forward", "width": WIDTH, "inner": [16]}, seed=number)
    return ExpertBackend(
        GRID.at(number),
        network,
        ROWS,
        torch.optim.Adam(network.parameters(), lr=0.01),
        largest_batch=largest_batch,
        max_norm=max_norm,
    )


def encoded(tensor: Tensor) -> EncodedTensor:
    return encode_tensor(tensor, "none", "values")


def raw(tensor: Tensor) -> EncodedTensor:
    """As a peer would send it that checks nothing."""
    header = encoded(torch.zeros_like(tensor)).header
    return EncodedTensor(header, memoryview(tensor.numpy()).cast("B"))


def forward_work(backend: ExpertBackend, inputs: Tensor) -> Work:
    return Work(backend, encoded(inputs))


def backward_work(backend: ExpertBackend, inputs: Tensor, gradients: Tensor) -> Work:
    return Work(backend, encoded(inputs), encoded(gradients))


def answers_of(batch: list[Work]) -> list[Tensor]:
    return [decode_tensor(one.unwrap(), "the answer") for one in compute(batch)]


def parameters_of(backend: ExpertBackend) -> list[Tensor]:
    return [one.detach().clone() for one in backend.network.parameters()]


def locally(backend: ExpertBackend, inputs: Tensor, gradients: Tensor) -> tuple[Tensor, nn.Module]:
    """What one computer makes of this: the gradients of the inputs, and the network after it."""
    network = copy.deepcopy(backend.network)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    inputs = inputs.clone().requires_grad_()
    network(inputs).backward(gradients)
    optimizer.step()
    assert inputs.grad is not None
    return inputs.grad, network


# ---- the queue

works = st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.integers(1, 70)), max_size=30)


def some_work(kind: tuple[int, bool, int], backends: list[ExpertBackend]) -> Work:
    number, is_backward, rows = kind
    tensor = encoded(torch.zeros(rows, WIDTH))
    return Work(backends[number], tensor, tensor if is_backward else None)


@given(kinds=works, given_up=st.sets(st.integers(0, 29)))
def test_batches_have_one_kind_are_oldest_first_and_full(
    kinds: list[tuple[int, bool, int]], given_up: set[int]
) -> None:
    backends = [ExpertBackend(GRID.at(n), nn.Identity(), ROWS, largest_batch=64) for n in range(3)]
    queue, waiting = WorkQueue(), []
    for kind in kinds:
        work = some_work(kind, backends)
        queue.add(work)
        waiting.append(work)
    for number in sorted(given_up, reverse=True):
        if number < len(waiting):
            queue.remove(waiting.pop(number))
    while waiting:
        assert len(queue) == len(waiting)
        batch = queue.take_batch()
        same_line = [work for work in waiting if work.line == waiting[0].line]
        assert batch == same_line[: len(batch)], "the oldest, and those that came after it"
        rows = [work.rows for work in same_line]
        assert sum(rows[: len(batch)]) <= 64 or len(batch) == 1
        if len(batch) < len(same_line):
            assert sum(rows[: len(batch) + 1]) > 64, "one more would have fitted"
        waiting = [work for work in waiting if work not in batch]
    assert queue.take_batch() == []


def test_a_batch_decodes_to_no_more_than_one_request_may() -> None:
    wide = 1 << 20
    backend = ExpertBackend(GRID.at(0), nn.Identity(), Rows((wide,)))
    row = encode_tensor(torch.zeros(1, wide), "sparse-sign", "values")
    assert 100 * len(row.data) < row.header.decoded_bytes, "what waits does not bound the memory"
    queue = WorkQueue()
    for _ in range(20):
        queue.add(Work(backend, row))
    most = LARGEST_TENSOR_BYTES // row.header.decoded_bytes
    assert [len(queue.take_batch()) for _ in range(3)] == [most, most, 20 - 2 * most]
    queue.add(Work(backend, encode_tensor(torch.zeros(most, wide), "sparse-sign", "values")))
    assert len(queue.take_batch()) == 1, "one request always fits"


# ---- passes


def test_a_forward_pass_changes_nothing_and_every_request_gets_its_own_rows() -> None:
    backend = expert()
    before = parameters_of(backend)
    inputs = [torch.randn(rows, WIDTH) for rows in (1, 5, 3)]
    answers = answers_of([forward_work(backend, one) for one in inputs])
    for one, answer in zip(inputs, answers, strict=True):
        torch.testing.assert_close(answer, backend.network(one).detach())
    assert all(map(torch.equal, before, parameters_of(backend)))
    assert not backend.optimizer or not backend.optimizer.state
    assert (backend.statistics.forward_rows, backend.statistics.steps) == (9, 0)


def test_a_backward_batch_is_one_local_step_with_all_its_rows() -> None:
    backend = expert()
    inputs, gradients = torch.randn(9, WIDTH), torch.randn(9, WIDTH)
    wanted, after = locally(backend, inputs, gradients)
    parts = zip(inputs.split([1, 5, 3]), gradients.split([1, 5, 3]), strict=True)
    answers = answers_of([backward_work(backend, *part) for part in parts])
    assert torch.equal(torch.cat(answers), wanted)
    assert all(map(torch.equal, parameters_of(backend), after.parameters()))
    assert (backend.statistics.backward_rows, backend.statistics.steps) == (9, 1)
    assert all(one.grad is None for one in backend.network.parameters())


MAKES_A_STEP = """
import sys
import torch
from models.experts import build_expert
from models.uncompiled import AdamW
from protocols.experts import ExpertBackend, ExpertGrid, Rows
network = build_expert({"name": "feed-forward", "width": 8, "inner": [16]}, seed=0)
optimizer = AdamW(network.parameters(), lr=0.01)
backend = ExpertBackend(ExpertGrid("ffn", (16,)).at(0), network, Rows((8,)), optimizer)
backend.backward(torch.ones(4, 8), torch.ones(4, 8))
assert backend.statistics.steps == 1
print(*{"torch._dynamo", "sympy"} & sys.modules.keys())
"""


@pytest.mark.slow
def test_a_step_loads_nothing_of_the_compiler() -> None:
    done = subprocess.run(
        [sys.executable, "-c", MAKES_A_STEP], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == []


def test_the_norm_of_a_step_is_limited_and_the_schedule_is_stepped() -> None:
    backend = expert(max_norm=0.5)
    other = copy.deepcopy(backend.network)
    optimizer = torch.optim.SGD(backend.network.parameters(), lr=1.0)
    backend.optimizer = optimizer
    backend.schedule = Schedule(optimizer, ScheduleSettings(decay="linear", steps=2))
    inputs, gradients = torch.randn(4, WIDTH), 100.0 * torch.randn(4, WIDTH)
    backend.backward(inputs, gradients)
    moved = [one - old for one, old in zip(parameters_of(backend), other.parameters(), strict=True)]
    norm = torch.cat([one.flatten() for one in moved]).norm()
    torch.testing.assert_close(norm, torch.tensor(0.5))
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_without_an_optimizer_an_expert_gives_gradients_and_does_not_learn() -> None:
    backend = expert()
    backend.optimizer = None
    before = parameters_of(backend)
    inputs, gradients = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    wanted, _ = locally(backend, inputs, gradients)
    assert torch.equal(backend.backward(inputs, gradients), wanted)
    assert all(map(torch.equal, before, parameters_of(backend)))


def test_a_dropout_is_off_so_that_both_passes_are_one_function() -> None:
    backend = ExpertBackend(GRID.at(0), nn.Dropout(0.5).train(), ROWS)
    inputs = torch.randn(4, WIDTH)
    assert torch.equal(backend.forward(inputs), inputs)
    assert torch.equal(backend.backward(inputs, inputs), inputs)


def test_values_that_are_not_finite_fail_their_own_request_by_name() -> None:
    backend = expert()
    good = torch.randn(2, WIDTH)
    bad = torch.full((2, WIDTH), math.nan)
    answer, failed, other = compute(
        [forward_work(backend, good), Work(backend, raw(bad)), forward_work(backend, good)]
    )
    assert answer.unwrap() == other.unwrap()
    with pytest.raises(MalformedMessage, match=r"The inputs for ffn\.0: .* not finite"):
        failed.unwrap()
    (failed,) = compute([Work(backend, encoded(good), raw(bad))])
    with pytest.raises(MalformedMessage, match=r"The gradients for ffn\.0: .* not finite"):
        failed.unwrap()
    assert backend.statistics.steps == 0


def test_a_gradient_that_overflows_fails_alone_and_makes_no_step() -> None:
    backend = expert()
    inputs, gradients = torch.randn(2, WIDTH), torch.randn(2, WIDTH)
    huge = torch.full((2, WIDTH), 3e38)
    wanted, after = locally(backend, inputs, gradients)
    answer, failed = compute(
        [backward_work(backend, inputs, gradients), backward_work(backend, inputs, huge)]
    )
    assert torch.equal(decode_tensor(answer.unwrap(), "the answer"), wanted)
    with pytest.raises(NotFinite, match="no step"):
        failed.unwrap()
    assert all(map(torch.equal, parameters_of(backend), after.parameters()))
    assert backend.statistics.steps == 1


def test_a_diverged_expert_answers_by_name_that_its_outputs_are_not_finite() -> None:
    backend = expert()
    with torch.no_grad():
        next(backend.network.parameters()).fill_(math.nan)
    (failed,) = compute([forward_work(backend, torch.randn(2, WIDTH))])
    with pytest.raises(NotFinite, match=r"The answer of ffn\.0"):
        failed.unwrap()


class Wrong(nn.Module):
    def forward(self, rows: Tensor) -> Tensor:
        return rows[:, :-1]


def test_a_network_that_does_not_give_back_its_rows_fails() -> None:
    backend = ExpertBackend(GRID.at(0), Wrong(), ROWS)
    (failed,) = compute([forward_work(backend, torch.randn(2, WIDTH))])
    with pytest.raises(ProtocolMisuse, match="an expert gives back rows as it got them"):
        failed.unwrap()


class Broken(nn.Module):
    def forward(self, _rows: Tensor) -> Tensor:
        raise RuntimeError("out of memory, with secrets")


def test_an_error_of_a_network_is_logged_and_told_without_its_text(
    caplog: pytest.LogCaptureFixture,
) -> None:
    backend = ExpertBackend(GRID.at(0), Broken(), ROWS)
    outcomes = compute([forward_work(backend, torch.randn(2, WIDTH)) for _ in range(2)])
    for failed in outcomes:
        with pytest.raises(HandlerFailed, match=r"ffn\.0 failed") as error:
            failed.unwrap()
        assert "secrets" not in str(error.value)
    assert len(caplog.records) == 1
    assert "with secrets" in caplog.text


# ---- the thread


class Gate(nn.Module):
    """Holds the runtime's thread until it is opened, and notes what passed."""

    def __init__(self) -> None:
        super().__init__()
        self.open = threading.Event()
        self.reached = threading.Event()
        self.passed: list[float] = []

    def forward(self, rows: Tensor) -> Tensor:
        self.reached.set()
        assert self.open.wait(PATIENCE_SECONDS)
        self.passed.append(rows[0, 0].item())
        return rows.clone()


@dataclass
class Held:
    """A runtime whose thread is held by a request of expert 9, until the gate is opened.

    `asking` ends before the runtime does, `around` after it. The request is in `around`.
    """

    runtime: Runtime
    gate: Gate
    asking: trio.Nursery
    around: trio.Nursery


@asynccontextmanager
async def held_runtime(*others: ExpertBackend) -> AsyncIterator[Held]:
    gate = Gate()
    backend = ExpertBackend(GRID.at(9), gate, ROWS)
    with trio.fail_after(PATIENCE_SECONDS):
        async with (
            trio.open_nursery() as around,
            open_runtime([backend, *others]) as runtime,
            trio.open_nursery() as asking,
        ):
            try:
                around.start_soon(runtime.work, forward_work(backend, numbered(0)))
                await until(gate.reached.is_set, PATIENCE_SECONDS)
                yield Held(runtime, gate, asking, around)
            except BaseException:
                gate.open.set()
                raise


def numbered(number: float) -> Tensor:
    return torch.full((1, WIDTH), float(number))


async def test_what_waits_together_is_computed_together() -> None:
    backend = expert(largest_batch=4)
    async with held_runtime(backend) as held:
        for _ in range(6):
            held.asking.start_soon(held.runtime.work, forward_work(backend, torch.randn(1, WIDTH)))
        await trio.testing.wait_all_tasks_blocked()
        held.gate.open.set()
    assert (backend.statistics.batches, backend.statistics.forward_rows) == (2, 6)


async def test_the_oldest_goes_first_whichever_expert_it_is_for() -> None:
    first, second = Gate(), Gate()
    first.open.set()
    second.open.set()
    second.passed = first.passed
    one, other = ExpertBackend(GRID.at(1), first, ROWS), ExpertBackend(GRID.at(2), second, ROWS)
    async with held_runtime(one, other) as held:
        for backend, number in ((other, 1), (one, 2), (other, 3), (one, 4)):
            held.asking.start_soon(held.runtime.work, forward_work(backend, numbered(number)))
            await trio.testing.wait_all_tasks_blocked()
        held.gate.open.set()
    assert first.passed == [1.0, 2.0]  # each with the later one of its expert
    assert one.statistics.batches == other.statistics.batches == 1


async def test_a_request_whose_caller_gave_up_does_not_cost_the_device() -> None:
    backend = expert()
    async with held_runtime(backend) as held:
        with trio.move_on_after(0.01) as patience:
            await held.runtime.work(forward_work(backend, torch.randn(1, WIDTH)))
        assert patience.cancelled_caught
        held.gate.open.set()
    assert backend.statistics.batches == 0


async def test_an_answer_that_nobody_waits_for_any_more_is_dropped() -> None:
    async with held_runtime() as held:
        held.around.cancel_scope.cancel()
        held.gate.open.set()
    assert held.gate.passed == [0.0]


async def test_the_end_answers_what_is_computed_and_refuses_what_waits() -> None:
    backend, refused = expert(), []

    async def ask() -> None:
        with pytest.raises(UnknownExpert, match="leaving") as error:
            await held.runtime.work(forward_work(backend, torch.randn(1, WIDTH)))
        refused.append(error.value)

    async with held_runtime(backend) as held:
        held.around.start_soon(ask)
        held.around.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        threading.Timer(0.05, held.gate.open.set).start()
    assert held.gate.passed == [0.0]
    assert len(refused) == 2
    assert refused[0].surely_not_executed
    assert refused[0] is not refused[1]
    assert not [thread for thread in threading.enumerate() if thread.name == "experts"]
    with pytest.raises(UnknownExpert):
        await held.runtime.work(forward_work(backend, torch.randn(1, WIDTH)))


async def test_an_error_of_one_expert_leaves_the_others_alone() -> None:
    broken, backend = ExpertBackend(GRID.at(1), Broken(), ROWS), expert()
    async with open_runtime([broken, backend]) as runtime:
        for _ in range(2):
            with pytest.raises(HandlerFailed):
                await runtime.work(forward_work(broken, torch.randn(1, WIDTH)))
            await runtime.work(forward_work(backend, torch.randn(1, WIDTH)))


async def test_a_removed_expert_refuses_what_waits_for_it() -> None:
    backend = expert()
    async with held_runtime(backend) as held:
        errors: list[PotluckError] = []

        async def ask() -> None:
            try:
                await held.runtime.work(forward_work(backend, torch.randn(1, WIDTH)))
            except PotluckError as error:
                errors.append(error)

        held.asking.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        held.runtime.remove(backend.uid)
        await trio.testing.wait_all_tasks_blocked()
        assert [type(error) for error in errors] == [UnknownExpert]
        with pytest.raises(UnknownExpert):
            held.runtime.find("ffn.0")
        held.runtime.add(backend)
        assert held.runtime.find("ffn.0") is backend
        with pytest.raises(ProtocolMisuse):
            held.runtime.add(backend)
        held.gate.open.set()


async def test_experts_are_found_by_uid() -> None:
    backend = expert(3)
    async with open_runtime([backend]) as runtime:
        assert runtime.find("ffn.3") is backend
        with pytest.raises(UnknownExpert, match=r"does not have the expert ffn\.4"):
            runtime.find("ffn.4")
        with pytest.raises(WrongUid):
            runtime.find("../etc/passwd")


async def test_a_function_runs_in_the_runtime_s_thread_between_two_batches() -> None:
    backend = expert()
    async with held_runtime(backend) as held:
        steps: list[tuple[str, int]] = []

        def look() -> None:
            steps.append((threading.current_thread().name, backend.statistics.steps))

        x = torch.randn(1, WIDTH)
        held.asking.start_soon(
            held.runtime.work,
            Work(backend, encode_tensor(x, "none", "x"), encode_tensor(x, "none", "x")),
        )
        held.asking.start_soon(held.runtime.run, look)
        await trio.testing.wait_all_tasks_blocked()
        assert steps == [], "a batch is under way"
        held.gate.open.set()
    assert steps == [("experts", 0)], "before the batch that waited longer"
    assert backend.statistics.steps == 1


async def test_an_error_of_such_a_function_is_raised_and_the_thread_goes_on() -> None:
    backend = expert()
    async with open_runtime([backend]) as runtime:
        with pytest.raises(ZeroDivisionError):
            await runtime.run(lambda: 1 // 0)
        await runtime.work(forward_work(backend, torch.randn(1, WIDTH)))
    with pytest.raises(ProtocolMisuse, match="has ended"):
        await runtime.run(print)


async def test_a_paused_runtime_is_busy() -> None:
    async with open_runtime() as runtime:
        runtime.paused = True
        with pytest.raises(Busy, match="paused"), runtime.room(ALICE, 1):
            pass
        runtime.paused = False
        with runtime.room(ALICE, 1):
            pass


async def test_the_load_is_the_time_of_what_waits() -> None:
    backend = expert()
    async with held_runtime(backend) as held:
        assert held.runtime.load() == 0.0  # nothing was measured yet
        held.gate.open.set()
        await held.runtime.work(forward_work(backend, torch.randn(4, WIDTH)))
        held.gate.open.clear()
        held.gate.reached.clear()
        held.asking.start_soon(
            held.runtime.work, forward_work(held.runtime.find("ffn.9"), numbered(1))
        )
        await until(held.gate.reached.is_set, PATIENCE_SECONDS)
        under_way = held.runtime.load()
        for waiting in range(1, 4):
            held.asking.start_soon(held.runtime.work, forward_work(backend, torch.randn(8, WIDTH)))
            await trio.testing.wait_all_tasks_blocked()
            one = 8 * backend.statistics.seconds / 4
            assert held.runtime.load() == pytest.approx(under_way + waiting * one)
        held.gate.open.set()


# ---- room


async def test_a_peer_may_hold_half_of_the_bytes_and_others_the_rest() -> None:
    async with open_runtime() as runtime:
        with runtime.room(ALICE, MOST_BYTES // 2):
            with pytest.raises(Busy) as busy, runtime.room(ALICE, 1):
                pytest.fail("there was room")
            assert busy.value.surely_not_executed
            with runtime.room(BOB, MOST_BYTES // 2), pytest.raises(Busy), runtime.room(BOB, 1):
                pytest.fail("there was room")
        with runtime.room(ALICE, MOST_BYTES // 2):
            pass


async def test_requests_are_counted_too() -> None:
    async with open_runtime() as runtime:
        rooms = [runtime.room(ALICE, 0) for _ in range(MOST_REQUESTS // 2)]
        for room in rooms:
            room.__enter__()
        with pytest.raises(Busy), runtime.room(ALICE, 0):
            pytest.fail("there was room")
        with runtime.room(BOB, 0):
            pass
        for room in rooms:
            room.__exit__(None, None, None)
        with runtime.room(ALICE, 0):
            pass
