"""The screen: `Shown` (node/training/happenings.py) as a picture that follows the events.

    screen = Screen(terminal, lines)
    nursery.start_soon(screen.run)
    await screen.end(seconds)

A picture is drawn when something has changed, at most four times a second, in a thread: a paused
terminal does not stop the training. Lasting text (how this machine will be used) is printed above
the picture; warnings of the log are events in it. Steps come fast, so only the newest is shown.

The size of the terminal is read when drawing. SIGWINCH only means that it is time to draw. After
Ctrl-Z the kernel itself has to stop the process, because it does not stop one that no shell could
continue.
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence

import trio
from msgspec.structs import replace
from rich.text import Text

from node.app.screen.picture import EVENTS_KEPT, Scene, SceneEvent, render, summary
from node.app.screen.terminal import Terminal
from node.core.training_view import TrainerView
from node.training.happenings import Failed, Happening, Left, RecordsSummed, WillUse
from node.training.words import words_of
from protocols.accumulation.events import StepTaken

LEAST_SECONDS = 0.25
"""Between two pictures: nobody reads faster, and a slow link to the terminal can carry it."""


class Screen:
    """Invariant: all but the drawing itself happens in trio's thread."""

    def __init__(self, terminal: Terminal, stays: Callable[[str], None]) -> None:
        self._terminal, self._stays = terminal, stays
        self._view = TrainerView()
        self._events: deque[SceneEvent] = deque(maxlen=EVENTS_KEPT)
        self._changed = trio.Event()

    def happened(self, happening: Happening) -> None:
        words = words_of(happening)
        match happening:
            case Left() | Failed():
                pass  # in the view
            case WillUse():
                self._stays(words)
            case StepTaken():
                self._add(words, instead_of="step")
            case RecordsSummed():
                self._add(words, instead_of="records")
            case _ if words:
                self._add(words)

    def show(self, view: TrainerView) -> None:
        if view.traffic.sent_bytes < self._view.traffic.sent_bytes:
            view = replace(view, traffic=self._view.traffic)  # the node has ended: it was so much
        self._view = view
        self._changed.set()

    def warn(self, line: str) -> None:
        """A line of the log."""
        self._add(line, warns=True)

    async def run(self) -> None:
        """Draw until cancelled."""
        following = (signal.SIGWINCH, signal.SIGTSTP, signal.SIGCONT)
        with trio.open_signal_receiver(*following) as received:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._follow_the_terminal, received)
                while True:
                    await self._changed.wait()
                    self._changed = trio.Event()
                    await _in_a_thread(self._terminal.draw, self._picture())
                    await trio.sleep(LEAST_SECONDS)

    async def end(self, seconds: float) -> bool:
        """Leave a summary in place of the picture; not longer than this, also when cancelled.
        Returns whether it is there."""
        with trio.move_on_after(seconds) as scope:
            scope.shield = True
            scene, clock = self._scene(), time.strftime("%H:%M:%S")
            await _in_a_thread(
                self._terminal.end, lambda columns, rows: summary(scene, clock, columns, rows)
            )
        return not scope.cancelled_caught

    async def _follow_the_terminal(self, received: AsyncIterator[int]) -> None:
        async for number in received:
            if number == signal.SIGTSTP:
                self._terminal.restore()
                _stop_as_by_default()
            elif number == signal.SIGCONT:
                await _in_a_thread(self._terminal.begin_anew)
            self._changed.set()

    def _add(self, words: str, *, warns: bool = False, instead_of: str = "") -> None:
        """A repeated event, or the next of its kind, replaces the one before."""
        for one in tuple(self._events):
            if one.words == words or (instead_of and one.kind == instead_of):
                self._events.remove(one)
        self._events.append(SceneEvent(time.strftime("%H:%M:%S"), words, warns, instead_of))
        self._changed.set()

    def _scene(self) -> Scene:
        return Scene(self._view, tuple(self._events))

    def _picture(self) -> Callable[[int, int], Sequence[Text]]:
        scene = self._scene()
        return lambda columns, rows: render(scene, columns, rows)


def _stop_as_by_default() -> None:
    """The default action of Ctrl-Z. Call this in trio's thread, the main one."""
    handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    try:
        os.kill(os.getpid(), signal.SIGTSTP)  # comes back when we are continued
    finally:
        signal.signal(signal.SIGTSTP, handler)


async def _in_a_thread(function: Callable[..., None], *arguments: object) -> None:
    """Abandoned if it waits for a terminal when we are told to end."""
    await trio.to_thread.run_sync(
        function,
        *arguments,
        abandon_on_cancel=True,  # type: ignore[call-arg] # the stubs are of an older trio
    )
