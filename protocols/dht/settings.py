"""How a node takes part in the directory, and the figures that time and bound it."""

from __future__ import annotations

from dataclasses import dataclass, field

from protocols.dht.lookup import ALPHA
from protocols.dht.publishing import PublishingSettings
from protocols.dht.quotas import StorageLimits
from protocols.dht.routing import REFRESH_SECONDS, K


@dataclass(frozen=True)
class DhtSettings:
    """Defaults suit a volunteer's machine; a backbone raises what it keeps."""

    bootstrap: tuple[str, ...] = ()
    """Addresses of peers to join at, each ending in /p2p/<peer id>. They are tried for ever, until
    each has been met, with growing delay; a node that is named here itself is passed over."""

    client: bool = False
    """This node cannot be dialled: it reads and writes, keeps nothing for others, and is in
    nobody's table. A node without addresses is one in any case."""

    tells_of_clock: bool = True
    """Warn where this machine's clock is far from the swarm's. A member of a run is told of its
    clock by the auth server's time, and twice would be no better."""

    k: int = K
    """How many peers keep a slot, and how many each part of the routing table holds."""

    alpha: int = ALPHA
    """Questions of one lookup in flight while it is still far from its target."""

    enough_replicas: int = 2
    """A reader who is content with what is late enough has it from this many replicas."""

    enough_written: int = 5
    """A writer waits for this many replicas; the others of the k get the slot soon after. That
    all five are lost in that moment is less likely than that this node is."""

    rest_seconds: float = 0.2
    """How long these others may wait for more slots to come along."""

    slow_seconds: float = 1.0
    """A peer that has not answered for this long is not waited for where others can be asked:
    three round trips to the other side of the world."""

    call_seconds: float = 10.0
    """A question is given up after this, dialling included."""

    refresh_seconds: float = REFRESH_SECONDS
    """A part of the id space in which there was no lookup for so long is looked up."""

    first_retry_seconds: float = 1.0
    """After everybody failed, bootstrap begins again after this, then twice this, and so on,"""

    longest_retry_seconds: float = 20.0
    """up to this while nobody is known: who was without a network for long is back soon after it. A
    bootstrap peer that a thousand wait for gets some seventy connections a second. And thirty times
    this once the swarm is joined."""

    watch_seconds: float = 1.0
    """A watched key is read again after this when it has just changed, and ever more rarely while
    it does not,"""

    longest_watch_seconds: float = 15.0
    """down to this."""

    save_seconds: float = 30.0
    """How often what has changed is given to the keeper: what a power cut may cost."""

    storage: StorageLimits = field(default_factory=StorageLimits)
    publishing: PublishingSettings = field(default_factory=PublishingSettings)
