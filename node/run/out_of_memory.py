"""Whether an error means that memory is out, so that a caller may go on with smaller pieces.

    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise

torch has its own error class only for a GPU's memory. When the CPU's memory, Apple's GPU or CUDA's
libraries run out, it raises a plain RuntimeError, which only the message tells apart.
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
