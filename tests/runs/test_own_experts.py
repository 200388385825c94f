"""Experts whose network is a module from the volunteer's disk."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from node.run.checking import check
from node.run.costs import costs_of
from node.run.definition import read_definition
from node.run.experts import call_bytes, maker, saved_bytes
from node.run.mixtures import Mixtures
from node.run.trusted import BrokenModule, UntrustedModule
from protocols.experts import Uid
from tests.runs.expert_definitions import changed

OWN = """
import torch
from torch import nn


class Scaled(nn.Module):
    row_shape = (16,)

    def __init__(self, first):
        super().__init__()
        self.scale = nn.Parameter(torch.full((16,), float(first)))

    def forward(self, rows):
        return rows + self.scale * rows


def build_expert(settings, *, seed):
    return Scaled(settings["first"] + seed % 7)
"""
TEXT = changed('name = "feed-forward"\nwidth = 16\ninner = [32]', 'module = "scaled"\nfirst = 2')
DEFINITION = read_definition(TEXT)
UID = Uid("ffn1", (1, 2))


def trusting(folder: Path, source: str = OWN) -> dict[str, Path]:
    file = folder / "scaled.py"
    file.write_text(source)
    file.chmod(0o644)
    return {"scaled": file}


def test_each_server_makes_the_same_expert_from_the_file(tmp_path: Path) -> None:
    trusted = trusting(tmp_path)
    one, two = maker(DEFINITION, trusted)(UID), maker(DEFINITION, trusted)(UID)
    rows = torch.ones(2, 16)
    assert torch.equal(one.network(rows), two.network(rows))
    assert one.rows.shape == (16,)
    assert saved_bytes(DEFINITION, trusted) == 4 * 3 * 16
    assert call_bytes(DEFINITION, trusted) > (0, 0)
    gradients = one.backward(rows, rows)
    assert gradients.shape == rows.shape
    assert not torch.equal(one.network(rows), two.network(rows))


def test_the_run_is_checked_measured_and_mixed_with_it(tmp_path: Path) -> None:
    trusted = trusting(tmp_path)
    definition, mistakes = check(TEXT, trusted)
    assert (definition, mistakes) == (DEFINITION, [])
    assert costs_of(DEFINITION, trusted).parameters > 0
    mixture = Mixtures(DEFINITION, trusted).mixture("ffn0", 16)
    assert mixture(torch.ones(3, 16)).shape == (3, 16)


def test_nobody_runs_it_who_has_not_trusted_the_file() -> None:
    with pytest.raises(UntrustedModule, match="experts' network is the module scaled"):
        maker(DEFINITION)
    _, mistakes = check(TEXT)
    assert mistakes == [
        "[experts.network] is the module scaled, which is not part of potluck: name its file with "
        "--trust-module PATH/scaled.py."
    ]


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("def build_expert", "def build_experts", "has no function build_expert"),
        ("row_shape = (16,)", "row_shape = 16", "a tuple of sizes, and gave Scaled with 16"),
        ("row_shape = (16,)", "row_shape = (0,)", "a tuple of sizes"),
        ("return Scaled(", "return str(", "a tuple of sizes, and gave str with None"),
        ('settings["first"]', 'settings["second"]', "line 18: build_expert failed"),
    ],
)
def test_a_module_that_is_wrong_is_named_with_its_line(
    tmp_path: Path, old: str, new: str, told: str
) -> None:
    assert old in OWN
    trusted = trusting(tmp_path, OWN.replace(old, new))
    with pytest.raises(BrokenModule, match=re.escape(told)):
        maker(DEFINITION, trusted)
    _, mistakes = check(TEXT, trusted)
    assert any(told in one for one in mistakes), mistakes
