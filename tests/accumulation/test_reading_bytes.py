"""The bytes of a state on a device are read piece by piece: the host has no room for a copy of a
large tensor beside the buffers of a round."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import pytest
import torch
from torch import Tensor, nn

from models.uncompiled import SGD
from node.training.parameters_digest import digest_of
from protocols.accumulation.options import first_of
from protocols.accumulation.parameters import Parameters
from protocols.accumulation.steps import GradientSteps
from protocols.accumulation.training_state import look
from protocols.tensors import TensorReader, raw_bytes
from tests.accumulation.device_double import DOUBLE, device_double
from tests.new_tensors import NewTensors

MIB: Final = 1 << 20
LARGE: Final = 9 * MIB // 4 + 5  # values: more than two pieces of 4 MiB
OPTIMIZER: Final = partial(SGD, lr=0.1)
Read = tuple[object, list[int]]  # and the bytes of the tensors that were made for it


def history(tensor: Tensor) -> Read:
    steps = GradientSteps(
        Parameters([("w", nn.Parameter(tensor))]), OPTIMIZER, None,
        delayed=False, max_norm=None, codec="none", scales_loss=False, buffers={},
    )  # fmt: skip
    with NewTensors() as made:
        found = first_of(steps, "run", b"signature")
    return found, made.sizes


def manifest(tensor: Tensor) -> Read:
    live = look([("w", tensor)], run="run", epoch=1)
    with NewTensors() as made:
        found = live.manifest()
    return found, made.sizes


def digest(tensor: Tensor) -> Read:
    with NewTensors() as made:
        found = digest_of({"w": tensor})
    return found, made.sizes


@pytest.mark.parametrize("read", [history, manifest, digest])
def test_reading_a_large_tensor_takes_a_few_mebibytes_of_the_host(
    read: Callable[[Tensor], Read],
) -> None:
    here = torch.arange(float(LARGE))
    with device_double():
        found, sizes = read(here.to(DOUBLE))
    assert found == read(here)[0]
    assert max(sizes) <= 4 * MIB


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.bool])
def test_the_parts_are_the_bytes_that_the_host_would_have(dtype: torch.dtype) -> None:
    reader = TensorReader()
    for shape in [(), (0,), (3,), (3, 4), (3, MIB // 2)]:
        here = (torch.rand(shape) * 2).to(dtype)
        for one in (here, here.t() if here.dim() == 2 else here):
            with device_double():
                parts = [bytes(part) for part in reader.parts(one.to(DOUBLE))]
            assert b"".join(parts) == bytes(raw_bytes(one.contiguous()))
