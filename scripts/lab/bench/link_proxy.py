"""A TCP proxy that makes loopback a far, narrow or broken link. For tests and for the bench.

Dial its port instead of the real one. Data is delayed and limited each way, and on command the link
stalls, swallows everything, or is cut. It needs no privileges, unlike the kernel's traffic control.
In a test, open it in the test's own nursery. For a fair measurement, run it as a process of its
own: `python -m lab.bench.link_proxy`, see `main`.

TCP ends at the proxy, on both sides. So connecting costs no round trip (the kernel accepts at
once), and bytes that the sender's kernel has taken may still be before the link. The sockets'
buffers are kept small here so that they hide as little as possible.

Each direction is a link that is slower, further away, or broken. `LinkSchedule` is the arithmetic:
when do bytes that are handed in now come out at the far end? `LinkDirection` carries bytes from one
trio stream to another by that schedule, and can be told to stall (hold everything back, in order)
or to swallow (take everything, deliver nothing).

Promises: bytes are never reordered or changed. Memory is bounded: when the queue before the
bottleneck is full, the proxy stops reading, and TCP's own back-pressure slows the sender.

Only bytes that *wait* for the bottleneck count against the queue. Those past it are the content of
a long fat pipe, and must not be throttled.
"""

from __future__ import annotations

import argparse
import socket
import struct
import sys
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trio
from trio.abc import HalfCloseableStream

from lab.bench.orders import answer, lines_of_stdin

READ_BYTES = 16 * 1024  # one piece of the schedule: 1.3 ms of a 100 Mbit/s link
DEFAULT_QUEUE_BYTES = 256 * 1024  # what a home router holds: 20 ms at 100 Mbit/s
MOST_UNDERWAY_BYTES = 64 * 1024 * 1024  # memory for one direction, whatever its rate and delay


@dataclass(frozen=True)
class LinkConditions:
    """How one direction of a link behaves. The default is a wire that costs nothing.

    `delay_seconds` is one way; a round trip costs both directions' delays. Without
    `bytes_per_second` there is no bottleneck and no queue. `burst_bytes` may pass at once after
    a pause, as through a token bucket. `queue_bytes` is how much may wait for the bottleneck.
    """

    delay_seconds: float = 0.0
    bytes_per_second: float | None = None
    burst_bytes: int = 0
    queue_bytes: int = DEFAULT_QUEUE_BYTES


class LinkSchedule:
    """When bytes arrive. Times only grow: what was handed in first arrives first."""

    def __init__(self, conditions: LinkConditions) -> None:
        self._conditions = conditions
        self._bottleneck_free_at = float("-inf")

    def arrival(self, now: float, size: int) -> float:
        """Hand in `size` bytes at `now`; the moment at which the last of them has arrived."""
        conditions = self._conditions
        if conditions.bytes_per_second is None:
            return now + conditions.delay_seconds
        credit = conditions.burst_bytes / conditions.bytes_per_second
        begin = max(self._bottleneck_free_at, now - credit)
        self._bottleneck_free_at = begin + size / conditions.bytes_per_second
        return max(now, self._bottleneck_free_at) + conditions.delay_seconds

    def room_at(self) -> float:
        """The moment from which the queue before the bottleneck has room again."""
        if self._conditions.bytes_per_second is None:
            return float("-inf")
        drain = self._conditions.queue_bytes / self._conditions.bytes_per_second
        return self._bottleneck_free_at - drain


