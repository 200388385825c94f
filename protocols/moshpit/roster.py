"""The signed list of members on which a group settles before any data flows. Pure.

    Terms    what all members of a group must have in common: key, epoch, layout
    Entry    what one member brings, signed by it, for one leader and these terms
    Roster   the terms and all entries in the order of their hashes, signed by the leader

The order is that of blake3(key, peer id). No peer can choose its place, and the order differs for
every key, so that peers take turns to lead. The leader is the first that can be dialled
(`reduces`).

Signatures and the `round_id` are over canonical bytes, not over the MessagePack that was sent. All
numbers are big-endian:

    terms    u16 length of key, key in UTF-8, u64 epoch, 32 bytes layout digest
    entry    terms, 32 bytes public key of the leader, 32 bytes public key of the member,
             f64 weight, u64 up, u64 down (bytes per second), u8 reduces, u8 router, u16 peers,
             u8 turn, 16 bytes nonce
    roster   terms, 32 bytes public key of the leader, u64 started (ms since 1970 by the leader's
             clock), 16 bytes nonce, u16 entries, and for each entry the bytes of the above after
             the leader's key, followed by its 64 bytes of signature

Promises: if two peers pass `check_roster` with the same `round_id`, they have the same list, bit
for bit, and every entry in it was meant for this leader and these terms. Clocks and chance do not
matter.

Easy to get wrong: a decoded Roster is only a claim. An entry does not say that its owner will come,
only that it asked this leader to list it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable
from typing import Annotated

import trio
from blake3 import blake3
from msgspec import Meta

from protocols.errors import MalformedMessage, PotluckError, Refused
from protocols.identity import (
    LONGEST_PEER_ID,
    SIGNATURE_BYTES,
    Identity,
    PeerId,
    public_key_of,
    verify,
)
from protocols.rpc import Message

ENTRY_DOMAIN = b"potluck moshpit entry 4"
ROSTER_DOMAIN = b"potluck moshpit roster 4"

DIGEST_BYTES = 32
NONCE_BYTES = 16
LONGEST_KEY = 256  # characters, as in the directory
LARGEST_LIST = 1_024  # members that a list may have on the wire; a group has fewer (ballots.py)
FEWEST_MEMBERS = 2  # a head that finds no other one makes a list of itself alone
LARGEST_WEIGHT = 1e15  # samples: beyond it float64 sums lose whole samples
LARGEST_RATE = 1 << 50  # bytes per second: a petabyte, so that sums stay far inside 64 bits
LARGEST_EPOCH = (1 << 63) - 1
LARGEST_TIME_MS = 1 << 53

CHECKED_WITHOUT_A_PAUSE = 8  # signatures, most of a millisecond

_KEY_LENGTH = struct.Struct(">H")
_EPOCH = struct.Struct(">Q")
_NUMBERS = struct.Struct(">dQQ?BHB")
_STARTED = struct.Struct(">Q")
_COUNT = struct.Struct(">H")

KeyText = Annotated[str, Meta(min_length=3, max_length=LONGEST_KEY)]
PeerText = Annotated[PeerId, Meta(min_length=1, max_length=LONGEST_PEER_ID)]
Epoch = Annotated[int, Meta(ge=0, le=LARGEST_EPOCH)]
Digest = Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
Nonce = Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Signature = Annotated[bytes, Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]
Router = Annotated[int, Meta(ge=0, le=255)]
Peers = Annotated[int, Meta(ge=1, le=0xFFFF)]
Turn = Annotated[int, Meta(ge=0, le=255)]
Rate = Annotated[int, Meta(ge=0, le=LARGEST_RATE)]
Time = Annotated[int, Meta(ge=0, le=LARGEST_TIME_MS)]


class Terms(Message, frozen=True):
    """The terms that all members share. `layout_digest` names the vector's layout and codecs."""

    key: KeyText
    epoch: Epoch
    layout_digest: Digest


class Offer(Message, frozen=True):
    """A member's own data. Rates in bytes per second, 0 if they are not known.

    `weight` is in samples; 0 is an auxiliary peer, which brings no data. `reduces` is False for
    one that can only dial out. `router` is the kind of its router (nat/kinds.py), by which all
    members know which pairs can only meet through a relay. `peers`: for how many it comes; more
    than one for the head of a cohort (cohorts.py). `turn`: when it becomes the head of its
    cohort, the smallest first.
    """

    weight: float
    up_bytes_per_second: Rate = 0
    down_bytes_per_second: Rate = 0
    reduces: bool = True
    router: Router = 0
    peers: Peers = 1
    turn: Turn = 0


