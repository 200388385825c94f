"""Gzip is unpacked as it comes; an error in it is reported with its place."""

from __future__ import annotations

import gzip
import tracemalloc
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.data.errors import ShardBroken
from models.data.gunzip import LARGEST_OUTPUT_BYTES, Gunzip

TEXT = b"".join(b"line number %d of many\n" % number for number in range(2_000))


def unpacked(packed: bytes, step: int = 1 << 16) -> bytes:
    gunzip = Gunzip()
    found = b"".join(
        part
        for start in range(0, len(packed), step)
        for part in gunzip.feed(packed[start : start + step])
    )
    gunzip.end()
    return found


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3_000))
def test_pieces_of_any_size_give_the_same_text(step: int) -> None:
    assert unpacked(gzip.compress(TEXT), step) == TEXT


def test_several_members_are_one_text_and_zeros_behind_them_are_padding() -> None:
    packed = gzip.compress(TEXT[:100]) + gzip.compress(TEXT[100:]) + bytes(512)
    assert unpacked(packed) == TEXT
    assert unpacked(packed, 1) == TEXT


def test_truncated_gzip_is_named_with_the_place_of_its_end() -> None:
    packed = gzip.compress(TEXT)[:1_000]
    with pytest.raises(ShardBroken, match=r"truncated: the file ends at byte 1,000.* unpacked"):
        unpacked(packed)


def test_text_before_the_break_is_given() -> None:
    gunzip = Gunzip()
    found = b"".join(gunzip.feed(gzip.compress(TEXT)[:1_000]))
    assert len(found) > 1_000
    assert TEXT.startswith(found)


def test_damaged_gzip_is_named_with_its_place() -> None:
    packed = bytearray(gzip.compress(TEXT))
    packed[len(packed) // 2 :] = b"\xff" * (len(packed) // 2)
    with pytest.raises(ShardBroken, match="damaged gzip between byte"):
        unpacked(bytes(packed), 1_000)


def test_a_wrong_checksum_is_damage() -> None:
    packed = bytearray(gzip.compress(TEXT))
    packed[-6] ^= 1
    with pytest.raises(ShardBroken, match="damaged"):
        unpacked(bytes(packed))


def test_something_behind_the_padding_is_no_gzip() -> None:
    with pytest.raises(ShardBroken, match="no gzip behind byte"):
        unpacked(gzip.compress(TEXT) + bytes(8) + b"more")


@pytest.mark.slow
def test_a_decompression_bomb_is_given_up_early_and_in_little_memory() -> None:
    packer = zlib.compressobj(9, wbits=31)
    bomb = b"".join(packer.compress(bytes(1 << 20)) for _ in range(256)) + packer.flush()
    assert len(bomb) < 300_000
    gunzip = Gunzip()
    given_bytes = 0
    tracemalloc.start()
    reason = ""
    try:
        for part in gunzip.feed(bomb):
            assert len(part) <= LARGEST_OUTPUT_BYTES
            given_bytes += len(part)
    except ShardBroken as error:
        reason = str(error)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "decompression bomb" in reason
    assert given_bytes < 70 << 20
    assert peak < 8 << 20
