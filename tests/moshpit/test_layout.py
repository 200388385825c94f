"""The tensors of a vector, and its cuts."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.errors import ProtocolMisuse
from protocols.moshpit.layout import (
    CUT_VALUES,
    LARGEST_CHUNK_BYTES,
    SMALLEST_CHUNK_BYTES,
    Layout,
    Segment,
    chunks_of,
    cut,
)
from protocols.rpc import decode, encode
from protocols.tensors import CODECS

OF_FLOAT32 = [name for name in CODECS if name != "float64"]

segments = st.lists(
    st.tuples(st.integers(0, 9_000), st.sampled_from(OF_FLOAT32)), min_size=1, max_size=6
).map(
    lambda all_of_them: Layout(
        tuple(Segment(f"t{n}", values, codec) for n, (values, codec) in enumerate(all_of_them))
    )
)
fractions = st.lists(st.sampled_from([0.0, 0.1, 0.25, 1.0, 3.0]), min_size=1, max_size=8).filter(
    lambda some: sum(some) > 0.0
)


@settings(max_examples=50, deadline=None)
@given(segments, fractions, st.sampled_from([SMALLEST_CHUNK_BYTES, 10_000, 1 << 20]))
def test_parts_and_their_chunks_cover_every_value_once(
    layout: Layout, some: list[float], chunk_bytes: int
) -> None:
    cuts = cut(layout, some)
    at = 0
    for start, stop in pairwise(cuts):
        assert start == at
        for chunk in chunks_of(layout, start, stop, chunk_bytes):
            assert chunk.start == at < chunk.stop
            assert 0 < chunk.encoded_bytes <= chunk_bytes
            at = chunk.stop
        assert at == stop
    assert at == layout.values


@settings(max_examples=50, deadline=None)
@given(segments, fractions)
def test_cuts_are_near_the_fractions_and_a_fraction_of_nothing_is_an_empty_part(
    layout: Layout, some: list[float]
) -> None:
    cuts = cut(layout, some)
    assert len(cuts) == len(some) + 1
    for part, fraction in enumerate(some):
        values = cuts[part + 1] - cuts[part]
        assert abs(values - fraction / sum(some) * layout.values) <= CUT_VALUES
        assert values == 0 or fraction > 0.0
    assert all(one % CUT_VALUES == 0 for one in cuts[1:] if one != layout.values)


def test_the_remainder_of_rounding_goes_to_the_last_reducer() -> None:
    layout = Layout((Segment("t", 10_000),))
    assert cut(layout, (0.1,) * 10 + (0.0,))[-2:] == (10_000, 10_000)


@pytest.mark.parametrize("some", [(), (0.0, 0.0), (1.0, -0.5), (float("nan"),), (float("inf"),)])
def test_fractions_that_cut_nothing_are_refused(some: tuple[float, ...]) -> None:
    with pytest.raises(ProtocolMisuse):
        cut(Layout((Segment("t", 10),)), some)


def test_a_chunk_spans_tensors_of_one_plain_codec_but_never_two_codecs() -> None:
    layout = Layout(
        (Segment("a", 100), Segment("b", 50), Segment("c", 60, "float16"), Segment("d", 40))
    )
    chunks = chunks_of(layout, 0, layout.values, SMALLEST_CHUNK_BYTES)
    assert [(one.start, one.stop, one.codec) for one in chunks] == [
        (0, 150, "none"),
        (150, 210, "float16"),
        (210, 250, "none"),
    ]


def test_two_tensors_never_share_a_scale() -> None:
    layout = Layout((Segment("a", 100, "blockwise-int8"), Segment("b", 50, "blockwise-int8")))
    chunks = chunks_of(layout, 0, layout.values, SMALLEST_CHUNK_BYTES)
    assert [(one.start, one.stop) for one in chunks] == [(0, 100), (100, 150)]


def test_a_tensor_that_int8_would_enlarge_is_sent_uncompressed() -> None:
    layout = Layout((Segment("scalar", 1, "blockwise-int8"),))
    (chunk,) = chunks_of(layout, 0, 1, SMALLEST_CHUNK_BYTES)
    assert (chunk.codec, chunk.encoded_bytes) == ("none", 4)


def test_a_vector_is_float64_as_a_whole_or_not_at_all() -> None:
    layout = Layout((Segment("a", 5, "float64"), Segment("b", 6_000, "float64")))
    assert (layout.dtype, layout.value_bytes) == ("float64", 8)
    chunks = chunks_of(layout, 0, layout.values, SMALLEST_CHUNK_BYTES)
    assert [one.encoded_bytes for one in chunks[:2]] == [SMALLEST_CHUNK_BYTES] * 2
    assert all(one.as_it_lies and one.encoded_bytes == 8 * one.values for one in chunks)
    with pytest.raises(ProtocolMisuse, match="b has the codec none"):
        Layout((Segment("a", 5, "float64"), Segment("b", 6)))


def test_an_unknown_codec_is_refused_with_the_names_of_all() -> None:
    with pytest.raises(ProtocolMisuse, match="is no codec") as caught:
        Segment("t", 1, "float23")  # type: ignore[arg-type]
    assert all(name in caught.value.advice for name in CODECS)


def test_the_digest_tells_layouts_apart_and_survives_the_wire() -> None:
    one = Layout((Segment("a", 5), Segment("b", 6)))
    others = [
        Layout((Segment("b", 6), Segment("a", 5))),
        Layout((Segment("a", 5, "float16"), Segment("b", 6))),
        Layout((Segment("a", 6), Segment("b", 5))),
        Layout((Segment("a", 11),)),
    ]
    assert len({layout.digest for layout in (one, *others)}) == 5
    assert decode(Layout, encode(one)).digest == one.digest


@pytest.mark.parametrize("size", [0, SMALLEST_CHUNK_BYTES - 1, LARGEST_CHUNK_BYTES + 1])
def test_chunks_have_a_smallest_and_a_largest_size(size: int) -> None:
    with pytest.raises(ProtocolMisuse):
        chunks_of(Layout((Segment("t", 10),)), 0, 10, size)
