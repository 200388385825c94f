"""What the demo tells is added up from what its volunteers printed."""

from __future__ import annotations

from typing import Any

import pytest

from node.demo.definition import CHANGES, STEPS, demo_sized
from node.demo.judging import Judged
from node.demo.story import Story, sparkline
from node.demo.summing_up import failures, page_of, summary_of
from node.run.definition import read_definition
from node.run.template import new_definition


def step(epoch: int, own: int, members: int = 3) -> dict[str, Any]:
    names = [str(number) for number in range(members)]
    return {"event": "step_taken", "epoch": epoch, "own_samples": own, "members": names}


def loss(epoch: int, value: float, samples: int) -> dict[str, Any]:
    return {"event": "loss_seen", "epoch": epoch, "loss": value, "samples": samples}


def caught_up(epoch: int, size: int) -> dict[str, Any]:
    return {"event": "caught_up", "epoch": epoch, "fetched_bytes": size, "sources": ["a", "b"]}


def complete(parameters: str = "5f0c") -> dict[str, Any]:
    return {"event": "run_complete", "epoch": STEPS, "parameters": parameters}


def a_story(late_holds: str = "5f0c") -> Story:
    story = Story()
    for event in (step(0, 30), step(1, 30), loss(1, 5.0, 30), loss(2, 4.0, 30), complete()):
        story.take("ann", event)
    for event in (step(0, 10), loss(1, 3.0, 10)):
        story.take("cleo", event)
    story.person("cleo").killed_at = 1
    for event in (caught_up(1, 900), caught_up(2, 100), step(2, 20), complete(late_holds)):
        story.take("dora", event)
    return story


def rank(name: str, samples: int, averaged: int = 0) -> dict[str, Any]:
    """As `potluck leaderboard --json` has it."""
    return {
        "person": f"code:{name}",
        "samples": samples,
        "averaged_bytes": averaged,
        "steps": 2,
        "service_seconds": 9.0,
        "longest_seconds": 9.0,
        "devices": 1,
    }


def a_summary(story: Story, loss_last: float = 2.0, **credited: int) -> dict[str, Any]:
    from pathlib import Path

    said = {"ann": 60, "dora": 20, "cleo": 10, **credited}
    people = [rank(name, samples) for name, samples in said.items()]
    board = {"people": people, "helpers": [rank("organiser", 0, 5_000_000)]}

    judged = Judged(1000, 5.0, loss_last, "5f0c", STEPS, "def \x1b[2J\n  ")
    health = {"status": 200}
    return summary_of(story, judged, Path("/c"), health, board, late="dora", seconds=9.0)


def test_the_demos_run_is_a_new_run_with_some_values_changed() -> None:
    text = demo_sized(new_definition("demo").decode())
    definition = read_definition(text.encode())
    assert definition.training.steps == STEPS
    assert definition.schedule is not None
    assert definition.schedule["steps"] == STEPS
    assert definition.averaging.grace_seconds == float(CHANGES["averaging", "grace_seconds"])


def test_a_definition_without_a_place_for_a_change_is_told_by_name() -> None:
    with pytest.raises(KeyError, match=r"training\.batch"):
        demo_sized("[training]\nsteps = 1\n")


def test_samples_count_where_others_were_in_the_step() -> None:
    story = a_story()
    story.take("ann", step(2, 50, members=1))
    told = {one["name"]: (one["samples"], one["killed"]) for one in story.contributions()}
    assert told == {"ann": (60, False), "dora": (20, False), "cleo": (10, True)}
    assert sum(one["share"] for one in story.contributions()) == pytest.approx(1.0, abs=1e-3)


def test_the_curve_weighs_everybodys_loss_by_their_samples() -> None:
    assert a_story().curve() == [(1, 4.5), (2, 4.0)]


def test_the_largest_fetch_is_the_catching_up() -> None:
    assert a_summary(a_story())["late"]["fetched_bytes"] == 900


def test_a_demo_that_went_well_claims_all_of_it() -> None:
    summary = a_summary(a_story())
    assert summary["failures"] == []
    assert summary["digests"] == {"ann": "5f0c", "dora": "5f0c", "checkpoint": "5f0c"}
    assert summary["killed"] == [{"name": "cleo", "epoch": 1}]


@pytest.mark.parametrize(
    ("summary", "said"),
    [
        (a_summary(a_story(), loss_last=3.1), "loss fell to 62%"),
        (a_summary(a_story(late_holds="0000")), "not hold the same"),
        (a_summary(a_story(late_holds="")), "not hold the same"),
        ({**a_summary(a_story()), "killed": []}, "nobody was killed"),
        (a_summary(a_story(), ann=90), "ann told of 60 samples, and the others' records say 90"),
        (a_summary(a_story(), dora=0), "dora told of 20 samples, and the others' records say 0"),
        (a_summary(a_story(), cleo=7), "cleo told of 10"),
        ({**a_summary(a_story()), "health": {"status": 503}}, "not healthy"),
        ({**a_summary(a_story()), "checkpoint_epoch": 3}, "not of the last step"),
    ],
)
def test_what_was_not_met_is_said(summary: dict[str, Any], said: str) -> None:
    (failure,) = failures(summary)
    assert said in failure
    assert f"FAILED: {failure}" in page_of({**summary, "failures": [failure]}, keep=False)


def test_who_was_killed_may_have_been_in_a_step_that_it_could_not_tell_of() -> None:
    assert a_summary(a_story(), cleo=12)["failures"] == []


def test_who_got_no_word_of_a_result_may_have_been_in_it() -> None:
    story = a_story()
    story.take("dora", {"event": "gradients_dropped", "samples": 15, "reason": "left out"})
    assert a_summary(story, dora=35)["failures"] == []
    (failure,) = a_summary(story, dora=36)["failures"]
    assert "dora told of 20 samples" in failure


def test_a_step_without_a_witness_is_no_failure() -> None:
    assert a_summary(a_story(), ann=50)["failures"] == []


def test_the_page_names_the_killed_the_late_and_where_things_are() -> None:
    page = page_of(a_summary(a_story()), keep=True)
    assert "cleo (killed) 10 samples" in page
    assert "dora (late) 20 samples" in page
    assert "organiser averaged 5 MB" in page
    assert "checkpoint  /c" in page
    assert page_of(a_summary(a_story()), keep=False).count("/c") == 0


def test_a_sparkline_falls_as_the_curve_does_in_the_room_there_is() -> None:
    assert sparkline([8.0, 4.0, 1.0]) == "█▄▁"
    assert sparkline([1.0, 1.0]) == "▁▁"
    assert sparkline([]) == ""
    assert len(sparkline([float(one) for one in range(1000)], columns=20)) == 20
