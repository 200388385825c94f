"""One reading under way: whom it has heard, what it has merged, and whether that is enough.

The first few replicas are asked for everything, the others only for what is not merged yet: each
question says what the asker holds. A reader who is content with what is late enough is so as soon
as a few replicas have said what they hold.

Easy to get wrong: what is merged has been checked, by whoever calls `take`; what `heard` is told
of a replica is by publisher, so that a replica that holds an older slot is seen to be behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from protocols.dht.contacts import Contact
from protocols.dht.ids import ID_BYTES
from protocols.dht.messages import (
    HAVE_PER_QUERY,
    KNOWN_PER_QUERY,
    PREFIX_BYTES,
    QUERIES_PER_REQUEST,
    Query,
    prefix_of_id,
    prefix_of_slot,
)
from protocols.dht.neighbourhood import knows_well, lookup_from, own_radius, seeds_for
from protocols.dht.slots import Slot, supersedes
from protocols.dht.state import DhtState
from protocols.dht.walking import Errand, Load

REQUEST_BYTES = 64 << 10  # of queries in one message; half of what it may have


class Seeking(Errand):
    """An errand that asks for peers, and with a key for slots.

    Invariant: `merged` holds the newest slot of each publisher that was met; every slot in it has
    been checked.
    """

    def __init__(
        self,
        state: DhtState,
        target: int,
        key: str = "",
        *,
        content_with: int = 0,
        k: int | None = None,
        radius: int | None = None,
    ) -> None:
        seeds = seeds_for(state, target)
        super().__init__(lookup_from(state, target, seeds, k))
        self.key = key
        self.is_near = knows_well(state, target, own_radius(state) if radius is None else radius)
        self.merged: dict[bytes, Slot] = {}
        self.replicas: dict[int, tuple[Contact, dict[bytes, bytes]]] = {}
        """Of each peer that answered: by publisher, the prefix of the slot that it holds."""
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

    def query(self, have: Sequence[Slot], after: bytes = b"") -> Query:
        return Query(
            self.lookup.target.to_bytes(ID_BYTES, "big"),
            self.key,
            b"".join(self._known[-KNOWN_PER_QUERY:]),
            b"".join(map(prefix_of_slot, have)),
            after,
            self._content_with > 0,
        )

    def have(self) -> list[Slot]:
        return list(islice(self.merged.values(), HAVE_PER_QUERY))

    def take(self, slot: Slot) -> None:
        held = self.merged.get(slot.publisher)
        if held is None or supersedes(slot, held):
            self.merged[slot.publisher] = slot

    def holds_ourselves(self, slots: Sequence[Slot]) -> None:
        """What this node, being a replica, holds."""
        for slot in slots:
            self.take(slot)
        if slots:
            self._satisfied += 1
        if self._content_with:
            self.lookup.alpha = max(1, self._content_with - self._satisfied)

    def heard(self, contact: Contact, held: dict[bytes, bytes], *, copied: bool) -> None:
        """A peer has said all that it holds under the key.

        Copies count as what one replica holds and no more: whoever brought them may have left
        out what he did not like, and so may anybody on the way.
        """
        if not copied:
            self.replicas[contact.node_id] = (contact, held)
        self._satisfied += bool(held)
        prefix = prefix_of_id(contact.node_id)
        if prefix not in self._known:
            self._known.append(prefix)
        if self._content_with and held:
            # each that has it leaves one fewer to be asked
            self.lookup.alpha = max(1, self._content_with - self._satisfied)
        elif self.is_near or held:
            # we are among those who should have it: ask all of them at once
            self.lookup.alpha = self.lookup.k


def _query_bytes(errand: Seeking) -> int:
    known_and_have = KNOWN_PER_QUERY + min(len(errand.merged), HAVE_PER_QUERY)
    return 64 + len(errand.key) * 4 + known_and_have * PREFIX_BYTES


LOAD = Load(QUERIES_PER_REQUEST, REQUEST_BYTES, _query_bytes)
