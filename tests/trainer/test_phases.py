"""The screen shows one phase at a time, its meaning, and what the owner can do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from node.core.training_view import TrainerPhase
from node.training.gate import Closed
from node.training.happenings import Failed, Left
from node.training.phases import NETWORK, Facts, told_of

PAUSE = Closed("pause", "paused by you")
LOST = Closed(NETWORK, "none of 2 known addresses answers. They may be off.")
LEFT = Left(samples=1200, steps=3, seconds=75.0)
NOT_LET_IN = Failed("Not allowed.", "A moderator decided so.", "Ask the moderators.", refused=True)
DISK_FULL = Failed("No page could be kept.", "The disk is full.", "Make room.", refused=False)
TRAINS = Facts()


@pytest.mark.parametrize(
    ("facts", "phase"),
    [
        (TRAINS, TrainerPhase.TRAINING),
        (Facts(preparing="building the model"), TrainerPhase.PREPARING),
        (Facts(preparing="entering the run", behind=True), TrainerPhase.CATCHING_UP),
        (Facts(places_taken=256, behind=True), TrainerPhase.FOLLOWING),
        (Facts(averaging=True), TrainerPhase.AVERAGING),
        (Facts(keeps_only=True), TrainerPhase.KEEPING),
        (Facts(averaging=True, closed=(PAUSE,)), TrainerPhase.PAUSED),
        (Facts(averaging=True, closed=(PAUSE, LOST)), TrainerPhase.NETWORK_LOST),
        (Facts(closed=(LOST,), leaving=True), TrainerPhase.LEAVING),
        (Facts(complete=True, begins=True), TrainerPhase.COMPLETE),
        (Facts(complete=True, leaving=True), TrainerPhase.LEAVING),
        (Facts(leaving=True, left=LEFT), TrainerPhase.LEFT),
        (Facts(leaving=True, left=LEFT, failed=NOT_LET_IN), TrainerPhase.REFUSED),
        (Facts(preparing="building the model", failed=DISK_FULL), TrainerPhase.FAILED),
    ],
)
def test_the_more_important_phase_is_shown(facts: Facts, phase: TrainerPhase) -> None:
    told = told_of(facts)
    assert told.phase is phase
    assert told.doing


@pytest.mark.parametrize(
    "facts",
    [
        Facts(closed=(PAUSE,)),
        Facts(closed=(Closed("schedule", "outside of 22:00-07:00", 1e9),)),
        Facts(closed=(LOST,)),
        Facts(leaving=True),
        Facts(left=LEFT),
        Facts(left=LEFT, begins=True),
        Facts(complete=True),
        Facts(complete=True, begins=True),
        Facts(failed=NOT_LET_IN),
        Facts(failed=DISK_FULL),
    ],
)
def test_where_training_stands_still_it_is_said_what_can_be_done(facts: Facts) -> None:
    assert told_of(facts).advice


def test_a_volunteer_alone_is_told_how_to_invite_others() -> None:
    told = told_of(replace(TRAINS, alone=True, begins=True))
    assert "no other peer" in told.doing
    assert "potluck run invite" in told.advice


def test_the_end_says_what_was_given_and_how_to_come_back() -> None:
    told = told_of(Facts(left=LEFT))
    assert told.doing == "1,200 samples of yours are in 3 steps of the run. Thank you!"
    assert "potluck join" in told.advice
    again = Facts(left=LEFT, begins=True, again="potluck run start poem")
    assert "potluck run start poem" in told_of(again).advice
    complete = told_of(Facts(left=LEFT, complete=True))
    assert complete.doing.startswith("the run has made all its steps; 1,200 samples")
    only_kept = Facts(left=Left(samples=0, steps=0, seconds=75.0), complete=True, begins=True)
    assert told_of(only_kept).doing == "the run has made all its steps. Thank you!"


def test_a_failure_is_shown_with_its_reason() -> None:
    assert told_of(Facts(failed=NOT_LET_IN)).doing == "Not allowed. A moderator decided so."
    assert told_of(Facts(failed=NOT_LET_IN)).advice == "Ask the moderators."


def test_several_reasons_for_a_pause_end_in_several_ways() -> None:
    quota = Closed("quota", "the quota for 2026-11 is used up", 1e9)
    told = told_of(Facts(closed=(PAUSE, quota)))
    assert told.doing == "paused by you; the quota for 2026-11 is used up"
    assert told.advice == "`potluck resume` ends your pause; the rest ends by itself."


def test_a_peer_that_only_keeps_is_told_nothing_of_samples() -> None:
    for facts in (Facts(keeps_only=True), Facts(keeps_only=True, alone=True, begins=True)):
        assert "sampl" not in told_of(facts).doing


def test_the_last_words_name_the_command_that_was_typed() -> None:
    left = Facts(left=LEFT, begins=True, keeps_only=True, again="potluck backbone poem")
    assert told_of(left).advice == "`potluck backbone poem` takes part again."
