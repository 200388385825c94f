"""Writes a run's checkpoints while it trains, and starts training from the newest one.

    with collaborate(run=…, batch=…, checkpoints=folder) as bridge:         # usual use
    with collaborate(…, checkpoints=CheckpointSettings(folder, every_seconds=60)) as bridge:

At the start the newest whole checkpoint is read, and the optimizer begins from it. If the run is
further by now, the optimizer takes the run's state then. After steps the state is copied and
written in a worker thread at intervals, and once more when the block ends, unless by a kill.

Promises: training waits at most for the copy (60 ms for 100 MB), and only if it steps just then, or
if this epoch is kept forever: then its thread makes the copy, before the next step.
If the disk fills, the log and an event (`CheckpointMissed`) say so. Older checkpoints stay,
training goes on, and the keeper tries again when the next one is due.

A keeper that has checkpoints but can read none of them must not start from scratch: all others
would follow it.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio

from node.core.wrong_use import WrongUse
from node.run.checkpoint_file import FOLDER_MODE, Checkpoint, CheckpointBroken, CheckpointFailed
from node.run.checkpoints import Checkpoints, KeepPolicy
from protocols.accumulation.events import CheckpointMissed, CheckpointSaved, TrainingEvent
from protocols.accumulation.keeping import StateHolder
from protocols.accumulation.lineage import HISTORY_BYTES
from protocols.accumulation.training_state import TrainingState
from protocols.blocking import in_thread

log = logging.getLogger("potluck.checkpoints")

EVERY_SECONDS = 300.0
"""The most training that is lost when all peers are killed at once. Writing a gigabyte takes one
disk a few seconds, so this costs about a hundredth of its time."""

SHORTEST_RETRY_SECONDS = 10.0  # after one that could not be written


@dataclass(frozen=True)
class CheckpointSettings:
    """Where checkpoints are kept, and which.

    - `folder`: for this run and this process only.
    - `every_seconds`: how often one is written, if there was a step; 0 is after every step.
    - `policy`: which ones stay. An epoch that `keep_every` divides is written at once.
    - `last_epoch`: the run is complete with this epoch, which is also written at once. 0: no end.
    - `passes_over_broken`: if no checkpoint is whole, go on without one. Only for a peer that
      may not begin the run (`begins=False`), and so waits for others who have its state.
    - `model`: the settings that build the model, for `potluck export --format hf`.
    """

    folder: Path
    every_seconds: float = EVERY_SECONDS
    policy: KeepPolicy = field(default_factory=KeepPolicy)
    model: Mapping[str, Any] = field(default_factory=dict)
    last_epoch: int = 0
    passes_over_broken: bool = False

    def __post_init__(self) -> None:
        if not self.every_seconds >= 0.0:
            raise WrongUse(f"Checkpoints every {self.every_seconds} seconds cannot be written.")


@asynccontextmanager
async def open_keeper(settings: CheckpointSettings, run: str) -> AsyncIterator[CheckpointKeeper]:
    """Read the newest checkpoint, and write others until the block ends. Errors of the block come
    out unwrapped.

    WrongUse if the checkpoints are another run's; CheckpointBroken if there are some, none whole.
    """
    checkpoints = Checkpoints(settings.folder, settings.policy)
    keeper = CheckpointKeeper(
        checkpoints,
        settings,  # no name here for the next: this frame would keep the state until the end
        await in_thread(_newest_of, checkpoints, run, settings.passes_over_broken),
    )
    failure: BaseException | None = None
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keeper.write_on)
            try:
                yield keeper
            except BaseException as error:  # noqa: BLE001 - raised below, where no nursery wraps it
                failure = error
            nursery.cancel_scope.cancel()
    finally:  # if the block was cancelled from outside, the nursery raises Cancelled here
        with trio.CancelScope(shield=True):
            await keeper.write_last()
    if failure is not None:
        raise failure


class CheckpointKeeper:
    """`Keeper` (protocols/accumulation/keeping.py) for one folder. Made by `open_keeper`.

    Invariant: the state at `_written` is on the disk, or was the state when this peer entered.
    """

    def __init__(
        self, checkpoints: Checkpoints, settings: CheckpointSettings, found: TrainingState | None
    ) -> None:
        self._checkpoints, self._settings, self._found = checkpoints, settings, found
        self._token = trio.lowlevel.current_trio_token()
        self._advanced = trio.Event()
        self._holder: StateHolder | None = None
        self._tell: Callable[[TrainingEvent], None] | None = None
        self._written = (0, b"")
        self._marked: TrainingState | None = None
        """A copy of an epoch that is kept forever, and was not written yet."""
        self._passed_over: list[int] = []  # epochs that were to be kept forever, too
        self._tried_at, self._has_failed = trio.current_time(), False

    # -- for the optimizer, in its thread

    def newest(self) -> TrainingState | None:
        found, self._found = self._found, None  # the memory is freed when the optimizer has read it
        return found

    def entered(self, holder: StateHolder, tell: Callable[[TrainingEvent], None]) -> None:
        self._written, self._tell, self._holder = holder.at, tell, holder

    def advanced(self) -> None:
        holder, every = self._holder, self._settings.policy.keep_every
        if holder is not None and every and holder.at[0] % every == 0:
            if self._marked is not None:
                self._passed_over.append(holder.at[0])
            else:
                with suppress(MemoryError, RuntimeError):  # the next checkpoint tells of it
                    self._marked = _copy_of(holder)
        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self._note, idempotent=True)

    # -- in trio's thread

    def _note(self) -> None:
        self._advanced.set()

    async def write_on(self) -> None:
        """Write each checkpoint when it is due, forever."""
        while True:
            await self._until_due()
            await self._write()

    async def write_last(self) -> None:
        """Write the state if it is not written yet. This is the last call."""
        if self._holder is not None and self._holder.at != self._written:
            log.info("writing a last checkpoint, of epoch %d", self._holder.at[0])
        if self._marked is not None:
            await self._write()
            self._marked = None
        await self._write()

    async def _until_due(self) -> None:
        if self._has_failed:  # there may be no other step
            seconds = max(self._settings.every_seconds, SHORTEST_RETRY_SECONDS)
            await trio.sleep_until(self._tried_at + seconds)
            return
        while True:
            await self._advanced.wait()
            self._advanced = trio.Event()
            if self._is_marked():
                return
            with trio.move_on_at(self._tried_at + self._settings.every_seconds):
                while not self._is_marked():
                    await self._advanced.wait()
                    self._advanced = trio.Event()
            return

    def _is_marked(self) -> bool:
        """Whether there is a copy that is kept forever, or this epoch is the run's last."""
        last = self._settings.last_epoch
        return self._marked is not None or (
            self._holder is not None and 0 < last <= self._holder.at[0]
        )

    async def _write(self) -> None:
        holder, tell = self._holder, self._tell
        marked, self._marked = self._marked, None
        at = None if holder is None else holder.at
        if marked is not None:
            at = marked.epoch, marked.history
        if holder is None or tell is None or at is None or at == self._written:
            self._has_failed = False
            return
        began, epoch = trio.current_time(), at[0]
        self._tried_at, self._has_failed = began, True
        try:
            state = await in_thread(_copy_of, holder) if marked is None else marked
            epoch = state.epoch
            path = await in_thread(self._checkpoints.save, state, self._settings.model)
        except CheckpointFailed as error:
            log.warning("%s Training goes on.", error)
            if marked is not None:  # it is to be kept forever, and there is memory for one copy
                self._passed_over += [] if self._marked is None else [self._marked.epoch]
                self._marked = marked
            tell(CheckpointMissed(epoch, str(error)))
        except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError when memory is out
            log.warning("The checkpoint of epoch %d was not written: %s", epoch, error)
            tell(CheckpointMissed(epoch, str(error)))
        else:
            self._written, self._has_failed = (state.epoch, state.history), False
            seconds = trio.current_time() - began
            log.info("the checkpoint of epoch %d is at %s", epoch, path)
            passed_over, self._passed_over = self._passed_over, []
            for missed in passed_over:
                if missed != holder.at[0]:  # else it is written next
                    why = "an earlier one that is kept forever was not written yet"
                    log.warning("The checkpoint of epoch %d was not written: %s", missed, why)
                    tell(CheckpointMissed(missed, why))
            tell(CheckpointSaved(epoch, str(path), len(state.memory), seconds))