class LinkDirection:
    """Carries one direction of one connection. `run` returns when the source's end has arrived."""

    def __init__(self, conditions: LinkConditions) -> None:
        self.bytes_taken = 0
        self.bytes_delivered = 0
        self._schedule = LinkSchedule(conditions)
        self._underway: deque[tuple[float, bytes]] = deque()  # b"" is the end
        self._underway_bytes = 0
        self._changed = trio.Event()
        self._stalled = False
        self._swallowing = False

    def stall(self) -> None:
        """Deliver nothing from now on, but lose nothing either."""
        self._stalled = True

    def swallow(self) -> None:
        """Take all data and deliver none, as when a cable was pulled unnoticed."""
        self._swallowing = True

    def resume(self) -> None:
        """Be a link again. Data that was held back goes out now; swallowed data is gone."""
        self._stalled = self._swallowing = False
        self._wake()

    async def run(self, source: HalfCloseableStream, sink: HalfCloseableStream) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._take_from, source)
            await self._deliver_to(sink)

    async def _take_from(self, source: HalfCloseableStream) -> None:
        while True:
            await trio.sleep_until(max(trio.current_time(), self._schedule.room_at()))
            while self._underway_bytes >= MOST_UNDERWAY_BYTES:
                await self._changed.wait()
            data = bytes(await source.receive_some(READ_BYTES))
            self.bytes_taken += len(data)
            if not self._swallowing:
                self._put(data)
            if not data:
                return

    def _put(self, data: bytes) -> None:
        due = self._schedule.arrival(trio.current_time(), len(data))
        self._underway.append((due, data))
        self._underway_bytes += len(data)
        self._wake()

    async def _deliver_to(self, sink: HalfCloseableStream) -> None:
        while True:
            while not self._has_something_to_deliver():
                await self._changed.wait()
            due, data = self._underway[0]
            await trio.sleep_until(due)
            if not self._has_something_to_deliver():
                continue  # it stalled meanwhile
            self._underway.popleft()
            self._underway_bytes -= len(data)
            self._wake()
            if self._swallowing:
                continue
            if not data:
                await sink.send_eof()
                return
            await sink.send_all(data)
            self.bytes_delivered += len(data)

    def _has_something_to_deliver(self) -> bool:
        return bool(self._underway) and not self._stalled

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


SOCKET_BUFFER_BYTES = 64 * 1024  # hides 5 ms of a 100 Mbit/s link on either side


@dataclass(frozen=True)
class LinkCounts:
    """The bytes since the proxy was opened, over all its connections."""

    connections: int
    open_connections: int
    bytes_there: int
    bytes_back: int


@dataclass(eq=False)
class _Connection:
    near: trio.SocketStream  # to the peer that dialled us
    there: LinkDirection
    back: LinkDirection
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)


class LinkProxy:
    """One listening port and the link behind it. Made by `open_link_proxy`."""

    def __init__(self, target: tuple[str, int], there: LinkConditions, back: LinkConditions):
        self._target = target
        self._there = there
        self._back = back
        self._ended = [0, 0]
        self._connections_ever = 0
        self._connections: set[_Connection] = set()
        self._stalled = False
        self._swallowing = False
        self.host, self.port = "127.0.0.1", 0

    def stall(self) -> None:
        """Hold everything back in both directions, on old and new connections."""
        self._stalled = True
        for direction in self._directions():
            direction.stall()

    def swallow(self) -> None:
        """Lose everything in both directions without a word, on old and new connections."""
        self._swallowing = True
        for direction in self._directions():
            direction.swallow()

    def resume(self) -> None:
        """End a stall or a swallowing. Swallowed data stays lost."""
        self._stalled = self._swallowing = False
        for direction in self._directions():
            direction.resume()

    def cut(self) -> None:
        """Reset every connection that is open now. New ones are accepted."""
        for connection in self._connections:
            connection.scope.cancel()

    def counts(self) -> LinkCounts:
        return LinkCounts(
            connections=self._connections_ever,
            open_connections=len(self._connections),
            bytes_there=self._ended[0] + sum(c.there.bytes_delivered for c in self._connections),
            bytes_back=self._ended[1] + sum(c.back.bytes_delivered for c in self._connections),
        )

    def _directions(self) -> list[LinkDirection]:
        return [way for c in self._connections for way in (c.there, c.back)]

    async def _carry(self, near: trio.SocketStream) -> None:
        connection = _Connection(near, LinkDirection(self._there), LinkDirection(self._back))
        self._connections_ever += 1
        self._connections.add(connection)
        for way in (connection.there, connection.back):
            if self._stalled:
                way.stall()
            if self._swallowing:
                way.swallow()
        try:
            with connection.scope:
                await self._carry_both_ways(connection)
        finally:
            self._connections.discard(connection)
            self._ended[0] += connection.there.bytes_delivered
            self._ended[1] += connection.back.bytes_delivered

    async def _carry_both_ways(self, connection: _Connection) -> None:
        near, far = connection.near, None
        ended_politely = False
        try:
            far = await trio.open_tcp_stream(*self._target)
            _keep_small_buffers(far)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(connection.there.run, near, far)
                nursery.start_soon(connection.back.run, far, near)
            ended_politely = True
        except* (OSError, trio.BrokenResourceError):
            # There is no listener, or one end was reset: the other end learns it by a reset, below.
            ended_politely = False
        finally:
            for stream in (near, far):
                if stream is not None:
                    if not ended_politely:
                        _reset_on_close(stream)
                    stream.socket.close()


