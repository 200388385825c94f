"""The task of the training benches: the default model in a chosen size, on real, numbered text.

A sample has a number, and the number gives its window of the text: all peers that train on sample
17 train on the same bytes. So two implementations can be given the same samples, and a log of
numbers is enough to audit who trained on which.

The text is the source code of this Python's own standard library.

The reference's side of the comparison imports this module too, in an environment with only torch
and msgspec. So it may import only `models`.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from models.gpt import GPT, GPTSettings
from models.uncompiled import AdamW

TEXT_BYTES = 1 << 20  # enough that a bench's run sees no window twice in its first thousands
SEED = 0
HELD_OUT_SAMPLES = 64  # the loss of two runs is compared on these
_HELD_OUT = 1 << 62  # no peer counts up to there
LEARNING_RATE = 3e-3
_MIX = 0x9E3779B97F4A7C15  # Fibonacci hashing, 2^64 / golden ratio: neighbours fall far apart
_WORD = (1 << 64) - 1


@dataclass(frozen=True)
class BenchTask:
    """Everything that two sides have to agree on to do the same work."""

    context: int = 64
    width: int = 64
    layers: int = 2
    heads: int = 4
    batch: int = 8

    def model(self) -> GPT:
        """The same initial parameters in every process."""
        settings = GPTSettings(
            context=self.context, width=self.width, layers=self.layers, heads=self.heads
        )
        return GPT(settings, seed=SEED)

    def optimizer(self, named_parameters: Iterable[tuple[str, Tensor]]) -> torch.optim.Optimizer:
        return AdamW(named_parameters, lr=LEARNING_RATE, betas=(0.9, 0.95))

    def samples(self) -> TextSamples:
        return TextSamples(self.context + 1)


class TextSamples:
    """The text, as windows that have numbers."""

    def __init__(self, window: int, text: bytes | None = None) -> None:
        self._window = window
        self._text = torch.frombuffer(bytearray(text or read_text()), dtype=torch.uint8)

    def batch(self, numbers: Sequence[int]) -> Tensor:  # (samples, window), uint8
        last = len(self._text) - self._window
        starts = [_place(number, last) for number in numbers]
        return torch.stack([self._text[start : start + self._window] for start in starts])

    def held_out(self) -> Tensor:
        return self.batch([_HELD_OUT + number for number in range(HELD_OUT_SAMPLES)])


def _place(number: int, last: int) -> int:
    mixed = ((number + 1) * _MIX) & _WORD
    return (mixed ^ (mixed >> 29)) % (last + 1)


def read_text(size: int = TEXT_BYTES) -> bytes:
    """The first so many bytes of the standard library's modules, by name."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for file in sorted(folder.glob("*.py")):
        if len(text) >= size:
            break
        text += file.read_bytes()
    return bytes(text[:size])
