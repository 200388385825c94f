"""The calling side of unary calls: one long-lived stream to one peer for one protocol.

Opening a libp2p stream costs several milliseconds, a call on an open one a fraction of that. So
calls share a stream: each gets an id, all are in flight at once, answers come in any order.

    call:   seal, frame, push to the sender, wait for the task to be woken with the answer
    reader: every message that a wake-up brought finds its call by id, is judged, and wakes it

Promise: every call ends, by an answer, by its deadline, by its own cancellation (which cancels
the handler on the other side), or, when the stream is lost, with Unreachable at once; and when it
has ended nothing of it is left here.

Easy to get wrong: an answer may be under way while its call is being cancelled. Ids are never
used twice on a stream, so an answer with an old id that nobody waits for is late, and is dropped;
one with an id that was never given out is a lie.
"""

from __future__ import annotations

from typing import Any

import outcome
import trio

from protocols.errors import (
    DeadlineExceeded,
    LimitExceeded,
    MalformedMessage,
    PotluckError,
    RemoteMisbehaviour,
    Unreachable,
)
from protocols.frame_reader import MessageReader
from protocols.frame_sender import FrameSender
from protocols.guard import Exchange, Part
from protocols.identity import PeerId
from protocols.messages import (
    ERROR_BODY_LIMIT_BYTES,
    LARGEST_ID,
    CancelHead,
    ErrorHead,
    RequestHead,
    ResponseHead,
    encode,
    message_type,
)
from protocols.method import Method, Request, Response
from protocols.network import Network, Stream
from protocols.remote_errors import again
from protocols.rpc_state import RpcState
from protocols.told_errors import told
from protocols.wire import (
    CANCEL,
    ERROR,
    REQUEST,
    RESPONSE,
    FrameParser,
    message_frame,
    message_limit,
)

CLOSE_SECONDS = 1.0  # a polite close of an idle stream that takes longer becomes a reset

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
    """Our calls to one peer in one protocol. `run` lives in a task of its own."""

    def __init__(self, network: Network, peer: PeerId, protocol: str, state: RpcState) -> None:
        self.peer = peer
        self.protocol = protocol
        self.last_used = trio.current_time()
        self.was_open = False
        self._network = network
        self._state = state
        self._sender = FrameSender(state.limits.stall_seconds, state.queued)
        self._waiting: dict[int, _Waiting] = {}
        self._calls = 0  # in `call`: waiting for the opening, for their turn, or for the answer
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
        """Whether new calls may be made here."""
        return self._failure is None and not self._retired and self._last_id < LARGEST_ID

    @property
    def in_use(self) -> bool:
        return self._calls > 0

    def end_with(self, error: PotluckError) -> None:
        """End the stream at once; every call on it, waiting or in flight, raises this error."""
        self._end(error)

    def retire(self) -> None:
        """Take no new calls; close the stream when those in flight have ended."""
        self._retired = True
        if not self.in_use:
            self._close()

    async def call(
        self, method: Method[Request, Response], body: bytes, deadline: float
    ) -> Response:
        """Make one call. The caller bounds it in time; `deadline` is what the peer is told."""
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
        """Open the stream and serve the calls on it until it is lost, retired or cancelled."""
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
        """A retired stream is closed politely; any other end is a reset."""
        if self._retired:
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
        reader = MessageReader(stream, parser, self._state.limits.stall_seconds)
        judged_at_once = self._state.guard.judged_at_once
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
        elif head.id == 0:  # they end the stream, and say why
            if kind != ERROR:
                raise MalformedMessage("A response came for call 0, which cannot be made.")
            exchange = Exchange(self.peer, self.protocol, "")
            self._end(told(self._state.guard, exchange, body, head.envelope))
        # else the call was cancelled meanwhile, and its answer is late

    def _judge(
        self, waiting: _Waiting, kind: int, head: ResponseHead | ErrorHead, body: bytes
    ) -> outcome.Outcome[bytes]:
        """What a call gets: the body of a response that counts, or the error to raise.

        Here and not in the call's own task: a verified call can then go on, and make the next
        one, while the others that came with it are still to be judged.
        """
        guard = self._state.guard
        try:
            if kind == ERROR:
                error = told(guard, waiting.exchange, body, head.envelope, waiting.method.errors)
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
        """The first failure is the reason for the end of this stream and of all that wait."""
        if self._failure is None:
            self._failure = failure
            self._scope.cancel()

    def _blame(self, misbehaviour: RemoteMisbehaviour) -> None:
        """End the stream because the peer broke the protocol on it."""
        if self._failure is None:
            self._state.misbehaved(self.peer, self.protocol, misbehaviour)
            self._end(misbehaviour)

    def _close(self) -> None:
        """Send what is queued, end our side, and give the peer a moment to end its own."""
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
    """What is left of a caller's patience, as the wire says it; at least 1."""
    left = (deadline - trio.current_time()) * 1000.0
    return 1 if left < 1.0 else int(min(left, 0x7FFF_FFFF))


def _not_sent(failure: PotluckError) -> PotluckError:
    error = again(failure)
    error.surely_not_executed = True
    return error
