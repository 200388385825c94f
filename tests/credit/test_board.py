"""The leaderboard has a table for those with samples and one for helpers, and fits what it says."""

from __future__ import annotations

import msgspec

from node.commands.leaderboard import board_lines
from node.credit.board import board_of
from node.credit.tally import Standing
from tests.credit.records import PEERS


def standing(person: str, samples: int, averaged: int, seconds: float = 3600.0) -> Standing:
    return Standing(person, samples, averaged, 9, seconds, seconds / 2, (PEERS["A"],))


ALICE, BOB = standing("alice", 1_234_567, 5_000_000), standing("bob", 12, 0, seconds=90.0)
HELPER = standing(PEERS["C"], 0, 2_500_000_000)


def shown(*standings: Standing, unheard: dict[str, str] | None = None) -> str:
    board = board_of("poem", 1200, standings, mine="bob", records=3, asked=4, unheard=unheard or {})
    return "\n".join(board_lines(msgspec.to_builtins(board)))


def test_people_and_helpers_have_a_rank_each_in_their_own_table() -> None:
    text = shown(ALICE, BOB, HELPER)
    people, helpers = text.split("Helpers")
    assert "1  alice" in people
    assert "2  bob (you)" in people
    assert f"1  …{PEERS['C'][-8:]}" in helpers
    assert "1,234,567" in people
    assert "2.5 GB" in helpers
    assert "1.5 min" in people


def test_before_anything_was_shared_it_says_so() -> None:
    assert "Nothing can be credited yet" in shown()


def test_who_gave_no_record_is_counted() -> None:
    assert "1 of 4 peers gave no record" in shown(ALICE, unheard={PEERS["B"]: "no answer"})
