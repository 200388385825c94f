"""What a peer tells the others of itself: `Standing`."""

from __future__ import annotations

import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from protocols.accumulation.estimate import Estimate
from protocols.accumulation.lifecycle import Estimated, Fetch, Mode
from protocols.accumulation.lineage import Elsewhere, FindingKind
from protocols.accumulation.parameters import Parameters
from protocols.accumulation.progress_slot import ProgressSlot
from protocols.accumulation.standing import Batch, Standing
from protocols.accumulation.steps import GradientSteps
from protocols.identity import PeerId

HISTORY = b"h" * 16
AHEAD = Elsewhere(FindingKind.BEHIND, 7, None, frozenset([PeerId("one")]), "The run is further.")


def standing_of(weight: nn.Parameter, told: list[ProgressSlot]) -> Standing:
    bridge: Any = SimpleNamespace(
        keeper=None,
        settings=SimpleNamespace(begins=True),
        note=lambda slot, **_: told.append(slot),
        tell=lambda _: None,
    )
    steps = GradientSteps(
        Parameters([("weight", weight)]),
        partial(torch.optim.SGD, lr=1.0),
        None,
        max_norm=None,
        codec="none",
        scales_loss=False,
        delayed=False,
        buffers={},
    )
    return Standing(bridge, steps, Mode(100), history=HISTORY, signature=bytes(16))


def test_a_batch_that_a_fetch_makes_void_is_not_told_of_as_under_way() -> None:
    told: list[ProgressSlot] = []
    weight = nn.Parameter(torch.ones(2))
    standing = standing_of(weight, told)
    standing.tell(Estimated(Estimate(1, 0, HISTORY)))
    weight.grad = torch.ones(2)
    standing.begin_batch()
    assert told[-1].under_way == 0.0
    standing.count(Batch(10))
    standing.begin_batch()
    assert (told[-1].samples, told[-1].under_way) == (10, 0.0)
    *_, fetch = standing.tell(Estimated(Estimate(2, 0, HISTORY, behind=AHEAD)))
    assert isinstance(fetch, Fetch)
    assert (told[-1].samples, told[-1].under_way) == (0, -1.0)
    standing.count(Batch(10))
    assert told[-1].samples == 0


def test_batches_are_counted_while_it_is_computed_what_was_lost_of_the_last_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a billion values that takes 20 s."""
    told: list[ProgressSlot] = []
    weight = nn.Parameter(torch.ones(2))
    standing = standing_of(weight, told)
    standing.tell(Estimated(Estimate(1, 0, HISTORY)))
    begun = standing.begin_round(1)

    def done_with(_steps: GradientSteps, *_: object) -> None:
        weight.grad = torch.ones(2)
        counting = threading.Thread(target=standing.count, args=(Batch(10),), daemon=True)
        counting.start()
        counting.join(10.0)
        assert not counting.is_alive()

    monkeypatch.setattr(GradientSteps, "done_with", done_with)
    standing.is_in_step(begun)
    assert told[-1].samples == 10
