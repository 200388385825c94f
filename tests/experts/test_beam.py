"""The search for the best experts: equal to a look at all of them, with few readings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from protocols.errors import ProtocolMisuse
from protocols.experts import BeamSearch, Below, ExpertGrid, Host, Uid, select_experts
from protocols.experts.beam import MOST_WIDENED
from protocols.identity import PeerId
from protocols.tensors import NotFinite

HOST = Host(PeerId("a server"))


class Live:
    """Answers what is below a prefix, and counts what it was asked."""

    def __init__(self, uids: Iterable[Uid]) -> None:
        self.below: dict[Uid, dict[int, tuple[Host, ...]]] = {}
        self.asked: list[list[Uid]] = []
        for uid in uids:
            for length, index in enumerate(uid.cells):
                prefix = Uid(uid.grid, uid.cells[:length])
                self.below.setdefault(prefix, {})[index] = (HOST,)

    async def active(self, prefixes: Sequence[Uid]) -> dict[Uid, Below]:
        self.asked.append(list(prefixes))
        return {prefix: self.below.get(prefix, {}) for prefix in prefixes}

    @property
    def readings(self) -> int:
        return sum(map(len, self.asked))


def best_of_all(scores: Sequence[Tensor], k: int, live: Iterable[Uid]) -> list[list[Uid]]:
    """What the definition says: the score of each live expert of each example, in order."""
    uids = sorted(live)
    found = []
    for example in range(len(scores[0])):
        gates = [one[example].numpy() for one in scores]
        total = []
        for uid in uids:
            score = np.float32(0.0)
            for gate, cell in zip(gates, uid.cells, strict=True):
                score += gate[cell]
            total.append((-score, uid))
        found.append([uid for _, uid in sorted(total)[:k]])
    return found


async def chosen(scores: Sequence[Tensor], k: int, grid: ExpertGrid, live: Live) -> list[list[Uid]]:
    found = await select_experts(scores, k, grid, live.active)
    assert all(hosts == (HOST,) for row in found for _, hosts in row)
    return [[uid for uid, _ in row] for row in found]


def all_of(grid: ExpertGrid) -> list[Uid]:
    return [grid.at(number) for number in range(grid.cells)]


@st.composite
def searches(draw: st.DrawFn) -> tuple[list[Tensor], int, ExpertGrid, list[Uid]]:
    """Small grids, full or sparse; scores with many ties, or with rounding."""
    sizes = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    grid = ExpertGrid("ffn", sizes)
    live = draw(st.sets(st.integers(0, grid.cells - 1), max_size=min(grid.cells, 40)))
    value = draw(
        st.sampled_from(
            [st.integers(-2, 2).map(float), st.floats(-1e6, 1e6, width=32), st.just(0.5)]
        )
    )
    batch = draw(st.integers(1, 4))
    rows = [
        draw(
            st.lists(st.lists(value, min_size=size, max_size=size), min_size=batch, max_size=batch)
        )
        for size in sizes
    ]
    scores = [torch.tensor(one, dtype=torch.float32) for one in rows]
    return scores, draw(st.integers(1, 5)), grid, [grid.at(number) for number in live]


@given(searches())
def test_the_best_of_all_live_experts_are_found(
    search: tuple[list[Tensor], int, ExpertGrid, list[Uid]],
) -> None:
    scores, k, grid, uids = search
    live = Live(uids)
    found = BeamSearch(scores, k, grid)
    asked: list[Uid] = []
    while prefixes := found.wanted():
        asked += prefixes
        found.take({prefix: live.below.get(prefix, {}) for prefix in prefixes})
    assert found.is_exact
    assert [[uid for uid, _ in row] for row in found.best()] == best_of_all(scores, k, uids)
    assert len(asked) == len(set(asked)), "no prefix is read twice"


@pytest.mark.parametrize(("sizes", "live"), [((64, 64), 400), ((16, 16, 16), 300), ((300,), 40)])
async def test_the_best_of_a_batch_are_found_where_most_cells_are_empty(
    sizes: tuple[int, ...], live: int
) -> None:
    grid = ExpertGrid("ffn", sizes)
    chance = torch.Generator().manual_seed(3)
    numbers = torch.randperm(grid.cells, generator=chance)[:live].tolist()
    uids = [grid.at(number) for number in numbers]
    scores = [torch.randn(64, size, generator=chance) for size in sizes]
    assert await chosen(scores, 4, grid, Live(uids)) == best_of_all(scores, 4, uids)


async def test_a_full_grid_takes_one_reading_for_each_dimension_and_no_more_than_the_beam() -> None:
    grid = ExpertGrid("ffn", (16, 16, 16))
    chance = torch.Generator().manual_seed(5)
    scores = [torch.randn(3, 16, generator=chance) for _ in range(3)]
    live = Live(all_of(grid))
    await chosen(scores, 4, grid, live)
    assert len(live.asked) == grid.dimensions
    assert live.asked[0] == [grid.root]
    assert all(len(one) <= 3 * 4 for one in live.asked)


async def test_a_beam_alone_would_miss_a_good_expert_behind_a_poor_prefix() -> None:
    grid = ExpertGrid("ffn", (2, 2))
    scores = [torch.tensor([[1.0, 0.9]]), torch.tensor([[0.0, 5.0]])]
    live = Live([grid.uid("ffn.0.0"), grid.uid("ffn.1.1")])
    assert await chosen(scores, 1, grid, live) == [[grid.uid("ffn.1.1")]]


async def test_of_equal_scores_the_smaller_uids_are_better_and_nothing_is_read_for_it() -> None:
    grid = ExpertGrid("ffn", (8, 8))
    live = Live(all_of(grid))
    found = await chosen([torch.zeros(2, 8), torch.zeros(2, 8)], 3, grid, live)
    assert found == [[grid.at(0), grid.at(1), grid.at(2)]] * 2
    assert live.readings == 1 + 3


async def test_scores_of_any_type_and_with_a_gradient_are_taken() -> None:
    grid = ExpertGrid("ffn", (4, 4))
    scores = [torch.randn(2, 4, requires_grad=True).to(torch.bfloat16) for _ in range(2)]
    plain = [one.detach().float() for one in scores]
    assert await chosen(scores, 2, grid, Live(all_of(grid))) == best_of_all(plain, 2, all_of(grid))


async def test_without_experts_nothing_is_chosen() -> None:
    grid = ExpertGrid("ffn", (4, 4))
    live = Live([])
    assert await chosen([torch.zeros(2, 4), torch.zeros(2, 4)], 2, grid, live) == [[], []]
    assert live.asked == [[grid.root]]


async def test_an_empty_batch_chooses_nothing() -> None:
    grid = ExpertGrid("ffn", (4, 4))
    scores = [torch.zeros(0, 4), torch.zeros(0, 4)]
    assert await chosen(scores, 2, grid, Live(all_of(grid))) == []


async def test_cells_outside_of_the_grid_are_ignored() -> None:
    grid = ExpertGrid("ffn", (2, 2))
    live = Live([Uid("ffn", (0, 1)), Uid("ffn", (0, 2)), Uid("ffn", (7, 0))])
    assert await chosen([torch.zeros(1, 2)] * 2, 4, grid, live) == [[Uid("ffn", (0, 1))]]


async def test_prefixes_that_lead_nowhere_are_read_up_to_a_limit() -> None:
    grid = ExpertGrid("ffn", (4096, 2))
    live = Live([Uid("ffn", (4095, 1))])
    live.below[grid.root] = dict.fromkeys(range(4096), (HOST,))
    scores = [torch.arange(4096.0, 0.0, -1.0)[None], torch.zeros(1, 2)]
    assert await chosen(scores, 2, grid, live) == [[]]
    assert live.readings == 1 + 2 + MOST_WIDENED
    search = BeamSearch(scores, 2, grid)
    while prefixes := search.wanted():
        search.take(await live.active(prefixes))
    assert not search.is_exact


async def test_the_server_that_keeps_an_expert_is_its_first_host() -> None:
    grid = ExpertGrid("ffn", (1,))
    later, earlier = Host(PeerId("a"), since=8), Host(PeerId("b"), since=7)

    async def active(_prefixes: Sequence[Uid]) -> dict[Uid, Below]:
        return {grid.root: {0: (later, earlier)}}

    found = await select_experts([torch.zeros(1, 1)], 1, grid, active)
    assert found == [[(Uid("ffn", (0,)), (earlier, later))]]


@pytest.mark.parametrize(
    "scores",
    [
        [torch.zeros(2, 4)],
        [torch.zeros(2, 4), torch.zeros(2, 5)],
        [torch.zeros(2, 4), torch.zeros(3, 4)],
        [torch.zeros(4), torch.zeros(4)],
        [],
    ],
)
def test_scores_of_another_shape_are_a_misuse(scores: list[Tensor]) -> None:
    with pytest.raises(ProtocolMisuse, match="do not fit the grid"):
        BeamSearch(scores, 1, ExpertGrid("ffn", (4, 4)))


def test_a_search_for_no_expert_is_a_misuse() -> None:
    with pytest.raises(ProtocolMisuse):
        BeamSearch([torch.zeros(1, 4)], 0, ExpertGrid("ffn", (4,)))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_gate_that_has_diverged_is_named(value: float) -> None:
    with pytest.raises(NotFinite, match="gate"):
        BeamSearch([torch.full((1, 4), value)], 1, ExpertGrid("ffn", (4,)))
