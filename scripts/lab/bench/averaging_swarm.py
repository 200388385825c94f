"""A swarm of averaging peers, each a process of its own, and the rounds that they are ordered to
do.

The caller chooses how many values each peer holds and in which codec. Peer i holds `factor(i) *
base` before every round, so different sets of peers have different averages. `round` has some peers
average at once and collects their answers; a peer that dies meanwhile gives none, and is in `lost`.

The processes are forked from one that has imported everything (orders.py), or, in the layout
"separate", each import everything for themselves, as on machines of their own.

A stopped peer does not notice that the bench has ended. Only in the layout "fork" is it still
killed.
"""

from __future__ import annotations

import secrets
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from auth.keys import SEED_BYTES
from lab import Talk
from lab.bench.processes import BenchFailed, BenchProcess, PeerForge, open_forge, open_process

BOOTSTRAP_PEERS = 3  # that a new peer gets
PEER = ("-m", "lab.bench.averaging_peer")


@dataclass(eq=False)
class SwarmPeer:
    """One process: its number decides its values; its name is its own."""

    number: int
    factor: float
    process: BenchProcess
    life: AsyncExitStack
    peer: str = ""
    address: str = ""

    def send_signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def end(self) -> None:
        await self.life.aclose()


class SwarmRound:
    """The peers' answers to one round, by their numbers, and which of them died in it."""

    def __init__(self, epoch: int, numbers: Iterable[int]) -> None:
        self.epoch = epoch
        self.numbers = tuple(numbers)
        self.answers: dict[int, dict[str, Any]] = {}
        self.lost: list[int] = []
        self._over = {number: trio.Event() for number in self.numbers}

    def note(self, number: int, answer: dict[str, Any] | None) -> None:
        """Take one peer's answer, or that it is dead."""
        if answer is None:
            self.lost.append(number)
        else:
            self.answers[number] = answer
        self._over[number].set()

    async def over_for(self, numbers: Iterable[int]) -> None:
        """Wait until these have an outcome, or are dead."""
        for number in numbers:
            await self._over[number].wait()

    def ended_for(self, numbers: Iterable[int]) -> float:
        """When the last living one of these was done, by the monotonic clock."""
        return float(max(self.answers[number]["ended"] for number in numbers))

    @property
    def committed(self) -> dict[int, dict[str, Any]]:
        """The answers of the peers that hold a result."""
        return {
            number: answer
            for number, answer in self.answers.items()
            if answer["verdict"] == "committed"
        }

    @property
    def seconds(self) -> float:
        """From the first peer's call to the last peer's return."""
        return self.ended_for(self.answers) - float(
            min(answer["began"] for answer in self.answers.values())
        )

    @property
    def exchange_seconds(self) -> float:
        """From the first peer's start of the exchange to the last peer's end."""
        phases = [answer["phases"] for answer in self.answers.values()]
        return float(
            max(one["exchange_ended"] for one in phases)
            - min(one["exchange_began"] for one in phases)
        )

    @property
    def bytes_moved(self) -> int:
        """The chunks, as encoded, that all peers sent: each byte counts once, where it is sent."""
        return sum(answer["phases"]["bytes_sent"] for answer in self.answers.values())

    @property
    def check_cpu_seconds(self) -> float:
        """What the bench spent on the comparison of the results."""
        return float(sum(one.get("check_cpu_seconds", 0.0) for one in self.answers.values()))

    def verdicts(self) -> str:
        """How the round ended for each peer, in words."""
        said = [
            f"peer {number + 1}: {answer['verdict']} "
            f"{answer.get('reason') or answer['phases'].get('reason', '')}".rstrip()
            for number, answer in sorted(self.answers.items())
        ]
        return "; ".join([*said, *(f"peer {number + 1}: died" for number in self.lost)])


def factor_of(number: int) -> float:
    """A different power of two each: sums of different sets differ, and are exact."""
    return float(2**number)


