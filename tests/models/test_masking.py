"""Examples for masked language modelling with sentence order."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.errors import NotThisModel, WrongSettings
from models.initial import seeded
from models.masking import (
    ALBERT_VOCABULARY,
    BYTE_VOCABULARY,
    LONGEST_RUN,
    MaskedBatch,
    Vocabulary,
    chosen_in,
    masked_batch,
)


def windows(samples: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(256, (samples, length), dtype=torch.uint8, generator=seeded(seed))


def restored(batch: MaskedBatch) -> Tensor:
    return batch.ids.scatter(1, batch.positions, batch.targets)


@settings(max_examples=30)
@given(samples=st.integers(1, 6), length=st.integers(2, 40), seed=st.integers(0, 1000))
def test_every_example_is_its_window_in_two_segments(samples: int, length: int, seed: int) -> None:
    text = windows(samples, length, seed)
    batch = masked_batch(text, BYTE_VOCABULARY, seeded(seed))
    for row, ids, segments, swapped in zip(
        text.tolist(),
        restored(batch).tolist(),
        batch.segments.tolist(),
        batch.swapped.tolist(),
        strict=True,
    ):
        first_end = ids.index(BYTE_VOCABULARY.sep)
        first, second = ids[1:first_end], ids[first_end + 1 : -1]
        assert ids[0] == BYTE_VOCABULARY.cls
        assert ids[-1] == BYTE_VOCABULARY.sep
        assert first
        assert second
        assert (second + first if swapped else first + second) == row
        assert segments == [0] * (first_end + 1) + [1] * (len(ids) - first_end - 1)


@settings(max_examples=30)
@given(length=st.integers(2, 80), seed=st.integers(0, 1000))
def test_each_sample_has_the_same_number_of_chosen_ids_all_of_them_text(
    length: int, seed: int
) -> None:
    batch = masked_batch(windows(3, length, seed), BYTE_VOCABULARY, seeded(seed))
    assert batch.positions.shape == batch.targets.shape == (3, chosen_in(length))
    assert (batch.targets < 256).all()
    assert (batch.positions.diff(dim=1) > 0).all()  # in order, none twice


def test_fifteen_percent_are_chosen() -> None:
    assert [chosen_in(length) for length in (2, 10, 125, 509)] == [1, 2, 19, 76]


def test_of_the_chosen_80_percent_are_masked_10_random_and_10_as_they_were() -> None:
    text = torch.full((400, 200), ord("x"), dtype=torch.uint8)
    batch = masked_batch(text, BYTE_VOCABULARY, seeded(0))
    given_ids = batch.ids.gather(1, batch.positions)
    masked = (given_ids == BYTE_VOCABULARY.mask).double().mean()
    kept = (given_ids == ord("x")).double().mean()
    assert float(masked) == pytest.approx(0.8, abs=0.01)
    assert float(kept) == pytest.approx(0.1, abs=0.01)


def test_ids_that_are_not_chosen_stay_unchanged() -> None:
    text = windows(20, 60)
    batch = masked_batch(text, BYTE_VOCABULARY, seeded(0))
    elsewhere = torch.ones_like(batch.ids, dtype=torch.bool).scatter(1, batch.positions, False)
    assert torch.equal(batch.ids[elsewhere], restored(batch)[elsewhere])


def test_half_of_the_samples_are_swapped() -> None:
    batch = masked_batch(windows(2000, 8), BYTE_VOCABULARY, seeded(0))
    assert float(batch.swapped.double().mean()) == pytest.approx(0.5, abs=0.03)


def test_ids_are_chosen_in_runs_and_the_longest_are_the_rarest() -> None:
    # If few are chosen, runs seldom touch each other, and have the lengths that were drawn
    batch = masked_batch(windows(3000, 27), BYTE_VOCABULARY, seeded(0))
    lengths: Counter[int] = Counter()
    for row in batch.positions.tolist():
        run = 1
        for before, after in zip(row, [*row[1:], -1], strict=True):
            if after == before + 1:
                run += 1
            else:
                lengths[run] += 1
                run = 1
    assert max(lengths) >= LONGEST_RUN
    assert lengths[1] > lengths[2] > lengths[3] > 0


def test_every_place_of_the_text_is_chosen_about_as_often() -> None:
    batch = masked_batch(windows(4000, 40), BYTE_VOCABULARY, seeded(0))
    often = torch.bincount(batch.positions.flatten(), minlength=43)[1:42].double()
    assert float(often[5:14].mean() / often[27:36].mean()) == pytest.approx(1.0, abs=0.1)


def test_the_same_generator_gives_the_same_batch() -> None:
    one, same, other = (
        masked_batch(windows(4, 30), BYTE_VOCABULARY, seeded(seed)) for seed in (1, 1, 2)
    )
    assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
    assert not torch.equal(one.ids, other.ids)


def test_given_token_ids_are_taken_with_their_own_vocabulary() -> None:
    pieces = torch.randint(1, 30_000, (2, 100), generator=seeded(0))
    batch = masked_batch(pieces, ALBERT_VOCABULARY, seeded(1))
    assert batch.ids[:, 0].tolist() == [2, 2]
    assert batch.ids[:, -1].tolist() == [3, 3]


def test_ids_that_the_vocabulary_does_not_have_are_refused() -> None:
    with pytest.raises(NotThisModel, match="from 1 to 300"):
        masked_batch(torch.tensor([[1, 300]]), BYTE_VOCABULARY, seeded(0))


@pytest.mark.parametrize("shape", [(3, 1), (5,)])
def test_windows_that_cannot_be_cut_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(NotThisModel, match="two segments"):
        masked_batch(torch.zeros(shape, dtype=torch.uint8), BYTE_VOCABULARY, seeded(0))


def test_a_vocabulary_without_its_own_specials_is_refused() -> None:
    with pytest.raises(WrongSettings, match="none of number 259"):
        Vocabulary(size=256, first=0, last=255, pad=256, cls=257, sep=258, mask=259)
