"""The plan of a whole collaboration: who computes, who reduces what, and how fast that is.

DeDLOC's problem (2): as many steps per second as possible, min(Σ s_i c_i / B, 1 / T(c)). The round
T(c) is the best of plan_shares.py, or of plan_programmes.py under pairwise limits; which free c_i
become 1 is searched in plan_search.py. Beside it stand what else could have been done: all-reduce
(everybody computes, equal parts for all that can reduce) and the best parameter server.

Easy to get wrong: everything is done in the order of names and put back at the end, so the order
of the file makes no difference where several plans are equally good.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from protocols.errors import PotluckError
from protocols.moshpit.plan_programmes import (
    Links,
    binding,
    limited_seconds,
    limited_shares,
    shortest_limited_seconds,
)
from protocols.moshpit.plan_search import Choice, Collaborators, choose
from protocols.moshpit.plan_shares import Members, equal_shares


class Computes(Enum):
    """Whether a peer computes gradients: told, or for the plan to say."""

    ALWAYS = "true"
    NEVER = "false"
    AUTO = "auto"


class NobodyComputes(PotluckError):
    """There are no gradients to be averaged."""

    exit_code = 2


class NobodyReduces(PotluckError):
    """Every peer can only dial out, so nobody can be sent anything."""

    exit_code = 2


@dataclass(frozen=True)
class PlannedPeer:
    """What is known of a peer. Speeds in bytes per second."""

    name: str
    samples_per_s: float
    up: float
    down: float
    computes: Computes
    dial_out_only: bool = False


@dataclass(frozen=True)
class Collaboration:
    """What is to be planned. `limits`: (from, to) by index of `peers`, in bytes per second."""

    vector_bytes: float
    batch: float
    peers: Sequence[PlannedPeer]
    limits: Links = field(default_factory=dict)


@dataclass(frozen=True)
class Strategy:
    """Who does what, in the order of the peers; and what else could have been done."""

    fractions: tuple[float, ...]
    computes: tuple[bool, ...]
    round_seconds: float
    allreduce_seconds: float  # everybody computes, all who can reduce reduce the same
    parameter_server_seconds: float  # everybody computes, and the best single peer reduces it all
    steps_per_second: float
    samples_per_second: float


def best_strategy(collaboration: Collaboration) -> Strategy:
    """The plan. NobodyComputes or NobodyReduces where there can be none."""
    given = collaboration.peers
    order = sorted(range(len(given)), key=lambda i: given[i].name)
    place = {i: position for position, i in enumerate(order)}
    peers = _collaborators(collaboration, [given[i] for i in order])
    limits = binding(
        peers.members(()),
        {
            (place[i], place[j]): limit / collaboration.vector_bytes
            for (i, j), limit in collaboration.limits.items()
        },
    )

    def limited(computes: Choice) -> float:
        return shortest_limited_seconds(peers.members(computes), limits)

    best = choose(peers, len(limits), limited)
    members = peers.members(best.computes)
    fractions = limited_shares(members, limits)
    seconds = limited_seconds(fractions, members, limits)
    everybody = peers.members(peers.with_free(peers.free))
    plain = limited_seconds(equal_shares(peers.reduces), everybody, limits)
    served = _best_server_seconds(everybody, limits)
    computing = best.samples / collaboration.batch
    return Strategy(
        fractions=tuple(fractions[place[i]] for i in range(len(order))),
        computes=tuple(best.computes[place[i]] for i in range(len(order))),
        round_seconds=seconds,
        allreduce_seconds=plain,
        parameter_server_seconds=served,
        steps_per_second=min(computing, 1.0 / seconds) if seconds > 0 else computing,
        samples_per_second=best.samples,
    )


def _collaborators(collaboration: Collaboration, peers: Sequence[PlannedPeer]) -> Collaborators:
    fixed = [peer.computes is Computes.ALWAYS for peer in peers]
    free = [
        i
        for i, peer in enumerate(peers)
        if peer.computes is Computes.AUTO and peer.samples_per_s > 0
    ]
    if not free and not any(
        peer.samples_per_s > 0 for peer, one in zip(peers, fixed, strict=True) if one
    ):
        raise NobodyComputes(
            "Nobody computes, so there is nothing to average.",
            why='No peer has samples_per_s above 0 and computes = true or "auto".',
            advice='Say computes = true or "auto", and how fast, of each peer that has a GPU.',
        )
    if all(peer.dial_out_only for peer in peers):
        raise NobodyReduces(
            "Nobody can reduce, so no gradients can be averaged.",
            why="Every peer has dial_out_only = true, and can be sent nothing.",
            advice="Add a peer that can be dialled: a cheap server without a GPU will do.",
        )
    vector = collaboration.vector_bytes
    return Collaborators(
        samples=[peer.samples_per_s for peer in peers],
        batch=collaboration.batch,
        up=[peer.up / vector for peer in peers],
        down=[peer.down / vector for peer in peers],
        reduces=[not peer.dial_out_only for peer in peers],
        fixed=fixed,
        free=free,
    )


def _best_server_seconds(members: Members, limits: Links) -> float:
    """The round in which one peer reduces everything, with the best peer for it."""
    n, m = len(members.up), sum(members.contributes)
    if n == 1:
        return 0.0
    waits = [
        max(c / up, 1.0 / down)
        for up, down, c in zip(members.up, members.down, members.contributes, strict=True)
    ]
    slowest = sorted(range(n), key=waits.__getitem__)[-2:]
    limited = [0.0] * n  # what pairwise limits cost, if that one is the server
    for (i, j), limit in limits.items():
        limited[i] = max(limited[i], 1.0 / limit)
        limited[j] = max(limited[j], members.contributes[i] / limit)
    return min(
        max(
            (n - 1) / members.up[i],
            (m - members.contributes[i]) / members.down[i],
            waits[slowest[-1] if slowest[-1] != i else slowest[0]],
            limited[i],
        )
        for i in range(n)
        if members.reduces[i]
    )
