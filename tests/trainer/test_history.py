"""The history of a run that a page shows: what is kept of it, and for how long."""

from __future__ import annotations

import contextlib
import math
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio

from node.core.training_view import RunPeerView
from node.training.happenings import Began, Notice, Preparing
from node.training.history import (
    LONGEST_GAP_SECONDS,
    MOST_EVENTS,
    MOST_STAYS,
    NOTHING_KEPT,
    OLD_POINTS,
    RECENT_STEPS,
    Beside,
    Curve,
    Event,
    Point,
    RunHistory,
)
from node.training.history_file import (
    LARGEST_JOURNAL,
    QUIET_SECONDS,
    WRITE_SECONDS,
    HistoryFile,
    open_history,
)
from node.training.session import TrainingSession
from protocols.accumulation.events import (
    CaughtUp,
    CheckpointSaved,
    RoundFailed,
    Share,
    StepLoss,
    StepTaken,
)
from protocols.identity import PeerId
from tests.trainer.recorded import Recorded

TARGET = 100


class Clock:
    """A monotonic clock and the time of day, which jumps on its own."""

    def __init__(self) -> None:
        self.now, self.wall = 50.0, 1_700_000_000.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.wall += seconds


def history(
    clock: Clock, points: tuple[Point, ...] = (), beside: Beside = NOTHING_KEPT
) -> RunHistory:
    return RunHistory(
        target=lambda: TARGET,
        clock=lambda: clock.now,
        wall_clock=lambda: clock.wall,
        points=points,
        beside=beside,
    )


def step(epoch: int, loss: float | None = 1.0, shares: tuple[Share, ...] = ()) -> StepTaken:
    return StepTaken(
        epoch=epoch,
        samples=float(TARGET),
        own_samples=0,
        members=tuple(one.peer for one in shares),
        left_out=(),
        history=b"",
        accumulating_seconds=1.0,
        averaging_seconds=1.0,
        waiting_seconds=0.0,
        stepping_seconds=0.0,
        loss=loss,
        shares=shares,
    )


def point(number: int, loss: float | None = 1.0) -> Point:
    return Point(number, 1, loss, 100.0, 100.0 * number, 2.0 * number, 2.0, 3)


def test_the_newest_steps_have_a_point_each_and_the_first_step_is_still_in_the_curve() -> None:
    curve = Curve(point(number) for number in range(1, 100_001))
    newest = curve.points[-RECENT_STEPS:]
    assert [one.step for one in newest] == list(range(100_001 - RECENT_STEPS, 100_001))
    assert len(curve.points) <= OLD_POINTS + RECENT_STEPS
    assert sum(one.steps for one in curve.points) == 100_000
    assert (curve.points[0].step, curve.points[0].steps) == (256, 256)


def test_a_point_of_several_steps_has_their_mean_loss_and_all_their_samples() -> None:
    curve = Curve(point(number, float(number)) for number in range(1, 2_001))
    first = curve.points[0]
    assert first.steps > 1
    assert first.loss == pytest.approx((1 + first.steps) / 2)
    assert (first.samples, first.total) == (100.0 * first.steps, 100.0 * first.step)


def test_steps_that_a_run_makes_again_replace_the_earlier_ones() -> None:
    curve = Curve(point(number, 1.0) for number in range(1, 2_001))
    curve.add(point(10, 7.0))
    assert curve.points[-1] == point(10, 7.0)
    assert curve.points[-2].step < 10


def test_a_curve_that_was_kept_goes_on_as_if_there_had_been_no_restart() -> None:
    points = [point(number, float(number)) for number in range(1, 3_001)]
    curve = Curve(points[:2_000])
    for one in points[2_000:]:
        curve = Curve(curve.points)
        curve.add(one)
    assert len(curve.points) <= OLD_POINTS + RECENT_STEPS
    assert sum(one.steps for one in curve.points) == 3_000


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf, 1e300, None])
def test_a_loss_that_is_no_finite_number_is_no_loss_and_the_step_still_counts(
    loss: float | None,
) -> None:
    found = history(Clock())
    found.take(step(0, loss))
    assert [(one.step, one.loss, one.total) for one in found.curve.points] == [(1, None, 100.0)]


