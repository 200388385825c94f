"""Tensor codecs keep their stated error bounds, and hostile headers get nothing."""

from __future__ import annotations

import math
import struct
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from hypothesis.extra import numpy as some_arrays
from torch import Tensor

from protocols.errors import LimitExceeded, MalformedMessage, ProtocolMisuse, RemoteMisbehaviour
from protocols.rpc import decode as decode_message
from protocols.rpc import encode as encode_message
from protocols.tensors import (
    CODECS,
    SERIAL_VALUES,
    CodecName,
    NotFinite,
    accumulate,
    add_received,
    decode_into,
    encode_into,
    raw_bytes,
)
from protocols.tensors.codecs import VALUES_AT_ONCE
from protocols.tensors.messages import (
    TensorHeader,
    check_header,
    decode,
    describe,
    encode,
    encoded_bytes,
    spans,
)

OF_FLOAT32: list[CodecName] = [name for name in CODECS if name != "float64"]
LOSSY: list[CodecName] = [name for name in OF_FLOAT32 if not CODECS[name].is_lossless]

lengths = some.one_of(
    some.integers(0, 40), some.sampled_from([127, 128, 129, 1023, 1024, 1025, 2048, 3000])
)


@some.composite
def vectors(draw: some.DrawFn, largest: float) -> Tensor:
    """Flat float32 tensors of any size, of mixed magnitude, denormals included."""
    values = draw(
        some_arrays.arrays(
            "float32",
            draw(lengths),
            elements=some.floats(-largest, largest, width=32, allow_subnormal=True)
            if largest < 1e38
            else some.floats(
                -(2.0**127), 2.0**127, width=32, allow_subnormal=True, allow_nan=False
            ),
        )
    )
    return torch.from_numpy(values)


def test_every_name_of_a_codec_is_in_the_table_once() -> None:
    assert get_args(CodecName) == tuple(CODECS)
    assert all(codec.name == name for name, codec in CODECS.items())


def bound(codec: CodecName, values: Tensor) -> Tensor:
    """The error bound of codecs.py for each value, in float64."""
    wide = values.double().abs()
    if codec == "none":
        return torch.zeros_like(wide)
    if codec == "float16":
        return wide / 2048 + 2.0**-25
    if codec == "bfloat16":
        return wide / 256 + 2.0**-134
    size = CODECS[codec].block_values
    blocks = [torch.full_like(block, block.max()) for block in wide.split(size) if len(block)]
    largest = torch.cat(blocks) if blocks else wide
    if codec == "blockwise-int8":
        return largest / 253 + 1.6e-36
    if codec == "blockwise-int4":
        return largest / 13.9 + 8.3e-38
    if codec == "sparse-sign":
        return torch.maximum(wide, largest)
    assert codec == "blockwise-float8"
    return wide / 16 + largest / 458_752 + 2.7e-33


@pytest.mark.slow
@pytest.mark.parametrize("codec", OF_FLOAT32)
@given(data=some.data())
def test_received_values_are_within_the_stated_error_of_the_sent_ones(
    codec: CodecName, data: some.DataObject
) -> None:
    values = data.draw(vectors(CODECS[codec].largest))
    header = describe(values, codec)
    encoded = encode(values, codec, name="values")
    arrived = decode(header, encoded, limit_bytes=1 << 20)
    assert arrived.shape == values.shape
    assert bool(((arrived.double() - values.double()).abs() <= bound(codec, values)).all())


