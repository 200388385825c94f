"""Train in a run until told to leave: the heart of `potluck join` and `potluck run start`.

    session = Session(shown)
    left = await train_run(node, definition, task, TrainerOptions(), session)

The loop itself (loop.py) is ordinary PyTorch in a worker thread; here it is fed, watched and ended:

    measure -> enter the run, catching up if it is further -> train -> see the round out -> leave

Promises: it ends when `session.departure` says so: at once, or after the round that is under way,
but never later than `ROUND_PATIENCE_SECONDS` and one batch; when the node ends; and by an error of
the run that no waiting mends, which comes out. What it took is then given back.

Easy to get wrong: the training thread cannot be stopped from outside. It is told, and everything it
may wait for (the gate, data, the bridge) is woken; a batch that is being computed is waited for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from node.node import Node
from node.trainer.account import Account
from node.trainer.batch_size import BatchSize
from node.trainer.benchmark import Measurement, limit_of, measure
from node.trainer.departure import ROUND_PATIENCE_SECONDS
from node.trainer.happenings import Leaving, Left, Measured, Paused, Preparing, Resumed
from node.trainer.loop import Loop
from node.trainer.loss_curve import LossCurve, keep
from node.trainer.network_watch import watch_network
from node.trainer.options import TrainerOptions
from node.trainer.session import Session
from node.trainer.stages import ENTERING, MEASURING
from node.trainer.watched import TrafficMeter, WatchedTraining
from node.training import train_in_thread
from protocols.accumulation.collaboration import Collaboration
from protocols.blocking import in_thread

if TYPE_CHECKING:
    from node.run.building import RunTask
    from node.run.definition import RunDefinition

logger = logging.getLogger("potluck.trainer")

TRAFFIC_SECONDS = 1.0  # between two looks at the bytes that were sent
LOSSES_SECONDS = 60.0  # how much of the loss's curve a kill may cost


async def train_run(
    node: Node,
    definition: RunDefinition,
    task: RunTask,
    options: TrainerOptions,
    session: Session,
) -> Left:
    """Take part in the run of `definition` with what was built of it; what the session gave."""
    found: list[BatchSize] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_cancel_when_told, session, nursery.cancel_scope)
        await _until_open(session)
        measured = await _batch_size(definition, task, options, session)
        await options.make_sure()
        found.append(measured)
        nursery.cancel_scope.cancel()
    if not found:
        return _left(session)
    session.happened(Preparing(ENTERING))
    loop = Loop(
        definition,
        task,
        session,
        batch_size=found[0],
        keeps_only=options.keeps_only,
        share=options.batch_share,
        position_file=options.position_file,
    )
    settings = definition.collaboration_settings(
        client=options.client,
        name=options.name,
        begins=options.begins and not options.from_peers,
        up_bytes_per_second=options.up_bytes_per_second,
        down_bytes_per_second=options.down_bytes_per_second,
        fetching_folder=options.fetching_folder,
    )

    async def beside(collaboration: Collaboration) -> None:
        await _watch(node, collaboration, options, session)

    def wake() -> None:  # also where the node ends by itself, and nobody has said to leave
        session.gate.end()
        loop.stop_reading()

    losses = _LossesFile(session.account, options.losses_file)
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
        losses.keep()
    return _left(session)


class _LossesFile:
    """The curve of the run's loss on the disk. Training does not need it: what cannot be read or
    written is told in the log."""

    def __init__(self, account: Account, path: Path | None) -> None:
        self._account, self._path = account, path
        self._kept = b""

    def load(self) -> None:
        if self._path is None:
            return
        try:
            self._account.curve = LossCurve.read(self._path)
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            logger.warning("the curve of the run's loss begins anew: %s", error)

    def keep(self) -> None:
        """Blocks for about a millisecond."""
        data = self._account.curve.as_bytes()
        if self._path is None or data == self._kept:
            return
        try:
            keep(data, self._path)
        except OSError as error:
            why = error.strerror or error
            logger.warning("the curve of the run's loss is not kept: %s", why)
        self._kept = data

    async def keep_on(self) -> None:
        while True:
            await trio.sleep(LOSSES_SECONDS)
            self.keep()


def _left(session: Session) -> Left:
    account = session.account
    left = Left(
        account.samples,
        account.steps,
        round(session.seconds, 3),
        account.lost_samples,
        account.alone_samples,
        account.alone_steps,
    )
    session.happened(left)
    return left


async def _cancel_when_told(session: Session, scope: trio.CancelScope) -> None:
    await session.departure.until_wanted()
    session.happened(Leaving(session.departure.at_once))
    scope.cancel()


async def _batch_size(
    definition: RunDefinition, task: RunTask, options: TrainerOptions, session: Session
) -> BatchSize:
    """As it was given, or as it is measured."""
    target = definition.training.batch
    most = options.most_samples or definition.training.samples_at_once
    if options.micro_batch or options.keeps_only:
        return BatchSize(options.micro_batch, limit_of(most, target))
    measured = await _measured(task, most, target, session)
    return BatchSize(measured.micro_batch, measured.fits)


async def _until_open(session: Session) -> None:
    """A peer that starts outside of its schedule does not compute before it."""
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


async def _measured(task: RunTask, most: int, target: int, session: Session) -> Measurement:
    """The benchmark, in a thread that is let go when this is cancelled."""
    session.happened(Preparing(MEASURING))

    def run() -> Measurement:
        return measure(task, most=most, target=target, goes_on=lambda: not session.departure.wanted)

    found: Measurement = await trio.to_thread.run_sync(
        run,
        abandon_on_cancel=True,  # type: ignore[call-arg] # the stubs are of an older trio
    )
    session.happened(
        Measured(
            device=" + ".join(str(one) for one in task.devices),
            threads=_threads(),
            micro_batch=found.micro_batch,
            samples_per_second=round(found.samples_per_second, 3),
            batch_seconds=round(found.batch_seconds, 4),
        )
    )
    return found


def _threads() -> int:
    import torch

    return torch.get_num_threads()


async def _watch(
    node: Node, collaboration: Collaboration, options: TrainerOptions, session: Session
) -> None:
    """Tell of the run, the links and the traffic, until cancelled."""
    meter = TrafficMeter(options.upload_limit, options.download_limit)
    session.watched = WatchedTraining(node, collaboration, meter)

    async def follow_the_run() -> None:
        async with collaboration.events() as events:
            async for event in events:
                session.happened(event)

    async def follow_the_traffic() -> None:
        while True:
            traffic = node.network.traffic()
            meter.note(trio.current_time(), traffic.sent_bytes, traffic.received_bytes)
            await trio.sleep(TRAFFIC_SECONDS)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(follow_the_run)
        nursery.start_soon(follow_the_traffic)
        await watch_network(node.network, node.dht, session, begins=options.begins)


async def _end_when_told(
    session: Session, wake: Callable[[], None], training: trio.CancelScope, keeps_only: bool
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
