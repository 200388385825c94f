"""`scripts/bench averaging` and `survival` accept right results, and notice wrong ones.

Other tests check the averaging itself. These use made-up answers of peers, with one thing wrong in
each.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from typing import Any

import pytest

from lab.bench.averaging import WHAT
from lab.bench.averaging_swarm import SwarmRound, disagreement, factor_of
from lab.bench.survival import Phases
from lab.bench.survival_churn import ChurnEffort, groups_of, longest_gap, memory_figure

MIB = 1 << 20
DIGESTS = dict.fromkeys(range(4), "aa")


def committed(number: int, members: str = "abcd", **other: Any) -> dict[str, Any]:
    answer = {
        "verdict": "committed",
        "members": list(members),
        "agreed_digest": "01",
        "relative_error": 1e-8,
        "tolerated_error": 1e-6,
        "began": 10.0 + number / 10,
        "ended": 12.0 + number / 10,
        "phases": {"exchange_began": 10.5 + number / 10, "exchange_ended": 11.5 + number / 10},
    }
    return answer | other


def round_of(answers: dict[int, dict[str, Any]], lost: tuple[int, ...] = ()) -> SwarmRound:
    this = SwarmRound(1, [*answers, *lost])
    for number, answer in answers.items():
        this.note(number, answer)
    for number in lost:
        this.note(number, None)
    return this


def all_of_four(**other: Any) -> dict[int, dict[str, Any]]:
    """Four peers that committed the same, but for what the last one says."""
    return {number: committed(number) for number in range(3)} | {3: committed(3, **other)}


def test_a_round_lasts_from_the_first_call_to_the_last_return() -> None:
    assert round_of(all_of_four()).seconds == pytest.approx(2.3)


def test_the_exchange_lasts_from_the_first_start_to_the_last_end() -> None:
    assert round_of(all_of_four()).exchange_seconds == pytest.approx(1.3)


def test_a_byte_counts_where_it_is_sent_and_the_check_of_the_results_is_known() -> None:
    answers = all_of_four()
    for number, answer in answers.items():
        answer["phases"] |= {"bytes_sent": 60 + number, "bytes_received": 60}
        answer["check_cpu_seconds"] = 0.25
    this = round_of(answers)
    assert this.bytes_moved == 246
    assert this.check_cpu_seconds == 1.0


def test_all_hold_the_right_average_of_the_same() -> None:
    assert disagreement(round_of(all_of_four()), DIGESTS) == ""


def test_a_dead_peer_has_no_digest_but_its_last_words_count() -> None:
    digests = dict.fromkeys(range(3), "aa")
    assert disagreement(round_of(all_of_four()), digests) == ""
    said_otherwise = round_of(all_of_four(agreed_digest="02"))
    assert "different digests" in disagreement(said_otherwise, digests)


def test_different_bits_are_noticed() -> None:
    assert "different bits" in disagreement(round_of(all_of_four()), DIGESTS | {2: "ab"})


def test_different_members_are_noticed() -> None:
    assert "different members" in disagreement(round_of(all_of_four(members=["a", "b"])), DIGESTS)


@pytest.mark.parametrize("error", [1e-3, float("nan")])
def test_a_result_that_is_no_average_of_its_members_is_noticed(error: float) -> None:
    wrong = round_of(all_of_four(relative_error=error))
    assert "no average" in disagreement(wrong, DIGESTS)


def test_a_coarser_codec_may_be_further_off() -> None:
    coarse = round_of(all_of_four(relative_error=5e-3))
    assert disagreement(coarse, DIGESTS)
    for answer in coarse.answers.values():
        answer["tolerated_error"] = 1e-2
    assert disagreement(coarse, DIGESTS) == ""


def test_averages_of_different_peers_differ() -> None:
    """So an error tells a wrong set of members."""
    means = set()
    for chosen in range(1, 2**8):
        factors = [factor_of(number) for number in range(8) if chosen >> number & 1]
        means.add(sum(factors) / len(factors))
    assert len(means) > 0.9 * (2**8 - 1)


def test_two_groups_of_one_round_are_told_apart() -> None:
    halves = round_of(
        {number: committed(number, "ab") for number in (0, 1)}
        | {number: committed(number, "cd", agreed_digest="02") for number in (2, 3)}
    )
    assert groups_of(halves) == [[0, 1], [2, 3]]


def test_the_longest_time_without_a_round_counts_both_ends() -> None:
    assert longest_gap(0.0, [5.0, 6.0], 10.0) == 5.0
    assert longest_gap(0.0, [1.0, 9.0], 10.0) == 8.0
    assert longest_gap(0.0, [], 10.0) == 10.0


def test_memory_that_grows_from_the_first_half_to_the_second_is_a_leak() -> None:
    def censuses(growth: int) -> list[dict[int, dict[str, Any]]]:
        return [{0: {"memory_bytes": 100 * MIB + number * growth}} for number in range(100)]

    assert memory_figure(censuses(0), range(1))["met"]
    assert memory_figure(censuses(MIB // 10), range(1))["met"]
    assert not memory_figure(censuses(MIB), range(1))["met"]


def test_half_of_a_small_swarm_lives_through_the_churn_and_three_of_a_large_one() -> None:
    assert len(ChurnEffort(1.0, peers=4).veterans) == 2
    assert len(ChurnEffort(1.0, peers=8).veterans) == 3


def test_moments_fall_into_every_phase_and_are_the_same_for_the_same_seed() -> None:
    phases = Phases(0.05, 0.6, 0.01)

    def moments() -> list[float]:
        chance = random.Random(7)
        return [phases.random_moment(chance) for _ in range(50)]

    assert moments() == moments()
    assert {phases.at(moment) for moment in moments()} == {"matchmaking", "exchange", "agreement"}


def bench(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lab", "bench", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (("averaging", "--peers", "1"), "--peers 2"),
        (("averaging", "--numel", "1.5"), "whole number"),
        (("survival",), "--kill"),
        (("survival", "--kill", "1", "--peers", "2"), "--peers 3"),
    ],
)
@pytest.mark.slow
def test_wrong_use_is_explained(words: tuple[str, ...], advice: str) -> None:
    done = bench(*words, "--json")
    assert done.returncode == 2
    assert advice in done.stdout


@pytest.mark.slow
def test_a_small_run_prints_every_figure_and_is_right() -> None:
    done = bench("averaging", "--peers", "2", "--numel", "1e5", "--rounds", "2", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert set(WHAT) <= set(result)
    assert result["bit_identical"]
    assert result["rounds_ok"] == 2
    assert result["worst_relative_error"] < 1e-6
    assert result["round_s_p50"] > result["aggregate_s_p50"] > 0
    assert result["first_round"]["round_s"] > 0
