"""The error types that potluck raises on purpose, all under one root.

The message of an error that a person can meet says three things: what happened, why it probably
happened, and what to do next. Callers should know two families. `ProtocolMisuse` means that code on
this side called us wrongly. `RemoteMisbehaviour` means that the other side broke the protocol. A
parser of network bytes raises exactly two kinds of it, `MalformedMessage` and `LimitExceeded`, and
nothing else, whatever the bytes.
"""

from __future__ import annotations


class PotluckError(Exception):
    """The root of all our errors. The command line exits with `exit_code`."""

    exit_code = 1

    surely_not_executed = False
    """True only if the other side certainly did not act on the failed request.

    The request can then be sent again without harm. False means that it is not known.
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
    """The request was refused: it is not allowed."""

    exit_code = 3


class DeadlineExceeded(PotluckError):
    """The answer did not come within the caller's timeout."""

    exit_code = 4


class Busy(PotluckError):
    """The other side (or this one) has as much work as it accepts: try again later."""

    exit_code = 4
    surely_not_executed = True


class HandlerFailed(PotluckError):
    """The other side accepted the request, and its handler failed. The error is in its log."""


def again(error: PotluckError) -> PotluckError:
    """Copy an error: one object that is raised in many tasks collects all their tracebacks.

    copy.copy is no use here: it calls the type with the stored arguments, and some of our types
    take others.
    """
    fresh = type(error).__new__(type(error), *error.args)
    fresh.__dict__.update(error.__dict__)
    return fresh
