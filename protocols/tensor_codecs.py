"""How the values of a tensor become bytes, and come back.

| codec          | bytes a value | what arrives for x                                        |
|----------------|---------------|-----------------------------------------------------------|
| none           | that of dtype | x                                                         |
| float64        | 8             | x; for float64 tensors only                               |
| float16        | 2             | within |x| / 2048 + 2^-25; |x| below 65,520               |
| bfloat16       | 2             | within |x| / 256 + 2^-134                                 |
| blockwise-int8 | 1.0039        | within m / 253 + 1.6e-36; m: largest |x| in the block     |

All numbers are little-endian. A blockwise-int8 buffer holds the scales of all blocks (float32),
then the values (int8, -127 to 127); a value is scale × int8. The last block may be short.

Promise: what would not arrive finite is refused at the sender (`NotFinite` says where); what is
not finite is refused at the receiver (MalformedMessage), before it has touched the destination.
Values go straight between the tensor and the buffer, block by block through a scratch that stays
in the processor's cache, on the thread that asks; one core moves 5 to 15 GB of float32 a second.

Easy to get wrong: torch reads a buffer where it lies, so the buffer must stay alive and unchanged
while a tensor from it is in use; nothing in here keeps one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from protocols.errors import MalformedMessage, PotluckError

Buffer = bytes | bytearray | memoryview

INT8_BLOCK_VALUES = 1024  # a scale for every 1024 values costs 0.4 %, and outliers hurt few
INT8_LARGEST = 127
SCALE_BYTES = 4
SMALLEST_SCALE = 1.1754943508222875e-38  # smallest normal float32: its inverse is finite
LARGEST_SCALE = 2.65e36  # × 128 is finite in float32, so no int8 can decode to infinity

ROUNDER = 1.5 * 2.0**23
"""Added to a float32 below 2^22 it leaves no room for a fraction: so rounds to the nearest, as
`round_` does, which however uses torch's threads from 2,048 values on (see below)."""

SERIAL_VALUES = 31 * INT8_BLOCK_VALUES
"""What is done in one call to torch. From 32,768 values on it calls its threads, each of which
spins until the slowest is done: worth it for a model, but on a chunk, and where the cores have
other work, 8 milliseconds instead of 20 microseconds. 124 KiB also stay in the nearest caches."""


class NotFinite(PotluckError):
    """Values that are not finite, or would not be after encoding, are not sent."""


class Codec(Protocol):
    """One way of encoding. Tensors are flat and on the CPU; buffers have exactly the right size.

    `block_values`: a tensor may be cut into parts that are encoded on their own at multiples of
    this.
    """

    name: str
    block_values: int

    def encoded_bytes(self, values: int) -> int: ...

    def encode(self, source: Tensor, destination: Buffer, name: str) -> None:
        """`name` is what the tensor is called if it has to be refused."""
        ...

    def decode(self, source: Buffer, destination: Tensor) -> None: ...

    def accumulate(self, source: Buffer, destination: Tensor, weight: float) -> None:
        """destination += weight × decoded, in the destination's precision."""
        ...


def tensor_over(buffer: Buffer, dtype: torch.dtype, values: int, offset: int = 0) -> Tensor:
    """A tensor that shares the memory of a buffer (a copy, if the buffer is read-only)."""
    if values == 0:
        return torch.empty(0, dtype=dtype)
    if memoryview(buffer).readonly:  # torch warns about these: it cannot promise not to write
        buffer = bytearray(buffer)
    return torch.frombuffer(buffer, dtype=dtype, count=values, offset=offset)


def is_finite(values: Tensor) -> bool:
    """Whether every value is finite, in one fast pass: a NaN or an infinity reaches an extreme."""
    return not values.dtype.is_floating_point or within(values, math.nextafter(math.inf, 0.0))


def within(values: Tensor, largest: float) -> bool:
    """Whether no value of a flat tensor is larger than this, nor NaN, whatever its sign."""
    for start in range(0, values.numel(), SERIAL_VALUES):
        low, high = torch.aminmax(values[start : start + SERIAL_VALUES])
        if not (-largest <= low.item() and high.item() <= largest):  # NaN is in no order
            return False
    return True


def _not_finite(source: Tensor, bad: Tensor, name: str, codec: str) -> NotFinite:
    first = int(torch.nonzero(bad)[0].item())
    return NotFinite(
        f"{name} has {int(bad.sum().item()):,} values that {codec} cannot carry; "
        f"the first is {source[first].item()!r} at {first:,} of {len(source):,}.",
        why="The loss has diverged, or the values are too large for this codec.",
        advice="Hold these values back, or choose a codec with a wider range (bfloat16, none).",
    )


def _require_finite_received(encoded: Tensor) -> None:
    if not is_finite(encoded):
        raise MalformedMessage("A tensor came with values that are not finite.")


