"""The codecs: how tensor values become bytes and come back. `CODECS` is the one table of them.

To add a codec, add an entry to the table at the end, with a class of its own if none here fits, and
a name to `CodecName`, in the same order. Everything else reads the table.

| codec            | bytes a value | what arrives for x                                      |
|------------------|---------------|---------------------------------------------------------|
| none             | that of dtype | x                                                       |
| float64          | 8             | x; for float64 tensors only                             |
| float16          | 2             | within |x| / 2048 + 2^-25; |x| below 65,520             |
| bfloat16         | 2             | within |x| / 256 + 2^-134                               |
| blockwise-int8   | 1.0039        | within m / 253 + 1.6e-36; m: largest |x| in the block   |
| blockwise-float8 | 1.0039        | within |x| / 16 + m / 458,752 + 2.7e-33; m as above     |
| blockwise-int4   | 0.53125       | within m / 13.9 + 8.3e-38; m as above, blocks of 128    |
| sparse-sign      | 0.03516       | for one x in four m or -m, m: their mean |x|; 0 for all |
|                  |               | others                                                  |

All numbers are little-endian. A blockwise buffer holds the scales of all blocks (float32), then the
codes of all values; a value is scale × code. A code is an int8 from -127 to 127, a float8 of 4
exponent and 3 fraction bits (torch.float8_e4m3fn) up to 448, or one of 4 bits from -7 to 7, rounded
to the nearest, ties to even. A byte has two codes of 4 bits, in two's complement, the first one in
its lower bits. The last block may be short, and the last byte half empty, with zeros. Encoding
gives the same bytes on every processor, and so does decoding.

`sparse-sign` is for peers that agree which fourth of their values they send, and have zeros in the
places of the others.

A value that would not arrive finite is refused at the sender (`NotFinite` says where). One that is
not finite is refused at the receiver (MalformedMessage), before the destination is changed. Values
are converted between the tensor and the buffer block by block, through a scratch buffer that stays
in the processor's cache, on the calling thread. One core converts 5 to 15 GB of float32 a second
with the plain codecs, about 1 GB with the blockwise ones of 8 bits, and half of that with 4.

torch reads a buffer in place, so the buffer must stay alive and unchanged while a tensor from it is
in use. Nothing in this module keeps a buffer alive.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protocols.errors import MalformedMessage, PotluckError

Buffer = bytes | bytearray | memoryview

CodecName = Literal[
    "none",
    "float64",
    "float16",
    "bfloat16",
    "blockwise-int8",
    "blockwise-float8",
    "blockwise-int4",
    "sparse-sign",
]

BLOCK_VALUES = 1024  # a scale for 1024 values costs 0.4 %, and an outlier affects few values
SMALL_BLOCK_VALUES = 128
"""The block of a codec whose error is large beside its largest value. Normal values arrive with a
sixth less error than in blocks of 1,024, for 5 % more bytes."""
SCALE_BYTES = 4
ONE_IN = 4
"""A sparse codec sends one value in so many. With one in 4 and a bit for each, a billion values
take 35 MB instead of 4 GB."""
SMALLEST_NORMAL = torch.finfo(torch.float32).smallest_normal  # its inverse is finite
FLOAT8_SMALLEST = 2.0**-9  # the smallest number above zero
FLOAT8_NAN = 0x7F  # the bits of NaN without the sign
MEAN_STEPS = 2.0**15
"""A mean is computed in such steps of the largest value. The sum of 256 of them is a whole number
that float32 holds exactly, so it is the same in any order."""

ROUNDER = 1.5 * 2.0**23
"""Adding this to a float32 below 2^22 leaves no bits for a fraction, which rounds to the nearest.

`round_` gives the same, but uses torch's threads from 2,048 values on (see below).
"""

SERIAL_VALUES = 31 * BLOCK_VALUES
"""The number of values in one call to torch.

