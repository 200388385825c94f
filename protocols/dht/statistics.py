"""What the directory did so far on this node, and what it holds."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class DhtStatistics:
    """Counts are since the directory was opened."""

    # now
    peers_in_table: int = 0
    peers_lost: int = 0
    buckets: tuple[int, ...] = ()
    slots_stored: int = 0
    keys_stored: int = 0
    bytes_stored: int = 0
    bytes_stored_limit: int = 0
    copies_cached: int = 0
    slots_published: int = 0
    clock_offset_ms: int = 0
    clock_peers: int = 0
    watched_keys: int = 0
    can_be_dialled: bool = True
    """As far as this node knows; see dialability.py."""

    # so far
    puts: int = 0
    gets: int = 0
    lookups: int = 0
    finds_sent: int = 0
    stores_sent: int = 0
    greets_sent: int = 0
    slots_sent: int = 0
    calls_failed: int = 0
    finds_served: int = 0
    stores_served: int = 0
    greets_served: int = 0
    slots_taken: int = 0
    slots_refused: dict[str, int] = field(default_factory=dict)
    """What others brought and was not taken, by reason."""
    own_slots_refused: dict[str, int] = field(default_factory=dict)
    """What others would not take from us, by reason."""
    bad_slots_read: int = 0
    slots_repaired: int = 0
    slots_handed_over: int = 0
    copies_spread: int = 0
    republished: int = 0
    peers_found_dialable: int = 0
    peers_not_dialable: int = 0
    chores_dropped: int = 0
    idle_links_closed: int = 0


def count(counts: dict[str, int], name: str) -> None:
    counts[name] = counts.get(name, 0) + 1
