"""What a page shows of a run's past: its curve, its people, its last events. Pure and bounded.

    history = RunHistory(target=lambda: 2048, clock=time.monotonic, wall_clock=time.time)
    session.follow(history.take)
    history.look(session.view().peers)             # every few seconds
    history.curve.points, history.stays, history.events

A curve has one point for each of the newest `RECENT_STEPS` steps. Older ones are means of some
steps in a row, at most `OLD_POINTS` of them (thinned.py). So the curve reaches back to the first
step, and the newest steps are all there.

Promises: nothing grows with the length of the run or the number of strangers. A value that is not a
finite number is left out. Times are seconds of the run's own clock, which never goes back: in one
session it is the monotonic clock; the time between two sessions is taken from the wall clock, and
is never negative and at most `LONGEST_GAP_SECONDS`.

A run may go back to a checkpoint and make a step again. Then the later points are dropped.
`protocols/accumulation/events.py` says what is known of a step; a peer that was away for some steps
learns their losses at most, so their samples are taken to be a full batch each.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import Annotated, Final

import msgspec

from node.core.training_view import RunPeerView
from node.training.happenings import (
    Began,
    Happening,
    NetworkBack,
    NetworkLost,
    Paused,
    PeerCame,
    PeerWent,
    Resumed,
    RunComplete,
)
from node.training.thinned import Thinned
from node.training.words import words_of
from protocols.accumulation.events import (
    CaughtUp,
    CheckpointMissed,
    CheckpointSaved,
    FellBehind,
    RoundFailed,
    StepTaken,
    reduced_by,
)

RECENT_STEPS: Final = 256
"""The newest steps have a point each: at a step every two seconds, some ten minutes."""
OLD_POINTS: Final = 768  # of older steps; with the recent ones more than the pixels of a chart
MOST_STAYS: Final = 512  # peers of which it is known since when they are there
MOST_EVENTS: Final = 100
LONGEST_WORDS: Final = 240  # of one event
MOST_CHECKPOINTS: Final = 12
MOST_MEMBERS: Final = 256  # of the last round

HOUR: Final = 3600.0
SLICE_SECONDS: Final = 300.0  # the last hour is counted in these
AWAY_SECONDS: Final = 60.0  # a peer that was away for longer begins a new stay
LONGEST_GAP_SECONDS: Final = 90 * 24 * HOUR
LARGEST: Final = 1e15  # of any number here: more samples than any run has

Step = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
Number = Annotated[float, msgspec.Meta(ge=0.0, le=LARGEST)]
Text = Annotated[str, msgspec.Meta(max_length=LONGEST_WORDS)]


class Point(msgspec.Struct, frozen=True, array_like=True):
    """Some steps in a row, up to `step`. `loss`: their mean, None if none had a finite one;
    `samples`: in these steps; `total`: in all steps up to here; `seconds`: on the run's clock when
    the last was made; `busy_seconds`: how long these steps took; `peers`: the most in one."""

    step: Step
    steps: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
    loss: Annotated[float, msgspec.Meta(ge=-LARGEST, le=LARGEST)] | None
    samples: Number
    total: Number
    seconds: Number
    busy_seconds: Number
    peers: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]


class Stay(msgspec.Struct, frozen=True, array_like=True):
    """A peer that was seen without a break from `since` to `seen`, on the run's clock."""

    peer: Text
    name: Text
    said_name: Text
    since: Number
    seen: Number


class Event(msgspec.Struct, frozen=True, array_like=True):
    """`at`: seconds since 1970. The words name peers by the end of their keys."""

    at: float
    words: Text


class Saved(msgspec.Struct, frozen=True, array_like=True):
    """A checkpoint."""

    step: Step
    at: float
    bytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]


class Member(msgspec.Struct, frozen=True, array_like=True):
    """Of a round: its samples, and the part of the vector that it averaged, from 0 to 1."""

    peer: Text
    samples: Number
    part: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]


class LastRound(msgspec.Struct, frozen=True, array_like=True):
    """The newest round with others. `of_many`: there were other groups beside this one."""

    step: Step
    members: Annotated[tuple[Member, ...], msgspec.Meta(max_length=MOST_MEMBERS)]
    of_many: bool


class Slice(msgspec.Struct, array_like=True):
    """The samples of each peer in some minutes; `number` counts from the run's beginning."""

    number: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
    samples: Annotated[dict[Text, Number], msgspec.Meta(max_length=MOST_STAYS)]


