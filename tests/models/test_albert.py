"""ALBERT: its published sizes, its shared layer, and its two losses."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from models.albert import SIZES, Albert, AlbertSettings
from models.errors import NotThisModel, WrongSettings
from models.initial import seeded
from models.trainable import parameter_count

HEADS_FOR_TRAINING = ("order", "guess", "guess_norm", "guess_bias")  # beside the encoder


def without_training_heads(model: Albert) -> int:
    return sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if name.split(".")[0] not in HEADS_FOR_TRAINING
    )


@pytest.mark.parametrize(
    ("size", "millions_in_the_paper", "encoder", "whole"),
    [("base", 12, 11_683_584, 11_813_810), ("large", 18, 17_683_968, 17_847_474)],
)
def test_its_sizes_are_the_published_ones(
    size: str, millions_in_the_paper: int, encoder: int, whole: int
) -> None:
    """`encoder` is transformers' AlbertModel (with its pooler), `whole` AlbertForPreTraining."""
    model = Albert(SIZES[size], None)
    assert without_training_heads(model) == encoder
    assert parameter_count(model) == whole
    assert round(whole / 1e6) == millions_in_the_paper


def test_more_layers_have_no_more_parameters_and_another_result() -> None:
    shallow = AlbertSettings(context=16, width=16, wide=32, embedding=8, layers=1, heads=2)
    deep = AlbertSettings(context=16, width=16, wide=32, embedding=8, layers=3, heads=2)
    one, three = Albert(shallow, 0), Albert(deep, 0)
    assert parameter_count(one) == parameter_count(three)
    ids = torch.randint(256, (2, 16), generator=seeded(0))
    assert not torch.allclose(one(ids, ids * 0), three(ids, ids * 0))


@torch.no_grad()
def test_its_loss_is_of_the_chosen_ids_and_of_the_order() -> None:
    model = Albert(SIZES["tiny"], 0)
    windows = torch.randint(256, (4, model.window), dtype=torch.uint8, generator=seeded(0))
    batch = model.batch_of(windows, seeded(1))
    hidden = model(batch.ids, batch.segments)
    everywhere = model.guesses(hidden)
    guessing = [
        cross_entropy(everywhere[i, batch.positions[i]], batch.targets[i]) for i in range(4)
    ]
    order = cross_entropy(model.orders(hidden), batch.swapped)
    assert torch.allclose(model.loss(batch), torch.stack(guessing).mean() + order)


def test_untrained_it_knows_neither_the_ids_nor_the_order() -> None:
    model = Albert(SIZES["tiny"], 0)
    windows = torch.randint(256, (8, model.window), dtype=torch.uint8, generator=seeded(0))
    loss = float(model.loss(model.batch_of(windows, seeded(1))).detach())
    assert loss == pytest.approx(math.log(260) + math.log(2), abs=0.2)


@pytest.mark.slow
def test_it_learns_to_guess_a_text_of_one_letter() -> None:
    settings = AlbertSettings(context=16, width=16, wide=32, embedding=8, layers=2, heads=2)
    model = Albert(settings, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = seeded(1)
    windows = torch.full((8, model.window), ord("a"), dtype=torch.uint8)
    for _ in range(60):
        optimizer.zero_grad()
        loss = model.loss(model.batch_of(windows, generator))
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < 1.0  # the order of one letter cannot be told: ln 2 remains


def test_samples_longer_than_the_context_are_refused() -> None:
    model = Albert(AlbertSettings(context=16, width=16, wide=32, embedding=8, heads=2), 0)
    windows = torch.zeros(1, 14, dtype=torch.uint8)
    with pytest.raises(NotThisModel, match="17 ids"):
        model.loss(model.batch_of(windows, seeded(0)))


def test_heads_that_do_not_share_the_width_are_refused() -> None:
    with pytest.raises(WrongSettings, match="multiple of the heads"):
        Albert(AlbertSettings(width=100, heads=3), None)
