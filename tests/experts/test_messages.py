"""docs/protocols.md says what the messages of the experts are, and their limits."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from protocols.experts import ExpertGrid, ExpertInfo, Rows
from protocols.experts.grid import LARGEST_DIMENSION, MOST_DIMENSIONS
from protocols.experts.messages import (
    BACKWARD,
    ERRORS,
    FORWARD,
    INFO,
    LARGEST_TENSOR_BYTES,
    LONGEST_UID,
    MOST_INFOS,
    TRANSFER,
    BackwardRequest,
    TransferOpening,
    encode_tensor,
)
from protocols.experts.runtime import LARGEST_BATCH, LARGEST_BATCH_BYTES, MOST_BYTES, MOST_REQUESTS
from protocols.rpc import LARGEST_UNARY_BYTES, decode, encode
from protocols.tensors import TensorHeader

DOCUMENT = (Path(__file__).parents[2] / "docs" / "protocols.md").read_text(encoding="utf-8")
SECTION = re.sub(r"\s+", " ", DOCUMENT.split("## /potluck/experts/1.0.0")[1].split("\n## ")[0])


def test_every_method_and_every_code_is_described_with_its_limits() -> None:
    for method in (FORWARD, BACKWARD, TRANSFER, INFO):
        assert f"| `{method.name}` (" in SECTION
    for code in ERRORS:
        assert f"| `{code}` |" in SECTION
    for statement in (
        f"Up to {LARGEST_UNARY_BYTES >> 20} MiB each way",
        f"up to {MOST_INFOS}; an expert is",
        f"at most {LARGEST_TENSOR_BYTES:,} bytes ({LARGEST_TENSOR_BYTES >> 20} MiB)",
        f"1 to `largest batch` rows ({LARGEST_BATCH:,} unless said)",
        f"`largest batch` rows and {LARGEST_BATCH_BYTES >> 20} MiB of decoded inputs at most",
        f"up to {MOST_BYTES >> 20} MiB and up to {MOST_REQUESTS:,} in number",
        f"1 to {MOST_DIMENSIONS} times a point",
        f"up to {LARGEST_DIMENSION - 1}.",
    ):
        assert statement in SECTION, statement


def test_the_messages_are_the_documented_arrays() -> None:
    tensor = encode_tensor(torch.ones(1, 2), "float16", "ones")
    header = [[1, 2], "float32", "float16"]
    request = BackwardRequest("ffn.1", tensor, tensor)
    data = b"\x00\x3c\x00\x3c"
    assert decode(list, encode(request)) == ["ffn.1", [header, data], [header, data]]
    assert decode(BackwardRequest, encode(request)) == request
    plain = TensorHeader((1, 2), "float32")
    assert decode(list, encode(TransferOpening("ffn.1", 5, plain))) == [
        "ffn.1",
        5,
        [[1, 2], "float32", "none"],
        None,
    ]
    info = ExpertInfo("ffn.1", Rows((2,)), 64, 3)
    assert decode(list, encode(info)) == ["ffn.1", [[2], "float32"], 64, 3]


def test_the_longest_uid_can_be_sent() -> None:
    largest = ExpertGrid("g" * 32, (LARGEST_DIMENSION,) * MOST_DIMENSIONS)
    assert len(str(largest.at(largest.cells - 1))) <= LONGEST_UID
