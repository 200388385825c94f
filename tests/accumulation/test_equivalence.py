"""Peers of unequal speed make the steps that one process would make with all their samples."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch

from models.lamb import Lamb
from tests.accumulation.equivalence import (
    CLOSE,
    Case,
    diloco_alone,
    relative_error,
    run_alone,
    run_together,
)
from tests.accumulation.training_peers import SETTINGS


def warm_up(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))


CASES = {
    "sgd with momentum, clipped": Case(
        partial(torch.optim.SGD, lr=0.1, momentum=0.9), max_norm=0.5
    ),
    "adamw in double precision": Case(
        partial(torch.optim.AdamW, lr=0.01), scheduler=warm_up, dtype=torch.float64
    ),
    "lamb with warm-up": Case(
        partial(Lamb, lr=0.01), scheduler=warm_up, dtype=torch.float64, max_norm=1.0
    ),
    "delayed": Case(
        partial(torch.optim.SGD, lr=0.1, momentum=0.9), dtype=torch.float64, delayed=True
    ),
    "delayed adam": Case(
        partial(torch.optim.Adam, lr=0.01), scheduler=warm_up, max_norm=0.5, delayed=True
    ),
}


def check(case: Case) -> None:
    run = run_together(case)
    alone, staleness = run_alone(case, run)
    for parameters in run.parameters:
        assert relative_error(parameters, alone) <= CLOSE[case.dtype]
        assert torch.equal(parameters, run.parameters[0])
    assert sorted(run.batches) == list(range(case.steps))
    if case.delayed:
        assert set(staleness) <= {0, 1}
        assert staleness.get(1)  # the first step, and a round that failed, have none of it
    else:
        assert set(staleness) == {0}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sgd with momentum, clipped", "delayed"])
def test_a_run_is_one_big_computer(name: str) -> None:
    check(CASES[name])


@pytest.mark.soak
@pytest.mark.parametrize("name", CASES)
def test_a_run_is_one_big_computer_for_fifty_steps(name: str) -> None:
    check(dataclasses.replace(CASES[name], steps=50))


@pytest.mark.slow
def test_local_steps_are_diloco() -> None:
    """Four batches each between two exchanges, and the outer step of the paper's algorithm 1."""
    settings = dataclasses.replace(SETTINGS, target_batch=32)
    case = Case(
        partial(torch.optim.SGD, lr=0.05), dtype=torch.float64, local_steps=4, settings=settings
    )
    run = run_together(case)
    alone = diloco_alone(case, run)
    for parameters in run.parameters:
        assert relative_error(parameters, alone) <= CLOSE[case.dtype]
