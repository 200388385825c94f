"""A run's model is looked at with near experts, and trained with those of a swarm."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor

from models.errors import WrongSettings
from node.run.building import build_task
from node.run.definition import read_definition
from node.run.experts import grids, maker
from node.run.mixtures import Mixtures, RunMixture
from node.run.trusted import trusted_modules
from protocols.experts import ExpertGrid, Uid
from protocols.guest import Portal
from tests.runs.expert_definitions import TEXT

DEFINITION = read_definition(TEXT)
GRID = grids(DEFINITION)[0]


class NoExperts:
    """Experts that nobody calls."""

    async def select(self, scores: Sequence[Tensor], k: int) -> list[list[Uid]]:
        raise NotImplementedError

    async def forward(self, uid: Uid, inputs: Tensor, timeout: float) -> Tensor:
        raise NotImplementedError

    async def backward(self, uid: Uid, inputs: Tensor, grads: Tensor, timeout: float) -> Tensor:
        raise NotImplementedError


def test_a_near_mixture_is_the_weighted_mean_of_its_first_experts() -> None:
    mixture = Mixtures(DEFINITION).mixture("ffn0", 16)
    assert isinstance(mixture, RunMixture)
    x = torch.randn(5, 16)
    scores = mixture.gate(x)
    experts = [GRID.at(0), GRID.at(1)]
    each = torch.stack(
        [scores[0][:, uid.cells[0]] + scores[1][:, uid.cells[1]] for uid in experts], dim=1
    )
    weights = torch.softmax(each, dim=1)
    answers = [maker(DEFINITION)(uid).network(x) for uid in experts]
    expected = sum(weights[:, [number]] * answer for number, answer in enumerate(answers))
    torch.testing.assert_close(mixture(x), expected)


def test_the_parameters_of_a_model_are_the_same_before_and_after_it_is_connected() -> None:
    task = build_task(DEFINITION)
    before = task.named_parameters
    task.backward(task.loss(task.made_up_batch(2)))
    assert task.mixtures is not None
    connected: list[ExpertGrid] = []

    def experts_of(grid: ExpertGrid) -> NoExperts:
        connected.append(grid)
        return NoExperts()

    task.mixtures.connect(experts_of, cast("Portal", None))
    assert tuple(connected) == grids(DEFINITION)
    after = task.named_parameters
    assert [name for name, _ in before] == [name for name, _ in after]
    assert all(one is other for (_, one), (_, other) in zip(before, after, strict=True))
    assert not any("output.weight" in name and "attention" not in name for name, _ in after)


def test_the_initial_parameters_are_the_same_bits_everywhere() -> None:
    one, other = build_task(DEFINITION), build_task(DEFINITION)
    for (name, ours), (_, theirs) in zip(one.named_parameters, other.named_parameters, strict=True):
        assert torch.equal(ours, theirs), name


def test_each_mixture_is_made_once() -> None:
    mixtures = Mixtures(DEFINITION)
    mixtures.mixture("ffn0", 16)
    with pytest.raises(WrongSettings, match="asks for the mixture ffn0 twice"):
        mixtures.mixture("ffn0", 16)
    with pytest.raises(WrongSettings, match="has ffn1, and the model has no such mixture"):
        mixtures.check_complete()


def test_a_gpt_of_experts_does_not_see_the_bytes_that_it_predicts() -> None:
    model = build_task(DEFINITION).model
    ids = torch.randint(1, 128, (1, 16))
    changed_ids = ids.clone()
    changed_ids[0, -1] += 1
    with torch.no_grad():
        one, other = model(ids), model(changed_ids)
    torch.testing.assert_close(one[:, :-1], other[:, :-1], rtol=0.0, atol=0.0)
    assert not torch.equal(one[:, -1], other[:, -1])


@pytest.mark.slow
def test_a_classifier_of_experts_learns_the_built_in_figures() -> None:
    table = TEXT[TEXT.index(b"[model]") : TEXT.index(b"[optimizer]")]
    small = b'[model]\nname = "dmoe_classifier"\nwidth = 16\n'
    task = build_task(read_definition(TEXT.replace(table, small)))
    optimizer = task.optimizer_factory(task.named_parameters)
    losses = []
    with task.open_batches(samples=16) as batches:
        for _ in range(40):
            optimizer.zero_grad()
            loss = task.loss(next(batches))
            task.backward(loss)
            optimizer.step()
            losses.append(loss.item())
    assert sum(losses[-5:]) < sum(losses[:5])


MODULE = """
import torch
from models.trainable import Trainable

class Mixed(Trainable):
    window = 16

    def __init__(self, mixture):
        super().__init__()
        self.first, self.second = mixture("ffn0", 16), mixture("ffn1", 16)

    def loss(self, batch):
        return self.second(self.first(batch.float())).square().mean()

def build_model(settings, *, seed, mixture):
    torch.manual_seed(seed)
    return Mixed(mixture)
"""


def test_a_model_of_ones_own_gets_its_mixtures(tmp_path: Path) -> None:
    path = tmp_path / "mixed.py"
    path.write_text(MODULE)
    table = TEXT[TEXT.index(b"[model]") : TEXT.index(b"[optimizer]")]
    definition = read_definition(TEXT.replace(table, b'[model]\nmodule = "mixed"\n'))
    task = build_task(definition, trusted=trusted_modules([str(path)]))
    task.backward(task.loss(task.made_up_batch(2)))
    names = [name for name, _ in task.named_parameters]
    assert "first.layer.gate.projection.weight" in names
    assert all(one.grad is not None for _, one in task.named_parameters)