class PlainCodec:
    """Values of one dtype as they are, or as another floating dtype of fewer bits."""

    block_values = 1

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self._dtype = dtype
        self._value_bytes = torch.empty(0, dtype=dtype).element_size()

    def encoded_bytes(self, values: int) -> int:
        return values * self._value_bytes

    def encode(self, source: Tensor, destination: Buffer, name: str) -> None:
        if source.numel() == 0:
            return
        target = torch.frombuffer(destination, dtype=self._dtype)
        for part, values in _side_by_side(target, source):
            part.copy_(values)
        if not is_finite(target):
            raise _not_finite(source, ~torch.isfinite(target), name, self.name)

    def decode(self, source: Buffer, destination: Tensor) -> None:
        encoded = self._received(source, destination)
        if self._dtype is torch.bool:  # a bool that is neither 0 nor 1 misleads later operations
            encoded = encoded.view(torch.uint8) != 0
        for part, values in _side_by_side(destination, encoded):
            part.copy_(values)

    def accumulate(self, source: Buffer, destination: Tensor, weight: float) -> None:
        encoded = self._received(source, destination)
        if encoded.dtype == destination.dtype:
            for part, values in _side_by_side(destination, encoded):
                part.add_(values, alpha=weight)
            return
        scratch = torch.empty(min(SERIAL_VALUES, len(encoded)), dtype=destination.dtype)
        for part, values in _side_by_side(destination, encoded):
            part.add_(scratch[: len(values)].copy_(values), alpha=weight)

    def _received(self, source: Buffer, destination: Tensor) -> Tensor:
        encoded = tensor_over(source, self._dtype, destination.numel())
        _require_finite_received(encoded)
        return encoded


class BlockwiseInt8Codec:
    """Blocks of 1024 values, each as 8-bit multiples of its own scale: largest |x| / 127."""

    name = "blockwise-int8"
    block_values = INT8_BLOCK_VALUES

    def encoded_bytes(self, values: int) -> int:
        return SCALE_BYTES * _block_count(values) + values

    def encode(self, source: Tensor, destination: Buffer, name: str) -> None:
        for values, scales, codes in _blocks(source, destination):
            wide = values.to(torch.float32)
            largest = torch.maximum(wide.amax(1, keepdim=True), -wide.amin(1, keepdim=True))
            scale = largest / INT8_LARGEST
            if not bool((scale <= LARGEST_SCALE).all()):  # also where a value is NaN
                bad = ~(source.to(torch.float32).abs() <= LARGEST_SCALE * INT8_LARGEST)
                raise _not_finite(source, bad, name, self.name)
            # so small a block arrives as zeros; dividing it by infinity makes them
            scales.copy_(torch.where(scale < SMALLEST_SCALE, 0.0, scale))
            divisor = torch.where(scale < SMALLEST_SCALE, math.inf, scale)
            codes.copy_(torch.div(wide, divisor).add_(ROUNDER).sub_(ROUNDER))

    def decode(self, source: Buffer, destination: Tensor) -> None:
        self._check_scales(source, destination)
        for values, scales, codes in _blocks(destination, source):
            if values.dtype is torch.float32:
                torch.mul(codes, scales, out=values)
            else:
                values.copy_(torch.mul(codes, scales))

    def accumulate(self, source: Buffer, destination: Tensor, weight: float) -> None:
        self._check_scales(source, destination)
        for values, scales, codes in _blocks(destination, source):
            values.addcmul_(codes, scales, value=weight)

    def _check_scales(self, source: Buffer, destination: Tensor) -> None:
        scales = tensor_over(source, torch.float32, _block_count(destination.numel()))
        if scales.numel() and not bool(((scales >= 0.0) & (scales <= LARGEST_SCALE)).all()):
            raise MalformedMessage("A blockwise-int8 tensor came with a scale out of range.")


def _side_by_side(one: Tensor, other: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The same stretches of two flat tensors of one size."""
    for start in range(0, one.numel(), SERIAL_VALUES):
        stretch = slice(start, start + SERIAL_VALUES)
        yield one[stretch], other[stretch]


def _block_count(values: int) -> int:
    return -(-values // INT8_BLOCK_VALUES)


def _blocks(values: Tensor, buffer: Buffer) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(values, scales, codes) of some blocks at a time, all as rows of one block each.

    values: [blocks, 1024], scales: [blocks, 1], codes: [blocks, 1024]; the last block may be
    short and then comes alone.
    """
    count = values.numel()
    blocks = _block_count(count)
    scales = tensor_over(buffer, torch.float32, blocks).view(-1, 1)
    codes = tensor_over(buffer, torch.int8, count, SCALE_BYTES * blocks)
    whole = count // INT8_BLOCK_VALUES * INT8_BLOCK_VALUES
    for start in range(0, whole, SERIAL_VALUES):
        end = min(start + SERIAL_VALUES, whole)
        rows = slice(start // INT8_BLOCK_VALUES, end // INT8_BLOCK_VALUES)
        shape = (-1, INT8_BLOCK_VALUES)
        yield values[start:end].view(shape), scales[rows], codes[start:end].view(shape)
    if whole < count:
        yield values[whole:].view(1, -1), scales[-1:], codes[whole:].view(1, -1)
