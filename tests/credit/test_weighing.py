"""The confirmation of a step by most others, by the rule itself, and cheaply under a flood."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.training.credit.tally import Amounts, ToldStep, Voices, confirmed_by, tally
from protocols.credit.messages import LARGEST_SUM
from protocols.credit.record import LARGEST_AMOUNT, Line
from protocols.identity import PeerId
from tests.credit.records import PEERS, PERSONS, line_of, says

HISTORIES = (bytes(16), b"another history ")
PEOPLE = "ABCDEF"

amounts = st.builds(Amounts, st.just(1), st.integers(0, 3), st.integers(0, 3))
words = st.builds(
    lambda shares, grid, history, whole: ToldStep(
        PEERS["A"],
        line_of({}, history=history, over_a_grid=grid, of_samples=whole),
        shares,
        {},
    ),
    st.dictionaries(st.sampled_from([PEERS[name] for name in "ABCDEFGH"]), amounts, max_size=4),
    st.booleans(),
    st.sampled_from([HISTORIES[0], *HISTORIES]),
    st.integers(0, 4),
)
voices_of_some = st.dictionaries(
    st.sampled_from(PEOPLE), st.lists(words, min_size=1, max_size=3), min_size=1
)


def by_the_rule(voices: Voices, persons: dict[PeerId, str]) -> dict[PeerId, Amounts]:
    """Each peer, and each person beside its own: slow, and as it is said in words."""
    votes: Counter[bytes] = Counter()
    for told in voices.values():
        if len({one.line.history for one in told}) == 1:
            votes[told[0].line.history] += 1
    most = [one for one, count in votes.items() if count == max(votes.values())]
    found = {}
    for peer in {peer for told in voices.values() for one in told for peer in one.shares}:
        others = [told for name, told in voices.items() if name != persons.get(peer, peer)]
        said = [
            said
            for told in others
            if len(most) == 1
            and all(one.line.history == most[0] for one in told)
            and (said := _least(told, peer)) is not None
        ]
        if said and _median([one.steps for one in said]):
            whole = _median([min(one.line.of_samples for one in told) for told in others])
            samples, averaged = (_median([one[place] for one in said]) for place in (1, 2))
            found[peer] = Amounts(1, min(samples, whole), averaged)
    return found


def _least(told: list[ToldStep], peer: PeerId) -> Amounts | None:
    said = [
        one.shares.get(peer, Amounts())
        for one in told
        if peer in one.shares or not one.line.over_a_grid
    ]
    return Amounts(*map(min, zip(*said, strict=True))) if said else None


def _median(values: list[int]) -> int:
    return sorted(values, reverse=True)[len(values) // 2]


@pytest.mark.slow
@settings(max_examples=100)
@given(voices_of_some, st.booleans())
def test_the_fast_weighing_equals_the_rule(voices: Voices, are_persons_known: bool) -> None:
    persons = PERSONS if are_persons_known else {}
    assert dict(confirmed_by(voices, persons)) == by_the_rule(voices, persons)


class Asked(dict[PeerId, str]):
    """Counts how often somebody is looked up."""

    count = 0

    def get(self, key: PeerId, default: Any = None) -> Any:
        self.count += 1
        return super().get(key, default)


def test_the_work_grows_only_with_the_number_of_statements() -> None:
    many, persons = 60, Asked()
    voices: Voices = {}
    for number in range(many):
        shares = {PeerId(f"{number} {one}"): Amounts(1, 1, 1) for one in range(many)}
        line: Line = line_of({}, of_samples=1)
        voices[f"{number} 0"] = [ToldStep(PEERS["A"], line, shares, {})]
    assert dict(confirmed_by(voices, persons)) == {}
    assert persons.count < 3 * many * many  # and not many * many * many


@pytest.mark.slow
def test_the_sum_of_false_claims_still_fits_the_wire() -> None:
    claimed = {"A": (0, LARGEST_AMOUNT), "B": (0, LARGEST_AMOUNT), "C": (0, LARGEST_AMOUNT)}
    steps = LARGEST_SUM // LARGEST_AMOUNT + 2
    records = [says(name, claimed, epoch) for epoch in range(steps) for name in "AB"]
    found = tally(records, PERSONS, newest_epoch=steps)
    assert {one.averaged_bytes for one in found} == {LARGEST_SUM}
