"""The machine of a measurement: figures of different machines cannot be compared."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

MEASURED_PACKAGES = ("libp2p", "trio", "cryptography", "msgspec")


def machine_facts() -> dict[str, Any]:
    """Processor, cores, memory, system, and the versions that matter for speed."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "cores_usable": _usable_cores(),
        "memory_GiB": _memory_gib(),
        "load_1min": round(os.getloadavg()[0], 2),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        **{name: version(name) for name in MEASURED_PACKAGES},
    }


def _processor() -> str:
    try:
        facts = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in facts.splitlines() if "model name" in line]
    return names[0] if names else platform.machine()


def _usable_cores() -> int | None:
    # what taskset or a container left us; macOS does not say
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _memory_gib() -> float:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)


# The memory of a process: its own pages, and its part of the shared ones.
#
# The proportional set size (PSS) of several processes can be added up; their resident sizes cannot,
# since every one of them counts the library code that they have in common.


def proportional_bytes(process_id: int) -> int | None:
    """The PSS of a process, or None where the system does not say (only Linux does)."""
    try:
        facts = Path(f"/proc/{process_id}/smaps_rollup").read_text(encoding="ascii")
    except OSError:
        return None
    for line in facts.splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return None
