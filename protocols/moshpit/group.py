"""What a peer asks for when it looks for a group, and what it gets.

Easy to get wrong: `expected` counts this peer itself, and is a promise about others: the list is
closed the moment that so many have joined, even if more are on their way.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from protocols.errors import PotluckError, ProtocolMisuse
from protocols.identity import PeerId
from protocols.moshpit.ballots import LARGEST_GROUP
from protocols.moshpit.roster import LONGEST_KEY, Offer, Roster, Terms, check_offer

SHORTEST_MATCHMAKING_SECONDS = 0.1
LONGEST_MATCHMAKING_SECONDS = 300.0  # whoever waits longer is better off with a step of its own


class NoGroup(PotluckError):
    """No group was found in time; the text says who was there and why it came to nothing."""


class Late(NoGroup):
    """A group has started under this key without us: the next round is ours.

    `roster` is its list, well signed.
    """

    roster: Roster | None = None


class NeverListed(NoGroup):
    """The leader that we followed was there, and did not close its list in time."""

    leader: PeerId | None = None


class NobodyElse(NoGroup):
    """Nobody else who can be reached has a live slot under this key: this peer is alone.

    `unreachable` are those who have a slot and cannot be reached: gone, or cut off from us.
    """

    unreachable: tuple[PeerId, ...] = ()


@dataclass(frozen=True)
class Search:
    """What one search for a group is to know.

    - `key`: under which the group meets, see group.py.
    - `epoch`, `layout_digest` (32 bytes): what all members must have in common besides.
    - `offer`: what this peer brings; `offer.reduces` is False for one that can only dial out.
    - `group_size`: the most members of a group that this peer leads, or takes part in. `splits`:
      more who come become several groups; else they are told that the group has begun.
    - `expected`: how many peers the caller knows to come, itself included.
    - `awaited`: who of these is known by name; the list is not closed before the deadline without
      one of them that is there (known_peers.py).
    - `unwelcome`: who is not listed where this peer leads, because it has held up its rounds.
    - `unled`: whom this peer does not follow, because it has held up rounds that it led.
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
    unled: frozenset[PeerId] = frozenset()
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
    """A list of members that all of them hold, and our place in it. `round_id`: 32 bytes.
    `list_seconds`: where the list is handed on (handing_on.py), how long it should take to come to
    everybody; 0 where everybody has it from the leader."""

    roster: Roster
    me: int
    round_id: bytes
    list_seconds: float = 0.0

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


def never_listed(error: NoGroup, leader: PeerId) -> NeverListed:
    """The same, and whose doing it was."""
    named = NeverListed(error.what, why=error.why, advice=error.advice)
    named.leader = leader
    return named


def not_together(key: str, reasons: tuple[tuple[PeerId, str], ...]) -> NoGroup:
    told = "; ".join(f"{peer}: {reason}" for peer, reason in reasons[:REASONS_TOLD])
    return NoGroup(
        f"No group came about under {key}, though {len(reasons)} others look for one.",
        why=f"{told}.",
        advice="Try again with the next round; `potluck peers` says who can be reached.",
    )


# The keys under which groups meet in the directory, and what they are made of.
#
#     group_key("poem", epoch=7, round_number=0, name="all")    # group/poem/7/0/all
#     group_key("poem", 7, 0, "all", topic="a1b2.gradients")    # group/poem/7/0/all/a1b2.gradients
#
# The key is in the terms of a group, and so in everything that its members sign: peers with
# different runs, epochs, rounds, names or topics are never in one list. A *topic* is whatever else
# the caller wants those who average together to have in common: what is averaged, and the history
# that led to it. Without one the key ends with the name.
#
# Promise: different parts make different keys. None of them may contain the slash between them.
#
# Easy to get wrong: a topic may change with every epoch, as a history does. Where peers meet again
# (`place_of`) therefore depends neither on the epoch nor on the topic.


LONGEST_RUN = 64  # characters, as the auth server allows
LONGEST_TOPIC = 80  # characters: a digest of 16 bytes in hex, and some words
_WORD = re.compile(r"[A-Za-z0-9._-]+")


def group_key(run: str, epoch: int, round_number: int, name: str, topic: str = "") -> str:
    """`group/<run>/<epoch>/<round>/<name>`, and `/<topic>` where there is one.

    ProtocolMisuse if the directory has no room for so long a key: a grid of very many dimensions.
    """
    key = f"group/{run}/{epoch}/{round_number}/{name}" + (f"/{topic}" if topic else "")
    if len(key.encode()) > LONGEST_KEY:
        raise ProtocolMisuse(
            f"The key {key[:40]}… of a group has {len(key.encode())} bytes.",
            why=f"The directory takes keys of up to {LONGEST_KEY}.",
            advice="Shorten the topic, or take a grid of fewer dimensions.",
        )
    return key


def run_of(key: str) -> str:
    """The run; of a key that is none of ours, anything."""
    return [*key.split("/", 2), ""][1]


def place_of(key: str) -> str:
    """What keys have in common under which the same peers may meet: run, round and name."""
    family, run, _epoch, number, name = [*key.split("/"), "", "", "", ""][:5]
    return f"{family}/{run}/{number}/{name}"


def check_run(run: str) -> None:
    """ProtocolMisuse unless this can stand in a key."""
    if len(run) > LONGEST_RUN or not _WORD.fullmatch(run):
        raise ProtocolMisuse(
            f"{run[:LONGEST_RUN]!r} cannot be the name of a run.",
            why=f"It has 1 to {LONGEST_RUN} letters, digits, '.', '_' and '-'.",
        )


def check_topic(topic: str) -> None:
    """ProtocolMisuse unless this can stand in a key; an empty one can."""
    if len(topic) > LONGEST_TOPIC or (topic and not _WORD.fullmatch(topic)):
        raise ProtocolMisuse(
            f"{topic[:LONGEST_TOPIC]!r} cannot be the topic of an averaging.",
            why=f"It has at most {LONGEST_TOPIC} letters, digits, '.', '_' and '-'.",
            advice="Take a digest, in hex, of what is longer.",
        )
