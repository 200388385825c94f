"""Checks of what a node computes with: memory, GPU and driver, and the build of torch.

What was measured is one thing, the judgement another: each judgement is a function of plain facts,
so that it can be tested for machines that nobody has at hand.
"""

from __future__ import annotations

import platform
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import trio

from node.app.doctor.finding import Finding, FindingLevel
from node.app.doctor.surroundings import Surroundings, measured
from node.app.doctor.torch_probe import loading_torch
from node.core.caps.devices import AUTO
from node.core.caps.memory import PROCESS_BYTES
from node.core.caps.settings import caps_of
from node.core.caps.units import in_words

# -- memory

# Below this only tiny models train: the process, and a model of some ten million parameters.
LITTLE_MEMORY_BYTES = 1_000_000_000
MEMINFO = Path("/proc/meminfo")
CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class MemoryFacts:
    """In bytes; None is unknown. `available`: without pushing others out, and with what a running
    node of this home holds. `limit` and `used`: those of the container or service."""

    available: int | None = None
    limit: int | None = None
    used: int = 0
    cap: int | None = None

    @property
    def room(self) -> int | None:
        """The memory that a node could have now."""
        left = None if self.limit is None else max(0, self.limit - self.used)
        known = [one for one in (self.available, left) if one is not None]
        return min(known) if known else None


async def check_memory(surroundings: Surroundings) -> Sequence[Finding]:
    held = surroundings.node.memory_bytes if surroundings.node is not None else None
    limit, used = tightest_limit(CGROUPS, _own_cgroup())
    available = _available()
    facts = MemoryFacts(
        available=None if available is None else available + (held or 0),
        limit=limit,
        used=max(0, used - (held or 0)),
        cap=caps_of(surroundings.configuration).memory_bytes,
    )
    return [judge_memory(facts)]


def judge_memory(facts: MemoryFacts) -> Finding:
    room = facts.room
    if room is None:
        return Finding("memory", FindingLevel.NOTE, "The free memory is not known here.")
    says = f"{in_words(room)} of memory are free for a node."
    by_container = facts.limit is not None and room == max(0, facts.limit - facts.used)
    advice = "Close other programs."
    if by_container and facts.limit is not None:
        says = f"{says[:-1]}, of {in_words(facts.limit)} that this container may use."
        advice = "Give the container more memory."
    if facts.cap is not None and facts.cap > room:
        says += f" limits.max_memory allows {in_words(facts.cap)}."
        return Finding("memory", FindingLevel.WARNING, says, advice)
    if room < PROCESS_BYTES:
        says += f" Every run needs {in_words(PROCESS_BYTES)}."
        return Finding("memory", FindingLevel.ERROR, says, advice)
    if room < LITTLE_MEMORY_BYTES:
        return Finding("memory", FindingLevel.WARNING, f"{says} Only small models fit.", advice)
    return Finding("memory", FindingLevel.OK, says)


