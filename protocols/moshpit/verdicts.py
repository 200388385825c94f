"""The effects of a round's agreement for its shell, and the verdicts for one member.

Easy to get wrong: carry effects out in their order. A `StopExchange` before a `StartExchange` frees
the buffer that the latter writes into.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocols.moshpit.agreement_messages import AgreementMessage
from protocols.moshpit.ballots import Ballot


@dataclass(frozen=True)
class Commit:
    """The result of this attempt counts, and this member holds it: the digest is its own."""

    attempt: Ballot
    members: tuple[int, ...]
    digest: bytes


@dataclass(frozen=True)
class MemberLeftOut:
    """The round was committed, but this member does not hold the result.

    The data of `members` is in it. This member may be one of them: its data was taken, but it was
    away when the others finished.
    """

    attempt: Ballot
    members: tuple[int, ...]
    digest: bytes


@dataclass(frozen=True)
class Discard:
    """No member's values change. `in_doubt`: this member could not learn whether others commit."""

    reason: str
    in_doubt: bool


OwnVerdict = Commit | MemberLeftOut | Discard


@dataclass(frozen=True)
class Send:
    """Send this to a member, once; call `unreachable(to)` if it was not acknowledged."""

    to: int
    message: AgreementMessage


@dataclass(frozen=True)
class StartExchange:
    """Exchange in this ballot; call `exchange_done` or `exchange_failed` when it has ended."""

    ballot: Ballot
    members: tuple[int, ...]
    cuts: tuple[int, ...]


@dataclass(frozen=True)
class StopExchange:
    """Stop the exchange of this ballot, if it still runs. Call nothing when it has stopped."""

    ballot: Ballot


@dataclass(frozen=True)
class Conclude:
    """The round is over for this member. Comes once; messages are still answered after it."""

    verdict: OwnVerdict


Effect = Send | StartExchange | StopExchange | Conclude