From 32,768 values on torch uses its threads, and each spins until the slowest is done. That pays
for a model. On a chunk, with the cores busy, it takes 8 milliseconds instead of 20 microseconds.
Also, 124 KiB stay in the nearest caches.
"""


with warnings.catch_warnings():  # torch warns of read-only buffers, once in a process: here
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)


class NotFinite(PotluckError):
    """Raised for values that are not finite, or would not be after encoding. They are not sent."""


class Codec(Protocol):
    """One way of encoding. Tensors are flat and on the CPU; buffers have exactly the right size.

    - `block_values`: a tensor may be cut at multiples of this into parts that are encoded
      separately.
    - `largest`: the largest magnitude that can be encoded.
    - `is_lossless`: the bytes are those in the tensor's memory.
    - `is_coarse`: its error is so large that a sender should add what was lost to what it sends
      next, where it can.
    - `is_sparse`: only one value in `ONE_IN` arrives, those at one place of each group of so many.
      All senders have to choose the same place, and keep the others for later.
    """

    name: CodecName
    block_values: int
    largest: float
    is_lossless: bool
    is_coarse: bool
    is_sparse: bool

    def encoded_bytes(self, values: int) -> int: ...

    def encode(self, source: Tensor, destination: Buffer, name: str) -> None:
        """`name` is the name of the tensor in errors."""
        ...

    def decode(self, source: Buffer, destination: Tensor) -> None: ...

    def accumulate(self, source: Buffer, destination: Tensor, weight: float) -> None:
        """destination += weight × decoded, in the destination's precision."""
        ...


def tensor_over(buffer: Buffer, dtype: torch.dtype, values: int, offset: int = 0) -> Tensor:
    """A tensor that shares the memory of a buffer. Do not write to it if the buffer is read-only:
    torch cannot prevent that."""
    if values == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype, count=values, offset=offset)


_BITS: Final = {
    torch.float16: (torch.int16, 0x7C00),
    torch.bfloat16: (torch.int16, 0x7F80),
}
"""Whole numbers of the same size, and the bits of infinity as one."""

VALUES_AT_ONCE: Final = 1 << 18  # for a chunk one call: its copy is 512 KiB at most

# Sums are kept in these types, and numpy adds to them. Between two chunks a node moves megabytes,
# so what it runs for a chunk has to come from memory again, and torch runs much more than numpy
# does: checking and adding a chunk of 512 KiB took it 0.29 ms instead of 0.09.
WIDE: Final[Mapping[torch.dtype, np.dtype[Any]]] = {
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
}


def all_finite(values: NDArray[Any]) -> bool:
    """Whether every value of a flat array of float32 or float64 is finite."""
    return all(
        bool(np.isfinite(values[start : start + VALUES_AT_ONCE]).all())
        for start in range(0, len(values), VALUES_AT_ONCE)
    )


def add_received(destination: NDArray[Any], encoded: Buffer, weight: float) -> None:
    """destination += weight × the values of a buffer that a peer sent, which have the same type.
    The product is rounded and then the sum: the same on every processor. MalformedMessage, and
    nothing is added, unless all values are finite."""
    values = np.frombuffer(encoded, destination.dtype)
    if not all_finite(values):
        raise _not_finite_received()
    weighted = np.empty(min(len(values), SERIAL_VALUES), destination.dtype)
    with np.errstate(over="ignore", invalid="ignore"):  # checked where the average arrives
        for start in range(0, len(values), SERIAL_VALUES):
            some = values[start : start + SERIAL_VALUES]
            sums = destination[start : start + SERIAL_VALUES]
            np.add(sums, np.multiply(some, weight, out=weighted[: len(some)]), out=sums)


def _not_finite_received() -> MalformedMessage:
    return MalformedMessage("A tensor came with values that are not finite.")


