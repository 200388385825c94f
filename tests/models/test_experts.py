"""Expert networks: rows to rows of the same shape, and the same bits for the same seed."""

from __future__ import annotations

from typing import Any

import blake3
import pytest
import torch
from torch import nn

from models.errors import WrongSettings
from models.experts import EXPERTS, build_expert

SMALL: dict[str, dict[str, Any]] = {
    "feed-forward": {"name": "feed-forward", "width": 16, "inner": [32, 24]},
    "transformer": {"name": "transformer", "width": 16, "sequence": 5, "heads": 4, "inner": 32},
    "gated": {"name": "gated", "width": 16, "inner": 24},
    "nop": {"name": "nop", "width": 16},
}
every_expert = pytest.mark.parametrize("settings", SMALL.values(), ids=SMALL)


def test_every_kind_is_tried_here() -> None:
    assert SMALL.keys() == EXPERTS.keys()


@every_expert
def test_rows_come_back_in_their_shape(settings: dict[str, Any]) -> None:
    network = build_expert(settings, seed=1)
    rows = torch.randn(3, *network.row_shape)
    assert network(rows).shape == rows.shape
    assert network(rows).isfinite().all()


@every_expert
def test_a_row_is_computed_alike_whatever_else_is_in_the_batch(settings: dict[str, Any]) -> None:
    network = build_expert(settings, seed=1)
    rows = torch.randn(6, *network.row_shape)
    alone = torch.cat([network(row.unsqueeze(0)) for row in rows])
    torch.testing.assert_close(network(rows), alone)


@every_expert
def test_a_second_pass_is_the_same_function(settings: dict[str, Any]) -> None:
    network = build_expert(settings, seed=1)
    rows = torch.randn(3, *network.row_shape)
    assert torch.equal(network(rows), network(rows))


@every_expert
def test_gradients_reach_the_inputs_and_every_parameter(settings: dict[str, Any]) -> None:
    network = build_expert(settings, seed=1)
    rows = torch.randn(3, *network.row_shape, requires_grad=True)
    network(rows).square().sum().backward()
    assert all(one.grad is not None and one.grad.any() for one in (rows, *network.parameters()))


# Of all parameters' bytes in order. If one of these changes, old and new servers begin different
# experts from one seed.
BEGINNINGS = {
    "feed-forward": "c83a5698ce9a55261685ccb66a0015ba",
    "transformer": "60404ddc84c4c989784461d1769fd456",
    "gated": "20fe680c6d382f135382baef9905093a",
    "nop": "af1349b9f5f9a1a6a0404dea36dcc949",  # of nothing
}


@every_expert
def test_the_same_seed_gives_the_same_bits(settings: dict[str, Any]) -> None:
    hasher = blake3.blake3()
    for parameter in build_expert(settings, seed=7).parameters():
        hasher.update(parameter.detach().numpy().tobytes())
    assert hasher.hexdigest(16) == BEGINNINGS[settings["name"]]


def test_the_defaults_are_the_blocks_of_the_paper() -> None:
    network = build_expert({"name": "feed-forward"}, seed=None)
    layers = [one for one in network.modules() if isinstance(one, nn.Linear)]
    widths = [1024, 4096, 4096, 1024]
    assert [layer.in_features for layer in layers] == widths[:-1]
    assert [layer.out_features for layer in layers] == widths[1:]
    assert build_expert({"name": "transformer"}, seed=None).row_shape == (512, 1024)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"name": "feed-foward"}, "Did you mean feed-forward?"),
        ({"name": "gated", "with": 8}, "Did you mean width?"),
        ({"name": "feed-forward", "inner": []}, "'inner' of the expert feed-forward"),
        ({"name": "feed-forward", "width": 0}, "'width' of the expert feed-forward"),
        ({"name": "transformer", "width": 10, "heads": 3}, "multiple of the heads"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(WrongSettings) as refused:
        build_expert(settings, seed=None)
    assert said in str(refused.value)
