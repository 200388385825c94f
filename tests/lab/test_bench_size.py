"""`scripts/bench size` runs, and trains what torch alone trains."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lab.bench.size import DOUBLE, MANNERS, SizeEffort
from lab.bench.size_task import SizeTask
from lab.bench.training_peer import plain_steps
from lab.gpu_double import PINNED_BYTES_PER_SECOND
from tests.commands.console import laboratory, laboratory_here, objects
from tests.devices import DEVICES


@pytest.mark.slow
def test_a_small_model_beside_torch_alone(tmp_path: Path) -> None:
    done = laboratory(
        "bench", "size", "--params", "2e5", "--pass-ms", "20", "--passes", "4", "--peers", "2",
        "--steps", "2", "--json", home=tmp_path,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr  # how fast it is depends on the machine
    (told,) = objects(done.stdout)
    for manner in MANNERS:
        assert told[manner]["steps"] == 2
        assert told[manner]["complete"] == 1.0
        # two peers, with passes of 20 ms and 16 samples each
        assert 0.0 < told[manner]["samples_per_s"] <= 2 * 16 / 0.02
        alone = sum(told["plain_samples_per_s"]) / 2
        share = told[manner]["samples_per_s"] / alone
        assert told[f"share_{manner}"] == pytest.approx(share, rel=0.01)
    assert told["averaging_of_alone"] > 0.0
    assert told["bars"]["averaging_of_alone"] == 1.25
    assert told["bars"]["host_copies"] == 2.2
    assert told["bars"]["device_copies"] == 3
    assert told["device_copies"] == pytest.approx(3, abs=0.1)
    assert 0.0 <= told["delayed"]["late_share"] < 1.0
    assert told["share_delayed_less_late"] > 0.0
    assert told["double"]["pinned_bytes_per_s"] == PINNED_BYTES_PER_SECOND
    assert min(told["plain_samples_per_s"]) > 0.0
    assert max(told["plain_samples_per_s"]) <= 2 * 16 / 0.02


def test_a_gpu_may_hold_what_the_table_says_and_with_offload_nothing_more() -> None:
    for device in ("cuda", DOUBLE):
        assert SizeEffort(device=device).memory_bars == {"host_copies": 2.2, "device_copies": 3}
    offloaded = SizeEffort(device="cuda", offload=True).memory_bars
    assert offloaded == {"host_copies": 6.2, "device_copies": 0}


@pytest.mark.parametrize("device", DEVICES)
def test_a_pass_gives_every_parameter_a_gradient(device: str) -> None:
    task = SizeTask(parameters=1024 * 1024 + 70, batch=3, tokens=8, device=device)
    model = task.model()
    assert sum(one.numel() for one in model.parameters()) == task.parameters
    model.loss(task.samples().batch(range(3))).backward()
    assert all(one.grad is not None and one.grad.isfinite().all() for one in model.parameters())


def test_torch_alone_takes_as_long_as_its_passes() -> None:
    task = SizeTask(parameters=100, batch=1, tokens=1)
    seconds, late = plain_steps(task, 3, 2, max_norm=1.0, pass_seconds=0.05)
    assert seconds >= 2 * 0.05
    assert late == 0.0, "there is no double"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_told(tmp_path: Path) -> None:
    done = laboratory_here("bench", "size", "--device", "cuda", "--json", home=tmp_path)
    assert done.returncode == 2
    assert "no GPU" in done.stdout + done.stderr


def test_a_model_that_does_not_fit_into_the_memory_is_refused(tmp_path: Path) -> None:
    done = laboratory_here("bench", "size", "--params", "1e13", home=tmp_path)
    assert done.returncode == 2
    assert "of memory, and this machine has" in done.stderr
