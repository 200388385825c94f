"""The training loop: ordinary PyTorch, in a worker thread, until it is told to leave.

    loop = Loop(definition, task, session, batch_size=BatchSize(8, limit=32))
    loop.run(bridge)                            # the training thread
    loop.stop_reading()                         # any thread: it may be waiting for data

Between two batches it checks the gate (pause, schedule, quota, network), the departure, and the
free memory. `Resting` is the part of the gate that the owner wants: a pause, the schedule, the
quota, or a machine in use. At the start of a rest the loop frees the memory that only computing
needs: activations, gradients, batches read ahead, and torch's cache on a GPU. Allocators keep freed
memory, so both C's and torch's are told to release it.

Promises: the optimizer holds back a loss that is not finite and reports it; training goes on with
the next batch. The position in the data is stored, so that the next session continues there.

A lost network closes the same gate, but is no rest. It may be back at any moment, so nothing is
freed, and a state is still fetched. When leaving, the accumulated samples are worth one more check
whether the round is near. trainer.py bounds the time after that, because a round may hang.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from models.data.clock import ReadingStopped
from models.data.errors import NoDataLeft, PositionError
from models.data.position import Position, read_position, write_position
from models.trainable import Trainable
from node.core.caps.memory import MemoryUsedUp
from node.run.out_of_memory import is_out_of_memory
from node.training.batch_size import BatchSize, PassClock
from node.training.departure import ROUND_PATIENCE_SECONDS
from node.training.excerpt import excerpt_of
from node.training.happenings import (
    Began,
    ExpertsBack,
    ExpertsMissing,
    Notice,
    Paused,
    Resumed,
    RunComplete,
)
from node.training.parameters_digest import digest_of
from node.training.phases import NETWORK
from node.training.session import TrainingSession
from protocols.accumulation.bridge import Bridge
from protocols.accumulation.events import GradientsDropped
from protocols.accumulation.optimizer import CollaborativeOptimizer
from protocols.experts import AsyncTrainer, TooFewExperts
from protocols.tensors import is_on_gpu

if TYPE_CHECKING:
    from node.run.batches import TrainingBatches
    from node.run.building import RunTask
    from node.run.definition import RunDefinition
    from node.run.mixtures import ExpertsOf


def give_back_memory() -> None:
    """Return this process's free memory to the system. Takes some tens of milliseconds."""
    gc.collect()
    torch.cuda.empty_cache()  # does nothing if no GPU was used
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()
    trim = _trim()
    if trim is not None:
        trim(0)


@cache
def _trim() -> Callable[[int], int] | None:
    """malloc_trim, if the C library has it: glibc's does."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        found: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    except OSError:
        return None
    return found


def tell_trouble(task: RunTask, session: TrainingSession) -> None:
    """Say why the model is not compiled, if that has just been found out."""
    words = "" if task.compiled is None else task.compiled.take_trouble()
    if words:
        session.happened(Notice(words))


class Resting:
    """The bridge's `Rest`, of one session."""

    def __init__(self, session: TrainingSession) -> None:
        self._session = session

    def is_wanted(self) -> bool:
        return bool(self.reasons())

    def reasons(self) -> tuple[str, ...]:
        """In words, the oldest first."""
        closed = self._session.gate.reasons()
        return tuple(one.words for one in closed if one.name != NETWORK)

    def see_out(self) -> None:
        with self.told() as is_rest:
            if is_rest:
                give_back_memory()
            self._session.gate.wait()

    @contextmanager
    def told(self) -> Iterator[bool]:
        """Report the start and end of the block, unless only the network is gone. Gives whether it
        is a rest."""
        reasons, began = self.reasons(), time.monotonic()
        if reasons:
            self._session.happened(Paused(reasons))
        yield bool(reasons)
        if reasons:
            self._session.happened(Resumed(round(time.monotonic() - began, 3)))


logger = logging.getLogger("potluck.trainer")

NEWS_SECONDS = 5.0  # between two checks of a peer that only waits, if nothing happens
GATE_SECONDS = 0.5  # between two checks of the gate by a peer that only helps
KEPT_SECONDS = 60.0  # that a volunteer waits until the run's keeper has the last step, too
MISSING_SECONDS = 3.0  # a server that has just died is replaced in no less
POSITION_SECONDS = 60.0  # how many seconds of data a kill makes this peer read again

