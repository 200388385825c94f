"""What a gathering tells its shell to do, and what other peers' messages mean to it. Plain data."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from protocols.identity import PeerId


@dataclass(frozen=True)
class Candidate:
    """Somebody we heard of, and whether it can be dialled."""

    peer: PeerId
    reduces: bool = True


class Reply(enum.IntEnum):
    """What an invited peer answers. The numbers travel: append, never renumber."""

    COMING = 1
    """It joins the inviter, or has done so."""
    WITH_ANOTHER = 2
    """It has joined another, or leads itself, and names who leads: the two should meet."""
    STARTED = 3
    """Its group has started, and it shows the list."""
    NOT_HERE = 4
    """It looks for no group under this key, or for one that the inviter is not in."""


# -- effects


@dataclass(frozen=True)
class Follow:
    """Ask this peer to be listed, and let go of whoever was asked before.

    `passed_over` are those before it in the order who did not answer.
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
    """Find out whether this peer is there. (`is_there`, `not_met`.)"""

    peer: PeerId


@dataclass(frozen=True)
class SendOn:
    """Answer a waiting join: the leader is another."""

    ticket: int
    leader: PeerId


@dataclass(frozen=True)
class SendAway:
    """Answer a waiting join: here is no group for it."""

    ticket: int


@dataclass(frozen=True)
class Regroup:
    """Answer a waiting join: there are too many, and this is its group now."""

    ticket: int
    group: tuple[Candidate, ...]


@dataclass(frozen=True)
class Lead:
    """Close the list with these members (and ourselves), and answer their joins with it.

    Whoever waits besides is shown the list: it is late.
    """

    tickets: dict[PeerId, int]


@dataclass(frozen=True)
class End:
    """The search is over without a list of our own. Joins that wait are answered with `late`, the
    list that started without us, if that is how it ended."""

    ending: Ending


Effect = Follow | SendInvite | Probe | SendOn | SendAway | Regroup | Lead | End


# -- endings


@dataclass(frozen=True)
class StartedWithoutUs:
    """`by` showed the list."""

    by: PeerId


@dataclass(frozen=True)
class Nobody:
    """Nobody else is there. `unreachable` have slots and cannot be reached."""

    unreachable: tuple[PeerId, ...]


@dataclass(frozen=True)
class NotTogether:
    """Others are there, and it came to no list; `reasons` says of whom, and why."""

    reasons: tuple[tuple[PeerId, str], ...]
    unlisted_by: PeerId | None = None
    """Whom we followed, if it was there to the end and did not close its list."""


Ending = StartedWithoutUs | Nobody | NotTogether