@pytest.mark.slow
@pytest.mark.parametrize("codec", OF_FLOAT32)
@given(data=some.data(), weight=some.floats(-8.0, 8.0, width=32))
def test_accumulating_adds_the_decoded_values_times_the_weight(
    codec: CodecName, data: some.DataObject, weight: float
) -> None:
    values = data.draw(vectors(1000.0))
    encoded = encode(values, codec, name="values")
    decoded = decode(describe(values, codec), encoded, limit_bytes=1 << 20)
    total = torch.ones_like(values)
    accumulate(total, codec, encoded, weight=weight)
    exact = 1.0 + weight * decoded.double()
    assert torch.allclose(total.double(), exact, rtol=1e-6, atol=1e-3 * 2**-10)


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_floating_dtypes_travel_and_accumulate_in_more_bits(
    codec: CodecName, dtype: torch.dtype
) -> None:
    values = torch.linspace(-3.0, 3.0, 2500).to(dtype)
    arrived = decode(
        describe(values, codec), encode(values, codec, name="values"), limit_bytes=1 << 20
    )
    assert arrived.dtype == dtype
    error = bound(codec, values)
    rounded = values.double().abs() / 256  # to a bfloat16, when it has arrived
    assert bool(((arrived.double() - values.double()).abs() <= error + rounded).all())
    with pytest.raises(ProtocolMisuse):
        accumulate(torch.zeros(2500, dtype=torch.float16), codec, b"")
    total = torch.zeros(2500, dtype=torch.float64 if dtype is torch.float64 else torch.float32)
    accumulate(total, codec, encode(values, codec, name="values"), weight=2.0)
    assert bool(((total.double() - 2.0 * values.double()).abs() <= 2.0 * error).all())


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("length", [0, 1, SERIAL_VALUES, 2 * SERIAL_VALUES + 7])
def test_received_values_are_added_with_the_product_and_the_sum_rounded(
    dtype: str, length: int
) -> None:
    values, sums = (np.random.default_rng(seed).standard_normal(length) for seed in (1, 2))
    values, sums = values.astype(dtype), sums.astype(dtype)
    expected = sums + values * sums.dtype.type(1 / 3)
    add_received(sums, memoryview(values.tobytes()), 1 / 3)
    assert sums.dtype == dtype
    assert sums.tobytes() == expected.tobytes()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, SERIAL_VALUES, VALUES_AT_ONCE, VALUES_AT_ONCE + 99])
def test_received_values_that_are_not_finite_are_refused_and_nothing_is_added(
    bad: float, place: int
) -> None:
    values = np.ones(VALUES_AT_ONCE + 100, np.float32)
    values[place] = bad
    sums = np.zeros_like(values)
    with pytest.raises(MalformedMessage):
        add_received(sums, memoryview(values.tobytes()), 0.5)
    assert not sums.any()


def test_a_sum_that_is_too_large_is_infinite_without_a_warning() -> None:
    largest = np.full(9, np.finfo(np.float32).max)
    sums = largest.copy()
    add_received(sums, memoryview(largest.tobytes()), 1.0)
    assert np.isinf(sums).all()


def test_float64_goes_as_it_is_and_nowhere_else() -> None:
    values = torch.linspace(-1.0, 1.0, 2500, dtype=torch.float64) / 3.0
    encoded = encode(values, "float64", name="values")
    assert torch.equal(decode(describe(values, "float64"), encoded, limit_bytes=1 << 20), values)
    total = torch.ones_like(values)
    accumulate(total, "float64", encoded, weight=0.1, dtype="float64")
    assert torch.equal(total, torch.ones_like(values).add_(values, alpha=0.1))
    with pytest.raises(ProtocolMisuse, match=r"not for torch\.float32"):
        describe(values.float(), "float64")
    with pytest.raises(ProtocolMisuse, match=r"not decoded into torch\.float32"):
        accumulate(torch.ones(2500), "float64", encoded, dtype="float64")
    with pytest.raises(MalformedMessage, match=r"not for torch\.float32"):
        check_header(TensorHeader((2500,), "float32", "float64"), limit_bytes=1 << 20)


def test_values_too_large_for_the_dtype_that_was_announced_are_malformed() -> None:
    encoded = encode(torch.tensor([1e30]), "bfloat16", name="values")
    with pytest.raises(MalformedMessage, match="float16 cannot hold"):
        decode(TensorHeader((1,), "float16", "bfloat16"), encoded, limit_bytes=100)
    with pytest.raises(ProtocolMisuse):
        decode_into(torch.zeros(1), "none", bytes(8), "float64")


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
)
def test_whole_numbers_travel_exactly(dtype: torch.dtype) -> None:
    values = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype)
    header = describe(values)
    arrived = decode(header, encode(values, "none", name="counts"), limit_bytes=1000)
    assert arrived.dtype == dtype
    assert torch.equal(arrived, values)


