"""The screen: `Shown` (node/training/happenings.py) as frames that follow the events and the keys.

    screen = Screen(terminal, lines)
    nursery.start_soon(screen.run)
    screen.meet(node.status, node.control.ask)          # when the node runs
    await screen.end(seconds)

A frame is drawn when something has changed, at most four times a second, and more rarely where it
takes long. That happens in a thread: a paused terminal does not stop the training. Lasting text
(how this machine will be used) is printed on the normal screen; warnings of the log are events.
Steps come fast, so only the newest is shown.

The size of the terminal is read when drawing. After SIGWINCH the whole frame is written again: the
terminal may have been resized there and back since the last one, and shows only a part of it. After
Ctrl-Z the kernel itself has to stop the process, because it does not stop one that no shell could
continue.

A key does what a command does, through the same request, and says so. `q` leaves as SIGTERM does.
"""

from __future__ import annotations

import logging
import math
import os
import re
import signal
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Final, TypeVar

import trio
from msgspec.structs import replace

from node.app.screen.panels import Scene, SceneEvent
from node.app.screen.picture import choices, frame
from node.app.screen.summary import summary
from node.app.screen.terminal import Frame, Terminal
from node.core.sensors import Reading, Sensors, gpus_in_use
from node.core.status import NodeStatus
from node.core.training_view import ENDED, TrainerPhase, TrainerView
from node.training.happenings import Failed, Happening, Left, RecordsSummed, WillUse
from node.training.questions import PAUSE, RESUME
from node.training.words import words_of
from protocols.accumulation.events import StepTaken
from protocols.errors import PotluckError

_log = logging.getLogger("potluck.screen")

LEAST_SECONDS: Final = 0.25
"""Between two frames: nobody reads faster, and a slow link to the terminal can carry it."""

MOST_SECONDS: Final = 1.0
"""Between two frames, however long one takes: keys have to be seen to work."""

SHARE_OF_A_CORE: Final = 0.02
"""That drawing takes at most. A frame of 250×70 takes 6 ms, and more on a small board."""

STATUS_SECONDS: Final = 2.0  # between two looks at the node of a peer that keeps the run
SENSORS_SECONDS: Final = 2.0  # between two looks at them
PROCESSOR_SECONDS: Final = 2.0  # of which the use of the processor is shown
NOTE_SECONDS: Final = 10.0  # for which the words about the last key stay
KEYS_AGAIN_SECONDS: Final = 0.5  # after nothing could be read
EVENTS_KEPT: Final = 100
"""More than a terminal has rows, as a rule."""
SAID_KEPT: Final = 200

KEY: Final = re.compile(rb"\x1b\[[0-9;]*[A-Za-z~]|\x1bO.|\x1b[^\[O\x1b]|[\s\S]")
"""One key; arrows and the like are sequences, and so is a key with Alt."""
MOST_KEYS: Final = 8
"""At once; more are a text that was pasted."""
PASTE_SECONDS: Final = 0.5  # in which the rest of such a text comes

Ask = Callable[[str], Awaitable[Any]]
Result = TypeVar("Result")


def _as_sigterm() -> None:
    """It ends the training as Ctrl-C does, but with exit code 0: a key is no interruption."""
    signal.raise_signal(signal.SIGTERM)


