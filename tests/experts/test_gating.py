"""The gate scores experts as equation 2 says, and the balance loss is 0 only for an even spread."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from protocols.experts import ExpertChoice, ExpertGrid, GridGate, Uid, balance_loss

GRID = ExpertGrid("ffn", (3, 5))


def everywhere(grid: ExpertGrid, examples: int) -> ExpertChoice:
    """Every example goes to every expert."""
    return ExpertChoice.of([[grid.at(number) for number in range(grid.cells)]] * examples, grid)


def test_the_score_of_an_expert_is_the_sum_of_one_score_per_dimension() -> None:
    torch.manual_seed(1)
    gate = GridGate(8, GRID)
    x = torch.randn(4, 8)
    first, second = gate(x)
    assert (first.shape, second.shape) == ((4, 3), (4, 5))
    chosen = [[Uid("ffn", (2, 4)), Uid("ffn", (0, 1))]] * 4
    scores = ExpertChoice.of(chosen, GRID).scores((first, second))
    assert torch.equal(scores[:, 0], first[:, 2] + second[:, 4])
    assert torch.equal(scores[:, 1], first[:, 0] + second[:, 1])


def test_an_example_of_several_vectors_is_scored_by_their_mean() -> None:
    torch.manual_seed(1)
    gate = GridGate(8, GRID)
    x = torch.randn(4, 6, 2, 8)
    for got, wanted in zip(gate(x), gate(x.mean(dim=(1, 2))), strict=True):
        torch.testing.assert_close(got, wanted)


def test_scores_have_at_least_32_bits() -> None:
    x = torch.randn(4, 8)
    assert GridGate(8, GRID).bfloat16()(x.bfloat16())[0].dtype is torch.float32
    assert GridGate(8, GRID).double()(x.double())[0].dtype is torch.float64


def test_an_example_may_have_fewer_experts_than_others() -> None:
    choice = ExpertChoice.of(
        [[Uid("ffn", (1, 1))], [], [Uid("ffn", (2, 0)), Uid("ffn", (0, 3))]], GRID
    )
    assert choice.present.tolist() == [[True, False], [False, False], [True, True]]
    assert choice.cells.shape == (3, 2, 2)
    assert ExpertChoice.of([[], []], GRID).present.shape == (2, 0)


def test_the_cells_of_a_choice_have_the_numbers_that_the_grid_gives_them() -> None:
    grid = ExpertGrid("ffn", (2, 3, 4))
    assert everywhere(grid, 2).numbers(grid).tolist() == [list(range(24))] * 2


def test_an_even_spread_costs_nothing() -> None:
    scores = (torch.zeros(6, 3), torch.zeros(6, 5))
    assert balance_loss(scores, everywhere(GRID, 6)).item() == pytest.approx(0.0, abs=1e-6)


def test_an_uneven_spread_costs_what_the_formula_says() -> None:
    """One dimension of two indices, each example goes to both with the weights 3/4 and 1/4: the
    squared coefficient of variation is 1/4. The load is even, and so its term is 0."""
    grid = ExpertGrid("ffn", (2,))
    scores = (torch.tensor([[3.0, 1.0]]).log().expand(8, 2),)
    assert balance_loss(scores, everywhere(grid, 8)).item() == pytest.approx(0.25)


def test_a_load_on_one_index_costs_what_the_formula_says() -> None:
    """Three examples of four go to index 0 alone, one goes to index 1: the importances are 3 and 1
    (variation 1/4), the load is 3/4 and 1/4 and the chances are 1/2 each (load term 0)."""
    grid = ExpertGrid("ffn", (2,))
    chosen = [[grid.at(0)]] * 3 + [[grid.at(1)]]
    scores = (torch.zeros(4, 2),)
    assert balance_loss(scores, ExpertChoice.of(chosen, grid)).item() == pytest.approx(0.25)


def test_an_index_that_nobody_chose_does_not_count() -> None:
    grid = ExpertGrid("ffn", (4,))
    chosen = [[grid.at(0), grid.at(1)]] * 5
    scores = (torch.tensor([[0.0, 0.0, 9.0, -9.0]]).expand(5, 4),)
    assert balance_loss(scores, ExpertChoice.of(chosen, grid)).item() == pytest.approx(
        0.0, abs=1e-6
    )


@pytest.mark.slow
def test_descending_the_balance_loss_spreads_the_load() -> None:
    torch.manual_seed(2)
    grid = ExpertGrid("ffn", (4, 4))
    gate = GridGate(8, grid)
    with torch.no_grad():
        gate.projection.bias[[0, 4]] += 1.0  # most examples prefer the experts in 0.* and *.0
    x = torch.randn(256, 8)
    optimizer = torch.optim.Adam(gate.parameters(), lr=0.02)

    def best_four(scores: tuple[Tensor, ...]) -> ExpertChoice:
        total = (scores[0][:, :, None] + scores[1][:, None, :]).flatten(1)
        best = total.topk(4, dim=1).indices.tolist()
        return ExpertChoice.of([[grid.at(number) for number in own] for own in best], grid)

    def busiest() -> float:
        cells = best_four(gate(x)).cells
        return max(torch.bincount(cells[..., d].flatten()).max().item() for d in (0, 1)) / (256 * 4)

    before = busiest()
    for _ in range(100):
        scores = gate(x)
        optimizer.zero_grad()
        balance_loss(scores, best_four(scores)).backward()
        optimizer.step()
    assert before > 0.5  # of all choices
    assert busiest() < 0.32  # 0.25 would be even
