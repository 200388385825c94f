"""What all parts of one search for a group have in common.

A search is a gathering, which decides, and a few parts that tell it what they have learnt:
group_slots.py, asking_a_leader.py, inviting.py, join_tickets.py, lists_shown.py. They know one
another only through this.

Easy to get wrong: whoever has told the gathering anything says `go_on` next, or what it has
decided is carried out when somebody else does, perhaps seconds later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import trio

from protocols.identity import PeerId
from protocols.moshpit.gathering import Gathering, GatheringSettings
from protocols.moshpit.gathering_effects import Candidate
from protocols.moshpit.group import Search
from protocols.moshpit.handing_on import HandingOn
from protocols.moshpit.matchmaking_messages import Place, short_enough
from protocols.moshpit.patience import Patience
from protocols.moshpit.roster import NONCE_BYTES, Entry, Terms, hash_order, sign_entry

if TYPE_CHECKING:
    from protocols.network import Network
    from protocols.rpc import Rpc


class SearchContext:
    """`go_on` carries out what the gathering has decided. `lists`: what this node hands on."""

    def __init__(
        self,
        network: Network,
        rpc: Rpc,
        lists: HandingOn,
        search: Search,
        go_on: Callable[[], None],
    ) -> None:
        self.network, self.rpc, self.lists = network, rpc, lists
        self.search = search
        self.terms: Terms = search.terms
        self.go_on = go_on
        self.me = network.peer_id
        self.patience = Patience(network, rpc)
        self.gathering = Gathering(
            self.me,
            self.order,
            GatheringSettings(
                search.group_size,
                search.matchmaking_seconds,
                search.offer.reduces,
                search.expected,
                search.awaited or frozenset(),
                search.unwelcome,
                search.splits,
            ),
            trio.current_time(),
        )
        self._changed = trio.Event()

    def order(self, peer: PeerId) -> bytes:
        return hash_order(self.terms.key, peer)

    # -- when the gathering has changed

    def tell_all(self) -> None:
        """The gathering has changed, perhaps."""
        self._changed.set()
        self._changed = trio.Event()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Returns when this holds of the gathering."""
        while not holds():
            await self._changed.wait()

    async def next_change(self) -> None:
        await self._changed.wait()

    # -- how peers are named to others

    def place_of(self, candidate: Candidate) -> Place:
        if candidate.peer == self.me:
            addresses = self.network.addresses()
        else:
            addresses = self.network.addresses_of(candidate.peer)
        return Place(candidate.peer, candidate.reduces, short_enough(addresses))

    def learn(self, place: Place) -> Candidate:
        if place.peer != self.me:
            self.network.learn_addresses(place.peer, place.addresses)
        return Candidate(place.peer, place.reduces)

    def own_addresses(self) -> tuple[str, ...]:
        """None if this peer cannot be dialled."""
        return short_enough(self.network.addresses()) if self.search.offer.reduces else ()

    def nonce(self) -> bytes:
        return self.network.random.randbytes(NONCE_BYTES)

    def sign_entry(self, leader: PeerId) -> Entry:
        """Our entry in a list of this leader's."""
        offer, nonce = self.search.offer, self.nonce()
        return sign_entry(self.network.identity, self.terms, leader, offer, nonce)
