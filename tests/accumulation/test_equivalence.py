"""Peers of unequal speed make the steps that one process would make with all their samples."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch

from models.lamb import Lamb
from protocols.accumulation.local_steps import LostValues
from protocols.moshpit.layout import SentParts
from protocols.tensors import CodecName
from tests.accumulation.equivalence import (
    CLOSE,
    Case,
    Run,
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
    # One step late, 0.1 with this momentum diverges within twenty steps, in one process as well.
    "delayed": Case(
        partial(torch.optim.SGD, lr=0.02, momentum=0.9), dtype=torch.float64, delayed=True
    ),
    "delayed adam": Case(
        partial(torch.optim.Adam, lr=0.01), scheduler=warm_up, max_norm=0.5, delayed=True
    ),
    "parameters averaged": Case(
        partial(torch.optim.Adam, lr=0.01), dtype=torch.float64, average_parameters_every=2
    ),
}
LOCAL = dataclasses.replace(SETTINGS, target_batch=32)
LOCAL_CASES = {
    "in double precision": Case(
        partial(torch.optim.SGD, lr=0.05), dtype=torch.float64, local_steps=4, settings=LOCAL
    ),
    "in single precision": Case(partial(torch.optim.SGD, lr=0.05), local_steps=4, settings=LOCAL),
}


def check(case: Case) -> None:
    run = run_together(case)
    alone, staleness = run_alone(case, run)
    check_close(case, run, alone)
    assert sorted(run.batches) == list(range(case.steps))
    if case.delayed:
        assert set(staleness) <= {0, 1}
        assert staleness.get(1)  # the first step, and a round that failed, have none of it
    else:
        assert set(staleness) == {0}


def check_close(case: Case, run: Run, alone: torch.Tensor) -> None:
    """All peers have the same bits, and nearly what the single process has."""
    errors = [relative_error(parameters, alone) for parameters in run.parameters]
    print(f"after {case.steps} steps: {max(errors):.2e} of {CLOSE[case.dtype]:.0e}")
    assert max(errors) <= CLOSE[case.dtype]
    for parameters in run.parameters:
        assert torch.equal(parameters, run.parameters[0])


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
    case = LOCAL_CASES["in double precision"]
    run = run_together(case)
    check_close(case, run, diloco_alone(case, run))


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["blockwise-int4", "sparse-sign"])
def test_with_a_coarse_codec_all_hold_the_same_bits_and_keep_what_it_lost(
    codec: CodecName, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[SentParts] = []
    keep = LostValues.keep

    def keeping(self: LostValues, contribution: torch.Tensor, sent: SentParts) -> None:
        kept.append(sent)
        keep(self, contribution, sent)

    monkeypatch.setattr(LostValues, "keep", keeping)
    coarse = dataclasses.replace(LOCAL, codec=codec)
    case = dataclasses.replace(LOCAL_CASES["in single precision"], settings=coarse)
    run = run_together(case)
    for parameters in run.parameters:
        assert torch.equal(parameters, run.parameters[0])
    assert len(kept) >= case.steps
    assert len({sent.own for sent in kept}) > 1


@pytest.mark.soak
@pytest.mark.parametrize("name", LOCAL_CASES)
def test_local_steps_are_diloco_for_fifty_steps(name: str) -> None:
    case = dataclasses.replace(LOCAL_CASES[name], steps=50)
    run = run_together(case)
    check_close(case, run, diloco_alone(case, run))
