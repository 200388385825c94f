"""A turnstile lets one waiting task through each time that it was opened.

It is `trio.Event` for a single waiter that can be used again and again without making a new
object, and it costs a third: rpc passes through one on each side of every call.

Easy to get wrong: opening it twice before anybody waits lets one task through once, not twice. A
waiter must look at what it waits for again after it came through.
"""

from __future__ import annotations

import trio


class Turnstile:
    """One waiter at most; opening never blocks and is remembered."""

    def __init__(self) -> None:
        self._open = False
        self._waiter: trio.lowlevel.Task | None = None

    def open(self) -> None:
        if self._waiter is not None:
            trio.lowlevel.reschedule(self._waiter)
            self._waiter = None
        else:
            self._open = True

    async def wait(self) -> None:
        """Return at once if it was opened since the last wait, else when it is opened."""
        if self._open:
            self._open = False
            await trio.lowlevel.checkpoint()
            return
        if self._waiter is not None:
            raise trio.BusyResourceError("another task is waiting at this turnstile")
        self._waiter = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(self._give_up)

    def _give_up(self, _raise_cancel: object) -> trio.lowlevel.Abort:
        self._waiter = None
        return trio.lowlevel.Abort.SUCCEEDED
