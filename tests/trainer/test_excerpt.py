"""The model writes a text while it is trained, in a hundredth of the time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from models.gpt import GPT, GPTSettings
from node.run.building import build_task
from node.run.definition import read_definition
from node.training import excerpt
from node.training.excerpt import SHARE, Excerpt, excerpt_of
from node.training.trainer import TrainerOptions, train_run
from protocols.testing.world import SimulatedWorld
from tests.runs.definitions import TEXT, changed, with_line
from tests.trainer.training_nodes import TrainingNode, training_node

SMALLEST = GPTSettings(context=8, width=16, layers=1, heads=2)
PASS_SECONDS = 0.25
LENGTH = 20  # bytes, of a short text
FIGURES = changed(
    'name = "gpt"\nsize = "tiny"\ncontext = 16\nwidth = 16\nlayers = 1\nheads = 2\n',
    'name = "classifier"\n',
)


class Clock:
    """Each pass of the model takes a quarter of a second, by this clock."""

    def __init__(self, model: GPT) -> None:
        self.now, self.passes = 0.0, 0
        model.register_forward_hook(self._passed)

    def _passed(self, *_: object) -> None:
        self.passes += 1
        self.now += PASS_SECONDS

    def __call__(self) -> float:
        return self.now


def test_it_takes_a_hundredth_of_the_time() -> None:
    model = GPT(SMALLEST, 0)
    clock = Clock(model)
    writing = Excerpt(model, clock)
    for _ in range(10_000):
        writing.after_a_batch()
        clock.now += 0.01  # a batch
    assert clock.passes == pytest.approx(SHARE * clock.now / PASS_SECONDS, abs=1)


def test_a_whole_text_stays_until_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(excerpt, "LENGTH", LENGTH)
    model = GPT(SMALLEST, 0)
    clock = Clock(model)
    writing, seen = Excerpt(model, clock), list[str]()
    for _ in range(2 * LENGTH + 2):
        clock.now += 100.0
        seen.append(writing.after_a_batch())
    assert [len(one.encode("utf-8", "replace")) > 0 for one in seen[:3]] == [True] * 3
    assert len(set(seen[LENGTH - 1 : 2 * LENGTH])) == 1
    assert seen[2 * LENGTH] != seen[2 * LENGTH - 1]


def test_a_model_that_has_lost_its_numbers_writes_nothing_and_ends_nothing() -> None:
    model = GPT(SMALLEST, 0)
    with torch.no_grad():
        model.embedding.weight.fill_(float("nan"))
    assert Excerpt(model).after_a_batch() == ""


def test_no_random_number_of_the_training_is_used() -> None:
    model, before = GPT(SMALLEST, 0), torch.get_rng_state()
    Excerpt(model).after_a_batch()
    assert torch.equal(torch.get_rng_state(), before)
    assert model.embedding.weight.grad is None


@pytest.mark.parametrize(
    ("text", "writes"),
    [
        (TEXT, True),
        (changed('size = "tiny"', 'size = "tiny"\nvocabulary = 300'), False),
        (FIGURES, False),
    ],
    ids=["bytes", "other ids", "pictures"],
)
def test_only_a_model_of_bytes_writes(text: bytes, writes: bool) -> None:
    assert (excerpt_of(build_task(read_definition(text))) is not None) == writes


@pytest.mark.slow
async def test_a_session_with_a_screen_shows_what_its_model_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(excerpt, "SHARE", 1.0)
    torch.set_num_threads(1)
    definition = read_definition(with_line("steps = 3"))
    options = TrainerOptions(begins=True, micro_batch=4)

    async def train(one: TrainingNode) -> None:
        assert not one.session.lets_write, "without a screen"
        one.session.lets_write = True
        task = build_task(definition, peer="ann")
        await train_run(one.node, definition, task, options, one.session)

    async with (
        SimulatedWorld(seed=1) as world,
        training_node(world, "ann", tmp_path / "ann", train) as ann,
    ):
        await ann.until("RunComplete")
        assert ann.session.view().writes
        ann.session.departure.leave(at_once=True)
        ann.session.gate.end()
