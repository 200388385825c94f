"""The known addresses of each peer, with limits for peers and for addresses per peer.

Pure. The newest addresses of a peer are kept, and of all peers those heard of most recently.
`worked` moves an address that has just worked to the front and marks it. Marked addresses outlive
the others, so a flood of hearsay cannot push out all working ones.

A circuit that was cut off does not say who is at fault. Its relay may have died, or it may cut
every circuit, whatever it promised. So for CUT_SECONDS the circuits of other relays to that peer
are tried before those of this one.

Addresses come from strangers and are not trusted. They are limited in number, and an address that
names another peer is refused.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from node.net.libp2p.addresses import LONGEST_ADDRESS, Address, AddressKind, parse, relay_of
from protocols.errors import MalformedMessage
from protocols.identity import PeerId

CUT_SECONDS: Final = 600.0  # a relay that was at fault by chance is missed for no longer


class AddressBook:
    """Addresses by peer.

    Invariant: never more peers or addresses than the limits. Only peers in `is_kept` (those with a
    link) are never forgotten.
    """

    def __init__(self, *, peers: int, addresses_per_peer: int) -> None:
        self._peers = peers
        self._addresses_per_peer = addresses_per_peer
        # Both orders are oldest first. The value is True if the address has worked.
        self._book: OrderedDict[PeerId, OrderedDict[str, bool]] = OrderedDict()
        self._kept: set[PeerId] = set()
        self._cut: OrderedDict[tuple[PeerId, str], float] = (
            OrderedDict()
        )  # peer and relay; newest last

    def __len__(self) -> int:
        return len(self._book)

    def keep(self, peer: PeerId) -> None:
        """Keep this peer, which has a link."""
        self._kept.add(peer)

    def release(self, peer: PeerId) -> None:
        self._kept.discard(peer)

    def learn(self, peer: PeerId, addresses: Iterable[str]) -> None:
        """Remember addresses, the last one as the newest. Invalid ones are ignored."""
        for text in addresses:
            spelt = text if text in self._book.get(peer, ()) else _of_peer(text, peer)
            if spelt is not None:
                self._put(peer, spelt, worked=False)

    def worked(self, peer: PeerId, address: Address) -> None:
        """This address has just led to the peer."""
        self._put(peer, address.of_peer(peer), worked=True)

    def cut_off(self, peer: PeerId, address: str, now: float) -> None:
        """The circuit at this address has broken."""
        self._cut[peer, relay_of(address)] = now
        self._cut.move_to_end((peer, relay_of(address)))
        if len(self._cut) > self._peers:
            self._cut.popitem(last=False)

    def to_try_later(self, peer: PeerId, addresses: list[Address], now: float) -> list[Address]:
        """Of these, the circuits that were cut off lately, if there are others; oldest first."""
        circuits = [one for one in addresses if one.kind is AddressKind.CIRCUIT]
        cut_at = {one: self._cut.get((peer, relay_of(one.text)), -CUT_SECONDS) for one in circuits}
        cut = [one for one in circuits if now - cut_at[one] < CUT_SECONDS]
        return sorted(cut, key=cut_at.__getitem__) if len(cut) < len(circuits) else []

    def addresses_of(self, peer: PeerId) -> tuple[str, ...]:
        """All known addresses, in the order in which they were learned."""
        return tuple(self._book.get(peer, ()))

    def to_try(self, peer: PeerId) -> list[Address]:
        """The same, parsed: those that worked first, the newest first in each group."""
        known = list(reversed(self._book.get(peer, OrderedDict()).items()))
        known.sort(key=lambda item: not item[1])
        return [parse(text) for text, _ in known]

    def _put(self, peer: PeerId, text: str, *, worked: bool) -> None:
        addresses = self._book.setdefault(peer, OrderedDict())
        self._book.move_to_end(peer)
        known_to_work = addresses.pop(text, False) or worked
        addresses[text] = known_to_work
        if len(addresses) > self._addresses_per_peer:
            hearsay = [known for known, works in addresses.items() if not works and known != text]
            del addresses[hearsay[0] if hearsay else next(iter(addresses))]
        if len(self._book) > self._peers:
            for oldest in self._book:
                if oldest not in self._kept and oldest != peer:
                    del self._book[oldest]
                    break


def _of_peer(text: str, peer: PeerId) -> str | None:
    """An address of this peer as the book has it; None if it is not valid, or another peer's."""
    try:
        address = parse(text)
    except MalformedMessage:
        return None
    spelt = address.of_peer(peer)
    return spelt if address.peer in (None, peer) and len(spelt) <= LONGEST_ADDRESS else None