DATA_AGAIN_SECONDS = 60.0
MOST_OUTAGES = 60
"""So many pauses of this length, without a batch between them, wait for a source that has given
data before. A server that is started anew is back in minutes; after an hour or so it is gone."""


DATA: Final = "data"  # a reason for which the gate is closed


class _MissingExperts:
    """Reports when no batch has been done for `MISSING_SECONDS` because experts were missing, and
    when one is done again."""

    def __init__(self, session: TrainingSession) -> None:
        self._session = session
        self._dropped, self._told = 0, False
        self._since = time.monotonic()

    def begin(self) -> None:
        """Batches are computed from now on: a rest before does not count."""
        if not self._told:
            self._since = time.monotonic()

    def dropped(self, error: TooFewExperts) -> None:
        self._dropped += 1
        if not self._told and time.monotonic() - self._since > MISSING_SECONDS:
            self._told = True
            self._session.happened(ExpertsMissing(" ".join(filter(None, (error.what, error.why)))))

    def answered(self) -> None:
        now = time.monotonic()
        if self._told:
            self._session.happened(ExpertsBack(round(now - self._since, 3), self._dropped))
        self._dropped, self._told, self._since = 0, False, now


class Loop:
    """For one session. All but `stop_reading` is for the training thread."""

    def __init__(
        self,
        definition: RunDefinition,
        task: RunTask,
        session: TrainingSession,
        *,
        batch_size: BatchSize,
        keeps_only: bool = False,
        offload: bool = False,
        share: Callable[[], float] = lambda: 1.0,
        position_file: Path | None = None,
        experts_of: ExpertsOf | None = None,
    ) -> None:
        self._definition, self._task, self._session = definition, task, session
        self._batch_size, self._share = batch_size, share
        self._pass_clock = PassClock(task.devices[0])
        self._keeps_only, self._offload = keeps_only, offload
        self._resting = Resting(session)
        self._position_file = position_file
        self._experts_of = experts_of
        self._missing = _MissingExperts(session)
        self._excerpt = excerpt_of(task) if session.lets_write else None
        self._batches: TrainingBatches | None = None
        self._position_kept = time.monotonic()
        self._position: Position | None = None
        """The newest one: the file may be older if its disk is full."""
        self._has_read, self._outages = False, 0
        """Whether there was a batch, and how often in a row there was none since."""

    def stop_reading(self) -> None:
        """Wake the loop if it waits for data. Any thread."""
        batches = self._batches
        if batches is not None:
            batches.stop()

    def run(self, bridge: Bridge) -> None:
        """Train until told to leave, or until the run is complete and this peer is not its keeper.

        CollaborationEnded when the collaboration ends first.
        """
        if self._resting.is_wanted():  # it may just have begun; nothing is fetched during a rest
            self._session.gate.wait()
        bridge.rest = self._resting
        self._session.gate.watch(bridge.rest_changed)
        optimizer = self._enter(bridge)
        if self._task.mixtures is not None and self._experts_of is not None:
            self._task.mixtures.connect(self._experts_of, bridge.portal)
        began = Began(self._definition.name, optimizer.epoch, self._keeps_only)
        self._session.happened(began)
        if self._keeps_only:
            self._assist(optimizer, bridge)
            return
        with suppress(ReadingStopped):
            while self._goes_on(optimizer):
                if self._resting.is_wanted():
                    self._rest(optimizer)
                else:
                    try:
                        self._read_with(optimizer, self._size())
                    except NoDataLeft as error:
                        self._pause_for_data(error)
        if self._is_complete(optimizer):
            self._drop("The run was complete before their step.", optimizer)
            self._wait_for_the_end(optimizer, bridge)
        elif not optimizer.see_out(ROUND_PATIENCE_SECONDS):
            self._drop("This peer left before their step.", optimizer)

    def _drop(self, reason: str, optimizer: CollaborativeOptimizer) -> None:
        if optimizer.waiting_samples:
            dropped = GradientsDropped(optimizer.epoch, optimizer.waiting_samples, reason)
            self._session.happened(dropped)

    def _enter(self, bridge: Bridge) -> CollaborativeOptimizer:
        """Check the run's progress, and fetch its state if it is further."""
        task, options = self._task, self._definition.optimizer_options()
        if self._keeps_only:
            options |= {"auxiliary": True, "delayed": False}
        return CollaborativeOptimizer(
            task.named_parameters,
            task.optimizer_factory,
            bridge,
            scheduler=task.schedule_factory,
            buffers=task.buffers,
            offload=self._offload,
            batch=0 if self._keeps_only else self._size(),
            batch_seconds=self._batch_size.measured_seconds * self._size() / self._batch_size.size,
            **options,
        )

    def _assist(self, optimizer: CollaborativeOptimizer, bridge: Bridge) -> None:
        """Help with the others' rounds until told to leave, or until the run is complete."""
        while self._goes_on(optimizer):
            if self._session.gate.is_open:
                optimizer.assist(epochs=1, seconds=GATE_SECONDS)
                self._write_on()
            else:
                self._rest(optimizer)
        if self._is_complete(optimizer):
            self._wait_for_the_end(optimizer, bridge)

    def _read_with(self, optimizer: CollaborativeOptimizer, size: int) -> None:
        """Read batches of this size until another size is wanted, or a pause. If reading can
        continue at the same position later, nothing is read ahead during a pause."""
        with self._task.open_batches(samples=size, position=self._kept_position()) as batches:
            self._batches = batches
            try:
                while self._goes_on(optimizer) and self._size() == size:
                    if self._session.gate.is_open:
                        if self._experts_of is None:
                            self._batch(optimizer, next(batches))
                        else:
                            self._batches_in_flight(optimizer, batches, size)
                    elif self._resting.is_wanted() and batches.position() is not None:
                        break
                    else:
                        self._rest(optimizer)
                    self._keep_position(batches)
            finally:
                self._batches = None
                self._keep_position(batches, at_once=True)

    def _pause_for_data(self, error: NoDataLeft) -> None:
        """A source that has given data may be back soon. Else raises the error."""
        self._outages += 1
        if not self._has_read or self._outages > MOST_OUTAGES:
            raise error
        logger.warning("%s", error)
        gate, until = self._session.gate, time.time() + DATA_AGAIN_SECONDS
        gate.close(DATA, error.what.rstrip(".") + "; it is tried again", until=until)
        again = threading.Timer(DATA_AGAIN_SECONDS, gate.open, [DATA])
        again.daemon = True
        again.start()

    def _got_batch(self) -> None:
        self._has_read, self._outages = True, 0

    def _batch(self, optimizer: CollaborativeOptimizer, batch: Any) -> None:
        self._got_batch()
        samples = self._task.samples_in(batch)
        self._task.at_step(optimizer.epoch)
        optimizer.zero_grad()
        loss = self._computed(optimizer, batch)
        if loss is None:
            self._make_room(optimizer)
            return
        if (seconds := self._pass_clock.newest()) is not None:
            self._batch_size.took(seconds, may_grow=self._share() >= 1.0)
        tell_trouble(self._task, self._session)
        optimizer.step(samples=samples, loss=loss)
        self._write_on()

    def _write_on(self) -> None:
        if self._excerpt is not None:
            self._session.writes = self._excerpt.after_a_batch()

    def _computed(self, optimizer: CollaborativeOptimizer, batch: Any) -> Tensor | float | None:
        """The loss, with its gradients computed (on a GPU: launched); None if memory has no room
        for it. Then everything computed so far is freed when this function ends."""
        try:
            with self._pass_clock.passing():
                loss = self._task.compute(batch, optimizer.scaled)
                return loss if is_on_gpu(loss) else float(loss)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            return None

    def _batches_in_flight(
        self, optimizer: CollaborativeOptimizer, batches: TrainingBatches, size: int
    ) -> None:
        """Several batches at once, most of which wait for experts, until the gate closes or
        something else is to be done. Batches without enough experts are dropped."""
        section, task = self._definition.experts, self._task
        assert section is not None

        def drawn() -> Iterator[Any]:
            while self._goes_on(optimizer) and self._session.gate.is_open and self._size() == size:
                task.at_step(optimizer.epoch)
                batch = next(batches)
                self._got_batch()
                yield batch
                self._keep_position(batches)

        def loss_of(model: nn.Module, batch: Any) -> Tensor:
            assert isinstance(model, Trainable)
            with task.autocast():
                return task.loss(batch, model)

        trainer = AsyncTrainer(
            task.model,
            loss_of,
            in_flight=section.in_flight,
            patience_seconds=math.inf,
            tell_dropped=self._missing.dropped,
        )
        optimizer.zero_grad()
        self._missing.begin()
        try:
            with closing(trainer.run(drawn())) as turns:
                for done in turns:
                    self._missing.answered()
                    optimizer.step(samples=task.samples_in(done.batch), loss=done.loss)
                    optimizer.zero_grad()
                    if not self._goes_on(optimizer):
                        break
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self._make_room(optimizer)

    def _make_room(self, optimizer: CollaborativeOptimizer) -> None:
        """Another program took memory, or this one has grown: smaller batches from now on."""
        optimizer.zero_grad()
        give_back_memory()
        size = self._size()
        if size == 1:
            raise MemoryUsedUp(
                "There is no room in memory for one more sample.",
                why="There was room before: another program may use it now.",
                advice="Join again when there is more, or from a larger machine.",
            )
        self._batch_size.did_not_fit(size)
        words = f"{size:,} samples at once do not fit into memory now: {self._size():,} from now on"
        self._session.happened(Notice(words))

    def _rest(self, optimizer: CollaborativeOptimizer) -> None:
        """The gate is closed: tell the others not to count on this peer until it opens.

        If only the network is gone, a rest may begin meanwhile; then this ends, to be called again.
        """
        session = self._session
        closed = session.gate.reasons()
        if not any(one.name == NETWORK for one in closed):  # without a network nothing can be sent
            optimizer.see_out(ROUND_PATIENCE_SECONDS)  # or the others would wait for it in vain
            if session.gate.is_open:  # the rest ended before a state was fetched
                return
        with self._resting.told() as is_rest, optimizer.away():
            if not is_rest:
                session.gate.wait_for_change(closed)
                return
            optimizer.zero_grad()
            give_back_memory()
            session.gate.wait()

    def _wait_for_the_end(self, optimizer: CollaborativeOptimizer, bridge: Bridge) -> None:
        """The run is complete. The keeper stays for peers that want the result. Volunteers leave,
        but not while they have the last step and the keeper does not."""
        optimizer.finish()  # with delayed steps, the model still has to take over the last one
        self._session.happened(RunComplete(optimizer.epoch, self._parameters()))
        until = math.inf if bridge.keeper is not None else time.monotonic() + KEPT_SECONDS
        while not (self._session.departure.wanted or time.monotonic() > until):
            found = bridge.estimate
            is_kept = found.keepers_here or not (found.keepers or found.silent_keepers)
            if bridge.keeper is None and found.epoch == optimizer.epoch and is_kept:
                return
            with bridge.waiting():
                bridge.wait_for_news(NEWS_SECONDS).wait()

    def _parameters(self) -> str:
        return digest_of(dict([*self._task.named_parameters, *self._task.buffers]))

    def _goes_on(self, optimizer: CollaborativeOptimizer) -> bool:
        return not self._session.departure.wanted and not self._is_complete(optimizer)

    def _is_complete(self, optimizer: CollaborativeOptimizer) -> bool:
        steps = self._definition.training.steps
        return 0 < steps <= optimizer.epoch

    def _size(self) -> int:
        """Samples at once: by the batches' times, and fewer if memory runs short."""
        return max(1, int(self._batch_size.size * self._share()))

    # -- this peer's position in the data

    def _kept_position(self) -> Position | None:
        if self._position is not None:
            return self._position
        if self._position_file is None:
            return None
        try:
            return read_position(self._position_file)
        except FileNotFoundError:
            return None
        except (PositionError, OSError) as error:
            logger.warning("the data starts from the beginning: %s", error)
            return None

    def _keep_position(self, batches: TrainingBatches, *, at_once: bool = False) -> None:
        now = time.monotonic()
        if self._position_file is None:
            return
        if at_once or now - self._position_kept > POSITION_SECONDS:
            self._position_kept = now
            position = batches.position()
            if position is not None:
                self._position = position
                try:
                    write_position(position, self._position_file)
                except OSError as error:  # training does not need it
                    why = error.strerror or error
                    logger.warning("this peer's place in the data cannot be saved: %s", why)
