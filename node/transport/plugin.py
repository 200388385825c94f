"""Giving a py-libp2p host our Noise and our Yamux, without a fork.

    host = new_host(key_pair=key_pair, sec_opt=security_options(key_pair))
    nursery.start_soon(install_muxer(host).run)

Security transports are an argument of the library; the muxer is not: libp2p 0.8.1 constructs its
own Yamux class by name (stream_muxer/muxer_multistream.py, `new_conn`). So the host's muxer
negotiation is replaced by one that offers Yamux alone and constructs ours. They share one clock
for their keep-alives (beats.py), which somebody has to run as long as the host lives.

Easy to get wrong: `install_muxer` comes before the host listens or dials; connections that exist
keep the muxer they have.
"""

from __future__ import annotations

from typing import Any

from libp2p.abc import IHost, IMuxedConn, ISecureConn
from libp2p.crypto.keys import KeyPair
from libp2p.crypto.x25519 import create_new_key_pair as create_x25519_key_pair
from libp2p.peer.id import ID
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE_PROTOCOL
from libp2p.stream_muxer.muxer_multistream import MuxerMultistream
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX_PROTOCOL

from node.transport.allocator import keep_freed_memory_at_hand
from node.transport.beats import Beats
from node.transport.connection import YamuxConnection, beats_for
from node.transport.noise import NoiseTransport
from node.transport.settings import YamuxSettings


def security_options(libp2p_key_pair: KeyPair) -> dict[str, Any]:
    """What `new_host(sec_opt=...)` wants: Noise and nothing else.

    Without it the library also offers plaintext and secio.
    """
    static_key = create_x25519_key_pair().private_key
    return {NOISE_PROTOCOL: NoiseTransport(libp2p_key_pair, noise_privkey=static_key)}


class YamuxNegotiation(MuxerMultistream):  # type: ignore[misc]  # the library is untyped here
    """Agrees on /yamux/1.0.0 with the peer and makes a YamuxConnection."""

    def __init__(self, negotiate_timeout: int, settings: YamuxSettings, beats: Beats) -> None:
        super().__init__({YAMUX_PROTOCOL: YamuxConnection}, negotiate_timeout)
        self._settings = settings
        self._beats = beats

    async def new_conn(self, conn: ISecureConn, peer_id: ID) -> IMuxedConn:
        protocol, _ = await self._selector.select(conn, conn.is_initiator, self.negotiate_timeout)
        connection = YamuxConnection(conn, peer_id, self._settings, self._beats)
        return self._annotate_connection(connection, conn, protocol)


def install_muxer(host: IHost, settings: YamuxSettings | None = None) -> Beats:
    """Make this host's coming connections use our Yamux. The host must use `security_options`.

    Returns the clock of their keep-alives: run it, or no connection notices silence.
    """
    keep_freed_memory_at_hand()
    settings = settings or YamuxSettings()
    beats = beats_for(settings)
    upgrader = host.get_network().upgrader
    timeout = upgrader.muxer_multistream.negotiate_timeout
    upgrader.muxer_multistream = YamuxNegotiation(timeout, settings, beats)
    return beats
