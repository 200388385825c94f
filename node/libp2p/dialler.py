"""From addresses to one connection: TCP, then the handshake, within the time that is given to both.

    dialler = Dialler(upgrader, traffic, dial_seconds)
    address, upgraded = await dialler.race(addresses, expected)
    await dialler.prove_at("/ip4/192.0.2.1/tcp/4001", peer)

Promises: what goes wrong at an address comes out as a DialFailure, which says in words what it was
and what to do; whatever is not returned is closed.

Easy to get wrong: silence before TCP stands is another thing than silence after it (a firewall; or
somebody else's service, or an overloaded node), so the two are told in different words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import trio

from node.libp2p.addresses import Address, parse
from node.libp2p.dial_failure import DialFailure, DialReason
from node.libp2p.dialling import Race, connect_tcp
from node.libp2p.host import library_id
from node.libp2p.upgrading import Upgraded, handshake_failure, prove, upgrade
from node.transport.traffic import Traffic
from protocols.errors import MalformedMessage
from protocols.identity import PeerId

if TYPE_CHECKING:
    from libp2p.peer.id import ID
    from libp2p.transport.upgrader import TransportUpgrader


class Dialler:
    """Dials for one network, whose traffic the handshakes count in."""

    def __init__(self, upgrader: TransportUpgrader, traffic: Traffic, dial_seconds: float) -> None:
        self._upgrader = upgrader
        self._traffic = traffic
        self._dial_seconds = dial_seconds

    async def race(
        self, addresses: Sequence[Address], expected: ID
    ) -> tuple[Address, Upgraded] | list[DialFailure]:
        """The first connection to this peer with its address, or every address's failure."""

        async def attempt(address: Address, on_connected: Callable[[], None]) -> Upgraded:
            return await self.connect(address, expected, on_connected)

        return await Race(attempt, _discard).run(addresses)

    async def connect(
        self, address: Address, expected: ID, on_connected: Callable[[], None]
    ) -> Upgraded:
        """A connection to this peer at this address; `on_connected` is called when TCP stands."""
        connected = False
        try:
            with trio.fail_after(self._dial_seconds):
                stream = await connect_tcp(address)
                connected = True
                on_connected()
                return await upgrade(
                    self._upgrader, stream, self._traffic, initiator=True, peer=expected
                )
        except DialFailure:
            raise
        except trio.TooSlowError:
            seconds = f"{self._dial_seconds:g} s"
            detail = f"no handshake in {seconds}" if connected else f"timed out after {seconds}"
            raise DialFailure(address.text, DialReason.TIMED_OUT, detail) from None
        except Exception as error:
            raise handshake_failure(address.text, error) from error

    async def prove_at(self, text: str, peer: PeerId) -> None:
        """Let whoever answers at this address prove to be this peer, without making a link."""
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
    """A connection that lost the race: nobody has used it, so it goes without a goodbye."""
    await trio.aclose_forcefully(upgraded.tcp)
