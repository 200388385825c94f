"""The figures of a training node for its view: the swarm's batch, the peers, the traffic. Read
only.

Figures that other peers give about themselves are unverified claims. Peers whose claims do not
count are marked (`ignored`). Links and traffic are this node's own measurements.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import msgspec

from node.core.display_name import cleaned
from node.core.node import Node
from node.core.traffic_meter import TrafficMeter
from node.core.training_view import BatchView, RunPeerView, TrafficView
from protocols.accumulation.collaboration import Collaboration
from protocols.accumulation.estimate import Estimate
from protocols.accumulation.events import Share, StepTaken, reduced_by
from protocols.accumulation.progress_slot import ProgressSlot, progress_key, sums_key
from protocols.errors import PotluckError
from protocols.identity import PeerId


class WatchedTraining:
    """`Watched` (session.py) of one collaboration. trio's thread only."""

    def __init__(self, node: Node, collaboration: Collaboration, meter: TrafficMeter) -> None:
        self._node, self._collaboration, self._meter = node, collaboration, meter

    def batch(self) -> BatchView:
        found, mine = self._estimate(), self._collaboration.mine()
        if found is None or mine is None:
            return BatchView()
        due_in = found.due_in_seconds_with(mine.samples)
        return BatchView(
            samples=round(found.others_samples + mine.samples, 1),
            target=found.target_samples,
            mine=mine.samples,
            samples_per_second=round(found.rate, 3),
            seconds_to_step=round(due_in, 3) if math.isfinite(due_in) else None,
        )

    def peers(self) -> tuple[RunPeerView, ...]:
        """Peers that say they take part, then those whose word does not count."""
        found, slots = self._estimate(), self._collaboration.peers()
        ignored = {} if found is None else {one.peer: one.reason for one in found.ignored}
        names = sorted([*slots, *(peer for peer in ignored if peer not in slots)])
        views = [peer_view(self._node, one, slots.get(one), ignored.get(one, "")) for one in names]
        return tuple(with_parts(views, self._last_shares()))

    def traffic(self) -> TrafficView:
        return self._meter.view()

    def averaging(self) -> bool:
        mine = self._collaboration.mine()
        return mine is not None and mine.averaging

    def alone(self) -> bool:
        found = self._estimate()
        return found is not None and found.number > 0 and not found.peers

    def samples_per_second(self) -> float | None:
        mine = self._collaboration.mine()
        return None if mine is None else round(mine.samples_per_second, 3)

    def _last_shares(self) -> tuple[Share, ...]:
        """The shares of the newest step that was made with others."""
        for event in reversed(self._collaboration.last_events()):
            if isinstance(event, StepTaken) and event.shares:
                return event.shares
        return ()

    def _estimate(self) -> Estimate | None:
        try:
            return self._collaboration.bridge.estimate
        except PotluckError:  # nothing has entered yet, or it has ended
            return None


class WatchedServing:
    """`Watched` of a peer that serves experts and does not train. trio's thread only.

    It takes no part in the run's progress, and only reads what the trainers publish: for `peers`,
    and because the leaderboard needs to know whom to ask, and how many steps there are. Of a run by
    cohorts it knows their heads.
    """

    def __init__(self, node: Node, run: str, meter: TrafficMeter) -> None:
        self._node, self._run, self._meter = node, run, meter
        self._slots: dict[PeerId, ProgressSlot] = {}

    async def look(self) -> int:
        """Read the trainers' progress. Returns the epoch that more than half of them have
        reached, as they say; 0 if there are none."""
        heads = await self._node.dht.get(sums_key(self._run))
        found = heads | await self._node.dht.get(progress_key(self._run))
        self._slots = {peer: entry.value for peer, entry in found.items()}
        epochs = sorted(slot.epoch for slot in self._slots.values())
        return epochs[(len(epochs) - 1) // 2] if epochs else 0

    def batch(self) -> BatchView:
        return BatchView()

    def peers(self) -> tuple[RunPeerView, ...]:
        return tuple(peer_view(self._node, peer, self._slots[peer]) for peer in sorted(self._slots))

    def traffic(self) -> TrafficView:
        return self._meter.view()

    def averaging(self) -> bool:
        return False

    def alone(self) -> bool:
        return False

    def samples_per_second(self) -> float | None:
        return None


def peer_view(
    node: Node, peer: PeerId, slot: ProgressSlot | None, ignored: str = ""
) -> RunPeerView:
    """A peer of the run, as it describes itself and as this node's links show it."""
    link = node.network.link(peer)
    reach = "none" if link is None else link.way
    trip = None if link is None else link.round_trip_seconds
    member = node.membership
    shown = None if member is None else member.access.shown_by(peer)
    view = RunPeerView(
        peer=peer,
        name="" if shown is None else shown.username,  # by the token that it has shown us
        reach=reach,
        round_trip_ms=None if trip is None else round(trip * 1000, 1),
        ignored=ignored,
    )
    if slot is None:
        return view
    return msgspec.structs.replace(
        view,
        said_name=cleaned(slot.name),
        role=slot.role,
        device=cleaned(slot.device),
        keeps=slot.keeps,
        epoch=slot.epoch,
        samples=slot.samples,
        samples_per_second=round(slot.samples_per_second, 3),
    )


def with_parts(views: Sequence[RunPeerView], shares: Sequence[Share]) -> Iterator[RunPeerView]:
    """The views, with each peer's part in the round of these shares."""
    parts, said = reduced_by(shares), {one.peer: one for one in shares}
    for view in views:
        one = said.get(PeerId(view.peer))
        if one is None:
            yield view
            continue
        yield msgspec.structs.replace(
            view,
            up_bytes_per_second=one.up_bytes_per_second or None,
            down_bytes_per_second=one.down_bytes_per_second or None,
            reduces=round(parts[one.peer], 4),
        )
