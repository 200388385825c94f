"""Agree on security and on the muxer in one round trip each.

Before a connection carries streams, multistream-select runs twice: in the clear for the security
protocol, and inside Noise for the muxer. The library takes two round trips for each
(libp2p/protocol_muxer/generic_selector.py:78-111), though either time we offer exactly one
protocol and know what the answer must be. With header and proposal sent together a connection
costs four round trips (TCP, Noise chosen, Noise, Yamux chosen) instead of six.

It also keeps strangers out of the library's reader, which is unbounded up to four gigabytes and
raises UnicodeDecodeError: on this path anybody who finds the port speaks to us.
"""

from __future__ import annotations

from typing import Any, Protocol

from libp2p.protocol_muxer.exceptions import MultiselectError
from libp2p.transport.upgrader import TransportUpgrader

from node.libp2p import negotiation
from protocols.errors import RemoteMisbehaviour


class LibraryConnection(Protocol):
    """A raw or a secured connection, as the library has them."""

    async def read(self, n: int | None = None) -> bytes: ...

    async def write(self, data: bytes) -> None: ...


class _Readable:
    """The library's reading and writing under the names that `negotiation` uses."""

    def __init__(self, connection: LibraryConnection) -> None:
        self.receive_some = connection.read
        self.send_all = connection.write


class OneRoundTripSelector:
    """Stands where the library has its GenericMultistreamSelector. Offers one protocol."""

    def __init__(self, handlers: dict[Any, Any]) -> None:
        ((self._protocol, self._handler),) = handlers.items()
        self.handlers = handlers

    async def select(
        self,
        connection: LibraryConnection,
        is_initiator: bool,
        negotiate_timeout: float = 0,  # noqa: ARG002
    ) -> tuple[Any, Any]:
        """(protocol, handler), or the library's MultiselectError.

        The deadline is the caller's: it covers the whole of a connection's handshakes.
        """
        stream = _Readable(connection)
        name = str(self._protocol).encode()
        try:
            if is_initiator:
                agreed = await negotiation.propose(stream, name)
            else:
                agreed = await negotiation.answer(stream, (name,)) is not None
        except RemoteMisbehaviour as error:
            raise MultiselectError(str(error)) from error
        if not agreed:
            raise MultiselectError(f"the other side does not offer {self._protocol}")
        return self._protocol, self._handler


def speed_up(upgrader: TransportUpgrader) -> None:
    """Replace both selectors of an upgrader that offers one security and one muxer."""
    for part in (upgrader.security_multistream, upgrader.muxer_multistream):
        part._selector = OneRoundTripSelector(dict(part._selector.handlers))
