"""`/potluck/ping/1.0.0`: check that a peer answers, and measure the round trip.

`echo` answers with the payload of its request. Strangers may call it, so the answer is never longer
than the request.

This measures the path through our own code too, as a caller sees it, not only the link.
"""

from __future__ import annotations

from typing import Annotated

import trio
from msgspec import Meta

from protocols.guard import Caller
from protocols.identity import PeerId
from protocols.rpc.messages import Message
from protocols.rpc.method import Method
from protocols.rpc.rpc import Rpc

PING = "/potluck/ping/1.0.0"

LONGEST_ECHO_BYTES = 4096  # large enough to show the effect of size, too small for a transfer


class EchoRequest(Message, frozen=True, gc=False):
    payload: Annotated[bytes, Meta(max_length=LONGEST_ECHO_BYTES)] = b""


class EchoResponse(Message, frozen=True, gc=False):
    payload: Annotated[bytes, Meta(max_length=LONGEST_ECHO_BYTES)] = b""


_ECHO_LIMIT_BYTES = LONGEST_ECHO_BYTES + 16

ECHO = Method(PING, "echo", EchoRequest, EchoResponse, _ECHO_LIMIT_BYTES, _ECHO_LIMIT_BYTES)


async def ping(rpc: Rpc, peer: PeerId, payload: bytes = b"", *, timeout: float) -> float:
    """Send one echo; return its duration in seconds, with connecting if there was no stream."""
    start = trio.current_time()
    await rpc.call(peer, ECHO, EchoRequest(payload), timeout=timeout)
    return trio.current_time() - start


def serve_ping(rpc: Rpc) -> None:
    """Answer the ping protocol on this node."""
    rpc.serve(ECHO, _echo)


def _echo(_caller: Caller, request: EchoRequest) -> EchoResponse:
    return EchoResponse(request.payload)
