"""The errors for peers that may not take part, with the reason as auth gives it.

    NotAllowed            the peer refused us (`by_peer`), or we refuse to ask
    AnswerNotAllowed      the peer answered, and did not prove that it may answer

On the wire the reason is in the error's code: `not-allowed/token-expired`.

A refusal by a *peer* ends one call. Only the auth server's own signed refusal may stop a node for
good: otherwise any member of a run could stop the others. A refusal also concerns one exchange. If
a handler asks a third peer and is refused, that error must not look like a refusal of the handler's
own caller; `crosses` tells the two apart.
"""

from __future__ import annotations

from auth.refusals import Reason
from protocols.errors import MalformedMessage, PotluckError, Refused

CODE_PREFIX = "not-allowed/"


class NotAllowed(Refused):
    """A peer may not take part, or may not do this. `reason` is None if it is not known."""

    def __init__(
        self, what: str, *, why: str = "", advice: str = "", reason: Reason | None = None
    ) -> None:
        super().__init__(what, why=why, advice=advice)
        self.reason = reason
        self.by_peer = False  # the other side refused us, and proved that it may take part
        self.crosses = True  # whether our caller is told this refusal as its own


class AnswerNotAllowed(NotAllowed):
    """The answer does not prove that its sender may give it. Raised by the side that asked."""

    claimed: PotluckError | None = None
    """The error in the unproven answer, if there was one. Do not act on it."""

    def __init__(
        self, what: str, *, why: str = "", advice: str = "", reason: Reason | None = None
    ) -> None:
        super().__init__(what, why=why, advice=advice, reason=reason)
        self.crosses = False

    def instead_of(self, claimed: PotluckError) -> AnswerNotAllowed:
        """This refusal, with the text of the unproven error added for people to read."""
        self.claimed = claimed
        self.what = f"{self.what} Unproven, it said: {claimed.what}"
        self.args = (self.what,)
        return self


class MalformedEnvelope(NotAllowed, MalformedMessage):
    """The envelope of a request cannot be parsed: a refusal and a protocol violation."""


class MalformedAnswerEnvelope(AnswerNotAllowed, MalformedMessage):
    """The envelope of an answer cannot be parsed: a refusal and a protocol violation."""


def code_of(refusal: NotAllowed) -> str:
    """The code of a refusal on the wire."""
    if not refusal.crosses:
        return "failed"
    return CODE_PREFIX + refusal.reason.value if refusal.reason is not None else "refused"


def revived(code: str, what: str, why: str, advice: str) -> NotAllowed:
    """Make the refusal that the other side described."""
    try:
        reason = Reason(code.removeprefix(CODE_PREFIX))
    except ValueError:  # from a newer node
        reason = None
    refusal = NotAllowed(what, why=why, advice=advice, reason=reason)
    refusal.by_peer = True
    refusal.crosses = False
    return refusal
