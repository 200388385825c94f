"""What the owner of a training node can ask of it, through the control socket.

    trainer view                            how it is, once or every so often
    trainer pause {"seconds": 7200}         compute nothing until then, or until `resume`
    trainer resume
    trainer leave {"at_once": false}
    trainer lines {"follow": true}          what happened, in words

Pausing lets go of everything but memory: nothing is computed, nobody waits for this peer, nobody
fetches the run's state from it.

Easy to get wrong: `pause --for` is over by itself. A second `pause` replaces the first, also where
it is shorter.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import islice
from typing import Any, Final

import trio

from node.control import Answering, ControlServer
from node.trainer.session import LINES_KEPT, Session
from node.wrong_use import WrongUse

VIEW: Final = "trainer view"
PAUSE: Final = "trainer pause"
RESUME: Final = "trainer resume"
LEAVE: Final = "trainer leave"
LINES: Final = "trainer lines"

OWNER: Final = "pause"
"""The name under which the owner closes the gate."""

FASTEST_SECONDS: Final = 0.1  # between two views
LONGEST_PAUSE_SECONDS: Final = 10 * 365 * 86_400.0  # beyond it a moment cannot be written
LINES_AT_ONCE: Final = 200  # in one answer: well below the largest that is taken


class TrainerQuestions:
    """Answers for one session. `run` ends the pauses that have an end."""

    def __init__(self, control: ControlServer, session: Session) -> None:
        self._session = session
        self._until: float | None = None
        self._changed = trio.Event()
        control.add(VIEW, self._view)
        control.add(PAUSE, self._pause)
        control.add(RESUME, self._resume)
        control.add(LEAVE, self._leave)
        control.add(LINES, self._lines)

    async def run(self) -> None:
        """End pauses when they are over, for ever. By the clock that people go by: whoever pauses
        for two hours and closes the lid means two hours of the day."""
        while True:
            self._changed = trio.Event()
            left = None if self._until is None else self._until - time.time()
            if left is not None and left <= 0.0:
                self._open()
                continue
            with trio.move_on_after(min(left, 1.0) if left is not None else float("inf")):
                await self._changed.wait()

    async def _view(self, arguments: Mapping[str, Any], answer: Answering) -> None:
        every = arguments.get("every_seconds")
        await answer(self._session.view())
        while isinstance(every, int | float):
            await trio.sleep(max(float(every), FASTEST_SECONDS))
            await answer(self._session.view())

    async def _pause(self, arguments: Mapping[str, Any], answer: Answering) -> None:
        seconds = arguments.get("seconds")
        if seconds is not None and not (
            isinstance(seconds, int | float) and 0.0 < seconds <= LONGEST_PAUSE_SECONDS
        ):
            raise WrongUse("A pause has a length above zero.", why=f"{seconds!r} was asked for.")
        self._until = None if seconds is None else time.time() + float(seconds)
        words = "paused by you"
        if self._until is not None:
            words += f" until {_clock(self._until)}"
        self._session.gate.close(OWNER, words, until=self._until)
        self._changed.set()
        await answer({"paused": True, "until": self._until, "words": words})

    async def _resume(self, _arguments: Mapping[str, Any], answer: Answering) -> None:
        gate = self._session.gate
        was_paused = any(one.name == OWNER for one in gate.reasons())
        self._open()
        others = [one.words for one in gate.reasons()]
        await answer({"was_paused": was_paused, "still_closed": others})

    async def _leave(self, arguments: Mapping[str, Any], answer: Answering) -> None:
        at_once = bool(arguments.get("at_once"))
        session = self._session
        await answer({"leaving": True, "at_once": at_once})
        session.departure.leave(at_once=at_once)
        while session.left is None:
            await session.news()
        await answer(session.left)
        await trio.sleep_forever()  # whoever asked sees by the end of the line that we have ended

    async def _lines(self, arguments: Mapping[str, Any], answer: Answering) -> None:
        session = self._session
        wanted = arguments.get("last")
        last = wanted if isinstance(wanted, int) and 0 <= wanted <= LINES_KEPT else LINES_KEPT
        told = max(session.lines_told - min(last, len(session.lines)), 0)
        while True:
            kept_from = session.lines_told - len(session.lines)
            told = max(told, kept_from)
            news = list(islice(session.lines, told - kept_from, told - kept_from + LINES_AT_ONCE))
            told += len(news)
            if news:
                await answer([{"time": moment, "words": words} for moment, words in news])
            elif arguments.get("follow"):
                await session.news()
            else:
                return

    def _open(self) -> None:
        self._until = None
        self._session.gate.open(OWNER)
        self._changed.set()


def _clock(moment: float) -> str:
    """The time of day, with the day where it is not today."""
    there, here = time.localtime(moment), time.localtime()
    is_today = there[:3] == here[:3]
    return time.strftime("%H:%M" if is_today else "%Y-%m-%d %H:%M", there)
