"""A server of experts obeys its owner: with a simulated node, and the real host."""

from __future__ import annotations

from node.core.training_view import TrainerPhase
from node.training.happenings import ExpertsLost, ExpertsTaken, Notice
from node.training.phases import Facts, told_of
from node.training.serving import told_together
from node.training.words import words_of
from protocols.experts import ExpertLost, ExpertTaken, SavingFailed, Uid

ONE, TWO, THREE = (Uid("ffn", (number,)) for number in range(3))


def test_neighbouring_events_of_a_kind_are_told_in_one_line() -> None:
    events = [
        ExpertTaken(ONE, "new", 0),
        ExpertTaken(TWO, "new", 0),
        ExpertTaken(THREE, "taken over", 7),
        ExpertLost(ONE),
        SavingFailed(TWO, "The disk is full."),
    ]
    told = told_together(events)
    assert told[:3] == [
        ExpertsTaken(("ffn.0", "ffn.1"), "new"),
        ExpertsTaken(("ffn.2",), "taken over"),
        ExpertsLost(("ffn.0",)),
    ]
    assert isinstance(told[3], Notice)
    assert "The disk is full." in words_of(told[3])


def test_the_words_name_some_of_the_experts() -> None:
    many = tuple(f"ffn.{number}" for number in range(9))
    words = words_of(ExpertsTaken(many, "taken over"))
    assert words == (
        "serving 9 experts (ffn.0, ffn.1, ffn.2, ffn.3, …): taken over, because their server is "
        "gone"
    )


def test_a_peer_that_only_serves_has_a_phase_of_its_own() -> None:
    assert told_of(Facts(serves_only=True)).phase is TrainerPhase.SERVING
    assert "copies" in told_of(Facts(serves_only=True, leaving=True)).doing
