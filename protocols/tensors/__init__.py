"""Tensors on the wire: `codecs` has the table of codecs, `messages` carries tensors with them."""

from protocols.tensors.codecs import (
    CODECS,
    ONE_IN,
    SERIAL_VALUES,
    CodecName,
    NotFinite,
    is_finite,
    within,
)
from protocols.tensors.messages import (
    DtypeName,
    TensorHeader,
    accumulate,
    check_header,
    decode,
    decode_into,
    describe,
    encode,
    encode_into,
    encoded_bytes,
    raw_bytes,
)

__all__ = [
    "CODECS",
    "ONE_IN",
    "SERIAL_VALUES",
    "CodecName",
    "DtypeName",
    "NotFinite",
    "TensorHeader",
    "accumulate",
    "check_header",
    "decode",
    "decode_into",
    "describe",
    "encode",
    "encode_into",
    "encoded_bytes",
    "is_finite",
    "raw_bytes",
    "within",
]
