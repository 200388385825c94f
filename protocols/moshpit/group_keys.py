"""The keys under which groups meet in the directory, and what they are made of.

    group_key("poem", epoch=7, round_number=0, name="all")    # group/poem/7/0/all
    group_key("poem", 7, 0, "all", topic="a1b2.gradients")    # group/poem/7/0/all/a1b2.gradients

The key is in the terms of a group, and so in everything that its members sign: peers with
different runs, epochs, rounds, names or topics are never in one list. A *topic* is whatever else
the caller wants those who average together to have in common: what is averaged, and the history
that led to it. Without one the key ends with the name.

Promise: different parts make different keys. None of them may contain the slash between them.

Easy to get wrong: a topic may change with every epoch, as a history does. Where peers meet again
(`place_of`) therefore depends neither on the epoch nor on the topic.
"""

from __future__ import annotations

import re

from protocols.errors import ProtocolMisuse
from protocols.moshpit.roster import LONGEST_KEY

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
