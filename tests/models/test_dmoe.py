"""Models with mixtures of experts, around a stand-in for the mixtures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models.errors import WrongSettings
from models.initial import seeded
from models.registry import MIXED_MODELS, build_model
from models.synthetic_images import synthetic_images
from models.trainable import Trainable, parameter_count
from tests.models.kept_memory import kept_bytes

ACTIVE = 4  # experts of an example

TINY = [{"name": name, "size": "tiny"} for name in MIXED_MODELS]
every_model = pytest.mark.parametrize("settings", TINY, ids=[str(one["name"]) for one in TINY])


class StandIn(nn.Module):
    """Keeps what a mixture keeps: its input, the answers, and their mixture, in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, ACTIVE)

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(self.gate(x).float(), dim=1)
        with torch.autocast("cpu", enabled=False):
            answers = torch.stack([x.float() * (1 + one) for one in range(ACTIVE)], dim=1)
            return torch.bmm(weights.unsqueeze(1), answers.flatten(2)).view_as(x).to(x.dtype)


def stand_in(made: list[tuple[str, int]] | None = None) -> Callable[[str, int], nn.Module]:
    def mixture(name: str, width: int) -> nn.Module:
        if made is not None:
            made.append((name, width))
        return StandIn(width)

    return mixture


def batch_for(model: Trainable, samples: int) -> Any:
    if model.window:
        return torch.randint(1, 128, (samples, model.window), dtype=torch.uint8)
    return synthetic_images(0, range(samples))


@every_model
def test_each_layer_asks_for_its_mixture_by_name(settings: dict[str, Any]) -> None:
    made: list[tuple[str, int]] = []
    build_model({**settings, "layers": 3, "width": 32}, seed=0, mixture=stand_in(made))
    assert made == [("ffn0", 32), ("ffn1", 32), ("ffn2", 32)]


@every_model
def test_the_seed_decides_all_parameters_gates_too(settings: dict[str, Any]) -> None:
    torch.manual_seed(1)
    one = build_model(settings, seed=3, mixture=stand_in())
    torch.manual_seed(2)
    other, third = (build_model(settings, seed=seed, mixture=stand_in()) for seed in (3, 4))
    for (name, ours), theirs in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    gates = [name for name, _ in one.named_parameters() if name.endswith("gate.weight")]
    assert len(gates) == 2
    for name in gates:
        assert not torch.equal(one.get_parameter(name), third.get_parameter(name))


@every_model
def test_the_plain_settings_build_the_same_model(settings: dict[str, Any]) -> None:
    model = build_model(settings, seed=3, mixture=stand_in())
    again = build_model(model.plain_settings(), seed=3, mixture=stand_in())
    for ours, theirs in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@every_model
def test_without_values_the_shapes_are_the_same(settings: dict[str, Any]) -> None:
    real, empty = (build_model(settings, seed=seed, mixture=stand_in()) for seed in (0, None))
    assert all(one.is_meta for one in empty.parameters())
    assert parameter_count(real) == parameter_count(empty)


@every_model
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_the_estimate_of_memory_is_near_what_is_kept(
    settings: dict[str, Any], precision: torch.dtype
) -> None:
    model = build_model(settings, seed=0, mixture=stand_in())
    estimate = model.memory(8, precision.itemsize)
    copies = estimate.parameters - 4 * parameter_count(model)
    kept = kept_bytes(model, batch_for(model, 8), precision)
    assert 0.8 * kept < estimate.activations + copies < 1.4 * kept


@every_model
def test_a_model_with_mixtures_needs_experts(settings: dict[str, Any]) -> None:
    with pytest.raises(WrongSettings, match="there are no experts"):
        build_model(settings, seed=0)


def test_each_token_is_an_example_of_its_own() -> None:
    seen: list[tuple[int, ...]] = []

    class Seeing(StandIn):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(tuple(x.shape))
            return super().forward(x)

    settings = {"name": "dmoe_gpt", "size": "tiny", "context": 16}
    model = build_model(settings, seed=0, mixture=lambda _, width: Seeing(width))
    model.loss(torch.randint(1, 128, (3, 17), generator=seeded(0)))
    assert seen == [(3 * 16, 128)] * 2