class Beside(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything but the curve, as it is kept on the disk."""

    seconds: Number = 0.0
    wall: float = 0.0
    stays: Annotated[tuple[Stay, ...], msgspec.Meta(max_length=MOST_STAYS)] = ()
    slices: Annotated[tuple[Slice, ...], msgspec.Meta(max_length=16)] = ()
    events: Annotated[tuple[Event, ...], msgspec.Meta(max_length=MOST_EVENTS)] = ()
    checkpoints: Annotated[tuple[Saved, ...], msgspec.Meta(max_length=MOST_CHECKPOINTS)] = ()
    last_round: LastRound | None = None


NOTHING_KEPT: Final = Beside()


class Curve:
    """Invariant: the points are in the order of their steps; the last `RECENT_STEPS` steps have one
    each, and there are at most `OLD_POINTS` others (thinned.py)."""

    def __init__(self, points: Iterable[Point] = ()) -> None:
        self._old = Thinned(OLD_POINTS, together)
        self._recent: deque[Point] = deque()
        for one in points:
            self.add(one)

    @property
    def points(self) -> tuple[Point, ...]:
        return (*self._old, *self._recent)

    @property
    def last(self) -> Point | None:
        return self._recent[-1] if self._recent else self._old.last

    def add(self, point: Point) -> None:
        while self._recent and self._recent[-1].step >= point.step:
            self._recent.pop()
        if not self._recent:
            self._old.drop_from(point.step)
        self._recent.append(point)
        if len(self._recent) > RECENT_STEPS:
            self._old.add(self._recent.popleft())


def together(first: Point, second: Point) -> Point:
    """Two neighbours as one point."""
    losses = [(one.loss, one.steps) for one in (first, second) if one.loss is not None]
    steps = sum(count for _, count in losses)
    return Point(
        step=second.step,
        steps=first.steps + second.steps,
        loss=sum(loss * count / steps for loss, count in losses) if losses else None,
        samples=min(LARGEST, first.samples + second.samples),
        total=second.total,
        seconds=second.seconds,
        busy_seconds=first.busy_seconds + second.busy_seconds,
        peers=max(first.peers, second.peers),
    )


class RunHistory:
    """Takes all events of a session, in order, and goes on from what earlier sessions kept.
    `target`: the samples of a full batch, 0 as long
    as that is not known."""

    def __init__(
        self,
        *,
        target: Callable[[], int],
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        points: Iterable[Point] = (),
        beside: Beside = NOTHING_KEPT,
    ) -> None:
        self._target, self._clock, self._wall_clock = target, clock, wall_clock
        self.curve = Curve(points)
        last = self.curve.last
        self._before = max(beside.seconds, 0.0 if last is None else last.seconds)
        if self._before:
            gap = wall_clock() - beside.wall
            self._before += min(max(gap, 0.0), LONGEST_GAP_SECONDS) if beside.wall else 0.0
        self._began = clock()
        self._last_step_at: float | None = None
        self._stays = {one.peer: one for one in beside.stays}
        self._slices = deque(beside.slices)
        self.events = deque(beside.events, maxlen=MOST_EVENTS)
        self.checkpoints = deque(beside.checkpoints, maxlen=MOST_CHECKPOINTS)
        self.last_round = beside.last_round
        self.pace: tuple[float, float] | None = None
        """Seconds of the newest step: until its batch was full, and for averaging."""

    @property
    def seconds(self) -> float:
        """The run's clock."""
        return self._before + max(0.0, self._clock() - self._began)

    def beside(self) -> Beside:
        """What is kept on the disk beside the curve."""
        return Beside(
            self.seconds,
            self._wall_clock(),
            tuple(self._stays.values()),
            tuple(Slice(one.number, dict(one.samples)) for one in self._slices),
            tuple(self.events),
            tuple(self.checkpoints),
            self.last_round,
        )

    def take(self, happening: Happening) -> None:
        words = told_in_public(happening)
        if words:
            self.events.append(Event(self._wall_clock(), words[:LONGEST_WORDS]))
        match happening:
            case StepTaken():
                self._step_taken(happening)
            case CaughtUp(losses=losses):
                for one in losses:
                    self._add(one.epoch + 1, one.loss, float(self._target()), 0.0, 0)
                self._last_step_at = self.seconds
            case CheckpointSaved(epoch=epoch, bytes=size):
                self.checkpoints.append(Saved(epoch, self._wall_clock(), size))
            case _:
                pass

    def begin_with(self, losses: Iterable[tuple[int, float]]) -> None:
        """The run's curve as this peer knows it from before there was a history: each loss with the
        last of its steps. When they were made is not known."""
        if self.curve.last is not None:
            return
        before, most = 0, float(self._target())
        for step, loss in losses:
            steps = step - before
            if steps < 1 or not abs(loss) < LARGEST:
                continue
            samples, total = min(LARGEST, most * steps), min(LARGEST, most * step)
            self.curve.add(Point(step, steps, loss, samples, total, 0.0, 0.0, 0))
            before = step

    def look(self, peers: Iterable[RunPeerView]) -> None:
        """Note which peers are there now."""
        now = self.seconds
        for one in peers:
            if one.ignored:
                continue
            before = self._stays.pop(one.peer, None)
            is_new = before is None or now - before.seen > AWAY_SECONDS
            since = now if before is None or is_new else before.since
            self._stays[one.peer] = Stay(
                one.peer[:LONGEST_WORDS],
                one.name[:LONGEST_WORDS],
                one.said_name[:LONGEST_WORDS],
                since,
                now,
            )
        while len(self._stays) > MOST_STAYS:
            del self._stays[next(iter(self._stays))]  # the one that was seen longest ago
        self._forget_slices()

    @property
    def stays(self) -> dict[str, Stay]:
        """The peers seen lately, by their ids."""
        return dict(self._stays)

    def last_hour(self) -> dict[str, float]:
        """Each peer's samples in the steps of about the last hour."""
        self._forget_slices()
        found: dict[str, float] = {}
        for one in self._slices:
            for peer, samples in one.samples.items():
                found[peer] = found.get(peer, 0.0) + samples
        return found

    def _step_taken(self, step: StepTaken) -> None:
        now = self.seconds
        took = 0.0 if self._last_step_at is None else now - self._last_step_at
        self.pace = step.accumulating_seconds, step.averaging_seconds
        self._last_step_at = now
        samples = step.samples if _is_count(step.samples) else 0.0
        peers = step.peers or max(1, len(step.members))
        self._add(step.epoch + 1, step.loss, samples, took, peers)
        parts = reduced_by(step.shares)
        if not step.shares:
            return
        members = [
            Member(one.peer, one.samples, min(1.0, max(0.0, parts[one.peer])))
            for one in step.shares[:MOST_MEMBERS]
            if _is_count(one.samples)
        ]
        self.last_round = LastRound(step.epoch + 1, tuple(members), step.over_a_grid)
        self._count(members, now)

    def _add(self, step: int, loss: float | None, samples: float, took: float, peers: int) -> None:
        last = self.curve.last
        if last is not None and last.step >= step:  # the run went back
            earlier = [one for one in self.curve.points if one.step < step]
            last = earlier[-1] if earlier else None
        at, total = (0, 0.0) if last is None else (last.step, last.total)
        unseen = max(0, step - at - 1) * float(self._target())
        is_finite = loss is not None and math.isfinite(loss) and abs(loss) < LARGEST
        self.curve.add(
            Point(
                step,
                1,
                loss if is_finite else None,
                samples,
                min(LARGEST, total + unseen + samples),
                self.seconds,
                took,
                peers,
            )
        )

    def _count(self, members: Iterable[Member], now: float) -> None:
        number = int(now // SLICE_SECONDS)
        if not self._slices or self._slices[-1].number != number:
            self._slices.append(Slice(number, {}))
        samples = self._slices[-1].samples
        for one in members:
            if one.samples and (one.peer in samples or len(samples) < MOST_STAYS):
                samples[one.peer] = min(LARGEST, samples.get(one.peer, 0.0) + one.samples)
        self._forget_slices()

    def _forget_slices(self) -> None:
        oldest = int((self.seconds - HOUR) // SLICE_SECONDS)
        while self._slices and self._slices[0].number <= oldest:
            self._slices.popleft()


def _is_count(number: float) -> bool:
    return 0.0 <= number < LARGEST  # which nan is not


def told_in_public(happening: Happening) -> str:
    """The words of an event for everybody: none that name a folder, an address or a limit of the
    machine that serves the page, and none that another peer wrote freely. Empty if it is not
    told."""
    match happening:
        case Began() | PeerCame() | PeerWent() | RunComplete():
            return words_of(happening)
        case RoundFailed(epoch=epoch):  # its reason may be the words of a member of the round
            return f"step {epoch + 1:,} has to be tried again"
        case FellBehind():
            return "the peer that shows this page is behind, and fetches the run's state"
        case CaughtUp(epoch=epoch):
            return f"the peer that shows this page has caught up, at step {epoch:,}"
        case NetworkLost():
            return "the peer that shows this page has lost its network"
        case NetworkBack():
            return "the network is back"
        case Paused():
            return "the peer that shows this page pauses"
        case Resumed():
            return "the peer that shows this page goes on"
        case CheckpointSaved(epoch=epoch):
            return f"checkpoint of step {epoch:,} saved"
        case CheckpointMissed(epoch=epoch):
            return f"no checkpoint of step {epoch:,} could be saved"
        case _:
            return ""
