"""What the demo of a run with experts claims at its end."""

from __future__ import annotations

from node.app.demo.experts import (
    CELLS,
    COMPARED,
    DEFINITION,
    ExpertsStory,
    experts_page_of,
    served_by_others,
)
from node.run.definition import read_definition
from node.run.experts import grids


def step(epoch: int, loss: float, own: int = 8) -> dict[str, object]:
    return {"event": "step_taken", "epoch": epoch, "loss": loss, "own_samples": own}


def test_its_definition_can_be_read_and_has_the_cells_that_it_says() -> None:
    assert sum(grid.cells for grid in grids(read_definition(DEFINITION.encode()))) == CELLS


def test_the_story_compares_the_first_steps_with_the_last() -> None:
    story = ExpertsStory()
    for epoch in range(4 * COMPARED):
        story.take("ann", step(epoch, 5.0 - epoch / 10))
        story.take("ben", step(epoch, 1.0, own=0))  # the first report of a step counts
    story.take("sara", {"event": "experts_taken", "how": "taken over", "uids": ["a.1", "a.2"]})
    story.take("sara", {"event": "experts_taken", "how": "new", "uids": ["a.3"]})
    story.take("sara", {"event": "left"})
    assert story.ends() == (4.9, 4.0)
    assert (story.steps, story.left) == ({"ann": 12}, {"sara"})
    assert (story.taken_how("taken over"), story.taken_how("new")) == (2, 1)


def test_an_expert_that_only_the_dead_announce_is_not_served() -> None:
    census = {
        "servers": [
            {"peer": "dead", "experts": ["ffn.0", "ffn.1"]},
            {"peer": "alive", "experts": ["ffn.1", "ffn.2"]},
        ]
    }
    assert served_by_others(census, {"dead"}) == {"ffn.1", "ffn.2"}
    assert served_by_others(census, set()) - served_by_others(census, {"dead"}) == {"ffn.0"}


def test_the_page_names_what_failed() -> None:
    summary = {
        "servers": 4,
        "experts": CELLS,
        "trainers": 3,
        "killed": ["sam"],
        "killed_at_step": 8,
        "lost": 6,
        "live": 23,
        "take_over_seconds": 33.2,
        "loss_first": 5.2,
        "loss_last": 5.3,
        "steps": 40,
        "seconds": 90.0,
        "failures": ["the loss did not fall"],
    }
    page = experts_page_of(summary, keep=True)
    assert "FAILED: the loss did not fall" in page
    assert "removed" not in page
