"""The memory of one member by which two results can never both be decided: single-decree Paxos.

Lamport's acceptor ("Paxos made simple", 2001), with two additions. First, a ballot has two steps:
it may *open* a new attempt at the exchange, which makes void whatever was accepted in lower
ballots, and later have its result accepted. A coordinator opens only after a quorum has promised
and none of it had accepted, so what becomes void cannot have been decided; and since nobody writes
over a result that it holds before a quorum has noted the opening, no later coordinator can revive
a result that somebody has written over. Second, a member may *vow* never to accept a result: when
so many have vowed that the others are no quorum, the round is discarded for certain, although no
quorum can be reached.

Promise: `promised` never falls; after promising a ballot, nothing of a lower one is taken.

Easy to get wrong: this memory must outlive its round. A process that was started again has lost
it, and must not answer in its name: it is not in the round any more, because the roster names a
nonce that only the first process knows.
"""

from __future__ import annotations

from protocols.moshpit.agreement_messages import Acceptance, Attempt, Result
from protocols.moshpit.ballots import Ballot


def quorum_of(size: int) -> int:
    """How many of a round's members decide: any two such sets have a member in common."""
    return size // 2 + 1


def blocking_of(size: int) -> int:
    """How many vows make a quorum of acceptances impossible."""
    return size - quorum_of(size) + 1


class Acceptor:
    """What a member has promised, opened, accepted and vowed."""

    def __init__(self, first: Attempt) -> None:
        """All have promised the first ballot by joining; its attempt is open from the start."""
        self.promised: Ballot = first.ballot
        self.attempt: Attempt = first
        self.accepted: Acceptance | None = None
        self.vowed = False

    @property
    def has_accepted_a_result(self) -> bool:
        return self.accepted is not None and self.accepted.result is not None

    def promise(self, ballot: Ballot) -> bool:
        """Whether this ballot may go on here; nothing lower may from now on."""
        if ballot < self.promised:
            return False
        self.promised = ballot
        return True

    def open(self, attempt: Attempt) -> bool:
        """Note that a new attempt is open, and forget what that makes void."""
        if self.vowed or not self.promise(attempt.ballot):
            return False
        self.attempt = attempt
        if self.accepted is not None and self.accepted.ballot < attempt.ballot:
            self.accepted = None
        return True

    def accept(self, ballot: Ballot, result: Result | None) -> bool:
        if (self.vowed and result is not None) or not self.promise(ballot):
            return False
        self.accepted = Acceptance(ballot, result)
        return True

    def vow(self) -> None:
        """Never accept a result, unless one is accepted already: then a vow would be worthless."""
        if not self.has_accepted_a_result:
            self.vowed = True

    def close(self) -> None:
        """Accept no result from now on, whatever was accepted before: the values are dropped."""
        self.vowed = True
