"""The safetensors format: a JSON header that gives each tensor's place, and the tensors' bytes.

    write_safetensors(file, [(spec, data), …], {"format": "pt"})
    header = read_header(file)                # bounded, every offset checked
    read_tensor(file, header, name, destination)

Bytes go from memory to disk and back without a copy, which the safetensors library cannot do. This
matters because a state may be as large as the machine's memory allows. Each can read the other's
files, which the tests check.

Promise: `read_header` raises BrokenFile and nothing else, whatever the bytes, and takes memory for
the header alone. It accepts what the format's own reader accepts: tensors that cover the rest of
the file exactly, without gaps or overlaps.

The tensors of a file lie in the order of their alignment, not of their names, so that each can be
used in place.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, BinaryIO

import msgspec
from msgspec import Meta

from protocols.accumulation.signature import (
    LARGEST_DIMENSION,
    LONGEST_TENSOR_NAME,
    MOST_DIMENSIONS,
    TensorSpec,
    ValueType,
)
from protocols.errors import PotluckError

LARGEST_HEADER_BYTES = 16 << 20  # 20,000 tensors with long names are 4 MiB
LENGTH_BYTES = 8
METADATA = "__metadata__"

_NAME_OF_TYPE: dict[ValueType, str] = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
_TYPE_OF_NAME = {name: dtype for dtype, name in _NAME_OF_TYPE.items()}

Offset = Annotated[int, Meta(ge=0, le=1 << 60)]


class BrokenFile(PotluckError):
    """The file is not a whole safetensors file."""


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: Annotated[
        list[Annotated[int, Meta(ge=0, le=LARGEST_DIMENSION)]], Meta(max_length=MOST_DIMENSIONS)
    ]
    data_offsets: tuple[Offset, Offset]


@dataclass(frozen=True)
class Header:
    """The contents of a file: tensors by ascending name, where each begins, and free text."""

    tensors: tuple[TensorSpec, ...]
    offsets: Mapping[str, int]
    metadata: Mapping[str, str]


def write_safetensors(
    file: BinaryIO, tensors: Iterable[tuple[TensorSpec, memoryview]], metadata: Mapping[str, str]
) -> None:
    """Write the whole file. OSError from the system."""
    ordered = sorted(tensors, key=lambda entry: (-_value_bytes(entry[0]), entry[0].name))
    header: dict[str, object] = {METADATA: dict(metadata)} if metadata else {}
    end = 0
    for spec, _ in ordered:
        start, end = end, end + spec.bytes
        header[spec.name] = {
            "dtype": _NAME_OF_TYPE[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [start, end],
        }
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % LENGTH_BYTES)
    file.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
    for _, data in ordered:
        file.write(data)


def read_header(file: BinaryIO) -> Header:
    """The checked header of an open file, or BrokenFile."""
    size = os.fstat(file.fileno()).st_size
    start = file.read(LENGTH_BYTES)
    length = int.from_bytes(start, "little")
    if len(start) < LENGTH_BYTES or length > size - LENGTH_BYTES:
        raise BrokenFile("It ends within its header.")
    if length > LARGEST_HEADER_BYTES:
        raise BrokenFile(f"Its header says that it has {length:,} bytes.")
    entries, metadata = _parse(file.read(length))
    data_start = LENGTH_BYTES + length
    end = 0
    for spec, (first, last) in sorted(entries, key=lambda entry: entry[1]):
        if first != end or last - first != spec.bytes:
            raise BrokenFile(f"{spec.name} is not where its header says.")
        end = last
    if data_start + end != size:
        raise BrokenFile(f"It has {size:,} bytes, and its header speaks of {data_start + end:,}.")
    return Header(
        tuple(sorted((spec for spec, _ in entries), key=lambda spec: spec.name)),
        {spec.name: data_start + first for spec, (first, _) in entries},
        metadata,
    )


def read_tensor(file: BinaryIO, header: Header, name: str, destination: memoryview) -> None:
    """Read a tensor into `destination`, which has the tensor's size."""
    file.seek(header.offsets[name])
    while len(destination):
        count = file.readinto(destination)  # type: ignore[attr-defined]
        if not count:
            raise BrokenFile(f"It ends within {name}.")
        destination = destination[count:]


def _parse(text: bytes) -> tuple[list[tuple[TensorSpec, tuple[int, int]]], dict[str, str]]:
    try:
        raw = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(raw.pop(METADATA, msgspec.Raw(b"{}")), type=dict[str, str])
        found = {name: msgspec.json.decode(entry, type=_Entry) for name, entry in raw.items()}
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BrokenFile(f"Its header cannot be read: {str(error)[:100]}.") from None
    return [(_spec(name, entry), entry.data_offsets) for name, entry in found.items()], metadata


def _spec(name: str, entry: _Entry) -> TensorSpec:
    dtype = _TYPE_OF_NAME.get(entry.dtype)
    if dtype is None:
        raise BrokenFile(f"It has values of the unknown type {entry.dtype[:20]!r}.")
    if not 0 < len(name) <= LONGEST_TENSOR_NAME:
        raise BrokenFile("It has a tensor whose name is empty or far too long.")
    return TensorSpec(name, dtype, tuple(entry.shape))


def _value_bytes(spec: TensorSpec) -> int:
    return TensorSpec("one", spec.dtype, ()).bytes
