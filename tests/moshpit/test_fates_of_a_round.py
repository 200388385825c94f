"""A member dies or stops in place of any of its messages: the round still ends the same for all.

Each case is a whole real round (tests/moshpit/rounds.py) in which one member meets its fate
instead of its k-th message: every member, every k. The default tests take every k in a pair, every
second of three members, and some of more; the soak tests take every one.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from protocols.moshpit.verdicts import Commit, Discard
from tests.moshpit.rounds import Fate, How, RoundEnded, one_round

OVER_SECONDS: dict[How, float] = {"killed": 5.0, "killed and heard out": 5.0, "stopped": 10.0}
HOWS = tuple(OVER_SECONDS)

OVER_WITHOUT_MOST_SECONDS = 15.0
"""When several go. Without most of the list nothing can be decided: the others give it some time
(Timing.closing_seconds), keep what they had, and say whether they are in doubt."""


@functools.cache
def undisturbed(cast: str) -> RoundEnded:
    return one_round(cast)


def fates(cast: str, how: How, every: int) -> Iterator[Fate]:
    """Every so many messages of every member, beginning with another one at each."""
    for member, messages in enumerate(undisturbed(cast).messages_sent):
        for message in range(1 + member % every, messages + 1, every):
            yield Fate(member, message, how)


def check_all(cast: str, how: How, every: int = 1) -> None:
    struck = 0
    for fate in fates(cast, how, every):
        ended = one_round(cast, fate)
        ended.check()
        if not ended.befell:
            continue  # the last messages are acknowledgements after the end, and vary by a few
        struck += 1
        assert ended.seconds_after < OVER_SECONDS[how], fate
        if len(cast) > 2:
            check_committed(ended)
    assert struck > 0.9 * sum(1 for _ in fates(cast, how, every))


def check_committed(ended: RoundEnded) -> None:
    """If two or more are left, and most of the list, nothing may keep them from an average."""
    for one in ended.survivors:
        assert one.committed is not None, f"{ended.fates}: {one.place} has {one.finished}"
        assert {other.place for other in ended.survivors} <= set(one.committed.members), ended.fates


@pytest.mark.parametrize("cast", ["rr", "rrr", "rdra", "ddrr"])
def test_a_round_in_which_nothing_happens_counts_everybody(cast: str) -> None:
    ended = undisturbed(cast)
    ended.check()
    everybody = tuple(range(len(cast)))
    assert all(one.committed and one.committed.members == everybody for one in ended.members)


@pytest.mark.slow
@pytest.mark.parametrize("how", HOWS)
def test_a_pair_ends_as_one_whenever_one_of_them_goes(how: How) -> None:
    check_all("rr", how)


@pytest.mark.slow
@pytest.mark.parametrize("how", HOWS)
def test_the_others_of_three_commit_when_one_goes(how: How) -> None:
    check_all("rrr", how, every=2)


@pytest.mark.slow
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize(("cast", "every"), [("rrrr", 11), ("rdra", 11), ("rrrrr", 29)])
def test_the_others_of_more_commit_when_one_goes(cast: str, every: int, how: How) -> None:
    check_all(cast, how, every)


@pytest.mark.soak
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("cast", ["rrr", "rrrr", "rdra", "ddrr", "drar", "rrrrr", "drdra"])
def test_the_others_of_more_commit_whenever_one_goes(cast: str, how: How) -> None:
    check_all(cast, how)


def test_a_stopped_member_learns_the_decision_when_it_goes_on() -> None:
    messages = undisturbed("rrr").messages_sent[1]
    ended = one_round("rrr", Fate(member=1, message=messages // 2, how="stopped"))
    ended.check()
    stopped = ended.members[1]
    assert stopped.finished is not None
    assert not isinstance(stopped.finished.verdict, Commit)
    assert stopped.ended > max(one.ended for one in ended.survivors)


# Several at once


def several_fates(cast: str, count: int, chance: random.Random) -> list[Fate]:
    """Of different members, at any of their messages or at none."""
    messages = undisturbed(cast).messages_sent
    return [
        Fate(member, chance.randint(1, messages[member] * 5 // 4), chance.choice(HOWS))
        for member in chance.sample(range(len(cast)), count)
    ]


def check_several(cast: str, count: int, rounds: int) -> None:
    chance = random.Random(f"{cast} {count}")
    for _ in range(rounds):
        ended = one_round(cast, *several_fates(cast, count, chance))
        ended.check()
        if ended.befell:
            assert ended.seconds_after < OVER_WITHOUT_MOST_SECONDS, ended.fates
        if 2 * len(ended.survivors) > len(cast):
            check_committed(ended)


@pytest.mark.slow
@pytest.mark.parametrize(("cast", "count"), [("rrrrr", 2), ("rrrr", 2), ("rdrra", 3)])
def test_survivors_of_several_deaths_end_alike(cast: str, count: int) -> None:
    check_several(cast, count, rounds=12)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("cast", "count"), [("rrrrr", 2), ("rrrrr", 3), ("rrrr", 2), ("rrrr", 3), ("rdrra", 3)]
)
def test_survivors_of_several_deaths_end_alike_every_time(cast: str, count: int) -> None:
    check_several(cast, count, rounds=400)


# The checks themselves


def test_a_private_mix_is_seen() -> None:
    ended = one_round("rrr")
    one = ended.members[1]
    one.result[:100] = one.values[:100]
    with pytest.raises(AssertionError):
        ended.check()


def test_a_last_bit_that_differs_is_seen() -> None:
    ended = one_round("rrr")
    ended.members[2].result.view(torch.int32)[7] += 1
    with pytest.raises(AssertionError, match="differ"):
        ended.check()


def test_a_false_certainty_and_an_endless_round_are_seen() -> None:
    ended = one_round("rrr")
    one = ended.members[2]
    assert one.finished is not None
    one.finished = replace(one.finished, verdict=Discard("", in_doubt=False))
    with pytest.raises(AssertionError, match="is sure"):
        ended.check()
    one.finished = None
    with pytest.raises(AssertionError, match="has not ended"):
        ended.check()
