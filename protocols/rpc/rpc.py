"""The calls and transfers of one node.

    async with open_rpc(network) as rpc:
        rpc.serve(ECHO, echo)                               # an async or a plain function
        answer = await rpc.call(peer, ECHO, EchoRequest(b"hello"), timeout=5)

`Rpc` finds or opens the stream for a call, counts what is in flight, and closes idle streams. Both
sides of a call are in calls.py, both sides of a transfer in transfers.py.

A call ends within its timeout, with an answer or one of our errors. The deadline is sent along, so
the other side gives up as well. Cancelling a call cancels its handler on the other side. If
`error.surely_not_executed` is true, the call can be repeated without being executed twice. Nothing
outlives the `async with`.

`timeout` covers everything, connecting included. The first call to a distant peer takes some eight
round trips; later ones take one.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import trio

from protocols.errors import (
    Busy,
    DeadlineExceeded,
    PotluckError,
    ProtocolMisuse,
    RemoteMisbehaviour,
    Unreachable,
    again,
)
from protocols.guard import Caller, Exchange, Guard, OpenGuard
from protocols.identity import PeerId
from protocols.network import LinkEvent, Network, Reach, Stream
from protocols.rpc.calls import FAREWELL_SECONDS, AnsweringStream, CallStream, ServedMethod
from protocols.rpc.frames import (
    CANCEL,
    OPEN,
    REQUEST,
    message_limit,
    read_frame_header,
    receive_frame_header,
)
from protocols.rpc.messages import Empty, encode
from protocols.rpc.method import (
    Accepted,
    BulkMethod,
    Closed,
    Closing,
    Method,
    Opening,
    Request,
    Response,
    encode_within,
)
from protocols.rpc.remote_errors import describe
from protocols.rpc.state import RpcLimits, RpcState, RpcStatistics
from protocols.rpc.transfer_streams import ServedBulk, open_transfer, refuse, serve_transfer
from protocols.rpc.transfers import BulkHandler, Transfer

log = logging.getLogger("potluck.rpc")

KNOCK = "knock"  # no peer serves this method, but the error is signed like any answer
KNOCK_SECONDS = 30.0  # connecting included; no caller waits for it
SETTLING_SECONDS = 3.0  # a hole is punched in half a second, or when the first packet is sent again
SWEEP_SECONDS = 15.0  # between searches for idle streams: a fraction of the idle limits

Handler = Callable[[Caller, Request], Awaitable[Response] | Response]


@asynccontextmanager
async def open_rpc(
    network: Network, guard: Guard | None = None, limits: RpcLimits | None = None
) -> AsyncIterator[Rpc]:
    """Run an Rpc on this network for the length of the block.

    At the end its streams are closed, its handlers cancelled and its protocols no longer served.
    Errors of the block are raised without an exception group.
    """
    failure: BaseException | None = None
    with network.link_events() as events:
        async with trio.open_nursery() as nursery:
            rpc = Rpc(network, RpcState(guard or OpenGuard(), limits or RpcLimits()), nursery)
            nursery.start_soon(rpc.sweep)
            nursery.start_soon(rpc.follow_links, events)
            try:
                yield rpc
            except BaseException as error:  # noqa: BLE001 - raised below, where no nursery wraps it
                failure = error
            rpc.close()
            nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure


class Rpc:
    """Calls and transfers with all peers of one node. `open_rpc` makes it."""

    def __init__(self, network: Network, state: RpcState, nursery: trio.Nursery) -> None:
        self._network = network
        self._state = state
        self._nursery = nursery
        self._calling: dict[tuple[PeerId, str], CallStream] = {}
        self._retiring: set[CallStream] = set()
        self._answering: set[AnsweringStream] = set()
        self._stream_scopes: set[trio.CancelScope] = set()
        self._services: dict[str, Service] = {}

    @property
    def network(self) -> Network:
        return self._network

    @property
    def guard(self) -> Guard:
        return self._state.guard

    def statistics(self) -> RpcStatistics:
        return self._state.statistics()

    def avoided_for(self, peer: PeerId) -> float:
        """Seconds for which a peer is still avoided for breaking a protocol; 0.0 if it is not."""
        return self._state.avoided_for(peer)

    # Asking

    async def call(
        self,
        peer: PeerId,
        method: Method[Request, Response],
        request: Request,
        *,
        timeout: float,
    ) -> Response:
        """Ask a peer, and return its answer.

        Raises Unreachable, ProtocolNotServed, DeadlineExceeded, Busy, Refused, HandlerFailed,
        MalformedMessage or LimitExceeded (the other side broke the protocol), or the PotluckError
        that the handler on the other side raised.
        """
        body = encode_within(f"request of {method.name}", request, method.request_limit_bytes)
        counts = self._state.counts
        if counts.calls_in_flight >= self._state.limits.calls_in_total:
            raise Busy("This node has too many calls in flight.")
        deadline = min(trio.current_time() + timeout, trio.current_effective_deadline())
        counts.calls_made += 1
        counts.calls_in_flight += 1
        try:
            with trio.CancelScope(deadline=deadline) as scope:
                response = await self._call(peer, method, body, deadline)
            if not scope.cancelled_caught:
                counts.calls_answered += 1
                return response
            counts.calls_timed_out += 1
        except trio.Cancelled:
            counts.calls_cancelled += 1
            raise
        except Exception:
            counts.calls_failed += 1
            raise
        finally:
            counts.calls_in_flight -= 1
        raise DeadlineExceeded(
            f"{peer} did not answer {method.name} within {timeout:g} seconds.",
            why="It is busy or stopped, or the link is slow or carries nothing.",
        )

    async def _call(
        self, peer: PeerId, method: Method[Request, Response], body: bytes, deadline: float
    ) -> Response:
        stream = self._call_stream(peer, method.protocol)
        was_open = stream.was_open
        try:
            return await stream.call(method, body, deadline)
        except Unreachable as error:
            if not (was_open and error.surely_not_executed):
                raise
        # the stream was dead and our request never left: try once more on a new one
        return await self._call_stream(peer, method.protocol).call(method, body, deadline)

    def _call_stream(self, peer: PeerId, protocol: str) -> CallStream:
        self._check_not_avoided(peer)
        self._check_not_shut_out(peer, protocol)
        stream = self._calling.get((peer, protocol))
        if stream is None or not stream.usable:
            if stream is not None:
                self._retire(stream)
            stream = CallStream(self._network, peer, protocol, self._state)
            self._calling[peer, protocol] = stream
            self._state.open_work.enter(peer, stream.end_with)
            self._nursery.start_soon(self._run_call_stream, stream)
        return stream

    async def _run_call_stream(self, stream: CallStream) -> None:
        try:
            await stream.run()
        except Exception:  # a bug of ours ends the calls of this stream, not the node
            log.exception("calls to %s (%s) ended by an error of our own", *stream.key)
        finally:
            self._state.open_work.leave(stream.peer, stream.end_with)
            self._retiring.discard(stream)
            if self._calling.get(stream.key) is stream:
                del self._calling[stream.key]

    def _retire(self, stream: CallStream) -> None:
        self._calling.pop(stream.key, None)
        self._retiring.add(stream)
        stream.retire()

    def _check_not_avoided(self, peer: PeerId) -> None:
        seconds = self._state.avoided_for(peer)
        if seconds > 0.0:
            error = Unreachable(
                f"{peer} is avoided for another {seconds:.0f} s.",
                why="It broke a protocol; the log has the details.",
                advice="If you run it, upgrade it. It is called again after this time.",
            )
            error.surely_not_executed = True
            raise error

    def _check_not_shut_out(self, peer: PeerId, protocol: str) -> None:
        state = self._state
        reason = state.shut_out_reason(peer)
        if reason is not None:
            if state.shut_out.may_knock(peer, trio.current_time()):
                self._nursery.start_soon(self._knock, peer, protocol)
            error = again(reason)
            error.surely_not_executed = True
            raise error

    async def _knock(self, peer: PeerId, protocol: str) -> None:
        """Send an empty request to a peer that is shut out.

        If its answer proves that it may take part again, the peer is let in.
        """
        method = Method(protocol, KNOCK, Empty, Empty)
        stream = CallStream(self._network, peer, protocol, self._state)
        self._state.open_work.enter(peer, stream.end_with)
        self._nursery.start_soon(self._run_call_stream, stream)
        with trio.move_on_after(KNOCK_SECONDS) as patience:
            try:
                await stream.call(method, encode(Empty()), patience.deadline)
            except PotluckError as error:
                log.debug("knocked at %s, which is shut out: %s", peer, error)
        stream.retire()

    @asynccontextmanager
    async def open_bulk(
        self,
        peer: PeerId,
        bulk: BulkMethod[Opening, Accepted, Closing, Closed],
        opening: Opening,
        *,
        timeout: float,
    ) -> AsyncIterator[Transfer[Accepted, Closing, Closed]]:
        """Open a bulk transfer; the block starts when the other side has accepted it.

        A relayed link that is new is given SETTLING_SECONDS to become direct.

        `timeout` is for the opening. In the block a transfer fails after `bulk.stall_seconds`
        without progress. Leaving the block before `finish` has returned resets the stream, which
        cancels the handler on the other side.
        """
        self._check_not_avoided(peer)
        self._check_not_shut_out(peer, bulk.protocol)
        with trio.move_on_after(timeout + SETTLING_SECONDS):  # then the opening fails by itself
            await self._wait_for_direct_link(peer)
        async with open_transfer(
            self._network, self._state, peer, bulk, opening, timeout
        ) as transfer:
            yield transfer

    async def _wait_for_direct_link(self, peer: PeerId) -> None:
        """Wait while a relayed link is so new that a direct one may soon replace it.

        A relay is for signalling and small calls; bulk goes through it only if nothing else can.
        """
        with self._network.link_events() as events:
            if self._network.link(peer) is None and self.needs_relay(peer):
                await self._network.connect(peer)
            while (link := self._network.link(peer)) is not None and link.reach is Reach.RELAYED:
                settled_at = link.connected_at + SETTLING_SECONDS
                if trio.current_time() >= settled_at:
                    return
                with trio.move_on_at(settled_at):
                    await events.receive()

    def needs_relay(self, peer: PeerId) -> bool:
        """Whether this peer is reached through a relay, now or, without a link, at first."""
        link = self._network.link(peer)
        if link is not None:
            return link.reach is Reach.RELAYED
        return any("/p2p-circuit" in address for address in self._network.addresses_of(peer))

    # Answering

    def serve(self, method: Method[Request, Response], handler: Handler[Request, Response]) -> None:
        """Answer this method from now on.

        An async handler runs in a task of its own. A plain function is called in the reader of the
        stream, so it must take only microseconds.
        """
        waits = inspect.iscoroutinefunction(handler)
        self._service(method.protocol).add_method(ServedMethod(method, handler, waits))

    def serve_bulk(
        self,
        bulk: BulkMethod[Opening, Accepted, Closing, Closed],
        handler: BulkHandler[Accepted, Closed, Closing, Opening],
    ) -> None:
        """Answer this kind of transfer from now on. transfers.py says how to write a handler."""
        self._service(bulk.protocol).add_bulk(ServedBulk(bulk, handler))

    def _service(self, protocol: str) -> Service:
        service = self._services.get(protocol)
        if service is None:
            self._network.serve(protocol, self._serve_stream)
            service = self._services[protocol] = Service(protocol)
        return service

    async def _serve_stream(self, stream: Stream) -> None:
        """Serve one stream that a peer opened, from its first frame to its end."""
        peer = stream.remote_peer
        if not self._state.takes_stream(peer):
            stream.reset()
            return
        with trio.CancelScope() as scope:
            self._stream_scopes.add(scope)
            try:
                await self._answer(stream)
            except RemoteMisbehaviour as error:
                self._state.misbehaved(peer, stream.protocol, error)
                exchange = Exchange(peer, stream.protocol, "")
                await refuse(stream, exchange, describe(error), self._state)
            except (trio.BrokenResourceError, trio.ClosedResourceError, DeadlineExceeded):
                stream.reset()
            finally:
                self._stream_scopes.discard(scope)
                self._state.streams.leave(peer)
        if scope.cancelled_caught:
            stream.reset()

    async def _answer(self, stream: Stream) -> None:
        service = self._services[stream.protocol]
        peer, header = stream.remote_peer, None
        with self._state.open_work.register(peer) as ending:
            with trio.move_on_after(self._state.limits.first_frame_seconds):
                header = await receive_frame_header(stream)
        if header is None or ending.error is not None:
            stream.reset()
            return
        kind, length = read_frame_header(header, service.first_frame_limits)
        if kind == OPEN:
            await serve_transfer(stream, length, service.bulks, self._state)
            return
        calls = AnsweringStream(stream, service.methods, service.request_limit, self._state)
        self._answering.add(calls)
        self._state.open_work.enter(peer, calls.end_with)
        try:
            await calls.run(header)
        finally:
            self._state.open_work.leave(peer, calls.end_with)
            self._answering.discard(calls)

    # Ending

    async def end_all_with(self, peer: PeerId, error: PotluckError) -> int:
        """End everything that is open with a peer and shut it out; return how many things ended.

        Our calls and transfers with it raise the error; its own here are cancelled, and it is told
        the error. All of that is started before this first waits. It returns when the peer was
        told, or after a second. From then on calls to this peer raise the error and its streams are
        reset, except one every few seconds on which it may show a new token. The link stays:
        `network.disconnect` closes it.

        If a handler or transfer of that peer calls this, it is ended as well.
        """
        state = self._state
        state.shut_out.shut(peer, error, trio.current_time())
        ended = state.open_work.end_all_with(peer, error)
        with trio.move_on_after(FAREWELL_SECONDS):
            await state.open_work.ended(peer)
        return ended

    def blame(self, peer: PeerId, protocol: str, error: RemoteMisbehaviour) -> None:
        """Report that a message was one that no honest peer sends.

        As after any violation, the peer is named in the log, everything open with it ends, and it
        is avoided for a while.
        """
        self._state.misbehaved(peer, protocol, error)
        self._state.open_work.end_all_with(peer, error)

    def shut_out(self, peer: PeerId) -> PotluckError | None:
        """Why a peer is shut out; None if it is not, or was let in again."""
        return self._state.shut_out_reason(peer)

    def waits_for(self, peer: PeerId) -> bool:
        """Whether a call of ours to this peer is in flight."""
        return any(
            stream.in_use and stream.peer == peer
            for stream in (*self._calling.values(), *self._retiring)
        )

    def readmit(self, peer: PeerId) -> None:
        """Talk again to a peer that was shut out."""
        self._state.shut_out.readmit(peer)

    # Housekeeping

    async def sweep(self) -> None:
        """Close streams that were idle for long."""
        limits = self._state.limits
        while True:
            await trio.sleep(SWEEP_SECONDS)
            now = trio.current_time()
            for stream in list(self._calling.values()):
                if not stream.in_use and now - stream.last_used >= limits.idle_seconds:
                    self._retire(stream)
            for answering in list(self._answering):
                idle = now - answering.last_used
                if not answering.in_use and idle >= limits.served_idle_seconds:
                    answering.end()

    async def follow_links(self, events: trio.MemoryReceiveChannel[LinkEvent]) -> None:
        """Move calls to the direct link when one appears beside a relayed one."""
        async for event in events:
            if event.was is Reach.RELAYED and event.reach is Reach.DIRECT:
                for stream in list(self._calling.values()):
                    if stream.peer == event.peer:
                        self._retire(stream)

    def close(self) -> None:
        """Stop serving, and end what is being served."""
        for protocol in self._services:
            self._network.stop_serving(protocol)
        for scope in self._stream_scopes:
            scope.cancel()


# The methods that this node answers, by protocol, with their handlers.
#
# The first frame on a stream that a peer opens decides its kind: a REQUEST makes it a stream of
# calls, an OPEN a bulk transfer. A protocol may have both.
#
# The network knows protocols, not methods: serve a protocol there once, however many methods it
# has.


class Service:
    """The methods of one protocol."""

    def __init__(self, protocol: str) -> None:
        self.protocol = protocol
        self.methods: dict[str, ServedMethod] = {}
        self.bulks: dict[str, ServedBulk] = {}
        self.request_limit = 0
        self._first_frame_limits: dict[int, int] = {}

    @property
    def first_frame_limits(self) -> Mapping[int, int]:
        """The kinds that may be the first frame of a stream, with their limits."""
        return self._first_frame_limits

    def add_method(self, served: ServedMethod) -> None:
        method = served.method
        self._check_unused(method.name)
        self.methods[method.name] = served
        self.request_limit = max(self.request_limit, method.request_limit_bytes)
        self._first_frame_limits[REQUEST] = message_limit(self.request_limit)
        self._first_frame_limits[CANCEL] = message_limit(0)

    def add_bulk(self, served: ServedBulk) -> None:
        bulk: Any = served.bulk
        self._check_unused(bulk.name)
        self.bulks[bulk.name] = served
        longest = max(each.bulk.message_limit_bytes for each in self.bulks.values())
        self._first_frame_limits[OPEN] = message_limit(longest)

    def _check_unused(self, name: str) -> None:
        if name in self.methods or name in self.bulks:
            raise ProtocolMisuse(f"{self.protocol} serves {name!r} already.")
