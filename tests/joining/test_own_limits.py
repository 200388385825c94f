"""What an owner has set in potluck.toml reaches what trains."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import trio

from node.core.caps.memory import TooLarge
from node.run import building
from node.run.compiled_loss import CompiledLoss
from node.run.costs import Costs
from node.run.signed import read_signed, sign_definition
from node.training import loop
from node.training.happenings import Measured
from node.training.join import participation
from node.training.join.participation import Participation, take_part
from node.training.session import TrainingSession
from protocols.accumulation.optimizer import CollaborativeOptimizer
from protocols.testing.world import SimulatedWorld
from tests.access.members import running_node, write_key
from tests.homes import home_in
from tests.runs.definitions import FINGERPRINT, NAME, NOW_MS, ORGANISER, TEXT
from tests.trainer.recorded import Recorded
from tests.waiting import PATIENCE_SECONDS, until


async def trained(folder: Path, limits: str) -> Recorded:
    """What was told by a peer whose owner set these limits, up to its first step."""
    (folder / "potluck.toml").write_text(f"[limits]\n{limits}", encoding="utf-8")
    home, shown = home_in(folder), Recorded()
    signed = read_signed(
        sign_definition(TEXT, ORGANISER, now_ms=NOW_MS), run=NAME, organiser=FINGERPRINT
    )
    session = TrainingSession(shown)
    session.entered()
    part = Participation(NAME, FINGERPRINT, signed=signed, begins=True)
    async with SimulatedWorld(seed=1) as world:
        write_key(home.key_file, world.identity_of("ann"))
        async with running_node(world, "ann", home) as node, trio.open_nursery() as nursery:

            async def leave_after_a_step() -> None:
                await until(lambda: "StepTaken" in shown.kinds(), PATIENCE_SECONDS)
                session.departure.leave()

            nursery.start_soon(leave_after_a_step)
            await take_part(node, part, session)
            nursery.cancel_scope.cancel()
    return shown


@pytest.mark.slow
async def test_offload_and_compile_reach_the_optimizer_and_the_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    given: list[dict[str, Any]] = []

    def recorded(*arguments: Any, **options: Any) -> CollaborativeOptimizer:
        given.append(options)
        return CollaborativeOptimizer(*arguments, **options)

    monkeypatch.setattr(loop, "CollaborativeOptimizer", recorded)
    monkeypatch.setattr(building, "CompiledLoss", partial(CompiledLoss, backend="eager"))
    shown = await trained(tmp_path, "offload = true\ncompile = true\n")
    assert [one["offload"] for one in given] == [True]
    measured = [one for one in shown.happenings if isinstance(one, Measured)]
    assert [one.compiled for one in measured] == [True]


@pytest.mark.parametrize("limits", ["", 'max_device_memory = "256MB"\n'], ids=["none", "a cap"])
async def test_a_run_that_a_gpu_has_no_room_for_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: str
) -> None:
    gigabyte = 10**9
    there = 8 * gigabyte if limits else gigabyte // 2
    monkeypatch.setattr(participation, "_devices_of", lambda _caps: (("cuda:0",), 1))
    monkeypatch.setattr(participation, "device_bytes", lambda _devices: there)
    monkeypatch.setattr(Costs, "gpu_bytes", lambda _self, _samples, **_: gigabyte)
    with pytest.raises(BaseExceptionGroup) as refused:
        await trained(tmp_path, limits)
    error: BaseException = refused.value
    while isinstance(error, BaseExceptionGroup):
        (error,) = error.exceptions
    assert isinstance(error, TooLarge)
    assert "needs about 1 GB of a GPU's memory" in error.what
