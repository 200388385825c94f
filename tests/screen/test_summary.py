"""The summary that stays on the terminal says how it ended, on a terminal of any size."""

from __future__ import annotations

import pytest
from msgspec.structs import replace as changed

from lab.scenes import EVENTS, SIZES, STATES
from node.app.screen.panels import Scene, SceneEvent
from node.app.screen.summary import summary
from node.core.training_view import ENDED, TrainerPhase, TrainerView

AT = "21:05:12"
WARNED = tuple(
    SceneEvent("21:05:00", f"warning: {number} disks are full", warns=True) for number in range(5)
)


def text(scene: Scene, columns: int = 80, rows: int = 23) -> list[str]:
    return [line.plain for line in summary(scene, AT, columns, rows)]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("state", [one for one in STATES if STATES[one].view.phase in ENDED])
def test_every_end_fits_and_is_said_in_full(state: str, size: tuple[int, int]) -> None:
    scene = STATES[state]
    lines = summary(Scene(scene.view, WARNED), AT, *size)
    assert max(line.cell_len for line in lines) <= size[0]
    shown = " ".join(" ".join(line.plain for line in lines).split())
    assert shown.startswith(f"poem · {scene.view.phase.value}")
    assert scene.view.doing in shown
    assert scene.view.advice in shown


def test_a_revoked_volunteer_sees_what_happened_why_and_what_to_do() -> None:
    lines = text(STATES["refused"])
    assert lines[0] == f" poem · refused at {AT}, after 1 h 10 min{'alice …WzXn7Rde':>34}"
    assert lines[1:4] == [
        " This node may no longer take part in poem: Your access was revoked. A",
        " moderator of the run decided so.",
        " next: Ask the run's moderators; `potluck whoami` says as whom this node is",
    ]
    assert any(line.startswith(" given    28,160 accepted samples in 84 steps") for line in lines)
    assert lines[-1] == " traffic  ↑ 412 MB   ↓ 433 MB in all"


def test_a_volunteer_that_left_sees_its_contribution_and_the_state_of_the_run() -> None:
    lines = text(STATES["left"], 50, 10)
    assert lines[0].startswith(f" poem · left at {AT}")
    assert " ".join(" ".join(lines[1:4]).split()) == (
        "28,160 samples of yours are in 84 steps of the run; 96 are in none. Thank you! "
        "next: `potluck join` takes part again."
    )
    assert any("step 312 of 2,000  loss 2.0713" in line for line in lines)


def test_a_second_ctrl_c_still_shows_the_contribution() -> None:
    view = changed(STATES["leaving at once"].view)
    lines = text(Scene(view, EVENTS))
    assert lines[0].startswith(f" poem · left at {AT}")
    assert "leaving" not in "".join(lines)
    assert any("28,160 accepted samples in 84 steps" in line for line in lines)


def test_a_session_without_a_contribution_has_no_summary() -> None:
    assert text(STATES["starting"]) == []
    left = changed(TrainerView(run="poem"), phase=TrainerPhase.LEFT)
    assert text(Scene(left)) == []


def test_the_newest_warnings_stay() -> None:
    lines = text(Scene(STATES["starting"].view, WARNED))
    assert lines[0].startswith(" poem · left")
    assert lines[-3:] == [f" 21:05:00 warning: {number} disks are full" for number in (2, 3, 4)]
