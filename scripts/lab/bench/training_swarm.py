"""A swarm of peers that train together, each a process of its own, and their logs.

    async with open_training_swarm(Training(target_batch=256)) as swarm:
        peer = await swarm.start()
        ...
        await swarm.kill(peer)
        audit = swarm.audit()

Every life of a peer has a home and a log of its own and numbers its samples from a place of its
own, so the logs of all lives together say whose samples are in which step (training_audit.py).

The processes are forked from one that has imported everything (orders.py).

A peer that starts after the others have stepped has a state to fetch first, and over slow links
that may take longer than their steps. So peers that are measured start together.
"""

from __future__ import annotations

import itertools
import signal
import tempfile
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio

from lab.bench.cables import MTU, SLOW_MTU, host_of, lay_cable, make_hub
from lab.bench.processes import BenchFailed, BenchProcess, PeerForge, open_forge
from lab.bench.training_audit import AuditedLife, RunAudit, audit_run
from lab.bench.training_log import read_log

PEER = ("-m", "lab.bench.training_peer")
RUN = "bench"
BOOTSTRAP_PEERS = 3  # that a new peer gets
NUMBERS_PER_LIFE = 1 << 32
SLOW_MBPS = 10.0  # of a cable: 9,000 bytes take 7 ms
WINDOW_FACTOR = 20  # of TCP's windows on cables: a tenth of a second of the link
GLANCE_SECONDS = 0.2  # between two looks at how far the peers are


@dataclass(frozen=True)
class Training:
    """The same settings for all peers of a swarm. `task` and `manner` are the fields of
    training_task.Task and of training_peer.Manner that are not their defaults (neither is imported
    here: they need torch); `up_bytes_per_second` is each peer's uplink, 0 for no limit. With
    `link_mbps` each peer has a network of its own, on a cable of this rate up and down; `up_mbps`
    is another rate up."""

    target_batch: int
    task: dict[str, Any] = field(default_factory=dict)
    manner: dict[str, Any] = field(default_factory=dict)
    codec: str = "none"
    grace_seconds: float = 10.0
    up_bytes_per_second: float = 0.0
    link_mbps: float = 0.0
    up_mbps: float = 0.0
    group_size: int = 64


@dataclass(eq=False)
class TrainingProcess:
    """One life of one peer."""

    number: int
    process: BenchProcess
    end_of_life: AsyncExitStack
    log: Path
    peer: str = ""
    address: str = ""

    @property
    def name(self) -> str:
        return f"life {self.number}"

    async def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        return await self.process.ask(do, **arguments)