class Entry(Message, frozen=True):
    """One member of a list, signed by itself: the module's docstring says over which bytes."""

    peer: PeerText
    weight: float
    up_bytes_per_second: Rate
    down_bytes_per_second: Rate
    reduces: bool
    router: Router
    peers: Peers
    turn: Turn
    nonce: Nonce
    signature: Signature


class Roster(Message, frozen=True):
    """The list: entries in hash order, one of them the leader's own."""

    terms: Terms
    leader: PeerText
    started_ms: Time
    nonce: Nonce
    entries: Annotated[tuple[Entry, ...], Meta(min_length=1, max_length=LARGEST_LIST)]
    signature: Signature

    @property
    def key(self) -> str:
        return self.terms.key

    @property
    def epoch(self) -> int:
        return self.terms.epoch

    @property
    def layout_digest(self) -> bytes:
        return self.terms.layout_digest

    @property
    def members(self) -> tuple[PeerId, ...]:
        return tuple(entry.peer for entry in self.entries)

    @property
    def round_id(self) -> bytes:
        """32 bytes that identify exactly this list. Compute it once and keep it."""
        return blake3(canonical_roster(self)).digest()

    def index_of(self, peer: PeerId) -> int:
        """A member's place; NotAMember if it has none."""
        for place, entry in enumerate(self.entries):
            if entry.peer == peer:
                return place
        raise NotAMember(
            f"{peer} is not in the list of {self.leader} for {self.key}.",
            why="The list was closed before it had joined, or it joined another one.",
            advice="It takes part in the next round.",
        )


def hash_order(key: str, peer: PeerId) -> bytes:
    """A peer's place under a key: peers are ordered by these 32 bytes."""
    return blake3(key.encode() + peer.encode()).digest()


def leader_of(entries: Iterable[Entry]) -> PeerId | None:
    """The first peer that can be dialled, of entries in hash order."""
    return next((entry.peer for entry in entries if entry.reduces), None)


# -- making


def sign_entry(
    identity: Identity, terms: Terms, leader: PeerId, offer: Offer, nonce: bytes
) -> Entry:
    """Our own entry, for one leader. ImpossibleNumber if all others would refuse it."""
    unsigned = Entry(
        identity.peer_id,
        offer.weight,
        offer.up_bytes_per_second,
        offer.down_bytes_per_second,
        offer.reduces,
        offer.router,
        offer.peers,
        offer.turn,
        nonce,
        bytes(SIGNATURE_BYTES),
    )
    check_offer(unsigned)
    signature = identity.sign(ENTRY_DOMAIN, canonical_entry(terms, leader, unsigned))
    return Entry(
        unsigned.peer,
        unsigned.weight,
        unsigned.up_bytes_per_second,
        unsigned.down_bytes_per_second,
        unsigned.reduces,
        unsigned.router,
        unsigned.peers,
        unsigned.turn,
        nonce,
        signature,
    )


def sign_roster(
    identity: Identity, terms: Terms, entries: Iterable[Entry], started_ms: int, nonce: bytes
) -> Roster:
    """The list that this peer leads. Sorts the entries."""
    ordered = tuple(sorted(entries, key=lambda entry: hash_order(terms.key, entry.peer)))
    unsigned = Roster(terms, identity.peer_id, started_ms, nonce, ordered, bytes(SIGNATURE_BYTES))
    signature = identity.sign(ROSTER_DOMAIN, canonical_roster(unsigned))
    return Roster(terms, identity.peer_id, started_ms, nonce, ordered, signature)


# -- canonical bytes


def canonical_terms(terms: Terms) -> bytes:
    key = terms.key.encode()
    return b"".join(
        (_KEY_LENGTH.pack(len(key)), key, _EPOCH.pack(terms.epoch), terms.layout_digest)
    )


def canonical_entry(terms: Terms, leader: PeerId, entry: Entry) -> bytes:
    return canonical_terms(terms) + public_key_of(leader) + _own_part(entry)


