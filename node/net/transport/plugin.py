"""Installing our Noise and our Yamux in a py-libp2p host, without a fork.

    host = new_host(key_pair=key_pair, sec_opt=security_options(key_pair))
    nursery.start_soon(install_muxer(host).run)

The library takes security transports as an argument, but not the muxer: libp2p 0.8.1 constructs its
own Yamux class by name (stream_muxer/muxer_multistream.py, `new_conn`). So the host's muxer
negotiation is replaced by one that offers only Yamux and constructs ours. All connections share one
clock for their keep-alives (keep_alive.py), which has to run as long as the host, and one budget
for unread bytes (window.py).

Call `install_muxer` before the host listens or dials: existing connections keep their muxer.
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

from node.net.transport.connection import YamuxConnection, beats_for
from node.net.transport.keep_alive import Beats
from node.net.transport.noise import NoiseTransport
from node.net.transport.settings import MIB, YamuxSettings
from node.net.transport.window import NodeBudget


def security_options(libp2p_key_pair: KeyPair) -> dict[str, Any]:
    """The argument for `new_host(sec_opt=...)`: only Noise.

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
        self._budget = NodeBudget(settings.node_unread_limit_bytes)

    async def new_conn(self, conn: ISecureConn, peer_id: ID) -> IMuxedConn:
        protocol, _ = await self._selector.select(conn, conn.is_initiator, self.negotiate_timeout)
        connection = YamuxConnection(conn, peer_id, self._settings, self._beats, self._budget)
        return self._annotate_connection(connection, conn, protocol)


def install_muxer(host: IHost, settings: YamuxSettings | None = None) -> Beats:
    """Make this host's future connections use our Yamux. The host must use `security_options`.

    Returns the clock of their keep-alives. Run it, or no connection notices silence.
    """
    keep_freed_memory_at_hand()
    settings = settings or YamuxSettings()
    beats = beats_for(settings)
    upgrader = host.get_network().upgrader
    timeout = upgrader.muxer_multistream.negotiate_timeout
    upgrader.muxer_multistream = YamuxNegotiation(timeout, settings, beats)
    return beats


# A hint to the C library's allocator before gigabytes move through it.
#
# A bulk transfer allocates and frees sixty-five kilobytes some fifteen thousand times a second. By
# default glibc returns free memory at the end of its heap to the kernel as soon as there are 128
# KiB of it, and asks for it again a moment later, with a page fault for every four kilobytes.
# Measured, that doubles the cost of decryption (0.58 instead of 0.30 CPU seconds per GB). glibc
# raises the threshold by itself, to twice the size of the largest block that it ever mapped and
# freed. A program that trains networks causes that soon, a bare node never. So we free one such
# block.
#
# This is a hint for one C library. Elsewhere it does nothing, so nothing may depend on it.


# glibc then keeps up to twice this much free memory: enough for one full stream window coming and
# going, and within what a node may cost. Smaller blocks are no longer mapped one by one.
LARGEST_BLOCK_BYTES = 16 * MIB


def keep_freed_memory_at_hand() -> None:
    """Allocate and free one large block. It is never touched, so it takes no memory."""
    block = bytes(LARGEST_BLOCK_BYTES)
    del block
