"""Opening a bulk transfer: OPEN, then wait for ACCEPT or the ERROR that says why not.

Easy to get wrong: the stream belongs to the block. However the block ends, the stream is closed
(both sides had their last word) or reset (anything else).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import trio

from protocols.bulk import Transfer
from protocols.bulk_frames import receive_payload
from protocols.bulk_serving import refuse
from protocols.calling import milliseconds_until
from protocols.engagements import Ending
from protocols.errors import (
    DeadlineExceeded,
    MalformedMessage,
    PotluckError,
    RemoteMisbehaviour,
    Unreachable,
)
from protocols.frame_reader import receive_frame_header
from protocols.guard import Exchange, Part
from protocols.identity import PeerId
from protocols.messages import (
    ERROR_BODY_LIMIT_BYTES,
    AcceptHead,
    ErrorHead,
    OpenHead,
    encode,
    message_type,
)
from protocols.method import Accepted, BulkMethod, Closed, Closing, Opening, encode_within
from protocols.network import Network, Stream
from protocols.remote_errors import again, describe
from protocols.rpc_state import RpcState
from protocols.told_errors import told
from protocols.wire import (
    ACCEPT,
    ERROR,
    OPEN,
    message_frame,
    message_limit,
    read_frame_header,
    split_payload,
)


@asynccontextmanager
async def open_transfer(
    network: Network,
    state: RpcState,
    peer: PeerId,
    bulk: BulkMethod[Opening, Accepted, Closing, Closed],
    opening: Opening,
    timeout: float,
) -> AsyncIterator[Transfer[Accepted, Closing, Closed]]:
    """An accepted transfer, for the length of the block."""
    body = encode_within(f"opening of {bulk.name}", opening, bulk.message_limit_bytes)
    exchange = Exchange(peer, bulk.protocol, bulk.name, training=bulk.training)
    begun: tuple[Stream, Transfer[Accepted, Closing, Closed]] | None = None
    whole = False
    ended_from_outside = False
    try:
        with state.engagements.engaged(peer) as ending:
            begun = await _begin(network, state, exchange, bulk, body, timeout, ending)
            stream, transfer = begun
            state.counts.transfers_opened += 1
            yield transfer
            whole = transfer.finished
            if whole:  # no reset behind it: our last words may still be on their way
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
    """Say why the transfer ends, unless a cut frame or our closing bars the way."""
    if transfer.may_say_error:
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
    ending: Ending,
) -> tuple[Stream, Transfer[Accepted, Closing, Closed]]:
    """Open a stream, say OPEN, wait for ACCEPT. If that fails in any way, no stream is left."""
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
        payload = await receive_payload(stream, length, state.limits.stall_seconds)
        head, body = split_payload(kind, payload)
        if kind == ACCEPT:
            envelope = message_type(AcceptHead).decode(head).envelope
            state.guard.open(exchange, Part.ACCEPTED, body, envelope)
            return message_type(bulk.accepted).decode(body)
        envelope = message_type(ErrorHead).decode(head).envelope
        error = told(state.guard, exchange, body, envelope, bulk.errors)
    except RemoteMisbehaviour as misbehaviour:
        state.misbehaved(exchange.peer, exchange.protocol, misbehaviour)
        raise
    raise error