def canonical_roster(roster: Roster) -> bytes:
    parts = [
        canonical_terms(roster.terms),
        public_key_of(roster.leader),
        _STARTED.pack(roster.started_ms),
        roster.nonce,
        _COUNT.pack(len(roster.entries)),
    ]
    for entry in roster.entries:
        parts += (_own_part(entry), entry.signature)
    return b"".join(parts)


def _own_part(entry: Entry) -> bytes:
    numbers = _NUMBERS.pack(
        entry.weight,
        entry.up_bytes_per_second,
        entry.down_bytes_per_second,
        entry.reduces,
        entry.router,
        entry.peers,
        entry.turn,
    )
    return public_key_of(entry.peer) + numbers + entry.nonce


# -- checking


def check_offer(offer: Offer | Entry) -> None:
    """ImpossibleNumber unless weight and rates are within their bounds."""
    whose = f"the entry of {offer.peer}" if isinstance(offer, Entry) else "this offer"
    if not (math.isfinite(offer.weight) and 0.0 <= offer.weight <= LARGEST_WEIGHT):
        raise ImpossibleNumber(
            f"The weight in {whose} is {offer.weight!r}.",
            why=f"A weight is a number of samples, from 0 to {LARGEST_WEIGHT:g}.",
            advice="Check how that peer counts its samples.",
        )
    for rate in (offer.up_bytes_per_second, offer.down_bytes_per_second):
        if not 0 <= rate <= LARGEST_RATE:
            raise ImpossibleNumber(
                f"A rate in {whose} is {rate} bytes per second.",
                why=f"A rate is a whole number from 0 to {LARGEST_RATE}.",
                advice="Leave it out if it is not known.",
            )


def check_terms(terms: Terms, ours: Terms) -> None:
    """OtherKey, StaleEpoch or OtherLayout unless these are our terms."""
    if terms.key != ours.key:
        raise OtherKey(
            f"It is for the key {terms.key}, and not for {ours.key}.",
            why="It belongs to another run, round or group.",
            advice="Nothing has to be done: each group forms under its own key.",
        )
    if terms.epoch != ours.epoch:
        raise StaleEpoch(
            f"It is for epoch {terms.epoch}, and not for {ours.epoch}.",
            why="The other side is behind or ahead.",
            advice="The side that is behind fetches the run's state and joins the next round.",
        )
    if terms.layout_digest != ours.layout_digest:
        raise OtherLayout(
            f"It is for the layout {terms.layout_digest.hex()[:12]}, "
            f"and not for {ours.layout_digest.hex()[:12]}.",
            why="The two sides average other tensors, in another order, with other codecs, "
            "or in chunks of another size.",
            advice="Run the same version with the same run file on both.",
        )


def check_entry(entry: Entry, terms: Terms, leader: PeerId) -> None:
    """ImpossibleNumber or NotSigned unless its owner has signed this, for this leader.

    Costs most of a tenth of a millisecond.
    """
    check_offer(entry)
    if not _is_signed(
        ENTRY_DOMAIN, entry.peer, entry.signature, lambda: canonical_entry(terms, leader, entry)
    ):
        raise NotSigned(
            f"The entry of {entry.peer} was not signed by it for {leader} and {terms.key}.",
            why="It was changed, or taken from another list.",
            advice="Do not take part in lists of the peer that sent it.",
        )


def check_list(
    roster: Roster, ours: Terms, largest: int = LARGEST_LIST, fewest: int = FEWEST_MEMBERS
) -> None:
    """Checks everything in a list except its entries' signatures: terms, size, order, leader, and
    the leader's own signature. Quick."""
    check_terms(roster.terms, ours)
    if not fewest <= len(roster.entries) <= largest:
        raise TooMany(
            f"The list of {roster.leader} has {len(roster.entries)} members.",
            why=f"A group has {fewest} to {largest} here.",
            advice="Give all peers the same group size.",
        )
    if len(set(roster.members)) != len(roster.entries):
        raise TwiceTheSame(
            f"The list of {roster.leader} has a member twice.",
            why="Its leader is broken or hostile.",
            advice="Do not take part in its lists.",
        )
    places = [hash_order(roster.key, peer) for peer in roster.members]
    if places != sorted(places):
        raise WrongOrder(
            f"The list of {roster.leader} is not in the order of the hashes.",
            why="Its leader is broken or hostile.",
            advice="Do not take part in its lists.",
        )
    if leader_of(roster.entries) != roster.leader:
        raise WrongLeader(
            f"{roster.leader} is not the first of its list that can be dialled.",
            why="It would lead out of turn.",
            advice="Do not take part in its lists.",
        )
    if not _is_signed(
        ROSTER_DOMAIN, roster.leader, roster.signature, lambda: canonical_roster(roster)
    ):
        raise NotSigned(
            f"The list in the name of {roster.leader} was not signed by it.",
            why="A stranger made it, or it was changed on its way.",
            advice="Do not take part in lists of the peer that sent it.",
        )


