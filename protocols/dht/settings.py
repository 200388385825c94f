"""The settings of a node's directory, with its times and limits."""

from __future__ import annotations

from dataclasses import dataclass, field

from protocols.dht.lookup import ALPHA
from protocols.dht.publisher import PublishingSettings
from protocols.dht.routing import REFRESH_SECONDS, K
from protocols.dht.storage import StorageLimits


@dataclass(frozen=True)
class DhtSettings:
    """The settings of a directory. They suit a volunteer's machine; a backbone raises what it
    keeps.
    """

    bootstrap: tuple[str, ...] = ()
    """Addresses of peers to join at, each ending in /p2p/<peer id>.

    Each is tried with growing delay until it has answered. This node's own address is skipped.
    """

    client: bool = False
    """This node cannot be dialled.

    It reads and writes, keeps nothing for others, and is in nobody's table. A node without
    addresses is always a client.
    """

    tells_of_clock: bool = True
    """Warn if this machine's clock is far from swarm time.

    A member of a run gets that warning from the auth server's time, and needs it only once.
    """

    k: int = K
    """How many peers keep a slot, and how many each bucket of the routing table holds."""

    alpha: int = ALPHA
    """Requests of one lookup in flight while it is still far from its target."""

    enough_replicas: int = 2
    """The number of replicas for a reader that accepts slightly old slots."""

    enough_written: int = 5
    """A writer waits for this many replicas; the others of the k get the slot soon after.

    Losing all five in that moment is less likely than losing this node.
    """

    rest_seconds: float = 0.2
    """How long the slot for these others may wait for more slots to join it."""

    slow_seconds: float = 1.0
    """A peer that is silent for this long is not waited for if others can be asked.

    This is three round trips to the other side of the world.
    """

    call_seconds: float = 10.0
    """The timeout of a request, dialling included."""

    refresh_seconds: float = REFRESH_SECONDS
    """A part of the id space without a lookup for so long is looked up."""

    first_retry_seconds: float = 1.0
    """The delay before bootstrap begins again after all peers failed. It doubles each time."""

    longest_retry_seconds: float = 20.0
    """The limit of that delay while no peer is known; thirty times this once the swarm is joined.

    A node that had no network for long is back soon after it returns. A bootstrap peer that a
    thousand nodes wait for gets some seventy connections a second.
    """

    watch_seconds: float = 1.0
    """The delay before a watched key is read again after a change. It grows without changes."""

    longest_watch_seconds: float = 15.0
    """The limit of that delay."""

    save_seconds: float = 30.0
    """How often changes are given to the keeper: a power cut may lose as much."""

    storage: StorageLimits = field(default_factory=StorageLimits)
    publishing: PublishingSettings = field(default_factory=PublishingSettings)
