"""Errors on the wire: a code, and three sentences for people. Never a traceback.

Out: an error of our hierarchy is sent as the code of its type and its own text, cut to size. Any
other exception, and ProtocolMisuse, is a bug of the handler. It is sent as `handler-failed` without
its text, which may contain secrets; the log of that node has it. A refusal by the guard is sent
with its reason (not_allowed.py).

In: a known code becomes the same type again; an unknown one (of a newer peer) becomes a plain
PotluckError. The text comes from a stranger, so control characters, which could rewrite a terminal,
are removed.

A MalformedMessage that a peer sent *back* means that it could not read us. Only an error that was
raised here counts against the peer.
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
    RemoteMisbehaviour,
    Unreachable,
)
from protocols.guard import Exchange, Guard, Part
from protocols.not_allowed import CODE_PREFIX, AnswerNotAllowed, NotAllowed, code_of, revived
from protocols.rpc.messages import LONGEST_ERROR_TEXT, ErrorBody, message_type

ErrorCodes = Mapping[str, type[PotluckError]]
"""Codes of a method's own error types."""

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
    "The other side's handler failed on this request.",
    "It is a bug on that node; its log has the details.",
    "Tell the person who runs that node, with the time.",
)


def describe(error: BaseException, own_codes: ErrorCodes = NO_ERRORS) -> ErrorBody:
    """Describe an error for the other side."""
    known = known_error(error)
    if known is None:
        return _HANDLER_FAILED
    return ErrorBody(
        _code_of(known, own_codes), _cut(known.what), _cut(known.why), _cut(known.advice)
    )


def revive(body: ErrorBody, own_codes: ErrorCodes = NO_ERRORS) -> PotluckError:
    """Make the error that the other side described, to raise it here."""
    what = _printable(body.what) or f"The other side answered with the error {body.code!r}."
    why, advice = _printable(body.why), _printable(body.advice)
    if body.code.startswith(CODE_PREFIX):
        return revived(body.code, what, why, advice)
    type_ = own_codes.get(body.code) or CODES.get(body.code, PotluckError)
    return type_(what, why=why, advice=advice)


def known_error(error: BaseException) -> PotluckError | None:
    """The error itself, or the only one in a nursery's exception groups; None for a bug."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    if isinstance(error, PotluckError) and not isinstance(error, ProtocolMisuse):
        return error
    return None


def _code_of(error: PotluckError, own_codes: ErrorCodes) -> str:
    """The code of the error's type, or of its nearest base class that has one."""
    if isinstance(error, NotAllowed):
        return code_of(error)
    code_of_type = {type_: code for codes in (CODES, own_codes) for code, type_ in codes.items()}
    for type_ in type(error).__mro__:
        if type_ in code_of_type:
            return code_of_type[type_]
    return "failed"


def _cut(text: str) -> str:
    if not text.isascii():  # a file name may contain lone surrogates, which UTF-8 cannot encode
        text = text.encode(errors="replace").decode()
    return text if len(text) <= LONGEST_ERROR_TEXT else text[: LONGEST_ERROR_TEXT - 1] + "…"


def _printable(text: str) -> str:
    return text if text.isprintable() else "".join(c if c.isprintable() else " " for c in text)


# The error in an ERROR message, in the other side's words if its envelope proves them.
#
# A caller acts on an error: it tries another peer, or again, or gives up. So an error whose
# envelope does not verify is not believed. The caller then learns that this peer did not prove
# itself, why, and which error it sent.


_ERROR_BODY = message_type(ErrorBody)


def received_error(
    guard: Guard,
    exchange: Exchange,
    body: bytes,
    envelope: bytes,
    own_codes: ErrorCodes = NO_ERRORS,
) -> PotluckError:
    """The error to raise for an ERROR message. RemoteMisbehaviour if the message is invalid."""
    error = revive(_ERROR_BODY.decode(body), own_codes)
    try:
        guard.open(exchange, Part.ERROR, body, envelope)
    except AnswerNotAllowed as refusal:
        if isinstance(refusal, RemoteMisbehaviour):
            raise
        return refusal.instead_of(error)
    return error
