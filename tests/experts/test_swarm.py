"""A layer on a swarm: the mixture that it would be here, also while servers die or lie."""

from __future__ import annotations

import copy
import logging
from statistics import mean

import pytest
import torch
import trio
from torch import Tensor, nn

from protocols.experts import DMoE, Grid, GridGate, Uid, UnknownExpert
from protocols.testing.world import WorldSettings
from tests.experts.liars import (
    Cutter,
    Liar,
    Mute,
    denying,
    filled,
    garbage,
    not_a_number,
    shorter_than_it_says,
    wider,
)
from tests.experts.swarms import (
    GRID,
    IN_FLIGHT,
    RATE,
    WIDTH,
    Server,
    Swarm,
    Training,
    in_training_thread,
    mixture,
    open_swarm,
    spread,
)
from tests.waiting import PATIENCE_SECONDS

SQUARE = Grid("ffn", (4, 4))
EXAMPLES, K = 20, 4
GRACE_SECONDS = 1.5  # a call that is given up after less says nothing
EXACT = 1e-5


def gate_and_inputs() -> tuple[GridGate, Tensor]:
    torch.manual_seed(6)
    return GridGate(WIDTH, GRID), torch.randn(EXAMPLES, WIDTH, requires_grad=True)


def square(y: Tensor) -> Tensor:
    return (y - 0.3).square().sum()


def layer_on(swarm: Swarm, gate: GridGate) -> DMoE:
    return DMoE(gate, swarm.experts, swarm.portal, k=K, timeout_seconds=PATIENCE_SECONDS)


def training_layer(swarm: Swarm) -> DMoE:
    torch.manual_seed(7)
    return DMoE(
        GridGate(WIDTH, SQUARE), swarm.experts, swarm.portal, k=K, grace_seconds=GRACE_SECONDS
    )


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


# ---- servers that die


def test_when_half_of_the_servers_are_killed_training_goes_on() -> None:
    """Two of them without a goodbye. No error reaches the trainer's loop."""
    before, batches = 40, 160

    async def main() -> None:
        async with open_swarm([Server(uids) for uids in spread(SQUARE, 8)], SQUARE) as swarm:

            def kill_half() -> None:
                for number, server in enumerate(swarm.servers[:4]):
                    swarm.crash(server, silently=number < 2)

            training = Training(swarm, training_layer(swarm), batches, {before: kill_half})
            await training.run()
        print(training.dropped, [round(x, 3) for x in training.losses[::10]])
        assert len(training.losses) + training.dropped == batches
        assert training.dropped <= IN_FLIGHT, "only what was under way is lost"
        recovery_seconds = training.times[before + 40] - training.times[before]
        keep_alive_seconds = WorldSettings().silence_seconds
        assert recovery_seconds < keep_alive_seconds, "nobody waits for the network to notice"
        assert mean(training.losses[-20:]) < mean(training.losses[before - 20 : before])

    trio.run(main)


# ---- servers that lie


def liars() -> dict[str, Liar | Cutter | Mute]:
    return {
        "garbage": Liar(garbage),
        "not a number": Liar(not_a_number),
        "huge": Liar(filled(1e30)),
        "another shape": Liar(wider),
        "short": Liar(shorter_than_it_says),
        "denies": Liar(denying(UnknownExpert)),
        "cuts off": Cutter(),
        "mute": Mute(),
    }


def test_servers_that_lie_are_refused_named_and_avoided(caplog: pytest.LogCaptureFixture) -> None:
    """The loss does not notice them."""
    caplog.set_level(logging.INFO, "potluck")
    batches = 100
    kinds = liars()

    async def main() -> None:
        cells = spread(SQUARE, 16)
        servers = [
            *(Server([*two, *more]) for two, more in zip(cells[0:4], cells[4:8], strict=True)),
            *(Server(one, liar) for one, liar in zip(cells[8:], kinds.values(), strict=True)),
        ]
        async with open_swarm(servers, SQUARE) as swarm:
            training = Training(swarm, training_layer(swarm), batches)
            await training.run()
            named = {
                kind: swarm.peer_of(server) in caplog.text
                for kind, server in zip(kinds, servers[4:], strict=True)
            }
        print(training.dropped, [round(x, 3) for x in training.losses[::10]])
        print(
            {kind: liar.calls for kind, liar in kinds.items()},
            named,
            training.times[-1] - training.times[0],
        )
        assert len(training.losses) == batches
        assert all(named.values()), named
        assert max(training.losses) < 2 * training.losses[0]
        assert mean(training.losses[-20:]) < training.losses[0] / 4

    trio.run(main)