def is_finite(values: Tensor) -> bool:
    """Whether every value of a flat tensor is finite. A narrow type's bits without the sign, as a
    whole number, are then below those of infinity."""
    if not values.dtype.is_floating_point:
        return True
    if values.dtype in WIDE:
        return all_finite(values.detach().numpy())
    kind, infinity = _BITS[values.dtype]
    bits = values.detach().view(kind).numpy()
    unsigned = torch.iinfo(kind).max
    return all(
        int((bits[start : start + VALUES_AT_ONCE] & unsigned).max()) < infinity
        for start in range(0, len(bits), VALUES_AT_ONCE)
    )


def within(values: Tensor, largest: float) -> bool:
    """Whether every value of a flat tensor has at most this magnitude. False for a NaN."""
    for start in range(0, values.numel(), SERIAL_VALUES):
        low, high = torch.aminmax(values[start : start + SERIAL_VALUES])
        if not (-largest <= low.item() and high.item() <= largest):  # comparing a NaN is False
            return False
    return True


def _not_finite(source: Tensor, bad: Tensor, name: str, codec: str) -> NotFinite:
    first = int(torch.nonzero(bad)[0].item())
    return NotFinite(
        f"{name} has {int(bad.sum().item()):,} values that {codec} cannot encode; "
        f"the first is {source[first].item()!r} at {first:,} of {len(source):,}.",
        why="The loss has diverged, or the values are too large for this codec.",
        advice="Hold these values back, or choose a codec with a wider range (bfloat16, none).",
    )


def require_finite(source: Tensor, name: str, codec: str) -> None:
    """NotFinite unless every value of a flat tensor of ours is finite."""
    if not is_finite(source):
        raise _not_finite(source, ~torch.isfinite(source), name, codec)


def received_over(buffer: Buffer, dtype: torch.dtype, values: int) -> Tensor:
    """A flat tensor over a buffer that a peer sent. MalformedMessage unless all values are
    finite."""
    encoded = tensor_over(buffer, dtype, values)
    if not is_finite(encoded):
        raise _not_finite_received()
    return encoded


class PlainCodec:
    """Values of one dtype as they are, or as another floating dtype of fewer bits."""

    block_values = 1
    is_coarse = False
    is_sparse = False

    def __init__(
        self, name: CodecName, dtype: torch.dtype, largest: float, *, is_lossless: bool = False
    ) -> None:
        self.name = name
        self.largest = largest
        self.is_lossless = is_lossless
        self._dtype = dtype
        self._value_bytes = torch.empty(0, dtype=dtype).element_size()

    def encoded_bytes(self, values: int) -> int:
        return values * self._value_bytes

    def encode(self, source: Tensor, destination: Buffer, name: str) -> None:
        if source.numel() == 0:
            return
        target = torch.frombuffer(destination, dtype=self._dtype)
        torch._foreach_copy_(_parts(target), _parts(source))
        if not is_finite(target):
            raise _not_finite(source, ~torch.isfinite(target), name, self.name)

    def decode(self, source: Buffer, destination: Tensor) -> None:
        encoded = received_over(source, self._dtype, destination.numel())
        if self._dtype is torch.bool:  # a bool that is neither 0 nor 1 breaks later operations
            encoded = encoded.view(torch.uint8) != 0
        torch._foreach_copy_(_parts(destination), _parts(encoded))

    def accumulate(self, source: Buffer, destination: Tensor, weight: float) -> None:
        encoded = received_over(source, self._dtype, destination.numel())
        torch._foreach_add_(_parts(destination), _parts(encoded), alpha=weight)


class Codes(Protocol):
    """The codes of a blockwise codec: the numbers that it has, and their bytes.

    - `bits`: of one code.
    - `largest`: the largest number; the smallest is its negative.
    - `smallest`: the smallest number above zero.

    Tensors of codes have dtype int8 and one block to a row: [blocks, bytes].
    """

    bits: int
    largest: float
    smallest: float

    def write(self, numbers: Tensor, codes: Tensor) -> None:
        """Round numbers, [blocks, values], to the nearest with a code. They may be changed."""
        ...

    def read(self, codes: Tensor) -> Tensor:
        """The numbers of all codes that these bytes have, one block to a row."""
        ...

    def wrong(self, codes: Tensor, /) -> str:
        """What is wrong with these codes of a peer: all of a tensor, flat. Empty: nothing."""
        ...