def test_a_bool_that_is_neither_0_nor_1_arrives_as_true() -> None:
    arrived = decode(TensorHeader((3,), "bool"), b"\x00\x01\xff", limit_bytes=100)
    assert arrived.view(torch.uint8).tolist() == [0, 1, 1]


@pytest.mark.parametrize("codec", OF_FLOAT32)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 1023, 1024, 1999])
def test_values_that_are_not_finite_are_refused_at_the_sender_by_name(
    codec: CodecName, bad: float, at: int
) -> None:
    values = torch.zeros(2000)
    values[at] = bad
    with pytest.raises(NotFinite, match=rf"layer\.weight has 1 .* at {at:,} of 2,000"):
        encode(values, codec, name="layer.weight")


def test_values_beyond_the_range_of_float16_are_refused_not_sent_as_infinity() -> None:
    assert decode(
        TensorHeader((1,), "float32", "float16"),
        encode(torch.tensor([65_519.0]), "float16", name="edge"),
        limit_bytes=100,
    ) == torch.tensor([65_504.0])
    with pytest.raises(NotFinite, match="65520"):
        encode(torch.tensor([65_520.0]), "float16", name="edge")


@pytest.mark.parametrize("codec", OF_FLOAT32)
def test_values_that_are_not_finite_are_refused_at_the_receiver_and_change_nothing(
    codec: CodecName,
) -> None:
    encoded = encode(torch.ones(3000), codec, name="values")
    dtype = getattr(torch, codec, torch.float32)  # a blockwise one begins with float32 scales
    torch.frombuffer(encoded, dtype=dtype, count=3)[2] = math.nan
    total = torch.full((3000,), 7.0)
    with pytest.raises(MalformedMessage):
        accumulate(total, codec, encoded)
    with pytest.raises(MalformedMessage):
        decode_into(total, codec, encoded, "float32")
    assert torch.equal(total, torch.full((3000,), 7.0))


def test_no_blockwise_int8_bytes_decode_to_something_that_is_not_finite() -> None:
    largest = torch.tensor([2.65e36]).numpy().tobytes()
    codes = bytes([0x80]) * 1024  # -128, which our own encoder never makes
    arrived = decode(
        TensorHeader((1024,), "float32", "blockwise-int8"), largest + codes, limit_bytes=10_000
    )
    assert bool(torch.isfinite(arrived).all())


def float8(code: int) -> float:
    """The value of a float8 of 4 exponent and 3 fraction bits, by its definition."""
    exponent, fraction = code >> 3 & 0xF, code & 0x7
    size = (8 + fraction) * 2.0 ** (exponent - 10) if exponent else fraction * 2.0**-9
    return -size if code & 0x80 else size


NUMBERS_OF_FLOAT8 = [code for code in range(256) if code & 0x7F != 0x7F]


def float8_block(scale: float, codes: list[int]) -> bytes:
    return struct.pack("<f", scale) + bytes(codes)


def test_every_float8_decodes_to_its_value_times_the_scale() -> None:
    codes = NUMBERS_OF_FLOAT8
    header = TensorHeader((len(codes),), "float32", "blockwise-float8")
    for scale in (1.0, 2.0**-100, 7.59e35, 0.0):
        arrived = decode(header, float8_block(scale, codes), limit_bytes=10_000)
        exact = torch.tensor([float8(code) for code in codes])
        assert torch.equal(arrived, exact * torch.tensor(scale))


