"""The sensors of processor and GPUs, read from files and a library as drivers have them."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from node.core.sensors import GpuReading, Reading, Sensors, gpus_in_use

UUID = "GPU-0b1c2d3e-0000-4000-8000-123456789abc"
MIB = 1 << 20


def no_library() -> Any:
    raise OSError("libnvidia-ml.so.1: cannot open shared object file")


def files(folder: Path, texts: Mapping[str, str]) -> Path:
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{text}\n")
    return folder


def degrees(folder: Path, texts: Mapping[str, str]) -> float | None:
    return Sensors(files(folder, texts), library=no_library).read().degrees


def test_a_machine_that_tells_nothing_has_no_values(tmp_path: Path) -> None:
    assert Sensors(tmp_path / "none", library=no_library).read([UUID]) == Reading()


def test_the_hottest_part_of_the_processor_counts_and_no_other_device(tmp_path: Path) -> None:
    hwmon = {
        "hwmon/hwmon0/name": "nvme",
        "hwmon/hwmon0/temp1_input": "71000",
        "hwmon/hwmon1/name": "coretemp",
        "hwmon/hwmon1/temp1_input": "48000",
        "hwmon/hwmon1/temp2_input": "53500",
    }
    assert degrees(tmp_path, hwmon) == 53.5


def test_a_small_board_has_a_thermal_zone(tmp_path: Path) -> None:
    zones = {
        "thermal/thermal_zone0/type": "acpitz",
        "thermal/thermal_zone0/temp": "20000",
        "thermal/thermal_zone1/type": "cpu-thermal",
        "thermal/thermal_zone1/temp": "61250",
    }
    assert degrees(tmp_path, zones) == 61.25


@pytest.mark.parametrize("strange", ["", "-1000", "0", "900000", "nan", "9" * 400, "²"])
def test_a_value_that_no_processor_has_is_unknown(tmp_path: Path, strange: str) -> None:
    hwmon = {"hwmon/hwmon0/name": "k10temp", "hwmon/hwmon0/temp1_input": strange}
    assert degrees(tmp_path, hwmon) is None


def test_the_power_is_the_energy_of_all_packages_between_two_looks(tmp_path: Path) -> None:
    def used(first: int, second: int) -> None:
        files(
            tmp_path,
            {
                "powercap/intel-rapl:0/name": "package-0",
                "powercap/intel-rapl:0/energy_uj": f"{first}",
                "powercap/intel-rapl:0:0/name": "core",
                "powercap/intel-rapl:0:0/energy_uj": "77",
                "powercap/intel-rapl:1/name": "package-1",
                "powercap/intel-rapl:1/energy_uj": f"{second}",
            },
        )

    now = 100.0
    sensors = Sensors(tmp_path, clock=lambda: now, library=no_library)
    used(5_000_000, 7_000_000)
    assert sensors.read().watts is None, "one look says nothing"
    now = 102.0
    used(65_000_000, 47_000_000)
    assert sensors.read().watts == 50.0
    now = 104.0
    used(1_000_000, 87_000_000)
    assert sensors.read().watts is None, "a counter began again"
    now = 105.0
    used(11_000_000, 97_000_000)
    assert sensors.read().watts == 20.0


class Nvml:
    """NVIDIA's library, as its manual describes it, with one GPU. `says`: what it answers;
    3 ("not supported") for the rest. `begins`: the answer to its start."""

    def __init__(self, begins: int = 0, **says: Any) -> None:
        self.says, self.begins = says, begins

    def nvmlInit_v2(self) -> int:
        return self.begins

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, device: Any) -> int:
        if uuid != UUID.encode():
            return 6
        device._obj.value = 0xD0
        return 0

    def _answer(self, name: str, device: ctypes.c_void_p, value: Any, field: str) -> int:
        assert device.value == 0xD0
        if name not in self.says:
            return 3
        setattr(value._obj, field, self.says[name])
        return 0

    def nvmlDeviceGetUtilizationRates(self, device: Any, rates: Any) -> int:
        return self._answer("busy", device, rates, "gpu")

    def nvmlDeviceGetTemperature(self, device: Any, which: int, value: Any) -> int:
        assert which == 0
        return self._answer("degrees", device, value, "value")

    def nvmlDeviceGetPowerUsage(self, device: Any, milliwatts: Any) -> int:
        return self._answer("milliwatts", device, milliwatts, "value")

    def nvmlDeviceGetMemoryInfo(self, device: Any, memory: Any) -> int:
        memory._obj.total = 24_576 * MIB
        return self._answer("memory", device, memory, "used")


def gpus(tmp_path: Path, library: Nvml, *uuids: str) -> tuple[GpuReading, ...]:
    return Sensors(tmp_path, library=lambda: library).read(uuids).gpus


def test_a_gpu_tells_what_its_driver_knows(tmp_path: Path) -> None:
    library = Nvml(busy=97, degrees=64, milliwatts=281_500, memory=9_000 * MIB)
    assert gpus(tmp_path, library, UUID) == (
        GpuReading(0.97, 64.0, 281.5, 9_000 * MIB, 24_576 * MIB),
    )
    assert gpus(tmp_path, Nvml(degrees=64), UUID) == (GpuReading(degrees=64.0),)
    assert gpus(tmp_path, Nvml(busy=4_000, degrees=9_999), UUID) == (GpuReading(),)
    assert gpus(tmp_path, library, "GPU-of-somebody-else") == (GpuReading(),)
    assert gpus(tmp_path, Nvml(begins=9), UUID) == (), "a driver that does not start"


def test_a_library_without_some_of_the_functions_leaves_their_values_unknown(
    tmp_path: Path,
) -> None:
    class Partial:
        nvmlInit_v2 = Nvml.nvmlInit_v2
        nvmlDeviceGetHandleByUUID = Nvml.nvmlDeviceGetHandleByUUID
        begins = 0

    found = Sensors(tmp_path, library=Partial).read([UUID]).gpus
    assert found == (GpuReading(),)


def test_the_library_is_looked_for_once_and_only_if_a_gpu_computes(tmp_path: Path) -> None:
    looked: list[None] = []

    def look() -> Any:
        looked.append(None)
        return no_library()

    sensors = Sensors(tmp_path, library=look)
    sensors.read()
    assert not looked
    sensors.read([UUID])
    sensors.read([UUID])
    assert len(looked) == 1


def test_the_gpus_that_compute_are_named_as_the_driver_names_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert gpus_in_use() == (), "torch has not used one"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    named = [SimpleNamespace(uuid=UUID.removeprefix("GPU-")), SimpleNamespace()]
    monkeypatch.setattr(torch.cuda, "get_device_properties", named.__getitem__)
    held = [9_000 * MIB, 2 * MIB]
    monkeypatch.setattr(torch.cuda, "memory_reserved", held.__getitem__)
    assert gpus_in_use() == (UUID,)
    held[0] = 0
    assert gpus_in_use() == (), "this process computes on the other one"
