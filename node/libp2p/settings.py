"""Every limit and time of the real network, in one documented place.

The library's own defaults are made for a node that exchanges small messages with hundreds of
strangers: rate limits, 300 connections, 256 streams. A potluck node exchanges hundreds of
megabytes with a few dozen peers that it means to keep, so there is no rate limit here at all;
what bounds a stranger's cost are counts and deadlines.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from node.transport import YamuxSettings
from node.version import VERSION

AGENT_VERSION = f"potluck/{VERSION}"


@dataclass(frozen=True)
class Libp2pSettings:
    """How the real network behaves. The defaults suit a volunteer and a small backbone alike."""

    listen_addresses: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0")
    """Where to listen; port 0 takes any free one. An IPv6 address is skipped, with a line in the
    log, on a machine without IPv6; every other address that cannot be bound is an error. Empty
    means that this node only dials."""

    announce_addresses: tuple[str, ...] = ()
    """What to tell others before the addresses we listen on: the public address of a router that
    forwards a port, or a DNS name. `/p2p/<our id>` is added where it is missing."""

    agent_version: str = AGENT_VERSION
    """What identify says that we are."""

    inbound_connections: int = 512
    """Connections that others may have open to us at once, half-made ones included. Further ones
    are closed as they arrive. Each costs about 0.15 MB idle and one file descriptor, of which
    most systems give a process 1,024."""

    inbound_connections_per_address: int = 64
    """The same from one IPv4 address or one IPv6 /64, so that one machine cannot take all of the
    above. A university behind one address is why it is not smaller. Loopback is exempt: whoever
    runs processes on this machine can exhaust it anyway, and tests run dozens of nodes on it."""

    inbound_streams_per_connection: int = 1024
    """Streams that one peer may have open to us at once; further ones are reset. Unary calls
    share one long-lived stream per protocol, so hundreds means something is wrong over there."""

    handshake_seconds: float = 10.0
    """From accepting or making a TCP connection to a link that carries streams: four round trips
    and two signatures. Somebody who sends one byte a second is gone after this."""

    dial_seconds: float = 10.0
    """For one address, from the first SYN to a link; a SYN lost twice is retried within it."""

    negotiation_seconds: float = 10.0
    """From a stream's first byte to an agreed protocol, when others open it."""

    sign_of_life_seconds: float = 5.0
    """When a second connection to a peer comes up, the first must answer a ping within this, or
    it is closed. A round trip halfway round the world with full queues is under two seconds, and
    a peer that needs longer has just shown that it has a better connection."""

    surplus_idle_seconds: float = 10.0
    """A live connection beside a better one to the same peer is closed when it has had no stream
    for this long: longer than it takes to open one, so that none is lost."""

    addresses_per_peer: int = 16
    """Addresses remembered for one peer; the newest are kept. A laptop with IPv4, IPv6, a VPN and
    a container bridge has about eight."""

    known_peers: int = 4096
    """Peers whose addresses are remembered; those not heard of for longest are forgotten. Linked
    peers are never forgotten."""

    upload_bytes_per_second: float | None = None
    """The most that is sent over all connections together, headers included; None is no limit."""

    download_bytes_per_second: float | None = None
    """The same for what is received."""

    yamux: YamuxSettings = field(default_factory=YamuxSettings)
    """Windows, queues and keep-alive of the muxer (node/transport)."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, int | float) and value <= 0:
                raise ValueError(f"{name} is {value}; limits and times are above zero")
