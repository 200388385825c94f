"""The shuffle buffer loses nothing, repeats nothing, and shuffles."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.data.examples import Example, ExamplePlace
from models.data.shuffle_buffer import FIRST, LONGEST_WAIT, ShuffleBuffer


def example(number: int, size: int = 1) -> Example:
    return Example(b"x" * size, None, ExamplePlace(0, 0, 0, number, 0, 0))


def through(buffer: ShuffleBuffer, sizes: list[int]) -> Iterator[tuple[int, int]]:
    """(number, draws between its coming and its going) of everything, as a source does it."""
    coming = iter(enumerate(sizes))
    came: dict[int, int] = {}
    draws = 0
    while True:
        for _ in range(buffer.lacks):
            if buffer.is_full:
                break
            new = next(coming, None)
            if new is None:
                break
            came[new[0]] = draws
            buffer.put(example(*new))
        if not len(buffer):
            return
        number = buffer.take().place.document
        draws += 1
        yield number, draws - came[number]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 50), max_size=400), st.integers(1, 60), st.integers(0, 2**32))
def test_every_example_comes_out_exactly_once(sizes: list[int], capacity: int, seed: int) -> None:
    buffer = ShuffleBuffer(capacity, 500, seed)
    out = [number for number, _ in through(buffer, sizes)]
    assert sorted(out) == list(range(len(sizes)))
    assert buffer.bytes == 0


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 30), st.integers(0, 2**32))
def test_no_example_waits_longer_than_is_promised(capacity: int, seed: int) -> None:
    waits = [wait for _, wait in through(ShuffleBuffer(capacity, 10**9, seed), [1] * 600)]
    assert max(waits) <= (LONGEST_WAIT + 1) * capacity


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 90), min_size=50, max_size=300), st.integers(0, 2**32))
def test_it_holds_no_more_bytes_than_its_limit_and_one_example(sizes: list[int], seed: int) -> None:
    buffer = ShuffleBuffer(1000, 400, seed)
    for _ in through(buffer, sizes):
        assert buffer.bytes < 400 + 90


def test_the_first_example_is_given_after_the_first_few_dozen_came() -> None:
    buffer = ShuffleBuffer(10_000, 10**9, 1)
    assert buffer.lacks == FIRST
    for number in range(FIRST):
        buffer.put(example(number))
    assert buffer.lacks == 0
    buffer.take()
    assert buffer.lacks > 1, "it grows while it is picked from"


def test_the_same_seed_shuffles_alike_and_another_one_otherwise() -> None:
    orders = [
        [number for number, _ in through(ShuffleBuffer(50, 10**9, seed), [1] * 300)]
        for seed in (5, 5, 6)
    ]
    assert orders[0] == orders[1] != orders[2]


def test_a_full_buffer_picks_evenly() -> None:
    """Waits in a full buffer of S are geometric with mean S, cut at 4 S: checked by quartiles."""
    capacity = 100
    waits = [wait for _, wait in through(ShuffleBuffer(capacity, 10**9, 3), [1] * 25_000)]
    settled = waits[2_000:-2_000]
    for share, quantile in ((0.25, 29), (0.5, 69), (0.75, 138)):  # -S ln(1 - share)
        below = sum(wait <= quantile for wait in settled) / len(settled)
        assert below == pytest.approx(share, abs=0.015)
    longest = sum(wait > LONGEST_WAIT * capacity for wait in settled) / len(settled)
    assert longest < 0.02


def test_neighbours_in_a_shard_come_out_far_apart() -> None:
    order = [number for number, _ in through(ShuffleBuffer(100, 10**9, 3), [1] * 5_000)]
    where = {number: at for at, number in enumerate(order)}
    apart = [abs(where[number + 1] - where[number]) for number in range(500, 4_500)]
    # two independent waits with mean S are S apart on average; the cut takes a little of that
    assert sum(apart) / len(apart) == pytest.approx(95, rel=0.1)
    assert sum(distance == 1 for distance in apart) < 60, "1 in 100 by chance"
