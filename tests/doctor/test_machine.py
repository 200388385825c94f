"""The doctor on memory, the GPU and torch: judged by facts of machines that are not at hand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from node.app.doctor import FindingLevel
from node.app.doctor.machine import (
    AMD,
    NVIDIA,
    GpuFacts,
    MemoryFacts,
    TorchFacts,
    cards_on,
    check_compute,
    check_memory,
    ended_by,
    gpu_facts,
    judge_compute,
    judge_memory,
    tightest_limit,
)
from tests.doctor.homes import only, surroundings_of

GB = 1_000_000_000
NOWHERE = Path("/nowhere/env")
H100 = GpuFacts((NVIDIA,), ("NVIDIA H100, 570.1, 81559 MiB",))
CUDA = TorchFacts(version="2.13.0+cu130", cuda="13.0", devices=("NVIDIA H100",))
CPU = TorchFacts(version="2.13.0+cpu")


@pytest.mark.parametrize(
    ("facts", "level", "words"),
    [
        (MemoryFacts(), FindingLevel.NOTE, "not known"),
        (MemoryFacts(available=8 * GB), FindingLevel.OK, "8 GB"),
        (MemoryFacts(available=GB // 2), FindingLevel.WARNING, "Only small models"),
        (MemoryFacts(available=GB // 5), FindingLevel.ERROR, "Every run needs"),
        (MemoryFacts(available=8 * GB, limit=GB, used=GB // 2), FindingLevel.WARNING, "container"),
        (MemoryFacts(available=8 * GB, limit=GB, used=GB), FindingLevel.ERROR, "container"),
        (MemoryFacts(available=2 * GB, cap=4 * GB), FindingLevel.WARNING, "limits.max_memory"),
    ],
)
def test_memory_is_judged_by_what_a_node_could_have(
    facts: MemoryFacts, level: FindingLevel, words: str
) -> None:
    finding = judge_memory(facts)
    assert finding.level is level
    assert words in finding.says


def test_the_tightest_limit_above_the_process_counts(tmp_path: Path) -> None:
    inner = tmp_path / "user.slice" / "potluck.service"
    inner.mkdir(parents=True)
    for folder, limit, used in (
        (tmp_path, "max", "5000"),
        (inner.parent, "1000", "900"),
        (inner, "4000", "100"),
    ):
        (folder / "memory.max").write_text(limit)
        (folder / "memory.current").write_text(used)
    assert tightest_limit(tmp_path, "/user.slice/potluck.service") == (1000, 900)
    assert tightest_limit(tmp_path, "/elsewhere") == (None, 0)


async def test_this_machines_memory_is_measured(tmp_path: Path) -> None:
    (finding,) = await check_memory(surroundings_of(tmp_path))
    assert finding.topic == "memory"
    assert sys.platform != "linux" or "are free" in finding.says


def driver(folder: Path, words: str, code: int = 0) -> None:
    """A tool of that name, which says what NVIDIA's would."""
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho '{words}'\nexit {code}\n")
    tool.chmod(0o755)


async def test_the_driver_is_asked_for_its_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    driver(tmp_path, "NVIDIA H100, 570.1, 81559 MiB")
    assert (await gpu_facts()).nvidia == ("NVIDIA H100, 570.1, 81559 MiB",)
    driver(tmp_path, "NVIDIA-SMI has failed: no driver.", code=9)
    facts = await gpu_facts()
    assert (facts.nvidia, facts.trouble) == ((), "NVIDIA-SMI has failed: no driver")


