"""One reading under way: which peers it has heard, what they hold, and whether that is enough.

`Seeking` finds the replicas of a key by a lookup and hears what each holds: the first few are asked
for slots, the others only to name theirs. A reader may be content as soon as a few replicas have
said what they hold. `Looking` asks some replicas that are known already for what is new there.

Easy to get wrong: what is merged has been checked, by whoever calls `take`; what a replica has
named is only a claim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from protocols.dht.contacts import Contact
from protocols.dht.ids import ID_BYTES
from protocols.dht.lookup import Lookup
from protocols.dht.messages import (
    KNOWN_PER_QUERY,
    PREFIX_BYTES,
    QUERIES_PER_REQUEST,
    Query,
    prefix_of_id,
)
from protocols.dht.neighbourhood import knows_well, lookup_from, own_radius, seeds_for
from protocols.dht.slots import Slot
from protocols.dht.state import DhtState
from protocols.dht.views import Handful, View
from protocols.dht.walking import Errand, Load

REQUEST_BYTES = 64 << 10  # of queries in one message; half of what it may have


@dataclass(frozen=True)
class Told:
    """What a replica has said of a key: the names of slots there, all of them if it is `whole`,
    else those since it was asked last; and how far that goes."""

    contact: Contact
    names: Sequence[bytes]
    cursor: bytes
    whole: bool


class Reading(Errand):
    """An errand that hears what is under a key, and takes it into a view."""

    def __init__(self, lookup: Lookup | Handful, target: int, key: str, view: View) -> None:
        super().__init__(lookup)
        self.target = target
        self.key = key
        self.view = view
        self.told: dict[int, Told] = {}
        """By the node id of each replica that answered; without copies."""
        self._known: list[bytes] = []

    def query(self, contact: Contact) -> Query:
        """What to ask this peer first."""
        raise NotImplementedError

    def query_for(self, names: Sequence[bytes]) -> Query:
        """What to ask for slots that were named."""
        position = self.target.to_bytes(ID_BYTES, "big")
        return Query(position, self.key, wanted=b"".join(names))

    def take(self, slot: Slot) -> None:
        self.view.take(slot)

    def heard(self, told: Told, *, copied: bool) -> None:
        """A peer has said what it holds under the key."""
        if not copied:
            self.told[told.contact.node_id] = told

    def missing_at(self, told: Told) -> list[bytes]:
        """What this replica has named and nobody has brought."""
        return self.view.missing(told.names)

    def end(self) -> None:
        """Remember how far everybody has told, where all of it is here."""
        for node_id, told in self.told.items():
            if told.cursor and not self.missing_at(told):
                self.view.cursors[node_id] = told.cursor

    def _query(self, since: bytes = b"", *, named: bool, copies: bool = False) -> Query:
        return Query(
            self.target.to_bytes(ID_BYTES, "big"),
            self.key,
            b"" if since else b"".join(self._known[-KNOWN_PER_QUERY:]),
            since,
            named=named,
            copies=copies,
        )


class Seeking(Reading):
    """Asks for the peers closest to a position, and with a key for its slots."""

    lookup: Lookup

    def __init__(
        self,
        state: DhtState,
        target: int,
        key: str = "",
        *,
        view: View | None = None,
        content_with: int = 0,
        k: int | None = None,
        radius: int | None = None,
    ) -> None:
        seeds = seeds_for(state, target)
        super().__init__(lookup_from(state, target, seeds, k), target, key, view or View())
        self.is_near = knows_well(state, target, own_radius(state) if radius is None else radius)
        self._content_with = content_with
        self._satisfied = 0
        self._known = [prefix_of_id(one.node_id) for one in seeds]

    @property
    def is_done(self) -> bool:
        return self.has_enough or self.lookup.is_done

    @property
    def has_enough(self) -> bool:
        """Whether so many replicas have said what they hold that the reader wants no more."""
        return 0 < self._content_with <= self._satisfied

    def query(self, contact: Contact) -> Query:
        # Copies are for a reader who will not ask everybody. It wants what is new at once; a reader
        # who compares all replicas has it named first, which costs a round trip more.
        if self._content_with:
            since = self.view.cursors.get(contact.node_id, b"")
            return self._query(since, named=bool(self.view.slots and not since), copies=True)
        return self._query(named=bool(self.view.slots))

    def holds_ourselves(self, slots: Sequence[Slot]) -> None:
        """What this node, being a replica, holds."""
        for slot in slots:
            self.take(slot)
        if slots:
            self._satisfied += 1
        if self._content_with:
            self.lookup.alpha = max(1, self._content_with - self._satisfied)

    def heard(self, told: Told, *, copied: bool) -> None:
        """See above. Copies count as what one replica holds and no more: whoever brought them may
        have left out what he did not like, and so may anybody on the way."""
        super().heard(told, copied=copied)
        contact = told.contact
        holds_some = bool(told.names) or not told.whole  # then all that it had before is here
        self._satisfied += holds_some
        prefix = prefix_of_id(contact.node_id)
        if prefix not in self._known:
            self._known.append(prefix)
        if self._content_with and holds_some:
            # each that has it leaves one fewer to be asked
            self.lookup.alpha = max(1, self._content_with - self._satisfied)
        elif self.is_near or holds_some:
            # we are among those who should have it: ask all of them at once
            self.lookup.alpha = self.lookup.k


class Looking(Reading):
    """Asks some of these `replicas` for what has come there since they were asked last. Only the
    `source` brings slots; the others name them."""

    lookup: Handful

    def __init__(
        self,
        target: int,
        key: str,
        view: View,
        replicas: Sequence[Contact],
        enough: int,
        source: int | None,
    ) -> None:
        super().__init__(Handful(replicas, enough), target, key, view)
        self._known = [prefix_of_id(one.node_id) for one in replicas]
        self._source = source

    def query(self, contact: Contact) -> Query:
        since = self.view.cursors.get(contact.node_id, b"")
        brings = bool(since) and contact.node_id == self._source
        return self._query(since, named=not brings)


def _query_bytes(errand: Reading) -> int:
    return 128 + len(errand.key) * 4 + KNOWN_PER_QUERY * PREFIX_BYTES


LOAD = Load(QUERIES_PER_REQUEST, REQUEST_BYTES, _query_bytes)
