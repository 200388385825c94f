"""The default model: its shape, its loss, and what it writes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.overrides import TorchFunctionMode

from models.errors import NotThisModel, WrongSettings
from models.gpt import GPT, SIZES, GPTSettings
from models.initial import seeded
from models.trainable import parameter_count

SMALLEST = GPTSettings(context=8, width=16, layers=1, heads=2)


def test_with_gpt2s_vocabulary_it_has_gpt2s_124_439_808_parameters() -> None:
    gpt2 = GPTSettings(context=1024, width=768, layers=12, heads=12, vocabulary=50_257)
    assert parameter_count(GPT(gpt2, None)) == 124_439_808


def test_its_sizes_have_the_stated_parameters() -> None:
    counts = {name: parameter_count(GPT(settings, None)) for name, settings in SIZES.items()}
    assert counts == {
        "tiny": 437_760,
        "small": 10_844_160,
        "base": 86_039_040,
        "large": 303_622_144,
    }


def test_untrained_it_knows_nothing_of_the_next_byte() -> None:
    model = GPT(SIZES["tiny"], 0)
    batch = torch.randint(256, (8, model.window), dtype=torch.uint8, generator=seeded(0))
    assert float(model.loss(batch).detach()) == pytest.approx(math.log(256), abs=0.1)


@torch.no_grad()
def test_no_position_sees_what_comes_after_it() -> None:
    model = GPT(SMALLEST, 0)
    ids = torch.randint(256, (1, 8), generator=seeded(0))
    changed = ids.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 256
    before, after = model(ids), model(changed)
    assert torch.equal(before[0, :5], after[0, :5])
    assert not torch.equal(before[0, 5], after[0, 5])


@torch.no_grad()
def test_its_loss_is_that_of_each_byte_after_those_before_it() -> None:
    model = GPT(SMALLEST, 0)
    batch = torch.randint(256, (3, 9), dtype=torch.uint8, generator=seeded(0))
    losses = [cross_entropy(model(row[None, :-1].long())[0], row[1:].long()) for row in batch]
    assert torch.allclose(model.loss(batch), torch.stack(losses).mean())


class AppleGpu(TorchFunctionMode):
    """Only what was copied to the processor can be made float64."""

    def __init__(self) -> None:
        super().__init__()
        self._copied: list[Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.double and not any(args[0] is one for one in self._copied):
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        result = func(*args, **(kwargs or {}))
        if func is Tensor.cpu:
            self._copied.append(result)
        return result


def test_it_writes_on_a_device_without_float64() -> None:
    model = GPT(SMALLEST, 0)
    there = bytes(model.generate(b"a", 5, generator=seeded(0)))
    with AppleGpu():
        assert bytes(model.generate(b"a", 5, generator=seeded(0))) == there


@pytest.mark.slow
def test_it_learns_a_text_by_heart_in_sixty_steps() -> None:
    model = GPT(SMALLEST, 0)
    text = torch.tensor([list(b"potluck! " * 2)], dtype=torch.uint8)[:, :9]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        loss = model.loss(text)
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < 0.1
    written = bytes(model.generate(b"p", 7, generator=seeded(0), temperature=0.0))
    assert written == b"otluck!"


def test_the_seed_decides_the_text() -> None:
    model = GPT(SMALLEST, 0)
    one, same, other = (bytes(model.generate(b"a", 30, generator=seeded(s))) for s in (1, 1, 2))
    assert one == same != other


def test_it_writes_on_beyond_its_context_and_from_nothing() -> None:
    model = GPT(SMALLEST, 0)
    assert len(list(model.generate(b"longer than the context", 20, generator=seeded(0)))) == 20
    assert len(list(model.generate(b"", 3, generator=seeded(0)))) == 3


@pytest.mark.parametrize("shape", [(2, 10), (2, 1), (9,)])
def test_windows_that_do_not_fit_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(NotThisModel, match="windows of 2 to 9 bytes"):
        GPT(SMALLEST, 0).loss(torch.zeros(shape, dtype=torch.uint8))


def test_heads_that_do_not_share_the_width_are_refused() -> None:
    with pytest.raises(WrongSettings, match="multiple of the heads"):
        GPT(GPTSettings(width=100, heads=3), None)
