"""A model and data of one's own: the example in the docs, every shape of batch, and whose fault it
is when something in the module fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from models.trainable import Trainable, on_device, tensors_in
from node.core.failure import REPORT_IT, failure_of
from node.run.building import RunTask, build_task, parts_of, task_to_look_at
from node.run.checking import check
from node.run.costs import costs_of
from node.run.definition import read_definition
from node.run.dry_run import DataTrial, pass_over
from node.run.trusted import BrokenModule
from node.training.batch_size import measure
from tests.runs.definitions import TEXT

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "own_model"
OWN = TEXT.replace(
    b'name = "gpt"\nsize = "tiny"\ncontext = 16\nwidth = 16\nlayers = 1\nheads = 2\n',
    b'module = "own"\n[data]\nmodule = "own"\n',
)
MODULE = """
import torch
from models.trainable import Trainable

class Own(Trainable):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    def loss(self, batch):
        return LOSS

def build_model(settings, *, seed):
    return Own()

def open_batches(settings, *, seed, peer, samples):
    while True:
        x, y = torch.ones(samples, 3), torch.zeros(samples)
        yield BATCH
"""


class Pair(NamedTuple):
    x: Any
    y: Any


def task_of(folder: Path, loss: str, batch: str, more: str = "") -> RunTask:
    file = folder / "own.py"
    file.write_text(MODULE.replace("LOSS", loss).replace("BATCH", batch) + more)
    return build_task(read_definition(OWN), trusted={"own": file})


@pytest.mark.slow
def test_the_example_has_no_mistake_and_learns() -> None:
    text, trusted = (EXAMPLE / "run.toml").read_bytes(), {"waves": EXAMPLE / "waves.py"}
    definition, mistakes = check(text, trusted)
    assert mistakes == []
    assert definition is not None
    assert costs_of(definition, trusted).sample_bytes > 0
    task = build_task(definition, peer="alice", trusted=trusted)
    losses = []
    with task.open_batches(samples=64) as batches:
        for _ in range(300):
            loss = task.loss(next(batches))
            task.backward(loss)
            losses.append(loss.item())
            with torch.no_grad():
                for _name, one in task.named_parameters:
                    assert one.grad is not None
                    one -= 0.1 * one.grad
                    one.grad = None
    assert losses[-1] < 0.3 * losses[0]


def test_each_peer_of_the_example_has_samples_of_its_own() -> None:
    definition = read_definition((EXAMPLE / "run.toml").read_bytes())
    firsts = []
    for peer in ("alice", "bob", "bob"):
        trusted = {"waves": EXAMPLE / "waves.py"}
        with build_task(definition, peer=peer, trusted=trusted).open_batches(samples=4) as batches:
            firsts.append(next(batches)["past"])
    assert torch.equal(firsts[1], firsts[2])
    assert not torch.equal(firsts[0], firsts[1])


@pytest.mark.parametrize(
    ("loss", "batch"),
    [
        ("((batch[0] @ self.weight - batch[1]) ** 2).mean()", "x, y"),
        ("((batch[0] @ self.weight - batch[1]) ** 2).mean()", "[x, y]"),
        ("((batch['x'] @ self.weight - batch['y']) ** 2).mean()", "{'x': x, 'y': y}"),
        ("((batch[0]['x'] @ self.weight - batch[1]) ** 2).mean()", "({'x': x}, y, 'a note')"),
        ("(batch @ self.weight).mean()", "x"),
    ],
    ids=["tuple", "list", "dict", "nested", "tensor"],
)
def test_a_batch_may_have_any_usual_shape(tmp_path: Path, loss: str, batch: str) -> None:
    task = task_of(tmp_path, loss, batch)
    assert measure(task, most=4, target=64).micro_batch >= 1
    with task.open_batches(samples=5) as batches:
        given = next(batches)
    assert task.samples_in(given) == 5
    assert task.loss(given).item() == pytest.approx(9.0 if "y" in batch else 3.0)
    parts = parts_of(given, 3)
    assert [task.samples_in(one) for one in parts] == [2, 2, 1]


def test_a_batch_keeps_its_shape_on_its_way_to_a_device() -> None:
    batch = {"pair": Pair(torch.ones(2), [torch.zeros(2), "note"]), "count": 2}
    there = on_device(batch, "meta")
    assert isinstance(there["pair"], Pair)
    assert there["pair"].y[1] == "note"
    assert there["count"] == 2
    assert all(one.is_meta for one in tensors_in(there))
    assert len(list(tensors_in(there))) == 2


def test_values_that_belong_to_no_sample_go_to_every_part_of_a_batch() -> None:
    batch = torch.arange(4), torch.tensor(7.0), torch.ones(3)
    one, other = parts_of(batch, 2)
    assert one[0].tolist() == [0, 1]
    assert other[0].tolist() == [2, 3]
    assert one[1] is other[1] is batch[1]
    assert one[2] is batch[2]


def measured(task: RunTask) -> object:
    return measure(task, most=4, target=64)


def read_and_passed(task: RunTask) -> object:
    with task.open_batches(samples=2) as batches:
        return pass_over(task, next(batches))


@pytest.mark.parametrize("use", [measured, read_and_passed])
@pytest.mark.parametrize(
    ("loss", "batch", "line", "told"),
    [
        ("batch['x'].mean()", "x, y", 11, "loss failed"),
        ("(batch[0] @ self.weight[:2]).mean()", "x, y", 11, "loss failed"),
        ("(batch[0] @ self.weight).mean().item()", "x, y", 10, "gave one of type float"),
        ("batch[0] @ self.weight", "x, y", 10, "one number, the mean"),
        ("batch[0].mean()", "x, y", 10, "without a gradient"),
        ("(batch @ self.weight).mean()", "1 / 0", 19, "ZeroDivisionError"),
        ("(batch @ self.weight).mean()", "samples", None, "has no samples in it"),
        ("(batch @ self.weight).mean()", "torch.ones(0, 3)", None, "has no samples in it"),
    ],
)
def test_an_error_in_a_module_is_reported_with_its_file_and_line(
    tmp_path: Path,
    use: Callable[[RunTask], object],
    loss: str,
    batch: str,
    line: int | None,
    told: str,
) -> None:
    with pytest.raises(BrokenModule) as caught:
        use(task_of(tmp_path, loss, batch))
    failure = failure_of(caught.value)
    place = f"{tmp_path / 'own.py'}{'' if line is None else f', line {line}'}: "
    assert failure.what.startswith(place), failure.what
    assert told in f"{failure.what} {failure.why}"
    assert failure.advice != REPORT_IT
    assert "not potluck's" in failure.advice


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("\nOwn.samples_in = lambda self, batch: batch.sise", "samples_in failed"),
        ("\nOwn.samples_in = lambda self, batch: 0", "at least 1, and gave 0"),
        ("\ndef open_batches(settings, *, seed, peer, samples): return 7", "open_batches failed"),
        ("\ndef open_batches(settings): return 7", "open_batches failed"),
        ("\nraise SystemExit(3)", "SystemExit: 3"),
        ("\ndef", "SyntaxError"),
    ],
)
def test_each_other_function_of_a_module_is_named_when_it_fails(
    tmp_path: Path, more: str, told: str
) -> None:
    file = tmp_path / "own.py"
    file.write_text(MODULE.replace("LOSS", "batch.mean()").replace("BATCH", "x") + more)
    trial = DataTrial(read_definition(OWN), {"own": file}, pytest.fail)
    with pytest.raises(BrokenModule) as caught:
        trial.read()
    assert told in str(caught.value)
    assert str(file) in str(caught.value)


def test_an_error_while_gradients_are_computed_is_the_modules_too(tmp_path: Path) -> None:
    loss = "(self.weight.exp() * batch[0]).mul_(2).pow(2).add_(1).sqrt().mul_(0).mean()"
    task = task_of(tmp_path, loss, "x, y")  # torch refuses what was changed in place
    with pytest.raises(BrokenModule, match="the backward pass of its loss failed"):
        read_and_passed(task)


def test_memory_that_is_out_is_not_the_modules_fault(tmp_path: Path) -> None:
    task = task_of(tmp_path, "torch.empty(1 << 60)", "x")
    with pytest.raises(RuntimeError, match="memory"):
        task.loss(torch.ones(2, 3))


def test_a_model_without_text_needs_to_be_told_where_its_samples_come_from(tmp_path: Path) -> None:
    task_of(tmp_path, "batch.mean()", "x")
    text = OWN.replace(b'[data]\nmodule = "own"\n', b"")
    _, (mistake,) = check(text, {"own": tmp_path / "own.py"})
    assert "window is 0" in mistake


def test_a_model_of_ones_own_must_only_have_a_loss(tmp_path: Path) -> None:
    task_of(tmp_path, "batch.mean()", "x")
    trusted = {"own": tmp_path / "own.py"}
    task = task_to_look_at(read_definition(OWN), trusted)
    assert isinstance(task.model, Trainable)
    assert (task.model.window, task.activation_bytes(), task.plain_model) == (0, (0, 0), {})
    assert costs_of(read_definition(OWN), trusted).parameters == 3