def test_steps_that_nobody_here_saw_count_as_full_batches() -> None:
    found = history(Clock())
    found.take(step(0))
    found.take(CaughtUp(9, b"", 1.0, 0, (), {}, losses=(StepLoss(7, 0.5), StepLoss(8, 0.4))))
    assert [(one.step, one.total) for one in found.curve.points] == [
        (1, 100.0),
        (8, 800.0),
        (9, 900.0),
    ]


@pytest.mark.parametrize("jump", [-1e9, 1e9, math.inf])
def test_the_runs_clock_does_not_jump_with_the_time_of_day(jump: float) -> None:
    clock = Clock()
    found = history(clock)
    for epoch in range(3):
        clock.sleep(2.0)
        clock.wall += jump
        found.take(step(epoch))
    assert [one.seconds for one in found.curve.points] == [2.0, 4.0, 6.0]


@pytest.mark.parametrize(
    ("away", "expected"), [(600.0, 610.0), (-600.0, 10.0), (1e12, 10.0 + LONGEST_GAP_SECONDS)]
)
def test_the_time_between_two_sessions_counts_if_the_clock_says_something_possible(
    away: float, expected: float
) -> None:
    clock = Clock()
    before = history(clock)
    clock.sleep(10.0)
    before.take(step(0))
    kept = before.beside()
    clock.wall += away
    clock.now = 3.0  # the machine was started anew
    assert history(clock, before.curve.points, kept).seconds == expected


def test_it_is_known_since_when_a_peer_is_there_and_for_how_much_of_the_last_hour() -> None:
    clock = Clock()
    found = history(clock)
    found.look([RunPeerView(peer="a"), RunPeerView(peer="b")])
    clock.sleep(30.0)
    found.look([RunPeerView(peer="a")])
    found.take(step(0, shares=(Share(PeerId("a"), 75.0), Share(PeerId("b"), 25.0))))
    clock.sleep(90.0)
    found.look([RunPeerView(peer="b")])
    assert (found.stays["a"].since, found.stays["b"].since) == (0.0, 120.0)
    assert found.last_hour() == {"a": 75.0, "b": 25.0}
    clock.sleep(2 * 3600.0)
    assert found.last_hour() == {}


def test_nothing_grows_with_the_number_of_strangers_or_of_events() -> None:
    found = history(Clock())
    for turn in range(10):
        found.look([RunPeerView(peer=f"{turn}-{number}") for number in range(MOST_STAYS)])
        shares = tuple(Share(PeerId(f"{turn}-{one}"), 1.0) for one in range(MOST_STAYS))
        found.take(step(turn, shares=shares))
        for epoch in range(MOST_EVENTS):
            found.take(CheckpointSaved(epoch, "/secret/place", 10, 0.1))
    kept = found.beside()
    assert len(kept.stays) == MOST_STAYS
    assert len(kept.events) == MOST_EVENTS
    assert sum(len(one.samples) for one in kept.slices) <= MOST_STAYS


def test_the_public_hears_of_no_folder_and_of_nothing_that_is_for_the_owner() -> None:
    found = history(Clock())
    found.take(Notice("80 % of this home's quota are used"))
    found.take(Preparing("loading /secret/place"))
    found.take(CheckpointSaved(7, "/secret/place", 10, 0.1))
    assert [one.words for one in found.events] == ["checkpoint of step 7 saved"]


def test_the_public_does_not_read_what_a_member_of_a_round_wrote() -> None:
    found = history(Clock())
    found.take(RoundFailed(6, 10, "the leader refused: visit evil.example, says Eve"))
    assert [one.words for one in found.events] == ["step 7 has to be tried again"]


# -- the file


def filled(path: Path, steps: int = 2_000) -> RunHistory:
    clock = Clock()
    found = history(clock)
    for epoch in range(steps):
        clock.sleep(2.0)
        found.take(step(epoch, math.exp(-epoch / 500)))
    found.look([RunPeerView(peer="a", said_name="Ada")])
    with_file(path, lambda file: file.save(found.curve.points, found.beside()))
    return found


def with_file(path: Path, use: Callable[[HistoryFile], object]) -> None:
    file = HistoryFile(path)
    try:
        use(file)
    finally:
        file.close()


