"""An averaging that runs beside the training: started, then waited for or cancelled.

    averaging = averager.start(vector, weight=32, epoch=7)
    ...                                          # the next batches
    outcome = await averaging.outcome()

It runs in the averager's nursery, so it ends with the averager at the latest; nothing of it is
left then, and whoever waits for its outcome is told `Cancelled` by an error of ours.

Easy to get wrong: while it runs, the vector is being read. Change it only when it is done.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from protocols.errors import PotluckError
from protocols.moshpit.outcome import Outcome
from protocols.remote_errors import again


class AveragingCancelled(PotluckError):
    """The averaging was cancelled, or its averager ended, before there was an outcome."""


class Averaging:
    """One averaging in the background. Made by `Averager.start`."""

    def __init__(self, average: Callable[[], Awaitable[Outcome]]) -> None:
        self._average = average
        self._scope = trio.CancelScope()
        self._ended = trio.Event()
        self._outcome: Outcome | None = None
        self._failure: PotluckError | None = None

    @property
    def done(self) -> bool:
        """Whether it has ended, in whatever way."""
        return self._ended.is_set()

    async def outcome(self) -> Outcome:
        """Wait for the end. Raises what `average` would have raised, or AveragingCancelled."""
        await self._ended.wait()
        if self._failure is not None:
            raise again(self._failure)
        if self._outcome is None:
            raise AveragingCancelled("This averaging was cancelled before it had an outcome.")
        return self._outcome

    async def cancel(self) -> None:
        """Leave the round, and return when nothing of it runs any more. Twice is harmless."""
        self._scope.cancel()
        await self._ended.wait()

    async def run(self) -> None:
        """The task itself; called by the averager's nursery."""
        try:
            with self._scope:
                self._outcome = await self._average()
        except PotluckError as error:
            self._failure = error
        finally:
            self._ended.set()
