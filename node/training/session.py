"""One session of training, as its owner sees it: what happened, its state, and requests.

    session = TrainingSession(shown)
    session.happened(Preparing("logging in"))      # any thread
    session.gate.close("pause", "paused by you")
    session.departure.leave()
    session.view()                                 # for the screen and the control socket

It exists before the node, so that a Ctrl-C or a `status` in the first second finds it. When the
node trains, it is given a `Watched`.

The training thread reports events, too. All events are handled in trio's thread, in the order in
which they were reported.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Protocol

import trio

from node.core.caps.device_memory import device_memory_in_use
from node.core.display_name import with_names
from node.core.status import memory_in_use
from node.core.training_view import (
    GOES_ON,
    TRAINS,
    BatchView,
    ExpertsView,
    RunPeerView,
    TrafficView,
    TrainerView,
)
from node.training.account import SessionAccount
from node.training.departure import Departure
from node.training.gate import Gate
from node.training.happenings import (
    Began,
    ExpertsBack,
    ExpertsMissing,
    Failed,
    FirstSamplesAccepted,
    Happening,
    Left,
    Measured,
    Preparing,
    RunComplete,
    ServingBegan,
    Shown,
)
from node.training.phases import Facts, PhaseWords, told_of
from node.training.words import words_of
from protocols.accumulation.events import (
    CaughtUp,
    CheckpointSaved,
    FellBehind,
    PlaceFree,
    PlacesTaken,
    StepTaken,
)
from protocols.identity import PeerId

if TYPE_CHECKING:
    from node.run.costs import Costs
    from node.run.definition import RunDefinition
    from node.training.credit import Board

LINES_KEPT: Final = 2_000
"""Events for `potluck logs`: some hours, at most half a megabyte."""

Tell = Callable[[Happening], None]


class Watched(Protocol):
    """Facts that are known only while a node trains."""

    def batch(self) -> BatchView: ...
    def peers(self) -> tuple[RunPeerView, ...]: ...
    def traffic(self) -> TrafficView: ...
    def averaging(self) -> bool: ...
    def alone(self) -> bool: ...
    def samples_per_second(self) -> float | None: ...


class TrainingSession:
    """Invariant: all but `happened`, `gate` and `departure` is for trio's thread."""

    def __init__(
        self,
        shown: Shown,
        *,
        begins: bool = False,
        keeps_only: bool = False,
        serves_only: bool = False,
        again: str = "potluck join",
    ) -> None:
        self.gate, self.departure = Gate(), Departure()
        self.account = SessionAccount()
        self.run = self.peer = self.person = self.name = ""
        self.steps = 0
        """The steps of the whole run; 0 if it has no end, or before that is known."""
        self.watched: Watched | None = None
        self.experts: Callable[[], ExpertsView] | None = None
        """The experts of the run, once it is known to have some."""
        self.definition: RunDefinition | None = None
        """The run's definition, and what it costs a peer that trains, once they are known."""
        self.costs: Costs | None = None
        self.leaderboard: Callable[[], Awaitable[Board]] | None = None
        """Adds up the records that are here, once this peer keeps some."""
        self.take_served_rows: Callable[[], Mapping[PeerId, int]] = dict
        """The rows that each server of experts has computed for this peer since the last call."""
        self.lets_write = False
        """Whether the model is to write a text between batches (excerpt.py), for a screen."""
        self.writes = ""
        """That text; the training thread sets it."""
        self.lines: deque[tuple[float, str]] = deque(maxlen=LINES_KEPT)
        self.lines_told = 0
        self.left: Left | None = None
        self.trains = False
        """Whether the loop has begun, so that leaving may wait for a round."""
        self._shown = shown
        self._began_at = time.monotonic()
        self._facts = Facts(
            preparing="starting",
            begins=begins,
            keeps_only=keeps_only,
            serves_only=serves_only,
            again=again,
        )
        self._told, self._told_since = told_of(self._facts), time.monotonic()
        self._trains_since: float | None = None
        """Since the last pause; steps, and catching up with them, are part of training."""
        self._measured: Measured | None = None
        self.troubles: tuple[str, ...] | None = None
        """The complaints of `/healthz`; None if this peer has none."""
        self._checkpoint: CheckpointSaved | None = None
        self._checkpoint_at = 0.0
        self._last_event, self._last_event_at = "", 0.0
        self._token: trio.lowlevel.TrioToken | None = None
        self._news = trio.Event()
        self._followers: list[Tell] = []

    # -- any thread

    def happened(self, happening: Happening) -> None:
        """Something happened. Never waits."""
        try:
            trio.lowlevel.current_trio_token()
        except RuntimeError:
            if self._token is not None:
                with suppress(trio.RunFinishedError):  # there is nobody to show it to any more
                    self._token.run_sync_soon(self._take, happening)
            return
        self._take(happening)

    # -- trio's thread

    def entered(self) -> None:
        """Accept events from other threads from now on. Call this first, in trio's thread."""
        self._token = trio.lowlevel.current_trio_token()
        self.gate.watch(self.changed)
        self.departure.watch(self.changed)

    def changed(self) -> None:
        """The state has changed: show it. Any thread."""
        if self._token is not None:
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._refresh, idempotent=True)

    async def show_on(self, every_seconds: float = 1.0) -> None:
        """Show the state regularly, forever."""
        while True:
            self._refresh()
            await trio.sleep(every_seconds)

    def follow(self, tell: Tell) -> None:
        """Call `tell` for every event from now on, in trio's thread. It must not wait."""
        self._followers.append(tell)

    async def news(self) -> None:
        """Until there is another event."""
        await self._news.wait()

    @property
    def seconds(self) -> float:
        """Seconds since the session began."""
        return time.monotonic() - self._began_at

    @property
    def expert_rows(self) -> int:
        """The rows that the experts here have computed in this session."""
        return 0 if self.experts is None else self.experts().rows

    @property
    def trains_samples(self) -> bool:
        """Whether this peer trains, or will, and does not only serve experts."""
        return not self._facts.serves_only

    def told(self) -> PhaseWords:
        """The phase, with its words."""
        watched, departure = self.watched, self.departure
        facts = replace(
            self._facts,
            leaving=departure.wanted,
            leaving_at_once=departure.at_once,
            left=self.left,
            closed=self.gate.reasons(),
            checkpoint="" if self._checkpoint is None else self._checkpoint.path,
            averaging=watched is not None and watched.averaging(),
            alone=watched is not None and watched.alone(),
        )
        return told_of(facts)

    def view(self) -> TrainerView:
        """The present state."""
        told, watched, account = self._note_phase(), self.watched, self.account
        measured = self._measured or Measured("", 0, 0, 0.0, 0.0)
        points = account.losses
        left = account.seconds_left(self.steps, time.monotonic())
        saved = self._checkpoint
        return TrainerView(
            run=self.run,
            peer=self.peer,
            person=self.person,
            name=self.name,
            phase=told.phase,
            phase_seconds=round(time.monotonic() - self._told_since, 3),
            doing=told.doing,
            advice=told.advice,
            closed=tuple(one.words for one in self.gate.reasons()),
            session_seconds=round(self.seconds, 3),
            epoch=account.epoch,
            steps=self.steps,
            seconds_left=None if left is None else round(left, 1),
            loss=account.loss,
            loss_step=account.loss_step,
            losses=tuple(loss for _, loss in points),
            losses_at=tuple(step for step, _ in points),
            batch=BatchView() if watched is None else watched.batch(),
            contribution=account.contribution(
                None if watched is None else watched.samples_per_second()
            ),
            peers=() if watched is None else watched.peers(),
            traffic=TrafficView() if watched is None else watched.traffic(),
            device=measured.device,
            threads=measured.threads,
            micro_batch=measured.micro_batch,
            memory_bytes=memory_in_use(),
            device_memory_bytes=device_memory_in_use(),
            keeps_only=self._facts.keeps_only,
            serves_only=self._facts.serves_only,
            experts=None if self.experts is None else self.experts(),
            checkpoint="" if saved is None else saved.path,
            checkpoint_step=0 if saved is None else saved.epoch,
            checkpoint_age_seconds=None
            if saved is None
            else round(time.monotonic() - self._checkpoint_at, 1),
            troubles=self.troubles,
            writes=self.writes,
            last_event=self._last_event,
            last_event_at=self._last_event_at,
        )

    def _take(self, happening: Happening) -> None:
        is_first = self.account.take(happening)
        self.account.note_moment(time.monotonic())
        self._note_facts(happening)
        words = words_of(happening)
        if words:
            words = with_names(words, self._peers())
            self._last_event, self._last_event_at = words, round(time.time(), 3)
            self.lines.append((self._last_event_at, words))
            self.lines_told += 1
            self._news.set()
            self._news = trio.Event()
        self._shown.happened(happening)
        for tell in self._followers:
            tell(happening)
        if is_first:
            epoch, samples = self.account.epoch - 1, self.account.samples
            self._take(FirstSamplesAccepted(epoch, samples, round(self.seconds, 3)))
        self._refresh()

    def _note_facts(self, happening: Happening) -> None:
        facts = self._facts
        match happening:
            case Preparing(doing=doing):
                facts = replace(facts, preparing=doing)
            case Measured():
                self._measured = happening
            case Began(epoch=epoch):
                self.trains = True
                self.account.epoch = epoch
                facts = replace(facts, preparing="", behind=False)
            case ServingBegan() if facts.serves_only:
                self.trains = True
                facts = replace(facts, preparing="")
            case FellBehind():
                facts = replace(facts, behind=True)
            case CaughtUp() | StepTaken():
                facts = replace(facts, behind=False)
            case PlacesTaken(places=places):
                facts = replace(facts, places_taken=places)
            case PlaceFree():
                facts = replace(facts, places_taken=0)
            case ExpertsMissing():
                facts = replace(facts, lacks_experts=True)
            case ExpertsBack():
                facts = replace(facts, lacks_experts=False)
            case RunComplete():
                facts = replace(facts, complete=True)
            case Failed():
                facts = replace(facts, failed=happening)
            case Left():
                self.left = happening
            case CheckpointSaved():
                self._checkpoint, self._checkpoint_at = happening, time.monotonic()
            case _:
                pass
        self._facts = facts

    def _peers(self) -> Iterator[RunPeerView]:
        """Made when the first one is asked for: most events name nobody."""
        if self.watched is not None:
            yield from self.watched.peers()

    def _note_phase(self) -> PhaseWords:
        told = self.told()
        before, now = self._told.phase, time.monotonic()
        if told.phase not in GOES_ON:
            self._trains_since = None
        elif told.phase in TRAINS and self._trains_since is None:
            self._trains_since = now
        if told.phase is not before:
            self._told_since = now
        if told.phase in TRAINS and self._trains_since is not None:
            self._told_since = self._trains_since
        self._told = told
        return told

    def _refresh(self) -> None:
        self._shown.show(self.view())
