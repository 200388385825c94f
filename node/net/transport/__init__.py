"""Our own Noise session and Yamux muxer: libp2p's bytes on the wire, at several times its speed.

Read in this order: settings (every number), packets and frames (the two formats), wires and noise
(the socket, and the encryption over it), traffic (counts and limits), window (flow control),
outgoing (the send queue), incoming (what arrives, for its channel), channel and stream (one
stream), stream_table, writer, keep_alive (silence), measurement (how fast the link is), connection
(all of it together), plugin (for a py-libp2p host).
"""

from node.net.transport.connection import YamuxConnection
from node.net.transport.plugin import install_muxer, security_options
from node.net.transport.settings import YamuxSettings
from node.net.transport.stream import YamuxStream

__all__ = [
    "YamuxConnection",
    "YamuxSettings",
    "YamuxStream",
    "install_muxer",
    "security_options",
]