class Screen:
    """Invariant: all but the drawing itself happens in trio's thread."""

    def __init__(
        self,
        terminal: Terminal,
        stays: Callable[[str], None],
        leave: Callable[[], None] = _as_sigterm,
        sensors: Sensors | None = None,
    ) -> None:
        self._terminal, self._stays, self._leave = terminal, stays, leave
        self._view = TrainerView()
        self._events: deque[SceneEvent] = deque(maxlen=EVENTS_KEPT)
        self._said: deque[str] = deque(maxlen=SAID_KEPT)
        self._will_use = ""
        self._status: Callable[[], NodeStatus] | None = None
        self._ask: Ask | None = None
        self._node: NodeStatus | None = None
        self._node_at = float("-inf")
        self._processor = _ProcessorUse()
        self._sensors = sensors or Sensors()
        self._reading = Reading()
        self._chosen: str | None = None
        self._helps = False
        self._note, self._note_at = "", 0.0
        self._changed = trio.Event()

    # -- what is shown

    def happened(self, happening: Happening) -> None:
        words = words_of(happening)
        match happening:
            case Left() | Failed():
                pass  # in the view
            case WillUse(lines=lines):
                self._will_use = words
                self._stays(words)
                for line in lines:
                    self._add(line)
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
        now = time.monotonic()
        self._processor.note(now, time.process_time())
        self._look_at_node(now)
        if self._note and now - self._note_at > NOTE_SECONDS:
            self._note = ""
        self._changed.set()

    def _look_at_node(self, now: float) -> None:
        """A peer that keeps the run shows what its node does."""
        is_over = self._view.phase in (TrainerPhase.LEAVING, *ENDED)
        if self._status is None or is_over or not self._view.keeps_only:
            return
        if now - self._node_at > STATUS_SECONDS:
            self._node, self._node_at = self._status(), now

    def warn(self, line: str) -> None:
        """A line of the log."""
        self._add(line, warns=True)

    def printed(self, line: str) -> None:
        """A line is on the normal screen, which is shown now."""
        if line != self._will_use:  # that is among the events
            self._said += line.split("\n")
        self._changed.set()

    def meet(self, status: Callable[[], NodeStatus], ask: Ask) -> None:
        """The node runs: it can be asked."""
        self._status, self._ask = status, ask

    # -- the tasks

    async def run(self) -> None:
        """Draw and read keys until cancelled."""
        following = (signal.SIGWINCH, signal.SIGTSTP, signal.SIGCONT)
        with trio.open_signal_receiver(*following) as received:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._follow_the_terminal, received)
                nursery.start_soon(self._follow_the_sensors)
                if self._terminal.keys is not None:
                    nursery.start_soon(self._follow_the_keys, self._terminal.keys)
                while True:
                    await self._changed.wait()
                    self._changed = trio.Event()
                    cost = await _in_a_thread(_cost_of, self._terminal.draw, self._frame())
                    await trio.sleep(pause_after(cost))

    async def end(self, seconds: float) -> bool:
        """Leave a summary on the normal screen; not longer than this, also when cancelled. Returns
        whether it is there."""
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
            else:
                self._terminal.distrust()
            self._changed.set()

    async def _follow_the_sensors(self) -> None:
        """Their values are shown with the next frame; they are no reason to draw one."""
        while True:
            try:
                self._reading = await _in_a_thread(lambda: self._sensors.read(gpus_in_use()))
            except Exception:  # noqa: BLE001 - no sensor ends the training
                _log.exception("the sensors of this machine cannot be read")
                return
            await trio.sleep(SENSORS_SECONDS)

    async def _follow_the_keys(self, descriptor: int) -> None:
        pasting_until = -math.inf
        while True:
            await trio.lowlevel.wait_readable(descriptor)
            try:
                typed = self._terminal.typed()
            except OSError:  # the terminal has gone
                return
            keys = KEY.findall(typed)
            if not keys:  # not for us: we are in the background, or another program read it
                await trio.sleep(KEYS_AGAIN_SECONDS)
            elif len(keys) > MOST_KEYS or trio.current_time() < pasting_until:
                pasting_until = trio.current_time() + PASTE_SECONDS
                self._say("this was pasted: nothing was done")
            else:
                for key in keys:
                    await self._press(key)

    # -- keys

    async def _press(self, key: bytes) -> None:
        self._note = ""
        match key:
            case b"p" | b"r" if self._view.relays_only:
                self._say("there is nothing to pause: this node computes nothing")
            case b"p":
                await self._request(PAUSE, _paused)
            case b"r":
                await self._request(RESUME, _resumed)
            case b"q":
                self._say(
                    "leaves, as by Ctrl-C"
                    if self._view.relays_only
                    else "leaves, as by `potluck leave` or Ctrl-C; q again: at once"
                )
                self._leave()
            case b"?":
                self._helps = not self._helps
            case b"\t":
                self._choose(1)
            case b"\x1b[Z":  # tab with shift
                self._choose(-1)
            case b"\x1b":
                self._chosen, self._helps = None, False
            case _:
                pass
        self._changed.set()

    async def _request(self, command: str, told: Callable[[Mapping[str, Any]], str]) -> None:
        if self._ask is None:
            self._say("The node still gets ready. Try again in a moment.")
            return
        try:
            self._say(told(await self._ask(command)))
        except PotluckError as error:
            self._say(f"{error.what} {error.advice}")

    def _choose(self, step: int) -> None:
        """The next panel in the whole room; all of them after the last one."""
        self._helps = False
        ring = [None, *choices(self._scene())]
        at = ring.index(self._chosen) if self._chosen in ring else 0
        self._chosen = ring[(at + step) % len(ring)]

    def _say(self, words: str) -> None:
        self._note, self._note_at = words, time.monotonic()
        self._changed.set()

    # -- the scene

    def _add(self, words: str, *, warns: bool = False, instead_of: str = "") -> None:
        """A repeated event, or the next of its kind, replaces the one before."""
        for one in tuple(self._events):
            if one.words == words or (instead_of and one.kind == instead_of):
                self._events.remove(one)
        self._events.append(SceneEvent(time.strftime("%H:%M:%S"), words, warns, instead_of))
        self._changed.set()

    def _scene(self) -> Scene:
        return Scene(
            self._view,
            tuple(self._events),
            node=self._node,
            processor=self._processor.busy,
            processors=os.cpu_count() or 0,
            sensors=self._reading,
            said=tuple(self._said),
            keys=self._terminal.keys is not None,
            chosen=self._chosen,
            helps=self._helps,
            note=self._note,
        )

    def _frame(self) -> Frame:
        scene = self._scene()
        return lambda columns, rows, look: frame(scene, columns, rows, look)


