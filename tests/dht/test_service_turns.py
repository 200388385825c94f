"""No message, however it is made, keeps all others waiting for long.

The tests count the checks between two pauses of the loop. If that says nothing, they measure the
processor time of the slowest step, with room for slow machines.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import trio

from protocols.dht import Slot
from protocols.dht.ids import ID_BYTES, position_of
from protocols.dht.messages import (
    FIND,
    FIND_REQUEST_BYTES,
    KNOWN_PER_QUERY,
    QUERIES_PER_REQUEST,
    WANTED_PER_QUERY,
    FindRequest,
    Query,
    prefix_of_slot,
)
from protocols.dht.slots import VerifiedSlots
from protocols.testing.world import SimulatedWorld
from tests.dht.impostors import that_greets
from tests.dht.members import Member, simulated, swarm
from tests.dht.publishers import HOUR, note, publisher
from tests.dht.test_service_faults import among, bring, now_of

LONGEST_STEP_SECONDS = 0.025  # several times what it takes, since tests run on busy machines


class Steps(trio.abc.Instrument):
    """The most that something grew within one step of any task."""

    def __init__(self, read: Callable[[], float]) -> None:
        self._read = read
        self._before = read()
        self.most = 0.0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:  # noqa: ARG002
        self._before = self._read()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:  # noqa: ARG002
        self.most = max(self.most, self._read() - self._before)


@contextmanager
def steps(read: Callable[[], float]) -> Iterator[Steps]:
    instrument = Steps(read)
    gc.disable()  # whose turn a collection falls in says nothing
    trio.lowlevel.add_instrument(instrument)
    try:
        yield instrument
    finally:
        trio.lowlevel.remove_instrument(instrument)
        gc.enable()


def checked_by(members: list[Member]) -> Callable[[], float]:
    def read() -> float:
        verified: list[VerifiedSlots] = [one.dht._state.storage.verified for one in members]
        return sum(one.signatures_checked for one in verified)

    return read


def fresh(number: int, expires: int, key: str = "note/many") -> list[Slot]:
    return [note(publisher(100 + one), key, str(one), 1, expires) for one in range(number)]


@simulated
async def test_a_batch_of_slots_is_checked_a_few_at_a_time(world: SimulatedWorld) -> None:
    stranger, node = await swarm(world, 2)
    slots = fresh(128, now_of(node) + HOUR)
    with steps(checked_by([node])) as most:
        assert (await bring(stranger, node, *slots)).refusals == bytes(128)
    assert most.most <= 8


@simulated
async def test_the_answer_of_a_replica_is_checked_a_few_slots_at_a_time(
    world: SimulatedWorld,
) -> None:
    now = int(world.honest_time() * 1000)
    slots = tuple(fresh(250, now + HOUR))
    members, _ = await among(world, that_greets(slots), impostors=1)
    with steps(checked_by(members)) as most:
        assert len(await members[0].dht.get("note/many")) == 250
    assert 0 < most.most <= 8


@simulated
async def test_a_replica_that_makes_up_more_publishers_than_a_key_may_have_is_cut_short(
    world: SimulatedWorld,
) -> None:
    now = int(world.honest_time() * 1000)
    slots = tuple(fresh(300, now + HOUR))
    members, _ = await among(world, that_greets(slots), impostors=1)
    assert len(await members[0].dht.get("note/many")) == 256


@pytest.mark.parametrize("asked", ["slots", "packed", "names", "wanted", "wanted in vain"])
def test_the_dearest_question_that_fits_in_a_message_costs_little(asked: str) -> None:
    @simulated
    async def scenario(world: SimulatedWorld) -> None:
        stranger, node = await swarm(world, 2)
        slots = fresh(256, now_of(node) + HOUR)
        await bring(stranger, node, *slots[:128])
        await bring(stranger, node, *slots[128:])
        wanted = b""
        if asked == "wanted":
            wanted = b"".join(map(prefix_of_slot, slots))
        elif asked == "wanted in vain":
            wanted = os.urandom(8 * WANTED_PER_QUERY)
        query = Query(
            position_of("note/many").to_bytes(ID_BYTES, "big"),
            "note/many",
            os.urandom(8 * KNOWN_PER_QUERY),
            wanted=wanted,
            named=asked == "names",
            packs=asked == "packed",
        )
        number = min(QUERIES_PER_REQUEST, (FIND_REQUEST_BYTES - 4096) // (700 + len(wanted)))
        with steps(time.thread_time) as most:
            await stranger.rpc.call(node.peer, FIND, FindRequest((query,) * number), timeout=60)
        assert most.most < LONGEST_STEP_SECONDS

    scenario()


@pytest.mark.slow
@simulated
async def test_writing_and_reading_many_keys_lets_others_have_their_turn(
    world: SimulatedWorld,
) -> None:
    members = await swarm(world, 12)
    entries = [(f"note/{number}", "x", 3600.0) for number in range(600)]
    with steps(time.thread_time) as most:
        written = await members[0].dht.put_many(entries)
        found = await members[1].dht.get_many([key for key, _, _ in entries])
    assert all(one.replicas for one in written)
    assert all(found.values())
    assert most.most < LONGEST_STEP_SECONDS
