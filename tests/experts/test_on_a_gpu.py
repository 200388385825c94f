"""Experts, their copies and the layer on a GPU do what they do on the processor."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lab.bench.local_experts import LocalExperts
from models.experts import build_expert
from protocols.experts import DMoE, ExpertBackend, ExpertGrid, GridGate, Rows, Uid
from protocols.experts.copies import CopyForm, CopyStore, restore, take_snapshot
from protocols.guest import Portal
from tests.devices import FIRST_PASS, NO_GPU
from tests.experts.test_layer import visit
from tests.experts.test_runtime import answers_of, backward_work, forward_work, parameters_of

pytestmark = [NO_GPU, FIRST_PASS]

GRID = ExpertGrid("ffn", (16,))
WIDTH = 8
KINDS = {
    "feed-forward": {"name": "feed-forward", "width": WIDTH, "inner": [16, 16]},
    "gated": {"name": "gated", "width": WIDTH, "inner": 16},
}


def same_expert_on(device: str, settings: dict[str, Any]) -> ExpertBackend:
    network = build_expert(settings, seed=3).to(device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
    return ExpertBackend(GRID.at(0), network, Rows((WIDTH,)), optimizer)


@pytest.mark.parametrize("kind", KINDS)
def test_an_expert_answers_and_learns_as_on_the_processor(kind: str) -> None:
    torch.manual_seed(1)
    here, there = (same_expert_on(device, KINDS[kind]) for device in ("cpu", "cuda"))
    for _ in range(5):
        inputs, gradients = torch.randn(9, WIDTH), torch.randn(9, WIDTH)
        for make in (
            lambda backend, x=inputs: forward_work(backend, x),
            lambda backend, x=inputs, g=gradients: backward_work(backend, x, g),
        ):
            (wanted,), (answer,) = answers_of([make(here)]), answers_of([make(there)])
            torch.testing.assert_close(answer, wanted, rtol=1e-4, atol=1e-5)
    for one, other in zip(parameters_of(there), parameters_of(here), strict=True):
        assert one.is_cuda
        torch.testing.assert_close(one.cpu(), other, rtol=1e-3, atol=1e-4)


def test_a_copy_from_a_gpu_is_restored_on_the_processor_and_back(tmp_path: Path) -> None:
    here, there = (same_expert_on(device, KINDS["feed-forward"]) for device in ("cpu", "cuda"))
    there.backward(torch.randn(9, WIDTH), torch.randn(9, WIDTH))
    store = CopyStore(tmp_path, "me")
    form = CopyForm(same_expert_on("cpu", KINDS["feed-forward"]))
    store.save(take_snapshot(there), form)
    x, gradients = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    wanted = there.backward(x, gradients)
    for backend in (here, same_expert_on("cuda", KINDS["feed-forward"])):
        restore(backend, store.path(there.uid), form)
        answer = backend.backward(x, gradients)  # the optimizer's statistics are on its device
        torch.testing.assert_close(answer, wanted, rtol=1e-4, atol=1e-5)
        for one, other in zip(parameters_of(backend), parameters_of(there), strict=True):
            torch.testing.assert_close(one.cpu(), other.cpu(), rtol=1e-3, atol=1e-4)


def test_the_layer_on_a_gpu_is_the_mixture_of_experts_elsewhere() -> None:
    torch.manual_seed(6)
    grid = ExpertGrid("ffn", (3, 4))
    uids = [grid.at(number) for number in range(grid.cells)]
    modules: dict[Uid, nn.Module] = {
        uid: build_expert(KINDS["feed-forward"], seed=seed) for seed, uid in enumerate(uids)
    }
    results: dict[str, tuple[Tensor, Tensor, list[Tensor]]] = {}
    gate, x = GridGate(WIDTH, grid), torch.randn(20, WIDTH)
    for device in ("cpu", "cuda"):
        experts = LocalExperts(copy.deepcopy(modules), lambda p: torch.optim.SGD(p, lr=0.1))
        own_gate = copy.deepcopy(gate).to(device)
        own_x = x.to(device).detach().requires_grad_()

        def guest(
            portal: Portal,
            gate: GridGate = own_gate,
            experts: LocalExperts = experts,
            x: Tensor = own_x,
        ) -> Tensor:
            y: Tensor = DMoE(gate, experts, portal, k=4)(x)
            (y - 0.3).square().sum().backward()
            return y.detach()

        y = visit(guest)
        assert y.device.type == device
        assert own_x.grad is not None
        gradients = [one.grad.cpu() for one in own_gate.parameters() if one.grad is not None]
        assert len(gradients) == len(list(own_gate.parameters()))
        results[device] = y.cpu(), own_x.grad.cpu(), gradients
    here, there = results["cpu"], results["cuda"]
    for number in range(2):
        torch.testing.assert_close(there[number], here[number], rtol=1e-4, atol=1e-5)
    for one, other in zip(there[2], here[2], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
