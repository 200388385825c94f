"""Three lines, before anything is downloaded: what this machine will give, and how to stop. Pure.

What is not known is left out: a figure that is made up would be worse than none. Memory, disk and
traffic are worked out from the run's definition (node/run/costs.py), not measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from node.caps.units import in_words


@dataclass(frozen=True)
class Use:
    """- `devices`: such as ("cpu",). - `threads`: that torch computes with.
    - `memory_bytes`: of the machine's, for the whole process. - `gpu_bytes`: of the (first) GPU's,
      where one computes. - `state_bytes`: what is fetched first.
    - `round_bytes`: each way, for one step of the run. - `caps`: by flag, in words."""

    run: str
    description: str
    devices: tuple[str, ...]
    threads: int
    memory_bytes: int
    state_bytes: int
    disk_bytes: int
    round_bytes: int
    caps: Mapping[str, str]
    begins: bool = False
    gpu_bytes: int = 0


def three_lines(use: Use) -> tuple[str, str, str]:
    """What it is and takes of the machine; what it takes of the network; how to stop."""
    about = f" ({use.description})" if use.description else ""
    machine = (
        f"{use.run}{about}: trains on {_devices(use)}, with about {in_words(use.memory_bytes)} of "
        f"memory{_said(use, 'max-memory')}{_on_gpu(use)} and {in_words(use.disk_bytes)} of disk"
    )
    first = f"{in_words(use.state_bytes)} to begin with, then about "
    each = f"{in_words(use.round_bytes)} each way for every step of the run"
    network = f"network: {'' if use.begins else first}{each}"
    network += _said(use, "upload-limit", "up ") + _said(use, "download-limit", "down ")
    network += _said(use, "quota")
    when = [use.caps[name] for name in ("schedule", "when-idle") if name in use.caps]
    times = f" It trains {' and '.join(when)}." if when else ""
    stop = (
        "Ctrl-C leaves within five seconds (twice: at once); from another terminal `potluck "
        f"pause`, `resume`, `leave` and `status`.{times}"
    )
    return machine, network, stop


def _devices(use: Use) -> str:
    names = ", ".join(use.devices)
    if use.devices == ("cpu",):
        return f"the processor with {use.threads} {'thread' if use.threads == 1 else 'threads'}"
    return f"{names} (one peer)" if len(use.devices) > 1 else names


def _on_gpu(use: Use) -> str:
    if not use.gpu_bytes:
        return ""
    whose = "the first GPU's" if len(use.devices) > 1 else "the GPU's"
    return f", {in_words(use.gpu_bytes)} of {whose}"


def _said(use: Use, flag: str, before: str = "") -> str:
    return f" ({before}{use.caps[flag]})" if flag in use.caps else ""
