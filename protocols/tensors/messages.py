"""Tensors on the wire: a header that is checked before memory is taken, and chunks of bytes.

    header = describe(tensor, "float16")                 # travels in an opening message
    for span in spans(header, CHUNK_BYTES):              # each part is encoded on its own
        encode_into(flat[span.start:span.stop], header.codec, buffer, name="gradients")

    check_header(header, limit_bytes=...)                # the receiver, first of all
    accumulate(flat[span.start:span.stop], header.codec, buffer, weight=samples)

Values are decoded into float32 (or the dtype of the destination) and can be added with a weight, so
an average needs no tensor beside its sum. The codecs are in codecs.py. Importing torch takes more
than a second: import this module only where it is used.

Encoding or decoding a part of 1 MiB takes about 0.1 ms and may run in the event loop; a whole model
may not.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal

import torch
from msgspec import Meta
from torch import Tensor

from protocols.errors import LimitExceeded, MalformedMessage, PotluckError, ProtocolMisuse
from protocols.rpc import Message
from protocols.tensors.codecs import (
    CODECS,
    WIDE,
    Buffer,
    Codec,
    CodecName,
    NotFinite,
    PlainCodec,
    is_finite,
    received_over,
    require_finite,
)
from protocols.tensors.gpu import is_on_gpu

__all__ = [
    "NotFinite",
    "TensorHeader",
    "TensorReader",
    "accumulate",
    "check_header",
    "decode",
    "decode_into",
    "describe",
    "encode",
    "encode_into",
    "encoded_bytes",
    "raw_bytes",
    "spans",
]

LARGEST_DIMENSION = 1 << 40
MOST_DIMENSIONS = 16

DtypeName = Literal[
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
]
Dimension = Annotated[int, Meta(ge=0, le=LARGEST_DIMENSION)]

_DTYPES: dict[DtypeName, torch.dtype] = {
    "float32": torch.float32,
    "float64": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_VALUE_BYTES = {name: torch.empty(0, dtype=dtype).element_size() for name, dtype in _DTYPES.items()}
_PLAIN = {
    dtype: PlainCodec("none", dtype, math.inf, is_lossless=True) for dtype in _DTYPES.values()
}

if sys.byteorder != "little":  # the wire is little-endian, as every machine that torch runs on
    raise ImportError("potluck exchanges tensors as little-endian memory; this machine is not.")


class TensorHeader(Message, frozen=True):
    """The dtype, shape and codec of a tensor."""

    shape: Annotated[tuple[Dimension, ...], Meta(max_length=MOST_DIMENSIONS)]
    dtype: DtypeName
    codec: CodecName = "none"

    @property
    def values(self) -> int:
        return math.prod(self.shape)

    @property
    def decoded_bytes(self) -> int:
        return self.values * _VALUE_BYTES[self.dtype]


def describe(tensor: Tensor, codec: CodecName = "none") -> TensorHeader:
    """Make the header of a tensor of ours; ProtocolMisuse if the codec does not fit it."""
    name = _NAMES.get(tensor.dtype)
    if name is None or tensor.dim() > MOST_DIMENSIONS:
        raise ProtocolMisuse(
            f"A {tensor.dtype} tensor of {tensor.dim()} dimensions cannot be sent."
        )
    _codec(codec, tensor.dtype)
    return TensorHeader(tuple(tensor.shape), name, codec)


def check_header(header: TensorHeader, limit_bytes: int) -> None:
    """Refuse a header from the network that would take more memory than `limit_bytes`."""
    wrong = _misfit(header.codec, _DTYPES[header.dtype])
    if wrong:
        raise MalformedMessage(wrong)
    # an empty tensor is as large as one of a value per empty dimension: torch multiplies the others
    values = math.prod(max(length, 1) for length in header.shape)
    needed = max(values * _VALUE_BYTES[header.dtype], encoded_bytes(header, values))
    if needed > limit_bytes:
        raise LimitExceeded(
            f"A tensor of {values:,} × {header.dtype} was announced, which takes "
            f"{needed:,} bytes; at most {limit_bytes:,} are allowed."
        )


def encoded_bytes(header: TensorHeader, values: int) -> int:
    """The size of so many values of this tensor, encoded as one part."""
    return _codec(header.codec, _DTYPES[header.dtype]).encoded_bytes(values)


def spans(header: TensorHeader, chunk_bytes: int) -> Iterator[range]:
    """Cut a tensor's flat values into parts of at most `chunk_bytes` when encoded, in order.

    Both sides get the same cuts from the same header and size.
    """
    codec = _codec(header.codec, _DTYPES[header.dtype])
    step = chunk_bytes // codec.encoded_bytes(codec.block_values) * codec.block_values
    if step == 0:
        raise ProtocolMisuse(f"{chunk_bytes:,} bytes do not hold one block of {header.codec}.")
    for start in range(0, header.values, step):
        yield range(start, min(start + step, header.values))


def encode_into(tensor: Tensor, codec: CodecName, destination: Buffer, *, name: str) -> int:
    """Encode into the start of a buffer; return the number of bytes written.

    NotFinite, with `name`, if a value is not finite or too large for the codec. A tensor that is
    not contiguous, or not on the CPU, is copied once.
    """
    flat = _flat(tensor)
    chosen = _codec(codec, tensor.dtype)
    size = chosen.encoded_bytes(flat.numel())
    view = memoryview(destination).cast("B")
    if len(view) < size:
        raise ProtocolMisuse(f"{name} takes {size:,} bytes encoded; the buffer has {len(view):,}.")
    chosen.encode(flat, view[:size], name)
    return size


def encode(tensor: Tensor, codec: CodecName, *, name: str) -> Buffer:
    """Encode into a new buffer. With a codec that changes nothing, the bytes are the tensor's own
    memory (of a copy, if it is not contiguous or not on the CPU): do not change it meanwhile."""
    chosen = _codec(codec, tensor.dtype)
    if chosen.is_lossless:
        flat = _flat(tensor)
        require_finite(flat, name, codec)
        return raw_bytes(flat)
    destination = bytearray(chosen.encoded_bytes(tensor.numel()))
    encode_into(tensor, codec, destination, name=name)
    return destination


def decode_into(destination: Tensor, codec: CodecName, encoded: Buffer, dtype: DtypeName) -> None:
    """Decode values of `dtype` into a contiguous tensor, over its old values.

    Also raises MalformedMessage if a value is too large for the destination's dtype.
    """
    flat, chosen = _receiving(destination, codec, encoded, dtype)
    chosen.decode(encoded, flat)
    if flat.dtype not in WIDE and not is_finite(flat):
        raise MalformedMessage(f"A tensor came with values that {flat.dtype} cannot hold.")


def accumulate(
    destination: Tensor,
    codec: CodecName,
    encoded: Buffer,
    *,
    weight: float = 1.0,
    dtype: DtypeName = "float32",
) -> None:
    """destination += weight × decoded. On any error the destination is unchanged.

    The destination is float32 or float64: a less precise sum would waste the precision sent.
    """
    if destination.dtype not in WIDE:
        raise ProtocolMisuse(f"Sums are kept in float32 or float64, not in {destination.dtype}.")
    flat, chosen = _receiving(destination, codec, encoded, dtype)
    chosen.accumulate(encoded, flat, weight)


def decode(header: TensorHeader, encoded: Buffer, *, limit_bytes: int) -> Tensor:
    """Make a new tensor from a header and all of its bytes, in one part.

    With a codec that changes nothing, the tensor uses the memory of a writable buffer, whose start
    must be aligned as that of a bytearray is.
    """
    check_header(header, limit_bytes)
    needed = encoded_bytes(header, header.values)
    if len(encoded) != needed:
        raise MalformedMessage(f"A tensor came with {len(encoded):,} bytes instead of {needed:,}.")
    dtype = _DTYPES[header.dtype]
    in_place = not memoryview(encoded).readonly and dtype is not torch.bool
    if in_place and _codec(header.codec, dtype).is_lossless:
        return received_over(encoded, dtype, header.values).view(header.shape)
    tensor = torch.empty(header.shape, dtype=dtype)
    decode_into(tensor, header.codec, encoded, header.dtype)
    return tensor


class NoMemory(PotluckError):
    """There is no memory for something large that this peer was about to take."""

    exit_code = 3


def unset_bytes(size: int) -> Tensor:
    """Memory for so many bytes, with anything in it: to clear 1.5 GB takes most of a second.
    NoMemory if the system, or the limit that the owner has set, refuses it."""
    try:
        return torch.empty(size, dtype=torch.uint8)
    except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError
        raise NoMemory(
            f"There is no memory for {size:,} bytes more.",
            why="The system refuses it, or limits.max_memory (--max-memory) does.",
            advice="Allow more, end other programs, or take part in a smaller run.",
        ) from error


def raw_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor as bytes, to send it or to receive directly into it.

    The view keeps the tensor's memory alive. Nothing checks that the values are finite.
    """
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ProtocolMisuse("Only the memory of a contiguous tensor on the CPU can be sent.")
    if tensor.numel() == 0:
        return memoryview(b"")
    array: Any = tensor.detach().view(-1).view(torch.uint8).numpy()
    return memoryview(array)