def _paused(answer: Mapping[str, Any]) -> str:
    not_kept = answer.get("not_kept")
    until = f"; a restart ends it ({not_kept})" if not_kept else ""
    return f"paused, as by `potluck pause`: r or `potluck resume` goes on{until}"


def _resumed(answer: Mapping[str, Any]) -> str:
    not_kept = answer.get("not_kept")
    until = f"; a restart pauses it again ({not_kept})" if not_kept else ""
    others = "; ".join(answer.get("still_closed", ()))
    if others:
        return f"still paused: {others} (`potluck resume` ends only the owner's pause){until}"
    words = "goes on, as by `potluck resume`" if answer.get("was_paused") else "it was not paused"
    return f"{words}{until}"


class _ProcessorUse:
    """How many processors this process has kept busy lately; None if that is not known yet."""

    def __init__(self) -> None:
        self.busy: float | None = None
        self._before: tuple[float, float] | None = None

    def note(self, now: float, used: float) -> None:
        """`used`: seconds of all processors since the process began."""
        if self._before is None:
            self._before = now, used
        elif now - self._before[0] >= PROCESSOR_SECONDS:
            self.busy = (used - self._before[1]) / (now - self._before[0])
            self._before = now, used


def pause_after(cost: float) -> float:
    """How long to wait after a frame that took so many seconds of a processor."""
    return min(max(LEAST_SECONDS, cost / SHARE_OF_A_CORE), MOST_SECONDS)


def _cost_of(draw: Callable[[Frame], None], frame: Frame) -> float:
    """Draw the frame, and return how many seconds of a processor that took."""
    before = time.thread_time()
    draw(frame)
    return time.thread_time() - before


def _stop_as_by_default() -> None:
    """The default action of Ctrl-Z. Call this in trio's thread, the main one."""
    handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    try:
        os.kill(os.getpid(), signal.SIGTSTP)  # comes back when we are continued
    finally:
        signal.signal(signal.SIGTSTP, handler)


async def _in_a_thread(function: Callable[..., Result], *arguments: object) -> Result:
    """Abandoned if it waits for a terminal or a driver when we are told to end."""
    return await trio.to_thread.run_sync(
        function,
        *arguments,
        abandon_on_cancel=True,  # type: ignore[call-arg] # the stubs are of an older trio
    )