def test_every_float8_and_what_lies_between_is_rounded_to_the_nearest_and_ties_to_even() -> None:
    """Also the last few values, which a processor may treat otherwise than those in the bulk."""
    sizes = [float8(code) for code in range(0x7F)]
    values, codes = [448.0], [0x7E]  # makes the scale 1
    for code, (low, high) in enumerate(pairwise(sizes)):
        middle = (low + high) / 2
        for value, nearest in (
            (low, code),
            (middle * (1 - 2.0**-23), code),
            (middle, code + code % 2),
            (middle * (1 + 2.0**-23), code + 1),
        ):
            values += [value, -value]
            codes += [nearest, nearest | 0x80]
    assert len(values) == 1009
    encoded = encode(torch.tensor(values), "blockwise-float8", name="values")
    assert struct.unpack_from("<f", encoded) == (1.0,)
    assert list(encoded[4:]) == codes


def test_blockwise_float8_makes_these_bytes() -> None:
    values = torch.zeros(1026)
    values[:6] = torch.tensor([1.0, -0.5, 0.3, 1e-3, 1e-7, -1e-9])
    values[1024:] = torch.tensor([3e-39, -3e-39])  # a block too small for a scale
    encoded = encode(values, "blockwise-float8", name="values")
    assert encoded[:8].hex() == "2549123b" + "00000000"
    assert encoded[8:14].hex() == "7ef6702e0080"
    assert encoded[14 : 8 + 1024] == bytes(1018)
    assert encoded[8 + 1024 :].hex() == "0080"


@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("at", [0, 1023, 40_000])
def test_a_float8_that_is_no_number_is_refused_and_changes_nothing(code: int, at: int) -> None:
    encoded = encode(torch.ones(40_001), "blockwise-float8", name="values")
    encoded[at - 40_001] = code
    total = torch.full((40_001,), 7.0)
    with pytest.raises(MalformedMessage, match="a NaN"):
        accumulate(total, "blockwise-float8", encoded)
    assert torch.equal(total, torch.full((40_001,), 7.0))


def test_blockwise_int4_makes_these_bytes() -> None:
    values = torch.zeros(131)
    values[:8] = torch.tensor([7.0, -7.0, 0.5, 1.5, -2.5, 3.49, -0.51, 1e-9])  # ties to even
    values[128:] = torch.tensor([3.0, -1.5, 0.4])  # odd, with a scale of its own
    encoded = encode(values, "blockwise-int4", name="values")
    assert len(encoded) == 4 + 4 + 66
    assert struct.unpack_from("<ff", encoded) == (
        1.0,
        struct.unpack("<f", bytes.fromhex("b76ddb3e"))[0],
    )
    assert encoded[8:12].hex() == "97" + "20" + "3e" + "0f"
    assert encoded[12 : 8 + 64] == bytes(60)
    assert encoded[8 + 64 :].hex() == "c7" + "01"


INT4 = [*range(8), *range(-7, 0)]


def int4_bytes(scale: float, codes: list[int]) -> bytearray:
    """One block, by its definition. An even number of codes."""
    halves = [code & 0xF for code in codes]
    pairs = [low | high << 4 for low, high in zip(halves[::2], halves[1::2], strict=True)]
    return bytearray(struct.pack("<f", scale) + bytes(pairs))


@pytest.mark.parametrize("scale", [1.0, 2.0**-126, 4.86e37, 0.0])
def test_every_pair_of_int4_decodes_to_its_values_times_the_scale(scale: float) -> None:
    for first in INT4:
        codes = [code for second in INT4 for code in (first, second)]
        header = TensorHeader((len(codes),), "float32", "blockwise-int4")
        arrived = decode(header, int4_bytes(scale, codes), limit_bytes=1000)
        exact = torch.tensor([float(code) for code in codes]) * torch.tensor(scale)
        assert torch.equal(arrived, exact)
        assert bool(torch.isfinite(arrived).all())


