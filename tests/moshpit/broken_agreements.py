"""Agreements with one fault each, to show that the checker would find it."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from protocols.moshpit import verdicts
from protocols.moshpit.agreement import Agreement, Follower
from protocols.moshpit.agreement_messages import (
    Accept,
    Acceptance,
    Accepted,
    AgreementMessage,
    Decided,
    Forswear,
    Held,
    Open,
    Prepare,
    Promise,
    Start,
)
from protocols.moshpit.ballots import Ballot, Statement
from protocols.moshpit.coordinator import Coordinator, Stage


class BreaksItsPromise(Agreement):
    """Accepts in a lower ballot than it has promised."""

    def _take_of_coordinator(
        self, sender: int, message: Prepare | Open | Start | Accept | Forswear
    ) -> None:
        if isinstance(message, Accept) and message.ballot < self._acceptor.promised:
            self._acceptor.accepted = Acceptance(message.ballot, message.result)
            self._desk.send(sender, Accepted(message.ballot))
            return
        super()._take_of_coordinator(sender, message)


class CommitsOnItsOwn(Agreement):
    """Treats its own whole result as the end of the round, as most systems of this kind do."""

    def exchange_done(
        self,
        ballot: Ballot,
        digest: bytes,
        statements: tuple[Statement, ...],
        now: float,
        contradicted: tuple[int, ...] = (),
    ) -> None:
        super().exchange_done(ballot, digest, statements, now, contradicted)
        if self.verdict is None and self._exchange.held is not None:
            self._ending.end(verdicts.Commit(ballot, self._acceptor.attempt.members, digest))


class CommitsWhatItDoesNotHold(Agreement):
    def _take(self, sender: int, message: AgreementMessage) -> None:
        if isinstance(message, Decided) and message.result is not None:
            result = message.result
            self._exchange.held = Held(result.attempt, result.digest, ())
        super()._take(sender, message)


class StartsWhatIsOver(Agreement):
    """Begins an exchange of a lower ballot than it has promised, and so writes over a result."""

    def _take_of_coordinator(
        self, sender: int, message: Prepare | Open | Start | Accept | Forswear
    ) -> None:
        if (
            isinstance(message, Start)
            and message.ballot < self._acceptor.promised
            and self._exchange.running is None
        ):
            self._exchange.start(message)
            return
        super()._take_of_coordinator(sender, message)


class _Vowing(Follower):
    def _promise(self) -> Promise:
        self._acceptor.vowed = self._acceptor.vowed or self._succession.following.number > 0
        promise = super()._promise()
        return replace(promise, accepted=None) if promise.vowed else promise


class VowsFalsely(Agreement):
    """Vows never to accept a result, and does not say that it has."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._follower = _Vowing(
            self._desk, self._acceptor, self._exchange, self._ending, self._succession, None
        )


class _Deaf(Coordinator):
    def _newest_acceptance(self) -> Acceptance | None:
        return None


class IgnoresWhatWasAccepted(Agreement):
    def _coordinate(self, ballot: Ballot) -> Coordinator:
        shared = (self._desk, self, self._ending, self._blame)
        return _Deaf(*shared, ballot, self._plan, self._verify, self._gone)


class _Undemocratic(Coordinator):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._quorum = self._desk.size // 2


class DecidesWithHalf(Agreement):
    def _coordinate(self, ballot: Ballot) -> Coordinator:
        return _Undemocratic(
            self._desk,
            self,
            self._ending,
            self._blame,
            ballot,
            self._plan,
            self._verify,
            self._gone,
        )


class _Rash(Coordinator):
    def _open(self) -> None:
        super()._open()
        if self.stage is Stage.OPENING:
            self._exchange()


class WritesOverBeforeItIsNoted(Agreement):
    """Begins a new attempt before a quorum knows that nothing older counts."""

    def _coordinate(self, ballot: Ballot) -> Coordinator:
        shared = (self._desk, self, self._ending, self._blame)
        return _Rash(*shared, ballot, self._plan, self._verify, self._gone)