def _available() -> int | None:
    with suppress(OSError, ValueError, IndexError):
        for line in MEMINFO.read_text("ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _own_cgroup() -> str:
    """The path of this process's cgroup of version 2; empty if there is none."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                return line.removeprefix("0::")
    return ""


def tightest_limit(root: Path, own: str) -> tuple[int | None, int]:
    """The nearest limit of this process's cgroup and those above it, and the memory used below it.

    The limit may be set far above the process: on the service, the session or the container.
    """
    tightest: tuple[int | None, int] = (None, 0)
    folder = root / own.strip("/")
    for one in (folder, *folder.parents):
        if not one.is_relative_to(root):
            break
        with suppress(OSError, ValueError):
            limit = int((one / "memory.max").read_text("ascii"))  # "max" is no limit
            used = int((one / "memory.current").read_text("ascii"))
            if tightest[0] is None or limit - used < tightest[0] - tightest[1]:
                tightest = limit, used
    return tightest


# -- the GPU and its driver, and torch

# For loading torch and CUDA from a cold disk. It has nothing to do with the network, on which all
# other checks end sooner.
TORCH_SECONDS = 25.0
SMI_SECONDS = 5.0  # nvidia-smi takes a second if the driver has to wake up
NVIDIA, AMD = "0x10de", "0x1002"
DISPLAY_CLASSES = ("0x0300", "0x0302", "0x0380")  # VGA, 3D, other: the kinds of GPUs on PCI
PCI = Path("/sys/bus/pci/devices")


@dataclass(frozen=True)
class GpuFacts:
    """`cards`: the vendors of the GPUs on the bus. `nvidia`: what the driver lists, one line each.
    `trouble`: why the driver lists nothing."""

    cards: tuple[str, ...] = ()
    nvidia: tuple[str, ...] = ()
    trouble: str = ""

    @property
    def has_nvidia(self) -> bool:
        return bool(self.nvidia) or NVIDIA in self.cards


class TorchFacts(msgspec.Struct, frozen=True):
    """`missing`: why torch cannot be imported. `ended_by`: how the process died that loaded it."""

    version: str = ""
    cuda: str = ""
    hip: str = ""
    mps: bool = False
    devices: tuple[str, ...] = ()
    trouble: str = ""
    missing: str = ""
    ended_by: str = ""


async def check_compute(surroundings: Surroundings) -> Sequence[Finding]:
    wanted: str = surroundings.configuration.values["limits.device"]
    gpu = await gpu_facts()
    torch = await _torch_facts(surroundings.loading_torch)
    return list(judge_compute(gpu, torch, wanted, Path(sys.prefix)))


def judge_compute(gpu: GpuFacts, torch: TorchFacts, wanted: str, prefix: Path) -> Iterator[Finding]:
    """`wanted`: limits.device. `prefix`: the Python environment that has torch."""
    level = FindingLevel.ERROR if wanted.startswith("cuda") else FindingLevel.WARNING
    yield _of_driver(gpu, torch, level)
    again = _reinstall(prefix, torch.version)
    if torch.missing or torch.ended_by:
        how = f"is ended by {torch.ended_by}" if torch.ended_by else f"fails: {torch.missing}"
        yield Finding("torch", FindingLevel.ERROR, f"Loading torch {how}.", again)
        return
    says = f"torch {torch.version}"
    if gpu.has_nvidia and not torch.cuda and wanted != "cpu":
        says += " was built for processors only, and does not use the NVIDIA GPU."
        yield Finding("torch", level, says, again)
        return
    if torch.trouble and gpu.has_nvidia:
        says += f", built for CUDA {torch.cuda}, cannot compute on the GPU: {torch.trouble}."
        yield Finding("torch", FindingLevel.ERROR if gpu.nvidia else level, says, _UPDATE_DRIVER)
        return
    number = int(wanted.partition(":")[2] or 0)
    if wanted.startswith("cuda") and number >= len(torch.devices):
        says += f" sees {len(torch.devices)} CUDA devices, and limits.device is {wanted}."
        yield Finding("torch", FindingLevel.ERROR, says, f"Set limits.device to {AUTO}.")
        return
    if wanted == "mps" and not torch.mps:
        says += " sees no Apple GPU, and limits.device is mps."
        yield Finding("torch", FindingLevel.ERROR, says, f"Set limits.device to {AUTO}.")
        return
    where = ", ".join(torch.devices) or ("Apple's GPU" if torch.mps else "the processor")
    if wanted == "cpu":
        where = "the processor, as limits.device says"
    yield Finding("torch", FindingLevel.OK, f"{says} computes on {where}.")


def _of_driver(gpu: GpuFacts, torch: TorchFacts, level: FindingLevel) -> Finding:
    if gpu.nvidia:
        return Finding("gpu", FindingLevel.OK, f"NVIDIA's driver lists {'; '.join(gpu.nvidia)}.")
    if NVIDIA in gpu.cards:
        says = f"There is an NVIDIA GPU, but its driver does not answer: {gpu.trouble}."
        advice = "Install NVIDIA's driver, and restart the machine."
        return Finding("gpu", level, says, advice)
    if torch.mps:
        return Finding("gpu", FindingLevel.OK, "There is Apple's GPU.")
    if AMD in gpu.cards and not torch.hip:
        says = "There is an AMD GPU; only a build of torch for ROCm uses it."
        return Finding("gpu", FindingLevel.NOTE, says)
    if AMD in gpu.cards:
        return Finding("gpu", FindingLevel.OK, "There is an AMD GPU.")
    if level is FindingLevel.ERROR:
        says = "There is no GPU that computes, and limits.device asks for one."
        return Finding("gpu", level, says, f"Set limits.device to {AUTO}.")
    return Finding("gpu", FindingLevel.NOTE, "There is no GPU that computes: the processor trains.")


_UPDATE_DRIVER = "Install the newest driver from NVIDIA, and restart the machine."


def _reinstall(prefix: Path, version: str) -> str:
    """The command that brings the build that suits this machine."""
    if (prefix / "potluck-stamp").exists():  # of scripts/environment, which chooses the build
        return f"Run `rm -r {shlex.quote(str(prefix))}`, and start potluck again."
    exact = version.partition("+")[0]
    python = shlex.quote(str(prefix / "bin" / "python"))
    wanted = f"torch=={exact}" if exact else "torch"
    return f"Run `{python} -m pip install --force-reinstall {wanted}`."


async def gpu_facts() -> GpuFacts:
    """The GPUs of this machine, by the bus and by NVIDIA's driver."""
    cards = await measured(cards_on, PCI)
    tool = shutil.which("nvidia-smi") or shutil.which("nvidia-smi", path="/usr/lib/wsl/lib")
    if tool is None:
        return GpuFacts(cards, (), "nvidia-smi is not installed")
    question = ["--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        with trio.fail_after(SMI_SECONDS):
            done = await trio.run_process(
                [tool, *question], capture_stdout=True, stderr=subprocess.STDOUT, check=False
            )
    except trio.TooSlowError:
        return GpuFacts(cards, (), f"nvidia-smi did not answer within {SMI_SECONDS:g} seconds")
    lines = [line.strip() for line in done.stdout.decode(errors="replace").splitlines()]
    said = tuple(line for line in lines if line)
    if done.returncode == 0:
        return GpuFacts(cards, said, "" if said else "it lists no GPU")
    return GpuFacts(cards, (), said[0].rstrip(".") if said else f"exit code {done.returncode}")


def cards_on(devices: Path) -> tuple[str, ...]:
    """The vendors of the GPUs on the PCI bus, for NVIDIA and AMD."""
    found = []
    for device in sorted(devices.glob("*")):
        with suppress(OSError):
            vendor = (device / "vendor").read_text("ascii").strip()
            kind = (device / "class").read_text("ascii").strip()
            if vendor in (NVIDIA, AMD) and kind.startswith(DISPLAY_CLASSES):
                found.append(vendor)
    return tuple(found)


async def _torch_facts(loading: subprocess.Popen[bytes] | None) -> TorchFacts:
    with ExitStack() as stack:
        probe = loading or stack.enter_context(loading_torch())
        printed, _ = await measured(probe.communicate)
    lines = printed.decode(errors="replace").splitlines()
    if probe.returncode == 0 and lines:
        return msgspec.json.decode(lines[-1].encode(), type=TorchFacts)
    return TorchFacts(ended_by=ended_by(probe.returncode, platform.machine()))


def ended_by(code: int, machine: str) -> str:
    """The end of the process in words. `machine`: the kind of processor."""
    if code >= 0:
        return f"exit code {code}"
    with suppress(ValueError):
        name = signal.Signals(-code).name
        if name == "SIGILL":
            return f"{name}: this {machine} processor lacks an instruction that the build uses"
        return name
    return f"signal {-code}"
