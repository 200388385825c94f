"""The chart of a home in which a run of the same name was trained before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from node.run.definition import RunDefinition, read_definition
from node.training.loss_curve import LossCurve, keep
from node.training.trainer import TrainerOptions
from protocols.testing.world import SimulatedWorld
from tests.runs.definitions import with_line
from tests.trainer.training_nodes import training_in
from tests.waiting import PATIENCE_SECONDS, until

STEPS = 2
DEFINITION = read_definition(with_line(f"steps = {STEPS}"))
OTHER = read_definition(with_line(f"steps = {STEPS}\nseed = 1"))
"""Of another run, which begins with other parameters."""


@pytest.mark.parametrize("former", [DEFINITION, OTHER], ids=["same", "other"])
async def test_it_shows_the_losses_of_this_run_alone(former: RunDefinition, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    kept, curve = tmp_path / "poem.losses", LossCurve()
    for step in range(1, 50):
        curve.note(step, 9.0)
    keep(curve.as_bytes(former.first_parameters), kept)
    options = TrainerOptions(begins=True, micro_batch=4, losses_file=kept)
    async with (
        SimulatedWorld(seed=1) as world,
        training_in(world, DEFINITION, "ann", tmp_path / "ann", options) as ann,
    ):
        await until(lambda: "RunComplete" in ann.shown.kinds(), PATIENCE_SECONDS)
    shown = [view.losses_at for view in ann.shown.views]
    assert set(shown) <= {(), (1,), (1, 2)}
    assert ann.session.view().losses_at == (1, 2)
    again = LossCurve.read(kept, DEFINITION.first_parameters)
    assert [step for step, _ in again.points] == [1, 2]
