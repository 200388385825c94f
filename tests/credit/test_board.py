"""The leaderboard has a table for those with samples and one for helpers, and fits what it says."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest

from node.app.commands.leaderboard import board_lines, check_lines, is_proven
from node.training.credit.service import board_of
from node.training.credit.sums import Check
from node.training.credit.tally import PersonStanding
from tests.credit.records import PEERS


def standing(person: str, samples: int, averaged: int, seconds: float = 3600.0) -> PersonStanding:
    return PersonStanding(person, samples, averaged, 9, seconds, seconds / 2, (PEERS["A"],))


ALICE, BOB = standing("alice", 1_234_567, 5_000_000), standing("bob", 12, 0, seconds=90.0)
HELPER = standing(PEERS["C"], 0, 2_500_000_000)


def shown(*standings: PersonStanding, unheard: dict[str, str] | None = None) -> str:
    return "\n".join(board_lines(board(*standings, unheard=unheard)))


def board(
    *standings: PersonStanding,
    unheard: dict[str, str] | None = None,
    keeps: bool = False,
    checks: tuple[Check, ...] = (),
) -> dict[str, Any]:
    made = board_of(
        "poem",
        1200,
        standings,
        mine="bob",
        records=3,
        seen_steps=1100,
        asked=4,
        unheard=unheard or {},
        keeps=keeps,
        checks=checks,
    )
    found: dict[str, Any] = msgspec.to_builtins(made)
    return found


def test_people_and_helpers_have_a_rank_each_in_their_own_table() -> None:
    text = shown(ALICE, BOB, HELPER)
    people, helpers = text.split("Helpers")
    assert "1  alice" in people
    assert f"2  bob …{PEERS['A'][-8:]} (you)" in people
    assert "alone" not in people
    assert f"1  …{PEERS['C'][-8:]}" in helpers
    assert "1,234,567" in people
    assert "2.5 GB" in helpers
    assert "1.5 min" in people


def test_samples_trained_alone_have_their_own_column() -> None:
    alone = dataclasses.replace(BOB, samples=0, steps=0, alone_samples=593_920, alone_steps=580)
    people, helpers = shown(ALICE, alone, HELPER).split("Helpers")
    assert "bob" in people and "593,920" in people  # noqa: PT018
    assert "bob" not in helpers
    assert "Alone: samples in steps that a person made alone" in people


def test_each_person_is_shown_with_those_who_confirm_it() -> None:
    confirmed = dataclasses.replace(ALICE, witnesses=14, confirming=12)
    lines = shown(confirmed, BOB).splitlines()
    assert lines[2].endswith("devices  witnesses")
    assert lines[3].endswith("1   12 of 14")
    assert lines[4].endswith("1"), "bob has none"
    assert "witnesses" not in shown(ALICE, BOB)


def test_a_volunteer_who_only_serves_experts_is_shown_with_what_they_served() -> None:
    sam = dataclasses.replace(standing("sam", 0, 0), served_samples=12_345)
    people, helpers = shown(ALICE, sam, HELPER).split("Helpers")
    assert "served" not in people
    rows = helpers.splitlines()
    assert ("sam" in rows[2], "12,345" in rows[2]) == (True, True), "before those who average"
    assert "by the word of those" in helpers


def test_before_anything_was_shared_it_says_so() -> None:
    assert "Nothing can be credited yet" in shown()


def test_people_without_a_record_are_counted() -> None:
    assert "1 of 4 peers gave no record" in shown(ALICE, unheard={PEERS["B"]: "no answer"})


LONG = standing(f"oidc:{'long.' * 19}", 10**12, 10**15, seconds=10**7)


@pytest.mark.parametrize("columns", [80, 120])
def test_a_table_has_room_on_every_usual_terminal(columns: int) -> None:
    lines = list(board_lines(board(LONG, ALICE, HELPER), columns))
    assert max(map(len, lines)) <= columns
    assert any("oidc:l" in line and line.endswith(" 1") for line in lines)


def test_without_room_for_a_table_there_are_lines() -> None:
    text = "\n".join(board_lines(board(LONG, ALICE), 50))
    assert f"2. alice …{PEERS['A'][-8:]}\n  samples 1,234,567, averaged 5 MB" in text


KEEPER = Check(keeper=PEERS["A"], steps=1200, people=2, pages=9)


@pytest.mark.parametrize(
    ("check", "words"),
    [
        (KEEPER, "2 sums are what the signed records add up to."),
        (
            msgspec.structs.replace(KEEPER, differences=("bob: 9 samples, but the records say 8",)),
            "bob: 9 samples, but the records say 8",
        ),
        (msgspec.structs.replace(KEEPER, without=1), "cannot show 1 of the pages"),
        (msgspec.structs.replace(KEEPER, trouble="No answer."), "No answer."),
    ],
)
def test_the_result_of_a_check_is_shown_and_decides(check: Check, words: str) -> None:
    found = board(ALICE, checks=(check,))
    assert words in "\n".join(check_lines(found))
    assert is_proven(found) == (check is KEEPER)


def test_a_name_given_by_a_keeper_cannot_look_like_our_own_lines() -> None:
    hostile = msgspec.structs.replace(KEEPER, differences=("eve\nChecked: all\x1b[2J: 1 steps",))
    lines = list(check_lines(board(ALICE, checks=(hostile,))))
    assert lines[-1] == "  eve Checked: all\N{REPLACEMENT CHARACTER}[2J: 1 steps"


def test_with_no_keeper_nothing_is_proven() -> None:
    assert "No other peer here keeps" in "\n".join(check_lines(board(ALICE)))
    assert not is_proven(board(ALICE))


def test_the_only_keeper_says_that_nobody_else_has_added_up_and_fails_nothing() -> None:
    alone = board(ALICE, keeps=True)
    assert "This node keeps the run's records itself" in "\n".join(check_lines(alone))
    assert is_proven(alone)
    assert not is_proven(
        board(ALICE, keeps=True, checks=(msgspec.structs.replace(KEEPER, without=1),))
    )
