"""The cap of a GPU's own memory is torch's to keep, and what is used of it is shown."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from node.core.caps.device_memory import (
    device_bytes,
    device_memory_in_use,
    has_own_memory,
    keep_below,
)
from node.core.caps.settings import Caps
from node.training.join import participation
from tests.devices import FIRST_PASS, NO_GPU

GB = 1_000_000_000


class TwoGpus:
    """Torch's words about two GPUs, of 24 and 80 GB. `kept`: the share of each that it may use."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.kept: dict[str, float] = {}
        self.held = {0: 0, 1: 0}
        sizes = {"cuda:0": 24 * GB, "cuda:1": 80 * GB}
        for name, stand_in in {
            "device_count": lambda: 2,
            "is_initialized": lambda: True,
            "memory_reserved": self.held.__getitem__,
            "get_device_properties": lambda one: SimpleNamespace(total_memory=sizes[str(one)]),
            "set_per_process_memory_fraction": self._keep,
        }.items():
            patch.setattr(torch.cuda, name, stand_in)

    def _keep(self, share: float, device: str) -> None:
        self.kept[device] = share


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> TwoGpus:
    return TwoGpus(monkeypatch)


def test_torch_keeps_each_gpu_below_the_cap_from_when_it_is_chosen(gpus: TwoGpus) -> None:
    devices, _ = participation._devices_of(Caps(device_memory_bytes=6 * GB))
    assert devices == ("cuda:0", "cuda:1")
    assert gpus.kept == {"cuda:0": pytest.approx(6 / 24), "cuda:1": pytest.approx(6 / 80)}


def test_without_a_cap_or_without_a_gpu_of_its_own_nothing_is_limited(gpus: TwoGpus) -> None:
    participation._devices_of(Caps())
    keep_below(6 * GB, ("cpu",))
    keep_below(6 * GB, ("mps",))
    assert gpus.kept == {}
    keep_below(32 * GB, ("cuda:0",))
    assert gpus.kept == {"cuda:0": 1.0}, "there is no more than all of it"


@pytest.mark.usefixtures("gpus")
def test_the_smallest_gpu_counts_as_what_is_there() -> None:
    assert device_bytes(("cuda:0", "cuda:1")) == 24 * GB
    assert device_bytes(("cuda:1",)) == 80 * GB
    assert device_bytes(("cpu",)) is None
    assert not has_own_memory(("mps",))


def test_the_fullest_gpu_is_shown(gpus: TwoGpus) -> None:
    gpus.held.update({0: 3 * GB, 1: 5 * GB})
    assert device_memory_in_use() == 5 * GB


def test_a_machine_without_a_gpu_shows_none() -> None:
    if not torch.cuda.is_initialized():
        assert device_memory_in_use() is None


@NO_GPU
@FIRST_PASS
def test_torch_refuses_memory_above_the_cap_with_an_error_that_is_known_as_such() -> None:
    from node.run.out_of_memory import is_out_of_memory

    keep_below(torch.cuda.memory_reserved() + 300_000_000, ("cuda:0",))  # others left some
    try:
        with pytest.raises(RuntimeError) as caught:
            torch.empty(400_000_000, dtype=torch.uint8, device="cuda:0")
        assert is_out_of_memory(caught.value)
        torch.empty(200_000_000, dtype=torch.uint8, device="cuda:0")
        assert device_memory_in_use() is not None
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()
