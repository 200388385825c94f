"""Compiled passes give what plain ones give, and a machine that cannot compile trains without."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any, Final

import pytest
import torch
import trio
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

from models.errors import ModelsError
from node.core.caps.settings import Caps
from node.run.building import RunTask, build_task
from node.run.compiled_loss import CompiledLoss
from node.run.costs import COMPILER_BYTES, costs_of
from node.run.definition import incompatible_parts, read_definition
from node.run.signed import read_signed, sign_definition
from node.training.batch_size import measure
from node.training.join import Participation, participation
from protocols.accumulation.bridge import Bridge
from protocols.accumulation.optimizer import CollaborativeOptimizer
from tests.accumulation.training_peers import training_world
from tests.runs.definitions import FINGERPRINT, NAME, NOW_MS, ORGANISER, TEXT, with_line

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # torch's own

COMPILED: Final = with_line("compile = true")
SCALE: Final = 1024.0  # of the loss: as fp16 has one


class Counting:
    """A compiler that leaves the passes as they are, and counts."""

    def __init__(self, then: Callable[[], None] = lambda: None) -> None:
        self.compiled, self._then = 0, then

    def __call__(self, graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> Callable[..., Any]:
        self.compiled += 1
        self._then()
        return graph.forward


def task_with(backend: str | Callable[..., Any], text: bytes = COMPILED) -> RunTask:
    """A run's task as built, but for what compiles it."""
    torch._dynamo.reset()
    task = build_task(read_definition(text))
    assert task.compiled is not None
    return replace(task, compiled=CompiledLoss(task.model.loss, backend=backend))


def gradients_of(task: RunTask, samples: int = 4) -> dict[str, Tensor]:
    task.compute(task.made_up_batch(samples), lambda loss: loss * SCALE)
    found = {name: one.grad for name, one in task.named_parameters if one.grad is not None}
    for _, one in task.named_parameters:
        one.grad = None
    return found


def is_used(task: RunTask) -> bool:
    assert task.compiled is not None
    return task.compiled.is_used


def trouble_of(task: RunTask) -> str:
    assert task.compiled is not None
    return task.compiled.take_trouble()


def check_like_plain(task: RunTask, *, rtol: float = 1e-4, atol: float = 1e-4) -> None:
    plain, compiled = gradients_of(replace(task, compiled=None)), gradients_of(task)
    assert list(compiled) == list(plain)
    for name, gradient in compiled.items():
        torch.testing.assert_close(gradient, plain[name], rtol=rtol, atol=atol * SCALE)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bf16", "fp16"])
def test_a_compiled_pass_gives_the_same_gradients_in_every_precision(precision: str) -> None:
    task = task_with("aot_eager", with_line(f'compile = true\nprecision = "{precision}"'))
    coarse = 0.02 if precision == "bf16" else 0.004
    check_like_plain(task, rtol=coarse, atol=coarse / 10)
    assert is_used(task), trouble_of(task)


def test_the_names_of_parameters_and_of_the_run_stay() -> None:
    plain, compiled = read_definition(TEXT), read_definition(COMPILED)
    task = task_with("eager")
    task.compute(task.made_up_batch(2))
    names = [name for name, _ in build_task(plain).named_parameters]
    assert [name for name, _ in task.named_parameters] == names
    assert list(task.model.state_dict()) == list(build_task(plain).model.state_dict())
    assert compiled.first_parameters == plain.first_parameters
    assert incompatible_parts(plain, compiled) == []


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler here")
def test_torchs_own_compiler_gives_the_same_gradients() -> None:
    torch._dynamo.reset()
    model = nn.Linear(3, 1)  # a GPT takes it a minute

    def loss_of(batch: Tensor) -> Tensor:
        return nn.functional.gelu(model(batch)).square().mean()

    compiled = CompiledLoss(loss_of)
    for samples in (4, 7):
        batch = torch.randn(samples, 3)
        made, plain = compiled(batch), loss_of(batch)
        gradients = [torch.autograd.grad(one, list(model.parameters())) for one in (made, plain)]
        torch.testing.assert_close(*gradients)
    assert compiled.is_used


@pytest.mark.slow
def test_one_compilation_serves_all_sizes_in_all_threads_and_one_sample_takes_another() -> None:
    counting = Counting()
    task = task_with(counting)
    gradients_of(task, 2)
    thread = threading.Thread(target=gradients_of, args=(task, 7))
    thread.start()
    thread.join()
    for samples in (3, 8, 2, 32):
        gradients_of(task, samples)
    assert counting.compiled == 1
    gradients_of(task, 1)
    gradients_of(task, 1)
    assert counting.compiled == 2
    assert is_used(task), trouble_of(task)


