"""Every happening has words for a person, and an object for a program."""

from __future__ import annotations

import json
import typing

import msgspec
import pytest

from node.core.display_name import short
from node.core.duration import span
from node.training import happenings
from node.training.happenings import Began, Happening, Left, NetworkBack, Paused
from node.training.words import given_by, object_of, words_of
from protocols.accumulation.events import SeenStep, Share, StepLoss, StepTaken
from protocols.identity import PeerId

EXAMPLES: dict[object, object] = {
    str: "words",
    int: 7,
    float: 2.5,
    bool: True,
    bytes: bytes(16),
    PeerId: PeerId("12D3KooWpeer"),
    tuple[str, ...]: ("one", "other"),
    tuple[PeerId, ...]: (PeerId("12D3KooWpeer"),),
    dict[PeerId, str]: {PeerId("12D3KooWpeer"): "lied"},
    float | None: None,
    tuple[PeerId, ...] | None: None,
    tuple[Share, ...]: (Share(PeerId("12D3KooWpeer"), 96.0, 1_000_000),),
    int | None: 3,
    tuple[SeenStep, ...]: (SeenStep(7, bytes(16), 96.0, 12, ()),),
    tuple[StepLoss, ...]: (StepLoss(7, 2.5),),
}
KINDS = [*typing.get_args(Happening)]


def example(kind: type) -> Happening:
    hints = typing.get_type_hints(kind)
    made: Happening = kind(**{name: EXAMPLES[hint] for name, hint in hints.items()})
    return made


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_each_can_be_said_and_written(kind: type) -> None:
    happening = example(kind)
    assert words_of(happening)
    told = json.loads(json.dumps(object_of(happening)))
    assert told["event"] == told["event"].lower()
    assert set(told) >= set(typing.get_type_hints(kind))


def test_an_event_is_named_in_lower_case() -> None:
    assert object_of(NetworkBack(1.5)) == {"event": "network_back", "seconds": 1.5}
    assert set(happenings.__dict__) >= {"Happening", "Own"}


def test_the_owners_part_of_a_step_is_said() -> None:
    members = (PeerId("a"), PeerId("b"))
    step = StepTaken(4, 256.0, 96, members, (), bytes(16), 1.0, 1.0, 1.0, 1.0)
    assert words_of(step) == "step 5 with 2 peers: 96 of 256 samples are yours"
    told = words_of(msgspec.structs.replace(step, loss=4.5105))
    assert told == "step 5 with 2 peers, loss 4.5105: 96 of 256 samples are yours"
    left = Left(samples=1200, steps=3, seconds=75.0)
    assert words_of(left).startswith("left after 1 min 15 s: 1,200 samples of yours are in 3 steps")


def test_samples_trained_alone_are_thanked_for() -> None:
    alone = Left(0, 0, 75.0, lost_samples=576, alone_samples=37_120, alone_steps=580)
    assert given_by(alone) == (
        "37,120 samples of yours are in 580 steps that you made alone; 576 are in none"
    )
    both = Left(64, 1, 75.0, alone_samples=128, alone_steps=2)
    assert given_by(both) == (
        "64 samples of yours are in 1 step of the run; 128 samples are in 2 steps that you made "
        "alone"
    )


def test_a_pause_is_said_once() -> None:
    assert words_of(Paused(("paused by you",))) == "paused by you"
    assert words_of(Paused(("the quota is used up",))) == "paused: the quota is used up"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.04, "0.0 s"), (8.25, "8.2 s"), (59.9, "59 s"), (200, "3 min 20 s"), (7500, "2 h 5 min")],
)
def test_a_span_is_said_in_its_two_largest_units(seconds: float, words: str) -> None:
    assert span(seconds) == words


def test_a_peer_id_is_shortened_from_the_front() -> None:
    assert short("12D3KooWA7YDSPeL") == "…A7YDSPeL"
    assert short("alice") == "alice"


def test_a_peer_that_only_keeps_the_run_does_not_say_that_it_trains() -> None:
    assert words_of(Began("poem", 4, keeps_only=True)) == "keeping poem, from step 4 on"
    assert words_of(Began("poem", 4)) == "training in poem, from step 4 on"
