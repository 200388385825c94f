"""The real network: TCP, with our own Noise and Yamux under py-libp2p.

`open_libp2p_network` opens it. It implements the contract in protocols/network.py, and everything
above uses only that. Inside, `libp2p` has the library's parts, corrected where necessary, and
`transport` the encrypted, muxed connection. The version and the machine's two clocks are here
because all layers need them.
"""

from __future__ import annotations

from protocols.faces import lazily

TYPE_CHECKING = False
if TYPE_CHECKING:
    from node.net.clocks import Clocks, machine_clocks
    from node.net.libp2p.listener import check_listening
    from node.net.network import Libp2pSettings, open_libp2p_network
    from node.net.version import VERSION

__all__ = [
    "VERSION",
    "Clocks",
    "Libp2pSettings",
    "check_listening",
    "machine_clocks",
    "open_libp2p_network",
]

__getattr__ = lazily(
    __name__,
    {
        "clocks": ("Clocks", "machine_clocks"),
        "libp2p.listener": ("check_listening",),
        "network": ("Libp2pSettings", "open_libp2p_network"),
        "version": ("VERSION",),
    },
)
