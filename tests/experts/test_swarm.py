"""A layer on a swarm: the mixture that it would be here, also while servers die or lie."""

from __future__ import annotations

import copy

import pytest
import torch
import trio
from torch import Tensor, nn

from protocols.experts import DMoE, GridGate, Uid
from tests.experts.swarms import (
    GRID,
    RATE,
    WIDTH,
    Server,
    Swarm,
    in_training_thread,
    mixture,
    open_swarm,
    spread,
)
from tests.waiting import PATIENCE_SECONDS

EXAMPLES, K = 20, 4
EXACT = 1e-5


def gate_and_inputs() -> tuple[GridGate, Tensor]:
    torch.manual_seed(6)
    return GridGate(WIDTH, GRID), torch.randn(EXAMPLES, WIDTH, requires_grad=True)


def square(y: Tensor) -> Tensor:
    return (y - 0.3).square().sum()


def layer_on(swarm: Swarm, gate: GridGate) -> DMoE:
    return DMoE(gate, swarm.experts, swarm.portal, k=K, timeout_seconds=PATIENCE_SECONDS)


def compare_with_the_mixture(
    swarm: Swarm, layer: DMoE, x: Tensor, here: dict[Uid, nn.Module], absent: set[Uid]
) -> None:
    """For a training thread: outputs, all gradients, and the step of each expert."""
    gate = layer.gate
    wanted = mixture(gate, here, x, K, absent)
    wanted_grads = torch.autograd.grad(square(wanted), [x, *gate.parameters()], retain_graph=True)
    got = layer(x)
    torch.testing.assert_close(got, wanted, rtol=EXACT, atol=EXACT)
    grads = torch.autograd.grad(square(got), [x, *gate.parameters()])
    for one, other in zip(grads, wanted_grads, strict=True):
        torch.testing.assert_close(one, other, rtol=EXACT, atol=EXACT)
    parameters = [own for module in here.values() for own in module.parameters()]
    torch.optim.SGD(parameters, lr=RATE).zero_grad()
    square(wanted).backward(inputs=parameters)
    torch.optim.SGD(parameters, lr=RATE).step()
    stepped = swarm.modules()
    for uid, module in here.items():
        if uid not in absent:
            for one, other in zip(stepped[uid].parameters(), module.parameters(), strict=True):
                torch.testing.assert_close(one, other, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("dead", [0, 1], ids=["all live", "one server is dead"])
def test_the_layer_is_the_mixture_of_the_experts_that_answer(dead: int) -> None:
    """Forward, the gradients of input and gate, and one optimizer step of each expert."""

    async def main() -> None:
        async with open_swarm([Server(uids) for uids in spread(GRID, 4)]) as swarm:
            gate, x = gate_and_inputs()
            layer = layer_on(swarm, gate)
            absent: set[Uid] = set()
            with torch.no_grad():
                await in_training_thread(layer, x)  # so that it knows all hosts
            for server in swarm.servers[:dead]:
                swarm.crash(server)
                absent.update(server.uids)
            here = copy.deepcopy(swarm.modules())
            await in_training_thread(compare_with_the_mixture, swarm, layer, x, here, absent)
            living = {uid: here[uid] for uid in here if uid not in absent}
            with torch.no_grad():
                again = await in_training_thread(layer, x)
                wanted = mixture(gate, living, x, K)
            torch.testing.assert_close(again, wanted, rtol=EXACT, atol=EXACT)

    trio.run(main)
