"""The compiler's stand-in. That a whole start does without the compiler is seen where volunteers
leave nothing behind: it would leave a folder (tests/processes/test_joining.py)."""

from __future__ import annotations

import importlib
import sys

import pytest

from node.training.compiler_kept_out import StandIn

NAME = "colorsys"  # any module that nobody needs


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    one = StandIn(NAME)
    monkeypatch.setitem(sys.modules, NAME, one)
    return one


def test_it_takes_what_optimizers_say(stand_in: StandIn) -> None:
    assert stand_in.disable(len, recursive=False) is len
    stand_in.graph_break()
    assert sys.modules[NAME] is stand_in


def test_it_gives_way_to_the_module_when_asked_for_anything_else(stand_in: StandIn) -> None:
    assert stand_in.rgb_to_hsv(1.0, 1.0, 1.0) == (0.0, 0.0, 1.0)
    assert sys.modules[NAME] is not stand_in
    assert importlib.import_module(NAME) is sys.modules[NAME]
    assert stand_in.hsv_to_rgb(0.0, 0.0, 1.0) == (1.0, 1.0, 1.0)  # for who still holds it


def test_looking_through_all_modules_loads_nothing(stand_in: StandIn) -> None:
    for name in ("__file__", "__wrapped__", "__warningregistry__"):
        assert not hasattr(stand_in, name)
    assert sys.modules[NAME] is stand_in
