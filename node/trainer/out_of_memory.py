"""Whether an error says that memory is out: whoever computes in smaller pieces may then go on.

    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise

Easy to get wrong: torch has a class of its own for a GPU's memory only. That of the processor, of
Apple's GPU and of CUDA's libraries being out is a RuntimeError like any other, told by its words.
"""

from __future__ import annotations

from typing import Final

import torch

SIGNS: Final = (
    "allocate memory",  # DefaultCPUAllocator, on POSIX
    "not enough memory",  # the same, on Windows
    "out of memory",  # MPS, and CUDA's own errors
    "ALLOC_FAILED",  # cuBLAS, cuDNN
)


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS)