@pytest.mark.parametrize("at", [0, 1, 126, 127, 128, 30_000, 80_000])
def test_the_int4_minus_8_is_refused_and_changes_nothing(at: int) -> None:
    encoded = encode(torch.ones(80_001), "blockwise-int4", name="values")
    place = 4 * 626 + at // 2
    encoded[place] = encoded[place] & 0xF0 | 0x08 if at % 2 == 0 else encoded[place] & 0x0F | 0x80
    total = torch.full((80_001,), 7.0)
    with pytest.raises(MalformedMessage, match="the code -8"):
        accumulate(total, "blockwise-int4", encoded)
    assert torch.equal(total, torch.full((80_001,), 7.0))


@pytest.mark.parametrize("values", [1, 129, 80_001])
def test_half_a_byte_behind_the_last_int4_has_to_be_zero(values: int) -> None:
    encoded = encode(torch.ones(values), "blockwise-int4", name="values")
    encoded[-1] |= 0x10
    with pytest.raises(MalformedMessage, match="behind its last value"):
        accumulate(torch.zeros(values), "blockwise-int4", encoded)


def test_sparse_sign_makes_these_bytes() -> None:
    values = torch.zeros(1029)
    values[2:18:4] = torch.tensor([1.0, -4.0, 2.0, -1.0])  # place 2; 252 more are zeros
    values[1026] = -0.5  # a block of its own, with one value at this place
    encoded = encode(values, "sparse-sign", name="values")
    assert struct.unpack_from("<ff", encoded) == (8.0 / 256, 0.5)
    assert encoded[8:].hex() == "02" + "0a" + "00" * 31 + "01"
    arrived = decode(describe(values, "sparse-sign"), encoded, limit_bytes=10_000)
    exact = torch.zeros(1029)
    exact[2:1024:4] = 8.0 / 256
    exact[6] = exact[14] = -8.0 / 256
    exact[1026] = -0.5
    assert torch.equal(arrived, exact)


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("size", [1, 4, 7, 33, 1024, 1027, 40_003])
def test_sparse_sign_sends_the_values_at_the_place_of_the_largest(place: int, size: int) -> None:
    values = torch.zeros(size)
    values[place::4] = torch.randn(len(values[place::4]))
    encoded = encode(values, "sparse-sign", name="values")
    assert len(encoded) == 4 * -(-size // 1024) + 1 + -(-size // 32)
    arrived = decode(describe(values, "sparse-sign"), encoded, limit_bytes=1 << 20)
    assert torch.equal(arrived.sign(), values.sign())
    for block, sent in zip(arrived.split(1024), values.split(1024), strict=True):
        there = block[place::4].abs()
        assert there.numel() == 0 or torch.equal(there, there[:1].expand_as(there))
        torch.testing.assert_close(there.sum(), sent.abs().sum(), rtol=1e-3, atol=0.0)


def test_a_billion_values_take_a_hundredth_of_their_bytes_as_sparse_sign() -> None:
    assert 4 * 10**9 / CODECS["sparse-sign"].encoded_bytes(10**9) > 113


def test_the_sum_of_sparse_parts_is_as_sparse_as_each_of_them() -> None:
    total = torch.zeros(5000)
    for seed in range(3):
        values = torch.zeros(5000)
        values[1::4] = torch.randn(1250, generator=torch.Generator().manual_seed(seed))
        accumulate(total, "sparse-sign", encode(values, "sparse-sign", name="x"), weight=0.25)
    arrived = decode(
        describe(total, "sparse-sign"),
        encode(total, "sparse-sign", name="sum"),
        limit_bytes=1 << 20,
    )
    assert bool((arrived[1::4] != 0.0).all())
    arrived[1::4] = 0.0
    assert not bool(arrived.any())


def spoilt_place(encoded: bytearray) -> None:
    encoded[4 * 40] = 4


def spoilt_scale(encoded: bytearray) -> None:
    struct.pack_into("<f", encoded, 4 * 39, -1.0)


def infinite_scale(encoded: bytearray) -> None:
    struct.pack_into("<f", encoded, 0, math.inf)


def spoilt_end(encoded: bytearray) -> None:
    encoded[-1] |= 0x02  # the last byte has one value, and place 3 is behind the last


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (spoilt_place, "a place that is not there"),
        (spoilt_scale, "a scale out of range"),
        (infinite_scale, "a scale out of range"),
        (spoilt_end, "a sign behind its last value"),
    ],
)
def test_sparse_bytes_that_no_sender_makes_are_refused_and_change_nothing(
    spoil: Callable[[bytearray], None], words: str
) -> None:
    encoded = bytearray(encode(torch.ones(40_001), "sparse-sign", name="values"))
    spoil(encoded)
    total = torch.full((40_001,), 7.0)
    with pytest.raises(MalformedMessage, match=words):
        accumulate(total, "sparse-sign", encoded)
    with pytest.raises(MalformedMessage, match=words):
        decode_into(total, "sparse-sign", encoded, "float32")
    assert torch.equal(total, torch.full((40_001,), 7.0))


