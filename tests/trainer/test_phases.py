"""What is shown of a moment: one phase, what it means, and what its owner can do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from node.trainer.gate import Closed
from node.trainer.phases import NETWORK, Facts, told_of
from node.trainer.view import Phase

PAUSE = Closed("pause", "paused by you")
LOST = Closed(NETWORK, "none of 2 known addresses answers. They may be off.")
TRAINS = Facts()


@pytest.mark.parametrize(
    ("facts", "phase"),
    [
        (TRAINS, Phase.TRAINING),
        (Facts(preparing="building the model"), Phase.PREPARING),
        (Facts(preparing="entering the run", behind=True), Phase.CATCHING_UP),
        (Facts(averaging=True), Phase.AVERAGING),
        (Facts(averaging=True, closed=(PAUSE,)), Phase.PAUSED),
        (Facts(averaging=True, closed=(PAUSE, LOST)), Phase.NETWORK_LOST),
        (Facts(closed=(LOST,), leaving=True), Phase.LEAVING),
        (Facts(leaving=True, refused="Not allowed."), Phase.REFUSED),
    ],
)
def test_what_matters_more_is_shown(facts: Facts, phase: Phase) -> None:
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
        Facts(refused="Not allowed.", refused_advice="Ask the moderators."),
    ],
)
def test_where_training_stands_still_it_is_said_what_can_be_done(facts: Facts) -> None:
    assert told_of(facts).advice


def test_whoever_is_alone_is_told_how_to_have_company() -> None:
    told = told_of(replace(TRAINS, alone=True, begins=True))
    assert "no other peer" in told.doing
    assert "potluck run invite" in told.advice
