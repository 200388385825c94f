"""The device that trains, and the number of threads: as the owner said, or by what is there.

    device = choose_device(caps.device)         # torch.device, or NoSuchDevice with what there is
    use_threads(caps.threads)

A missing device is refused with a list of those that exist, before anything else is done. `auto`
takes a GPU if torch finds one, and the CPU otherwise.

torch's number of threads between operations can be set only once in a process, before its first
parallel work. So call `use_threads` before the model is built.
"""

from __future__ import annotations

import contextlib
import os
import re
from typing import TYPE_CHECKING

from node.core.wrong_use import WrongUse, nearest

if TYPE_CHECKING:
    import torch

AUTO = "auto"

MOST_THREADS = 1024
"""More than any personal machine has; a mistyped million would only hang."""

_NAME = re.compile(r"auto|cpu|mps|cuda(:[0-9]{1,3})?")


class NoSuchDevice(WrongUse):
    """A device that torch does not see on this machine."""


def device_as_written(text: str) -> str:
    """The name of a device; WrongUse, with the nearest valid one, if it cannot exist anywhere."""
    word = text.strip().lower()
    if not word:
        return AUTO
    if _NAME.fullmatch(word):
        return word
    letters, digits = re.sub(r"[^a-z]", "", word), re.sub(r"[^0-9]", "", word)[:3]
    meant = nearest(letters, ("auto", "cpu", "mps", "cuda"))
    if letters in ("gpu", "nvidia") or meant == "cuda":
        meant = f"cuda:{int(digits)}" if digits else "cuda"
    raise WrongUse(
        f"{text.strip()!r} is not a device.",
        why="It has to be auto, cpu, cuda, cuda:1 (the second of several) or mps.",
        advice=f"Did you mean {meant}?" if meant else "",
    )


def threads_as_written(text: str) -> str:
    """A number of threads, or auto; WrongUse if it is neither."""
    word = text.strip().lower()
    if word in ("", AUTO):
        return AUTO
    if not (word.isascii() and word.isdigit() and 1 <= int(word[:6]) <= MOST_THREADS):
        raise WrongUse(
            f"{text.strip()!r} is not a number of threads.",
            why=f'It has to be a whole number from 1 to {MOST_THREADS}, or "{AUTO}".',
            advice=f"This machine has {available_cores()} processor cores for it.",
        )
    return str(int(word))


def available_cores() -> int:
    """The processor cores that this process may use: a container or `taskset` may allow fewer."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def devices_here() -> tuple[str, ...]:
    """Every device that torch finds on this machine, the fastest first."""
    import torch

    found = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        found.append("mps")
    return (*found, "cpu")


def choose_device(wanted: str) -> torch.device:
    """The requested device; NoSuchDevice with the existing ones."""
    import torch

    here = devices_here()
    if wanted == AUTO:
        return torch.device(here[0])
    if wanted == "cuda" and "cuda:0" in here:
        return torch.device("cuda:0")
    if wanted not in here:
        raise NoSuchDevice(
            f"There is no device {wanted} on this machine.",
            why=f"torch sees {_listed(here)}." + _why_no_gpu(wanted, here),
            advice=f"Use --device {here[0]}, or leave it out: {AUTO} takes the fastest.",
        )
    return torch.device(wanted)


def check_threads(threads: int | None) -> None:
    """WrongUse for more threads than cores.

    That is more likely a slip than a wish, and would only be slower. (The settings do not check
    this, because their file may also be used on another machine.)
    """
    cores = os.cpu_count() or 1
    if threads is not None and threads > cores:
        raise WrongUse(
            f"{threads:,} threads cannot compute on this machine.",
            why=f"It has {cores} processor {'core' if cores == 1 else 'cores'}; limits.threads "
            "(--threads) is the most of them to use.",
            advice=f"Give a number from 1 to {cores}, or leave it out.",
        )


def use_threads(threads: int | None) -> int:
    """Set torch's number of threads, and return it.

    None: as many as torch chooses. The number is at most that of the cores this container may use.
    The libraries under torch (OpenMP, MKL) follow, and its compiler with as many processes:
    they see the number in the environment.
    """
    import torch

    if threads is None:
        return torch.get_num_threads()
    threads = min(threads, available_cores())
    torch.set_num_threads(threads)
    with contextlib.suppress(RuntimeError):  # it can be set only once, and was set before
        torch.set_num_interop_threads(1)
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
        os.environ[variable] = str(threads)
    return torch.get_num_threads()


def _why_no_gpu(wanted: str, here: tuple[str, ...]) -> str:
    import torch

    if not wanted.startswith("cuda") or "cuda:0" in here:
        return ""
    if torch.version.cuda is None and torch.version.hip is None:
        return " This torch was built for processors only."
    return " Its driver may be missing, or too old for this torch."


def _listed(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
