"""Initial parameters that are the same bits on every machine, for the same seed.

Peers of one run begin with equal parameters without sending them, and a run's history begins with
their digest. Torch's own `normal_` and `uniform_` do not give that: with and without AVX2 they
differ in the last bits. Here only the generator's whole numbers are used, which are the same
everywhere, and one multiplication, which IEEE 754 rounds in one way only.

Values are drawn in the order of the calls, from one generator, and never from torch's global one.
Another order of layers gives another network.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from models.errors import WrongSettings

SEEDS = 1 << 32  # torch's generator on the CPU has a state of 32 bits when it is seeded
STEPS = 1 << 24  # as many different values; 2 k + 1 - 2^24 is exact in a float32


def seeded(seed: int) -> torch.Generator:
    """A generator on the CPU, whatever the device: each device's own would draw other numbers.

    WrongSettings for a seed that torch would silently take for another one.
    """
    if not 0 <= seed < SEEDS:
        raise WrongSettings(f"The seed {seed} is not a whole number from 0 to {SEEDS - 1}.")
    return torch.Generator("cpu").manual_seed(seed)


def allocate(network: nn.Module) -> None:
    """Give a network that was built on the meta device memory on the CPU, to be filled.

    As `nn.Module.to_empty`, which loads half of torch's compiler for it (torch 2.13)."""
    there: dict[nn.Parameter, nn.Parameter] = {}
    for module in network.modules():
        for name, old in list(module.named_parameters(recurse=False)):
            if old not in there:
                memory = torch.empty(old.shape, dtype=old.dtype, device="cpu")
                there[old] = nn.Parameter(memory, old.requires_grad)
            module.register_parameter(name, there[old])
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu"))


@torch.no_grad()
def fill_evenly(tensor: Tensor, standard_deviation: float, generator: torch.Generator) -> None:
    """Uniform around 0 with this standard deviation, and therefore without outliers."""
    steps = torch.randint(STEPS, tensor.shape, generator=generator)
    odd = (2 * steps + (1 - STEPS)).to(torch.float32)  # symmetric in (-2^24, 2^24)
    tensor.copy_(odd * (standard_deviation * math.sqrt(3.0) / STEPS))


@torch.no_grad()
def fill_constants(network: nn.Module) -> None:
    """Zero for every bias, one for every scale of a norm: for all parameters of one dimension."""
    for name, parameter in network.named_parameters():
        if parameter.dim() < 2:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
