"""What the parts of one gathering (gathering.py) share: whose it is, and what is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from protocols.identity import PeerId
from protocols.moshpit.awaited import Awaited
from protocols.moshpit.closing_time import ClosingTime
from protocols.moshpit.known_peers import KnownPeers
from protocols.moshpit.waiting_joins import WaitingJoins


@dataclass(frozen=True)
class GatheringParts:
    """- `me`, `order`: this peer, and the hash order of the key.
    - `group_size`: the most members of one group. `splits`: more than that become several.
    - `known`, `joins`, `awaited`, `closing`: who is there, who waits here, who is expected by
      name, and when the list is closed.
    """

    me: PeerId
    order: Callable[[PeerId], bytes]
    group_size: int
    splits: bool
    known: KnownPeers
    joins: WaitingJoins
    awaited: Awaited
    closing: ClosingTime
