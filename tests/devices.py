"""`@pytest.mark.parametrize("device", DEVICES)`: on the processor, and on a GPU if there is one."""

from __future__ import annotations

from typing import Final

import pytest
import torch

NO_GPU: Final = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
FIRST_PASS: Final = pytest.mark.filterwarnings("ignore:.*no current CUDA context.*")
"""Torch's warning at the first backward pass of a process on a GPU."""

DEVICES: Final = ["cpu", pytest.param("cuda", marks=[NO_GPU, FIRST_PASS])]
