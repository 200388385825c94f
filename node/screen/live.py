"""The screen: `Shown` (node/trainer/shown.py) as a picture that follows what happens.

    screen = Screen(terminal, lines)
    nursery.start_soon(screen.run)
    await screen.end(seconds)

A picture is drawn when something has changed, at most four times a second, in a thread: a terminal
that is paused stops no training. What has to stay (what this machine will be used for) is printed
above the picture; warnings of the log are events in it.

Easy to get wrong: the size of the terminal is asked for in the moment of drawing. SIGWINCH says
only that it is time to draw.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence

import trio
from msgspec.structs import replace
from rich.text import Text

from node.screen.picture import render
from node.screen.scene import EVENTS_KEPT, Scene, SceneEvent
from node.screen.summary import summary
from node.screen.terminal import Terminal
from node.trainer.happenings import Happening, Left, WillUse
from node.trainer.view import TrainerView
from node.trainer.words import words_of

LEAST_SECONDS = 0.25
"""Between two pictures: nobody reads faster, and a slow link to the terminal carries that."""


class Screen:
    """Invariant: all but the drawing itself happens in trio's thread."""

    def __init__(self, terminal: Terminal, stays: Callable[[str], None]) -> None:
        self._terminal, self._stays = terminal, stays
        self._view = TrainerView()
        self._events: deque[SceneEvent] = deque(maxlen=EVENTS_KEPT)
        self._left: Left | None = None
        self._changed = trio.Event()

    def happened(self, happening: Happening) -> None:
        if isinstance(happening, Left):
            self._left = happening
            return
        words = words_of(happening)
        if isinstance(happening, WillUse):
            self._stays(words)
        elif words:
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
        with trio.open_signal_receiver(signal.SIGWINCH, signal.SIGCONT) as received:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._follow_the_terminal, received)
                while True:
                    await self._changed.wait()
                    self._changed = trio.Event()
                    await _in_a_thread(self._terminal.draw, self._picture())
                    await trio.sleep(LEAST_SECONDS)

    async def end(self, seconds: float) -> None:
        """Leave a summary in the picture's place; not longer than this, also when cancelled."""
        with trio.move_on_after(seconds) as scope:
            scope.shield = True
            scene, left = self._scene(), self._left
            await _in_a_thread(self._terminal.end, lambda columns: summary(scene, left, columns))

    async def _follow_the_terminal(self, received: AsyncIterator[int]) -> None:
        async for number in received:
            if number == signal.SIGCONT:
                await _in_a_thread(self._terminal.begin_anew)
            self._changed.set()

    def _add(self, words: str, *, warns: bool = False) -> None:
        """Said again, it takes the place of the time before."""
        said_before = next((one for one in self._events if one.words == words), None)
        if said_before is not None:
            self._events.remove(said_before)
        self._events.append(SceneEvent(time.strftime("%H:%M:%S"), words, warns))
        self._changed.set()

    def _scene(self) -> Scene:
        return Scene(self._view, tuple(self._events))

    def _picture(self) -> Callable[[int, int], Sequence[Text]]:
        scene = self._scene()
        return lambda columns, rows: render(scene, columns, rows)


async def _in_a_thread(function: Callable[..., None], *arguments: object) -> None:
    """Left behind when it waits for a terminal, and we are told to end."""
    await trio.to_thread.run_sync(
        function,
        *arguments,
        abandon_on_cancel=True,  # type: ignore[call-arg] # the stubs are of an older trio
    )
