"""The answering side of unary calls: one stream that a peer opened, many calls on it at once.

    reader: every message that a wake-up brought is judged (limits, envelope, types) and started
    handler: an async function runs in a task of its own, under the caller's deadline;
             a plain function runs in the reader: for what is answered from memory, at a third
             of the cost
    sender: answers that were ready together leave together

Promise: a caller that cancels, goes away or runs out of time cancels its handler. A peer that
does not read its answers stops being read. One that breaks the protocol is told why (an ERROR for
id 0, best effort), loses the stream, and is avoided for a while.

Easy to get wrong: a handler's own exception is not the peer's fault and ends nothing but its call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import trio

from protocols.errors import (
    Busy,
    DeadlineExceeded,
    LimitExceeded,
    MalformedMessage,
    PotluckError,
    ProtocolNotServed,
    RemoteMisbehaviour,
)
from protocols.frame_reader import MessageReader
from protocols.frame_sender import FrameSender
from protocols.guard import Caller, Exchange, Part
from protocols.messages import (
    CancelHead,
    ErrorBody,
    ErrorHead,
    RequestHead,
    ResponseHead,
    encode,
    message_type,
)
from protocols.method import Method, encode_within
from protocols.network import Stream
from protocols.remote_errors import NO_ERRORS, describe, error_to_tell
from protocols.rpc_state import RpcState
from protocols.wire import (
    CANCEL,
    ERROR,
    REQUEST,
    RESPONSE,
    FrameParser,
    message_frame,
    message_limit,
)

log = logging.getLogger("potluck.rpc")

FAREWELL_SECONDS = 1.0  # for telling a peer why it is dropped; it may not be reading

Handler = Callable[[Caller, Any], Any]

_REQUEST_HEAD = message_type(RequestHead)
_CANCEL_HEAD = message_type(CancelHead)


@dataclass(frozen=True)
class ServedMethod:
    """A method with what answers it. `waits`: the handler is async."""

    method: Method[Any, Any]
    handler: Handler
    waits: bool


class AnsweringStream:
    """One stream of calls from one peer."""

    def __init__(
        self,
        stream: Stream,
        methods: Mapping[str, ServedMethod],
        request_limit: int,
        state: RpcState,
    ) -> None:
        self.last_used = trio.current_time()
        self._stream = stream
        self._peer = stream.remote_peer
        self._protocol = stream.protocol
        self._methods = methods
        self._state = state
        self._sender = FrameSender(state.limits.stall_seconds, state.queued)
        self._running: dict[int, trio.CancelScope] = {}
        self._cancelled_lately = False
        self._pause_seconds = 0.0
        self._plain_caller = Caller(self._peer)
        self._frame_limits = {REQUEST: message_limit(request_limit), CANCEL: message_limit(0)}
        self._scope = trio.CancelScope()
        self._handlers: trio.Nursery | None = None
        self._farewell_said = False

    @property
    def in_use(self) -> bool:
        return bool(self._running)

    def end(self) -> None:
        """Stop at once; handlers that run are cancelled."""
        self._scope.cancel()

    def end_with(self, error: PotluckError) -> None:
        """Stop at once; handlers that run are cancelled, and the peer is told why."""
        if self._handlers is None:
            self._scope.cancel()
        else:
            self._handlers.cancel_scope.cancel()
            self._say_farewell(error)

    async def run(self, already_read: bytes) -> None:
        """Answer until the peer ends its side and all is answered, or the stream breaks."""
        with self._scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._send)
                async with trio.open_nursery() as self._handlers:
                    await self._receive(already_read, self._handlers)
                self._sender.finish()

    async def _send(self) -> None:
        try:
            await self._sender.run(self._stream)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self._scope.cancel()
        except DeadlineExceeded as error:
            log.info("peer %s does not read answers (%s): %s", self._peer, self._protocol, error)
            self._scope.cancel()

    async def _receive(self, already_read: bytes, handlers: trio.Nursery) -> None:
        parser = FrameParser(self._frame_limits, self._read_head)
        reader = MessageReader(self._stream, parser, self._state.limits.stall_seconds)
        judged_at_once = self._state.guard.judged_at_once
        try:
            while (batch := await reader.next_batch(already_read)) is not None:
                already_read = b""
                self.last_used = trio.current_time()
                for number, (_kind, head, body) in enumerate(batch, 1):
                    if number % judged_at_once == 0:
                        await trio.lowlevel.checkpoint()
                    if isinstance(head, CancelHead):
                        self._cancel(head.id)
                    else:
                        if self._cancelled_lately and not self._state.served.has_room(self._peer):
                            await self._let_cancelled_end()
                        self._take(head, body, handlers)
                        if self._pause_seconds:
                            await self._pause()
                        if self._sender.congested:
                            await self._sender.room()
        except (trio.BrokenResourceError, trio.ClosedResourceError, DeadlineExceeded):
            self._scope.cancel()
        except RemoteMisbehaviour as error:
            self._state.misbehaved(self._peer, self._protocol, error)
            handlers.cancel_scope.cancel()
            self._say_farewell(error)

    def _say_farewell(self, error: PotluckError) -> None:
        """Tell the peer why the stream ends, unless it does not read even that."""
        if not self._farewell_said:
            self._farewell_said = True
            self._push_error(Exchange(self._peer, self._protocol, ""), 0, describe(error))
            self._scope.deadline = trio.current_time() + FAREWELL_SECONDS

    def _read_head(self, kind: int, head: bytes, body_length: int) -> RequestHead | CancelHead:
        if kind == CANCEL:
            return _CANCEL_HEAD.decode(head)
        request = _REQUEST_HEAD.decode(head)
        served = self._methods.get(request.method)
        if served is not None and body_length > served.method.request_limit_bytes:
            raise LimitExceeded(
                f"A request for {request.method} declares {body_length:,} bytes; "
                f"the method allows {served.method.request_limit_bytes:,}."
            )
        return request

    def _cancel(self, call_id: int) -> None:
        scope = self._running.get(call_id)
        if scope is not None:  # else it is answered already: the two crossed
            self._state.counts.requests_cancelled += 1
            self._cancelled_lately = True
            scope.cancel()

    async def _let_cancelled_end(self) -> None:
        """Give cancelled handlers their turn, so that they count no more.

        Requests and the cancels of earlier ones come in one batch; whoever cancels and asks again
        is within the limits. Handlers run in the turn after the next at the latest. One that
        refuses to end goes on counting: that is what the limit is for.
        """
        self._cancelled_lately = False
        for _ in range(2):
            await trio.lowlevel.checkpoint()

    async def _pause(self) -> None:
        """Read no more for now of a peer that was refused again and again."""
        seconds, self._pause_seconds = self._pause_seconds, 0.0
        await trio.sleep(seconds)

    def _take(self, head: RequestHead, body: bytes, handlers: trio.Nursery) -> None:
        """Judge a request, and answer it or start what will answer it."""
        if head.id == 0 or head.id in self._running:
            raise MalformedMessage(f"The id {head.id} of a request is not a fresh one.")
        exchange = Exchange(self._peer, self._protocol, head.method)
        served = self._methods.get(head.method)
        errors = served.method.errors if served is not None else NO_ERRORS
        accepted = False
        try:
            if served is not None:
                exchange.training = served.method.training
            self._state.guard.open(exchange, Part.REQUEST, body, head.envelope)
            accepted = True
            self._state.accepted(exchange)
            if served is None:  # said only to those who may ask, and sealed for this request
                raise not_served(self._protocol, head.method)
            request = served.method.request_type.decode(body)
        except PotluckError as error:
            self._push_error(exchange, head.id, describe(error, errors))
            if isinstance(error, RemoteMisbehaviour):
                raise
            if not accepted:
                self._pause_seconds = self._state.refused(self._peer)
            return
        caller = self._plain_caller
        if exchange.credentials is not None:
            caller = Caller(self._peer, exchange.credentials)
        if not served.waits:
            self._answer_now(exchange, head.id, served, caller, request)
        elif self._state.served.enter(self._peer):
            scope = trio.CancelScope(deadline=trio.current_time() + head.milliseconds / 1000.0)
            self._running[head.id] = scope
            handlers.start_soon(
                self._answer_later, exchange, head.id, served, caller, request, scope
            )
        else:
            self._state.counts.requests_refused_busy += 1
            busy = Busy(f"Too many calls in hand for {head.method}.")
            self._push_error(exchange, head.id, describe(busy, errors))

    def _answer_now(
        self, exchange: Exchange, call_id: int, served: ServedMethod, caller: Caller, request: Any
    ) -> None:
        try:
            self._answer(exchange, call_id, served.method, served.handler(caller, request))
        except Exception as error:  # noqa: BLE001 - logged by _fail; ends this call alone
            self._fail(exchange, call_id, served.method, error)

    async def _answer_later(
        self,
        exchange: Exchange,
        call_id: int,
        served: ServedMethod,
        caller: Caller,
        request: Any,
        scope: trio.CancelScope,
    ) -> None:
        try:
            with scope:
                response = await served.handler(caller, request)
                if self._sender.congested:
                    await self._sender.room()
                self._answer(exchange, call_id, served.method, response)
        except Exception as error:  # noqa: BLE001 - logged by _fail; ends this call alone
            self._fail(exchange, call_id, served.method, error)
        finally:
            del self._running[call_id]
            self._state.served.leave(self._peer)

    def _answer(
        self, exchange: Exchange, call_id: int, method: Method[Any, Any], response: Any
    ) -> None:
        body = encode_within(f"response of {method.name}", response, method.response_limit_bytes)
        envelope = self._state.guard.seal(exchange, Part.RESPONSE, body)
        head = encode(ResponseHead(call_id, envelope))
        self._state.counts.requests_served += 1
        self._sender.push(message_frame(RESPONSE, head, body))

    def _fail(
        self, exchange: Exchange, call_id: int, method: Method[Any, Any], error: Exception
    ) -> None:
        if error_to_tell(error) is None:
            log.error("the handler of %s %s failed", self._protocol, method.name, exc_info=error)
        self._push_error(exchange, call_id, describe(error, method.errors))

    def _push_error(self, exchange: Exchange, call_id: int, error: ErrorBody) -> None:
        body = encode(error)
        envelope = self._state.guard.seal(exchange, Part.ERROR, body)
        self._state.counts.requests_failed += 1
        self._sender.push(message_frame(ERROR, encode(ErrorHead(call_id, envelope)), body))


def not_served(protocol: str, method: str) -> ProtocolNotServed:
    return ProtocolNotServed(
        f"This node does not serve the method {method!r} of {protocol}.",
        why="It runs another version, or in a role that does not offer it.",
    )
