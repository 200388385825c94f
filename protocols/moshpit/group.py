"""What a peer asks for when it looks for a group, and what it gets.

Easy to get wrong: `expected` counts this peer itself, and is a promise about others: the list is
closed the moment that so many have joined, even if more are on their way.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocols.errors import PotluckError, ProtocolMisuse
from protocols.identity import PeerId
from protocols.moshpit.ballots import LARGEST_GROUP
from protocols.moshpit.roster import Offer, Roster, Terms, check_offer

SHORTEST_MATCHMAKING_SECONDS = 0.1
LONGEST_MATCHMAKING_SECONDS = 300.0  # whoever waits longer is better off with a step of its own


class NoGroup(PotluckError):
    """No group was found in time; the text says who was there and why it came to nothing."""


class Late(NoGroup):
    """A group has started under this key without us: the next round is ours.

    `roster` is its list, well signed.
    """

    roster: Roster | None = None


class NobodyElse(NoGroup):
    """Nobody else who can be reached has a live slot under this key: this peer is alone.

    `unreachable` are those who have a slot and cannot be reached: gone, or cut off from us.
    """

    unreachable: tuple[PeerId, ...] = ()


@dataclass(frozen=True)
class Search:
    """What one search for a group is to know.

    - `key`: under which the group meets, see group_keys.py.
    - `epoch`, `layout_digest` (32 bytes): what all members must have in common besides.
    - `offer`: what this peer brings; `offer.reduces` is False for one that can only dial out.
    - `group_size`: the most members of a group that this peer leads, or takes part in. `splits`:
      more who come become several groups; else they are told that the group has begun.
    - `expected`: how many peers the caller knows to come, itself included.
    - `awaited`: who of these is known by name; the list is not closed before the deadline without
      one of them that is there (awaited.py).
    - `unwelcome`: who is not listed where this peer leads, because it has held up its rounds.
    - `matchmaking_seconds`: the deadline of the list. The search ends then, or one short timeout
      (`closing_time.GRACE_SECONDS`) later.
    """

    key: str
    epoch: int
    layout_digest: bytes
    offer: Offer
    group_size: int = LARGEST_GROUP
    expected: int | None = None
    matchmaking_seconds: float = 10.0
    awaited: frozenset[PeerId] | None = None
    unwelcome: frozenset[PeerId] = frozenset()
    splits: bool = True

    def __post_init__(self) -> None:
        check_group_size(self.group_size)
        check_matchmaking_seconds(self.matchmaking_seconds)
        if self.expected is not None and self.expected < 1:
            raise ProtocolMisuse(f"{self.expected} peers are expected, the searching one included.")
        check_offer(self.offer)

    @property
    def terms(self) -> Terms:
        return Terms(self.key, self.epoch, self.layout_digest)


def check_group_size(group_size: int) -> None:
    """ProtocolMisuse if no agreement could be reached in a group of so many."""
    if not 2 <= group_size <= LARGEST_GROUP:
        raise ProtocolMisuse(
            f"A group of at most {group_size} was asked for.",
            why=f"Groups have 2 to {LARGEST_GROUP} members.",
        )


def check_matchmaking_seconds(seconds: float) -> None:
    """ProtocolMisuse if nobody can be found in so short a time, or should wait for so long."""
    if not SHORTEST_MATCHMAKING_SECONDS <= seconds <= LONGEST_MATCHMAKING_SECONDS:
        raise ProtocolMisuse(
            f"A search of {seconds} seconds was asked for.",
            why=f"It takes {SHORTEST_MATCHMAKING_SECONDS} to {LONGEST_MATCHMAKING_SECONDS}.",
        )


@dataclass(frozen=True)
class Group:
    """A list of members that all of them hold, and our place in it. `round_id`: 32 bytes."""

    roster: Roster
    me: int
    round_id: bytes

    @property
    def members(self) -> tuple[PeerId, ...]:
        return self.roster.members

    @property
    def leader(self) -> int:
        """The leader's place."""
        return self.roster.index_of(self.roster.leader)


REASONS_TOLD = 4  # of peers: the rest is in the log


def late(roster: Roster) -> Late:
    error = Late(
        f"{roster.leader} has started a group of {len(roster.entries)} without us.",
        why="Its list was closed before we had joined.",
        advice="The next round is ours; if this happens often, give matchmaking more time.",
    )
    error.roster = roster
    return error


def nobody_else(key: str, unreachable: tuple[PeerId, ...]) -> NobodyElse:
    error = NobodyElse(
        f"Nobody else is looking for a group under {key}.",
        why=f"Not to be reached: {', '.join(unreachable)}." if unreachable else "",
        advice="The others come later, or are in another epoch; try again with the next round.",
    )
    error.unreachable = unreachable
    return error


def not_together(key: str, reasons: tuple[tuple[PeerId, str], ...]) -> NoGroup:
    told = "; ".join(f"{peer}: {reason}" for peer, reason in reasons[:REASONS_TOLD])
    return NoGroup(
        f"No group came about under {key}, though {len(reasons)} others look for one.",
        why=f"{told}.",
        advice="Try again with the next round; `potluck peers` says who can be reached.",
    )
