"""Whether somebody else needs this machine: what was seen of it, made into a decision that holds.

    idleness.look(now, Seen(others_share=0.4, input_age=None))
    idleness.is_needed, idleness.why

It is needed as soon as programs of others use a good part of the processor twice in a row, or
somebody touches a keyboard; it is free when neither has happened for a while. In between nothing
changes, so a machine that is used a little does not make training start and stop.

Easy to get wrong: only what other programs do counts. This node's own work would otherwise pause
itself, go quiet, and begin again, for ever.
"""

from __future__ import annotations

from dataclasses import dataclass

NEEDED_SHARE = 0.25
"""Of all processor cores. A video call takes that much of a laptop; a page that is open, less."""

FREE_SHARE = 0.10

NEEDED_LOOKS = 2
"""In a row: one look may have caught a moment's work of the system."""

FREE_SECONDS = 60.0
INPUT_SECONDS = 120.0
"""Somebody who has not touched anything for so long is reading something long, or gone."""

LOOK_SECONDS = 2.0


@dataclass(frozen=True)
class Seen:
    """What is known at one moment; None is not known.

    `others_share` is what others use of all processor cores, from 0 to 1; `input_age` the seconds
    since somebody typed or moved a mouse."""

    others_share: float | None = None
    input_age: float | None = None


class Idleness:
    """Invariant: `why` says something exactly while the machine is needed."""

    def __init__(self) -> None:
        self.why = ""
        self._busy_looks = 0
        self._quiet_since: float | None = None

    @property
    def is_needed(self) -> bool:
        return bool(self.why)

    def look(self, now: float, seen: Seen) -> None:
        touched = seen.input_age is not None and seen.input_age < INPUT_SECONDS
        share = seen.others_share or 0.0
        self._busy_looks = self._busy_looks + 1 if share >= NEEDED_SHARE else 0
        if touched:
            self.why = "somebody uses its keyboard or mouse"
        elif self._busy_looks >= NEEDED_LOOKS:
            self.why = f"other programs use {share:.0%} of its processor"
        if touched or share >= FREE_SHARE:
            self._quiet_since = None
        elif self._quiet_since is None:
            self._quiet_since = now
        if self._quiet_since is not None and now - self._quiet_since >= FREE_SECONDS:
            self.why = ""
