"""The temperature and the power of the processor, and those of the GPUs that compute, where the
drivers tell them.

    sensors = Sensors()
    sensors.read(gpus_in_use())      # waits for drivers: call it in a thread

Nothing has to be installed for this. Linux shows the processor's in files: the temperature below
/sys/class/hwmon, on small boards below /sys/class/thermal; the energy below /sys/class/powercap,
which most systems let only root read. NVIDIA's driver comes with a library, NVML. It is asked for a
GPU by its UUID, because CUDA_VISIBLE_DEVICES changes the numbers.

An unknown value is None. Drivers say strange things, so a value outside of what a machine can have
is unknown, too.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

SYS: Final = Path("/sys/class")

OF_PROCESSORS: Final = ("coretemp", "k10temp", "zenpower", "cpu_thermal")
"""The names of drivers in hwmon: Intel's, AMD's two, and that of small boards."""

ZONES_OF_PROCESSORS: Final = ("x86_pkg_temp", "cpu-thermal", "cpu_thermal", "soc-thermal")

HOTTEST: Final = 150.0  # degrees Celsius at which anything still works
MOST_WATTS: Final = 5_000.0
LONGEST_FILE: Final = 64  # characters: a number or a name

NVML: Final = "libnvidia-ml.so.1"


@dataclass(frozen=True)
class GpuReading:
    """`busy`: the part of the last moment in which it computed, from 0 to 1. The memory is that of
    all programs, and all that there is."""

    busy: float | None = None
    degrees: float | None = None
    watts: float | None = None
    memory_bytes: int | None = None
    all_memory_bytes: int | None = None


@dataclass(frozen=True)
class Reading:
    """`degrees`: of the processor's hottest part, in Celsius. `watts`: of all processors."""

    degrees: float | None = None
    watts: float | None = None
    gpus: tuple[GpuReading, ...] = ()


def gpus_in_use() -> tuple[str, ...]:
    """The UUIDs of the GPUs on which torch holds memory in this process, as NVIDIA's driver writes
    them; the machine may have others. It does not import torch."""
    cuda = sys.modules.get("torch.cuda")
    if cuda is None or not hasattr(cuda, "is_initialized") or not cuda.is_initialized():
        return ()
    used = (number for number in range(cuda.device_count()) if cuda.memory_reserved(number))
    found = (cuda.get_device_properties(number) for number in used)
    return tuple(f"GPU-{one.uuid}" for one in found if getattr(one, "uuid", None))


class Sensors:
    """Any one thread at a time. `library` opens NVML, or raises OSError."""

    def __init__(
        self,
        folder: Path = SYS,
        clock: Callable[[], float] = time.monotonic,
        library: Callable[[], Any] = lambda: ctypes.CDLL(NVML),
    ) -> None:
        self._folder, self._clock, self._open = folder, clock, library
        self._nvml: Any = None
        self._has_tried = False
        self._energy_before: tuple[float, dict[str, int]] | None = None

    def read(self, gpus: Sequence[str] = ()) -> Reading:
        nvml = self._opened() if gpus else None
        return Reading(
            _degrees(self._folder),
            self._watts(),
            () if nvml is None else tuple(_of_gpu(nvml, one) for one in gpus),
        )

    def _watts(self) -> float | None:
        """Since the last call; the counters only say how much energy was used in all."""
        now, energy = self._clock(), _energy(self._folder)
        before, self._energy_before = self._energy_before, (now, energy)
        if before is None or not energy or before[1].keys() != energy.keys() or now <= before[0]:
            return None
        used = [energy[one] - before[1][one] for one in energy]
        if min(used) < 0:  # a counter began again
            return None
        return _within(sum(used) / 1e6 / (now - before[0]), MOST_WATTS)

    def _opened(self) -> Any:
        """NVML; None without NVIDIA's driver. It is looked for once."""
        if not self._has_tried:
            self._has_tried = True
            try:
                library = self._open()
                if library.nvmlInit_v2() == 0:
                    self._nvml = library
            except (OSError, AttributeError):  # not there, or too old
                pass
        return self._nvml


def _degrees(folder: Path) -> float | None:
    """The hottest of what the processor's driver measures."""
    found = [
        _number(one)
        for device in _entries(folder / "hwmon", "hwmon*")
        if _text(device / "name") in OF_PROCESSORS
        for one in _entries(device, "temp*_input")
    ] or [
        _number(zone / "temp")
        for zone in _entries(folder / "thermal", "thermal_zone*")
        if _text(zone / "type") in ZONES_OF_PROCESSORS
    ]
    known = [one / 1000 for one in found if one is not None]
    return max((one for one in known if 0 < one <= HOTTEST), default=None)


def _energy(folder: Path) -> dict[str, int]:
    """In millionths of a joule, of each processor package."""
    found = {}
    for zone in _entries(folder / "powercap", "intel-rapl:*"):
        used = _number(zone / "energy_uj")
        if used is not None and _text(zone / "name").startswith("package"):
            found[zone.name] = used
    return found


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def _of_gpu(nvml: Any, uuid: str) -> GpuReading:
    """A call that this GPU, this driver or this library does not know leaves its value unknown."""

    def ask(name: str, *arguments: Any) -> bool:
        call = getattr(nvml, name, None)
        return call is not None and call(*arguments) == 0

    device = ctypes.c_void_p()
    if not ask("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(device)):
        return GpuReading()
    busy, memory = _Utilization(), _Memory()
    degrees, milliwatts = ctypes.c_uint(), ctypes.c_uint()
    of_chip = 0
    knows_busy = ask("nvmlDeviceGetUtilizationRates", device, ctypes.byref(busy))
    knows_degrees = ask("nvmlDeviceGetTemperature", device, of_chip, ctypes.byref(degrees))
    knows_watts = ask("nvmlDeviceGetPowerUsage", device, ctypes.byref(milliwatts))
    knows_memory = ask("nvmlDeviceGetMemoryInfo", device, ctypes.byref(memory))
    return GpuReading(
        busy=_within(busy.gpu / 100, 1.0) if knows_busy else None,
        degrees=_within(float(degrees.value), HOTTEST) if knows_degrees else None,
        watts=_within(milliwatts.value / 1000, MOST_WATTS) if knows_watts else None,
        memory_bytes=memory.used if knows_memory else None,
        all_memory_bytes=memory.total if knows_memory else None,
    )


def _entries(folder: Path, pattern: str) -> list[Path]:
    try:
        return sorted(folder.glob(pattern))
    except OSError:
        return []


def _text(file: Path) -> str:
    """ "" if the file is not there, or not for us."""
    try:
        with file.open(encoding="ascii", errors="replace") as opened:
            return opened.read(LONGEST_FILE).strip()
    except OSError:
        return ""


def _number(file: Path) -> int | None:
    text = _text(file)
    return int(text) if text.removeprefix("-").isdecimal() else None


def _within(value: float, most: float) -> float | None:
    return value if 0 <= value <= most else None