def _copy_of(holder: StateHolder) -> TrainingState:
    with holder.lock.reading():
        return holder.look().copy()


def _newest_of(
    checkpoints: Checkpoints, run: str, passes_over_broken: bool
) -> TrainingState | None:
    with suppress(OSError):  # the first checkpoint reports the reason
        checkpoints.folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    checkpoints.clean_up()
    found = checkpoints.newest()
    if found is None:
        broken = checkpoints.paths()
        if broken and passes_over_broken:
            log.warning("no checkpoint is whole; the run's state has to come from other peers")
            return None
        if broken:
            raise CheckpointBroken(
                f"None of the {len(broken)} checkpoints in {checkpoints.folder} is whole.",
                why="The lines above name the fault of each.",
                advice="Every volunteer who trains has the run's state: start with --from-peers to "
                "take it from them (in a script: move the broken checkpoints away, and set "
                "begins=False). Or copy a whole checkpoint there. To begin the run anew, use "
                "another folder.",
            )
        log.info("there is no checkpoint in %s yet", checkpoints.folder)
        return None
    _check(found, run)
    log.info("the run goes on from epoch %d: %s", found.state.epoch, found.path)
    with suppress(OSError):  # the first checkpoint reports the reason
        beside = checkpoints.set_aside(found.path)
        if beside is not None:
            log.warning(
                "The last checkpoint that was written is of an earlier epoch than %d, so it is of "
                "another line of steps. It is kept as %s. If the run has gone on there, stop this "
                "peer, move the other checkpoints away, and rename it back.",
                found.state.epoch,
                beside,
            )
    return found.state


def _check(found: Checkpoint, run: str) -> None:
    state = found.state
    if state.run != run:
        raise WrongUse(
            f"The checkpoint {found.path} belongs to the run {state.run}, not to {run}.",
            advice="Keep each run's checkpoints in their own folder. To begin a new run from an "
            "old one's state, call optimizer.restore(read_checkpoint(path).state).",
        )
    if len(state.history) != HISTORY_BYTES:
        raise WrongUse(
            f"The checkpoint {found.path} does not name the steps in its state.",
            why="It was not written by a collaborative optimizer.",
            advice="Call optimizer.load_state_dict or torch's own on the model, and use another "
            "folder.",
        )