def loaded(path: Path) -> tuple[tuple[Point, ...], Beside]:
    file = HistoryFile(path)
    try:
        return file.load()
    finally:
        file.close()


def test_a_history_is_the_same_after_a_restart(tmp_path: Path) -> None:
    found = filled(tmp_path / "poem.history")
    points, beside = loaded(tmp_path / "poem.history")
    assert points == found.curve.points
    assert (beside.stays, beside.events) == (found.beside().stays, found.beside().events)


def test_a_history_is_written_in_parts_and_thinned_on_the_disk_too(tmp_path: Path) -> None:
    found = history(Clock())

    def write(file: HistoryFile) -> None:
        for epoch in range(3_000):
            found.take(step(epoch))
            if epoch % 100 == 0 or epoch == 2_999:
                file.save(found.curve.points, found.beside())

    with_file(tmp_path / "poem.history", write)
    assert loaded(tmp_path / "poem.history")[0] == found.curve.points
    assert (tmp_path / "poem.history").stat().st_size < 1 << 20


def test_a_history_in_which_only_time_goes_by_is_seldom_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, clock = tmp_path / "poem.history", Clock()
    found = history(clock)
    monkeypatch.setattr("node.training.history_file.time.monotonic", lambda: clock.now)
    written: list[float] = []

    def save(file: HistoryFile, name: str = "Ada") -> None:
        clock.sleep(WRITE_SECONDS)
        found.look([RunPeerView(peer="a", said_name=name)])
        file.save(found.curve.points, found.beside())
        written.append(loaded(path)[1].seconds)

    def write(file: HistoryFile) -> None:
        while clock.now < 50.0 + 2 * QUIET_SECONDS:
            save(file)
        assert len(set(written)) == 2
        save(file, "Ann")
        assert written[-1] == found.seconds
        found.take(step(0, shares=(Share(PeerId("a"), 75.0),)))
        save(file, "Ann")
        assert written[-1] == found.seconds
        (limit,) = file._connection.execute("PRAGMA journal_size_limit").fetchone()
        assert limit == LARGEST_JOURNAL
        clock.sleep(1.0)
        file.end(found.curve.points, found.beside())

    with_file(path, write)
    assert loaded(path)[1].seconds == found.seconds


def test_values_that_no_history_has_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "poem.history"
    filled(path, steps=3)
    connection = sqlite3.connect(path)
    connection.execute("UPDATE points SET samples = -5 WHERE step = 1")
    connection.execute("UPDATE points SET loss = 'mad' WHERE step = 2")
    connection.execute("UPDATE beside SET value = ?", (b'{"seconds": "mad"}',))
    connection.commit()
    connection.close()
    points, beside = loaded(path)
    assert [one.step for one in points] == [3]
    assert beside == Beside()


@pytest.mark.parametrize(
    "value",
    [
        b'{"events": [[1.0, "\xff\xfe"]]}',
        b'{"events": [[1.0, "a", ' + b"[" * 200_000,
        b"{" + b'"a": {' * 100_000,
        b"",
    ],
    ids=["no UTF-8", "lists in lists", "an unknown tree", "nothing"],
)
async def test_a_node_starts_whatever_stands_in_the_file(value: bytes, tmp_path: Path) -> None:
    path = tmp_path / "poem.history"
    filled(path, steps=3)
    connection = sqlite3.connect(path)
    connection.execute("UPDATE beside SET value = ?", (value,))
    connection.commit()
    connection.close()
    session = TrainingSession(Recorded())
    async with open_history(path, session, target=lambda: TARGET) as found:
        assert [one.step for one in found.curve.points] == [1, 2, 3]
        assert not found.stays
    assert loaded(path)[1].seconds > 0, "it is written again"


async def test_a_file_that_cannot_be_read_is_not_written_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "poem.history"
    before = filled(path, steps=3).curve.points

    def load(_file: HistoryFile) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    with monkeypatch.context() as while_the_disk_fails:
        while_the_disk_fails.setattr(HistoryFile, "load", load)
        session = TrainingSession(Recorded())
        async with open_history(path, session, target=lambda: TARGET):
            session.happened(step(0, 9.0))
    assert "the page shows only this session: disk I/O error" in caplog.text
    assert loaded(path)[0] == before


