"""The image classifier and the images that are drawn for it."""

from __future__ import annotations

import blake3
import pytest
import torch

from models.classifier import SIZES, Classifier, ClassifierSettings
from models.errors import NotThisModel
from models.initial import seeded
from models.synthetic_images import KINDS, SIDE, ImageBatch, synthetic_images
from models.trainable import parameter_count


def test_a_samples_result_does_not_depend_on_those_beside_it() -> None:
    model = Classifier(SIZES["tiny"], 0).double()
    images = synthetic_images(0, range(6)).images
    alone = torch.cat([model(image[None]) for image in images])
    assert torch.allclose(model(images), alone, rtol=1e-10, atol=1e-12)


def test_it_keeps_nothing_beside_its_parameters() -> None:
    model = Classifier(SIZES["tiny"], 0)
    assert not list(model.buffers())
    assert len(model.state_dict()) == len(list(model.parameters()))


def test_its_sizes_have_the_stated_parameters() -> None:
    counts = {name: parameter_count(Classifier(s, None)) for name, s in SIZES.items()}
    assert counts == {"tiny": 77_850, "small": 1_084_202, "base": 13_627_466}


def test_images_of_bytes_and_of_fractions_are_the_same() -> None:
    model = Classifier(SIZES["tiny"], 0)
    images = synthetic_images(0, range(3)).images
    assert torch.allclose(model(images), model(images.float() / 255.0), atol=1e-5)


@pytest.mark.slow
def test_it_learns_the_figures() -> None:
    model = Classifier(SIZES["tiny"], 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(120):
        optimizer.zero_grad()
        model.loss(synthetic_images(0, range(32 * step, 32 * step + 32))).backward()
        optimizer.step()
    unseen = synthetic_images(1, range(200))
    right = (model(unseen.images).argmax(dim=1) == unseen.labels).double().mean()
    assert float(right) > 0.25  # guessing gives 0.1


def test_tensors_of_another_shape_than_images_are_refused() -> None:
    model = Classifier(SIZES["tiny"], 0)
    with pytest.raises(NotThisModel, match="coloured images"):
        model.loss(ImageBatch(torch.zeros(2, 32, 32), torch.zeros(2).long()))
    with pytest.raises(NotThisModel, match="does not learn from text"):
        model.batch_of(torch.zeros(2, 9, dtype=torch.uint8), seeded(0))


def test_images_of_another_side_are_classified_as_well() -> None:
    model = Classifier(ClassifierSettings(side=64), 0)
    assert model(torch.zeros(2, 3, 64, 64, dtype=torch.uint8)).shape == (2, 10)


def test_an_image_is_the_same_bits_whenever_and_with_whomever_it_is_drawn() -> None:
    batch = synthetic_images(3, [5, 2**32 - 1, 0])
    assert torch.equal(synthetic_images(3, [0]).images[0], batch.images[2])
    assert blake3.blake3(batch.images.numpy().tobytes()).hexdigest(8) == "0ee29093a42c9a03"
    assert not torch.equal(synthetic_images(4, [0]).images[0], batch.images[2])


def test_all_kinds_are_drawn_about_as_often() -> None:
    labels = synthetic_images(0, range(1000)).labels
    assert set(labels.tolist()) == set(range(len(KINDS)))
    assert int(torch.bincount(labels).min()) > 60


def test_no_images_are_an_empty_batch() -> None:
    assert synthetic_images(0, []).images.shape == (0, 3, SIDE, SIDE)
