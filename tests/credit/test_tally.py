"""Credit is what most others confirm, also if some lie, in whatever order the records come."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.training.credit.tally import (
    BREAK_SECONDS,
    CreditRecord,
    PersonStanding,
    lower_median,
    tally,
)
from tests.credit.records import PEERS, PERSONS, everybody_says, says, standings

names = st.sampled_from("ABCDEFGHIJ")
amounts = st.tuples(st.integers(0, 1000), st.integers(0, 10**9))
rounds = st.dictionaries(names, amounts, min_size=2, max_size=7)
runs_of_rounds = st.lists(rounds, min_size=1, max_size=4)


@given(runs_of_rounds)
def test_statements_that_agree_are_added_up_exactly(
    steps: list[dict[str, tuple[int, int]]],
) -> None:
    records = [one for epoch, step in enumerate(steps) for one in everybody_says(step, epoch)]
    found = standings(records)
    for name in {name for step in steps for name in step}:
        mine = [step[name] for step in steps if name in step]
        assert found[name].samples == sum(samples for samples, _ in mine)
        assert found[name].averaged_bytes == sum(averaged for _, averaged in mine)
        assert found[name].steps == len(mine)


@given(runs_of_rounds, st.data())
def test_neither_order_nor_repetition_matters(
    steps: list[dict[str, tuple[int, int]]], data: st.DataObject
) -> None:
    records = [one for epoch, step in enumerate(steps) for one in everybody_says(step, epoch)]
    records.append(says("A", {"A": (9, 9), "B": (9, 9)}, history=b"another history "))
    heard = data.draw(st.permutations([*records, *records[:2]]))
    assert standings(heard) == standings(records)


@given(rounds, st.integers(0, 10**12))
def test_a_liar_gains_nothing_by_its_own_word(
    step: dict[str, tuple[int, int]], claimed: int
) -> None:
    liar = min(step)
    others = [one for one in everybody_says(step) if one.person != liar]
    inflated = {**step, liar: (claimed, claimed)}
    honest = standings(everybody_says(step))
    assert standings([*others, says(liar, inflated)]).get(liar) == honest[liar]


@given(
    st.dictionaries(names, amounts, min_size=3, max_size=9),
    st.dictionaries(names, amounts, min_size=2, max_size=9),
    st.binary(min_size=16, max_size=16),
)
def test_a_colluding_minority_changes_nothing(
    step: dict[str, tuple[int, int]], story: dict[str, tuple[int, int]], history: bytes
) -> None:
    colluding = sorted(step)[: (len(step) - 2) // 2]  # fewer than half of the others
    story |= dict.fromkeys(colluding, (10**6, 10**6))
    honest = [one for one in everybody_says(step) if one.person not in colluding]
    lies = [says(name, story, history=history) for name in colluding]
    assert credited([*honest, *lies]) == credited(everybody_says(step))


def credited(records: list[CreditRecord]) -> dict[str, PersonStanding]:
    """All but who confirms it: a liar contradicts the others, and that is told."""
    return {
        name: dataclasses.replace(one, witnesses=0, confirming=0)
        for name, one in standings(records).items()
    }


def test_a_word_about_oneself_counts_nothing_when_nobody_else_speaks() -> None:
    assert standings([says("A", {"A": (100, 5), "B": (50, 5)})]).keys() == {"B"}


def test_a_second_device_of_a_person_is_no_witness_for_the_first() -> None:
    step = {"A": (100, 0), "B": (50, 0)}
    persons = {PEERS["A"]: "alice", PEERS["B"]: "alice"}
    records = [CreditRecord(one.peer, "alice", one.page) for one in everybody_says(step)]
    assert tally(records, persons, newest_epoch=9) == ()


def test_the_devices_of_a_person_are_added_up_and_are_one_voice() -> None:
    step = {"A": (100, 7), "B": (50, 8), "C": (1, 0)}
    persons = {PEERS["A"]: "alice", PEERS["B"]: "alice", PEERS["C"]: "carol"}
    records = [CreditRecord(one.peer, persons[one.peer], one.page) for one in everybody_says(step)]
    alice, carol = tally(records, persons, newest_epoch=9)
    assert (alice.person, alice.samples, alice.averaged_bytes) == ("alice", 150, 15)
    assert alice.devices == tuple(sorted([PEERS["A"], PEERS["B"]]))
    assert (carol.person, carol.samples, carol.steps) == ("carol", 1, 1)


def test_a_writer_without_a_person_is_no_voice() -> None:
    stranger = says("C", {"C": (1, 0), "A": (10**6, 0)})
    assert standings([CreditRecord(stranger.peer, "", stranger.page)]) == {}


def test_the_larger_side_of_a_fork_counts() -> None:
    large, small = {"A": (1, 0), "B": (2, 0), "C": (3, 0)}, {"D": (90, 0), "E": (90, 0)}
    records = [*everybody_says(large), *everybody_says(small, history=b"another history ")]
    assert standings(records).keys() == {"A", "B", "C"}


def test_over_a_grid_other_groups_say_nothing() -> None:
    groups = [{"A": (1, 0), "B": (2, 0)}, {"C": (3, 0), "D": (4, 0), "E": (5, 0)}]
    records = [
        one for group in groups for one in everybody_says(group, over_a_grid=True, of_samples=15)
    ]
    assert {name: one.samples for name, one in standings(records).items()} == {
        "A": 1,
        "B": 2,
        "C": 3,
        "D": 4,
        "E": 5,
    }


# -- what somebody who was there cannot be told by any number of liars


def as_seen_by_a(records: list[CreditRecord], **limits: int) -> dict[str, PersonStanding]:
    found = tally(records, PERSONS, newest_epoch=1 << 40, seen_by=PEERS["A"], **limits)
    return {one.person: one for one in found}


@settings(max_examples=30)
@given(
    st.dictionaries(names, amounts, min_size=2, max_size=5).map(lambda one: {"A": (0, 7), **one}),
    st.dictionaries(names, amounts, min_size=2, max_size=9),
    st.booleans(),
)
def test_however_many_lie_nobody_gains_in_a_step_that_was_seen(
    step: dict[str, tuple[int, int]], story: dict[str, tuple[int, int]], forks: bool
) -> None:
    history = b"another history " if forks else bytes(16)
    lies = [says(name, {**story, name: (9, 9)}, history=history) for name in "BCDEFGHIJ"]
    honest, found = standings(everybody_says(step)), as_seen_by_a([says("A", step), *lies])
    for name, one in found.items():
        assert one.samples <= honest[name].samples
        assert one.averaged_bytes <= honest[name].averaged_bytes


def test_two_who_collude_cannot_put_themselves_into_a_step_that_somebody_made_alone() -> None:
    story = {"B": (10**6, 0), "C": (10**6, 0)}
    lies = [says("B", story), says("C", story)]
    alone = says("A", {"A": (5, 0)})
    assert standings([*lies, alone]) == {}
    for history in (bytes(16), b"another history "):
        told = [says(name, story, history=history) for name in "BCDEFGHIJ"]
        assert as_seen_by_a([alone, *told]) == {}


def test_another_history_takes_nothing_from_whoever_was_seen() -> None:
    step = {"A": (0, 9), "B": (5, 0), "C": (6, 0)}
    lies = [says(name, {"D": (1, 0)}, history=b"another history ") for name in "DEFGHIJ"]
    found = as_seen_by_a([*everybody_says(step), *lies])
    assert {name: one.samples for name, one in found.items()} == {"A": 0, "B": 5, "C": 6}


def test_the_time_of_a_step_that_was_seen_is_by_ones_own_clock() -> None:
    step = {"A": (1, 0), "B": (1, 0), "C": (1, 0)}
    records = [says("A", step, epoch, moment=100 * epoch) for epoch in range(3)]
    for name in "BC":
        records += [says(name, step, epoch, moment=5000 * epoch) for epoch in range(3)]
    assert as_seen_by_a(records)["B"].service_seconds == 200
    assert standings(records)["B"].service_seconds == 10_000


def test_a_number_of_samples_that_nobody_computes_in_a_step_is_not_credited() -> None:
    records = everybody_says({"A": (0, 0), "B": (10**15, 0), "C": (700, 0)})
    found = as_seen_by_a(records, most_samples=4096)
    assert (found["B"].samples, found["C"].samples) == (4096, 700)


def test_a_key_that_changes_hands_is_no_witness_for_itself() -> None:
    step = {"A": (10**6, 0), "B": (1, 0)}
    old = CreditRecord(PEERS["A"], "alice", says("A", step).page)
    assert "bob" not in {one.person for one in tally([old], {PEERS["A"]: "bob"}, newest_epoch=9)}


def test_nobody_brings_more_to_a_step_than_it_had() -> None:
    story = {"A": (10**9, 0), "B": (10**9, 0)}
    honest = {"C": (3, 0), "D": (4, 0), "E": (5, 0)}
    records = [
        *everybody_says(honest, over_a_grid=True, of_samples=12),
        *everybody_says(story, over_a_grid=True, of_samples=10**9),
    ]
    assert standings(records)["A"].samples == 12


def test_steps_that_nobody_can_have_made_do_not_count() -> None:
    records = [
        *everybody_says({"A": (1, 0), "B": (1, 0)}, 5),
        *everybody_says({"A": (9, 0), "B": (9, 0)}, 6),
    ]
    assert standings(records, newest_epoch=5)["A"].samples == 1


def test_service_is_the_time_between_steps_without_a_break() -> None:
    step = {"A": (1, 0), "B": (1, 0)}
    moments = {0: 0, 1: 100, 2: 200, 5: 200 + int(BREAK_SECONDS) + 1, 6: 2000, 7: 2500}
    records = [
        one for epoch, at in moments.items() for one in everybody_says(step, epoch, moment=at)
    ]
    found = standings(records)["A"]
    assert found.longest_seconds == 2500 - (200 + BREAK_SECONDS + 1)
    assert found.service_seconds == 200 + found.longest_seconds


def test_helpers_are_those_without_samples() -> None:
    found = standings(everybody_says({"A": (0, 10**6), "B": (5, 0)}))
    assert found["A"].helps
    assert found["A"].averaged_bytes == 10**6
    assert not found["B"].helps


def test_the_lower_median_is_what_more_than_half_reach() -> None:
    chance = random.Random(7)
    for _ in range(200):
        values = [chance.randrange(9) for _ in range(chance.randrange(1, 9))]
        found = lower_median(values)
        assert 2 * sum(one >= found for one in values) > len(values)
        assert 2 * sum(one > found for one in values) <= len(values)


def alone(name: str, epoch: int, samples: int = 5) -> CreditRecord:
    return says(name, {name: (samples, 0)}, epoch)


def test_a_step_that_somebody_made_alone_counts_apart_where_the_run_went_on_from_it() -> None:
    together = everybody_says({"A": (3, 0), "B": (4, 0)}, 3)
    made = [alone("A", 0), alone("A", 1), alone("A", 2, samples=7)]
    found = standings([*made, *together])["A"]
    assert (found.samples, found.steps) == (3, 1)
    assert (found.alone_samples, found.alone_steps) == (17, 3)


@pytest.mark.parametrize(
    "told",
    [
        [alone("A", 0), alone("A", 1)],  # nobody went on from them
        [alone("A", 1), *everybody_says({"A": (3, 0), "B": (4, 0)}, 3)],  # a step is missing
        [alone("A", 2), *everybody_says({"B": (3, 0), "C": (4, 0)}, 3)],  # it was not in the next
        [alone("A", 2), alone("B", 2), *everybody_says({"A": (3, 0), "B": (4, 0)}, 3)],
        [
            alone("A", 2),
            *everybody_says({"B": (3, 0), "C": (4, 0)}, 2),  # others made that step
            *everybody_says({"A": (3, 0), "B": (4, 0)}, 3),
        ],
    ],
    ids=["last", "gap", "another's", "two", "others"],
)
def test_a_step_that_may_not_be_of_the_run_counts_for_nobody(told: list[CreditRecord]) -> None:
    found = standings(told)
    assert not any(one.alone_steps for one in found.values())


def test_our_own_steps_count_and_nobody_is_credited_with_more_than_the_limit() -> None:
    found = tally(
        [alone("A", 0), alone("A", 1, samples=10**9)],
        PERSONS,
        newest_epoch=9,
        most_samples=4096,
        seen_by=PEERS["A"],
    )
    assert [(one.alone_samples, one.alone_steps) for one in found] == [(4101, 2)]


# -- witnesses


def witnesses(records: list[CreditRecord]) -> dict[str, tuple[int, int]]:
    """How many confirm each person, and of how many."""
    return {name: (one.confirming, one.witnesses) for name, one in standings(records).items()}


def test_the_witnesses_of_a_person_are_the_others_who_recorded_a_step_of_it() -> None:
    records = [
        *everybody_says({"A": (1, 0), "B": (1, 0), "C": (1, 0)}, 0),
        *everybody_says({"A": (1, 0), "B": (1, 0), "D": (1, 0)}, 1)[:2],  # D has left no record
    ]
    assert witnesses(records) == {"A": (2, 2), "B": (2, 2), "C": (2, 2), "D": (2, 2)}


@pytest.mark.parametrize(
    ("lie", "against"),
    [
        ({"A": (1, 0), "B": (2, 0), "C": (9, 0), "D": (4, 0)}, {"B"}),
        ({"A": (1, 0), "C": (3, 0), "D": (4, 0)}, {"B"}),
        ({"A": (1, 0), "B": (3, 0), "C": (3, 0), "D": (10**6, 0)}, set()),  # of itself
        ({"A": (1, 0), "D": (4, 0)}, {"B", "C"}),
    ],
    ids=["less", "not there", "more", "two were not there"],
)
def test_a_record_that_says_less_than_is_credited_is_against(
    lie: dict[str, tuple[int, int]], against: set[str]
) -> None:
    step = {"A": (1, 0), "B": (3, 0), "C": (3, 0), "D": (4, 0)}
    records = [*everybody_says(step)[:3], says("D", lie), *everybody_says(step, 1)]
    expected = {name: (2 if name in against else 3, 3) for name in step}
    assert witnesses(records) == expected


def test_the_devices_of_one_person_are_one_witness_and_none_for_that_person() -> None:
    step = {"A": (1, 0), "B": (1, 0), "C": (1, 0)}
    persons = {**PERSONS, PEERS["C"]: "B"}
    found = tally(everybody_says(step), persons, newest_epoch=9)
    assert {one.person: (one.confirming, one.witnesses) for one in found} == {
        "A": (1, 1),
        "B": (1, 1),
    }


def test_those_in_another_group_or_on_another_side_of_a_fork_are_no_witnesses() -> None:
    groups = [{"A": (1, 0), "B": (2, 0)}, {"C": (3, 0), "D": (4, 0), "E": (5, 0)}]
    records = [
        one for group in groups for one in everybody_says(group, over_a_grid=True, of_samples=15)
    ]
    other = [says("F", {"A": (90, 0), "F": (1, 0)}, history=b"another history ")]
    assert witnesses([*records, *other]) == {
        "A": (1, 1),
        "B": (1, 1),
        "C": (2, 2),
        "D": (2, 2),
        "E": (2, 2),
    }


def test_trainers_are_the_witnesses_of_those_who_only_serve_them() -> None:
    step = {"A": (100, 0), "B": (30, 0)}
    records = [says("A", step, served={"S": 9}), says("B", step, served={"T": 5})]
    assert (witnesses(records)["S"], witnesses(records)["T"]) == ((1, 1), (1, 1))


def test_no_more_witnesses_are_counted_than_have_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.training.credit.tally.MOST_WITNESSES", 2)
    assert {
        told for _, told in witnesses(everybody_says(dict.fromkeys("ABCDE", (1, 0)))).values()
    } == {1, 2}


# -- servers of experts


def served(records: list[CreditRecord]) -> dict[str, int]:
    return {name: one.served_samples for name, one in standings(records).items()}


def test_servers_get_the_parts_of_a_trainers_samples_that_they_computed() -> None:
    step = {"A": (100, 0), "B": (30, 0)}
    records = [says("A", step, served={"S": 9, "T": 1}), says("B", step, served={"T": 500})]
    assert served(records) == {"A": 0, "B": 0, "S": 90, "T": 10 + 30}
    found = standings(records)["S"]
    assert (found.helps, found.steps, found.devices) == (True, 1, (PEERS["S"],))


def test_a_trainer_that_serves_itself_is_credited_for_what_it_serves_to_others_only() -> None:
    step = {"A": (100, 0), "B": (100, 0)}
    records = [says("A", step, served={"A": 50, "B": 50}), says("B", step, served={"S": 7})]
    assert served(records) == {"A": 0, "B": 50, "S": 100}


def test_nobody_is_credited_with_serving_by_a_second_device_of_theirs() -> None:
    step = {"A": (100, 0), "B": (100, 0)}
    persons = {**PERSONS, PEERS["S"]: "A"}
    found = tally([says("A", step, served={"S": 9}), says("B", step)], persons, newest_epoch=9)
    assert not any(one.served_samples for one in found)


@given(st.dictionaries(st.sampled_from("CDEFG"), st.integers(0, 10**15)), st.integers(0, 10**9))
def test_a_trainer_gives_its_servers_no_more_than_the_samples_that_others_confirm(
    claimed: dict[str, int], brought: int
) -> None:
    told = says("A", {"A": (10**15, 0), "B": (1, 0)}, served=claimed)
    found = standings([told, says("B", {"A": (brought, 0), "B": (1, 0)})])
    assert sum(one.served_samples for one in found.values()) <= min(brought, 10**15 + 1)


def test_a_writer_that_was_in_no_step_gives_nothing_to_its_servers() -> None:
    step = {"A": (5, 0), "B": (5, 0)}
    liar = says("C", {**step, "C": (9, 0)}, served={"S": 9})
    assert "S" not in as_seen_by_a([*everybody_says(step), liar])


def test_the_servers_of_somebody_who_trained_alone_are_credited_where_the_run_went_on() -> None:
    together = everybody_says({"A": (3, 0), "B": (4, 0)}, 2)
    made = [says("A", {"A": (10, 0)}, epoch, served={"S": 1, "T": 1}) for epoch in range(2)]
    assert served([*made, *together]) == {"A": 0, "B": 0, "S": 10, "T": 10}
    assert standings([*made, *together])["S"].service_seconds == 0, "by the maker's clock alone"
    assert served(made) == {}


def test_service_of_a_server_is_the_time_between_the_steps_that_it_served() -> None:
    step = {"A": (1, 0), "B": (1, 0)}
    records = [
        one
        for epoch in range(4)
        for one in (says("A", step, epoch, served={"S": 1}), says("B", step, epoch))
    ]
    assert standings(records)["S"].service_seconds == 3 * 60
