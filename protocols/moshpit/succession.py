"""Whose turn it is to coordinate, and whether that one lives: polls, suspicion, the next in line.

A member *follows* the highest ballot that it has heard of. It shows its coordinator every
`poll_seconds` that it lives, and must be shown the same. A coordinator that cannot be reached, or
stays silent, is succeeded: by the first in the order of succession whom the member does not
suspect, the next a little later, and so on; whoever hears of a higher ballot meanwhile follows it.

Easy to get wrong: what counts is how long a *question* has had no answer, not how long ago
somebody was heard. A machine that was asleep has heard of nobody for hours, and must not take
over from all of them before it has asked.
"""

from __future__ import annotations

from protocols.moshpit.agreement_messages import Query
from protocols.moshpit.ballots import Ballot
from protocols.moshpit.desk import Desk


class Succession:
    """Whom one member follows, and whom it suspects. Arms `poll`, `suspect` and `takeover`."""

    def __init__(self, desk: Desk) -> None:
        self.following = Ballot(0, desk.coordinators[0])
        self._desk = desk
        self._suspected: set[int] = set()  # not heard of since they were found silent
        self._distrusted: set[int] = set()  # wanted us to commit what we know to be doubtful
        if desk.me != self.following.coordinator:
            desk.arm("poll", desk.timing.poll_seconds)

    def follow(self, ballot: Ballot) -> bool:
        """Whether it is higher than what we followed."""
        if ballot <= self.following:
            return False
        self.following = ballot
        self._desk.disarm("poll", "suspect", "takeover")
        if ballot.coordinator != self._desk.me:
            self._desk.arm("poll", self._desk.timing.poll_seconds)
        if ballot.coordinator in self._distrusted:
            self._stand_by()
        return True

    def hear(self, member: int) -> None:
        """It lives."""
        if member in self._distrusted:
            return
        self._suspected.discard(member)
        if member == self.following.coordinator:
            self._desk.disarm("suspect", "takeover")

    def is_not_silent(self, member: int) -> None:
        if member == self.following.coordinator and member not in self._distrusted:
            self._desk.disarm("suspect")

    def trusts(self, member: int) -> bool:
        return member not in self._distrusted

    def distrust(self, member: int) -> None:
        """It lives, and is to be succeeded all the same, whatever it says."""
        if member != self._desk.me:
            self._distrusted.add(member)
            self.suspect(member)

    def suspect(self, member: int) -> None:
        """It does not answer. If it is our coordinator, we are ready to take over."""
        self._suspected.add(member)
        if member == self.following.coordinator and member != self._desk.me:
            self._stand_by()

    def _stand_by(self) -> None:
        desk = self._desk
        if "takeover" not in desk.timers:
            left = [each for each in desk.coordinators if each not in self._suspected]
            desk.disarm("suspect")
            desk.arm("takeover", desk.timing.stagger_seconds * left.index(desk.me))

    def ask(self, newest: Ballot | None) -> None:
        """Show our coordinator that we live, and be shown it. `newest`: our own exchange."""
        desk, timing = self._desk, self._desk.timing
        desk.send(self.following.coordinator, Query(self.following, newest))
        desk.arm("poll", timing.poll_seconds)
        if "suspect" not in desk.timers and "takeover" not in desk.timers:
            desk.arm("suspect", timing.silence_seconds - timing.poll_seconds)
