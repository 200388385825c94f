"""All limits and times of the real network.

The library's defaults are for a node that exchanges small messages with hundreds of strangers: rate
limits, 300 connections, 256 streams. A potluck node exchanges hundreds of megabytes with a few
dozen peers that it wants to keep. So there is no rate limit here; counts and timeouts limit the
cost of strangers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from node.net.transport import YamuxSettings
from node.net.version import VERSION

AGENT_VERSION = f"potluck/{VERSION}"


@dataclass(frozen=True)
class Libp2pSettings:
    """The settings of the real network. The defaults suit a volunteer and a small backbone."""

    listen_addresses: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0")
    """The addresses to listen on; port 0 takes any free one.

    An IPv6 address is skipped, with a log line, on a machine without IPv6. Any other address that
    cannot be bound is an error. Empty: this node only dials.
    """

    announce_addresses: tuple[str, ...] = ()
    """Addresses to announce before those that we listen on.

    For example the public address of a router that forwards a port, or a DNS name. `/p2p/<our id>`
    is added if it is missing.
    """

    agent_version: str = AGENT_VERSION
    """The agent name that identify sends."""

    inbound_connections: int = 512
    """Connections that others may have open to us at once, unfinished ones included.

    Further ones are closed as they arrive. Each costs about 0.15 MB when idle and one file
    descriptor, of which most systems give a process 1,024.
    """

    inbound_connections_per_address: int = 64
    """The same from one IPv4 address or one IPv6 /64, so that one machine cannot take all of them.

    It is not smaller because a university may be behind one address. Loopback is exempt: a user who
    runs processes on this machine can exhaust it anyway, and tests run dozens of nodes on it.
    """

    inbound_streams_per_connection: int = 1024
    """Streams that one peer may have open to us at once; further ones are reset.

    Unary calls share one long-lived stream per protocol, so a peer with hundreds has a fault.
    """

    handshake_seconds: float = 10.0
    """From accepting or making a TCP connection to a link that carries streams.

    This is four round trips and two signatures. A peer that sends one byte a second fails it.
    """

    dial_seconds: float = 10.0
    """For one address, from the first SYN to a link, with time to resend a SYN twice."""

    negotiation_seconds: float = 10.0
    """For streams that others open: from the first byte until the agreement on a protocol has been
    sent."""

    sign_of_life_seconds: float = 3.0
    """When a second connection to a peer comes up, the first must answer a ping within this time.

    Otherwise it is closed. A round trip halfway round the world with full queues is under two
    seconds, and a peer that needs longer has just shown that it has a better connection.
    """

    surplus_idle_seconds: float = 10.0
    """A live connection beside a better one is closed after so long without a stream.

    This is longer than opening a stream takes, so no stream is lost.
    """

    addresses_per_peer: int = 16
    """Addresses remembered for one peer; the newest are kept.

    A laptop with IPv4, IPv6, a VPN and a container bridge has about eight.
    """

    known_peers: int = 4096
    """Peers whose addresses are remembered; those not heard of for longest are forgotten first.

    Linked peers are never forgotten.
    """

    upload_bytes_per_second: float | None = None
    """The limit for all sending connections together, headers included; None is no limit."""

    download_bytes_per_second: float | None = None
    """The same for receiving."""

    yamux: YamuxSettings = field(default_factory=YamuxSettings)
    """Windows, queues and keep-alive of the muxer (node/net/transport)."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, int | float) and value <= 0:
                raise ValueError(f"{name} is {value}; limits and times are above zero")
