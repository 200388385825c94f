"""Dialling: all addresses of a peer in parallel, and one dial per peer for all callers.

    dialler = Dialler(upgrader, traffic, dial_seconds)
    address, upgraded = await dialler.race(addresses, expected)
    await dialler.prove_at("/ip4/192.0.2.1/tcp/4001", peer)

The library tries one address per transport, so one dead address hides the good ones. After a
successful dial it waits another quarter of a second (the "happy eyeballs" delay of
libp2p/network/swarm.py:936, which only a failure ends). If the one address failed, it refuses the
peer for 60 s (its negative cache, swarm.py:109). Here all addresses are tried in parallel, likelier
ones with a small head start, and a failure is not remembered. `dial_seconds` is the timeout for
TCP, and then for the handshake.

`SharedDials`: ten calls to a peer without a link make one connection, and a caller that gives up
does not cancel the dial of the others. So the dial is a task of the network's nursery. It runs
while any caller waits, and is completely cancelled before the last caller's cancellation returns.

The result is one connection, or a DialFailure for each address with the cause and the remedy. A
connection that lost the race, or was cancelled, is closed.

Silence before the TCP connection means something else than silence after it (a firewall; or another
service, or an overloaded node), so the messages differ.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

import trio

from node.net.libp2p.addresses import Address, AddressKind, likelihood, of_socket, parse
from node.net.libp2p.dial_failure import DialFailure, DialReason, of_os_error
from node.net.libp2p.host import library_id
from node.net.libp2p.upgrading import Upgraded, handshake_failure, prove, upgrade, upgrade_circuit
from node.net.transport.traffic import Traffic
from protocols.errors import MalformedMessage, PotluckError, Unreachable, again
from protocols.identity import PeerId
from protocols.network import Stream

if TYPE_CHECKING:
    from libp2p.peer.id import ID
    from libp2p.transport.upgrader import TransportUpgrader


# An address on the same continent that answers at all does so within this time; the next should not
# wait longer. RFC 8305 says 250 ms for browsers.
CONNECT_HEAD_START_SECONDS = 0.15
# After the TCP connection the machine is known to be up. So the handshake (three more round trips)
# gets longer before the next address is tried as well.
HANDSHAKE_HEAD_START_SECONDS = 1.0
# For all others together, before an address that did not keep what it promised.
LATER_SECONDS = 3.0
MOST_OF_A_NAME = 8  # addresses: its owner is a stranger, and a server has two
MOST_NAMES = 2  # of one peer
# A stranger's name server may not answer, and a look-up cannot be ended: each keeps a thread for
# up to a minute. Other work must not wait for these threads.
LOOKUPS = trio.CapacityLimiter(8)

T = TypeVar("T")


def in_order(addresses: Sequence[Address]) -> list[Address]:
    """The order of the head starts; equally likely addresses keep the given order."""
    return sorted(addresses, key=likelihood)


class DialAttempt:
    """The state of one attempt during the race."""

    def __init__(self) -> None:
        self.connected_or_ended = trio.Event()
        self.ended = trio.Event()

    def connected(self) -> None:
        self.connected_or_ended.set()

    def end(self) -> None:
        self.connected_or_ended.set()
        self.ended.set()


class Race(Generic[T]):
    """Attempts at several addresses; the first to succeed wins.

    `attempt(address, on_connected)` makes a connection or raises DialFailure. It calls
    `on_connected` when the TCP connection is made. `discard` closes a connection that came second.
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

    async def run(
        self, addresses: Sequence[Address], later: Sequence[Address] = ()
    ) -> tuple[Address, T] | list[DialFailure]:
        """The winner with its address, or every address's failure, in their order.

        `later` are tried when the others have failed, or LATER_SECONDS after the last of them.
        """
        states: list[DialAttempt] = []
        try:
            async with trio.open_nursery() as nursery:
                for place, address in enumerate((*addresses, *later)):
                    if place == len(addresses):
                        with trio.move_on_after(LATER_SECONDS):
                            for state in states:
                                await state.ended.wait()
                    states.append(DialAttempt())
                    nursery.start_soon(self._run_one, place, address, states[-1], nursery)
                    await self._give_head_start(states[-1])
        except BaseException:
            with trio.CancelScope(shield=True):
                for _, connection in self._winner:
                    await self._discard(connection)
            raise
        if self._winner:
            return self._winner[0]
        return [failure for _, failure in sorted(self._failures, key=lambda item: item[0])]

    async def _run_one(
        self, place: int, address: Address, state: DialAttempt, nursery: trio.Nursery
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

    async def _give_head_start(self, state: DialAttempt) -> None:
        """Wait until it is time for the next attempt."""
        with trio.move_on_after(CONNECT_HEAD_START_SECONDS) as waiting:
            await state.connected_or_ended.wait()
        if not waiting.cancelled_caught:
            with trio.move_on_after(HANDSHAKE_HEAD_START_SECONDS):
                await state.ended.wait()


async def connect_tcp(address: Address) -> trio.SocketStream:
    """Make a TCP connection to one address; DialFailure with the reason if that fails."""
    if address.kind is AddressKind.CIRCUIT:
        raise DialFailure(address.text, DialReason.OTHER_KIND, "an address through a relay")
    if address.kind is AddressKind.OTHER:
        raise DialFailure(address.text, DialReason.OTHER_KIND, "not an address for TCP")
    try:
        if address.kind is AddressKind.IP:
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
    """Look the name up, and race its addresses of both versions of IP."""
    family = {0: socket.AF_UNSPEC, 4: socket.AF_INET, 6: socket.AF_INET6}[address.family]
    try:
        host = address.host.encode("idna")
    except UnicodeError as error:
        raise DialFailure(address.text, DialReason.OTHER_KIND, "not a valid name") from error
    look_up = partial(
        socket.getaddrinfo, host, address.port, family=family, type=socket.SOCK_STREAM
    )
    found = await trio.to_thread.run_sync(
        look_up,
        limiter=LOOKUPS,
        abandon_on_cancel=True,  # type: ignore[call-arg] # the stubs are of an older trio
    )
    places = in_order([parse(of_socket(str(to[0]), int(to[1]))) for *_, to in found])

    async def attempt(place: Address, _on_connected: Callable[[], None]) -> trio.SocketStream:
        return await connect_tcp(place)

    outcome = await Race(attempt, trio.aclose_forcefully).run(places[:MOST_OF_A_NAME])
    if isinstance(outcome, list):
        raise DialFailure(address.text, outcome[-1].reason, outcome[-1].detail)
    return outcome[1]


class Dialler:
    """Dials for one network; the handshakes count in its traffic.

    `open_circuit` asks the relay of an address for a stream to that peer.
    """

    def __init__(
        self,
        upgrader: TransportUpgrader,
        traffic: Traffic,
        dial_seconds: float,
        open_circuit: Callable[[Address, PeerId], Awaitable[Stream]],
    ) -> None:
        self._upgrader = upgrader
        self._traffic = traffic
        self._dial_seconds = dial_seconds
        self._open_circuit = open_circuit

    async def race(
        self, addresses: Sequence[Address], expected: ID, later: Sequence[Address] = ()
    ) -> tuple[Address, Upgraded] | list[DialFailure]:
        """The first connection to this peer with its address, or the failure of each address.

        `later` are tried after the others.
        """

        async def attempt(address: Address, on_connected: Callable[[], None]) -> Upgraded:
            return await self.connect(address, expected, on_connected)

        names = [one for one in addresses if one.kind is AddressKind.NAME]
        left_out = frozenset(names[MOST_NAMES:])
        return await Race(attempt, _discard).run(
            [one for one in addresses if one not in left_out], later
        )

    async def connect(
        self, address: Address, expected: ID, on_connected: Callable[[], None]
    ) -> Upgraded:
        """Connect to this peer at this address; call `on_connected` after the TCP connection."""
        connected = False
        try:
            with trio.fail_after(self._dial_seconds):
                if address.kind is AddressKind.CIRCUIT:
                    circuit = await self._open_circuit(address, PeerId(expected.to_base58()))
                    connected = True
                    on_connected()
                    return await upgrade_circuit(
                        self._upgrader, circuit, address.text, initiator=True, peer=expected
                    )
                stream = await connect_tcp(address)
                connected = True
                on_connected()
                return await upgrade(
                    self._upgrader, stream, self._traffic, initiator=True, peer=expected
                )
        except DialFailure:
            raise
        except Unreachable as error:  # of the relay
            raise DialFailure(
                address.text, DialReason.RELAY, (error.why or error.what).rstrip(".")
            ) from error
        except trio.TooSlowError:
            seconds = f"{self._dial_seconds:g} s"
            detail = f"no handshake in {seconds}" if connected else f"timed out after {seconds}"
            raise DialFailure(address.text, DialReason.TIMED_OUT, detail) from None
        except Exception as error:
            raise handshake_failure(address.text, error) from error

    async def prove_at(self, text: str, peer: PeerId) -> None:
        """Check that this peer answers at this address, without making a link."""
        try:
            address = parse(text)
            with trio.fail_after(self._dial_seconds):
                stream = await connect_tcp(address)
                await prove(self._upgrader, stream, self._traffic, library_id(peer))
        except DialFailure:
            raise
        except MalformedMessage as error:
            raise DialFailure(text, DialReason.OTHER_KIND, "not an address") from error
        except trio.TooSlowError:
            raise DialFailure(text, DialReason.TIMED_OUT, "no handshake in time") from None
        except Exception as error:
            raise handshake_failure(text, error) from error


async def _discard(upgraded: Upgraded) -> None:
    """Close a connection that lost the race. It was never used, so it needs no goodbye."""
    await trio.aclose_forcefully(upgraded.below)


Dialled = TypeVar("Dialled")


class _Dial(Generic[Dialled]):
    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self.ended = trio.Event()
        self.waiting = 0
        self.result: Dialled | None = None
        self.error: PotluckError | None = None


class SharedDials(Generic[Dialled]):
    """Dials in progress, by peer.

    Invariant: each has at least one waiter, or is being cancelled and no longer in the table.
    """

    def __init__(
        self,
        dial: Callable[[PeerId], Awaitable[Dialled]],
        discard: Callable[[Dialled], Awaitable[None]],
        nursery: trio.Nursery,
    ) -> None:
        self._dial = dial
        self._discard = discard
        self._nursery = nursery
        self._under_way: dict[PeerId, _Dial[Dialled]] = {}

    async def reach(self, peer: PeerId) -> Dialled:
        """Join the dial to this peer, or begin one; every waiter gets its error."""
        dial = self._under_way.get(peer)
        if dial is None:
            dial = self._under_way[peer] = _Dial()
            self._nursery.start_soon(self._run, peer, dial)
        dial.waiting += 1
        try:
            await dial.ended.wait()
        except BaseException:
            dial.waiting -= 1
            if not dial.waiting:
                await self._call_off(peer, dial)
            raise
        dial.waiting -= 1
        if dial.error is not None:
            raise again(dial.error)
        if dial.result is None:
            raise trio.ClosedResourceError("the network has ended")
        return dial.result

    async def _call_off(self, peer: PeerId, dial: _Dial[Dialled]) -> None:
        """Cancel a dial without waiters. This is quick: everything in a dial closes by force."""
        self._forget(peer, dial)
        dial.scope.cancel()
        with trio.CancelScope(shield=True):
            await dial.ended.wait()
            if dial.result is not None:  # it succeeded at the moment of the cancellation
                await self._discard(dial.result)

    async def _run(self, peer: PeerId, dial: _Dial[Dialled]) -> None:
        try:
            with dial.scope:
                dial.result = await self._dial(peer)
        except PotluckError as error:
            dial.error = error
        finally:
            self._forget(peer, dial)
            dial.ended.set()

    def _forget(self, peer: PeerId, dial: _Dial[Dialled]) -> None:
        if self._under_way.get(peer) is dial:
            del self._under_way[peer]