class Int8Codes:
    """Whole numbers from -127 to 127. The code -128 is harmless, so it is not refused."""

    bits, largest, smallest = 8, 127.0, 1.0

    def write(self, numbers: Tensor, codes: Tensor) -> None:
        codes.copy_(_rounded(numbers))

    def read(self, codes: Tensor) -> Tensor:
        return codes

    def wrong(self, _: Tensor, /) -> str:
        return ""


class Float8Codes:
    """torch.float8_e4m3fn, which has no infinity, and two codes for NaN."""

    bits, largest, smallest = 8, 448.0, FLOAT8_SMALLEST

    def write(self, numbers: Tensor, codes: Tensor) -> None:
        codes.view(torch.float8_e4m3fn).copy_(numbers)

    def read(self, codes: Tensor) -> Tensor:
        """float8_e4m3 is laid out like a float16 with an exponent bias smaller by 8. Moving the
        bits is ten times as fast as torch's own cast, and as exact."""
        bits = codes.to(torch.int16).mul_(1 << 7).bitwise_and_(~(1 << 14))
        return bits.view(torch.float16).to(torch.float32).mul_(2.0**8)

    def wrong(self, codes: Tensor, /) -> str:
        parts = torch.split(codes, SERIAL_VALUES)
        return "a NaN" if any(int((one & 0x7F).max()) == FLOAT8_NAN for one in parts) else ""


class Int4Codes:
    """Whole numbers from -7 to 7, two in a byte. -8 is refused."""

    bits, largest, smallest = 4, 7.0, 1.0

    def write(self, numbers: Tensor, codes: Tensor) -> None:
        whole = _rounded(numbers).to(torch.int8)
        if whole.shape[1] % 2:
            whole = torch.nn.functional.pad(whole, (0, 1))
        pairs = whole.view(torch.int16)  # the first number of a pair has the lower byte
        codes.view(torch.uint8).copy_(pairs & 0x0F | pairs >> 4 & 0xF0)

    def read(self, codes: Tensor) -> Tensor:
        pairs = codes.view(torch.uint8).to(torch.int16)
        pairs = pairs.bitwise_or_(pairs << 4).bitwise_and_(0x0F0F)
        unsigned = pairs.view(torch.int8)  # each half of a byte in a byte of its own
        return unsigned.bitwise_xor_(8).sub_(8)

    def wrong(self, codes: Tensor, /) -> str:
        for part in torch.split(codes, SERIAL_VALUES):
            if bool((((part & 0x0F) == 0x08) | ((part & -0x10) == -0x80)).any()):
                return "the code -8"
        return ""


def _rounded(numbers: Tensor) -> Tensor:
    return numbers.add_(ROUNDER).sub_(ROUNDER)


