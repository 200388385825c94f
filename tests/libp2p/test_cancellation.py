"""Cancelled anywhere, nothing is left: a sweep over every step that trio makes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from node.net.network import Libp2pNetwork, open_libp2p_network
from protocols.errors import Unreachable
from protocols.identity import Identity
from tests.libp2p.nodes import (
    LOOPBACK,
    echo,
    networks,
    open_descriptors,
    running_tasks,
)
from tests.waiting import PATIENCE_SECONDS, until

ECHO = "/potluck/echo/1.0.0"
NEAR, FAR = Identity.from_seed(bytes([1]) * 32), Identity.from_seed(bytes([2]) * 32)
# Steps skipped between two points of a sweep in a fast run; coprime to any rhythm in the steps.
STRIDE = 41


@dataclass(eq=False)
class CancelAtStep(trio.abc.Instrument):
    """Counts every step of every task while armed, and cancels a scope at one of them."""

    step: int
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    counted: int = 0
    armed: bool = False

    def after_task_step(self, task: trio.lowlevel.Task) -> None:  # noqa: ARG002
        if self.armed:
            self.counted += 1
            if self.counted == self.step:
                self.scope.cancel()


Scenario = Callable[[CancelAtStep], Awaitable[None]]


def sweep(scenario: Scenario, stride: int) -> None:
    """Run the scenario once to its end, then again and again, cancelled at each step of it."""

    def run(step: int) -> int:
        instrument = CancelAtStep(step)
        trio.run(scenario, instrument, instruments=[instrument])
        return instrument.counted

    descriptors = open_descriptors()
    whole = run(step=-1)
    assert whole > 20
    for step in range(1, whole + stride, stride):
        run(step)
        assert open_descriptors() == descriptors, f"cancelled at step {step} of {whole}"


async def start_connect_open_and_close(cancelling: CancelAtStep) -> None:
    cancelling.armed = True
    with cancelling.scope:
        async with (
            open_libp2p_network(FAR, LOOPBACK) as far,
            open_libp2p_network(NEAR, LOOPBACK) as near,
        ):
            far.serve(ECHO, echo)
            near.learn_addresses(far.peer_id, far.addresses())
            stream = await near.open(far.peer_id, ECHO)
            await stream.send_all(b"x")
            await stream.receive_some()


async def connect(cancelling: CancelAtStep) -> None:
    async with networks(2) as (near, far):
        await wait_all_tasks_blocked()
        tasks = running_tasks()
        cancelling.armed = True
        with cancelling.scope:
            await near.connect(far.peer_id)
        cancelling.armed = False
        if cancelling.scope.cancelled_caught:
            assert near.links() == ()
            await until(lambda: not far.links(), within_seconds=PATIENCE_SECONDS)
            await until(lambda: running_tasks() <= tasks, within_seconds=PATIENCE_SECONDS)
        with trio.fail_after(PATIENCE_SECONDS):
            await near.connect(far.peer_id)
        assert len(near.links()) == 1


async def open_a_stream(cancelling: CancelAtStep) -> None:
    async with networks(2) as (near, far):
        far.serve(ECHO, echo)
        await near.connect(far.peer_id)
        await wait_all_tasks_blocked()
        cancelling.armed = True
        with cancelling.scope:
            stream = await near.open(far.peer_id, ECHO)
            await stream.aclose()
        cancelling.armed = False
        await until(lambda: open_streams(near, far) == 0, within_seconds=PATIENCE_SECONDS)
        with trio.fail_after(PATIENCE_SECONDS):
            stream = await near.open(far.peer_id, ECHO)
            await stream.send_all(b"sound")
            assert await stream.receive_some() == b"sound"


def open_streams(*of: Libp2pNetwork) -> int:
    return sum(link.open_streams for network in of for link in network.links())


@pytest.mark.parametrize(
    ("scenario", "stride"),
    [
        pytest.param(start_connect_open_and_close, STRIDE, marks=pytest.mark.slow),
        pytest.param(connect, STRIDE, marks=pytest.mark.slow),
        (open_a_stream, 4 * STRIDE),
    ],
)
def test_cancelled_at_many_a_step_nothing_is_left(scenario: Scenario, stride: int) -> None:
    sweep(scenario, stride)


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(start_connect_open_and_close, marks=pytest.mark.soak),
        pytest.param(connect, marks=pytest.mark.slow),
        pytest.param(open_a_stream, marks=pytest.mark.slow),
    ],
)
def test_cancelled_at_any_step_nothing_is_left(scenario: Scenario) -> None:
    sweep(scenario, 1)


@pytest.mark.slow
async def test_a_thousand_cancelled_opens_leave_no_task_stream_or_descriptor() -> None:
    async with networks(2) as (near, far):
        far.serve(ECHO, echo)
        await near.connect(far.peer_id)
        await until(lambda: open_streams(near, far) == 0, within_seconds=PATIENCE_SECONDS)
        await wait_all_tasks_blocked()
        tasks, descriptors = running_tasks(), open_descriptors()

        async def give_up() -> None:
            with trio.CancelScope() as scope:
                scope.cancel()
                await near.open(far.peer_id, ECHO)

        async def give_up_soon(patience_seconds: float) -> None:
            with trio.move_on_after(patience_seconds):
                stream = await near.open(far.peer_id, ECHO)
                stream.reset()

        for batch in range(10):
            async with trio.open_nursery() as nursery:
                for number in range(50):
                    nursery.start_soon(give_up)
                    nursery.start_soon(give_up_soon, 0.0002 * number * batch)
        await until(lambda: open_streams(near, far) == 0, within_seconds=PATIENCE_SECONDS)
        await until(lambda: running_tasks() <= tasks, within_seconds=PATIENCE_SECONDS)
        assert open_descriptors() <= descriptors
        stream = await near.open(far.peer_id, ECHO)
        await stream.send_all(b"sound")
        assert await stream.receive_some() == b"sound"


async def test_ten_callers_share_one_dial_and_one_who_gives_up_does_not_end_it() -> None:
    async with networks(2) as (near, far):
        outcomes: list[str] = []

        async def call(patience_seconds: float) -> None:
            with trio.move_on_after(patience_seconds):
                await near.connect(far.peer_id)
                outcomes.append("connected")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(call, 0)
            for _ in range(9):
                nursery.start_soon(call, PATIENCE_SECONDS)
        assert outcomes == ["connected"] * 9
        assert len(near._links.every_connection()) == 1


async def test_every_caller_gets_the_error_of_a_shared_dial() -> None:
    async with open_libp2p_network(NEAR, LOOPBACK) as near:
        failures: list[Unreachable] = []

        async def call() -> None:
            with pytest.raises(Unreachable) as failure:
                await near.connect(FAR.peer_id)
            failures.append(failure.value)

        near.learn_addresses(FAR.peer_id, ["/ip4/127.0.0.1/tcp/1"])
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(call)
        assert len({str(failure) for failure in failures}) == 1
        assert len({id(failure) for failure in failures}) == 3
        assert "connection refused" in failures[0].why
