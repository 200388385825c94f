"""The owner's requests to a training node, through the control socket.

    trainer view                            how it is, once or every so often
    trainer pause {"seconds": 7200}         compute nothing until then, or until `resume`
    trainer resume
    trainer leave {"at_once": false}
    trainer lines {"follow": true}          what happened, in words

Pausing releases the processor, the network and the memory that only computing needs (loop.py):
nobody waits for this peer, nobody fetches the run's state from it.

`pause --for` ends by itself. A second `pause` replaces the first, even if it is shorter.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import islice
from typing import Any, Final

import trio

from node.core.control import Answering, ControlServer
from node.core.wrong_use import WrongUse
from node.training.owners_pause import LONGEST_SECONDS, OwnersPause
from node.training.session import LINES_KEPT, TrainingSession
from protocols.blocking import in_thread

VIEW: Final = "trainer view"
PAUSE: Final = "trainer pause"
RESUME: Final = "trainer resume"
LEAVE: Final = "trainer leave"
LINES: Final = "trainer lines"

OWNER: Final = "pause"
"""The name under which the owner closes the gate."""

FASTEST_SECONDS: Final = 0.1  # between two views
LINES_AT_ONCE: Final = 200  # in one answer: well below the largest that is taken


class TrainerQuestions:
    """Answers for one session. `run` ends the pauses that have an end."""

    def __init__(
        self, control: ControlServer, session: TrainingSession, pause: OwnersPause
    ) -> None:
        self._session = session
        self._pause_now = pause
        self._changed = trio.Event()
        control.add(VIEW, self._view)
        control.add(PAUSE, self._pause)
        control.add(RESUME, self._resume)
        control.add(LEAVE, self._leave)
        control.add(LINES, self._lines)

    async def take_up(self) -> None:
        """Continue a pause from before this node was started, if one is on."""
        if await in_thread(self._pause_now.load, time.time()):
            self._close()

    async def run(self) -> None:
        """End pauses when they are over, forever. By the wall clock: two hours with the lid closed
        are two hours."""
        while True:
            self._changed = trio.Event()
            until = self._pause_now.until
            left = None if until is None else until - time.time()
            if left is not None and left <= 0.0:
                await self._end()
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
            isinstance(seconds, int | float) and 0.0 < seconds <= LONGEST_SECONDS
        ):
            raise WrongUse(
                "A pause has to be longer than 0 seconds, and at most ten years.",
                why=f"{seconds!r} seconds were asked for.",
                advice="Without a length it lasts until `potluck resume`.",
            )
        pause, now = self._pause_now, time.time()
        instead_of = pause.words(now) if pause.is_on else ""
        pause.begin(now, None if seconds is None else float(seconds))
        words = self._close()
        self._changed.set()
        not_kept = await self._save()
        told = {"paused": True, "until": pause.until, "words": words, "instead_of": instead_of}
        await answer({**told, "not_kept": not_kept})

    async def _resume(self, _arguments: Mapping[str, Any], answer: Answering) -> None:
        was_paused = self._pause_now.is_on
        not_kept = await self._end()
        others = [one.words for one in self._session.gate.reasons()]
        told = {"was_paused": was_paused, "still_closed": others, "not_kept": not_kept}
        await answer(told)

    async def _leave(self, arguments: Mapping[str, Any], answer: Answering) -> None:
        at_once = bool(arguments.get("at_once"))
        session = self._session
        session.departure.leave(at_once=at_once)  # even if the client has gone and hears nothing
        await answer({"leaving": True, "at_once": at_once})
        while session.left is None:
            await session.news()
        await answer(session.left)
        await trio.sleep_forever()  # the caller's connection shows when this node has ended

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

    def _close(self) -> str:
        """The words for the pause that is on."""
        words = self._pause_now.words(time.time())
        self._session.gate.close(OWNER, words, until=self._pause_now.until)
        return words

    async def _end(self) -> str:
        """The reason for which the end is not kept, if it is not."""
        self._pause_now.end()
        self._session.gate.open(OWNER)
        self._changed.set()
        return await self._save()

    async def _save(self) -> str:
        """Save the pause or its end, even if the client that asked for it has gone. Returns the
        reason for a failure, else ""."""
        with trio.CancelScope(shield=True):
            return await in_thread(self._pause_now.save)
