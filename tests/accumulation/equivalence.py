"""Compares a run of several peers with one process that makes the same steps.

    case = Case(factory=..., dtype=torch.float64, delayed=True, steps=4)
    run = run_together(case)                    # threads, bridges, averaging
    alone, staleness = run_alone(case, run)     # a plain torch loop, written from the formulas

Peers compute at unequal speeds, and nothing sets their times. Each writes down which of its batches
are in which step (training_peers.Ledger).
"""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass, field

import torch
import trio
from torch import Tensor, nn

from protocols.accumulation.bridge import Bridge
from protocols.accumulation.collaboration import CollaborationSettings
from protocols.accumulation.optimizer import CollaborativeOptimizer
from protocols.accumulation.steps import Factory, Scheduler
from tests.accumulation.training_peers import (
    SETTINGS,
    Ledger,
    steps_of_the_run,
    training_world,
    wait_for_company,
)
from tests.waiting import PATIENCE_SECONDS

INPUTS, HIDDEN, OUTPUTS, BATCH = 6, 10, 3, 4
CLOSE = {torch.float32: 1e-5, torch.float64: 1e-12}
"""How far a run may be from the single process, relative to the parameters' norm."""

Batches = dict[int, list[tuple[int, int]]]  # step -> (peer, number of its batch)


@dataclass(frozen=True)
class Case:
    """A way to train. `seconds`: how long a batch of the fastest peer takes."""

    factory: Factory
    scheduler: Scheduler | None = None
    dtype: torch.dtype = torch.float32
    delayed: bool = False
    local_steps: int = 1
    max_norm: float | None = None
    average_parameters_every: int = 0
    peers: int = 4
    steps: int = 3
    seconds: float = 0.05
    settings: CollaborationSettings = SETTINGS


@dataclass
class Run:
    """The result: the parameters of each peer, and the batches of each step."""

    parameters: list[Tensor] = field(default_factory=list)
    batches: Batches = field(default_factory=dict)
    ledgers: list[Ledger] = field(default_factory=list)
    computed_with: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """The parameters with which a peer computed each of its batches."""


def model_of(case: Case) -> nn.Module:
    """The same values at every peer, whatever other threads draw from torch's own generator."""
    model = nn.Sequential(
        nn.Linear(INPUTS, HIDDEN), nn.Tanh(), nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, OUTPUTS)
    ).to(case.dtype)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for one in model.parameters():
            one.copy_(torch.randn(one.shape, generator=generator, dtype=torch.float64) / 3)
    return model


def loss_of(model: nn.Module, peer: int, number: int) -> Tensor:
    """The mean loss over a batch that is this peer's alone, and the same in every run."""
    dtype = next(model.parameters()).dtype
    generator = torch.Generator().manual_seed(1000 * number + peer)
    inputs = torch.randn(BATCH, INPUTS, generator=generator, dtype=torch.float64).to(dtype)
    wanted = torch.randn(BATCH, OUTPUTS, generator=generator, dtype=torch.float64).to(dtype)
    error: Tensor = model(inputs) - wanted
    return error.square().sum(dim=1).mean()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([one.detach().flatten().double() for one in model.parameters()])


