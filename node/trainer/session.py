"""One session of training, as its owner sees it: what happened, how it is, what was asked for.

    session = Session(shown)
    session.happened(Preparing("logging in"))      # any thread
    session.gate.close("pause", "paused by you")
    session.departure.leave()
    session.view()                                 # for the screen and the control socket

It is there before the node is, so that a Ctrl-C or a `status` in the first second finds it, and it
is handed a `Watched` when the node trains.

Easy to get wrong: the training thread tells what happens, too. Everything is taken in trio's
thread, in the order in which it was told.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Final, Protocol

import trio

from node.display_name import with_names
from node.status import memory_in_use
from node.trainer.account import Account
from node.trainer.departure import Departure
from node.trainer.gate import Gate
from node.trainer.happenings import (
    Began,
    Failed,
    FirstSamplesAccepted,
    Happening,
    Left,
    Measured,
    Preparing,
    RunComplete,
)
from node.trainer.phases import Facts, Told, told_of
from node.trainer.shown import Shown
from node.trainer.view import (
    GOES_ON,
    TRAINS,
    BatchView,
    PeerView,
    TrafficView,
    TrainerView,
    named,
)
from node.trainer.words import words_of
from protocols.accumulation.events import (
    CaughtUp,
    CheckpointSaved,
    FellBehind,
    PlaceFree,
    PlacesTaken,
    StepTaken,
)

LINES_KEPT: Final = 2_000
"""Of what happened, for `potluck logs`: some hours, at most half a megabyte."""

Tell = Callable[[Happening], None]


class Watched(Protocol):
    """What is known only while a node trains."""

    def batch(self) -> BatchView: ...
    def peers(self) -> tuple[PeerView, ...]: ...
    def traffic(self) -> TrafficView: ...
    def averaging(self) -> bool: ...
    def alone(self) -> bool: ...
    def samples_per_second(self) -> float | None: ...


class Session:
    """Invariant: all but `happened`, `gate` and `departure` is for trio's thread."""

    def __init__(
        self,
        shown: Shown,
        *,
        begins: bool = False,
        keeps_only: bool = False,
        again: str = "potluck join",
    ) -> None:
        self.gate, self.departure = Gate(), Departure()
        self.account = Account()
        self.run = self.peer = self.person = self.name = ""
        self.steps = 0
        """That the run will have made when it is over; 0 where it has no end, or nobody knows."""
        self.watched: Watched | None = None
        self.lines: deque[tuple[float, str]] = deque(maxlen=LINES_KEPT)
        self.lines_told = 0
        self.left: Left | None = None
        self.trains = False
        """Whether the loop has begun, so that there may be a round to see out."""
        self._shown = shown
        self._began_at = time.monotonic()
        self._facts = Facts(preparing="starting", begins=begins, keeps_only=keeps_only, again=again)
        self._told, self._told_since = told_of(self._facts), time.monotonic()
        self._trains_since: float | None = None
        """Without a pause since; steps, and catching up with them, are part of training."""
        self._measured: Measured | None = None
        self.troubles: tuple[str, ...] | None = None
        """What `/healthz` complains of; None where this peer has none."""
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
                with suppress(trio.RunFinishedError):  # nobody is there any more to be shown it
                    self._token.run_sync_soon(self._take, happening)
            return
        self._take(happening)

    # -- trio's thread

    def entered(self) -> None:
        """From now on other threads may tell what happens; the first thing in trio's thread."""
        self._token = trio.lowlevel.current_trio_token()
        self.gate.watch(self.changed)
        self.departure.watch(self.changed)

    def changed(self) -> None:
        """Something is other than it was: show it. Any thread."""
        if self._token is not None:
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._refresh, idempotent=True)

    async def show_on(self, every_seconds: float = 1.0) -> None:
        """Show how it is, for ever."""
        while True:
            self._refresh()
            await trio.sleep(every_seconds)

    def follow(self, tell: Tell) -> None:
        """Be told everything that happens from now on, in trio's thread. It must not wait."""
        self._followers.append(tell)

    async def news(self) -> None:
        """Until another line has been told."""
        await self._news.wait()

    @property
    def seconds(self) -> float:
        """Since the session began."""
        return time.monotonic() - self._began_at

    def told(self) -> Told:
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
        """How it is now."""
        told, watched, account = self._note_phase(), self.watched, self.account
        measured = self._measured or Measured("", 0, 0, 0.0, 0.0)
        points = account.curve.points
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
            keeps_only=self._facts.keeps_only,
            checkpoint="" if saved is None else saved.path,
            checkpoint_step=0 if saved is None else saved.epoch,
            checkpoint_age_seconds=None
            if saved is None
            else round(time.monotonic() - self._checkpoint_at, 1),
            troubles=self.troubles,
            last_event=self._last_event,
            last_event_at=self._last_event_at,
        )

    def _take(self, happening: Happening) -> None:
        is_first = self.account.take(happening)
        self.account.note_moment(time.monotonic())
        self._note_facts(happening)
        words = words_of(happening)
        if words:
            peers = () if self.watched is None else self.watched.peers()
            words = with_names(words, named(peers))
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
            case FellBehind():
                facts = replace(facts, behind=True)
            case CaughtUp() | StepTaken():
                facts = replace(facts, behind=False)
            case PlacesTaken(places=places):
                facts = replace(facts, places_taken=places)
            case PlaceFree():
                facts = replace(facts, places_taken=0)
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

    def _note_phase(self) -> Told:
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
