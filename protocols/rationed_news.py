"""How many lines about others go into the log in a while, whoever they are. Pure: time is given.

Each peer is named once for each thing that it does. But a new key costs nothing, so whoever wants
to fill a disk comes as a new peer each time: hence a ration for all of them together.

Easy to get wrong: what is not said here is still counted elsewhere (`status`), and said at debug
level. A ration for log lines must never be one for refusals.
"""

from __future__ import annotations

LINES = 60
EVERY_SECONDS = 60.0  # at most a line a second in the long run: some 15 MB a day, if it goes on


class RationedNews:
    """Counts the lines of each stretch of `EVERY_SECONDS`."""

    def __init__(self) -> None:
        self._since = float("-inf")
        self._said = 0

    def may_say(self, now: float) -> bool:
        """Whether one more line may be written; if so, it counts."""
        if now - self._since >= EVERY_SECONDS:
            self._since, self._said = now, 0
        if self._said >= LINES:
            return False
        self._said += 1
        return True