STAGED_BYTES: Final = 4 << 20  # a GPU copies them in a fifth of a millisecond


class TensorReader:
    """Reads the bytes of tensors on any device. Those on a GPU come through one buffer, so that the
    host has no copy of a whole tensor, and allocates nothing for each.

        reader = TensorReader()
        for part in reader.parts(tensor): digest.update(part)      # valid until the next one
    """

    def __init__(self) -> None:
        self._staged: Tensor | None = None

    def parts(self, tensor: Tensor) -> Iterator[memoryview]:
        there = tensor.detach().contiguous().view(-1)
        if there.device.type == "cpu":
            yield raw_bytes(there)
            return
        if self._staged is None:
            pinned = is_on_gpu(there)
            self._staged = torch.empty(STAGED_BYTES, dtype=torch.uint8, pin_memory=pinned)
        for part in torch.split(there, STAGED_BYTES // there.element_size()):
            place = self._staged[: part.nbytes].view(part.dtype)
            yield raw_bytes(place.copy_(part))


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu").contiguous().view(-1)


def _codec(name: CodecName, dtype: torch.dtype) -> Codec:
    wrong = _misfit(name, dtype)
    if wrong:
        raise ProtocolMisuse(wrong)
    return _PLAIN[dtype] if name == "none" else CODECS[name]


def _misfit(name: CodecName, dtype: torch.dtype) -> str:
    """Why this codec cannot encode values of this dtype; empty if it can."""
    if name == "none":
        return ""
    if not dtype.is_floating_point:
        return f"{name} is for floating-point tensors, not for {dtype}."
    if name == "float64" and dtype is not torch.float64:
        return f"{name} is not for {dtype}, which has fewer bits."
    return ""


def _receiving(
    destination: Tensor, codec: CodecName, encoded: Buffer, dtype: DtypeName
) -> tuple[Tensor, Codec]:
    if not destination.is_contiguous() or destination.device.type != "cpu":
        raise ProtocolMisuse("Values are decoded into a contiguous tensor on the CPU.")
    flat = destination.detach().view(-1)
    chosen = _codec(codec, _DTYPES[dtype])
    if dtype == "float64" and codec in ("none", "float64") and flat.dtype != torch.float64:
        raise ProtocolMisuse(f"float64 values are not decoded into {flat.dtype}.")
    needed = chosen.encoded_bytes(flat.numel())
    if len(encoded) != needed:
        raise MalformedMessage(
            f"{flat.numel():,} values came as {len(encoded):,} bytes; {codec} makes {needed:,}."
        )
    return flat, chosen