@pytest.mark.parametrize("place", [1, 2, 3])
def test_a_sign_of_a_place_behind_the_last_value_is_refused(place: int) -> None:
    """Of 33 values, the ninth group has only the first place."""
    encoded = bytearray(encode(torch.ones(33), "sparse-sign", name="values"))
    encoded[-1] = 1
    accumulate(torch.zeros(33), "sparse-sign", encoded)
    encoded[4] = place
    with pytest.raises(MalformedMessage, match="a sign behind its last value"):
        accumulate(torch.zeros(33), "sparse-sign", encoded)


@pytest.mark.parametrize(
    "codec", ["blockwise-int8", "blockwise-float8", "blockwise-int4", "sparse-sign"]
)
@given(data=some.data())
def test_decoded_blocks_are_encoded_as_the_same_bytes_again(
    codec: CodecName, data: some.DataObject
) -> None:
    """So a result can be shown to others by the bytes that its digest is of."""
    values = data.draw(vectors(CODECS[codec].largest))
    encoded = encode(values, codec, name="values")
    arrived = decode(describe(values, codec), encoded, limit_bytes=1 << 20)
    assert encode(arrived, codec, name="values") == encoded


@pytest.mark.parametrize("codec", OF_FLOAT32)
def test_a_tensor_that_is_not_contiguous_travels_in_its_logical_order(codec: CodecName) -> None:
    values = torch.arange(12.0).reshape(3, 4).t()
    arrived = decode(
        describe(values, codec), encode(values, codec, name="values"), limit_bytes=1000
    )
    assert arrived.shape == (4, 3)
    assert bool(((arrived - values).abs() <= bound(codec, values.reshape(-1)).view(4, 3)).all())


@pytest.mark.parametrize("codec", OF_FLOAT32)
@pytest.mark.parametrize("shape", [(0,), (3, 0, 2), ()])
def test_empty_tensors_and_single_numbers_travel(codec: CodecName, shape: tuple[int, ...]) -> None:
    values = torch.ones(shape)
    header = describe(values, codec)
    arrived = decode(header, encode(values, codec, name="values"), limit_bytes=100)
    assert torch.equal(arrived, values)
    assert list(spans(header, 4096)) == ([range(0, 1)] if shape == () else [])


@pytest.mark.parametrize("codec", OF_FLOAT32)
@given(values=some.integers(0, 20_000), chunk_bytes=some.integers(1028, 9000))
def test_parts_that_are_encoded_on_their_own_make_up_the_whole(
    codec: CodecName, values: int, chunk_bytes: int
) -> None:
    whole = torch.arange(float(values)) / 64
    header = describe(whole, codec)
    arrived = torch.zeros_like(whole)
    buffer = bytearray(chunk_bytes)
    end = 0
    for span in spans(header, chunk_bytes):
        assert span.start == end
        end = span.stop
        size = encode_into(whole[span.start : span.stop], codec, buffer, name="part")
        assert size == encoded_bytes(header, len(span)) <= chunk_bytes
        with memoryview(buffer)[:size] as part:
            accumulate(arrived[span.start : span.stop], codec, part)
    assert end == values
    at_once = decode(header, encode(whole, codec, name="whole"), limit_bytes=1 << 20)
    assert torch.equal(arrived, at_once)


