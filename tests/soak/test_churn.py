"""Peers come, go, die, stop and return while the others work: nothing leaks and nobody hangs.

Six wanderers do things to one another at random. The test kills, stops, continues and restarts
all of them but one, the witness, from which everything is read at the end.

Easy to get wrong: a leak of memory hides behind a heap that is still warming up. The witness is
therefore measured from a third of the time on.
"""

from __future__ import annotations

import json
import random
import signal
import sys
from dataclasses import dataclass, field
from typing import Any, Final

import pytest
import trio

from protocols.identity import Identity
from tests.processes.children import START_SECONDS, PeerProcess, started
from tests.processes.peer import SEED_VARIABLE
from tests.soak.lengths import SECONDS

PEERS: Final = 6
FAULT_SECONDS: Final = 0.7  # between two faults, on average
DOWN_SECONDS: Final = 0.3
STOPPED_SECONDS: Final = (0.1, 4.0)  # some are noticed as dead, some are not
# Half of the deadline of a call, and what a busy machine adds
HANG_SECONDS: Final = 20.0
QUIET_SECONDS: Final = 15.0
# Buffers in use at one moment and not at another; a leak grows with the time that one gives it
MEMORY_BYTES: Final = 48 << 20


@dataclass
class Place:
    """One of the six: an identity that keeps its port, and whichever process holds it now."""

    number: int
    identity: Identity = field(default_factory=Identity.generate)
    port: int = 0
    process: PeerProcess | None = None
    reports: list[dict[str, Any]] = field(default_factory=list)
    succeeded_at: float = 0.0


@dataclass
class Crowd:
    places: list[Place]
    chance: random.Random
    introducing: trio.Lock = field(default_factory=trio.Lock)
    resting: bool = False
    killed: int = 0
    stopped: int = 0

    async def keep(self, place: Place) -> None:
        """Start a process for this place, and a new one whenever it was killed."""
        while True:
            command = [sys.executable, "-m", "tests.soak.wanderer"]
            command += ["--chance", str(self.chance.randrange(1 << 30)), "--port", str(place.port)]
            seed = {SEED_VARIABLE: place.identity.seed.hex()}
            async with started(command, seed) as child:
                with trio.fail_after(START_SECONDS):
                    told = json.loads(await child.read_line())
                place.process = child.as_peer(told["peer"], told["addresses"])
                place.port = place.process.port
                place.succeeded_at = trio.current_time()
                if self.resting:  # it was down when the others were told
                    await order(place.process, {"rest": True})
                await self.introduce()
                await self._read_reports(place, place.process)
                code = await child.exit_code()
                assert code == -signal.SIGKILL, f"peer {place.number} ended by itself: {code}"
            await trio.sleep(DOWN_SECONDS)

    async def _read_reports(self, place: Place, process: PeerProcess) -> None:
        place.reports.clear()
        while line := await process.read_line():
            report = json.loads(line)
            before = place.reports[-1]["succeeded"] if place.reports else 0
            if report["succeeded"] > before:
                place.succeeded_at = trio.current_time()
            place.reports.append(report)
        place.process = None

    async def introduce(self) -> None:
        """Tell everybody where everybody is."""
        async with self.introducing:
            running = [place.process for place in self.places if place.process is not None]
            know = {process.peer: process.addresses for process in running}
            for process in running:
                await order(process, {"know": know})

    async def disturb(self) -> None:
        """Kill one of the others, stop another, again and again."""
        async with trio.open_nursery() as nursery:
            while True:
                await trio.sleep(self.chance.expovariate(1 / FAULT_SECONDS))
                place = self.chance.choice(self.places[1:])
                if place.process is None:
                    continue
                if self.killed <= self.stopped:  # in turn: which of them is left to no luck
                    self.killed += 1
                    place.process.send_signal(signal.SIGKILL)
                else:
                    self.stopped += 1
                    nursery.start_soon(
                        _stop_for_a_while, place.process, self.chance.uniform(*STOPPED_SECONDS)
                    )

    async def watch_for_hangs(self) -> None:
        while True:
            await trio.sleep(1.0)
            now = trio.current_time()
            for place in self.places:
                if place.process is not None:
                    silent = now - place.succeeded_at
                    assert silent < HANG_SECONDS, (
                        f"peer {place.number} got nothing done for {silent:.0f} s: "
                        f"{place.reports[-1:]}"
                    )


async def _stop_for_a_while(process: PeerProcess, seconds: float) -> None:
    process.send_signal(signal.SIGSTOP)
    await trio.sleep(seconds)
    process.send_signal(signal.SIGCONT)


async def order(process: PeerProcess, what: dict[str, Any]) -> None:
    """Give an order; one that was killed meanwhile takes none."""
    try:
        await process.standard_input.send_all(json.dumps(what).encode() + b"\n")
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        return


@pytest.mark.parametrize("seconds", SECONDS)
async def test_nothing_leaks_and_nobody_hangs_while_peers_come_and_go(seconds: float) -> None:
    """F1, F3, F4"""
    chance = random.Random(20)
    crowd = Crowd([Place(number) for number in range(PEERS)], chance)
    witness = crowd.places[0]
    async with trio.open_nursery() as nursery:
        for place in crowd.places:
            nursery.start_soon(crowd.keep, place)
        with trio.fail_after(START_SECONDS):
            while any(not place.reports for place in crowd.places):  # noqa: ASYNC110
                await trio.sleep(0.1)
        assert witness.process is not None
        async with trio.open_nursery() as disturbance:
            disturbance.start_soon(crowd.disturb)
            disturbance.start_soon(crowd.watch_for_hangs)
            await trio.sleep(seconds / 3)
            memory_before = witness.process.memory_bytes()
            await trio.sleep(seconds * 2 / 3)
            disturbance.cancel_scope.cancel()

        crowd.resting = True
        for place in crowd.places[1:]:
            if place.process is not None:
                place.process.send_signal(signal.SIGCONT)
                await order(place.process, {"rest": True})
        await order(witness.process, {"rest": True})
        await at_rest(witness)
        assert witness.process.memory_bytes() - memory_before < MEMORY_BYTES
        assert crowd.killed > 0
        assert crowd.stopped > 0
        nursery.cancel_scope.cancel()


async def at_rest(witness: Place) -> None:
    """Insist that the witness soon holds no more than when it had just started."""
    first = witness.reports[0]
    with trio.move_on_after(QUIET_SECONDS):
        while True:
            await trio.sleep(0.5)
            last = witness.reports[-1]
            if (
                last["links"] == last["streams"] == last["handlers"] == 0
                and last["tasks"] <= first["tasks"]
                and last["file_descriptors"] <= first["file_descriptors"]
            ):
                return
    raise AssertionError(f"it began with {first} and ended with {witness.reports[-1]}")