def test_gpus_are_found_on_the_bus_without_a_driver(tmp_path: Path) -> None:
    for name, vendor, kind in (
        ("a", NVIDIA, "0x030000"),
        ("b", NVIDIA, "0x040300"),  # the sound of the same card
        ("c", AMD, "0x038000"),
        ("d", "0x8086", "0x030000"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(f"{vendor}\n")
        (tmp_path / name / "class").write_text(f"{kind}\n")
    assert cards_on(tmp_path) == (NVIDIA, AMD)


def judged(
    gpu: GpuFacts, torch: TorchFacts, wanted: str = "auto"
) -> dict[str, tuple[FindingLevel, str]]:
    found = list(judge_compute(gpu, torch, wanted, NOWHERE))
    return {one.topic: (one.level, f"{one.says} {one.advice}") for one in found}


def test_a_gpu_that_torch_uses_is_fine() -> None:
    found = judged(H100, CUDA)
    assert [level for level, _ in found.values()] == [FindingLevel.OK, FindingLevel.OK]
    assert "computes on NVIDIA H100" in found["torch"][1]


@pytest.mark.parametrize(
    ("wanted", "level"),
    [("auto", FindingLevel.WARNING), ("cuda", FindingLevel.ERROR), ("cpu", FindingLevel.OK)],
)
def test_a_build_for_processors_beside_an_nvidia_gpu_is_to_be_reinstalled(
    wanted: str, level: FindingLevel
) -> None:
    found, words = judged(H100, CPU, wanted)["torch"]
    assert found is level
    if level is not FindingLevel.OK:
        assert f"`{NOWHERE}/bin/python -m pip install --force-reinstall torch==2.13.0`" in words


def test_in_a_checkout_the_environment_is_made_anew(tmp_path: Path) -> None:
    (tmp_path / "potluck-stamp").write_text("")
    found = list(judge_compute(H100, CPU, "auto", tmp_path))
    assert f"`rm -r {tmp_path}`" in only(found, FindingLevel.WARNING).advice


def test_a_card_without_a_driver_is_named() -> None:
    level, words = judged(GpuFacts((NVIDIA,), (), "nvidia-smi is not installed"), CUDA)["gpu"]
    assert level is FindingLevel.WARNING
    assert "Install NVIDIA's driver" in words


def test_a_driver_that_is_too_old_for_torch_is_an_error() -> None:
    old = TorchFacts(version="2.13.0", cuda="13.0", trouble="The NVIDIA driver is too old")
    level, words = judged(H100, old)["torch"]
    assert level is FindingLevel.ERROR
    assert "newest driver" in words


def test_a_second_gpu_that_is_not_there_is_an_error() -> None:
    level, words = judged(H100, CUDA, "cuda:1")["torch"]
    assert level is FindingLevel.ERROR
    assert "Set limits.device to auto" in words


def test_without_a_gpu_a_build_for_cuda_computes_on_the_processor() -> None:
    found = judged(GpuFacts(), TorchFacts(version="2.13.0", cuda="13.0", trouble="no driver"))
    assert found["gpu"][0] is FindingLevel.NOTE
    assert found["torch"][0] is FindingLevel.OK


def test_an_amd_gpu_needs_another_build() -> None:
    assert "ROCm" in judged(GpuFacts((AMD,)), CPU)["gpu"][1]


def test_a_gpu_that_is_wanted_and_is_not_there_is_an_error() -> None:
    assert {level for level, _ in judged(GpuFacts(), CPU, "cuda").values()} == {FindingLevel.ERROR}


@pytest.mark.parametrize(
    "torch", [TorchFacts(missing="No module named 'torch'"), TorchFacts(ended_by="SIGSEGV")]
)
def test_a_torch_that_does_not_load_is_an_error(torch: TorchFacts) -> None:
    level, words = judged(GpuFacts(), torch)["torch"]
    assert level is FindingLevel.ERROR
    assert "torch`" in words


def test_the_end_of_the_process_is_explained() -> None:
    assert ended_by(1, "x86_64") == "exit code 1"
    assert ended_by(-11, "x86_64") == "SIGSEGV"
    assert "lacks an instruction" in ended_by(-4, "x86_64")


@pytest.mark.slow
async def test_the_torch_of_this_machine_computes(tmp_path: Path) -> None:
    import torch

    found = await check_compute(surroundings_of(tmp_path, limits__device="cpu"))
    (of_torch,) = [one for one in found if one.topic == "torch"]
    assert of_torch.level is FindingLevel.OK
    assert torch.__version__ in of_torch.says