def check_roster(
    roster: Roster, ours: Terms, mine: Entry | None = None, largest: int = LARGEST_LIST
) -> None:
    """Raise the reason, by name, unless this is a list under our terms, signed by all its members.

    `mine` is the entry that we gave to its leader: it must be there as it was.
    """
    check_list(roster, ours, largest)
    if mine is not None:
        check_own_entry(roster, mine)
    for entry in roster.entries:
        if entry != mine:
            check_entry(entry, roster.terms, roster.leader)


async def check_with_pauses(
    roster: Roster,
    ours: Terms,
    mine: Entry | None = None,
    largest: int = LARGEST_LIST,
    fewest: int = FEWEST_MEMBERS,
) -> None:
    """`check_roster`, which takes 25 ms for 256 members, with pauses for other tasks."""
    check_list(roster, ours, largest, fewest)
    if mine is not None:
        check_own_entry(roster, mine)
    others = [entry for entry in roster.entries if entry != mine]
    for place, entry in enumerate(others):
        if place and place % CHECKED_WITHOUT_A_PAUSE == 0:
            await trio.lowlevel.checkpoint()
        check_entry(entry, roster.terms, roster.leader)


def check_own_entry(roster: Roster, mine: Entry) -> None:
    """NotAMember or ChangedEntry unless our entry is in the list as we sent it."""
    if roster.entries[roster.index_of(mine.peer)] != mine:
        raise ChangedEntry(
            f"{roster.leader} has changed our entry, or took an old one of ours.",
            why="It is broken or hostile.",
            advice="Do not take part in its lists.",
        )


def _is_signed(domain: bytes, peer: PeerId, signature: bytes, message: Callable[[], bytes]) -> bool:
    try:
        return verify(domain, peer, signature, message())
    except MalformedMessage:  # not a peer id
        return False


# The reasons to refuse an entry or a list of members: one exception type for each.
#
# All of them can cross the wire (`CODES`), so that a refused peer learns the reason, and its owner
# learns what to do. No peer is punished for them: a peer with an old layout is behind, not hostile.


class RosterRefused(Refused):
    """An entry or a roster is not acceptable. The root of the reasons below."""


class OtherKey(RosterRefused):
    """It is for another run, round or group."""


class StaleEpoch(RosterRefused):
    """It is for an epoch that is not ours: an old one, or one that we have not reached."""


class OtherLayout(RosterRefused):
    """It is for a vector of another layout: other tensors, lengths, order or codecs."""


class NotSigned(RosterRefused):
    """A signature is not that of the named peer."""


class NotAMember(RosterRefused):
    """The sender or the reader of the list is not in it."""


class ChangedEntry(RosterRefused):
    """Our own entry is not in the list as we sent it."""


class WrongLeader(RosterRefused):
    """It was not made by the first in the order that can be dialled."""


class WrongOrder(RosterRefused):
    """The members are not in the order of their hashes."""


class TwiceTheSame(RosterRefused):
    """One peer is in the list twice."""


class TooMany(RosterRefused):
    """The list has more members, or fewer, than a group may have."""


class ImpossibleNumber(RosterRefused):
    """A weight or a bandwidth that is negative, not finite, or beyond all bounds."""


CODES: dict[str, type[PotluckError]] = {
    "other-key": OtherKey,
    "stale-epoch": StaleEpoch,
    "other-layout": OtherLayout,
    "not-signed": NotSigned,
    "not-a-member": NotAMember,
    "changed-entry": ChangedEntry,
    "wrong-leader": WrongLeader,
    "wrong-order": WrongOrder,
    "twice-the-same": TwiceTheSame,
    "too-many": TooMany,
    "impossible-number": ImpossibleNumber,
}
