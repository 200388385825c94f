"""What is raised where somebody may not take part, with the reason as auth gives it.

    NotAllowed            the peer refused us (`by_peer`), or we refuse to ask
    AnswerNotAllowed      the peer answered, and its answer does not prove that it may

On the wire the reason is in the error's code: `not-allowed/token-expired`.

Easy to get wrong: what a *peer* says about us ends one call. Only the auth server's own signed
refusal may make a node stop for good: else any member of a run could talk the others out of it.
And a refusal concerns one exchange: a handler that lets one through which it met on the way, when
it asked somebody else, must not seem to refuse its own caller. `crosses` keeps them apart.
"""

from __future__ import annotations

from auth.refusals import Reason
from protocols.errors import MalformedMessage, PotluckError, Refused

CODE_PREFIX = "not-allowed/"


class NotAllowed(Refused):
    """Somebody may not take part, or not in this. `reason` is None for one that we do not know."""

    def __init__(
        self, what: str, *, why: str = "", advice: str = "", reason: Reason | None = None
    ) -> None:
        super().__init__(what, why=why, advice=advice)
        self.reason = reason
        self.by_peer = False  # the other side said it, and proved that it may say things
        self.crosses = True  # whether whoever asks us is told that it is meant


class AnswerNotAllowed(NotAllowed):
    """An answer does not prove that its sender may give it. Raised by the side that asked."""

    claimed: PotluckError | None = None
    """The error that it was, when it was one. Not to be acted on."""

    def __init__(
        self, what: str, *, why: str = "", advice: str = "", reason: Reason | None = None
    ) -> None:
        super().__init__(what, why=why, advice=advice, reason=reason)
        self.crosses = False

    def instead_of(self, claimed: PotluckError) -> AnswerNotAllowed:
        """This refusal, with what the unproven error said for people to read."""
        self.claimed = claimed
        self.what = f"{self.what} Unproven, it said: {claimed.what}"
        self.args = (self.what,)
        return self


class MalformedEnvelope(NotAllowed, MalformedMessage):
    """A request's envelope is none at all: refused, and a violation of the protocol."""


class MalformedAnswerEnvelope(AnswerNotAllowed, MalformedMessage):
    """An answer's envelope is none at all: refused, and a violation of the protocol."""


def code_of(refusal: NotAllowed) -> str:
    """What stands for a refusal on the wire."""
    if not refusal.crosses:
        return "failed"
    return CODE_PREFIX + refusal.reason.value if refusal.reason is not None else "refused"


def revived(code: str, what: str, why: str, advice: str) -> NotAllowed:
    """The refusal that the other side described."""
    try:
        reason = Reason(code.removeprefix(CODE_PREFIX))
    except ValueError:  # from a newer node
        reason = None
    refusal = NotAllowed(what, why=why, advice=advice, reason=reason)
    refusal.by_peer = True
    refusal.crosses = False
    return refusal
