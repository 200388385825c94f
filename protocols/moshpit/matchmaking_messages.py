"""The messages between peers that look for a group, and the slots under which they meet.

    join         "list me": answered when the list is closed, or when there is a better place
    list         "hand me the list of this digest": answered when it is there (handing_on.py)
    invite       "I lead": answered at once
    still-there  a leader that is waiting, told from one that is gone: answered at once

Easy to get wrong: places (addresses of peers) are hearsay. The named peer is dialled and proves its
identity by its key; nothing else is concluded from a place.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Annotated, Final

from msgspec import Meta

from protocols.dht import Family
from protocols.moshpit.gathering_effects import Reply
from protocols.moshpit.roster import CODES, LARGEST_LIST, Digest, Entry, PeerText, Roster, Terms
from protocols.rpc import Empty, Message, Method, Milliseconds

PROTOCOL: Final = "/potluck/moshpit/1.0.0"

MOST_ADDRESSES = 6  # of one place: direct ones of both families, and some relays
LONGEST_ADDRESS = 200  # characters; a relayed one has some 150
MOST_PASSED_OVER = 128  # that a join names: more dead ones at the head of an order are no order
LAYOUT_MARK_BYTES = 8  # of the layout's digest: enough to tell layouts apart, no proof of anything

REQUEST_LIMIT_BYTES = 16 << 10
ANSWER_LIMIT_BYTES = 1 << 20  # a list of 1,024 has some 170 KB, their places at most 400 KB
SLOT_LIMIT_BYTES = 1_536
SLOT_BYTES_PER_KEY = 1 << 20
LONGEST_SLOT_SECONDS = 600.0

Addresses = Annotated[
    tuple[Annotated[str, Meta(max_length=LONGEST_ADDRESS)], ...], Meta(max_length=MOST_ADDRESSES)
]


class GroupSlot(Message, frozen=True):
    """The slot under a group's key: a peer looks for this group. No secrets, no promises.

    `layout`: the first bytes of its layout's digest. `addresses`: empty for one that can only dial
    out.
    """

    reduces: bool
    layout: Annotated[bytes, Meta(min_length=LAYOUT_MARK_BYTES, max_length=LAYOUT_MARK_BYTES)]
    addresses: Addresses = ()


GROUP = Family(
    "group",
    GroupSlot,
    value_limit_bytes=SLOT_LIMIT_BYTES,
    slots_per_key=LARGEST_LIST,
    longest_ttl_seconds=LONGEST_SLOT_SECONDS,
    bytes_per_key=SLOT_BYTES_PER_KEY,
    replicas=8,
)
"""Every node of a swarm that averages declares it (node/core/directory.py)."""


class Place(Message, frozen=True):
    """A peer, and where it may be dialled."""

    peer: PeerText
    reduces: bool = True
    addresses: Addresses = ()


class JoinRequest(Message, frozen=True):
    """`passed_over`: earlier peers that did not answer. `patience_ms`: how long the asking peer
    will wait for the list. `addresses`: where the others may dial it."""

    terms: Terms
    entry: Entry
    passed_over: Annotated[tuple[PeerText, ...], Meta(max_length=MOST_PASSED_OVER)] = ()
    patience_ms: Milliseconds = 0
    addresses: Addresses = ()


class JoinReply(enum.IntEnum):
    """How a join ended. The numbers are sent: append, never renumber."""

    LISTED = 1
    """`roster` is the list, and the asking peer is in it; `places` says where members may be
    dialled."""
    SENT_ON = 2
    """An earlier peer leads: the first of `places`."""
    REGROUPED = 3
    """There were too many: `places` is the group that the asking peer is in now."""
    STARTED = 4
    """A group has started without it: `roster`."""
    NOT_HERE = 5
    """No peer looks for this group here."""
    FETCH = 6
    """The asking peer is in the list whose digest is `digest`; `places` has it, or soon will
    (handing_on.py)."""


Places = Annotated[tuple[Place, ...], Meta(max_length=LARGEST_LIST)]


class JoinAnswer(Message, frozen=True):
    """`fetch_ms`: when the first of `places` should have handed the list on."""

    reply: Annotated[int, Meta(ge=1, le=255)]
    roster: Roster | None = None
    places: Places = ()
    digest: Digest | None = None
    fetch_ms: Milliseconds = 0


class ListRequest(Message, frozen=True):
    """Asks a member to hand this list on (`handing_on.digest_of`)."""

    digest: Digest


class MemberList(Message, frozen=True):
    """A list, and where its members may be dialled, as its leader has put them together."""

    roster: Roster
    places: Places


class Invitation(Message, frozen=True):
    """The sender leads, as far as it knows. `addresses` are its own."""

    terms: Terms
    addresses: Addresses = ()


class InvitationAnswer(Message, frozen=True):
    """`leader` with WITH_ANOTHER, `roster` with STARTED."""

    reply: Annotated[int, Meta(ge=1, le=255)]
    leader: Place | None = None
    roster: Roster | None = None


JOIN: Final = Method(
    PROTOCOL,
    "join",
    JoinRequest,
    JoinAnswer,
    REQUEST_LIMIT_BYTES,
    ANSWER_LIMIT_BYTES,
    errors=CODES,
    training=True,
)
INVITE: Final = Method(
    PROTOCOL,
    "invite",
    Invitation,
    InvitationAnswer,
    REQUEST_LIMIT_BYTES,
    ANSWER_LIMIT_BYTES,
    errors=CODES,
    training=True,
)
LIST: Final = Method(
    PROTOCOL,
    "list",
    ListRequest,
    MemberList,
    64,
    ANSWER_LIMIT_BYTES,
    errors=CODES,
    training=True,
)
STILL_THERE: Final = Method(PROTOCOL, "still-there", Empty, Empty, 16, 16, training=True)

NOT_HERE = JoinAnswer(JoinReply.NOT_HERE)
INVITED_FOR_NOTHING = InvitationAnswer(Reply.NOT_HERE)


def short_enough(addresses: Iterable[str]) -> tuple[str, ...]:
    """As many of these addresses as a place may have."""
    fitting = [one for one in addresses if len(one) <= LONGEST_ADDRESS]
    return tuple(fitting[:MOST_ADDRESSES])
