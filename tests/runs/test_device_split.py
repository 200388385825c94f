"""One batch over several devices: the loss and the gradients of the whole, whatever the model.

There may be no GPU where this is tested. So torch's two ways to GPUs and back, which know nothing
else, are replaced by the same for processors; how replicas are made and wired stays torch's own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from node.core.caps.settings import Caps
from node.run import building
from node.run.building import RunTask, build_task
from node.run.definition import read_definition
from node.training.join import participation
from tests.runs.definitions import TEXT, changed

TWO = ("cpu", "cpu")
ALBERT = changed('"gpt"', '"albert"').replace(
    b"context = 16\nwidth = 16\n", b"context = 16\nwidth = 16\nwide = 32\nembedding = 8\n"
)
CLASSIFIER = changed(
    'name = "gpt"\nsize = "tiny"\ncontext = 16\nwidth = 16\nlayers = 1\nheads = 2\n',
    'name = "classifier"\nsize = "tiny"\n',
)


def to_processors(
    tensors: Sequence[Tensor], devices: Sequence[Any], detach: object = False
) -> list[list[Tensor]]:
    """The result of torch's broadcast to GPUs: a copy for each, from which gradients come back."""
    return [[one.detach().clone() if detach else one.clone() for one in tensors] for _ in devices]


def on_processors(
    modules: Sequence[Callable[..., Tensor]], inputs: Sequence[tuple[Any]], **_options: Any
) -> list[Tensor]:
    """Like torch's parallel_apply: each in a thread of its own."""
    with ThreadPoolExecutor(len(modules)) as pool:
        begun = [pool.submit(module, *given) for module, given in zip(modules, inputs, strict=True)]
        return [one.result() for one in begun]


@pytest.fixture
def processors(monkeypatch: pytest.MonkeyPatch) -> None:
    replicating = importlib.import_module("torch.nn.parallel.replicate")
    monkeypatch.setattr(replicating, "_broadcast_coalesced_reshape", to_processors)
    monkeypatch.setattr(replicating, "_get_device_index", lambda device, _optional: device)
    monkeypatch.setattr(building, "parallel_apply", on_processors)


def gradients_of(task: RunTask, batch: Any) -> dict[str, Tensor]:
    task.loss(batch).backward()  # type: ignore[no-untyped-call]
    return {name: one.grad for name, one in task.named_parameters if one.grad is not None}


@pytest.mark.usefixtures("processors")
@pytest.mark.parametrize("text", [TEXT, ALBERT, CLASSIFIER], ids=["gpt", "albert", "classifier"])
@pytest.mark.parametrize("samples", [5, 1])
def test_several_devices_are_one_peer(text: bytes, samples: int) -> None:
    definition = read_definition(text)
    one, two = (build_task(definition, device=devices) for devices in ("cpu", TWO))
    batch = two.made_up_batch(samples)
    assert two.loss(batch).item() == pytest.approx(one.loss(batch).item(), rel=1e-5)
    alone, spread = gradients_of(one, batch), gradients_of(two, batch)
    assert spread.keys() == alone.keys()
    for name, gradient in alone.items():
        torch.testing.assert_close(spread[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("here", "wanted", "taken"),
    [
        (("cuda:0", "cuda:1", "cpu"), "auto", ("cuda:0", "cuda:1")),
        (("cuda:0", "cuda:1", "cpu"), "cuda:1", ("cuda:1",)),
        (("cuda:0", "cpu"), "auto", ("cuda:0",)),
        (("mps", "cpu"), "auto", ("mps",)),
        (("mps", "cpu"), "cpu", ("cpu",)),
        (("cpu",), "auto", ("cpu",)),
    ],
)
def test_all_gpus_of_a_machine_are_taken_unless_one_is_named(
    monkeypatch: pytest.MonkeyPatch, here: tuple[str, ...], wanted: str, taken: tuple[str, ...]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: sum("cuda" in one for one in here))
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: "mps" in here)
    devices, threads = participation._devices_of(Caps(device=wanted))
    assert devices == taken
    assert threads == torch.get_num_threads()
