"""The one root of every error that potluck raises on purpose.

An error that a person can meet says three things: what happened, why it probably happened, and
what to do next. Two families matter to callers: `ProtocolMisuse` means "you, on this side, called
us wrongly"; `RemoteMisbehaviour` means "the other side broke the protocol", and is what every
parser of network bytes raises, in exactly two kinds: `MalformedMessage` and `LimitExceeded`.
Nothing else may come out of a parser, whatever the bytes.
"""

from __future__ import annotations


class PotluckError(Exception):
    """Root of our hierarchy. `exit_code` is what the command line then answers with."""

    exit_code = 1

    surely_not_executed = False
    """Of a failed call: True only where the other side certainly did not act on the request.

    Then it can be sent again without harm. False says nothing: it may or may not have acted.
    """

    def __init__(self, what: str, *, why: str = "", advice: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.advice = advice

    def __str__(self) -> str:
        return " ".join(part for part in (self.what, self.why, self.advice) if part)


class ProtocolMisuse(PotluckError):
    """This side called the library in a way that its contract forbids: a bug on our side."""


class RemoteMisbehaviour(PotluckError):
    """The other side sent something that the protocol forbids."""


class MalformedMessage(RemoteMisbehaviour):
    """Bytes that are not what the protocol says: truncated, garbage, wrong types, unknown kind."""


class LimitExceeded(RemoteMisbehaviour):
    """A declared or real size or count above the stated limit. Raised before memory is taken."""


class Unreachable(PotluckError):
    """The peer cannot be reached now: no address works, no route, or the connection was lost."""

    exit_code = 4


class ProtocolNotServed(PotluckError):
    """The peer is there, but does not serve that protocol (or not that version of it)."""

    surely_not_executed = True


class Refused(PotluckError):
    """Somebody with the right to say no said no."""

    exit_code = 3


class DeadlineExceeded(PotluckError):
    """The answer did not come in the time that the caller gave it."""

    exit_code = 4


class Busy(PotluckError):
    """The other side (or this one) has as much in hand as it allows itself: try again later."""

    exit_code = 4
    surely_not_executed = True


class HandlerFailed(PotluckError):
    """The other side took the request, and its handler broke on it. Its own log says how."""
