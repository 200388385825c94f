"""docs/protocols.md describes the state as the code has it, number for number."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
import torch
from blake3 import blake3

from protocols.accumulation import state_manifest as manifest
from protocols.accumulation.keeping_up import MOST_TIMES_LOST, ROOM_OF_STATE
from protocols.accumulation.optimizer_state import OWN_SETTINGS
from protocols.accumulation.results import FOLLOWED_SECONDS, STEPS_FOLLOWED
from protocols.accumulation.signature import LONGEST_TENSOR_NAME, VALUE_TYPES
from protocols.accumulation.state_download import RETRY_SECONDS, FetchSettings
from protocols.accumulation.state_fetching import LOST_SECONDS
from protocols.accumulation.state_manifest import MOST_DEPTH
from protocols.accumulation.state_messages import (
    MANIFEST,
    MOST_RESULTS,
    MOST_WANTED,
    MOST_WANTED_AT_ONCE,
    NONCE_BYTES,
    PIECES,
    ROOM_OF_SMALL_BYTES,
    STALL_SECONDS,
    STATE_PROTOCOL,
    ManifestAnswer,
    ManifestRequest,
    PiecesOpening,
)
from protocols.accumulation.state_pace import (
    ALONE_STATES,
    BLOCKED_SECONDS,
    MOST_SLOWDOWN,
    RESERVED_SECONDS,
    SAVED_SECONDS,
    SENIOR_STATES,
    SLOWEST_BESIDE_ROUNDS,
    SLOWEST_BYTES_PER_SECOND,
)
from protocols.accumulation.state_pace import KEPT_SECONDS as PLACE_SECONDS
from protocols.accumulation.state_serving import (
    KEPT_SECONDS,
    LARGEST_BYTES,
    MOST_BYTES,
    MOST_COPIES,
    MOST_STATES,
    NEEDED_SHARE,
    WANTED_SECONDS,
    StateServingSettings,
)
from protocols.accumulation.training_state import capture
from protocols.moshpit.settings import CHUNK_BYTES

DOCUMENT = (Path(__file__).parents[2] / "docs" / "protocols.md").read_text()
SECTION = DOCUMENT.split(f"## {STATE_PROTOCOL}\n")[1].split("\n## ")[0]
WORDS = " ".join(SECTION.split())
FETCHING = FetchSettings()


@pytest.mark.parametrize(
    "words",
    [
        f"text of 1 to {LONGEST_TENSOR_NAME} characters",
        f"from a multiple of {manifest.ALIGNMENT_BYTES} bytes on",
        f"({manifest.PIECE_BYTES >> 20} MiB; {manifest.SMALLEST_PIECE_BYTES >> 10} KiB to "
        f"{manifest.LARGEST_PIECE_BYTES >> 20} MiB)",
        f"at most {manifest.LARGEST_METADATA_BYTES >> 10} KiB and nested at most {MOST_DEPTH} deep",
        f"At most {manifest.MOST_TENSORS:,} tensors, {manifest.LARGEST_MANIFEST_BYTES >> 20} MiB",
        f"history (up to {manifest.LONGEST_HISTORY_BYTES} bytes)",
        f"little-endian, up to {MOST_WANTED_AT_ONCE})",
        f"asked for {MOST_WANTED} pieces that have not come",
        f"lets {StateServingSettings().most_downloads} peers download at a time",
        f"keeps a place for {PLACE_SECONDS:g} s",
        f"and {KEPT_SECONDS:g} s longer, {['', '', 'two'][MOST_COPIES]} at the most",
        f"where it cannot send each of them {['', '', 'twice'][round(NEEDED_SHARE)]} as many bytes",
        f"makes its training {MOST_SLOWDOWN:.0%} longer".replace("%", " %"),
        f"saves up to {SAVED_SECONDS:g} s of training",
        f"at least {SLOWEST_BESIDE_ROUNDS / 1e6:g} MB/s",
        f"in less than {BLOCKED_SECONDS * 1000:g} ms is alone until it has got its state, or "
        f"{['', '', 'twice'][round(ALONE_STATES)]} its bytes",
        f"less than {RESERVED_SECONDS:g} s ago and has not begun",
        f"at least {SLOWEST_BYTES_PER_SECOND / 1e6:g} MB/s",
        f"until that has got {SENIOR_STATES:g} times the bytes of the state",
        f"The stall time is {STALL_SECONDS:g} s",
        f"and {FETCHING.most_sources} of them at a time",
        f"no byte for {FETCHING.patience_seconds:g} s is given up, and asked again after "
        f"{RETRY_SECONDS:g} s",
        f"After {FETCHING.give_up_seconds:g} s without a byte from anybody",
        f"at most {manifest.STATISTICS_PER_VALUE} values",
        f"plus {manifest.STATISTICS_FREE_BYTES >> 20} MiB",
        f"until {STEPS_FOLLOWED} steps and {FOLLOWED_SECONDS:g} s after the last question. At most "
        f"{MOST_RESULTS}, and",
        f"no more bytes than the state has, or {ROOM_OF_SMALL_BYTES >> 20} MiB if that is more;",
        f"keeps, for {WANTED_SECONDS:g} s, each small state (up to {LARGEST_BYTES >> 20} MiB) that "
        f"it names, {MOST_STATES} and {MOST_BYTES >> 20} MiB at the most",
        f"nonce = empty (up to {NONCE_BYTES} bytes)",
        f"in chunks of {CHUNK_BYTES >> 10} KiB, and the digest",
        f"at most {['', '', 'twice'][int(ROOM_OF_STATE)]} the bytes of the state, or "
        f"{int(ROOM_OF_STATE * ROOM_OF_SMALL_BYTES) >> 20} MiB if that is more",
        f"When for {LOST_SECONDS:g} s all peers that are there",
        f"after {['', '', '', 'three'][MOST_TIMES_LOST]} times it gives up",
    ],
)
def test_numbers_are_those_of_the_code(words: str) -> None:
    assert words in WORDS


def test_every_kind_of_value_and_own_setting_is_named() -> None:
    assert all(name in WORDS for name in VALUE_TYPES)
    assert all(f"`{name}`" in WORDS for name in OWN_SETTINGS)


def test_every_refusal_is_named() -> None:
    assert all(f"`{code}`" in SECTION for code in {**PIECES.errors, **MANIFEST.errors})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("`manifest`, unary", ManifestRequest),
        ("its answer", ManifestAnswer),
        ("PiecesOpening, of the transfer `pieces`", PiecesOpening),
    ],
)
def test_fields_are_in_order(row: str, message: type[msgspec.Struct]) -> None:
    described = re.search(rf"\| {re.escape(row)} \| (.*) \|", SECTION)
    assert described is not None
    fields = re.sub(r"\([^)]*\)", "", described[1]).split(", ")
    assert len(fields) == len(message.__struct_fields__)


def test_a_state_can_be_named_by_what_the_page_says() -> None:
    tensors = [("b", torch.tensor([True, False, True])), ("a", torch.arange(3.0))]
    state = capture(tensors, extra={"n": (1, [None])}, run="r", epoch=5, history=b"h")
    specs = [["model/a", "float32", [3]], ["model/b", "bool", [3]]]
    stream = tensors[1][1].numpy().tobytes() + bytes(4) + b"\x01\x00\x01"
    metadata = [
        2,
        ["extra", [2, ["n", [1, 1, [0, None]]]]],
        ["optimizer", None],
        ["scheduler", None],
    ]
    pack = msgspec.msgpack.encode
    signature = blake3(b"potluck model signature 1\0" + pack(["", specs])).digest(16)
    body = pack(
        ["r", 5, b"h", signature, "", specs, pack(metadata), 1 << 20, blake3(stream).digest()]
    )
    assert state.body == body
    assert state.digest == blake3(b"potluck state 1\0" + body).digest()
