"""Writes the figures of a session to the trackers that this machine's owner has named.

    check_trackers(trackers)                          # TrackerMissing says what to install
    async with track(trackers, session, name="ann"):  # for the whole session
        ...

Each tracker has a thread of its own, which imports its library, opens it, and writes rows from a
bounded queue. It starts when the loop begins: an import takes seconds of a core, which would spoil
the benchmark before.

Promises: training never waits for a tracker, whatever that does. If its library raises, or does not
return, the owner is told once, with what to do; rows that find no room are lost. At the end the
trackers share `CLOSING_SECONDS` to write the rest.

Libraries are asked to send nothing but the figures: no usage statistics, no crash reports, no
code, and no output of this process.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
import trio

from models.extras import install
from node.core.tracker import JSONL, MLFLOW, TENSORBOARD, WANDB, NamedTracker
from node.training.figures import STEP, RunFigures, StepFigures
from node.training.happenings import Began, Happening, Notice
from node.training.session import TrainingSession
from protocols.accumulation.events import CaughtUp, StepTaken
from protocols.blocking import in_thread
from protocols.errors import PotluckError

logger = logging.getLogger("potluck.trackers")

MOST_ROWS: Final = 1_000
"""That wait for a tracker: some hundred kB."""

PATIENCE_SECONDS: Final = 60.0
"""After this long in one call, a tracker counts as hanging."""

CLOSING_SECONDS: Final = 1.5
"""For all trackers together. A session has to be left within five seconds."""

FLUSH_SECONDS: Final = 10  # TensorBoard's own default is two minutes

LIBRARIES: Final = {TENSORBOARD: "tensorboard", WANDB: "wandb", MLFLOW: "mlflow"}

GO_ON = "Training goes on without it; potluck tries again when it is started again."
LOST = "Training goes on; the rows of these steps are lost."


class TrackerMissing(PotluckError):
    """The library of a tracker is not installed."""

    exit_code = 2


def check_trackers(trackers: Sequence[NamedTracker]) -> None:
    """TrackerMissing if one needs a library that is not here. Imports nothing."""
    for tracker in trackers:
        library = LIBRARIES.get(tracker.kind)
        if library is not None and importlib.util.find_spec(library) is None:
            raise TrackerMissing(
                f"The tracker {tracker} needs the library {library}, which is not installed here.",
                advice=f"{install(tracker.kind)} jsonl:FILE needs no library.",
            )


@asynccontextmanager
async def track(
    trackers: Sequence[NamedTracker], session: TrainingSession, *, name: str
) -> AsyncIterator[None]:
    """Write a row for each step of the session until the block ends. `name`: of this peer.
    Cancelled, it still lets the trackers end, for `CLOSING_SECONDS`."""
    if not trackers:
        yield
        return
    figures = RunFigures()
    threads = [_TrackerThread(one, session.run, name, session.happened) for one in trackers]

    def take(happening: Happening) -> None:
        figures.take(happening)
        if isinstance(happening, Began):
            for one in threads:
                one.start()
        if isinstance(happening, StepTaken | CaughtUp):
            for row in figures.rows(happening, session.view()):
                for one in threads:
                    one.put(row)

    session.follow(take)
    try:
        yield
    finally:
        with trio.CancelScope(shield=True):
            await in_thread(_end, threads)


def _end(threads: Sequence[_TrackerThread]) -> None:
    until = time.monotonic() + CLOSING_SECONDS
    for one in threads:
        one.finish()
    for one in threads:
        one.join(until)


class _TrackerThread:
    """The thread of one tracker. Invariant: all calls of its library are made in it."""

    def __init__(
        self, tracker: NamedTracker, run: str, name: str, tell: Callable[[Happening], None]
    ) -> None:
        self._tracker, self._run, self._name, self._tell = tracker, run, name, tell
        self._rows: queue.Queue[tuple[float, StepFigures] | None] = queue.Queue(MOST_ROWS)
        self._busy_since: float | None = None
        self._has_told = self._has_ended = False
        self._thread = threading.Thread(
            target=self._serve, name=f"potluck {tracker.kind}", daemon=True
        )

    # -- trio's thread

    def start(self) -> None:
        self._thread.start()

    def put(self, row: StepFigures) -> None:
        """Never waits."""
        since = self._busy_since
        if since is not None and time.monotonic() - since > PATIENCE_SECONDS:
            self._say(f"it has not answered for {PATIENCE_SECONDS:.0f} seconds", LOST)
        try:
            if not self._has_ended:
                self._rows.put_nowait((time.time(), row))
        except queue.Full:
            self._say(f"it has not taken the last {MOST_ROWS:,} rows", LOST)

    def finish(self) -> None:
        """No row follows."""
        while True:
            try:
                self._rows.put_nowait(None)
            except queue.Full:
                with suppress(queue.Empty):
                    self._rows.get_nowait()
            else:
                return

    def join(self, until: float) -> None:
        if self._thread.ident is None:  # the loop has never begun
            return
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            self._say("it did not finish in time", "Its last rows may be missing.")

    # -- the tracker's thread

    def _serve(self) -> None:
        try:
            self._busy_since = time.monotonic()
            writer = _OPEN[self._tracker.kind](self._tracker, self._run, self._name)
        except BaseException as error:  # noqa: BLE001 - whatever a library raises, training goes on
            self._has_ended = True
            self._failed("cannot be opened", error, GO_ON)
            return
        try:
            while True:
                self._busy_since = None
                item = self._rows.get()
                self._busy_since = time.monotonic()
                if item is None:
                    break
                try:
                    writer.write(*item)
                except BaseException as error:  # noqa: BLE001 - as above
                    self._failed("could not write", error, LOST)
        finally:
            try:
                writer.close()
            except BaseException as error:  # noqa: BLE001 - as above
                self._failed("could not be closed", error, "Its last rows may be missing.")

    def _failed(self, what: str, error: BaseException, then: str) -> None:
        logger.info("the tracker %s %s", self._tracker, what, exc_info=error)
        words = str(error).strip() or type(error).__name__
        first = words.splitlines()[0][:300].rstrip(".")
        self._say(f"it {what}: {first}", then)

    def _say(self, what: str, then: str) -> None:
        """Once: a tracker that is broken is broken at each step."""
        if not self._has_told:
            self._has_told = True
            self._tell(Notice(f"warning: the tracker {self._tracker} fails: {what}. {then}"))


# -- one writer for each kind


class _Writer(Protocol):
    def write(self, at: float, row: StepFigures) -> None:
        """`at`: in seconds since 1970."""

    def close(self) -> None: ...


class _Jsonl:
    """A line for each row, at the end of the file. A kill can leave half a line behind; the next
    session ends it."""

    def __init__(self, tracker: NamedTracker, run: str, name: str) -> None:
        self._names = {"run": run, "peer": name}
        path = Path(tracker.where)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab+")
        if self._file.tell():
            self._file.seek(-1, os.SEEK_END)
            if self._file.read() != b"\n":
                self._file.write(b"\n")

    def write(self, at: float, row: StepFigures) -> None:
        whole = {"step": row.step, "time": round(at, 3), **self._names, **row.values}
        self._file.write(msgspec.json.encode(whole) + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class _TensorBoard:
    def __init__(self, tracker: NamedTracker, _run: str, _name: str) -> None:
        library: Any = importlib.import_module("torch.utils.tensorboard")
        self._writer: Any = library.SummaryWriter(tracker.where, flush_secs=FLUSH_SECONDS)

    def write(self, at: float, row: StepFigures) -> None:
        for name, value in row.values.items():
            self._writer.add_scalar(
                name, value, row.step, at, new_style=True, double_precision=True
            )

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """A run of Weights & Biases for each session, in the group of the run's name. Its own settings
    and variables (WANDB_MODE, WANDB_ENTITY, ...) hold."""

    def __init__(self, tracker: NamedTracker, run: str, name: str) -> None:
        for variable, value in (("WANDB_ERROR_REPORTING", "false"), ("WANDB_SILENT", "true")):
            os.environ.setdefault(variable, value)
        library: Any = importlib.import_module("wandb")
        # the library would ask for a key on the terminal, where the screen is
        is_sent = library.setup().settings.mode not in ("offline", "disabled")
        if is_sent and not library.login(prompt=False):
            raise PotluckError("nobody is logged in: type `wandb login`, or set WANDB_MODE=offline")
        self._run: Any = library.init(
            project=tracker.where,
            group=run,
            name=name or None,
            dir=str(tracker.folder),
            settings=library.Settings(
                console="off", disable_git=True, disable_code=True, disable_job_creation=True
            ),
        )
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP, step_sync=True)

    def write(self, at: float, row: StepFigures) -> None:
        self._run.log({STEP: row.step, "_timestamp": at, **row.values})

    def close(self) -> None:
        self._run.finish()


class _Mlflow:
    """An experiment of the run's name, and a run in it for each session."""

    def __init__(self, tracker: NamedTracker, run: str, name: str) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        where = tracker.where
        if tracker.is_path:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            where = Path(where).as_uri()
        library: Any = importlib.import_module("mlflow")
        self._metric: Any = library.entities.Metric
        self._client: Any = library.MlflowClient(tracking_uri=where)
        found = self._client.get_experiment_by_name(run)
        experiment = self._client.create_experiment(run) if found is None else found.experiment_id
        self._id = self._client.create_run(experiment, run_name=name or None).info.run_id

    def write(self, at: float, row: StepFigures) -> None:
        moment = round(1000 * at)
        metrics = [
            self._metric(name, value, moment, row.step) for name, value in row.values.items()
        ]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._id)


_OPEN: Final[dict[str, Callable[[NamedTracker, str, str], _Writer]]] = {
    JSONL: _Jsonl,
    TENSORBOARD: _TensorBoard,
    WANDB: _Wandb,
    MLFLOW: _Mlflow,
}
