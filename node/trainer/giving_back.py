"""Gives back the memory that a trainer holds only while it computes: at the beginning of a pause.

What stays is what it needs to go on, and what every running node has: Python and torch themselves,
the parameters, the optimizer's statistics and the buffers of a round. What goes back is what
allocators keep for the next batch: activations, gradients, batches read ahead (their reader is
closed by the loop), and on a GPU all that torch has cached there.

Easy to get wrong: memory that was freed is not given back. C's allocator and torch's both keep it,
and have to be asked.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable
from functools import cache

import torch


def give_back_memory() -> None:
    """Of this process, to the system. Takes some tens of milliseconds."""
    gc.collect()
    torch.cuda.empty_cache()  # which does nothing where no GPU was used
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()
    trim = _trim()
    if trim is not None:
        trim(0)


@cache
def _trim() -> Callable[[int], int] | None:
    """malloc_trim, where C's library has it: glibc's does."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        found: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    except OSError:
        return None
    return found
