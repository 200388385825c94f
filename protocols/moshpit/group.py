"""A peer's search for a group, the group that it gets, and the keys under which groups meet.

Easy to get wrong: `expected` counts this peer itself, and is a promise about others: the list is
closed as soon as this many have joined, even if more are on their way.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from protocols.errors import PotluckError, ProtocolMisuse
from protocols.identity import PeerId
from protocols.moshpit.ballots import LARGEST_GROUP
from protocols.moshpit.roster import LONGEST_KEY, Offer, Roster, Terms, check_offer

SHORTEST_MATCHMAKING_SECONDS = 0.1
LONGEST_MATCHMAKING_SECONDS = 300.0  # instead of waiting longer, a peer should make a step alone


class NoGroup(PotluckError):
    """No group was found in time; the text says which peers were there, and why it failed.

    `there`: those peers.
    """

    there: frozenset[PeerId] = frozenset()


class Late(NoGroup):
    """A group has started under this key without us: the next round is ours.

    `roster` is its list, with valid signatures.
    """

    roster: Roster | None = None


class NeverListed(NoGroup):
    """The leader that we followed was there, but did not close its list in time."""

    leader: PeerId | None = None


class Overtaken(NoGroup):
    """The run has gone on to a later epoch while this peer looked for a group."""


class NobodyElse(NoGroup):
    """No other peer that can be reached has a live slot under this key: this peer is alone.

    `unreachable` have a slot but cannot be reached: they are gone, or cut off from us.
    """

    unreachable: tuple[PeerId, ...] = ()


@dataclass(frozen=True)
class Search:
    """The parameters of one search for a group.

    - `key`: the key under which the group meets (below).
    - `epoch`, `layout_digest` (32 bytes): all members must have these in common, too.
    - `offer`: what this peer brings; `offer.reduces` is False if it can only dial out.
    - `group_size`: the most members of a group that this peer leads, or takes part in. `splits`: if
      more come, they become several groups; else they are told that the group has begun.
    - `expected`: how many peers the caller knows to come, itself included.
    - `coming`: those of them that are known by name. `awaited`: those that are waited for. Before
      the deadline, the list is not closed without one of these that is there (known_peers.py).
      `lost`: those that seem to be gone.
    - `most_peers`: for how many any member counts at most. If it is more than one, others may come
      in place of those that are lost.
    - `fewest`: of how many peers the list must be, this one included, before its deadline.
      `for_more_seconds`: so much longer than that deadline it stays open for them.
    - `unwelcome`: peers that this peer does not list, because they have held up its rounds.
    - `unled`: peers that this peer does not follow, because rounds that they led came to nothing.
    - `may_be_one`: if nobody else looks for the group, this peer is one by itself, and its list
      tells those that come later.
    - `seat_of`: of peers with the same seat, this peer lists only one (known_peers.py).
    - `matchmaking_seconds`: the deadline of the list. The search ends then, or one short timeout
      (`closing_time.FOLLOWER_GRACE_SECONDS`) later. `more_seconds`: by so much it is later.
    """

    key: str
    epoch: int
    layout_digest: bytes
    offer: Offer
    group_size: int = LARGEST_GROUP
    expected: int | None = None
    matchmaking_seconds: float = 10.0
    more_seconds: float = 0.0
    awaited: frozenset[PeerId] | None = None
    coming: frozenset[PeerId] = frozenset()
    lost: frozenset[PeerId] = frozenset()
    unwelcome: frozenset[PeerId] = frozenset()
    unled: frozenset[PeerId] = frozenset()
    splits: bool = True
    most_peers: int = 1
    fewest: int = 0
    for_more_seconds: float = 0.0
    may_be_one: bool = False
    seat_of: Callable[[PeerId], int] | None = None

    def __post_init__(self) -> None:
        check_group_size(self.group_size)
        check_matchmaking_seconds(self.matchmaking_seconds + self.more_seconds)
        if self.expected is not None and self.expected < 1:
            raise ProtocolMisuse(f"{self.expected} peers are expected, the searching one included.")
        check_offer(self.offer)

    @property
    def terms(self) -> Terms:
        return Terms(self.key, self.epoch, self.layout_digest)


def check_group_size(group_size: int) -> None:
    """ProtocolMisuse if a group of this size could reach no agreement."""
    if not 2 <= group_size <= LARGEST_GROUP:
        raise ProtocolMisuse(
            f"A group of at most {group_size} was asked for.",
            why=f"Groups have 2 to {LARGEST_GROUP} members.",
        )


def check_matchmaking_seconds(seconds: float) -> None:
    """ProtocolMisuse if this is too short to find a peer, or too long to wait."""
    if not SHORTEST_MATCHMAKING_SECONDS <= seconds <= LONGEST_MATCHMAKING_SECONDS:
        raise ProtocolMisuse(
            f"A search of {seconds} seconds was asked for.",
            why=f"It takes {SHORTEST_MATCHMAKING_SECONDS} to {LONGEST_MATCHMAKING_SECONDS}.",
        )


@dataclass(frozen=True)
class Group:
    """A list of members that all of them hold, and our place in it. `round_id`: 32 bytes.
    `list_seconds`: if the list is handed on (handing_on.py), when all members should have it; 0 if
    all get it from the leader."""

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


def overtaken(key: str) -> Overtaken:
    return Overtaken(
        f"The others have gone on while this peer looked for a group under {key}.",
        advice="Fetch the state of the run, and join its next round.",
    )


def never_listed(error: NoGroup, leader: PeerId) -> NeverListed:
    """The same error, with the leader that caused it."""
    named = NeverListed(error.what, why=error.why, advice=error.advice)
    named.leader = leader
    return named


def not_together(key: str, reasons: tuple[tuple[PeerId, str], ...]) -> NoGroup:
    told = "; ".join(f"{peer}: {reason}" for peer, reason in reasons[:REASONS_TOLD])
    error = NoGroup(
        f"No group came about under {key}, though {len(reasons)} others look for one.",
        why=f"{told}.",
        advice="Try again with the next round; `potluck peers` says who can be reached.",
    )
    error.there = frozenset(peer for peer, _ in reasons)
    return error


# The keys under which groups meet in the directory, and their parts.
#
#     group_key("poem", epoch=7, round_number=0, name="all")    # group/poem/7/0/all
#     group_key("poem", 7, 0, "all", topic="a1b2.gradients")    # group/poem/7/0/all/a1b2.gradients
#
# The key is in the terms of a group, and so in everything that its members sign: peers with
# different runs, epochs, rounds, names or topics are never in one list. A *topic* is anything else
# that the caller wants the members to have in common: what is averaged, and the history that led to
# it. Without a topic, the key ends with the name.
#
# Promise: different parts make different keys. No part may contain a slash.
#
# Easy to get wrong: a topic may change with every epoch, as a history does. So the place where
# peers meet again (`place_of`) depends neither on the epoch nor on the topic.


LONGEST_RUN = 64  # characters, as the auth server allows
LONGEST_TOPIC = 80  # characters: a digest of 16 bytes in hex, and some words
_WORD = re.compile(r"[A-Za-z0-9._-]+")


def group_key(run: str, epoch: int, round_number: int, name: str, topic: str = "") -> str:
    """`group/<run>/<epoch>/<round>/<name>`, and `/<topic>` if there is one.

    ProtocolMisuse if the key is too long for the directory: a grid of very many dimensions.
    """
    key = f"group/{run}/{epoch}/{round_number}/{name}" + (f"/{topic}" if topic else "")
    if len(key.encode()) > LONGEST_KEY:
        raise ProtocolMisuse(
            f"The key {key[:40]}… of a group has {len(key.encode())} bytes.",
            why=f"The directory takes keys of up to {LONGEST_KEY}.",
            advice="Shorten the topic, or use a grid of fewer dimensions.",
        )
    return key


def run_of(key: str) -> str:
    """The run of a key. For a key of another form, the result means nothing."""
    return [*key.split("/", 2), ""][1]


def is_first_round(key: str) -> bool:
    """Whether peers come to this group first: it is not one of the heads, or of a further round of
    a grid."""
    return place_of(key).split("/")[2] == "0"


def place_of(key: str) -> str:
    """The part of a key that stays equal where the same peers may meet: run, round and name."""
    family, run, _epoch, number, name = [*key.split("/"), "", "", "", ""][:5]
    return f"{family}/{run}/{number}/{name}"


def check_run(run: str) -> None:
    """ProtocolMisuse unless this can be part of a key."""
    if len(run) > LONGEST_RUN or not _WORD.fullmatch(run):
        raise ProtocolMisuse(
            f"{run[:LONGEST_RUN]!r} cannot be the name of a run.",
            why=f"It has 1 to {LONGEST_RUN} letters, digits, '.', '_' and '-'.",
        )


def check_topic(topic: str) -> None:
    """ProtocolMisuse unless this can be part of a key; an empty topic can."""
    if len(topic) > LONGEST_TOPIC or (topic and not _WORD.fullmatch(topic)):
        raise ProtocolMisuse(
            f"{topic[:LONGEST_TOPIC]!r} cannot be the topic of an averaging.",
            why=f"It has at most {LONGEST_TOPIC} letters, digits, '.', '_' and '-'.",
            advice="Use a digest, in hex, instead of a longer text.",
        )