def run_together(case: Case) -> Run:
    """Run the case's peers, in threads, for the case's steps."""
    run = Run()

    def train(bridge: Bridge, peer: int) -> tuple[Tensor, Ledger]:
        model, ledger, number = model_of(case), Ledger(bridge), 0
        optimizer = CollaborativeOptimizer(
            model.named_parameters(),
            case.factory,
            bridge,
            scheduler=case.scheduler,
            delayed=case.delayed,
            local_steps=case.local_steps,
            max_norm=case.max_norm,
            average_parameters_every=case.average_parameters_every,
            last_epoch=case.steps,  # delayed, a `step` may begin the next round as well
        )
        wait_for_company(bridge, case.peers - 1)
        while optimizer.epoch < case.steps:
            optimizer.zero_grad()
            run.computed_with[peer, number] = flat(model)
            loss = loss_of(model, peer, number)
            loss.backward()  # type: ignore[no-untyped-call]
            time.sleep(case.seconds * (1 + peer))  # the peer's speed, not something to wait for
            ledger.computed(number, BATCH)
            number += 1
            optimizer.step(samples=BATCH, loss=loss)
            ledger.read_events()
        optimizer.finish()
        ledger.read_events()
        return flat(model), ledger

    async def main() -> None:
        async with training_world(PATIENCE_SECONDS + 10.0 * case.steps) as world:
            peers = await world.peers(case.peers, case.settings)
            for parameters, ledger in await world.train(peers, train):
                run.parameters.append(parameters)
                run.ledgers.append(ledger)

    trio.run(main)
    history = steps_of_the_run(run.ledgers)
    for peer, ledger in enumerate(run.ledgers):
        for step in ledger.steps:
            if step.history == history[step.epoch]:
                batches = [(peer, number) for number in ledger.in_steps[step.history]]
                run.batches.setdefault(step.epoch, []).extend(batches)
    return run


def run_alone(case: Case, run: Run) -> tuple[Tensor, dict[int, int]]:
    """One process with all the samples of each step: its parameters at the end, and how many
    batches were computed with parameters of each age in steps.

    Without `delayed` that is 0 for all. With it, it is 1; but for batches of a peer that had just
    fetched the state, and of a round that was tried again, which are less stale.
    """
    model, staleness = model_of(case), dict[int, int]()
    optimizer = case.factory(list(model.named_parameters()))
    scheduler = None if case.scheduler is None else case.scheduler(optimizer)
    versions = [copy.deepcopy(model)]
    for step in range(case.steps):
        gradient = {name: torch.zeros_like(one) for name, one in model.named_parameters()}
        batches = sorted(run.batches[step])
        for one in batches:
            age = _age(run.computed_with[one], versions, 10 * CLOSE[case.dtype])
            staleness[age] = staleness.get(age, 0) + 1
            _add_gradient(gradient, versions[step - age], one, len(batches))
        for name, parameter in model.named_parameters():
            parameter.grad = gradient[name]
        if case.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.max_norm)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        versions.append(copy.deepcopy(model))
    return flat(model), staleness


def _age(parameters: Tensor, versions: list[nn.Module], tolerance: float) -> int:
    """The age of these parameters: how many steps before the newest version."""
    for age, version in enumerate(reversed(versions)):
        if relative_error(parameters, flat(version)) <= tolerance:
            return age
    raise AssertionError("a batch in a step was computed with parameters of another run")


def _add_gradient(
    total: dict[str, Tensor], model: nn.Module, batch: tuple[int, int], batches: int
) -> None:
    """Add the gradient of the mean loss over these batches, which are equally large."""
    model.zero_grad()
    loss = loss_of(model, *batch) / batches
    loss.backward()  # type: ignore[no-untyped-call]
    for name, one in model.named_parameters():
        assert one.grad is not None
        total[name] += one.grad


def relative_error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def diloco_alone(case: Case, run: Run) -> Tensor:
    """Algorithm 1 of the DiLoCo paper in one process, with the batches of the peers. The inner
    optimizer must have no statistics: those of a peer that caught up contain steps that are in no
    round."""
    model = model_of(case)
    start = flat(model)
    momentum = torch.zeros_like(start)
    for step in range(case.steps):
        total, moved = len(run.batches[step]), torch.zeros_like(start)
        for peer in range(case.peers):
            numbers = sorted(number for one, number in run.batches[step] if one == peer)
            local = copy.deepcopy(model)
            inner = case.factory(list(local.named_parameters()))
            for number in numbers:
                inner.zero_grad()
                loss_of(local, peer, number).backward()  # type: ignore[no-untyped-call]
                inner.step()
            moved += (start - flat(local)) * len(numbers) / total
        momentum = 0.9 * momentum + moved
        start = start - 0.7 * (moved + 0.9 * momentum)
        torch.nn.utils.vector_to_parameters(start.to(case.dtype), model.parameters())
    return start
