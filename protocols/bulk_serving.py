"""Serving bulk transfers: judge the opening, run the handler, and see to the end.

Easy to get wrong: a handler that fails may have left a chunk half sent. Then no ERROR can follow
it on the stream, and the transfer ends with a reset instead.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import trio

from protocols.answering import FAREWELL_SECONDS, not_served
from protocols.bulk import BulkHandler, Transfer
from protocols.bulk_frames import receive_payload
from protocols.errors import (
    Busy,
    LimitExceeded,
    PotluckError,
    Refused,
    RemoteMisbehaviour,
    Unreachable,
)
from protocols.guard import Caller, Exchange, Part
from protocols.messages import ErrorBody, ErrorHead, OpenHead, encode, message_type
from protocols.method import BulkMethod
from protocols.network import Stream
from protocols.remote_errors import NO_ERRORS, again, describe, error_to_tell
from protocols.rpc_state import RpcState
from protocols.wire import ERROR, OPEN, message_frame, split_payload

log = logging.getLogger("potluck.rpc")

_OPEN_HEAD = message_type(OpenHead)


@dataclass(frozen=True)
class ServedBulk:
    """A kind of transfer with what answers it."""

    bulk: BulkMethod[Any, Any, Any, Any]
    handler: BulkHandler[Any, Any, Any, Any]


async def serve_transfer(
    stream: Stream, length: int, bulks: Mapping[str, ServedBulk], state: RpcState
) -> None:
    """Answer the OPEN frame whose payload of `length` bytes comes next, to the end."""
    payload = await receive_payload(stream, length, state.limits.stall_seconds)
    encoded_head, body = split_payload(OPEN, payload)
    head = _OPEN_HEAD.decode(encoded_head)
    served = bulks.get(head.method)
    training = served is not None and served.bulk.training
    exchange = Exchange(stream.remote_peer, stream.protocol, head.method, training=training)
    try:
        opening = _judge(exchange, served, head, body, state)
    except PotluckError as error:
        errors = served.bulk.errors if served is not None else NO_ERRORS
        if exchange.credentials is None and isinstance(error, Refused):  # by the guard
            await trio.sleep(state.refused(exchange.peer))
        await refuse(stream, exchange, describe(error, errors), state)
        return
    assert served is not None
    if not state.transfers.enter(exchange.peer):
        busy = Busy(f"Too many transfers are open for another {head.method}.")
        await refuse(stream, exchange, describe(busy, served.bulk.errors), state)
        return
    try:
        await _serve(stream, exchange, served, head, opening, state)
    finally:
        state.transfers.leave(exchange.peer)


async def _serve(
    stream: Stream,
    exchange: Exchange,
    served: ServedBulk,
    head: OpenHead,
    opening: Any,
    state: RpcState,
) -> None:
    bulk = served.bulk
    transfer: Transfer[Any, Any, Any]
    caller = Caller(exchange.peer, exchange.credentials)
    try:
        with state.engagements.engaged(exchange.peer) as ending:
            transfer = Transfer(stream, bulk, exchange, state, ending, opener=False)
            with trio.move_on_after(head.milliseconds / 1000.0) as until_accepted:
                transfer.when_accepted(lambda: setattr(until_accepted, "deadline", math.inf))
                await served.handler(caller, transfer, opening)
        if ending.cut_short is not None:
            raise again(ending.cut_short)
    except Exception as error:
        known = error_to_tell(error)
        if known is None:
            log.error("the handler of %s %s failed", bulk.protocol, bulk.name, exc_info=error)
        if transfer.may_say_error and not isinstance(known, Unreachable):
            await refuse(stream, exchange, describe(error, bulk.errors), state)
        else:
            stream.reset()
        return
    if transfer.finished:
        state.counts.transfers_served += 1
    else:
        if not until_accepted.cancelled_caught:
            log.error("the handler of %s %s did not finish", bulk.protocol, bulk.name)
        stream.reset()


def _judge(
    exchange: Exchange, served: ServedBulk | None, head: OpenHead, body: bytes, state: RpcState
) -> Any:
    """The opening message, from one who may open this."""
    try:
        if served is not None and len(body) > served.bulk.message_limit_bytes:
            raise LimitExceeded(
                f"The opening of {served.bulk.name} has {len(body):,} bytes; "
                f"it may have {served.bulk.message_limit_bytes:,}."
            )
        state.guard.open(exchange, Part.OPENING, body, head.envelope)
        state.accepted(exchange)
        if served is None:  # said only to those who may ask, and sealed for this opening
            raise not_served(exchange.protocol, exchange.method)
        return message_type(served.bulk.opening).decode(body)
    except RemoteMisbehaviour as error:
        state.misbehaved(exchange.peer, exchange.protocol, error)
        raise


async def refuse(stream: Stream, exchange: Exchange, error: ErrorBody, state: RpcState) -> None:
    """End a stream with an error that the other side can read, if it reads."""
    body = encode(error)
    envelope = state.guard.seal(exchange, Part.ERROR, body)
    with trio.move_on_after(FAREWELL_SECONDS):
        try:
            await stream.send_all(message_frame(ERROR, encode(ErrorHead(0, envelope)), body))
            await stream.aclose()
            return  # and no reset behind it, which could overtake what it was to say
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            log.debug("peer %s was gone before its transfer was refused", exchange.peer)
    stream.reset()
