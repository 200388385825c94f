"""A member of a round has seen its step, if the history of the run leads through it."""

from __future__ import annotations

from dataclasses import replace

import torch

from protocols.accumulation.decided_steps import MOST_DECIDED, DecidedSteps, decided_step
from protocols.accumulation.events import SeenStep, Share
from protocols.accumulation.lifecycle import Ending
from protocols.accumulation.lineage import Lineage, next_history
from protocols.accumulation.rounds import parameters_averaged
from protocols.identity import PeerId
from protocols.moshpit.outcome import (
    Committed,
    Discarded,
    LeftOut,
    Outcome,
    RoundStatistics,
    Verdict,
)

KEEPER, ANN = PeerId("keeper"), PeerId("ann")
BEFORE = Lineage(4, b"b" * 16)
DIGEST, OTHER_DIGEST = b"d" * 32, b"e" * 32
AFTER = Lineage(5, next_history(BEFORE.history, 4, DIGEST))
ELSEWHERE = Lineage(5, next_history(BEFORE.history, 4, OTHER_DIGEST))


def a_round(verdict: Verdict = Verdict.COMMITTED) -> RoundStatistics:
    return RoundStatistics(
        key="round",
        epoch=BEFORE.epoch,
        verdict=verdict,
        began=0.0,
        ended=1.0,
        members=(KEEPER, ANN),
        weights=(0.0, 96.0),
        rates=((0, 0), (0, 0)),
        averaged_bytes=(7, 0),
    )


def committed(rounds: int = 1, digest: bytes = DIGEST) -> Committed:
    """The statistics of a round with ann, as the keeper has them."""
    return Committed(
        torch.zeros(1), (KEEPER, ANN), (), digest, 96.0, tuple(a_round() for _ in range(rounds))
    )


def decided(outcome: Outcome) -> SeenStep:
    found = decided_step(outcome, BEFORE, 12)
    assert found is not None
    return found


def test_a_decision_names_the_contributions_and_the_step() -> None:
    found = decided(committed())
    assert Lineage(found.epoch + 1, found.history) == AFTER
    assert (found.samples, found.own_samples) == (96.0, 12)
    assert found.shares == (Share(KEEPER, 0.0, 7), Share(ANN, 96.0, 0))


def test_a_round_gives_no_statistics_if_it_was_in_doubt_or_over_a_grid_or_left_this_peer_out() -> (
    None
):
    left_out = LeftOut((KEEPER, ANN), DIGEST, (a_round(Verdict.LEFT_OUT),), 96.0, 2)
    in_doubt = Discarded("nobody answered", True, (a_round(Verdict.IN_DOUBT),))
    for outcome in (left_out, in_doubt, committed(rounds=2)):
        assert decided_step(outcome, BEFORE, 12) is None


def test_an_average_of_the_parameters_counts_only_with_most_peers_of_the_step_before_it() -> None:
    """In a network that is cut in two, both sides had one, and two histories of an epoch."""
    both = replace(committed(), peers=2)
    assert parameters_averaged(both, 3).ending is Ending.COMMITTED
    assert parameters_averaged(both, 4).ending is Ending.DISCARDED
    left_out = LeftOut((KEEPER, ANN), DIGEST, (a_round(Verdict.LEFT_OUT),), 2.0, 2)
    assert parameters_averaged(left_out, 3).ending is Ending.LEFT_OUT
    assert parameters_averaged(left_out, 4).ending is Ending.DISCARDED
    assert parameters_averaged(committed(), 4).ending is Ending.COMMITTED, "unknown over a grid"


def test_a_step_is_seen_where_the_way_of_the_run_leads_through_it() -> None:
    steps = DecidedSteps()
    steps.note(decided(committed()))
    steps.note(decided(committed(digest=OTHER_DIGEST)))
    (found,) = steps.passed([AFTER, Lineage(6, b"c" * 16)])
    assert found.history == AFTER.history
    assert steps.passed([AFTER, ELSEWHERE]) == ()  # it is told once


def test_a_round_that_made_no_step_of_the_run_was_none() -> None:
    steps = DecidedSteps()
    steps.note(decided(committed()))
    assert steps.passed([ELSEWHERE, Lineage(AFTER.epoch + 1, AFTER.history)]) == ()


def test_a_step_of_ones_own_ends_the_epoch() -> None:
    steps = DecidedSteps()
    steps.note(decided(committed()))
    steps.clear()
    assert steps.passed([AFTER]) == ()


def test_the_memory_of_rounds_that_were_not_applied_is_bounded() -> None:
    steps = DecidedSteps()
    for number in range(3 * MOST_DECIDED):
        steps.note(decided(committed(digest=bytes([number]) * 32)))
    ways = [
        Lineage(5, next_history(BEFORE.history, 4, bytes([number]) * 32))
        for number in range(3 * MOST_DECIDED)
    ]
    assert len(steps.passed(ways)) == MOST_DECIDED
