"""SwAV: its codes, its loss and its queue, compared with the paper's formulas."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models.data.batches import ImageBatches
from models.errors import NotThisModel, WrongSettings
from models.initial import seeded
from models.registry import build_model, optimizer_factory, schedule_factory
from models.swav import SIZES, CropBatch, Swav, sinkhorn, swapped_loss
from models.synthetic_images import synthetic_images
from models.trainable import parameter_count
from tests.models.openers import one_source, opened

SMALL = {"name": "swav", "hidden": 16, "features": 8, "prototypes": 6, "epsilon": 0.05, "queue": 6}


def model_of(**changes: Any) -> Swav:
    model = build_model({**SMALL, **changes}, seed=0)
    assert isinstance(model, Swav)
    return model


def batch_of(model: Swav, samples: int = 4, seed: int = 0) -> CropBatch:
    return model.batch_of(synthetic_images(seed, range(samples)), seeded(seed))


def cosines(samples: int, prototypes: int) -> Tensor:
    drawn = torch.randint(-1000, 1001, (samples, prototypes), generator=seeded(samples))
    return drawn.double() / 1000.0


def test_codes_are_shares_that_use_all_prototypes_equally() -> None:
    codes = sinkhorn(cosines(12, 4), epsilon=0.05, rounds=200)
    assert torch.allclose(codes.sum(dim=1), torch.ones(12).double(), atol=1e-12)
    assert torch.allclose(codes.sum(dim=0), torch.full((4,), 3.0).double(), atol=1e-3)


def test_three_rounds_are_those_of_the_papers_listing() -> None:
    scores = cosines(10, 4)
    q = (scores / 0.05).exp().T  # appendix A.1: K x B
    q /= q.sum()
    for _ in range(3):
        u = q.sum(dim=1)
        q *= ((torch.ones(4).double() / 4) / u)[:, None]
        q *= ((torch.ones(10).double() / 10) / q.sum(dim=0))[None]
    wanted = (q / q.sum(dim=0, keepdim=True)).T
    assert torch.allclose(sinkhorn(scores, 0.05, 3), wanted, rtol=1e-12, atol=0.0)


def test_the_loss_predicts_each_large_crops_code_from_every_other_crop() -> None:
    scores = torch.stack([cosines(5, 6) * (1 - crop / 10) for crop in range(4)], dim=1)
    codes = torch.stack([sinkhorn(scores[:, crop], 0.05, 3) for crop in range(2)], dim=1)
    total, pairs = 0.0, 0
    for s in range(2):
        for v in range(4):
            if v == s:
                continue
            guesses = (scores[:, v] / 0.1).softmax(dim=1).log()
            total -= float((codes[:, s] * guesses).sum(dim=1).mean())
            pairs += 1
    assert float(swapped_loss(scores, codes, 0.1)) == pytest.approx(total / pairs, rel=1e-12)


def test_features_and_prototypes_have_length_one() -> None:
    model = model_of().double()
    features = model(synthetic_images(0, range(3)).images)
    assert torch.allclose(features.norm(dim=1), torch.ones(3).double())
    assert float(model.scores(features).detach().abs().max()) <= 1.0 + 1e-12


def test_codes_have_no_gradient() -> None:
    model = model_of()
    features = model(synthetic_images(0, range(3)).images)[:, None].expand(-1, 2, -1)
    assert not model.codes(features).requires_grad


def test_the_queue_takes_part_when_it_is_full_and_has_the_newest_features_first() -> None:
    model = model_of().double()
    first, second, third = (
        torch.nn.functional.normalize(torch.randn(4, 2, 8, generator=seeded(n)), dim=2).double()
        for n in range(3)
    )
    alone = model.codes(first)
    model.codes(second)
    queue = torch.cat([second, first[:2]]).transpose(0, 1)  # 6 of 8 have room
    assert torch.allclose(model.queue, queue)
    with_queue = model.codes(third)
    for crop in range(2):
        assert torch.allclose(alone[:, crop], sinkhorn(model.scores(first[:, crop]), 0.05, 3))
        together = torch.cat([third[:, crop], queue[crop]])
        wanted = sinkhorn(model.scores(together), 0.05, 3)[:4]
        assert torch.allclose(with_queue[:, crop], wanted)


def test_a_batch_larger_than_the_queue_fills_it() -> None:
    model = model_of(queue=3).double()
    model.loss(batch_of(model))
    assert bool(model.queue.any(dim=2).all())


def test_evaluating_leaves_the_queue_alone() -> None:
    model = model_of(queue=3).eval()
    model.loss(batch_of(model))
    assert not model.queue.any()


def test_the_queue_is_no_part_of_the_models_state() -> None:
    assert "queue" not in model_of().state_dict()


def test_at_first_prototypes_are_frozen_and_the_queue_is_empty() -> None:
    model = model_of(frozen=2, queue_from=3, queue=3)
    for step in range(5):
        model.at_step(step)
        model.zero_grad()
        model.loss(batch_of(model, seed=step)).backward()  # type: ignore[no-untyped-call]
        assert (model.prototypes.weight.grad is None) == (step < 2)
        assert bool(model.queue.any()) == (step >= 3)


def test_with_given_codes_the_loss_is_the_mean_over_samples_so_peers_gradients_add_up() -> None:
    model = model_of(queue=0).double()
    batch = batch_of(model, 5)
    with torch.no_grad():
        seen = model(batch.large.flatten(0, 1)).view(5, 2, -1)
        codes = model.codes(seen)

    def gradients(first: int, last: int) -> list[Tensor]:
        model.zero_grad()
        crops = [part[first:last] for part in batch]
        features = [model(one.flatten(0, 1)).unflatten(0, one.shape[:2]) for one in crops]
        scores = model.scores(torch.cat(features, dim=1))
        swapped_loss(scores, codes[first:last], 0.1).backward()  # type: ignore[no-untyped-call]
        return [one.grad.clone() for one in model.parameters() if one.grad is not None]

    whole, parts = gradients(0, 5), (gradients(0, 2), gradients(2, 5))
    for a, b, c in zip(whole, *parts, strict=True):
        assert torch.allclose(a, 0.4 * b + 0.6 * c, rtol=1e-10, atol=1e-14)


def test_its_sizes_have_the_stated_parameters() -> None:
    counts = {name: parameter_count(Swav(s, None)) for name, s in SIZES.items()}
    assert counts == {"tiny": 23_320, "base": 5_501_120}


def test_areas_in_the_wrong_order_are_refused() -> None:
    with pytest.raises(WrongSettings, match=r"from 0\.5 to 0\.2 of a picture"):
        model_of(areas=[0.5, 0.2])


def test_text_is_refused() -> None:
    with pytest.raises(NotThisModel, match="does not learn from text"):
        model_of().batch_of(torch.zeros(2, 9, dtype=torch.uint8), seeded(0))  # type: ignore[arg-type]


def test_pictures_need_no_labels(tmp_path: Path) -> None:
    (tmp_path / "pictures.txt").write_text("x" * 11 + "\n" + "y" * 12 + "\n")
    settings = one_source("text", tmp_path / "pictures.txt", piece_bytes=0)
    with opened(settings) as data:
        pictures = ImageBatches(data, rows=2, shape=(3, 2, 2), classes=None)
        batch = next(pictures)
    assert batch.images.flatten().tolist() == [ord("y")] * 12
    assert batch.labels.tolist() == [0]
    assert pictures.passed_over == 1


@pytest.mark.soak
def test_it_learns_more_than_to_find_all_prototypes_equally_likely() -> None:
    model = model_of(size="tiny", queue=0, prototypes=32, hidden=64, features=16, epsilon=0.03)
    lars = {"name": "lars", "lr": 5.0, "weight_decay": 1e-6, "trust": 2e-3}
    optimizer = optimizer_factory(lars)(model.named_parameters())
    schedule = schedule_factory({"name": "cosine", "warmup": 10, "steps": 150})(optimizer)
    generator, losses = seeded(1), []
    for step in range(150):
        optimizer.zero_grad()
        images = synthetic_images(0, range(64 * step, 64 * step + 64))
        loss = model.loss(model.batch_of(images, generator))
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    assert sum(losses[-10:]) / 10 < math.log(32) - 0.03
