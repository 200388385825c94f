"""The peers that this node has known, in a small JSON file, to rejoin a swarm by.

Every node has one. If its bootstrap addresses are gone, it rejoins through any peer in this file
that still lives. It is only a cache: if it is damaged, foreign or too long, it is ignored with a
warning, and the node starts without it.

    {"potluck_peers": 1, "peers": [{"peer": "12D3KooW…", "addresses": ["/ip4/…/tcp/4001"]}, …]}

Newly met peers must not push out all others. A laptop that was opened on a train knows nobody for
an hour; the peers that it knew before stay in the file, after the new ones, while there is room. An
entry is a claim: no peer is believed before it answers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from node.core.private_file import UnusableFile, read_private_file, replace_private_file
from protocols.dht import (
    ADDRESSES_PER_CONTACT,
    LONGEST_ADDRESS,
    Contact,
    KeepingFailed,
    KeptSlot,
    contact_of,
)
from protocols.errors import MalformedMessage

# The neighbourhood and some peers of every distance: about what a node in a swarm of ten thousand
# knows, and enough that one of them is still there after a month.
KEPT_CONTACTS = 256
LONGEST_PEER_ID = 64  # ours have 52
# Every contact with the most addresses, each of the greatest length, is 600 KiB.
LARGEST_FILE_BYTES = 1 << 20

log = logging.getLogger(__name__)


class _Entry(msgspec.Struct, frozen=True):
    peer: Annotated[str, Meta(max_length=LONGEST_PEER_ID)]
    addresses: Annotated[tuple[str, ...], Meta(max_length=4 * ADDRESSES_PER_CONTACT)] = ()


class _Content(msgspec.Struct, frozen=True):
    potluck_peers: Annotated[int, Meta(ge=1)]  # the version; later ones may add fields
    peers: tuple[_Entry, ...]


_decoder = msgspec.json.Decoder(_Content)


class PeerCache:
    """Keeps contacts and no slots. Blocking code, for one thread at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def blocks(self) -> bool:
        return True

    def load_contacts(self) -> list[Contact]:
        try:
            return _contacts_in(read_private_file(self.path, LARGEST_FILE_BYTES))
        except (UnusableFile, MalformedMessage) as error:
            log.warning("The peer cache is not used. %s", error)
            return []

    def save_contacts(self, contacts: Sequence[Contact]) -> None:
        """Writes nothing if no peer is known, or if nothing has changed."""
        if not contacts:
            return
        earlier = self.load_contacts()
        kept = newest_first(contacts, earlier, KEPT_CONTACTS)
        if kept == earlier:
            return
        content = _Content(1, tuple(_Entry(one.peer, one.addresses) for one in kept))
        try:
            replace_private_file(self.path, msgspec.json.encode(content) + b"\n")
        except OSError as error:
            raise KeepingFailed(
                f"The peers cannot be kept in {self.path}: {error.strerror or error}.",
                why="Without them this node may not find the others after a restart.",
                advice="Free some space, or allow this user to write there.",
            ) from error

    def load_slots(self) -> list[KeptSlot]:
        return []

    def save_slots(self, slots: Sequence[KeptSlot], now_ms: int) -> None:
        """Does nothing: only a backbone keeps slots (node/core/dht_store.py)."""


def newest_first(newer: Iterable[Contact], earlier: Iterable[Contact], limit: int) -> list[Contact]:
    """Both lists as one, the newer first, without duplicates, cut at the limit."""
    merged: dict[str, Contact] = {}
    for contact in (*newer, *earlier):
        if contact.addresses:
            merged.setdefault(contact.peer, contact)
    return list(merged.values())[:limit]


def _contacts_in(content: bytes | None) -> list[Contact]:
    if content is None:
        return []
    try:
        read = _decoder.decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedMessage("It is not one, or it is damaged.", why=str(error)[:200]) from None
    contacts = []
    for entry in read.peers[:KEPT_CONTACTS]:
        try:
            contacts.append(contact_of(entry.peer, entry.addresses))
        except MalformedMessage:
            log.warning("The cache of peers contains an impossible peer: %r", entry.peer)
    return contacts


assert KEPT_CONTACTS * (ADDRESSES_PER_CONTACT * (LONGEST_ADDRESS + 3) + 128) < LARGEST_FILE_BYTES