class BlockwiseCodec:
    """Blocks of values: each value has a code for a multiple of its block's scale.

    The scale is the block's largest |x| divided by the largest number that has a code.
    """

    is_lossless = False
    is_coarse = True
    is_sparse = False

    def __init__(
        self, name: CodecName, codes: Codes, *, block_values: int, largest_scale: float
    ) -> None:
        self.name = name
        self.block_values = block_values
        self.largest = largest_scale * codes.largest
        self._codes = codes
        self._largest_scale = largest_scale
        # no value decodes to a subnormal float32, which some processors are set to flush to zero
        self._smallest_scale = SMALLEST_NORMAL / codes.smallest

    def encoded_bytes(self, values: int) -> int:
        return SCALE_BYTES * self._block_count(values) + self._code_bytes(values)

    def encode(self, source: Tensor, destination: Buffer, name: str) -> None:
        for values, scales, codes in self._blocks(source, destination):
            wide = values.to(torch.float32)
            largest = torch.maximum(wide.amax(1, keepdim=True), -wide.amin(1, keepdim=True))
            scale = largest / self._codes.largest
            if not bool((scale <= self._largest_scale).all()):  # also if a value is NaN
                bad = ~(source.to(torch.float32).abs() <= self.largest)
                raise _not_finite(source, bad, name, self.name)
            # a block of so small values arrives as zeros: dividing by infinity makes them
            is_small = scale < self._smallest_scale
            scales.copy_(torch.where(is_small, 0.0, scale))
            self._codes.write(torch.div(wide, torch.where(is_small, math.inf, scale)), codes)

    def decode(self, source: Buffer, destination: Tensor) -> None:
        self._check(source, destination)
        for values, scales, codes in self._blocks(destination, source):
            numbers = self._numbers(values, codes)
            if values.dtype is torch.float32:
                torch.mul(numbers, scales, out=values)
            else:
                values.copy_(torch.mul(numbers, scales))

    def accumulate(self, source: Buffer, destination: Tensor, weight: float) -> None:
        self._check(source, destination)
        for values, scales, codes in self._blocks(destination, source):
            values.addcmul_(self._numbers(values, codes), scales, value=weight)

    def _check(self, source: Buffer, destination: Tensor) -> None:
        """MalformedMessage if a scale is out of range, or a code is not one of a sender."""
        count = destination.numel()
        if count == 0:
            return
        blocks = self._block_count(count)
        scales = tensor_over(source, torch.float32, blocks)
        if not bool(((scales >= 0.0) & (scales <= self._largest_scale)).all()):
            raise MalformedMessage(f"A {self.name} tensor came with a scale out of range.")
        codes = tensor_over(source, torch.int8, self._code_bytes(count), SCALE_BYTES * blocks)
        wrong = self._codes.wrong(codes)
        spare = codes.numel() * 8 // self._codes.bits - count
        if spare and bool(self._codes.read(codes[-1:].view(1, 1))[:, -spare:].any()):
            wrong = "a code behind its last value"  # the same values have one encoding only
        if wrong:
            raise MalformedMessage(f"A {self.name} tensor came with {wrong}.")

    def _numbers(self, values: Tensor, codes: Tensor) -> Tensor:
        """The numbers of these values. The last byte may have codes that are of none."""
        return self._codes.read(codes)[:, : values.shape[1]]

    def _block_count(self, values: int) -> int:
        return -(-values // self.block_values)

    def _code_bytes(self, values: int) -> int:
        return -(-values * self._codes.bits // 8)

    def _blocks(self, values: Tensor, buffer: Buffer) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(values, scales, codes) of some blocks at a time, one block to a row.

        values: [blocks, values], scales: [blocks, 1], codes: [blocks, bytes]. The last block may be
        shorter; it then comes alone.
        """
        count, size = values.numel(), self.block_values
        blocks = self._block_count(count)
        scales = tensor_over(buffer, torch.float32, blocks).view(-1, 1)
        codes = tensor_over(buffer, torch.int8, self._code_bytes(count), SCALE_BYTES * blocks)
        whole = count // size * size
        for start in range(0, whole, SERIAL_VALUES):
            end = min(start + SERIAL_VALUES, whole)
            rows = slice(start // size, end // size)
            of_rows = codes[self._code_bytes(start) : self._code_bytes(end)]
            yield (
                values[start:end].view(-1, size),
                scales[rows],
                of_rows.view(len(scales[rows]), -1),
            )
        if whole < count:
            rest = codes[self._code_bytes(whole) :]
            yield values[whole:].view(1, -1), scales[-1:], rest.view(1, -1)


class SparseSignCodec:
    """One value in `ONE_IN`: its sign, times the mean magnitude of those in its block.

    The values at one place of each group of `ONE_IN` are sent, the same place in all groups of a
    part: that of the part's largest value. The others arrive as zeros. So a sum of parts that have
    their values at the same place has no more places than each of them.

    A buffer holds the scales of all blocks (float32), a byte for the place, and a bit for each
    group: 1 for a negative value, from the lowest bit of the first byte on. Bits that have no value
    are 0. So the size follows from the number of values, and no bytes name a place that is not
    there, or one place twice.
    """

    is_lossless = False
    is_coarse = False
    is_sparse = True

    def __init__(self, name: CodecName) -> None:
        self.name = name
        self.block_values = BLOCK_VALUES
        self.largest = torch.finfo(torch.float32).max

    def encoded_bytes(self, values: int) -> int:
        if values == 0:
            return 0
        return SCALE_BYTES * self._block_count(values) + 1 + self._sign_bytes(values)

    def encode(self, source: Tensor, destination: Buffer, name: str) -> None:
        if source.numel() == 0:
            return
        place = self._place_of_largest(source, name)
        has_values = False
        for values, scales, signs in self._blocks(source, destination):
            kept = values[:, place::ONE_IN].to(torch.float32)
            scale = _mean_magnitudes(kept)
            scales.copy_(scale)
            has_values = has_values or bool(scale.any())
            packed = np.packbits(((kept < 0.0) & (scale > 0.0)).numpy(), 1, "little")
            signs.zero_()[:, : packed.shape[1]] = torch.from_numpy(packed)
        # if all values were too small for a scale, zeros arrive, and these have place 0
        self._place(source.numel(), destination).fill_(place if has_values else 0)

    def decode(self, source: Buffer, destination: Tensor) -> None:
        place = self._checked_place(source, destination.numel())
        for values, scales, signs in self._blocks(destination, source):
            kept = values.zero_()[:, place::ONE_IN]
            kept.copy_(self._signed(kept, scales, signs))

    def accumulate(self, source: Buffer, destination: Tensor, weight: float) -> None:
        place = self._checked_place(source, destination.numel())
        for values, scales, signs in self._blocks(destination, source):
            kept = values[:, place::ONE_IN]
            kept.add_(self._signed(kept, scales, signs), alpha=weight)

    def _place_of_largest(self, source: Tensor, name: str) -> int:
        """The place of the first value with the largest magnitude. NotFinite if that is too
        large."""
        place, largest = 0, 0.0
        for start in range(0, source.numel(), SERIAL_VALUES):
            magnitudes = source[start : start + SERIAL_VALUES].to(torch.float32).abs()
            here = magnitudes.max().item()
            if not here <= self.largest:  # also if a value is NaN
                bad = ~(source.to(torch.float32).abs() <= self.largest)
                raise _not_finite(source, bad, name, self.name)
            if here > largest:
                at = start + int(torch.nonzero(magnitudes == here)[0].item())
                place, largest = at % ONE_IN, here
        return place

    def _checked_place(self, source: Buffer, count: int) -> int:
        """The place that a peer has sent. MalformedMessage if that, a scale or a bit is not one of
        a sender."""
        if count == 0:
            return 0
        scales = tensor_over(source, torch.float32, self._block_count(count))
        if not bool(((scales >= 0.0) & (scales <= self.largest)).all()):
            raise MalformedMessage(f"A {self.name} tensor came with a scale out of range.")
        place = int(self._place(count, source).item())
        if place >= ONE_IN:
            raise MalformedMessage(f"A {self.name} tensor came with a place that is not there.")
        kept = -(-(count - place) // ONE_IN)
        last = memoryview(source).cast("B")[self.encoded_bytes(count) - 1]
        if last >> kept - 8 * (self._sign_bytes(count) - 1):
            raise MalformedMessage(f"A {self.name} tensor came with a sign behind its last value.")
        return place

    def _signed(self, kept: Tensor, scales: Tensor, signs: Tensor) -> Tensor:
        """The values, [blocks, values], for the places of these."""
        bits = np.unpackbits(signs.numpy(), axis=1, count=kept.shape[1], bitorder="little")
        return torch.where(torch.from_numpy(bits).bool(), -scales, scales)

    def _place(self, values: int, buffer: Buffer) -> Tensor:
        return tensor_over(buffer, torch.uint8, 1, SCALE_BYTES * self._block_count(values))

    def _block_count(self, values: int) -> int:
        return -(-values // self.block_values)

    def _sign_bytes(self, values: int) -> int:
        return -(-values // (8 * ONE_IN))

    def _blocks(self, values: Tensor, buffer: Buffer) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(values, scales, signs) of some blocks at a time, one block to a row.

        values: [blocks, values], scales: [blocks, 1], signs: [blocks, bytes]. The last block may be
        shorter; it then comes alone.
        """
        count, size = values.numel(), self.block_values
        blocks, sign_bytes = self._block_count(count), self._sign_bytes(count)
        scales = tensor_over(buffer, torch.float32, blocks).view(-1, 1)
        signs = tensor_over(buffer, torch.uint8, sign_bytes, SCALE_BYTES * blocks + 1)
        whole = count // size * size
        for start in range(0, whole, SERIAL_VALUES):
            end = min(start + SERIAL_VALUES, whole)
            of_rows = signs[self._sign_bytes(start) : self._sign_bytes(end)]
            rows = slice(start // size, end // size)
            yield (
                values[start:end].view(-1, size),
                scales[rows],
                of_rows.view(len(scales[rows]), -1),
            )
        if whole < count:
            rest = signs[self._sign_bytes(whole) :]
            yield values[whole:].view(1, -1), scales[-1:], rest.view(1, -1)


def _mean_magnitudes(numbers: Tensor) -> Tensor:
    """The mean |x| of each row, [rows, 1]: exactly |x| if it is the same for all. 0 where it would
    be below the smallest normal float32."""
    if numbers.shape[1] == 0:
        return torch.zeros(len(numbers), 1)
    sizes = numbers.abs()
    largest = sizes.amax(1, keepdim=True)
    parts = torch.div(sizes, torch.where(largest > 0.0, largest, math.inf))
    steps = _rounded(parts.mul_(MEAN_STEPS)).sum(1, keepdim=True)
    mean = largest * (steps / (MEAN_STEPS * numbers.shape[1]))
    return torch.where(mean < SMALLEST_NORMAL, 0.0, mean)


def _parts(values: Tensor) -> tuple[Tensor, ...]:
    """A flat tensor in parts of so many values. One call does something with all of them: between
    two calls another thread may take the interpreter, and each of those turns costs as much as the
    values of a part."""
    parts: tuple[Tensor, ...] = torch.split(values, SERIAL_VALUES)
    return parts


_ALL: tuple[Codec, ...] = (
    PlainCodec("none", torch.float32, torch.finfo(torch.float32).max, is_lossless=True),
    PlainCodec("float64", torch.float64, torch.finfo(torch.float64).max, is_lossless=True),
    # the largest float32 that rounds to 65,504 and not to infinity
    PlainCodec("float16", torch.float16, 65_519.0),
    PlainCodec("bfloat16", torch.bfloat16, torch.finfo(torch.bfloat16).max),
    BlockwiseCodec(
        "blockwise-int8",
        Int8Codes(),
        block_values=BLOCK_VALUES,
        largest_scale=2.65e36,  # × 128 is finite in float32, so no int8 decodes to infinity
    ),
    BlockwiseCodec(
        "blockwise-float8",
        Float8Codes(),
        block_values=BLOCK_VALUES,
        largest_scale=7.59e35,  # × 448 is finite in float32
    ),
    BlockwiseCodec(
        "blockwise-int4",
        Int4Codes(),
        block_values=SMALL_BLOCK_VALUES,
        largest_scale=4.86e37,  # × 7 is finite in float32
    ),
    SparseSignCodec("sparse-sign"),
)
CODECS: Mapping[CodecName, Codec] = {one.name: one for one in _ALL}
"""All codecs by name. `none` is the one for float32."""
