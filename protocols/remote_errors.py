"""How an error crosses the wire: a code, and three sentences for people. Never a traceback.

Out: an error of our hierarchy goes as the code of its type and its own words, cut to size. Any
other exception, and ProtocolMisuse, is a bug of the handler: it goes as `handler-failed`, without
a word of what it said, for that may hold secrets; the log over there has it.

A refusal by the guard goes with its reason (not_allowed.py).

In: a known code becomes the same type again; an unknown one (a newer peer) a plain PotluckError.
The words come from a stranger, so control characters (which could rewrite a terminal) are taken
out of them.

Easy to get wrong: MalformedMessage that came *back* means that the other side could not read us.
Only an error that was raised here says anything against the peer.
"""

from __future__ import annotations

from collections.abc import Mapping

from protocols.errors import (
    Busy,
    DeadlineExceeded,
    HandlerFailed,
    LimitExceeded,
    MalformedMessage,
    PotluckError,
    ProtocolMisuse,
    ProtocolNotServed,
    Refused,
    Unreachable,
)
from protocols.messages import LONGEST_ERROR_TEXT, ErrorBody
from protocols.not_allowed import CODE_PREFIX, NotAllowed, code_of, revived

ErrorCodes = Mapping[str, type[PotluckError]]
"""Codes that a method adds for errors of its own."""

CODES: ErrorCodes = {
    "busy": Busy,
    "deadline-exceeded": DeadlineExceeded,
    "failed": PotluckError,
    "handler-failed": HandlerFailed,
    "limit-exceeded": LimitExceeded,
    "malformed-message": MalformedMessage,
    "not-served": ProtocolNotServed,
    "refused": Refused,
    "unreachable": Unreachable,
}

NO_ERRORS: ErrorCodes = {}

_HANDLER_FAILED = ErrorBody(
    "handler-failed",
    "The other side's handler broke on this request.",
    "It is an error over there; its log has the details.",
    "Tell whoever runs that node, with the time.",
)


def describe(error: BaseException, own_codes: ErrorCodes = NO_ERRORS) -> ErrorBody:
    """What the other side is told of an error."""
    known = error_to_tell(error)
    if known is None:
        return _HANDLER_FAILED
    return ErrorBody(
        _code_of(known, own_codes), _cut(known.what), _cut(known.why), _cut(known.advice)
    )


def revive(body: ErrorBody, own_codes: ErrorCodes = NO_ERRORS) -> PotluckError:
    """The error that the other side described, to be raised here."""
    what = _printable(body.what) or f"The other side answered with the error {body.code!r}."
    why, advice = _printable(body.why), _printable(body.advice)
    if body.code.startswith(CODE_PREFIX):
        return revived(body.code, what, why, advice)
    type_ = own_codes.get(body.code) or CODES.get(body.code, PotluckError)
    return type_(what, why=why, advice=advice)


def error_to_tell(error: BaseException) -> PotluckError | None:
    """The error itself, or the only one in the groups that nurseries make; None for a bug."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    if isinstance(error, PotluckError) and not isinstance(error, ProtocolMisuse):
        return error
    return None


def again(error: PotluckError) -> PotluckError:
    """The same error as a new object: one object raised in many tasks gathers their tracebacks.

    (copy.copy would call the type again with the one argument that every exception keeps; some of
    ours are made from others.)"""
    fresh = type(error).__new__(type(error), *error.args)
    fresh.__dict__.update(error.__dict__)
    return fresh


def _code_of(error: PotluckError, own_codes: ErrorCodes) -> str:
    """The code of the error's type or of the nearest type above it that has one."""
    if isinstance(error, NotAllowed):
        return code_of(error)
    code_of_type = {type_: code for codes in (CODES, own_codes) for code, type_ in codes.items()}
    for type_ in type(error).__mro__:
        if type_ in code_of_type:
            return code_of_type[type_]
    return "failed"


def _cut(text: str) -> str:
    if not text.isascii():  # a file name may hold halves of characters, which no UTF-8 can
        text = text.encode(errors="replace").decode()
    return text if len(text) <= LONGEST_ERROR_TEXT else text[: LONGEST_ERROR_TEXT - 1] + "…"


def _printable(text: str) -> str:
    return text if text.isprintable() else "".join(c if c.isprintable() else " " for c in text)
