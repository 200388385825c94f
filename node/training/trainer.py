"""Train in a run until told to leave: the core of `potluck join` and `potluck run start`.

    session = TrainingSession(shown)
    left = await train_run(node, definition, task, TrainerOptions(), session)

`TrainerOptions` has the owner's choices for this machine; everything else is in the run's
definition. The loop itself (loop.py) is ordinary PyTorch in a worker thread; this module feeds,
watches and ends it:

    measure -> enter the run, catching up if it is further -> train -> see the round out -> leave

Promises: it ends when `session.departure` says so: at once, or after the current round, but never
later than `ROUND_PATIENCE_SECONDS` and one batch. It also ends with the node, and with errors of
the run that waiting cannot fix, which it raises. Then it releases everything it took.

The training thread cannot be stopped from outside. It is told to stop, and everything that it may
wait for (the gate, data, the bridge) is woken; a batch that is being computed is waited for.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from node.core.node import Node
from node.core.traffic_meter import TrafficMeter
from node.run.checkpoint_keeper import CheckpointSettings
from node.training.account import SessionAccount
from node.training.batch_size import BatchSize, MeasuredBatch, limit_of, measure
from node.training.departure import ROUND_PATIENCE_SECONDS
from node.training.guest import train_in_thread
from node.training.happenings import (
    COMPILING,
    ENTERING,
    MEASURING,
    Leaving,
    Left,
    Measured,
    Paused,
    Preparing,
    Resumed,
)
from node.training.loop import Loop, give_back_memory, tell_trouble
from node.training.loss_curve import LossCurve, keep
from node.training.network_watch import watch_network
from node.training.session import TrainingSession
from node.training.watched import WatchedTraining
from protocols.accumulation.collaboration import Collaboration
from protocols.blocking import in_thread

if TYPE_CHECKING:
    from node.run.building import RunTask
    from node.run.definition import RunDefinition
    from node.run.mixtures import ExpertsOf
    from protocols.experts import ExpertDirectory, Runtime


logger = logging.getLogger("potluck.trainer")

TRAFFIC_SECONDS = 1.0  # between two looks at the bytes that were sent
LOSSES_SECONDS = 60.0  # seconds of the loss curve that a kill may lose


def _whole() -> float:
    return 1.0


async def _nothing() -> None:
    """The default for `make_sure`: there is nothing to check."""


@dataclass(frozen=True)
class TrainerOptions:
    """The device and the threads are the task's, which was built for them.

    - `micro_batch`: samples in one forward pass; 0 measures.
    - `most_samples`: the most that memory allows; 0 takes the definition's.
    - `batch_share`: the share of the micro-batch to use, read between batches: less if memory is
      short.
    - `make_sure`: called last before the run is entered; an error from it keeps this peer out.
    - `name`: the name that its owner wants others to see.
    - `begins`: this peer may begin the run anew: the organiser's first one.
    - `from_peers`: it waits for others who have the run's state instead.
    - `keeps_only`: it brings no samples, and helps with the rounds of the others.
    - `offload`: its copies for averaging stay in the machine's memory.
    - `checkpoints`: this peer keeps the run's.
    - `up_bytes_per_second`, `down_bytes_per_second`: for the plans of rounds; 0 is measured.
    - `upload_limit`, `download_limit`: the owner's limits, to be shown; None is no limit.
    - `most_kept_bytes`, `most_followed_bytes`, `has_memory_for`: as in CollaborationSettings.
    - `fetching_folder`: a partly fetched state is kept there across a restart.
    - `position_file`: the position in the data is kept there.
    - `losses_file`: the curve of the run's loss is kept there across a restart.
    - `experts`: where the experts of a run with some are found; by default a directory of its own.
    - `own_experts`: the runtime of those that this node serves itself.
    """

    micro_batch: int = 0
    most_samples: int = 0
    batch_share: Callable[[], float] = _whole
    make_sure: Callable[[], Awaitable[None]] = _nothing
    name: str = ""
    begins: bool = False
    from_peers: bool = False
    keeps_only: bool = False
    offload: bool = False
    checkpoints: CheckpointSettings | None = None
    up_bytes_per_second: float = 0.0
    down_bytes_per_second: float = 0.0
    upload_limit: float | None = None
    download_limit: float | None = None
    most_kept_bytes: float = math.inf
    most_followed_bytes: float = math.inf
    has_memory_for: Callable[[int], bool] = lambda _: True
    fetching_folder: Path | None = None
    position_file: Path | None = None
    losses_file: Path | None = None
    experts: ExpertDirectory | None = None
    own_experts: Runtime | None = None


async def train_run(
    node: Node,
    definition: RunDefinition,
    task: RunTask,
    options: TrainerOptions,
    session: TrainingSession,
) -> Left:
    """Take part in the run of `definition` with its built `task`. Returns the session's result."""
    found: list[BatchSize] = []

    def tell() -> None:
        session.happened(Leaving(session.departure.at_once))

    async with session.departure.cuts_short(tell):
        await _until_open(session)
        measured = await _batch_size(definition, task, options, session)
        await options.make_sure()
        found.append(measured)
    if not found:
        return _left(session)
    session.happened(Preparing(ENTERING))
    loop = Loop(
        definition,
        task,
        session,
        batch_size=found[0],
        keeps_only=options.keeps_only,
        offload=options.offload,
        share=options.batch_share,
        position_file=options.position_file,
        experts_of=_experts_of(node, definition, options, session),
    )
    settings = definition.collaboration_settings(
        name=options.name,
        begins=options.begins and not options.from_peers,
        up_bytes_per_second=options.up_bytes_per_second,
        down_bytes_per_second=options.down_bytes_per_second,
        fetching_folder=options.fetching_folder,
        most_kept_bytes=options.most_kept_bytes,
        most_followed_bytes=options.most_followed_bytes,
        has_memory_for=options.has_memory_for,
    )

    async def beside(collaboration: Collaboration) -> None:
        await _watch(node, collaboration, options, session)

    def wake() -> None:  # also if the node ends without anybody asking to leave
        session.gate.end()
        loop.stop_reading()

    losses = _LossesFile(session.account, options.losses_file, definition.first_parameters)
    await in_thread(losses.load)
    try:
        async with trio.open_nursery() as nursery:
            training = trio.CancelScope()
            nursery.start_soon(_end_when_told, session, wake, training, options.keeps_only)
            nursery.start_soon(losses.keep_on)
            with training:
                await train_in_thread(
                    node, settings, loop.run, options.checkpoints, beside=beside, wake=wake
                )
            session.watched = None
            nursery.cancel_scope.cancel()
    finally:
        await losses.keep()
    return _left(session)


