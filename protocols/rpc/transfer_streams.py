"""Opening a bulk transfer: send OPEN, then wait for ACCEPT, or for an ERROR with the reason.

The stream belongs to the block. When the block ends, the stream is closed if both sides sent their
closing message, and reset otherwise.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import trio

from protocols.errors import (
    Busy,
    DeadlineExceeded,
    LimitExceeded,
    MalformedMessage,
    PotluckError,
    Refused,
    RemoteMisbehaviour,
    Unreachable,
    again,
)
from protocols.guard import Caller, Exchange, Part
from protocols.identity import PeerId
from protocols.network import Network, Stream
from protocols.rpc.calls import FAREWELL_SECONDS, milliseconds_until, not_served
from protocols.rpc.frames import (
    ACCEPT,
    ERROR,
    OPEN,
    message_frame,
    message_limit,
    read_frame_header,
    receive_frame_header,
    split_payload,
)
from protocols.rpc.messages import (
    ERROR_BODY_LIMIT_BYTES,
    AcceptHead,
    ErrorBody,
    ErrorHead,
    OpenHead,
    encode,
    message_type,
)
from protocols.rpc.method import Accepted, BulkMethod, Closed, Closing, Opening, encode_within
from protocols.rpc.peers import Endable
from protocols.rpc.remote_errors import NO_ERRORS, describe, known_error, received_error
from protocols.rpc.state import RpcState
from protocols.rpc.transfers import BulkHandler, Transfer, receive_payload


@asynccontextmanager
async def open_transfer(
    network: Network,
    state: RpcState,
    peer: PeerId,
    bulk: BulkMethod[Opening, Accepted, Closing, Closed],
    opening: Opening,
    timeout: float,
) -> AsyncIterator[Transfer[Accepted, Closing, Closed]]:
    """Open a transfer for the length of the block."""
    body = encode_within(f"opening of {bulk.name}", opening, bulk.message_limit_bytes)
    exchange = Exchange(peer, bulk.protocol, bulk.name, training=bulk.training)
    begun: tuple[Stream, Transfer[Accepted, Closing, Closed]] | None = None
    whole = False
    ended_from_outside = False
    try:
        with state.open_work.register(peer) as ending:
            begun = await _begin(network, state, exchange, bulk, body, timeout, ending)
            stream, transfer = begun
            state.counts.transfers_opened += 1
            yield transfer
            whole = transfer.finished
            if whole:  # no reset after it: our last bytes may still be on their way
                await stream.aclose()
        ended_from_outside = ending.error is not None
    finally:
        if begun is not None and not whole and not ended_from_outside:
            begun[0].reset()
    if ending.error is not None and not whole:
        if begun is not None:
            await _tell(*begun, exchange, ending.error, state)
        raise again(ending.error)


async def _tell(
    stream: Stream,
    transfer: Transfer[Any, Any, Any],
    exchange: Exchange,
    error: PotluckError,
    state: RpcState,
) -> None:
    """Send the reason for the end, unless after a cut frame or our closing message."""
    if transfer.may_send_error:
        await refuse(stream, exchange, describe(error), state)
    else:
        stream.reset()


async def _begin(
    network: Network,
    state: RpcState,
    exchange: Exchange,
    bulk: BulkMethod[Opening, Accepted, Closing, Closed],
    body: bytes,
    timeout: float,
    ending: Endable,
) -> tuple[Stream, Transfer[Accepted, Closing, Closed]]:
    """Open a stream, send OPEN, wait for ACCEPT. If that fails, no stream is left."""
    peer = exchange.peer
    deadline = min(trio.current_time() + timeout, trio.current_effective_deadline())
    with trio.CancelScope(deadline=deadline):
        stream = await _open_stream(network, peer, bulk.protocol)
        transfer: Transfer[Accepted, Closing, Closed] = Transfer(
            stream, bulk, exchange, state, ending, opener=True
        )
        accepted = False
        try:
            await _send_opening(stream, exchange, body, deadline, state)
            transfer.note_accepted(await _receive_answer(stream, bulk, exchange, state))
            accepted = True
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise Unreachable(
                f"{peer} went away before it accepted the transfer {bulk.name}."
            ) from None
        finally:
            if not accepted:
                stream.reset()
        return stream, transfer
    raise DeadlineExceeded(
        f"{peer} did not accept the transfer {bulk.name} within {timeout:g} seconds.",
        why="It is busy or stopped, or the link is slow or carries nothing.",
    )


async def _open_stream(network: Network, peer: PeerId, protocol: str) -> Stream:
    try:
        return await network.open(peer, protocol)
    except PotluckError as error:
        error.surely_not_executed = True
        raise
    except trio.ClosedResourceError:
        raise Unreachable("This node's network has been closed.") from None


async def _send_opening(
    stream: Stream, exchange: Exchange, body: bytes, deadline: float, state: RpcState
) -> None:
    envelope = state.guard.seal(exchange, Part.OPENING, body)
    head = OpenHead(exchange.method, milliseconds_until(deadline), envelope)
    await stream.send_all(message_frame(OPEN, encode(head), body))


async def _receive_answer(
    stream: Stream,
    bulk: BulkMethod[Opening, Accepted, Closing, Closed],
    exchange: Exchange,
    state: RpcState,
) -> Accepted:
    limits = {
        ACCEPT: message_limit(bulk.message_limit_bytes),
        ERROR: message_limit(ERROR_BODY_LIMIT_BYTES),
    }
    try:
        header = await receive_frame_header(stream)
        if header is None:
            raise MalformedMessage("The stream ended where ACCEPT or ERROR was due.")
        kind, length = read_frame_header(header, limits)
        payload = await receive_payload(
            stream, length, state.limits.stall_seconds, state.unfinished
        )
        head, body = split_payload(kind, payload)
        if kind == ACCEPT:
            envelope = message_type(AcceptHead).decode(head).envelope
            state.guard.open(exchange, Part.ACCEPTED, body, envelope)
            return message_type(bulk.accepted).decode(body)
        envelope = message_type(ErrorHead).decode(head).envelope
        error = received_error(state.guard, exchange, body, envelope, bulk.errors)
    except RemoteMisbehaviour as misbehaviour:
        state.misbehaved(exchange.peer, exchange.protocol, misbehaviour)
        raise
    raise error


# Serving bulk transfers: check the opening, run the handler, end the transfer.
#
# A handler that fails may have sent half a chunk. Then no ERROR can follow it on the stream, and
# the transfer ends with a reset instead.


log = logging.getLogger("potluck.rpc")

_OPEN_HEAD = message_type(OpenHead)


@dataclass(frozen=True)
class ServedBulk:
    """A kind of transfer with its handler."""

    bulk: BulkMethod[Any, Any, Any, Any]
    handler: BulkHandler[Any, Any, Any, Any]


async def serve_transfer(
    stream: Stream, length: int, bulks: Mapping[str, ServedBulk], state: RpcState
) -> None:
    """Serve the transfer whose OPEN payload of `length` bytes comes next, to its end."""
    payload = await receive_payload(stream, length, state.limits.stall_seconds, state.unfinished)
    encoded_head, body = split_payload(OPEN, payload)
    head = _OPEN_HEAD.decode(encoded_head)
    served = bulks.get(head.method)
    training = served is not None and served.bulk.training
    exchange = Exchange(stream.remote_peer, stream.protocol, head.method, training=training)
    try:
        opening = _judge(exchange, served, head, body, state)
    except PotluckError as error:
        errors = served.bulk.errors if served is not None else NO_ERRORS
        if exchange.credentials is None and isinstance(error, Refused):  # refused by the guard
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
        with state.open_work.register(exchange.peer) as ending:
            transfer = Transfer(stream, bulk, exchange, state, ending, opener=False)
            with trio.move_on_after(head.milliseconds / 1000.0) as until_accepted:
                transfer.when_accepted(lambda: setattr(until_accepted, "deadline", math.inf))
                await served.handler(caller, transfer, opening)
        if ending.cut_short is not None:
            raise again(ending.cut_short)
    except Exception as error:
        known = known_error(error)
        if known is None:
            log.error("the handler of %s %s failed", bulk.protocol, bulk.name, exc_info=error)
        if transfer.may_send_error and not isinstance(known, Unreachable):
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
    """The opening message, if this peer may open this."""
    try:
        if served is not None and len(body) > served.bulk.message_limit_bytes:
            raise LimitExceeded(
                f"The opening of {served.bulk.name} has {len(body):,} bytes; "
                f"it may have {served.bulk.message_limit_bytes:,}."
            )
        state.guard.open(exchange, Part.OPENING, body, head.envelope)
        state.accepted(exchange)
        if served is None:  # told only to peers that may ask, sealed for this opening
            raise not_served(exchange.protocol, exchange.method)
        return message_type(served.bulk.opening).decode(body)
    except RemoteMisbehaviour as error:
        state.misbehaved(exchange.peer, exchange.protocol, error)
        raise


async def refuse(stream: Stream, exchange: Exchange, error: ErrorBody, state: RpcState) -> None:
    """End a stream with an error, which the other side gets if it reads."""
    body = encode(error)
    envelope = state.guard.seal(exchange, Part.ERROR, body)
    with trio.move_on_after(FAREWELL_SECONDS):
        try:
            await stream.send_all(message_frame(ERROR, encode(ErrorHead(0, envelope)), body))
            await stream.aclose()
            return  # no reset after it: that could overtake the error
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            log.debug("peer %s was gone before its transfer was refused", exchange.peer)
    stream.reset()
