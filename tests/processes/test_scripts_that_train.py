"""Ordinary scripts that train together: the example in the documentation, and how they end."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

import pytest
import torch
import trio

from models.uncompiled import SGD
from node.core.configuration import Configuration
from node.core.node import open_real_network
from node.core.running_lock import AlreadyRunning
from node.training.guest import NobodyAnswers, collaborate
from protocols.accumulation.bridge import Bridge
from protocols.accumulation.optimizer import CollaborativeOptimizer
from protocols.errors import PotluckError
from protocols.identity import Identity
from protocols.network import Network
from tests.processes.children import Child, started

EXAMPLE: Final = Path(__file__).parents[2] / "docs" / "examples" / "train_together.py"
LONGEST_EXAMPLE_LINES: Final = 40
PEERS: Final = 3
SHARED_STEPS: Final = 3  # that all of them have made
START_SECONDS: Final = 60.0
TRAINING_SECONDS: Final = 240.0  # some ten on a quiet machine
LEAVE_SECONDS: Final = 5.0
LOOPBACK: Final = "/ip4/127.0.0.1/tcp/0"
ADDRESS: Final = re.compile(r"/ip4/127\.0\.0\.1/tcp/\d+/p2p/\w+")
GIVEN_UP: Final = "The steps that only this side has made are given up."
STEP: Final = re.compile(r"step (\d+) loss [\d.]+ model (\w+)\Z")


@asynccontextmanager
async def running_example(home: Path, *addresses: str) -> AsyncIterator[Child]:
    """Its output and its log come in one pipe. If Python's output were unbuffered, as it is if this
    is set to anything, `print` would write the end of a line separately, and a line of the log
    could come between."""
    environment = {
        "POTLUCK_HOME": str(home),
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "",
    }
    command = [sys.executable, str(EXAMPLE), *addresses]
    async with started(command, environment, errors_to=subprocess.STDOUT) as child:
        yield child


async def address_of(child: Child) -> str:
    with trio.fail_after(START_SECONDS):
        while line := (await child.read_line()).decode():
            if found := ADDRESS.search(line):
                return found.group()
    raise AssertionError("it ended without having said where others can join")


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= LONGEST_EXAMPLE_LINES


async def test_three_processes_learn_together_and_end_with_the_same_model(tmp_path: Path) -> None:
    """Of each step there is one model. A machine that stops a process for longer than a slot lives
    makes a fork (docs/assumptions.md, "Agreement"): then its side says so, and all have to make as
    many equal steps after that."""
    told: list[dict[int, str]] = [{} for _ in range(PEERS)]
    together = trio.Event()

    def shared() -> set[int]:
        return set.intersection(*map(set, told))

    async def follow(number: int, child: Child) -> None:
        while line := (await child.read_line()).decode():
            if GIVEN_UP in line:
                told[number].clear()
            if found := STEP.match(line):
                told[number][int(found[1])] = found[2]
                if len(shared()) >= SHARED_STEPS:
                    together.set()

    with trio.fail_after(TRAINING_SECONDS):
        async with AsyncExitStack() as stack, trio.open_nursery() as nursery:
            first = await stack.enter_async_context(running_example(tmp_path / "1"))
            address = await address_of(first)
            others = [
                await stack.enter_async_context(running_example(tmp_path / str(number), address))
                for number in range(2, PEERS + 1)
            ]
            for number, child in enumerate((first, *others)):
                nursery.start_soon(follow, number, child)
            await together.wait()
            for child in (first, *others):
                child.send_signal(signal.SIGINT)

    for step in shared():
        assert len({steps[step] for steps in told}) == 1, f"step {step}"


async def test_ctrl_c_ends_a_script_in_time_and_leaves_nothing_behind(tmp_path: Path) -> None:
    home = tmp_path / "home"
    async with running_example(home) as child:
        await address_of(child)
        child.send_signal(signal.SIGINT)
        began = time.monotonic()
        output = (await child.read_rest()).decode()
        code = await child.exit_code()
        seconds = time.monotonic() - began
    assert code == -signal.SIGINT, output
    assert output.rstrip().endswith("KeyboardInterrupt"), output
    assert seconds < LEAVE_SECONDS
    assert not list(home.rglob("*.sock")), "the control socket is still there"


def train_until_it_fails(bridge: Bridge, meanwhile: Callable[[int], None]) -> None:
    torch.set_num_threads(1)
    model = torch.nn.Linear(4, 1)
    optimizer = CollaborativeOptimizer(
        model.named_parameters(), lambda named: SGD(named, lr=0.1), bridge
    )
    while True:
        optimizer.zero_grad()
        loss = model(torch.randn(4, 4)).square().mean()
        loss.backward()
        optimizer.step(samples=4, loss=loss)
        meanwhile(optimizer.epoch)


def test_an_error_at_the_nodes_start_is_raised_before_the_block(tmp_path: Path) -> None:
    def begin() -> None:
        with collaborate(run="test", batch=8, listen=[LOOPBACK], home=tmp_path):
            raise AssertionError("two nodes had the same home")

    first = collaborate(run="test", batch=8, listen=[LOOPBACK], home=tmp_path)
    with first, pytest.raises(AlreadyRunning):
        begin()


def test_a_script_that_finds_nobody_to_join_does_not_train_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.training.guest.MEETING_SECONDS", 0.5)
    nobody = f"/ip4/127.0.0.1/tcp/9/p2p/{Identity.generate().peer_id}"

    def begin() -> None:
        with collaborate(run="test", batch=8, listen=[LOOPBACK], home=tmp_path, bootstrap=[nobody]):
            raise AssertionError("it trains although nobody answers")

    with pytest.raises(NobodyAnswers) as raised:
        begin()
    assert nobody in raised.value.why


def test_an_error_of_the_script_comes_out_and_the_node_ends(tmp_path: Path) -> None:
    def fail() -> None:
        with collaborate(run="test", batch=8, listen=[LOOPBACK], home=tmp_path):
            raise ZeroDivisionError

    for _ in range(2):  # the second time shows that the home is free again
        with pytest.raises(ZeroDivisionError):
            fail()


class Broken(PotluckError):
    """The error of the lab's network."""


def test_a_loop_learns_that_its_node_has_failed_and_by_what(tmp_path: Path) -> None:
    """It trains on until it waits for something, and the node's own error comes out."""
    failing = trio.Event()
    tokens: list[trio.lowlevel.TrioToken] = []

    @asynccontextmanager
    async def open_network(
        identity: Identity, configuration: Configuration
    ) -> AsyncIterator[Network]:
        async def fail() -> None:
            await failing.wait()
            raise Broken("The lab has broken it.")

        tokens.append(trio.lowlevel.current_trio_token())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fail)
            async with open_real_network(identity, configuration) as network:
                yield network
            nursery.cancel_scope.cancel()

    def fail_at_the_second_step(epoch: int) -> None:
        if epoch == 2:
            tokens[0].run_sync_soon(failing.set)

    def train() -> None:
        with collaborate(
            run="test", batch=8, listen=[LOOPBACK], home=tmp_path, open_network=open_network
        ) as bridge:
            train_until_it_fails(bridge, fail_at_the_second_step)

    with pytest.raises(Broken):
        train()
