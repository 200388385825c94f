"""Both sides of unary calls: one long-lived stream to one peer for one protocol.

Opening a libp2p stream costs several milliseconds; a call on an open one costs a fraction of that.
So calls share a stream. Each gets an id, all are in flight at once, and answers come in any order.

    call:   seal, frame, push to the sender, wait for the answer
    reader: find the call of each message by its id, check the message, wake the call

Every call ends with an answer, by its deadline, by its cancellation (which cancels the handler on
the other side) or, if the stream is lost, with Unreachable at once. An ended call leaves nothing
behind.

An answer may be on its way while its call is being cancelled. Ids are never reused on a stream. So
an answer with an old id that no call waits for is late, and is dropped; one with an id that was
never given out is a protocol violation.

First the calling side (`CallStream`), and below it the answering side (`AnsweringStream`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import outcome
import trio

from protocols.errors import (
    Busy,
    DeadlineExceeded,
    LimitExceeded,
    MalformedMessage,
    PotluckError,
    ProtocolNotServed,
    RemoteMisbehaviour,
    Unreachable,
    again,
)
from protocols.guard import Caller, Exchange, Part
from protocols.identity import PeerId
from protocols.network import Network, Stream
from protocols.rpc.frames import (
    CANCEL,
    ERROR,
    MOST_AT_ONCE,
    REQUEST,
    RESPONSE,
    FrameParser,
    FrameSender,
    MessageReader,
    message_frame,
    message_limit,
)
from protocols.rpc.messages import (
    ERROR_BODY_LIMIT_BYTES,
    LARGEST_ID,
    CancelHead,
    ErrorBody,
    ErrorHead,
    RequestHead,
    ResponseHead,
    encode,
    message_type,
)
from protocols.rpc.method import Method, Request, Response, encode_within
from protocols.rpc.remote_errors import NO_ERRORS, describe, known_error, received_error
from protocols.rpc.state import RpcState

CLOSE_SECONDS = 1.0  # if closing an idle stream takes longer, it is reset

MOST_UNKNOWN_CANCELLED = 128  # calls that never came here; no honest peer cancels any

_RESPONSE_HEAD = message_type(ResponseHead)
_ERROR_HEAD = message_type(ErrorHead)


class _Waiting:
    """A call that waits for its answer."""

    __slots__ = ("exchange", "method", "task", "ticket")

    def __init__(
        self,
        task: trio.lowlevel.Task,
        method: Method[Any, Any],
        exchange: Exchange,
        ticket: int,
    ) -> None:
        self.task = task
        self.method = method
        self.exchange = exchange
        self.ticket = ticket


class CallStream:
    """Our calls to one peer in one protocol. `run` runs in its own task."""

    def __init__(self, network: Network, peer: PeerId, protocol: str, state: RpcState) -> None:
        self.peer = peer
        self.protocol = protocol
        self.last_used = trio.current_time()
        self.was_open = False
        self._network = network
        self._state = state
        self._sender = FrameSender(state.limits.stall_seconds, state.queued)
        self._waiting: dict[int, _Waiting] = {}
        self._calls = 0  # in `call`: waiting for the stream to open, for a slot, or for the answer
        self._last_id = 0
        self._largest_response = 0
        self._opened = trio.Event()
        self._turn = trio.lowlevel.ParkingLot()
        self._retired = False
        self._failure: PotluckError | None = None
        self._scope = trio.CancelScope()
        self._frame_limits = {
            RESPONSE: message_limit(0),
            ERROR: message_limit(ERROR_BODY_LIMIT_BYTES),
        }

    @property
    def key(self) -> tuple[PeerId, str]:
        return self.peer, self.protocol

    @property
    def usable(self) -> bool:
        """Whether new calls can be made on this stream."""
        return self._failure is None and not self._retired and self._last_id < LARGEST_ID

    @property
    def in_use(self) -> bool:
        return self._calls > 0

    def end_with(self, error: PotluckError) -> None:
        """End the stream at once; every call on it, waiting or in flight, raises this error."""
        self._end(error)

    def retire(self) -> None:
        """Take no new calls, and close the stream when those in flight have ended."""
        self._retired = True
        if not self.in_use:
            self._close()

    async def call(
        self, method: Method[Request, Response], body: bytes, deadline: float
    ) -> Response:
        """Make one call. The caller must set a timeout; `deadline` is sent to the peer."""
        self._calls += 1
        try:
            if not self.was_open:
                await self._opened.wait()
            while len(self._waiting) >= self._state.limits.calls_per_peer:
                await self._turn.park()
            if self._sender.congested:
                await self._sender.room()
            if self._failure is not None:
                raise _not_sent(self._failure)
            return await self._call(method, body, deadline)
        finally:
            self._calls -= 1
            self.last_used = trio.current_time()
            if self._turn:
                self._turn.unpark()
            if not self._calls and (self._retired or not self._opened.is_set()):
                self._close()

    async def _call(
        self, method: Method[Request, Response], body: bytes, deadline: float
    ) -> Response:
        exchange = Exchange(self.peer, method.protocol, method.name, training=method.training)
        envelope = self._state.guard.seal(exchange, Part.REQUEST, body)
        if method.response_limit_bytes > self._largest_response:
            self._largest_response = method.response_limit_bytes
            self._frame_limits[RESPONSE] = message_limit(self._largest_response)
        self._last_id = call_id = self._last_id + 1
        head = encode(RequestHead(call_id, method.name, milliseconds_until(deadline), envelope))
        ticket = self._sender.push(message_frame(REQUEST, head, body))
        task = trio.lowlevel.current_task()
        self._waiting[call_id] = _Waiting(task, method, exchange, ticket)

        def give_up(_raise_cancel: object) -> trio.lowlevel.Abort:
            del self._waiting[call_id]
            self._sender.push(message_frame(CANCEL, encode(CancelHead(call_id)), b""))
            return trio.lowlevel.Abort.SUCCEEDED

        answer: bytes = await trio.lowlevel.wait_task_rescheduled(give_up)
        try:
            return method.response_type.decode(answer)
        except RemoteMisbehaviour as misbehaviour:
            self._blame(misbehaviour)
            raise

    async def run(self) -> None:
        """Open the stream and run calls on it until it is lost, retired or cancelled."""
        stream: Stream | None = None
        try:
            with self._scope:
                stream = await self._open()
                if stream is not None:
                    await self._serve_calls(stream)
        finally:
            self._end(self._lost())
            self._opened.set()
            self._fail_all()
            if stream is not None:
                self._state.counts.call_streams -= 1
                await self._leave(stream)

    async def _serve_calls(self, stream: Stream) -> None:
        self.was_open = True
        self._opened.set()
        self._state.counts.call_streams_opened += 1
        self._state.counts.call_streams += 1
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._send, stream)
            nursery.start_soon(self._receive, stream)

    async def _open(self) -> Stream | None:
        seconds = self._state.limits.open_seconds
        stream: Stream | None = None
        try:
            with trio.move_on_after(seconds) as patience:
                stream = await self._network.open(self.peer, self.protocol)
        except PotluckError as error:
            self._end(error)
        except trio.ClosedResourceError:
            self._end(Unreachable("This node's network has been closed."))
        else:
            if patience.cancelled_caught:
                self._end(Unreachable(f"{self.peer} did not answer for {seconds:g} seconds."))
        return stream

    async def _leave(self, stream: Stream) -> None:
        """Close a retired stream if all was sent; reset it in any other case."""
        if self._retired and self._sender.finished:
            with trio.move_on_after(CLOSE_SECONDS):
                await stream.aclose()
                return
        stream.reset()

    async def _send(self, stream: Stream) -> None:
        try:
            await self._sender.run(stream)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self._end(self._lost())
        except DeadlineExceeded as error:
            self._end(error)

    async def _receive(self, stream: Stream) -> None:
        parser = FrameParser(self._frame_limits, self._read_head)
        reader = MessageReader(
            stream, parser, self._state.limits.stall_seconds, self._state.unfinished
        )
        judged_at_once = min(self._state.guard.judged_at_once, MOST_AT_ONCE)
        try:
            while (batch := await reader.next_batch()) is not None:
                for number, (kind, head, body) in enumerate(batch, 1):
                    self._deliver(kind, head, body)
                    if number % judged_at_once == 0:
                        await trio.lowlevel.checkpoint()
            self._end(self._lost())
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self._end(self._lost())
        except DeadlineExceeded as error:
            self._end(error)
        except RemoteMisbehaviour as error:
            self._blame(error)
        finally:
            reader.end()

    def _read_head(self, kind: int, head: bytes, body_length: int) -> ResponseHead | ErrorHead:
        if kind == ERROR:
            error = _ERROR_HEAD.decode(head)
            self._check_id(error.id)
            return error
        response = _RESPONSE_HEAD.decode(head)
        self._check_id(response.id)
        waiting = self._waiting.get(response.id)
        limit = waiting.method.response_limit_bytes if waiting else self._largest_response
        if body_length > limit:
            raise LimitExceeded(
                f"A response declares {body_length:,} bytes; the method allows {limit:,}."
            )
        return response

    def _check_id(self, call_id: int) -> None:
        if call_id > self._last_id:
            raise MalformedMessage(f"An answer came for call {call_id}, which was never made.")

    def _deliver(self, kind: int, head: ResponseHead | ErrorHead, body: bytes) -> None:
        waiting = self._waiting.pop(head.id, None)
        if waiting is not None:
            trio.lowlevel.reschedule(waiting.task, self._judge(waiting, kind, head, body))
        elif head.id == 0:  # the peer ends the stream and gives the reason
            if kind != ERROR:
                raise MalformedMessage("A response came for call 0, which cannot be made.")
            exchange = Exchange(self.peer, self.protocol, "")
            self._end(received_error(self._state.guard, exchange, body, head.envelope))
        # else the call was cancelled meanwhile, and its answer is late

    def _judge(
        self, waiting: _Waiting, kind: int, head: ResponseHead | ErrorHead, body: bytes
    ) -> outcome.Outcome[bytes]:
        """Check an answer; return the body of a valid response, or the error to raise.

        This runs in the reader, not in the task of the call. So a call whose answer is verified can
        go on and make its next call while the other answers of the batch are still being checked.
        """
        guard = self._state.guard
        try:
            if kind == ERROR:
                error = received_error(
                    guard, waiting.exchange, body, head.envelope, waiting.method.errors
                )
                self._state.accepted(waiting.exchange)
                return outcome.Error(error)
            guard.open(waiting.exchange, Part.RESPONSE, body, head.envelope)
            self._state.accepted(waiting.exchange)
        except PotluckError as error:
            if isinstance(error, RemoteMisbehaviour):
                self._blame(error)
            return outcome.Error(error)
        return outcome.Value(body)

    def _end(self, failure: PotluckError) -> None:
        """End the stream and all waiting calls. The first failure given is the reason."""
        if self._failure is None:
            self._failure = failure
            self._scope.cancel()

    def _blame(self, misbehaviour: RemoteMisbehaviour) -> None:
        """End the stream because the peer broke the protocol on it."""
        if self._failure is None:
            self._state.misbehaved(self.peer, self.protocol, misbehaviour)
            self._end(misbehaviour)

    def _close(self) -> None:
        """Send what is queued, end our side, and give the peer a moment to end its side."""
        self._retired = True
        if self._opened.is_set():
            self._sender.finish()
            self._scope.deadline = trio.current_time() + CLOSE_SECONDS
        else:
            self._scope.cancel()

    def _fail_all(self) -> None:
        failure = self._failure or self._lost()
        waiting, self._waiting = self._waiting, {}
        for call in waiting.values():
            error = again(failure)
            error.surely_not_executed = not self._sender.was_sent(call.ticket)
            trio.lowlevel.reschedule(call.task, outcome.Error(error))
        self._sender.abandon()
        self._turn.unpark_all()

    def _lost(self) -> Unreachable:
        return Unreachable(
            f"The stream to {self.peer} was lost.",
            why="The other side went away or closed it, or the link broke.",
            advice="The next call opens it again.",
        )


def milliseconds_until(deadline: float) -> int:
    """The time left until a deadline, as sent on the wire; at least 1."""
    left = (deadline - trio.current_time()) * 1000.0
    return 1 if left < 1.0 else int(min(left, 0x7FFF_FFFF))


def _not_sent(failure: PotluckError) -> PotluckError:
    error = again(failure)
    error.surely_not_executed = True
    return error


# The answering side: one stream that a peer opened, with many calls on it at once.
#
#     reader: checks every message of a batch (limits, envelope, types) and starts its handler
#     handler: an async function runs in a task of its own, under the caller's deadline;
#              a plain function runs in the reader, at a third of the cost: right for answers
#              from memory
#     sender: sends answers that are ready at the same time together
#
# If a caller cancels, goes away or runs out of time, its handler is cancelled. If a peer does not
# read its answers, we stop reading its requests. If a peer breaks the protocol, it is told why (an
# ERROR for id 0, best effort), loses the stream, and is avoided for a while.
#
# An exception of a handler is not the peer's fault. It ends only its own call.


log = logging.getLogger("potluck.rpc")

FAREWELL_SECONDS = 1.0  # to tell a peer why it is dropped; it may not be reading

Handler = Callable[[Caller, Any], Any]

_REQUEST_HEAD = message_type(RequestHead)
_CANCEL_HEAD = message_type(CancelHead)


@dataclass(frozen=True)
class ServedMethod:
    """A method with its handler. `is_async`: the handler is async."""

    method: Method[Any, Any]
    handler: Handler
    is_async: bool


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
        self._may_be_cancelled = MOST_UNKNOWN_CANCELLED
        """How many more cancels than requests may still come."""
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
        """Stop at once and cancel the running handlers."""
        self._scope.cancel()

    def end_with(self, error: PotluckError) -> None:
        """Stop at once, cancel the running handlers, and tell the peer why."""
        if self._handlers is None:
            self._scope.cancel()
        else:
            self._handlers.cancel_scope.cancel()
            self._say_farewell(error)

    async def run(self, already_read: bytes) -> None:
        """Answer until the peer ends its side and every call is answered, or the stream breaks."""
        with self._scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._send)
                async with trio.open_nursery() as self._handlers:
                    await self._receive(already_read, self._handlers)
                self._sender.finish()
        if not self._sender.finished:  # it may have stopped inside a frame: an end there is blamed
            self._stream.reset()

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
        reader = MessageReader(
            self._stream, parser, self._state.limits.stall_seconds, self._state.unfinished
        )
        judged_at_once = min(self._state.guard.judged_at_once, MOST_AT_ONCE)
        try:
            while (batch := await reader.next_batch(already_read)) is not None:
                already_read = b""
                self.last_used = trio.current_time()
                for number, (_kind, head, body) in enumerate(batch, 1):
                    if number % judged_at_once == 0:
                        await trio.lowlevel.checkpoint()
                    if isinstance(head, CancelHead):
                        self._may_be_cancelled -= 1
                        if self._may_be_cancelled < 0:
                            raise MalformedMessage("More calls are cancelled than were made.")
                        self._cancel(head.id)
                    else:
                        self._may_be_cancelled += 1
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
        finally:
            reader.end()

    def _say_farewell(self, error: PotluckError) -> None:
        """Tell the peer why the stream ends. Give up if it does not read."""
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
        if scope is not None:  # else already answered: the cancel crossed the answer
            self._state.counts.requests_cancelled += 1
            self._cancelled_lately = True
            scope.cancel()

    async def _let_cancelled_end(self) -> None:
        """Let cancelled handlers end, so that they are no longer counted.

        Requests and the cancels of earlier ones come in one batch: a peer that cancels and asks
        again is within the limits. A handler runs in the turn after the next at the latest. One
        that does not end when cancelled is still counted.
        """
        self._cancelled_lately = False
        for _ in range(2):
            await trio.lowlevel.checkpoint()

    async def _pause(self) -> None:
        """Stop reading for a while from a peer that was refused again and again."""
        seconds, self._pause_seconds = self._pause_seconds, 0.0
        await trio.sleep(seconds)

    def _take(self, head: RequestHead, body: bytes, handlers: trio.Nursery) -> None:
        """Check a request, then answer it or start its handler."""
        if head.id == 0 or head.id in self._running:
            raise MalformedMessage(f"The id {head.id} of a request is zero or already in use.")
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
            if served is None:  # told only to peers that may ask, sealed for this request
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
        if not served.is_async:
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
        if known_error(error) is None:
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
