"""Tensors on the wire: `codecs` has the table of codecs, `messages` carries tensors with them.
`gpu` says which tensors are on a GPU, and has what a GPU is asked for."""

from protocols.tensors.codecs import (
    CODECS,
    ONE_IN,
    SERIAL_VALUES,
    WIDE,
    CodecName,
    NotFinite,
    add_received,
    all_finite,
    is_finite,
    within,
)
from protocols.tensors.gpu import GPUS, gpu_of, is_on_gpu, record
from protocols.tensors.messages import (
    DtypeName,
    TensorHeader,
    TensorReader,
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
    "GPUS",
    "ONE_IN",
    "SERIAL_VALUES",
    "WIDE",
    "CodecName",
    "DtypeName",
    "NotFinite",
    "TensorHeader",
    "TensorReader",
    "accumulate",
    "add_received",
    "all_finite",
    "check_header",
    "decode",
    "decode_into",
    "describe",
    "encode",
    "encode_into",
    "encoded_bytes",
    "gpu_of",
    "is_finite",
    "is_on_gpu",
    "raw_bytes",
    "record",
    "within",
]