@asynccontextmanager
async def open_link_proxy(
    target: tuple[str, int],
    there: LinkConditions,
    back: LinkConditions | None = None,
) -> AsyncIterator[LinkProxy]:
    """A proxy on a free loopback port to `target`; all connections are reset when it is left.

    `there` is the direction from the peer that dials the proxy; `back` is the same unless given.
    """
    proxy = LinkProxy(target, there, there if back is None else back)
    listeners = await trio.open_tcp_listeners(0, host=proxy.host)
    for listener in listeners:
        _keep_small_buffers(listener)
    proxy.port = listeners[0].socket.getsockname()[1]
    async with trio.open_nursery() as nursery:

        async def handle(stream: trio.SocketStream) -> None:
            await proxy._carry(stream)

        nursery.start_soon(trio.serve_listeners, handle, listeners)
        try:
            yield proxy
        finally:
            nursery.cancel_scope.cancel()


def _keep_small_buffers(endpoint: trio.SocketStream | trio.SocketListener) -> None:
    # accepted sockets inherit the listener's sizes; set before connecting, they bound the window
    endpoint.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
    endpoint.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)


def _reset_on_close(stream: trio.SocketStream) -> None:
    stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


async def _serve_commands(target: tuple[str, int], conditions: LinkConditions) -> None:
    """Say where we listen, then obey one word a line on stdin; its end is ours."""
    async with open_link_proxy(target, conditions) as proxy:
        answer({"host": proxy.host, "port": proxy.port})
        async for line in lines_of_stdin():
            word = line.strip()
            if word == "counts":
                answer(proxy.counts().__dict__)
            elif word in ("stall", "swallow", "resume", "cut"):
                getattr(proxy, word)()
            else:
                print(f"not one of stall, swallow, resume, cut, counts: {word}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m lab.bench.link_proxy",
        description="A delaying and limiting TCP proxy. Prints where it listens as JSON; then "
        "takes stall, swallow, resume, cut and counts on stdin, and ends with it.",
    )
    parser.add_argument("--target", required=True, metavar="HOST:PORT")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="one way")
    parser.add_argument("--mbit", type=float, help="megabits per second, each way")
    parser.add_argument("--burst-bytes", type=int, default=0)
    parser.add_argument("--queue-bytes", type=int, default=LinkConditions.queue_bytes)
    arguments = parser.parse_args()
    host, _, port = arguments.target.rpartition(":")
    conditions = LinkConditions(
        delay_seconds=arguments.delay_ms / 1000,
        bytes_per_second=arguments.mbit * 1e6 / 8 if arguments.mbit else None,
        burst_bytes=arguments.burst_bytes,
        queue_bytes=arguments.queue_bytes,
    )
    trio.run(_serve_commands, (host, int(port)), conditions)


if __name__ == "__main__":
    main()