class AveragingSwarm:
    """The processes of one bench. Made by `open_swarm`."""

    def __init__(
        self,
        values: int,
        codec: str,
        folder: Path,
        factor: Callable[[int], float],
        forge: PeerForge | None,
    ) -> None:
        self.peers: dict[int, SwarmPeer] = {}
        self.values = values
        self.codec = codec
        self._factor = factor
        self._factors: dict[str, float] = {}  # of every peer that ever was, by its name
        self._forge = forge
        self._base_file = folder / "base"
        self._auth_seed = secrets.token_bytes(SEED_BYTES)
        self._based = False

    async def start(self, number: int) -> SwarmPeer:
        """A fresh process that takes part from its next round on."""
        async with AsyncExitStack() as starting:
            process = await starting.enter_async_context(self._open_process(f"peer {number + 1}"))
            factor = self._factor(number)
            peer = SwarmPeer(number, factor, process, starting)
            known = [other.address for other in self.peers.values()][:BOOTSTRAP_PEERS]
            joined = await process.ask("join", auth_seed=self._auth_seed.hex(), addresses=known)
            peer.peer, peer.address = joined["peer"], joined["address"]
            make, self._based = not self._based, True
            await process.ask(
                "hold",
                base_file=str(self._base_file),
                values=self.values,
                codec=self.codec,
                factor=factor,
                make=make,
            )
            peer.life = starting.pop_all()
        self._factors[peer.peer] = factor
        self.peers[number] = peer
        return peer

    def _open_process(self, name: str) -> AbstractAsyncContextManager[BenchProcess]:
        if self._forge is None:
            return open_process(name, PEER)
        return self._forge.open_process(name)

    async def start_all(self, count: int, say: Talk = lambda _line: None) -> None:
        """This many peers, one after the other."""
        for number in range(count):
            say(f"starting peer {number + 1} of {count}")
            await self.start(number)

    async def end(self, number: int) -> None:
        """End a peer that is dead, or should be."""
        await self.peers.pop(number).end()

    async def arm(self, numbers: Iterable[int]) -> float:
        """Set the values of these peers again; the CPU seconds that they have used so far."""
        return _sum_of("seconds", await self.ask_all("arm", numbers))

    async def cpu_seconds(self) -> float:
        return _sum_of("seconds", await self.ask_all("cpu", self.peers))

    async def round(self, epoch: int, numbers: Collection[int]) -> SwarmRound:
        """Have these average at once, until each has an outcome or is dead."""
        this = SwarmRound(epoch, numbers)
        await self.run(this)
        return this

    async def run(self, this: SwarmRound) -> None:
        """The same for a round that somebody else watches meanwhile."""
        arguments = {"expected": len(this.numbers), "factors": self._factors}

        async def average(peer: SwarmPeer) -> None:
            this.note(peer.number, await _answer(peer, "average", epoch=this.epoch, **arguments))

        async with trio.open_nursery() as nursery:
            for number in this.numbers:
                nursery.start_soon(average, self.peers[number])

    async def digests(self, numbers: Iterable[int]) -> dict[int, str | None]:
        """Of all bits of the last result that each of these peers has."""
        asked = await self.ask_all("digest", numbers)
        return {number: answer["digest"] for number, answer in asked.items()}

    async def ask_all(
        self, do: str, numbers: Iterable[int], **arguments: Any
    ) -> dict[int, dict[str, Any]]:
        """The same order to several peers at once. Dead ones are not among the answers."""
        answers: dict[int, dict[str, Any]] = {}

        async def ask(peer: SwarmPeer) -> None:
            answer = await _answer(peer, do, **arguments)
            if answer is not None:
                answers[peer.number] = answer

        async with trio.open_nursery() as nursery:
            for number in numbers:
                nursery.start_soon(ask, self.peers[number])
        return answers


def _sum_of(name: str, answers: Mapping[int, dict[str, Any]]) -> float:
    return float(sum(answer[name] for answer in answers.values()))


async def _answer(peer: SwarmPeer, do: str, **arguments: Any) -> dict[str, Any] | None:
    """None from a peer that is dead; BenchFailed from one that lives and does not do it."""
    try:
        return await peer.process.ask(do, **arguments)
    except BenchFailed:
        if await peer.process.has_ended():
            return None
        raise


@asynccontextmanager
async def open_swarm(
    values: int,
    codec: str = "none",
    factor: Callable[[int], float] = factor_of,
    *,
    layout: str = "fork",
) -> AsyncIterator[AveragingSwarm]:
    """A swarm without peers. Its processes are killed when the block ends."""
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="potluck-bench-"))
        forge = await stack.enter_async_context(open_forge(PEER)) if layout == "fork" else None
        swarm = AveragingSwarm(values, codec, Path(folder), factor, forge)
        try:
            yield swarm
        finally:
            with trio.CancelScope(shield=True):
                async with trio.open_nursery() as nursery:
                    for peer in swarm.peers.values():
                        peer.send_signal(signal.SIGKILL)
                        nursery.start_soon(peer.end)


@asynccontextmanager
async def ready_to_kill(peer: SwarmPeer) -> AsyncIterator[Callable[[], float]]:
    """Yields a function that kills the peer and returns the moment."""

    def kill() -> float:
        peer.send_signal(signal.SIGKILL)
        return time.perf_counter()

    await trio.lowlevel.checkpoint()
    yield kill


@asynccontextmanager
async def ready_to_stop(peer: SwarmPeer) -> AsyncIterator[Callable[[], float]]:
    """Yields a function that stops the peer and returns the moment; it is continued at the end."""

    def stop() -> float:
        peer.send_signal(signal.SIGSTOP)
        return time.perf_counter()

    await trio.lowlevel.checkpoint()
    try:
        yield stop
    finally:
        peer.send_signal(signal.SIGCONT)


def disagreement(this: SwarmRound, digests: Mapping[int, str | None]) -> str:
    """The fault, if the peers that committed do not all hold the right average of the same members.

    A peer that has died since has no digest any more; its answer still counts.
    """
    answers = this.committed
    if not answers:
        return ""
    if len({tuple(answer["members"]) for answer in answers.values()}) > 1:
        return "peers committed averages of different members"
    if len({answer["agreed_digest"] for answer in answers.values()}) > 1:
        return "peers committed different digests"
    if len({digests[number] for number in answers if number in digests}) > 1:
        return "peers hold different bits"
    for answer in answers.values():
        error = answer["relative_error"]
        if not error <= answer["tolerated_error"]:  # also NaN
            return f"the result is no average of its members: relative error {error:.3g}"
    return ""
