"""Properties that hold for every model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import blake3
import msgspec
import pytest
import torch

from models.albert import Albert, AlbertSettings
from models.classifier import Classifier, ClassifierSettings
from models.errors import WrongSettings
from models.gpt import GPT, GPTSettings
from models.initial import fill_evenly, seeded
from models.registry import MODELS, build_model
from models.synthetic_images import synthetic_images
from models.trainable import Trainable, on_device, parameter_count
from tests.models.kept_memory import kept_bytes

TINY = [{"name": name, "size": "tiny"} for name in MODELS]
every_model = pytest.mark.parametrize("settings", TINY, ids=[str(s["name"]) for s in TINY])


def batch_for(model: Trainable, samples: int, seed: int = 0) -> Any:
    made_of: Any
    if model.window:
        shape = (samples, model.window)
        made_of = torch.randint(256, shape, dtype=torch.uint8, generator=seeded(seed))
    else:
        made_of = synthetic_images(seed, range(samples))
    return model.batch_of(made_of, seeded(seed + 1))


def part_of(batch: Any, first: int, last: int) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch[first:last]
    return type(batch)(*(tensor[first:last] for tensor in batch))


# Of all parameters' bytes in order. If one of these changes, peers with the old and with the new
# version of potluck begin different runs: that must be deliberate, and told.
BEGINNINGS = {
    "gpt": "9b148e543e8db4edf5aa8be3fa8f584d",
    "albert": "9d53e30bb60d5413d6dce3db26bd73e0",
    "classifier": "cb80920d5a855cfae4621083efe4569b",
    "swav": "e47f4f60cb701a6d0b3b51930904bd0a",
    "transformers": "fa00c83845adbbcaccd0785673c913e3",
}


@every_model
def test_the_same_seed_gives_the_same_bits_in_every_version_and_on_every_machine(
    settings: dict[str, Any],
) -> None:
    hasher = blake3.blake3()
    for parameter in build_model(settings, seed=7).parameters():
        hasher.update(parameter.detach().numpy().tobytes())
    assert hasher.hexdigest(16) == BEGINNINGS[settings["name"]]


@every_model
def test_another_seed_gives_another_network(settings: dict[str, Any]) -> None:
    one, other = build_model(settings, seed=1), build_model(settings, seed=2)
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b) == (a.dim() < 2), name


@every_model
def test_torchs_global_generator_is_neither_used_nor_moved(settings: dict[str, Any]) -> None:
    before = torch.get_rng_state()
    model = build_model(settings, seed=1)
    model.loss(batch_for(model, 2)).backward()
    assert torch.equal(torch.get_rng_state(), before)


@every_model
def test_every_parameter_is_finite_and_gets_a_gradient(settings: dict[str, Any]) -> None:
    model = build_model(settings, seed=1)
    model.loss(batch_for(model, 2)).backward()
    for name, parameter in model.named_parameters():
        assert torch.isfinite(parameter).all(), name
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name


# With swav, codes depend on the samples beside them: tests/models/test_swav.py.
@pytest.mark.parametrize(
    "settings",
    [one for one in TINY if one["name"] != "swav"],
    ids=[name for name in MODELS if name != "swav"],
)
def test_the_loss_is_the_mean_over_samples_so_peers_gradients_add_up(
    settings: dict[str, Any],
) -> None:
    model = build_model(settings, seed=1).double()
    batch = batch_for(model, 5)
    assert model.samples_in(batch) == 5
    model.loss(batch).backward()
    whole = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    for first, last in ((0, 1), (1, 5)):  # two peers of unequal speed
        part = part_of(batch, first, last)
        (model.loss(part) * (last - first) / 5).backward()
    for a, b in zip(whole, model.parameters(), strict=True):
        assert b.grad is not None
        assert torch.allclose(a, b.grad, rtol=1e-10, atol=1e-14)


@every_model
def test_a_whole_batch_can_be_moved_to_another_device(settings: dict[str, Any]) -> None:
    batch = on_device(batch_for(build_model(settings, seed=None), 2), "meta")
    tensors = [batch] if isinstance(batch, torch.Tensor) else list(batch)
    assert all(tensor.is_meta for tensor in tensors)


@every_model
def test_bf16_autocast_gives_nearly_the_same_loss_in_float32(settings: dict[str, Any]) -> None:
    model = build_model(settings, seed=1)
    batch = batch_for(model, 4)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model.loss(batch)
    assert loss.dtype == torch.float32
    loss.backward()
    assert float(loss.detach()) == pytest.approx(float(model.loss(batch).detach()), rel=0.01)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


@every_model
def test_its_plain_settings_build_the_same_network_again(settings: dict[str, Any]) -> None:
    model = build_model(settings, seed=4)
    plain = msgspec.json.decode(msgspec.json.encode(model.plain_settings()))
    again = build_model(plain, seed=4)
    for (name, a), (same, b) in zip(
        model.named_parameters(), again.named_parameters(), strict=True
    ):
        assert name == same
        assert torch.equal(a, b)


@every_model
def test_without_a_seed_it_takes_no_memory_and_has_the_same_shapes(
    settings: dict[str, Any],
) -> None:
    real, empty = build_model(settings, seed=0), build_model(settings, seed=None)
    assert {n: t.shape for n, t in real.state_dict().items()} == {
        n: t.shape for n, t in empty.state_dict().items()
    }
    assert all(parameter.is_meta for parameter in empty.parameters())


@every_model
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_the_estimate_of_memory_is_near_what_is_kept(
    settings: dict[str, Any], precision: torch.dtype
) -> None:
    model = build_model(settings, seed=0)
    estimate = model.memory(8, precision.itemsize)
    copies = estimate.parameters - 4 * parameter_count(model)
    kept = kept_bytes(model, batch_for(model, 8), precision)
    assert 0.9 * kept < estimate.activations + copies < 1.3 * kept


@every_model
def test_parameters_gradients_and_statistics_are_estimated_exactly(
    settings: dict[str, Any],
) -> None:
    model = build_model(settings, seed=0)
    optimizer = torch.optim.AdamW(model.parameters())
    model.loss(batch_for(model, 1)).backward()
    optimizer.step()
    statistics = sum(
        value.nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if value.dim()
    )
    estimate = model.memory(0)
    assert estimate.parameters == estimate.gradients == 4 * parameter_count(model)
    assert estimate.statistics == statistics
    assert estimate.activations == 0
    assert estimate.total == 4 * estimate.parameters


@pytest.mark.parametrize(
    "made",
    [
        lambda: GPT(GPTSettings(heads=0)),
        lambda: GPT(GPTSettings(width=-4)),
        lambda: Albert(AlbertSettings(layers=0)),
        lambda: Classifier(ClassifierSettings(width=12)),
    ],
)
def test_shapes_made_in_python_are_checked_like_those_of_a_file(made: Callable[[], object]) -> None:
    with pytest.raises(WrongSettings, match="cannot be right"):
        made()


@pytest.mark.parametrize("seed", [-1, 1 << 32])
def test_a_seed_that_torch_would_take_for_another_one_is_refused(seed: int) -> None:
    with pytest.raises(WrongSettings, match="from 0 to 4294967295"):
        build_model({"name": "gpt"}, seed=seed)


def test_initial_values_are_even_symmetric_and_of_the_asked_deviation() -> None:
    values = torch.empty(1000, 100)
    fill_evenly(values, 0.02, seeded(0))
    assert float(values.std()) == pytest.approx(0.02, rel=0.01)
    assert abs(float(values.mean())) < 2e-4
    assert float(values.abs().max()) <= 0.02 * 3**0.5 * (1 + 1e-6)


def test_initial_values_are_whole_numbers_times_one_float32() -> None:
    """The reason why no machine can round them otherwise."""
    values = torch.empty(4096)
    fill_evenly(values, 0.02, seeded(0))
    steps = torch.randint(1 << 24, (4096,), generator=seeded(0))
    unit = torch.tensor(0.02 * 3**0.5 / (1 << 24), dtype=torch.float32)
    assert torch.equal(values, (2 * steps + 1 - (1 << 24)).float() * unit)