def test_the_memory_of_a_tensor_is_sent_and_received_without_a_copy() -> None:
    values = torch.arange(6.0, dtype=torch.bfloat16).reshape(2, 3)
    view = raw_bytes(values)
    assert view.nbytes == 12
    view[:2] = bytes(torch.tensor([9.0], dtype=torch.bfloat16).view(torch.uint8).tolist())
    assert values[0, 0] == 9.0
    assert len(raw_bytes(torch.empty(0))) == 0
    with pytest.raises(ProtocolMisuse):
        raw_bytes(values.t())


@pytest.mark.parametrize(
    "header",
    [
        TensorHeader((1 << 40, 1 << 40), "float32"),
        TensorHeader((1 << 40,) * 16, "float64"),
        TensorHeader((300_000,), "float32", "blockwise-int8"),
        TensorHeader((2, 131_073), "float32", "float16"),
    ],
)
def test_a_header_that_asks_for_too_much_is_refused_before_memory_is_taken(
    header: TensorHeader,
) -> None:
    tracemalloc.start()
    with pytest.raises(LimitExceeded):
        decode(header, b"", limit_bytes=1 << 20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000


def test_an_empty_tensor_with_dimensions_that_torch_cannot_multiply_is_refused() -> None:
    header = TensorHeader((1, 0, 1 << 40, 1 << 40), "float32")
    with pytest.raises(LimitExceeded):
        decode(header, b"", limit_bytes=1 << 20)
    assert decode(TensorHeader((1, 0, 40), "float32"), b"", limit_bytes=160).shape == (1, 0, 40)


def test_a_codec_that_does_not_suit_the_dtype_is_refused_on_both_sides() -> None:
    with pytest.raises(MalformedMessage):
        check_header(TensorHeader((1,), "int64", "float16"), limit_bytes=100)
    with pytest.raises(ProtocolMisuse):
        describe(torch.ones(3, dtype=torch.int64), "blockwise-int8")


@pytest.mark.parametrize("codec", OF_FLOAT32)
def test_a_buffer_of_another_size_than_announced_is_refused(codec: CodecName) -> None:
    values = torch.ones(1500)
    encoded = bytes(encode(values, codec, name="values"))
    for wrong in (encoded[:-1], encoded + b"\x00", b""):
        with pytest.raises(MalformedMessage):
            decode(describe(values, codec), wrong, limit_bytes=1 << 20)
        with pytest.raises(MalformedMessage):
            accumulate(values, codec, wrong)


@pytest.mark.slow
@given(
    fields=some.recursive(
        some.none() | some.integers(-5, 1 << 63) | some.text(max_size=8) | some.booleans(),
        lambda inner: some.lists(inner, max_size=20),
        max_leaves=30,
    )
)
def test_hostile_headers_give_a_tensor_within_the_limit_or_one_of_two_errors(fields: Any) -> None:
    try:
        header = decode_message(TensorHeader, encode_message(fields))
        check_header(header, limit_bytes=10_000)
    except RemoteMisbehaviour:
        return
    assert header.decoded_bytes <= 10_000


@given(
    header=some.builds(
        TensorHeader,
        some.lists(some.integers(0, 2000), max_size=2).map(tuple),
        some.sampled_from(["float32", "float64", "float16", "bfloat16", "bool", "int64"]),
        some.sampled_from(OF_FLOAT32),
    ),
    encoded=some.binary(max_size=3000),
    right_size=some.booleans(),
)
def test_hostile_bytes_decode_to_finite_values_or_raise_one_of_two_errors(
    header: TensorHeader, encoded: bytes, right_size: bool
) -> None:
    try:
        check_header(header, limit_bytes=10_000)
        if right_size:
            needed = encoded_bytes(header, header.values)
            encoded = (encoded * (needed // max(1, len(encoded)) + 1))[:needed]
        arrived = decode(header, encoded, limit_bytes=10_000)
    except RemoteMisbehaviour:
        return
    assert bool(torch.isfinite(arrived).all())
