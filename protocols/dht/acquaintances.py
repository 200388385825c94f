"""Whom we have spoken with, and who of them may go into the routing table.

A peer goes into the table, and is passed on to others, when we have spoken with it and know by
our own experience that it can be dialled: because we dialled it, or, where the link was opened
from the other side, because we tried the addresses that it gave in its introduction. A peer that
introduces itself without addresses is in client mode and never goes in.

Easy to get wrong: a link that the other side opened proves nothing, and says nothing against it.
And what is known of a peer is known of this link: after the next restart it may listen elsewhere,
or not at all.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import trio

from protocols.dht.contacts import Contact, contact_of
from protocols.dht.messages import Introduction, without_peer
from protocols.dht.state import DhtState, log
from protocols.errors import Unreachable
from protocols.identity import PeerId
from protocols.network import Reach

ACQUAINTANCES = 4096  # as many as a node has links
ADDRESSES_TRIED = 3  # of a stranger's: it makes us dial, so not often and not far
CHECK_AGAIN_SECONDS = 600.0  # somebody whose addresses did not answer may be let in by then
SAMPLE_SECONDS = 60.0  # how often a peer's clock is looked at


class _Acquaintance:
    __slots__ = ("addresses", "checked_at", "contact", "is_told", "sampled_at")

    def __init__(self) -> None:
        self.is_told = False  # it has had our introduction
        self.addresses: tuple[str, ...] = ()
        self.contact: Contact | None = None  # proven
        self.checked_at = float("-inf")
        self.sampled_at = float("-inf")


class Acquaintances:
    """Invariant: a contact goes into the table here and nowhere else.

    `welcome` is called with each contact that was not in the table before, `ask_whether_there`
    with each that may be gone.
    """

    def __init__(
        self,
        state: DhtState,
        welcome: Callable[[Contact], None],
        ask_whether_there: Callable[[Contact], None],
    ) -> None:
        self._state = state
        self._welcome = welcome
        self._ask_whether_there = ask_whether_there
        self._known: OrderedDict[PeerId, _Acquaintance] = OrderedDict()

    def is_stranger(self, peer: PeerId) -> bool:
        return peer not in self._known

    def introduction_for(self, peer: PeerId) -> Introduction | None:
        """What to say of ourselves in a request; None where it has been said."""
        known = self._known.get(peer)
        return None if known is not None and known.is_told else self.introduction()

    def introduction(self) -> Introduction:
        if self._state.is_client:
            return Introduction()
        network = self._state.network
        return Introduction(without_peer(network.peer_id, network.addresses()))

    def answered(
        self, peer: PeerId, introduction: Introduction | None, time_ms: int, asked_ms: int
    ) -> None:
        """A peer answered us."""
        known = self._acquaintance(peer)
        known.is_told = True
        now = trio.current_time()
        if now - known.sampled_at >= SAMPLE_SECONDS:
            known.sampled_at = now
            state = self._state
            far_off = state.swarm_time.sample(peer, time_ms, asked_ms, state.local_ms())
            if far_off is not None:
                log.warning("%s", far_off)
        self._heard(peer, known, introduction)

    def asked_us(self, peer: PeerId, introduction: Introduction | None) -> None:
        """A peer asked us something."""
        self._heard(peer, self._acquaintance(peer), introduction)

    def link_lost(self, peer: PeerId) -> None:
        """What was known of this link is over."""
        known = self._known.pop(peer, None)
        contact = known.contact if known is not None else None
        if contact is not None and contact.node_id in self._state.table:
            self._ask_whether_there(contact)

    def _acquaintance(self, peer: PeerId) -> _Acquaintance:
        known = self._known.get(peer)
        if known is None:
            known = self._known[peer] = _Acquaintance()
            if len(self._known) > ACQUAINTANCES:
                self._known.popitem(last=False)
        return known

    def _heard(self, peer: PeerId, known: _Acquaintance, introduction: Introduction | None) -> None:
        if introduction is not None:
            self._introduced(peer, known, introduction)
        if known.contact is not None:
            self._put_in_table(known.contact)

    def _introduced(self, peer: PeerId, known: _Acquaintance, said: Introduction) -> None:
        known.addresses = without_peer(peer, said.addresses)
        if not known.addresses:
            if known.contact is not None:
                self._state.table.remove(known.contact)
                known.contact = None
            return
        link = self._state.network.link(peer)
        if link is not None and not link.inbound and link.reach is Reach.DIRECT:
            self._proven(peer, known, link.remote_address)
        else:
            self._check(peer, known)

    def _proven(self, peer: PeerId, known: _Acquaintance, address: str) -> Contact:
        proven = without_peer(peer, (address,))
        known.contact = contact = contact_of(peer, (*proven, *known.addresses))
        self._state.network.learn_addresses(peer, contact.addresses)
        return contact

    def _check(self, peer: PeerId, known: _Acquaintance) -> None:
        """Find out by dialling whether a peer whose link came from its side can be dialled."""
        now = trio.current_time()
        if now - known.checked_at < CHECK_AGAIN_SECONDS:
            return
        known.checked_at = now
        self._state.chore(self._try_addresses, peer, known)

    async def _try_addresses(self, peer: PeerId, known: _Acquaintance) -> None:
        if self._known.get(peer) is not known or known.contact is not None:
            return
        counts = self._state.counts
        network = self._state.network
        link = network.link(peer)
        remote = _host_of(link.remote_address) if link is not None else ""
        # where the connection came from first: a stranger must not make us dial third parties
        likely = sorted(known.addresses, key=lambda one: _host_of(one) != remote)
        try:
            address = await network.check_dialable(peer, likely[:ADDRESSES_TRIED])
        except Unreachable as error:
            counts.peers_not_dialable += 1
            log.debug("%s cannot be dialled and is not passed on: %s", peer, error)
            return
        counts.peers_found_dialable += 1
        if self._known.get(peer) is known:
            self._put_in_table(self._proven(peer, known, address))

    def _put_in_table(self, contact: Contact) -> None:
        table = self._state.table
        is_new = contact.node_id not in table
        in_the_way = table.heard_from(contact, trio.current_time())
        if in_the_way is not None:
            self._ask_whether_there(in_the_way)
        if is_new and contact.node_id in table:
            self._welcome(contact)


def _host_of(address: str) -> str:
    return "/".join(address.split("/", 3)[1:3])
