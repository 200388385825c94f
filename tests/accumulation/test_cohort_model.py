"""Explores the events of a run with three cohorts of two peers, in every order.

The rules that are tested here are in cohorts_seen.py (who is a head), in progress.py (whose steps
count) and in lifecycle.py (who may make a step).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from protocols.accumulation.lifecycle import Mode
from tests.accumulation.cohort_model import Broken, CohortRules, rules_of
from tests.accumulation.test_lifecycle_model import explore, wander

PEERS = 6
STEPS = 120  # of a story
MODES = {"sync": Mode(target_samples=2), "delayed": Mode(target_samples=2, delayed=True)}
every_mode = pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())

TROUBLES = {
    "calm": {"doubts": False, "deaths": 0},
    "doubts": {"doubts": True, "deaths": 0},
    "a death": {"doubts": False, "deaths": 1},
    "broken links": {"doubts": False, "deaths": 0, "torn": True},
}
every_trouble = pytest.mark.parametrize("trouble", TROUBLES.values(), ids=TROUBLES.keys())


def tell(rules: CohortRules, seeds: range) -> None:
    """Random stories in which no two living peers may make different steps of one epoch."""
    for seed in seeds:
        wander(rules, seed, STEPS, chosen_evenly=True)


def tell_of_needs(mode: Mode, seeds: Iterable[int], **trouble: Any) -> int:
    """The same where a step needs most of the peers of the last one. Returns how many were made."""
    rules = rules_of(mode, PEERS, batches=30, needs_most=True, **trouble)
    ends = [
        wander(rules, one, STEPS, chosen_evenly=True, together=32.0 if one % 2 else 8.0)
        for one in seeds
    ]
    return sum(max(peer.life.epoch for peer in world.peers) for world in ends)


@pytest.mark.slow
@every_trouble
def test_no_two_peers_do_so_if_a_step_needs_most_of_the_last_ones_peers(
    trouble: dict[str, bool],
) -> None:
    assert tell_of_needs(MODES["sync"], [2], **trouble) > 0


@pytest.mark.soak
@every_mode
@every_trouble
def test_in_many_stories_they_do_not_do_so_either(mode: Mode, trouble: dict[str, bool]) -> None:
    assert tell_of_needs(mode, range(120), **trouble) > 8


@pytest.mark.slow
@every_trouble
def test_no_two_peers_make_different_steps_of_one_epoch(trouble: dict[str, bool]) -> None:
    tell(rules_of(MODES["sync"], PEERS, batches=30, **trouble), range(1))


@pytest.mark.soak
@every_mode
@every_trouble
def test_in_many_stories_no_two_peers_make_different_steps(
    mode: Mode, trouble: dict[str, bool]
) -> None:
    tell(rules_of(mode, PEERS, batches=30, **trouble), range(1, 120))


@pytest.mark.soak
@every_mode
def test_every_world_near_the_beginning_keeps_the_promises(mode: Mode) -> None:
    rules = rules_of(mode, PEERS, batches=2)
    explore(rules, rules.beginning(), 4_000)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("broken", "trouble", "seed"),
    [
        (Broken.MEMBERS_STEP_WITHOUT_THEIR_HEAD, "doubts", 11),
        (Broken.TWO_HEADS_COUNT, "broken links", 1),
    ],
    ids=lambda value: value.name if isinstance(value, Broken) else str(value),
)
def test_what_a_broken_rule_does_is_found(broken: Broken, trouble: str, seed: int) -> None:
    rules = rules_of(MODES["sync"], PEERS, batches=30, **TROUBLES[trouble])
    wander(rules, seed, STEPS, chosen_evenly=True)
    with pytest.raises(AssertionError, match=r"another step|count twice"):
        wander(replace(rules, broken=broken), seed, STEPS, chosen_evenly=True)
