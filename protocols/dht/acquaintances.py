"""The peers that we have spoken with, and which of them may go into the routing table.

A peer goes into the table, and is passed on to others, if we have spoken with it and found
ourselves that it can be dialled: because we dialled it or, if it opened the link, because we tried
the addresses in its introduction. A peer that introduces itself without addresses is in client mode
and never goes in.

A link that the other side opened says nothing about whether that side can be dialled, and neither
does one that was punched through both sides' routers. And the findings hold for this link only:
after its next restart the peer may listen elsewhere, or not at all.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from auth.bounded_map import BoundedMap
from protocols.dht.contacts import Contact, contact_of
from protocols.dht.dialability import Dialled, addresses_to_try
from protocols.dht.messages import (
    FindResponse,
    GreetResponse,
    Introduction,
    StoreResponse,
    without_peer,
)
from protocols.dht.state import DhtState, log
from protocols.errors import Unreachable
from protocols.identity import PeerId
from protocols.network import Reach

ACQUAINTANCES = 4096  # as many as a node has links
CHECK_AGAIN_SECONDS = 600.0  # a peer whose addresses did not answer may be dialable by then
CHECK_CHANGED_SECONDS = 60.0  # changed addresses are tried sooner, but not at every request
SAMPLE_SECONDS = 60.0  # between samples of a peer's clock
INTRODUCTION_SECONDS = 10.0  # asking the system for our addresses takes a while

# A link that was opened for a lookup is kept for the next one for a while. When it is closed, its
# stream of calls is already gone: idle ones are closed after two minutes.
IDLE_LINK_SECONDS = 600.0
UNUSED_LINK_SECONDS = 150.0
IDLE_LINKS = 64  # above this, unused links are closed, those idle for longest first


class _Acquaintance:
    __slots__ = (
        "addresses", "checked_at", "contact", "forged", "is_undialable", "sampled_at", "spoken_at",
        "told", "we_opened",
    )  # fmt: skip

    def __init__(self) -> None:
        self.told: Introduction | None = None  # the introduction that it has from us
        self.addresses: tuple[str, ...] = ()
        self.contact: Contact | None = None  # proven
        self.is_undialable = False  # none of its addresses answered
        self.checked_at = float("-inf")
        self.sampled_at = float("-inf")
        self.spoken_at = float("-inf")
        self.forged = 0  # forged slots that it sent
        self.we_opened = False  # whether we opened the link, to ask it something


class Acquaintances:
    """Invariant: a contact goes into the table here and nowhere else.

    `contact_added` is called with each contact that is new in the table, `check_contact` with each
    that may be gone.
    """

    def __init__(
        self,
        state: DhtState,
        contact_added: Callable[[Contact], None],
        check_contact: Callable[[Contact], None],
    ) -> None:
        self._state = state
        self._contact_added = contact_added
        self._check_contact = check_contact
        self._known = BoundedMap[PeerId, _Acquaintance](ACQUAINTANCES)
        self._introduction = Introduction()
        self._introduction_until = float("-inf")

    def is_stranger(self, peer: PeerId) -> bool:
        return peer not in self._known

    def introduction_for(self, peer: PeerId) -> Introduction | None:
        """The introduction to put into a request; None if the peer has it already."""
        introduction = self.introduction()
        known = self._known.get(peer)
        return None if known is not None and known.told == introduction else introduction

    def introduction(self) -> Introduction:
        now = trio.current_time()
        if now >= self._introduction_until:
            self._introduction_until = now + INTRODUCTION_SECONDS
            network = self._state.network
            addresses = () if self._state.is_client else network.addresses()
            self._introduction = Introduction(without_peer(network.peer_id, addresses))
        return self._introduction

    def dialled(self, peer: PeerId) -> Dialled:
        """The result of our dials to this peer's addresses."""
        known = self._known.get(peer)
        if known is None:
            return Dialled.UNKNOWN
        if known.contact is not None:
            return Dialled.ANSWERED
        return Dialled.FAILED if known.is_undialable else Dialled.UNKNOWN

    def answered(
        self,
        peer: PeerId,
        response: FindResponse | StoreResponse | GreetResponse,
        asked_ms: int | None,
        told: Introduction | None,
    ) -> None:
        """A peer answered us; `told` is the introduction that our request carried. `asked_ms`: when
        it was sent, if there was a link."""
        known = self._acquaintance(peer)
        if told is not None:
            known.told = told
        state = self._state
        if state.dialability.report(peer, response.dialled):
            _log_dialability(state)
        now = self._heard(peer, known, response.responder, answered=True)
        # Only peers in the table, so that the owner of one network cannot supply many samples.
        is_in_table = known.contact is not None and known.contact.node_id in state.table
        is_due = is_in_table and now - known.sampled_at >= SAMPLE_SECONDS
        if is_due and asked_ms is not None:
            known.sampled_at = now
            running_ms = int(now * 1000)
            far_off = state.swarm_time.sample(
                peer, response.time_ms, asked_ms, state.local_ms(), running_ms
            )
            if far_off is not None and state.settings.tells_of_clock:
                log.warning("%s", far_off)

    def asked_us(self, peer: PeerId, introduction: Introduction | None) -> None:
        """A peer sent us a request."""
        self._heard(peer, self._acquaintance(peer), introduction, answered=False)

    def we_opened(self, peer: PeerId) -> None:
        """We opened the link to this peer, to ask it something."""
        known = self._known.get(peer)
        if known is not None:
            known.we_opened = True

    def brought_forged(self, peer: PeerId, slots: int) -> int:
        """Count forged slots that a peer sent; return the total for this link."""
        known = self._acquaintance(peer)
        known.forged += slots
        return known.forged

    def idle_links(self, now: float) -> list[PeerId]:
        """Peers whose links we opened for a request and no longer need.

        They are not in the table, and neither side has asked anything for long. Those idle for
        longest come first.
        """
        table = self._state.table
        idle = sorted(
            (known.spoken_at, peer)
            for peer, known in self._known.items()
            if known.we_opened
            and now - known.spoken_at >= UNUSED_LINK_SECONDS
            and (known.contact is None or known.contact.node_id not in table)
        )
        too_many = len(idle) - IDLE_LINKS
        return [
            peer
            for place, (spoken_at, peer) in enumerate(idle)
            if place < too_many or now - spoken_at >= IDLE_LINK_SECONDS
        ]

    def link_lost(self, peer: PeerId) -> None:
        """Forget what was known of this link, and find out whether the peer is still there.

        The calls that the link broke have counted as failures of the peer, so it may be among the
        lost ones already.
        """
        known = self._known.pop(peer, None)
        contact = known.contact if known is not None else None
        if contact is None:
            return
        if contact.node_id in self._state.table or contact in self._state.lost:
            self._check_contact(contact)

    def _acquaintance(self, peer: PeerId) -> _Acquaintance:
        known = self._known.get(peer)
        if known is None:
            known = self._known[peer] = _Acquaintance()
        return known

    def _heard(
        self,
        peer: PeerId,
        known: _Acquaintance,
        introduction: Introduction | None,
        *,
        answered: bool,
    ) -> float:
        """A peer said something now; return the time."""
        now = known.spoken_at = trio.current_time()
        if introduction is not None:
            self._introduced(peer, known, introduction)
        contact = known.contact
        if contact is None:
            if known.is_undialable or known.addresses:  # the first check may have had no room
                self._check(peer, known)
        elif not answered and contact in self._state.lost:
            # A peer that asks and does not answer is no use; an answer lets it back in.
            self._state.lost.heard_of(contact, now)
        else:
            self._put_in_table(contact)
        return now

    def _introduced(self, peer: PeerId, known: _Acquaintance, said: Introduction) -> None:
        addresses = without_peer(peer, said.addresses)
        has_moved = addresses != known.addresses
        known.addresses = addresses
        if not addresses:
            known.is_undialable = False
            if known.contact is not None:
                self._state.table.remove(known.contact)
                known.contact = None
            return
        link = self._state.network.link(peer)
        if link is not None and link.punched:
            return  # nobody else comes in through this hole
        if link is not None and not link.inbound and link.reach is Reach.DIRECT:
            self._proven(peer, known, link.remote_address)
        else:
            self._check(peer, known, CHECK_CHANGED_SECONDS if has_moved else CHECK_AGAIN_SECONDS)

    def _proven(self, peer: PeerId, known: _Acquaintance, address: str) -> Contact:
        proven = without_peer(peer, (address,))
        known.contact = contact = contact_of(peer, (*proven, *known.addresses))
        known.is_undialable = False
        self._state.network.learn_addresses(peer, contact.addresses)
        return contact

    def _check(
        self, peer: PeerId, known: _Acquaintance, after_seconds: float = CHECK_AGAIN_SECONDS
    ) -> None:
        """Dial a peer that opened the link itself, to find out whether it can be dialled."""
        now = trio.current_time()
        link = self._state.network.link(peer)
        if now - known.checked_at < after_seconds or (link is not None and link.punched):
            return
        if self._state.checks.add(self._try_addresses, peer, known):
            known.checked_at = now

    async def _try_addresses(self, peer: PeerId, known: _Acquaintance) -> None:
        contact = known.contact
        if self._known.get(peer) is not known or (
            contact is not None and set(known.addresses) <= set(contact.addresses)
        ):
            return
        counts = self._state.counts
        network = self._state.network
        likely = addresses_to_try(known.addresses, network.link(peer))
        try:
            address = await network.check_dialable(peer, likely)
        except Unreachable as error:
            known.is_undialable = known.contact is None
            counts.peers_not_dialable += 1
            log.debug("%s cannot be dialled and is not passed on: %s", peer, error)
            return
        counts.peers_found_dialable += 1
        if self._known.get(peer) is known and known.addresses:
            self._put_in_table(self._proven(peer, known, address))

    def _put_in_table(self, contact: Contact) -> None:
        table = self._state.table
        is_new = contact.node_id not in table
        blocking = table.heard_from(contact, trio.current_time())
        if blocking is not None:
            self._check_contact(blocking)
        if is_new and contact.node_id in table:
            self._contact_added(contact)
        else:
            self._state.lost.discard(contact)


def _log_dialability(state: DhtState) -> None:
    dialability = state.dialability
    if dialability.is_dialable:
        log.info("this node can be dialled after all: %s", dialability)
    else:  # as most homes; `potluck status` and `doctor` tell their owners what that means
        log.info(
            "this node cannot be dialled: %s. It reads and writes, and keeps nothing for others "
            "until a peer reaches one of its addresses",
            dialability,
        )
