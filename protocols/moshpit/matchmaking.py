"""Peers with the same key find each other and settle on one signed list of members.

    matchmaker = Matchmaker(network, rpc, dht)              # one for each node
    group = await matchmaker.find_group(Search(key, epoch, layout_digest, Offer(weight=32)))

`find_group` returns a `Group`, or raises `NobodyElse`, `Late` or another `NoGroup`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from protocols.errors import PotluckError
from protocols.identity import PeerId
from protocols.moshpit.roster import Entry, Offer, Roster

if TYPE_CHECKING:
    from protocols.dht.service import Dht
    from protocols.network import Network
    from protocols.rpc import Rpc

__all__ = [
    "Entry",
    "Group",
    "Late",
    "Matchmaker",
    "NoGroup",
    "NobodyElse",
    "Offer",
    "Roster",
    "Search",
]

PROTOCOL = "/potluck/moshpit/1.0.0"


class NoGroup(PotluckError):
    """No group was found in time; the text says who was there and why it came to nothing."""


class Late(NoGroup):
    """A group has started under this key without us: the next round is ours."""


class NobodyElse(NoGroup):
    """Nobody else has a live slot under this key: this peer is alone."""


@dataclass(frozen=True)
class Search:
    """What one search for a group is to know.

    `key`: see `group_key`. `layout_digest`: 32 bytes. `expected`: how many peers the caller knows
    to come, itself included: the list is closed at once when they have.
    """

    key: str
    epoch: int
    layout_digest: bytes
    offer: Offer
    group_size: int = 64
    expected: int | None = None
    matchmaking_seconds: float = 10.0


@dataclass(frozen=True)
class Group:
    """A roster that all of its members hold, and our place in it."""

    roster: Roster
    me: int
    round_id: bytes

    @property
    def members(self) -> tuple[PeerId, ...]:
        return self.roster.members

    @property
    def leader(self) -> int:
        return self.roster.index_of(self.roster.leader)


def group_key(run: str, epoch: int, round_number: int, name: str) -> str:
    """The key of a group in the directory: `group/<run>/<epoch>/<round>/<name>`."""
    return f"group/{run}/{epoch}/{round_number}/{name}"


class Matchmaker:
    """Answers joins and invitations on this node, and searches. One for each rpc."""

    def __init__(self, network: Network, rpc: Rpc, dht: Dht) -> None:
        self._network, self._rpc, self._dht = network, rpc, dht

    async def find_group(self, search: Search) -> Group:
        """A group for this search, by its deadline and one short timeout at the latest.

        Cancelling leaves nothing behind: who waits for this peer is told, the slot is withdrawn.
        """
        raise NotImplementedError