def _experts_of(
    node: Node, definition: RunDefinition, options: TrainerOptions, session: TrainingSession
) -> ExpertsOf | None:
    """How each mixture of the model gets its experts, in a run with experts."""
    section = definition.experts
    if section is None:
        return None
    from node.run.experts import directory_name
    from protocols.experts import ExpertClient, ExpertDirectory, HostRecords, SwarmExperts

    directory = options.experts or ExpertDirectory(
        node.network, node.dht, directory_name(definition)
    )
    client, records = ExpertClient(node.rpc), HostRecords()
    client.own = options.own_experts
    session.take_served_rows = records.take_rows
    return lambda grid: SwarmExperts(directory, client, grid, records, codec=section.codec)


class _LossesFile:
    """The curve of the run's loss on the disk. Training does not need it: errors of the disk only
    go to the log, once as long as they last."""

    def __init__(self, account: SessionAccount, path: Path | None, run: str) -> None:
        self._account, self._path, self._run = account, path, run
        self._kept, self._has_failed = b"", False

    def load(self) -> None:
        if self._path is None:
            return
        try:
            self._account.curve = LossCurve.read(self._path, self._run)
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            logger.warning("the run's loss curve starts anew: %s", error)

    async def keep(self) -> None:
        """Also when it is cancelled."""
        data = self._account.curve.as_bytes(self._run)
        if self._path is None or data == self._kept:
            return
        try:
            with trio.CancelScope(shield=True):
                await in_thread(keep, data, self._path)
        except OSError as error:
            if not self._has_failed:
                why = error.strerror or error
                logger.warning("the run's loss curve cannot be saved: %s", why)
            self._has_failed = True
        else:
            self._kept, self._has_failed = data, False

    async def keep_on(self) -> None:
        while True:
            await trio.sleep(LOSSES_SECONDS)
            await self.keep()


