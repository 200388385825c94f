"""The error that an ERROR message tells: the other side's own words, if it proves that they are.

Easy to get wrong: what an error says has effects (a caller tries elsewhere, or again, or never),
so one whose envelope does not verify is not believed. It is not silent either: the caller learns
that this peer did not prove itself, why, and what it claimed.
"""

from __future__ import annotations

from protocols.errors import PotluckError, RemoteMisbehaviour
from protocols.guard import Exchange, Guard, Part
from protocols.messages import ErrorBody, message_type
from protocols.not_allowed import AnswerNotAllowed
from protocols.remote_errors import NO_ERRORS, ErrorCodes, revive

_ERROR_BODY = message_type(ErrorBody)


def told(
    guard: Guard,
    exchange: Exchange,
    body: bytes,
    envelope: bytes,
    own_codes: ErrorCodes = NO_ERRORS,
) -> PotluckError:
    """The error to raise for an ERROR message. RemoteMisbehaviour if it is not one at all."""
    error = revive(_ERROR_BODY.decode(body), own_codes)
    try:
        guard.open(exchange, Part.ERROR, body, envelope)
    except AnswerNotAllowed as refusal:
        if isinstance(refusal, RemoteMisbehaviour):
            raise
        return refusal.instead_of(error)
    return error
