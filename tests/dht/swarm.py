"""Contacts, and a small swarm of answerers, for tests of the pure parts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from protocols.dht import Contact
from protocols.dht.ids import ID_BITS
from protocols.identity import PeerId


def contact(node_id: int, *addresses: str) -> Contact:
    """A contact at this place. Its peer id is only a name: tables and lookups go by the place."""
    return Contact(PeerId(f"peer-{node_id:x}"), node_id, addresses or (f"at-{node_id:x}",))


def scattered(number: int, seed: str = "") -> list[Contact]:
    """Contacts all over the space of ids."""
    return [contact(place(f"{seed}/{one}")) for one in range(number)]


def place(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest(), "big")


def beginning(bits: str, rest: int = 0) -> int:
    """The id that begins with these bits; `rest` is its end."""
    return (int(bits, 2) << (ID_BITS - len(bits))) + rest


def nearest(contacts: Iterable[Contact], target: int, count: int) -> list[Contact]:
    return sorted(contacts, key=lambda one: one.node_id ^ target)[:count]


@dataclass
class Answerers:
    """The peers, and what each knows. An address leads to its peer if the peer has it."""

    alive: dict[int, Contact]
    knows: dict[int, Sequence[Contact]] = field(default_factory=dict)

    @staticmethod
    def all_of(contacts: Sequence[Contact]) -> Answerers:
        """Every peer knows all others."""
        return Answerers(
            {one.node_id: one for one in contacts}, {one.node_id: contacts for one in contacts}
        )

    def ask(self, asked: Contact, target: int, count: int) -> list[Contact] | None:
        """The answer of a peer; None if no peer is there."""
        real = self.alive.get(asked.node_id)
        if real is None or not set(real.addresses) & set(asked.addresses):
            return None
        return nearest(self.knows[asked.node_id], target, count)
