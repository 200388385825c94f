"""The effects and endings of a gathering, and the answers to invitations. Plain data."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from protocols.identity import PeerId


@dataclass(frozen=True)
class Candidate:
    """A peer that we have heard of, and whether it can be dialled. `peers`: for how many it comes,
    if it has asked to join."""

    peer: PeerId
    reduces: bool = True
    peers: int = 1


class Reply(enum.IntEnum):
    """The answer of an invited peer. The numbers are sent: append, never renumber."""

    COMING = 1
    """It joins the inviter, or has done so."""
    WITH_ANOTHER = 2
    """It has joined another peer, or leads itself, and names the leader: the two should meet."""
    STARTED = 3
    """Its group has started, and it shows the list."""
    NOT_HERE = 4
    """It looks for no group under this key, or for one without the inviter."""


# -- effects


@dataclass(frozen=True)
class Follow:
    """Ask this peer to list us, and give up the request to the one before.

    `passed_over` are the peers before it in the order that did not answer.
    """

    leader: PeerId
    passed_over: tuple[PeerId, ...]


@dataclass(frozen=True)
class SendInvite:
    """Tell this peer that we lead. `reduces`: it can be dialled."""

    peer: PeerId
    reduces: bool


@dataclass(frozen=True)
class Probe:
    """Find out whether this peer is there, and call `is_there` or `not_met`."""

    peer: PeerId


@dataclass(frozen=True)
class SendOn:
    """Answer a waiting join: another peer leads."""

    ticket: int
    leader: PeerId


@dataclass(frozen=True)
class SendAway:
    """Answer a waiting join: there is no group for it here."""

    ticket: int


@dataclass(frozen=True)
class Regroup:
    """Answer a waiting join: there are too many, and this is its group now."""

    ticket: int
    group: tuple[Candidate, ...]


@dataclass(frozen=True)
class Lead:
    """Close the list with these members (and ourselves), and answer their joins with it.

    Other peers that wait are late, and are shown the list.
    """

    tickets: dict[PeerId, int]


@dataclass(frozen=True)
class End:
    """The search is over without a list of our own. If a list has started without us, waiting joins
    are answered with it (`late`)."""

    ending: Ending


Effect = Follow | SendInvite | Probe | SendOn | SendAway | Regroup | Lead | End


# -- endings


@dataclass(frozen=True)
class StartedWithoutUs:
    """`by` showed the list."""

    by: PeerId


@dataclass(frozen=True)
class Nobody:
    """No other peer is there. `unreachable` have slots but cannot be reached."""

    unreachable: tuple[PeerId, ...]


@dataclass(frozen=True)
class NotTogether:
    """Others are there, but there was no list; `reasons` says which, and why."""

    reasons: tuple[tuple[PeerId, str], ...]
    unlisted_by: PeerId | None = None
    """The peer that we followed, if it was there to the end and did not close its list."""


Ending = StartedWithoutUs | Nobody | NotTogether
