"""An exchange without faults gives the average, with the same bits for all."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from protocols.moshpit.layout import Layout, Segment
from protocols.moshpit.part_messages import counts
from protocols.moshpit.roster import LARGEST_WEIGHT
from protocols.tensors import CODECS, CodecName, decode_into, encode_into
from tests.moshpit.exchanges import (
    BALLOT,
    ROUND_ID,
    Exchanging,
    among,
    bits,
    exchange,
    layout_of,
    values_of,
)

LOSSY = [name for name, codec in CODECS.items() if not codec.is_lossless]


def tolerated(codec: CodecName) -> float:
    """The largest error of a value, relative to the largest value: the codec's own error, for the
    values and again for the average. float32 alone rounds once for each addition."""
    largest = 1.001  # just above a power of two a float is coarsest for its size
    order = torch.randperm(1 << 16, generator=torch.Generator().manual_seed(0))
    values = torch.linspace(-largest, largest, 1 << 16)[order]  # all magnitudes in each block
    encoded = bytearray(CODECS[codec].encoded_bytes(len(values)))
    encode_into(values, codec, encoded, name="values")
    arrived = torch.empty_like(values)
    decode_into(arrived, codec, encoded, "float32")
    return 1e-6 + 2.0 * float((arrived - values).abs().max()) / largest


def check_is_the_average(group: Exchanging, tolerance: float) -> None:
    group.check_all_hold_the_same()
    expected = group.average()
    largest = max(float(peer.source.abs().max()) for peer in group.peers)
    assert float((group[0].result - expected).abs().max()) <= tolerance * largest


@pytest.mark.parametrize(
    "members", [1, 2, 3, 4, *(pytest.param(many, marks=pytest.mark.slow) for many in range(5, 9))]
)
def test_all_members_hold_the_same_average(members: int) -> None:
    group = exchange([1.0 + index for index in range(members)])
    check_is_the_average(group, tolerated("none"))


@pytest.mark.parametrize("codec", LOSSY)
def test_a_codec_costs_its_own_error_and_no_bit_of_agreement(codec: CodecName) -> None:
    group = exchange([1.0, 3.0, 2.0], layout=layout_of(codec, codec))
    check_is_the_average(group, tolerated(codec))


@pytest.mark.parametrize("members", [1, 3])
def test_float64_values_are_summed_and_sent_in_float64(members: int) -> None:
    layout = layout_of("float64", "float64")
    sources = [values_of(layout, seed) / 3.0 for seed in range(members)]
    group = exchange([1.0 + index for index in range(members)], layout=layout, sources=sources)
    group.check_all_hold_the_same()
    torch.testing.assert_close(group[0].result, group.average(), rtol=2e-15, atol=1e-16)


def test_each_tensor_has_its_own_codec() -> None:
    layout = layout_of("none", "blockwise-int8", *LOSSY, values=999)
    group = exchange([1.0, 1.0, 1.0], layout=layout, chunk_bytes=4_096)
    group.check_all_hold_the_same()
    expected = group.average()
    at = 0
    for segment in layout.segments:
        own = slice(at, at + segment.values)
        off = float((group[0].result[own] - expected[own]).abs().max())
        assert off <= tolerated(segment.codec) * 5.0, segment
        at += segment.values


def test_whole_numbers_with_weights_of_powers_of_two_are_averaged_exactly() -> None:
    layout = layout_of("none", "float16")
    sources = [torch.randint(-100, 100, (layout.values,)).float() * 8 for _ in range(3)]
    group = exchange([1.0, 2.0, 1.0], layout=layout, sources=sources)
    group.check_all_hold_the_same()
    assert bool((group[0].result.double() == group.average()).all())


def test_one_member_alone_gets_what_its_own_values_decode_to() -> None:
    layout = layout_of("blockwise-int8", "none", values=3_000)
    group = exchange([5.0], layout=layout)
    check_is_the_average(group, tolerated("blockwise-int8"))


def test_an_auxiliary_member_counts_for_nothing_reduces_and_gets_the_result() -> None:
    layout = layout_of("float16")
    sources = [values_of(layout, 1), torch.full((layout.values,), 9e9), values_of(layout, 2)]
    group = exchange([1.0, 0.0, 1.0], layout=layout, sources=sources)
    group.check_all_hold_the_same()
    expected = (sources[0].double() + sources[2].double()) / 2
    assert float((group[1].result - expected).abs().max()) <= 5 * tolerated("float16")


def test_whatever_weight_a_member_has_signed_it_counts_with_the_largest_at_most() -> None:
    async def scenario(group: Exchanging) -> Exchanging:
        for peer in group.peers:
            peer.plan = replace(peer.plan, most_weight=4.0)
        await group.exchange()
        return group

    group = among(scenario, [1.0, LARGEST_WEIGHT, 0.0, 2.0])
    group.check_all_hold_the_same()
    first, claims, _, last = (peer.source.double() for peer in group.peers)
    expected = (1.0 * first + 4.0 * claims + 2.0 * last) / 7.0
    torch.testing.assert_close(group[0].result.double(), expected, rtol=1e-6, atol=1e-6)


def test_weights_that_are_within_the_bound_count_as_they_are() -> None:
    async def scenario(group: Exchanging) -> Exchanging:
        for peer in group.peers:
            peer.plan = replace(peer.plan, most_weight=5.0)
        await group.exchange()
        return group

    weights = [1.0, 5.0, 3.0]
    assert bits(among(scenario, weights)[0].result) == bits(exchange(weights)[0].result)


@pytest.mark.parametrize("weights", [(0.0, 1.0), (1.0, 0.0), (0.0, 0.0, 1.0)])
def test_one_alone_may_bring_all_the_data(weights: tuple[float, ...]) -> None:
    group = exchange(weights)
    group.check_all_hold_the_same()
    (bringer,) = (peer for peer, weight in zip(group.peers, weights, strict=True) if weight)
    assert bits(group[0].result) == bits(bringer.source)


@pytest.mark.parametrize("fractions", [(1, 0, 0), (0, 1, 1), (5, 0, 1), (0.9999, 0.0001, 0)])
def test_parts_may_be_of_any_size_and_empty(fractions: tuple[float, ...]) -> None:
    group = exchange([1.0, 1.0, 2.0], fractions=fractions)
    check_is_the_average(group, tolerated("none"))
    cuts = group[0].plan.cuts
    reducers = [index for index in range(3) if cuts[index] < cuts[index + 1]]
    assert group[0].report is not None
    assert [one.part for one in group[0].report.statements] == reducers


def test_a_vector_smaller_than_the_group_is_reduced_by_some() -> None:
    group = exchange([1.0] * 4, layout=Layout((Segment("scalar", 1, "blockwise-int8"),)))
    check_is_the_average(group, tolerated("none"))


def test_every_member_holds_every_reducers_signed_statement() -> None:
    group = exchange([1.0, 1.0, 1.0])
    group.check_all_hold_the_same()
    for peer in group.peers:
        assert peer.report is not None
        for statement in peer.report.statements:
            reducer = group[statement.part].network.peer_id
            assert counts(reducer, ROUND_ID, BALLOT, statement)


def test_the_source_is_read_and_nothing_else() -> None:
    layout = layout_of("float16", "none")
    sources = [values_of(layout, seed) for seed in range(3)]
    before = [bits(source) for source in sources]
    exchange([1.0] * 3, layout=layout, sources=sources)
    assert [bits(source) for source in sources] == before


def test_the_order_in_which_values_come_changes_no_member_against_another() -> None:
    """Sums in float32 depend on their order; that all have one reducer's sum does not."""
    layout = layout_of("none", values=3_000)
    sources: list[Tensor] = [values_of(layout, seed) * 10.0**seed for seed in range(4)]
    group = exchange([0.3, 1.7, 2.9, 0.01], layout=layout, sources=sources)
    check_is_the_average(group, tolerated("none"))


def test_the_report_counts_every_byte() -> None:
    layout = Layout((Segment("t", 3 * 1_024 * 8),))
    group = exchange([1.0] * 3, layout=layout)
    part_bytes = 1_024 * 8 * 4
    for peer in group.peers:
        report = peer.report
        assert report is not None
        assert report.bytes_sent == report.bytes_received == 4 * part_bytes
        assert 0.0 < report.opened_seconds <= report.received_seconds <= report.seconds