async def test_a_page_that_comes_late_has_the_losses_of_the_sessions_before(tmp_path: Path) -> None:
    session = TrainingSession(Recorded())
    for made in range(1, 9):
        session.account.curve.note(made, 1.0 / made)
    async with open_history(tmp_path / "a", session, target=lambda: TARGET) as found:
        session.happened(Began("poem", 6))  # the run was begun anew from a checkpoint
        assert [(one.step, one.loss) for one in found.curve.points] == [
            (made, 1.0 / made) for made in range(1, 7)
        ]
        assert [one.total for one in found.curve.points] == [100.0 * made for made in range(1, 7)]
        session.happened(step(6, 0.5))
        assert found.curve.points[-1].total == 700.0
    session = TrainingSession(Recorded())
    session.account.curve.note(1, 9.0)
    async with open_history(tmp_path / "a", session, target=lambda: TARGET) as found:
        session.happened(Began("poem", 7))
        assert found.curve.points[0].loss == 1.0, "its own history counts, once it has one"


async def test_it_has_them_too_if_the_run_has_made_steps_while_the_state_was_fetched(
    tmp_path: Path,
) -> None:
    session = TrainingSession(Recorded())
    for made in range(1, 4):
        session.account.curve.note(made, 1.0 / made)
    async with open_history(tmp_path / "a", session, target=lambda: TARGET) as found:
        replayed = (StepLoss(8, 0.25), StepLoss(9, 0.125))
        session.happened(CaughtUp(10, b"", 1.0, 0, (), {}, 2, losses=replayed))
        session.happened(Began("poem", 10))
        assert [(one.step, one.loss) for one in found.curve.points] == [
            *((made, 1.0 / made) for made in range(1, 4)),
            (9, 0.25),
            (10, 0.125),
        ]
        assert found.curve.points[-1].total == 1_000.0


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """By another program, a backup for example."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("BEGIN EXCLUSIVE")
    try:
        yield
    finally:
        connection.close()


async def test_a_locked_file_stops_neither_the_node_nor_the_other_tasks_when_it_ends(
    tmp_path: Path,
) -> None:
    path = tmp_path / "poem.history"
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            await trio.sleep(0.001)
            turns += 1

    session = TrainingSession(Recorded())
    async with trio.open_nursery() as nursery:
        with contextlib.ExitStack() as holding:
            async with open_history(path, session, target=lambda: TARGET):
                session.happened(step(0))
                nursery.start_soon(turn)
                holding.enter_context(locked(path))
                before, began = turns, trio.current_time()
            assert trio.current_time() - began < 3.0
            assert turns > before + 5
        nursery.cancel_scope.cancel()


def test_the_log_says_once_that_the_history_is_not_kept_and_once_that_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "poem.history"

    def write(file: HistoryFile) -> None:
        with locked(path):
            for _ in range(3):
                file.write((point(1),), Beside())
        for _ in range(2):
            file.write((point(1),), Beside())

    with_file(path, write)
    words = [one.getMessage() for one in caplog.records]
    assert words == [
        f"the history of the run cannot be kept in {path}: database is locked",
        f"the history of the run is kept in {path} again",
    ]
    assert loaded(path)[0] == (point(1),)


def test_a_file_that_is_no_history_is_moved_aside(tmp_path: Path) -> None:
    path = tmp_path / "poem.history"
    path.write_bytes(b"no database" * 1000)
    assert loaded(path) == ((), Beside())
    assert (tmp_path / "poem.history.damaged").exists()


def test_hostile_words_are_kept_as_they_are_and_cut(tmp_path: Path) -> None:
    path = tmp_path / "poem.history"
    words = "<script>alert(1)</script>\u202e\0"
    beside = Beside(events=(Event(1.0, words),))
    with_file(path, lambda file: file.save((), beside))
    assert loaded(path)[1].events == (Event(1.0, words),)


async def test_a_history_that_cannot_be_kept_is_of_this_session_and_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way of the folder", "utf-8")
    session = TrainingSession(Recorded())
    where = tmp_path / "file" / "poem.history"
    async with open_history(where, session, target=lambda: TARGET) as found:
        session.happened(step(1, 2.0))
        assert found.curve.points
    assert "the page shows only this session" in caplog.text
