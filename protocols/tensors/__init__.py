"""Tensors on the wire: `codecs` has the table of codecs, `messages` carries tensors with them."""

from protocols.tensors.codecs import (
    CODECS,
    SERIAL_VALUES,
    CodecName,
    NotFinite,
    is_finite,
    within,
)
from protocols.tensors.messages import accumulate, decode_into, encode_into, raw_bytes

__all__ = [
    "CODECS",
    "SERIAL_VALUES",
    "CodecName",
    "NotFinite",
    "accumulate",
    "decode_into",
    "encode_into",
    "is_finite",
    "raw_bytes",
    "within",
]