def _left(session: TrainingSession) -> Left:
    account = session.account
    left = Left(
        account.samples,
        account.steps,
        round(session.seconds, 3),
        account.lost_samples,
        account.alone_samples,
        account.alone_steps,
        session.expert_rows,
    )
    session.happened(left)
    return left


async def _batch_size(
    definition: RunDefinition, task: RunTask, options: TrainerOptions, session: TrainingSession
) -> BatchSize:
    """The given size, or a measured one."""
    target = definition.training.batch
    most = options.most_samples or definition.training.samples_at_once
    if options.micro_batch or options.keeps_only:
        return BatchSize(options.micro_batch, limit_of(most, target))
    measured = await _measured(task, most, target, session)
    return BatchSize(measured.micro_batch, measured.fits, measured.batch_seconds)


async def _until_open(session: TrainingSession) -> None:
    """A peer that starts outside of its schedule waits for it before it computes."""
    changed = trio.Event()
    token = trio.lowlevel.current_trio_token()

    def wake() -> None:
        with suppress(trio.RunFinishedError):
            token.run_sync_soon(lambda: changed.set())

    reasons = session.gate.reasons()
    if not reasons:
        return
    began = trio.current_time()
    session.happened(Paused(tuple(one.words for one in reasons)))
    session.gate.watch(wake)
    while not session.gate.is_open:
        await changed.wait()
        changed = trio.Event()
    session.happened(Resumed(round(trio.current_time() - began, 3)))


async def _measured(
    task: RunTask, most: int, target: int, session: TrainingSession
) -> MeasuredBatch:
    """The benchmark, in a thread that is abandoned on cancellation. If the gate closes meanwhile,
    it ends soon, and is made again when the gate has opened."""
    while True:
        compiles = task.compiled is not None and task.compiled.is_used
        session.happened(Preparing(COMPILING if compiles else MEASURING))
        closed = threading.Event()

        def goes_on(closed: threading.Event = closed) -> bool:
            if not session.gate.is_open:
                closed.set()
            return not (closed.is_set() or session.departure.wanted)

        found: MeasuredBatch = await trio.to_thread.run_sync(
            partial(measure, task, most=most, target=target, goes_on=goes_on),
            abandon_on_cancel=True,  # type: ignore[call-arg] # the stubs are of an older trio
        )
        if session.departure.wanted or not closed.is_set():
            break
        await in_thread(give_back_memory)
        await _until_open(session)
    tell_trouble(task, session)
    session.happened(
        Measured(
            device=" + ".join(str(one) for one in task.devices),
            threads=_threads(),
            micro_batch=found.micro_batch,
            samples_per_second=round(found.samples_per_second, 3),
            batch_seconds=round(found.batch_seconds, 4),
            compiled=task.compiled is not None and task.compiled.is_used,
        )
    )
    return found


def _threads() -> int:
    import torch

    return torch.get_num_threads()


async def _watch(
    node: Node, collaboration: Collaboration, options: TrainerOptions, session: TrainingSession
) -> None:
    """Report on the run, the links and the traffic, until cancelled."""
    meter = TrafficMeter(options.upload_limit, options.download_limit)
    session.watched = WatchedTraining(node, collaboration, meter)
    collaboration.follow(session.happened)

    async def follow_the_traffic() -> None:
        while True:
            traffic = node.network.traffic()
            meter.note(trio.current_time(), traffic.sent_bytes, traffic.received_bytes)
            await trio.sleep(TRAFFIC_SECONDS)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(follow_the_traffic)
        await watch_network(node.network, node.dht, session, begins=options.begins)


async def _end_when_told(
    session: TrainingSession, wake: Callable[[], None], training: trio.CancelScope, keeps_only: bool
) -> None:
    departure = session.departure
    await departure.until_wanted()
    session.happened(Leaving(departure.at_once))
    watched = session.watched
    averages = watched is not None and watched.averaging()
    has_something = session.trains and session.gate.is_open and (averages or not keeps_only)
    wake()
    if has_something:
        with trio.move_on_after(ROUND_PATIENCE_SECONDS):
            await departure.until_at_once()
    training.cancel()
