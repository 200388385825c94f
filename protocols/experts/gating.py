"""The gate: how well each expert of a grid suits an example (Learning@home, equation 2).

    gate = GridGate(width, ExpertGrid("ffn", (64, 64)))
    scores = gate(x)                            # one tensor per dimension, (examples, size)
    choice = ExpertChoice.of(chosen, gate.grid) # the experts that a search found for each example
    choice.scores(scores)                       # g(x, f) of these, (examples, k)

The score of an expert is the sum of one score per dimension: g(x, f) = Σ g_i(x)[u_i]. So a gate for
4,096 experts has 128 outputs. Nothing here knows the network: which experts live is the business
of the search.

`balance_loss` keeps the gate from sending everything to a few experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn

from protocols.experts.grid import ExpertGrid, Uid


class GridGate(nn.Module):
    """One linear layer for each dimension of the grid, kept as one matrix.

    An example with several vectors, such as a sequence, is scored by their mean.
    """

    def __init__(self, width: int, grid: ExpertGrid) -> None:
        super().__init__()
        self.grid = grid
        self.projection = nn.Linear(width, sum(grid.sizes))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """x: (examples, …, width). Returns (examples, M_i) for each dimension i, in float32 or
        more: scores that were rounded to 8 bits would be equal too often."""
        if x.dim() > 2:
            x = x.flatten(1, -2).mean(dim=1)
        scores = self.projection(x)
        if torch.finfo(scores.dtype).bits < 32:
            scores = scores.float()
        return tuple(scores.split(self.grid.sizes, dim=1))


@dataclass(frozen=True, eq=False)
class ExpertChoice:
    """The experts that were found for each example, at most k.

    - `cells`: (examples, k, dimensions), the indices of each; 0 where `present` is False.
    - `present`: (examples, k), False in the last places of an example with fewer experts.
    """

    cells: Tensor
    present: Tensor

    @staticmethod
    def of(chosen: Sequence[Sequence[Uid]], grid: ExpertGrid) -> ExpertChoice:
        counts = torch.tensor([len(own) for own in chosen], dtype=torch.int64)
        most = max(map(len, chosen), default=0)
        present = torch.arange(most) < counts[:, None]
        indices = chain.from_iterable(uid.cells for own in chosen for uid in own)
        cells = torch.zeros((len(chosen), most, grid.dimensions), dtype=torch.int64)
        cells[present] = torch.tensor(list(indices), dtype=torch.int64).view(-1, grid.dimensions)
        return ExpertChoice(cells, present)

    def numbers(self, grid: ExpertGrid) -> Tensor:
        """The numbers of the cells, as in `grid.at`: (examples, k)."""
        steps = [math.prod(grid.sizes[place + 1 :]) for place in range(grid.dimensions)]
        return (self.cells * torch.tensor(steps)).sum(dim=-1)

    def scores(self, scores: Sequence[Tensor]) -> Tensor:
        """Equation 2: (examples, k), differentiable. Without meaning where nobody is present."""
        cells = self.cells.to(scores[0].device)
        parts = [own.gather(1, cells[..., number]) for number, own in enumerate(scores)]
        return torch.stack(parts).sum(dim=0)


def weights_of(scores: Tensor, among: Tensor) -> Tensor:
    """The softmax of equation 3 over the places that `among` marks, and 0 elsewhere.

    scores, among: (examples, k). An example without a marked place has NaN.
    """
    return torch.softmax(scores.masked_fill(~among, -torch.inf), dim=1)


def balance_loss(scores: Sequence[Tensor], choice: ExpertChoice) -> Tensor:
    """How unevenly the examples of a batch are spread, per dimension of the grid: 0 if evenly.

    Two terms for each dimension, as in Shazeer et al. 2017 (appendix A), over the n indices that
    were chosen for at least one example:

    - importance: the squared coefficient of variation of Σ_x w(x, f) over the indices, where w is
      the softmax over the experts chosen for x;
    - load: n Σ_j load_j p_j - 1, where load_j is index j's share of all choices and p_j the mean
      over the batch of softmax g_i(x)[j]. The load itself has no gradient; this product has one
      (Lepikhin et al. 2020), and unlike Shazeer's estimate it needs no noise in the gate.

    An index that nobody chose is left out: it may have no expert.
    """
    present = choice.present.to(scores[0].device)
    cells = choice.cells.to(scores[0].device)
    weights = weights_of(choice.scores(scores), present)[present]
    loss = scores[0].new_zeros(())
    for number, own in enumerate(scores):
        indices = cells[..., number][present]
        importance = own.new_zeros(own.shape[1]).index_add(0, indices, weights)
        load = torch.bincount(indices, minlength=own.shape[1]).to(own.dtype) / max(1, len(indices))
        used = load > 0.0
        chances = torch.softmax(own.masked_fill(~used, -torch.inf), dim=1).mean(dim=0)
        count = used.sum()
        loss = loss + count * (importance / importance.sum()).square().sum() - 1.0
        loss = loss + count * (load * chances).sum() - 1.0
    return loss / len(scores)
