"""The benches of training with experts far away run, and their figures are what they say."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lab.bench.experts_convergence import in_flight, name_of, numbers, summary
from lab.bench.experts_delay import figures_of, medians_of
from lab.bench.experts_tasks import (
    ACTIVE,
    HELD_OUT_DIGITS,
    DigitsTask,
    ExpertTask,
    TextTask,
    make_identity,
    read_digits,
)
from models.experts import build_expert
from tests.commands.console import laboratory, objects


def run(experts: int, delay_ms: float, failure_rate: float, final: float) -> dict[str, Any]:
    return {
        "experts": experts,
        "delay_ms": delay_ms,
        "failure_rate": failure_rate,
        "in_flight": in_flight(delay_ms),
        "final": final,
        "dropped": 1,
        "staleness": 10.0,
    }


def test_the_mean_of_the_seeds_is_compared_with_the_dense_network_without_delays() -> None:
    runs = [
        run(1, 0.0, 0.0, 0.98),
        run(1, 0.0, 0.0, 0.96),
        run(16, 1000.0, 0.1, 0.95),
        run(16, 1000.0, 0.1, 0.97),
        run(1, 1000.0, 0.0, 0.5),
    ]
    dense, mixture, late = summary(runs, is_loss=False, tolerance=0.01)
    assert dense["final"] == 0.97
    assert (mixture["final"], mixture["deviation"], mixture["seeds"]) == (0.96, 0.0141, 2)
    assert mixture["worse_than_dense"] == 0.01
    assert mixture["dropped"] == 2
    assert mixture["reaches_dense"]
    assert not summary(runs, is_loss=False, tolerance=0.009)[1]["reaches_dense"]
    assert "reaches_dense" not in late  # it is no mixture
    assert late["worse_than_dense"] == 0.47


def test_of_losses_the_lower_is_the_better() -> None:
    told = summary([run(1, 0.0, 0.0, 2.0), run(16, 0.0, 0.1, 2.2)], is_loss=True, tolerance=0.1)
    assert told[1]["worse_than_dense"] == 0.2
    assert not told[1]["reaches_dense"]


def test_arms_are_named_by_their_circumstances() -> None:
    assert name_of(run(1, 0.0, 0.0, 0.0)) == "dense, no delay"
    assert name_of(run(16, 100.0, 0.1, 0.0)) == "16 experts, 100 ms, 10% fail"
    assert [in_flight(delay) for delay in (0.0, 100.0, 1000.0)] == [1, 16, 64]


@pytest.mark.parametrize("text", ["", "a", "1,,2", "-1", "inf", "nan"])
def test_what_are_no_numbers_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        numbers(text)


WORK = {"async_processor_s": 0.1}


def test_what_is_kept_is_compared_with_the_least_delay() -> None:
    rows = [
        {"delay_ms": 200.0, "async_per_s": 9.0, **WORK, "naive_per_s": 0.5},
        {"delay_ms": 0.0, "async_per_s": 10.0, **WORK, "naive_per_s": 5.0},
        {"delay_ms": 1000.0, "async_per_s": 2.0, **WORK, "naive_per_s": 0.1},
    ]
    told = figures_of(rows)
    assert told["compute_ms"] == 100.0
    assert [row["async_kept"] for row in told["delays"]] == [0.9, 1.0, 0.2]
    assert [row["naive_kept"] for row in told["delays"]] == [0.1, 1.0, 0.02]


def test_of_several_turns_the_medians_are_told() -> None:
    def turn(first: float, second: float) -> list[dict[str, float]]:
        return [
            {"delay_ms": 0.0, "async_per_s": first, "naive_per_s": first / 2},
            {"delay_ms": 200.0, "async_per_s": second, "naive_per_s": second / 2},
        ]

    told = medians_of([turn(4.0, 3.0), turn(1.0, 4.0), turn(5.0, 2.0)])
    assert told == turn(4.0, 3.0)


@pytest.mark.parametrize(
    ("at_200", "at_1000", "met"), [(9.5, 8.5, True), (9.4, 9.0, False), (9.5, 8.4, False)]
)
def test_a_longer_delay_has_a_lower_bar(at_200: float, at_1000: float, met: bool) -> None:
    kept = {0.0: 10.0, 200.0: at_200, 1000.0: at_1000, 5000.0: 0.1}
    rows = [
        {"delay_ms": delay, "async_per_s": rate, **WORK, "naive_per_s": 1.0}
        for delay, rate in kept.items()
    ]
    assert figures_of(rows)["met"] is met


def test_the_digits_are_all_there_and_the_held_out_are_in_no_batch() -> None:
    images, digits = read_digits()
    assert images.shape == (1797, 64)
    assert (images.min(), images.max()) == (0.0, 1.0)
    assert torch.bincount(digits).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    task = DigitsTask()
    epoch = (1797 - HELD_OUT_DIGITS) // task.examples
    batches = task.batches(seed=3)
    seen = torch.cat([next(batches)[0] for _ in range(epoch)])
    assert len(seen) == epoch * task.examples
    held_out = {tuple(image.tolist()) for image in task._images[:HELD_OUT_DIGITS]}
    assert not held_out & {tuple(image.tolist()) for image in seen}


@pytest.mark.parametrize("task", [DigitsTask(), TextTask()])
def test_the_active_experts_take_the_multiplications_of_the_dense_network(task: ExpertTask) -> None:
    def multiplications(*, is_dense: bool) -> int:
        network = build_expert(task.expert(is_dense=is_dense), seed=None)
        return sum(matrix.numel() for matrix in network.parameters() if matrix.dim() == 2)

    dense, expert = multiplications(is_dense=True), multiplications(is_dense=False)
    assert ACTIVE * expert == pytest.approx(dense, rel=0.01)


def test_an_expert_that_begins_as_identity_gives_back_what_it_gets_and_can_learn() -> None:
    task = DigitsTask(begins_as_identity=True)
    network = build_expert(task.expert(is_dense=False), seed=3)
    rows = torch.randn(5, task.width)
    assert not torch.equal(network(rows), rows)
    make_identity(network)
    changed = network(rows)
    assert torch.equal(changed, rows)
    changed.square().sum().backward()
    assert network.output.weight.grad.abs().max() > 0.0


def test_every_seed_has_texts_of_its_own() -> None:
    task = TextTask()
    first, second = (next(task.batches(seed)) for seed in (0, 1))
    assert first.shape == second.shape == (task.windows, task.settings.context + 1)
    assert not torch.equal(first, second)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["digits", pytest.param("text", marks=pytest.mark.soak)])
def test_the_convergence_is_measured_in_pieces_and_drawn(task: str, tmp_path: Path) -> None:
    flags = (f"experts-{task}", "--json", "--batches", "16", "--delay-ms", "0,100", "--seeds", "0")
    first = laboratory("bench", *flags, "--experts", "1", home=tmp_path)
    (dense,) = objects(first.stdout)
    assert [arm["name"] for arm in dense["arms"]] == ["dense, no delay", "dense, 100 ms"]
    piece, plot = tmp_path / "piece.json", tmp_path / "plot.svg"
    piece.write_text(json.dumps(dense), encoding="utf-8")
    second = laboratory(
        "bench", *flags, "--experts", "1,16", "--failure-rates", "0.1", "--add", str(piece),
        "--plot", str(plot), home=tmp_path,
    )  # fmt: skip
    (both,) = objects(second.stdout)
    assert [arm["name"] for arm in both["arms"]] == [
        "dense, no delay",
        "dense, 100 ms",
        "16 experts, no delay, 10% fail",
        "16 experts, 100 ms, 10% fail",
    ]
    assert both["runs"][:2] == dense["runs"]
    late = both["runs"][-1]
    assert late["in_flight"] == 16
    assert 0 < late["staleness"] < 16
    assert 0.02 < late["failed_calls"] < 0.3
    assert plot.read_bytes().startswith(b"<?xml")
    refused = laboratory("bench", *flags, "--batches", "5", "--add", str(piece), home=tmp_path)
    assert refused.returncode == 2


@pytest.mark.slow
def test_the_throughput_is_measured_with_each_delay(tmp_path: Path) -> None:
    flags = ("--delay-ms", "0,50", "--quick")
    result = laboratory("bench", "experts", "--json", *flags, home=tmp_path)
    assert result.returncode in (0, 1), result.stderr  # whether the bar is met is no test's affair
    (told,) = objects(result.stdout)
    at_once, late = told["delays"]
    assert late["naive_per_s"] < at_once["naive_per_s"]
    assert all(row["async_per_s"] > 0.0 for row in told["delays"])
