"""Keeps in the directory what this peer says of its progress, as long as it is there.

    publishing = Publishing(dht, key, mine, measured, again_in)
    nursery.start_soon(publishing.run)
    publishing.say_soon()                    # something may have changed
    await publishing.brought_out()           # until others can read where this peer is

When something has to be said is decided in saying.py; here it is said, tried again where nobody
took it, and taken back while this peer is away.

Easy to get wrong: what is out is what was last written and not taken back. Of two peers that come
back at once each would otherwise look before the other can be seen.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Final

import trio

from protocols.accumulation.progress_slot import SLOT_SECONDS, ProgressSlot
from protocols.accumulation.saying import Said, alike_but_for_samples
from protocols.dht.service import Dht
from protocols.errors import PotluckError

log = logging.getLogger("potluck.accumulation")

WRITE_SECONDS: Final = 3.0  # as long as the rarest reading waits for the next one
FAILED_SECONDS: Final = 1.0  # between two tries to write what nobody took
SAID_REMEMBERED: Final = 16  # own slots, to tell them from another node's with our identity


class Publishing:
    """Of one slot. `mine`: how this peer is now; `measured`: the same with its rate as of now;
    `again_in`: in how many seconds the slot that was said last has to be said again. For trio's
    thread only."""

    def __init__(
        self,
        dht: Dht,
        key: str,
        mine: Callable[[], ProgressSlot],
        measured: Callable[[], ProgressSlot],
        again_in: Callable[[Said], float],
    ) -> None:
        self._dht, self._key = dht, key
        self._mine, self._measured, self._again_in = mine, measured, again_in
        self._said: Said | None = None
        self.said: Said | None = None
        """The last slot, whether all others can read it yet or not."""
        self._out: ProgressSlot | None = None
        """What others can read."""
        self._own: deque[ProgressSlot] = deque(maxlen=SAID_REMEMBERED)
        self._is_away = False
        self._wants, self._was_said = trio.Event(), trio.Event()

    def say_soon(self) -> None:
        """If there is something to say."""
        self._wants.set()

    def say_at_once(self) -> None:
        """Also if only the samples are others."""
        self._said = None
        self._wants.set()

    def set_away(self, *, is_away: bool) -> bool:
        """Take the slot back, or say it again; whether that is new."""
        is_new, self._is_away = is_away != self._is_away, is_away
        if is_new:
            self._wants.set()
        return is_new

    def is_own(self, slot: ProgressSlot) -> bool:
        """Whether this node has said that lately."""
        return slot in self._own

    async def brought_out(self) -> None:
        """Wait until others can read where this peer is, if it is not away."""
        while not (self._is_away or self._is_out()):
            self._wants.set()
            await self._was_said.wait()

    async def begun(self) -> None:
        """Wait until anything was said."""
        while self._out is None:
            await self._was_said.wait()

    async def run(self) -> None:
        """Publish when there is something to say, for ever."""
        while True:
            with trio.move_on_after(self._say_again_in()):
                await self._wants.wait()
            self._wants = trio.Event()
            if self._is_away:
                await self._stay_away()
            if self._say_again_in() <= 0.0 and not await self._say():
                await trio.sleep(FAILED_SECONDS)

    async def withdraw(self) -> None:
        """Say that this peer is gone."""
        try:
            await self._dht.withdraw(self._key)
        except PotluckError as error:
            log.debug("progress could not be withdrawn: %s", error)

    async def _stay_away(self) -> None:
        with trio.move_on_after(WRITE_SECONDS):
            await self.withdraw()
        self._out = None
        while self._is_away:
            await self._wants.wait()
            self._wants = trio.Event()
        self._said = None  # so that the others know at once

    def _say_again_in(self) -> float:
        return 0.0 if self._said is None else self._again_in(self._said)

    async def _say(self) -> bool:
        slot = self._measured()
        self._said = self.said = Said(slot, trio.current_time())
        self._own.append(slot)
        try:
            with trio.move_on_after(WRITE_SECONDS):
                await self._dht.put(self._key, slot, SLOT_SECONDS, keep_up=False)
        except PotluckError as error:
            log.debug("progress could not be published: %s", error)
            self._said = None
            return False
        self._out = slot
        self._was_said.set()
        self._was_said = trio.Event()
        return True

    def _is_out(self) -> bool:
        return self._out is not None and alike_but_for_samples(self._out, self._mine())
