"""Where lookups begin: at those in the routing table who are closest, and how good they are."""

from __future__ import annotations

from collections.abc import Sequence

import trio

from protocols.dht.contacts import Contact
from protocols.dht.lookup import Lookup
from protocols.dht.state import DhtState

# How far out the k-th nearest of evenly spread points lies differs by chance: by less than this
# factor in all but one of thousands of cases. A table that holds every second peer of that part
# of the swarm passes as well; what it does not know, it is told.
NEAR_ENOUGH = 4


def seeds_for(state: DhtState, target: int) -> list[Contact]:
    """Those of our table that are closest; the ones that failed only where there is nobody else."""
    state.table.looked_up(target, trio.current_time())
    return state.table.closest(target) or state.table.closest(target, even_failing=True)


def lookup_from(
    state: DhtState, target: int, seeds: Sequence[Contact], k: int | None = None
) -> Lookup:
    settings = state.settings
    return Lookup(target, state.own_id, seeds, settings.k if k is None else k, settings.alpha)


def own_radius(state: DhtState) -> int:
    """How far the k closest to us are; 0 where there are none."""
    around_us = state.table.closest(state.own_id)
    return around_us[-1].node_id ^ state.own_id if around_us else 0


def knows_well(state: DhtState, target: int, radius: int) -> bool:
    """Whether our table seems to hold the peers that are closest to this target; `radius` is our
    own.

    Ids are spread evenly, so the k closest to any target are about as far from it as the k
    closest to us are from us; and those we know. Then there is no need to look for closer ones
    before speaking to these: if there are any, these will tell us.
    """
    closest = state.table.closest(target)
    if len(closest) < state.settings.k:
        return True
    return (closest[-1].node_id ^ target) <= NEAR_ENOUGH * radius
