"""A run's history (history.py) on the disk, in SQLite, for the page of a node.

    async with open_history(path, session, target=lambda: 2048) as history:
        ...                                                  # while the page is served

What is new is written every few seconds and at the end, in a thread. If that is only the time, it
is written once a minute, to spare the disk. Points of the curve are rows; everything else is one
small document. A full disk costs the history, not the training.

A page that is served for the first time begins with the losses that the screen's curve has of
earlier sessions (loss_curve.py).

Promises: bounded as history.py is, and nothing is read from the file that is larger than what is
written. A file that cannot be ours is moved aside, and the history begins anew (sqlite_file.py).
Whatever stands in the file, the node starts; a file that somebody else has locked costs no more
than `BUSY_MS` at the end.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import msgspec
import trio

from node.core.disk_trouble import disk_trouble
from node.core.private_file import FOLDER_MODE
from node.core.sqlite_file import FileKind, NotOurs, open_or_begin_anew
from node.training.happenings import Began, Happening
from node.training.history import OLD_POINTS, RECENT_STEPS, Beside, Point, RunHistory
from node.training.session import TrainingSession
from protocols.accumulation.events import CaughtUp
from protocols.blocking import in_thread
from protocols.errors import PotluckError

WRITE_SECONDS: Final = 5.0  # of the history that a kill may lose
QUIET_SECONDS: Final = 60.0  # between two writes while nothing but time goes by
LARGEST_JOURNAL: Final = 1 << 20  # bytes: what SQLite needs beyond that it gives back
LARGEST_BESIDE: Final = 1 << 20  # bytes; 512 peers and a hundred events take a fifth of it
BUSY_MS: Final = 500  # for another process with the file open; the next write tries it again
LARGEST_FILE: Final = 16 << 20  # bytes: SQLite refuses to write more, whatever goes wrong

KIND = FileKind(
    "The run's history",
    0x706F7432,  # "pot2" in ASCII
    (
        """
        CREATE TABLE points (
            step INTEGER PRIMARY KEY, steps INTEGER NOT NULL, loss REAL, samples REAL NOT NULL,
            total REAL NOT NULL, seconds REAL NOT NULL, busy_seconds REAL NOT NULL,
            peers INTEGER NOT NULL
        );
        CREATE TABLE beside (only_row INTEGER PRIMARY KEY, value BLOB NOT NULL);
        """,
    ),
    "the page begins its history anew",
)

_log = logging.getLogger("potluck.page")


class HistoryFile:
    """One open file. Blocking code, for one thread at a time."""

    def __init__(self, path: Path) -> None:
        """Open the file, or make it. PotluckError if neither works."""
        self.path = path
        try:
            path.parent.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
            self._connection = open_or_begin_anew(path, KIND)
            (page,) = self._connection.execute("PRAGMA page_size").fetchone()
            self._connection.execute(f"PRAGMA max_page_count = {LARGEST_FILE // int(page)}")
            self._connection.execute(f"PRAGMA busy_timeout = {BUSY_MS}")
            self._connection.execute(f"PRAGMA journal_size_limit = {LARGEST_JOURNAL}")
        except (OSError, sqlite3.Error, NotOurs) as error:
            why = disk_trouble(error, path)[0] if isinstance(error, OSError) else str(error)
            raise PotluckError(
                f"The run's history cannot be kept in {path}.",
                why=why,
                advice="Free some space and allow this user to write there.",
            ) from error
        self._written: dict[int, Point] = {}
        self._told, self._written_at = b"", -math.inf
        """What was written beside the points, without its times, and when."""
        self._is_failing = False

    def close(self) -> None:
        self._connection.close()

    def load(self) -> tuple[tuple[Point, ...], Beside]:
        """What was kept; values that cannot be ours are left out."""
        points, beside = [], Beside()
        rows = self._connection.execute(
            "SELECT * FROM points ORDER BY step DESC LIMIT ?", (OLD_POINTS + RECENT_STEPS,)
        ).fetchall()
        for row in reversed(rows):
            with contextlib.suppress(msgspec.ValidationError):
                points.append(msgspec.convert(row, Point))
        self._written = {one.step: one for one in points}
        found = self._connection.execute(
            "SELECT value FROM beside WHERE typeof(value) = 'blob' AND length(value) <= ?",
            (LARGEST_BESIDE,),
        ).fetchone()
        if found is not None:
            # text that is no UTF-8, and values in values in values, have errors of Python's own
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                beside = msgspec.json.decode(found[0], type=Beside)
        return tuple(points), beside

    def save(self, points: tuple[Point, ...], beside: Beside) -> None:
        """Write what differs from the last time; if that is only the time, once in QUIET_SECONDS.
        sqlite3.Error if the disk is full or gone."""
        now = {one.step: one for one in points}
        gone = [(step,) for step in self._written.keys() - now.keys()]
        new = [one for step, one in now.items() if self._written.get(step) != one]
        told, moment = msgspec.json.encode(_without_times(beside)), time.monotonic()
        is_quiet = not (gone or new) and told == self._told
        if is_quiet and moment - self._written_at < QUIET_SECONDS:
            return
        value = msgspec.json.encode(beside)
        with self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            self._connection.executemany("DELETE FROM points WHERE step = ?", gone)
            self._connection.executemany(
                "INSERT OR REPLACE INTO points VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                map(msgspec.structs.astuple, new),
            )
            if len(value) <= LARGEST_BESIDE:
                self._connection.execute("INSERT OR REPLACE INTO beside VALUES (1, ?)", (value,))
        self._written, self._told, self._written_at = now, told, moment

    def write(self, points: tuple[Point, ...], beside: Beside) -> None:
        """`save`, with a line in the log when it begins to fail and when that is over."""
        try:
            self.save(points, beside)
        except sqlite3.Error as error:
            if not self._is_failing:
                _log.warning("the history of the run cannot be kept in %s: %s", self.path, error)
            self._is_failing = True
        else:
            if self._is_failing:
                _log.warning("the history of the run is kept in %s again", self.path)
            self._is_failing = False

    def end(self, points: tuple[Point, ...], beside: Beside) -> None:
        """The last write, also if only the time is new."""
        self._written_at = -math.inf
        try:
            self.write(points, beside)
        finally:
            self.close()


def _without_times(beside: Beside) -> Beside:
    """`beside` without what changes from one moment to the next although nothing happens."""
    stays = tuple(msgspec.structs.replace(one, seen=0.0) for one in beside.stays)
    return msgspec.structs.replace(beside, seconds=0.0, wall=0.0, stays=stays)


@asynccontextmanager
async def open_history(
    path: Path,
    session: TrainingSession,
    *,
    target: Callable[[], int],
    clock: Callable[[], float] = time.monotonic,
    wall_clock: Callable[[], float] = time.time,
) -> AsyncIterator[RunHistory]:
    """The history of the session's run, kept until the block ends. If the file cannot be opened, it
    is of this session alone, and the log says why: training does not depend on it."""
    file, points, beside = await in_thread(_opened, path)
    history = RunHistory(
        target=target, clock=clock, wall_clock=wall_clock, points=points, beside=beside
    )

    def take(happening: Happening) -> None:
        if isinstance(happening, Began | CaughtUp):  # a peer may catch up before it begins
            known = session.account.curve.points
            history.begin_with(one for one in known if one[0] <= happening.epoch)
        history.take(happening)

    session.follow(take)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_write_on, file, history, session)
            yield history
            nursery.cancel_scope.cancel()
    finally:
        if file is not None:
            with trio.CancelScope(shield=True):
                await in_thread(file.end, history.curve.points, history.beside())


def _opened(path: Path) -> tuple[HistoryFile | None, tuple[Point, ...], Beside]:
    """The file and what is in it. None in its place if it cannot be used: then nothing is written
    to it either."""
    file: HistoryFile | None = None
    try:
        file = HistoryFile(path)
        return file, *file.load()
    except Exception as error:  # noqa: BLE001 - a file may hold anything, and the node has to start
        _log.warning("the page shows only this session: %s", error)
        if file is not None:
            file.close()
        return None, (), Beside()


async def _write_on(
    file: HistoryFile | None, history: RunHistory, session: TrainingSession
) -> None:
    """Look who is there and write what is new, every few seconds, forever."""
    while True:
        await trio.sleep(WRITE_SECONDS)
        history.look(session.view().peers)
        points, beside = history.curve.points, history.beside()
        if file is None:
            continue
        with trio.CancelScope(shield=True):  # the file is for one thread at a time
            await in_thread(file.write, points, beside)