class TrainingSwarm:
    """The processes of one bench. Made by `open_training_swarm`."""

    def __init__(
        self,
        training: Training,
        folder: Path,
        logs: Path,
        forge: PeerForge,
        hub: BenchProcess | None,
    ) -> None:
        """`hub`: has the other ends of the peers' cables; None: all are on loopback."""
        self.living: list[TrainingProcess] = []
        self.training = training
        self._folder = folder
        self._logs = logs
        self._forge = forge
        self._lives: list[TrainingProcess] = []
        self._numbers = itertools.count(1)
        self._hub = hub

    async def start(self, **manner: Any) -> TrainingProcess:
        """A fresh volunteer, which trains once it has caught up. `manner`: its own settings."""
        (life,) = await self.join(1)
        await self.train(life, manner)
        return life

    async def join(self, count: int, *, mbps: float | None = None) -> list[TrainingProcess]:
        """So many volunteers whose nodes are there; they have not begun to train. `mbps`: the rate
        of their cables, up and down, if it is not the others'."""
        usual = self.training.link_mbps
        rates = (mbps, mbps) if mbps else (self.training.up_mbps or usual, usual)
        return [await self._join(rates) for _ in range(count)]

    async def start_together(self, manners: Iterable[dict[str, Any]]) -> list[TrainingProcess]:
        """This many volunteers, which begin when all are there: none has a state to fetch."""
        manners = list(manners)
        lives = await self.join(len(manners))
        company = {"company": len(manners) - 1}
        async with trio.open_nursery() as nursery:
            for life, manner in zip(lives, manners, strict=True):
                nursery.start_soon(self.train, life, company | manner)
        return lives

    async def _join(self, mbps: tuple[float, float]) -> TrainingProcess:
        """A process of its own with a node that has joined the others'."""
        number = next(self._numbers)  # at once: several may be starting
        async with AsyncExitStack() as starting:
            process = await starting.enter_async_context(self._forge.open_process(f"life {number}"))
            life = TrainingProcess(number, process, starting, self._logs / f"{number}.jsonl")
            self._lives.append(life)
            where: dict[str, Any] = {}
            if self._hub is not None:
                mtu = SLOW_MTU if min(mbps) < SLOW_MBPS else MTU
                window = WINDOW_FACTOR * min(mbps)
                await lay_cable(self._hub, process, number, mbps, window, mtu)
                where = {"host": host_of(number)}
            known = [other.address for other in self.living][:BOOTSTRAP_PEERS]
            joined = await process.ask(
                "join",
                home=str(self._folder / f"home{number}"),
                addresses=known,
                up_bytes_per_second=self.training.up_bytes_per_second,
                **where,
            )
            life.peer, life.address = joined["peer"], joined["address"]
            life.end_of_life = starting.pop_all()
        self.living.append(life)
        return life

    async def train(self, life: TrainingProcess, manner: dict[str, Any]) -> None:
        """Let one that has joined begin to train."""
        training = self.training
        await life.ask(
            "train",
            settings={
                "run": RUN,
                "target_batch": training.target_batch,
                "codec": training.codec,
                "grace_seconds": training.grace_seconds,
                "group_size": training.group_size,
            },
            task=training.task,
            manner=training.manner | manner,
            first_number=life.number * NUMBERS_PER_LIFE,
            log=str(life.log),
        )

    async def kill(self, life: TrainingProcess) -> None:
        """SIGKILL, in the middle of whatever it does."""
        self.living.remove(life)
        life.process.send_signal(signal.SIGKILL)
        await life.end_of_life.aclose()

    async def leave(self, lives: Iterable[TrainingProcess]) -> None:
        """Let these end their loops and their part in the run; their processes stay."""
        await self.ask_all("leave", lives)

    async def until_epoch(
        self, epoch: int, seconds: float, lives: Iterable[TrainingProcess] | None = None
    ) -> None:
        """Wait until all of these have come to this epoch. BenchFailed if that takes longer."""
        epochs: list[int] = []
        try:
            with trio.fail_after(seconds):
                while not epochs or min(epochs) < epoch:
                    await trio.sleep(GLANCE_SECONDS)
                    epochs = await self._epochs(self.living if lives is None else lives)
        except trio.TooSlowError:
            raise BenchFailed(
                f"The run did not come to epoch {epoch} within {seconds:g} seconds.",
                why=f"Its peers are at {epochs}.",
            ) from None

    async def _epochs(self, lives: Iterable[TrainingProcess]) -> list[int]:
        asked = await self.ask_all("progress", lives)
        if failures := [one["failure"] for one in asked.values() if one["failure"]]:
            raise BenchFailed("A peer's training failed.", why=failures[0])
        return [one["epoch"] for one in asked.values()]

    async def ask_all(
        self, do: str, lives: Iterable[TrainingProcess] | None = None, **arguments: Any
    ) -> dict[int, dict[str, Any]]:
        """The same order to several at once. Peers that die meanwhile are not among the answers."""
        answers: dict[int, dict[str, Any]] = {}

        async def ask(life: TrainingProcess) -> None:
            try:
                answers[life.number] = await life.ask(do, **arguments)
            except BenchFailed:
                if not await life.process.has_ended():
                    raise

        async with trio.open_nursery() as nursery:
            for life in list(self.living if lives is None else lives):
                nursery.start_soon(ask, life)
        return answers

    def audit(self) -> RunAudit:
        """The audit of all logs so far."""
        return audit_run(
            AuditedLife(life.peer, list(read_log(life.log)), life.name)
            for life in self._lives
            if life.log.exists()
        )

    def lines(self, life: TrainingProcess, what: str) -> list[dict[str, Any]]:
        """The lines of one kind in the log of this life."""
        if not life.log.exists():  # it has not begun
            return []
        return [line for line in read_log(life.log) if line["what"] == what]


@asynccontextmanager
async def open_training_swarm(
    training: Training, logs: Path | None = None
) -> AsyncIterator[TrainingSwarm]:
    """A swarm without peers. Its processes are killed when the block ends.
    The peers' logs stay in `logs`, an existing folder, if one is given."""
    with tempfile.TemporaryDirectory(prefix="potluck-bench-") as folder:
        async with open_forge(PEER) as forge, AsyncExitStack() as stack:
            hub = None
            if training.link_mbps:
                hub = await stack.enter_async_context(forge.open_process("the hub"))
                await make_hub(hub, WINDOW_FACTOR * training.link_mbps)
            swarm = TrainingSwarm(training, Path(folder), logs or Path(folder), forge, hub)
            try:
                yield swarm
            finally:
                with trio.CancelScope(shield=True):
                    for life in list(swarm.living):
                        await swarm.kill(life)
