"""The mixtures of a run's model: near experts to look at the model with, or the swarm's to train.

    mixtures = Mixtures(definition)
    model = build_model(definition.model, seed=0, mixture=mixtures.mixture)
    mixtures.check_complete()                    # the model has asked for every grid
    loss = model.loss(batch)                     # through two fresh experts in this process
    mixtures.connect(experts_of, portal)         # from now on through the experts of the swarm

Measuring a machine, and `run check`, need the run's model before there is a swarm, and must not
teach the run's experts anything. So a mixture begins with `NEAR` experts of its own, which are the
same for all mixtures of the model, made when they are first used, and dropped by `connect`. They
are no parameters of the model: its parameters are the same, under the same names, before and after.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from models.errors import WrongSettings, nearest
from node.run.costs import FLOAT_BYTES
from node.run.definition import RunDefinition
from node.run.experts import (
    NOTHING,
    grids,
    maker,
    network_builder,
    parameters_of_an_expert,
    section_of,
)
from protocols.experts import DMoE, ExpertGrid, Experts, GridGate
from protocols.guest import Portal

NEAR = 2
"""With one, a gate would have nothing to choose; more cost memory, and large experts much of it."""


def near_bytes(definition: RunDefinition, trusted: Mapping[str, Path] = NOTHING) -> int:
    """The memory of the near experts, with their gradients."""
    return NEAR * 2 * FLOAT_BYTES * parameters_of_an_expert(definition, trusted)


ExpertsOf = Callable[[ExpertGrid], Experts]


class RunMixture(nn.Module):
    """One mixture of a model. `layer` is a NearMixture or a DMoE, around the same gate."""

    def __init__(self, gate: GridGate, near: _NearExperts) -> None:
        super().__init__()
        self.layer: NearMixture | DMoE = NearMixture(gate, near)

    @property
    def gate(self) -> GridGate:
        return self.layer.gate

    def forward(self, x: Tensor) -> Tensor:  # (examples, …, width), and the same back
        y: Tensor = self.layer(x)
        return y


class Mixtures:
    """The mixtures of one model. `mixture` is given to whatever builds it."""

    def __init__(self, definition: RunDefinition, trusted: Mapping[str, Path] = NOTHING) -> None:
        self._section = section_of(definition)
        self._grids = {grid.name: grid for grid in grids(definition)}
        self._near = _NearExperts(definition, trusted)
        self._made: dict[str, RunMixture] = {}

    def mixture(self, name: str, width: int) -> nn.Module:
        """The mixture of this name, once. WrongSettings if it does not suit the definition."""
        if name not in self._grids:
            raise WrongSettings(
                f"The model has a mixture {name}, and grids below [experts] has none of this name.",
                advice=nearest(name, self._grids),
            )
        if name in self._made:
            raise WrongSettings(
                f"The model asks for the mixture {name} twice.",
                advice="Give each mixture a grid of its own.",
            )
        if self._near.row_shape[-1] != width:
            raise WrongSettings(
                f"The mixture {name} is {width} wide, and its experts {self._near.row_shape[-1]}.",
                advice=f"Set width below [experts.network] to {width}.",
            )
        made = self._made[name] = RunMixture(GridGate(width, self._grids[name]), self._near)
        return made

    def mixture_of_rows(self, name: str, width: int) -> nn.Module:
        """The same, for a model whose examples have one vector each."""
        if len(self._near.row_shape) > 1:
            kind = self._section.network.get("name")
            raise WrongSettings(
                f"The experts of the kind {kind} take sequences, and the model gives them vectors.",
                advice="Choose feed-forward or gated below [experts.network], or a model of your "
                "own.",
            )
        return self.mixture(name, width)

    def check_complete(self) -> None:
        """WrongSettings if there is a grid that the model has no mixture for."""
        left = [name for name in self._grids if name not in self._made]
        if left:
            raise WrongSettings(
                f"grids below [experts] has {', '.join(left)}, and the model has no such mixture.",
                advice=f"It has {', '.join(self._made) or 'none'}.",
            )

    def connect(self, experts_of: ExpertsOf, portal: Portal) -> None:
        """Train with the experts of the swarm from now on."""
        section = self._section
        for name, mixture in self._made.items():
            mixture.layer = DMoE(
                mixture.gate,
                experts_of(self._grids[name]),
                portal,
                k=section.k,
                quorum=section.quorum,
                grace_seconds=section.grace_seconds,
                timeout_seconds=section.timeout_seconds,
                balance=section.balance,
            )
        self._near.drop()


class _NearExperts:
    """The first experts of the first grid. Copies of a model share them."""

    def __init__(self, definition: RunDefinition, trusted: Mapping[str, Path]) -> None:
        self._make = partial(maker, definition, trusted)
        self._grid = grids(definition)[0]
        self._networks: list[nn.Module] = []
        self.row_shape = tuple(network_builder(definition, trusted)(None).row_shape)

    def __deepcopy__(self, _memo: object) -> _NearExperts:
        return self

    @property
    def cells(self) -> Tensor:
        """(experts, dimensions)"""
        count = min(NEAR, self._grid.cells)
        return torch.tensor([self._grid.at(number).cells for number in range(count)])

    def networks(self, device: torch.device) -> list[nn.Module]:
        if not self._networks:
            make = self._make(device=device)
            self._networks = [
                make(self._grid.at(number)).network for number in range(len(self.cells))
            ]
        return self._networks

    def drop(self) -> None:
        self._networks = []


class NearMixture(nn.Module):
    """Equation 3 of Learning@home over a few experts in this process, to all of which every example
    goes."""

    def __init__(self, gate: GridGate, near: _NearExperts) -> None:
        super().__init__()
        self.gate, self._near = gate, near

    def forward(self, x: Tensor) -> Tensor:  # (examples, …, width), and the same back
        scores, cells = self.gate(x), self._near.cells.to(x.device)
        each = [own[:, cells[:, number]] for number, own in enumerate(scores)]
        weights = torch.softmax(torch.stack(each).sum(dim=0), dim=1)  # (examples, experts)
        with torch.autocast(x.device.type, enabled=False):
            rows = x.float()
            answers = torch.stack([one(rows) for one in self._near.networks(x.device)], dim=1)
            mixed = torch.bmm(weights.unsqueeze(1), answers.flatten(2))
        return mixed.view_as(x).to(x.dtype)
