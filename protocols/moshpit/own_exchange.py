"""What has become of one member's own exchanges: one runs, or the last is held, or has failed.

Promise: what is `held` is complete in the result buffer, and nothing has been written over it.
A result that is *contradicted* is held, because it proves who lied; it is never committed.

Easy to get wrong: an exchange that is stopped is over here at once. What the shell may still say
of it (it was all but finished) comes too late: we have promised not to hold it.
"""

from __future__ import annotations

from collections.abc import Callable

from protocols.moshpit.agreement_messages import (
    SUSPICIONS_PER_MESSAGE,
    Held,
    Holding,
    Result,
    Start,
    Trouble,
)
from protocols.moshpit.ballots import Ballot, Statement, Suspicion
from protocols.moshpit.blame import clipped
from protocols.moshpit.desk import Desk
from protocols.moshpit.verdicts import StartExchange, StopExchange

Awaited = Callable[[Ballot], tuple[Suspicion, ...]]


class OwnExchange:
    """At most one exchange at a time, in the ballot that was started last."""

    def __init__(self, desk: Desk, awaited: Awaited) -> None:
        """`awaited`: for whom an exchange that runs here is waiting."""
        self.held: Held | None = None
        self.failed: Trouble | None = None
        self.running: Ballot | None = None
        self.newest: Ballot | None = None
        """The ballot of the newest exchange that was begun here, whatever became of it. None is
        begun twice: a start may be told again when its exchange has been stopped."""
        self._desk = desk
        self._awaited = awaited

    def has_ended(self, ballot: Ballot) -> bool:
        return self.running is None and self.newest == ballot

    def start(self, start: Start) -> None:
        """From here on, what was held is written over."""
        self.held = None
        self.running = self.newest = start.ballot
        self._desk.effects.append(StartExchange(start.ballot, start.members, start.cuts))

    def stop(self) -> None:
        if self.running is not None:
            awaited = self._told(self._awaited(self.running))
            if awaited:
                self.failed = Trouble(self.running, awaited)
            self._desk.effects.append(StopExchange(self.running))
            self.running = None

    def done(
        self,
        ballot: Ballot,
        digest: bytes,
        statements: tuple[Statement, ...],
        contradicted: tuple[int, ...],
    ) -> bool:
        """False if it was stopped meanwhile."""
        if self.running != ballot:
            return False
        self.running = None
        self.held = Held(ballot, digest, statements, contradicted)
        return True

    def fail(self, ballot: Ballot, suspicions: tuple[Suspicion, ...]) -> bool:
        """False if it was stopped meanwhile."""
        if self.running != ballot:
            return False
        self.running = None
        self.refuse(ballot, suspicions)
        return True

    def refuse(self, ballot: Ballot, suspicions: tuple[Suspicion, ...]) -> None:
        """An exchange that is not even begun."""
        self.newest = ballot
        self.failed = Trouble(ballot, self._told(suspicions))

    def _told(self, suspicions: tuple[Suspicion, ...]) -> tuple[Suspicion, ...]:
        return clipped(suspicions, SUSPICIONS_PER_MESSAGE)

    def holds(self, result: Result) -> bool:
        held = self.held
        return held is not None and (held.attempt, held.digest) == (result.attempt, result.digest)

    def doubts(self, result: Result | None) -> bool:
        """Whether this is what we hold, and somebody has told us that it has another."""
        return (
            result is not None
            and self.held is not None
            and self.holds(result)
            and bool(self.held.contradicted)
        )

    def complaints(self, ballot: Ballot) -> tuple[Suspicion, ...]:
        failed = self.failed
        return failed.suspicions if failed is not None and failed.ballot == ballot else ()

    def report(self, ballot: Ballot) -> None:
        """Tell the coordinator of this ballot how its exchange has ended here, if it has."""
        held, failed = self.held, self.failed
        if held is not None and held.attempt == ballot:
            report = Holding(ballot, held.digest, held.statements, held.contradicted)
            self._desk.send(ballot.coordinator, report)
        elif failed is not None and failed.ballot == ballot:
            self._desk.send(ballot.coordinator, failed)