@pytest.mark.slow
def test_a_machine_without_a_compiler_says_so_in_one_sentence_and_computes_plainly() -> None:
    from torch._inductor import config

    task = task_with("inductor")
    with config.patch("cpp.cxx", ("no-such-compiler",)):
        check_like_plain(task, rtol=0.0, atol=0.0)
    assert trouble_of(task) == (
        "This machine trains without compiling the model, because it has no C++ compiler (g++ or "
        "clang++)."
    )
    assert trouble_of(task) == ""
    assert not is_used(task)


@pytest.mark.slow
def test_a_compiler_that_fails_in_the_backward_pass_leaves_no_gradients_of_its_own() -> None:
    def refuse(_graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> Callable[..., Any]:
        raise ArithmeticError("no such instruction")

    task = task_with(aot_autograd(fw_compiler=Counting(), bw_compiler=refuse))
    check_like_plain(task, rtol=0.0, atol=0.0)
    assert "torch's compiler failed" in trouble_of(task)


def test_a_models_own_error_is_not_blamed_on_the_compiler() -> None:
    task = task_with("eager")
    with pytest.raises(ModelsError, match="windows"):
        task.compute(torch.zeros(2, 1, dtype=torch.uint8))
    assert is_used(task), trouble_of(task)


def test_memory_that_is_out_is_not_blamed_on_the_compiler() -> None:
    def full(_graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> Callable[..., Any]:
        def run(*_: Any) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory.")

        return run

    task = task_with(full)
    with pytest.raises(torch.OutOfMemoryError):
        gradients_of(task)
    assert is_used(task), trouble_of(task)


@pytest.mark.slow
def test_a_compiled_peer_and_a_plain_one_hold_the_same_bits_after_each_step() -> None:
    task = task_with("eager")
    plain = replace(build_task(read_definition(TEXT), peer="plain"), compiled=None)

    gradients_of(task)  # compiles it

    def train(bridge: Bridge, number: int) -> dict[int, bytes]:
        mine = (task, plain)[number]
        optimizer = CollaborativeOptimizer(mine.named_parameters, mine.optimizer_factory, bridge)
        held: dict[int, bytes] = {}
        with mine.open_batches(samples=8) as batches:
            while optimizer.epoch < 3:
                optimizer.zero_grad()
                loss = mine.compute(next(batches), optimizer.scaled)
                if optimizer.step(samples=8, loss=loss):
                    parts = [one.numpy().tobytes() for one in mine.model.state_dict().values()]
                    held[optimizer.epoch] = b"".join(parts)
        return held

    async def main() -> None:
        async with training_world() as world:
            compiled, others = await world.train(await world.peers(2), train)
            both = compiled.keys() & others.keys()
            assert 3 in both
            assert {epoch: compiled[epoch] for epoch in both} == {one: others[one] for one in both}

    trio.run(main)
    assert is_used(task), trouble_of(task)


@pytest.mark.parametrize(
    ("text", "wanted", "keeps_only", "compiled"),
    [
        (TEXT, None, False, False),
        (COMPILED, None, False, True),
        (COMPILED, False, False, False),
        (TEXT, True, False, True),
        (COMPILED, True, True, False),
    ],
)
def test_the_owner_decides_and_otherwise_the_run(
    text: bytes, wanted: bool | None, keeps_only: bool, compiled: bool
) -> None:
    data = sign_definition(text, ORGANISER, now_ms=NOW_MS)
    signed = read_signed(data, run=NAME, organiser=FINGERPRINT)
    part = Participation(NAME, FINGERPRINT, keeps_only=keeps_only)
    own = participation._as_its_owner_wants(signed, Caps(compile=wanted), part).definition
    assert (build_task(own).compiled is not None) == compiled
    more = costs_of(own).memory_bytes(1) - costs_of(read_definition(TEXT)).memory_bytes(1)
    assert more == (COMPILER_BYTES if compiled else 0)


def test_several_devices_compute_without_it() -> None:
    task = build_task(read_definition(COMPILED), device=("cpu", "cpu"))
    assert not is_used(task)
    assert "several GPUs" in trouble_of(task)


def test_the_benchmark_measures_compiled_passes_and_does_not_count_the_compilation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # of this clock, a compiled pass takes a second, a plain one three, and to compile an hour
    now = count()
    usual = RunTask.loss

    def slower(task: RunTask, batch: Any, model: Any = None) -> Tensor:
        next(now), next(now)
        return usual(task, batch, model)

    monkeypatch.setattr(RunTask, "loss", slower)

    def an_hour() -> None:
        for _ in range(3600):
            next(now)

    counting = Counting(an_hour)
    task = task_with(counting)
    found = measure(task, most=4, target=1 << 10, clock=lambda: float(next(now)))
    assert counting.compiled == 1
    assert found.batch_seconds == 1.0
