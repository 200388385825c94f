"""Training in a run whose feed-forward blocks are experts at another node."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from node.run.definition import read_definition
from node.training.happenings import ExpertsBack, ExpertsMissing, RunComplete
from node.training.trainer import TrainerOptions
from protocols.accumulation.driver import OtherModel
from protocols.accumulation.events import StepTaken
from protocols.testing.world import SimulatedWorld
from tests.runs.expert_definitions import changed
from tests.trainer.expert_servers import expert_server
from tests.trainer.training_nodes import TrainingNode, training_in
from tests.waiting import PATIENCE_SECONDS, until

STEPS = 40
DEFINITION = read_definition(changed("batch = 64", f"batch = 16\nsteps = {STEPS}"))
ENDLESS = read_definition(changed("batch = 64", "batch = 16"))
VOLUNTEER = TrainerOptions(micro_batch=4)
ORGANISER = TrainerOptions(micro_batch=4, begins=True)
FEW = 5  # steps, at the begin and at the end


def steps_of(node: TrainingNode) -> list[StepTaken]:
    return [one for one in node.shown.happenings if isinstance(one, StepTaken)]


def losses_of(node: TrainingNode) -> list[float]:
    return [one.loss for one in steps_of(node) if one.loss is not None]


def ends_with(node: TrainingNode) -> str:
    (complete,) = [one for one in node.shown.happenings if isinstance(one, RunComplete)]
    return complete.parameters


@pytest.fixture
def soon_announced_and_soon_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third of the product's seconds, which are really waited for where a server is gone."""
    for name, seconds in (("ANNOUNCE", 3.0), ("RECORD", 10.0), ("CACHED", 2.0), ("STALE", 5.0)):
        monkeypatch.setattr(f"protocols.experts.directory.{name}_SECONDS", seconds)


@pytest.mark.slow
async def test_two_trainers_learn_with_the_experts_of_a_third_node(tmp_path: Path) -> None:
    async with (
        SimulatedWorld(seed=1) as world,
        expert_server(world, DEFINITION, "sam", tmp_path) as sam,
        training_in(world, DEFINITION, "ann", tmp_path / "a", ORGANISER, sam.address) as ann,
        training_in(world, DEFINITION, "ben", tmp_path / "b", VOLUNTEER, sam.address) as ben,
    ):
        await ann.until("RunComplete")
        await ben.until("RunComplete")
        learnt = [one.steps for one in sam.host.hosted()]
    losses = losses_of(ann)
    assert sum(losses[-FEW:]) / FEW < sum(losses[:FEW]) / FEW - 0.2
    assert ends_with(ann) == ends_with(ben)
    assert max(len(one.members) for one in steps_of(ann)) == 2
    assert sum(learnt) > STEPS


@pytest.mark.slow
@pytest.mark.usefixtures("soon_announced_and_soon_forgotten")
async def test_a_trainer_whose_experts_are_gone_says_so_and_goes_on_when_they_return(
    tmp_path: Path,
) -> None:
    async with (
        SimulatedWorld(seed=1) as world,
        expert_server(world, ENDLESS, "sam", tmp_path) as sam,
        training_in(world, ENDLESS, "ann", tmp_path / "a", ORGANISER, sam.address) as ann,
    ):
        await ann.until("StepTaken")
        sam.stop()
        await ann.until("ExpertsMissing")
        assert "waiting for experts" in ann.session.view().doing
        before = len(steps_of(ann))
        (address, *_) = ann.network.addresses()
        async with expert_server(world, ENDLESS, "sue", tmp_path, address):
            await ann.until("ExpertsBack")
            await until(lambda: len(steps_of(ann)) > before, PATIENCE_SECONDS)
            assert "waiting for experts" not in ann.session.view().doing
    (missing,) = [one for one in ann.shown.happenings if isinstance(one, ExpertsMissing)]
    (back,) = [one for one in ann.shown.happenings if isinstance(one, ExpertsBack)]
    assert missing.reason
    assert back.dropped > 0


@pytest.mark.slow
async def test_a_trainer_with_another_k_is_refused_by_name(tmp_path: Path) -> None:
    other = read_definition(changed("k = 2", "k = 3"))

    async with (
        SimulatedWorld(seed=1) as world,
        expert_server(world, ENDLESS, "sam", tmp_path) as sam,
        training_in(world, ENDLESS, "ann", tmp_path / "a", ORGANISER, sam.address) as ann,
    ):
        await ann.until("StepTaken")
        with pytest.RaisesGroup(
            pytest.RaisesExc(OtherModel, match=r"k below \[experts\] is 3 here and 2 there"),
            flatten_subgroups=True,
            allow_unwrapped=True,
        ):
            async with training_in(
                world, other, "ben", tmp_path / "b", VOLUNTEER, sam.address
            ) as ben:
                await ben.ended.wait()


@pytest.mark.slow
async def test_a_trainer_that_waits_for_experts_can_leave(tmp_path: Path) -> None:
    async with (
        SimulatedWorld(seed=1) as world,
        expert_server(world, ENDLESS, "sam", tmp_path) as sam,
        training_in(world, ENDLESS, "ann", tmp_path / "a", ORGANISER, sam.address) as ann,
    ):
        await ann.until("StepTaken")
        assert sum(ann.session.take_served_rows().values()) > 0
        sam.stop()
        await ann.until("ExpertsMissing")
        ann.session.departure.leave()
        with trio.fail_after(PATIENCE_SECONDS):
            await ann.ended.wait()
    assert ann.shown.kinds()[-1] == "Left"
