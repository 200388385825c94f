"""Our own Noise session and Yamux muxer: libp2p's bytes on the wire, several times its speed.

Read in this order: settings (every number), packets and frames (the two formats), wires and noise
(the socket, and the encryption over it), window (flow control), outgoing and receive_queue (what
waits), channel and stream (one stream), stream_table, writer, keep_alive and beats (silence),
connection (what happens), plugin (how a py-libp2p host gets it).
"""

from node.transport.connection import YamuxConnection
from node.transport.plugin import install_muxer, security_options
from node.transport.settings import YamuxSettings
from node.transport.stream import YamuxStream

__all__ = [
    "YamuxConnection",
    "YamuxSettings",
    "YamuxStream",
    "install_muxer",
    "security_options",
]
