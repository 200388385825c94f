"""Reads a first batch of a run and computes with it, before anybody is invited.

    trial = DataTrial(definition, trusted, tell)
    batch = trial.read()                    # blocks; `stop` from any thread ends it
    loss = pass_over(task, batch)

`run check` does both. `run start` only reads, because its benchmark is the pass. Each source of a
mixture is read alone: a batch of all of them may have nothing from the one that is broken.

Promises: unreadable data is reported after two attempts at each address, with the server's answer.
(Training retries for longer, so that a run survives a server's restart.) Nothing is kept, and no
position moves.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from models.data.clock import CLOSED, ReadingStopped
from models.data.errors import DataError, TokenizerAway, WrongTokenizer
from models.data.events import PassBegun, Retrying, SourceEvent, SourceRests
from models.data.settings import DataSettings, source_names
from node.core.caps.units import in_words
from node.core.disk_trouble import disk_trouble
from node.core.private_file import check_writable
from node.run.trusted import BrokenModule
from protocols.errors import PotluckError

if TYPE_CHECKING:
    from node.run.batches import TrainingBatches
    from node.run.building import RunTask
    from node.run.definition import RunDefinition

SAMPLES: Final = 2
"""In the batch: enough to be a batch, and quick on any machine."""
ROOM_BYTES: Final = 4096
"""Written and removed to test for write access; any usable disk has this much room."""
MOST_ATTEMPTS: Final = 2
"""At one address. A third would come two seconds later, the next ones up to half a minute."""


class DataUnreadable(PotluckError):
    """The run's data could not be read from this machine."""

    exit_code = 4


class NoRoom(PotluckError):
    """The run's checkpoints cannot be kept in their folder."""


class DataTrial:
    """Reads a batch from each source. `tell` is told of each failed attempt."""

    def __init__(
        self,
        definition: RunDefinition,
        trusted: Mapping[str, Path],
        tell: Callable[[str], None],
    ) -> None:
        self._definition, self._trusted, self._tell = definition, trusted, tell
        self._open: TrainingBatches | None = None
        self._stopped = False

    def read(self) -> Any:
        """The first source's batch, or the module's. DataUnreadable, BrokenModule."""
        from node.run.building import task_to_look_at

        task = task_to_look_at(self._definition, self._trusted)
        if not isinstance(task.data, DataSettings):
            return self._batch_of(task)
        batches = []
        for source, name in zip(task.data.source, source_names(task.data), strict=True):
            alone = msgspec.structs.replace(task.data, source=(source,))
            try:
                batches.append(self._batch_of(replace(task, data=alone)))
            except (ReadingStopped, WrongTokenizer, TokenizerAway):
                raise  # of no source
            except DataError as error:
                raise _unreadable(name, error.why or error.what) from None
            except _GivenUp as given_up:
                raise _unreadable(name, str(given_up)) from None
        return batches[0]

    def stop(self) -> None:
        """End a wait for data, with ReadingStopped."""
        self._stopped = True
        batches = self._open
        if batches is not None:
            batches.stop()

    def _batch_of(self, task: RunTask) -> Any:
        with task.open_batches(samples=SAMPLES, on_event=self._heard) as self._open:
            if self._stopped:
                raise ReadingStopped(CLOSED)
            batch = next(self._open)
        task.samples_in(batch)
        return batch

    def _heard(self, event: SourceEvent) -> None:
        match event:
            case Retrying(attempt=attempt) if attempt > MOST_ATTEMPTS:
                raise _GivenUp(f"{event.shard}: {event.reason}, after {MOST_ATTEMPTS} attempts.")
            case PassBegun() | SourceRests():
                pass  # the first error is silent, and the second one is raised
            case _:
                self._tell(f"warning: {event.sentence}")


def check_room(
    definition: RunDefinition,
    trusted: Mapping[str, Path],
    checkpoints: Path,
    tell: Callable[[str], None],
) -> None:
    """Check that the run's checkpoints can be kept there. NoRoom if not even one can be kept. If
    others are there already, a warning to `tell`: they can still be served."""
    from node.run.costs import costs_of

    costs = costs_of(definition, trusted)
    takes = f"Its checkpoints take {in_words(costs.keeper_disk_bytes)} in all"
    try:
        checkpoints.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_writable(checkpoints / "room", ROOM_BYTES)
        free = shutil.disk_usage(checkpoints).free
        kept = [one.stat().st_size for one in checkpoints.glob("epoch-*/*")]
    except OSError as error:
        why, advice = disk_trouble(error, checkpoints)
        trouble = NoRoom(f"{checkpoints} cannot be written to.", why=why, advice=advice)
        if not any(checkpoints.glob("epoch-*")):
            raise trouble from None
        tell(f"warning: {trouble}")
        return
    if free < costs.state_bytes and not kept:
        raise NoRoom(
            f"There is no room for a checkpoint of {definition.name} in {checkpoints}.",
            why=f"One takes {in_words(costs.state_bytes)}, and {in_words(free)} are free there.",
            advice=f"{takes}: free some space, or move the run's folder to a larger disk.",
        )
    if free + sum(kept) < costs.keeper_disk_bytes:
        tell(f"warning: {takes}, and {in_words(free)} are free in {checkpoints}.")


class _GivenUp(Exception):
    """Raised in the thread that reads the data, and caught where the batch was asked for."""


def _unreadable(source: str, why: str) -> DataUnreadable:
    return DataUnreadable(
        f"The data {source!r} cannot be read.",
        why=why,
        advice="Check its address below [[data.source]], and this machine's connection. `potluck "
        "run check --offline` checks everything else.",
    )


def pass_over(task: RunTask, batch: Any) -> float:
    """The loss of this batch, with its gradients computed and dropped; PotluckError if the model
    cannot train with it."""
    from models.trainable import on_device
    from node.core.caps.memory import TooLarge
    from node.run.out_of_memory import is_out_of_memory

    try:
        with task.buffers_stay():
            loss = task.compute(on_device(batch, task.devices[0]))
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise TooLarge(
            f"There is no room for {task.samples_in(batch)} samples of this run in memory.",
            why="The model fits, but computing with it does not.",
            advice="Check the run on a larger machine.",
        ) from None
    finally:
        gradients = {name: one.grad for name, one in task.named_parameters}
        for _name, one in task.named_parameters:
            one.grad = None
    value = float(loss)
    if not math.isfinite(value):
        raise _diverges(task, f"The loss of the first batch is {value}.")
    wrong = next(
        (n for n, one in gradients.items() if one is not None and not one.isfinite().all()), ""
    )
    if wrong:
        raise _diverges(task, f"The first batch's gradient of {wrong} is not finite.")
    if not any(one is not None for one in gradients.values()):
        raise _diverges(task, "No parameter has a gradient after the first batch.")
    return value


def _diverges(task: RunTask, what: str) -> BrokenModule:
    whose = task.model_file or "the model"
    return BrokenModule(
        what,
        why=f"{whose} computed it, with the run's initial parameters.",
        advice="Such a batch would be held back. Check the model, its precision and the data.",
    )
