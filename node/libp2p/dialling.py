"""Reach a peer at whichever of its addresses works, soonest first.

The library tries one address per transport, so one dead address hides the good ones, waits a
quarter of a second after a dial that has already succeeded (the "happy eyeballs" delay of
libp2p/network/swarm.py:936, left only by a failure), and then refuses the peer for 60 s when the
one address failed (its negative cache, swarm.py:109). Here all addresses are raced side by side,
likelier ones with a small head start, and a failure is not remembered.

Promises: one connection comes out, or a failure for each address; what lost the race, or was
cancelled at any point of it, is closed.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

import trio

from node.libp2p.addresses import Address, Kind, likelihood
from node.libp2p.dial_failure import DialFailure, DialReason, of_os_error

# An address that answers at all on the same continent does so within this; a later one should
# not wait longer for it. RFC 8305 says 250 ms for people's browsers.
CONNECT_HEAD_START_SECONDS = 0.15
# Once TCP stands, somebody is there: the handshake (three more round trips) gets longer before
# the next address is tried as well.
HANDSHAKE_HEAD_START_SECONDS = 1.0

T = TypeVar("T")


def in_order(addresses: Sequence[Address]) -> list[Address]:
    """The order of the head starts; among equally likely addresses the given order stands."""
    return sorted(addresses, key=likelihood)


class Attempt:
    """What the race has to know of one attempt while it runs."""

    def __init__(self) -> None:
        self.connected_or_ended = trio.Event()
        self.ended = trio.Event()

    def connected(self) -> None:
        self.connected_or_ended.set()

    def end(self) -> None:
        self.connected_or_ended.set()
        self.ended.set()


class Race(Generic[T]):
    """Attempts at several addresses, of which the first to succeed wins.

    `attempt(address, on_connected)` makes a connection or raises DialFailure; it calls
    `on_connected` when TCP stands. `discard` closes a connection that came second.
    """

    def __init__(
        self,
        attempt: Callable[[Address, Callable[[], None]], Awaitable[T]],
        discard: Callable[[T], Awaitable[None]],
    ) -> None:
        self._attempt = attempt
        self._discard = discard
        self._failures: list[tuple[int, DialFailure]] = []
        self._winner: list[tuple[Address, T]] = []

    async def run(self, addresses: Sequence[Address]) -> tuple[Address, T] | list[DialFailure]:
        """The winner with its address, or every address's failure in the order of `addresses`."""
        try:
            async with trio.open_nursery() as nursery:
                for place, address in enumerate(addresses):
                    state = Attempt()
                    nursery.start_soon(self._run_one, place, address, state, nursery)
                    await self._give_head_start(state)
        except BaseException:
            with trio.CancelScope(shield=True):
                for _, connection in self._winner:
                    await self._discard(connection)
            raise
        if self._winner:
            return self._winner[0]
        return [failure for _, failure in sorted(self._failures, key=lambda item: item[0])]

    async def _run_one(
        self, place: int, address: Address, state: Attempt, nursery: trio.Nursery
    ) -> None:
        try:
            connection = await self._attempt(address, state.connected)
        except DialFailure as failure:
            self._failures.append((place, failure))
        else:
            if self._winner:  # both ended in the same pass of the scheduler
                with trio.CancelScope(shield=True):
                    await self._discard(connection)
            else:
                self._winner.append((address, connection))
                nursery.cancel_scope.cancel()
        finally:
            state.end()

    async def _give_head_start(self, state: Attempt) -> None:
        """Wait until the next attempt should begin beside this one."""
        with trio.move_on_after(CONNECT_HEAD_START_SECONDS) as waiting:
            await state.connected_or_ended.wait()
        if not waiting.cancelled_caught:
            with trio.move_on_after(HANDSHAKE_HEAD_START_SECONDS):
                await state.ended.wait()


async def connect_tcp(address: Address) -> trio.SocketStream:
    """A TCP connection to one address; DialFailure with the reason when there is none."""
    if address.kind is Kind.CIRCUIT:
        raise DialFailure(
            address.text, DialReason.OTHER_KIND, "an address through a relay cannot be dialled yet"
        )
    if address.kind is Kind.OTHER:
        raise DialFailure(address.text, DialReason.OTHER_KIND, "not an address for TCP")
    try:
        if address.kind is Kind.IP:
            return await _connect_ip(address.host, address.port, address.family)
        return await _connect_name(address)
    except OSError as error:
        raise of_os_error(address.text, error) from error


async def _connect_ip(host: str, port: int, version: int) -> trio.SocketStream:
    family = socket.AF_INET if version == 4 else socket.AF_INET6
    connection = trio.socket.socket(family, socket.SOCK_STREAM)
    try:
        await connection.connect((host, port))
        return trio.SocketStream(connection)
    except BaseException:
        connection.close()
        raise


async def _connect_name(address: Address) -> trio.SocketStream:
    """Look the name up and try what it stands for, one after the other."""
    family = {0: socket.AF_UNSPEC, 4: socket.AF_INET, 6: socket.AF_INET6}[address.family]
    found = await trio.socket.getaddrinfo(
        address.host, address.port, family=family, type=socket.SOCK_STREAM
    )
    last_error: OSError | None = None
    for _, _, _, _, (host, port, *_) in found:
        try:
            return await _connect_ip(str(host), int(port), 6 if ":" in str(host) else 4)
        except OSError as error:
            last_error = error
    raise last_error or socket.gaierror(socket.EAI_NONAME, "the name stands for no address")
