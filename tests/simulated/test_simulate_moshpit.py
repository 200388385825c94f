"""`scripts/simulate moshpit`: what it prints, draws and refuses."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab.__main__ import parse
from lab.plot import PlotFailed
from node.core.wrong_use import WrongUse

Run = Callable[..., str]


@pytest.fixture
def simulate(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command in this process; its stdout."""

    def run(*words: str) -> str:
        function, arguments = parse(["simulate", "moshpit", *words])
        assert function(arguments) == 0
        return capsys.readouterr().out

    return run


def result_of(printed: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(printed)
    return found


def test_json_has_the_deviation_before_any_round_and_after_each(simulate: Run) -> None:
    result = result_of(simulate("--peers", "1024", "--rounds", "10", "--json"))
    line = result["mean_squared_deviation"]
    assert len(line) == 11
    assert line[2] <= 1e-12 * line[0]
    assert result["method"] == "moshpit"
    assert result["grid"] == [32, 2]


@pytest.mark.parametrize("method", ["moshpit", "random", "allreduce", "gossip", "pushsum"])
def test_the_list_is_that_of_the_method_that_is_named(simulate: Run, method: str) -> None:
    result = result_of(simulate("--peers", "64", "--method", method, "--json"))
    assert result["method"] == method
    assert result["mean_squared_deviation"] == result["methods"][method]
    assert ("expected_contraction" in result) == (method == "random")


def test_a_person_gets_a_row_for_each_round_and_bars_that_fall(simulate: Run) -> None:
    printed = simulate("--method", "all", "--peers", "768", "--failure-rate", "0.005")
    assert printed.startswith("768 peers, grid of 32 × 32 cells (75% used), failure rate 0.005")
    rows = [line.split() for line in printed.splitlines() if line.strip()[:1].isdigit()][1:]
    assert [row[0] for row in rows] == [str(number) for number in range(11)]
    bars = next(line for line in printed.splitlines() if "█" in line).split()
    assert len(bars) == 5
    moshpit, _, allreduce, *_ = bars
    assert list(moshpit) == sorted(moshpit, reverse=True)
    assert allreduce == "█" * 11


def test_of_many_rounds_some_are_shown_and_the_last(simulate: Run) -> None:
    printed = simulate("--peers", "16", "--rounds", "1001")
    rows = [line.split() for line in printed.splitlines()[3:] if line.strip()[:1].isdigit()]
    assert len(rows) <= 22
    assert rows[-1][0] == "1001"


@pytest.mark.slow
def test_all_methods_are_drawn_where_none_is_named(simulate: Run, tmp_path: Path) -> None:
    file = tmp_path / "deviation.png"
    result = result_of(simulate("--peers", "64", "--plot", str(file), "--json"))
    assert file.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert len(result["methods"]) == 5
    with pytest.raises(PlotFailed, match="cannot be written"):
        simulate("--peers", "64", "--plot", str(tmp_path / "nowhere" / "a.png"))


def test_without_matplotlib_it_says_how_to_get_it_before_it_simulates(
    simulate: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PlotFailed) as caught:
        simulate("--peers", "1000000", "--plot", str(tmp_path / "a.png"))
    assert "not installed" in caught.value.what
    assert caught.value.why
    assert "./scripts/environment development" in caught.value.advice


@pytest.mark.parametrize(
    "words",
    [
        ["--peers", "1"],
        ["--peers", "1000001"],
        ["--rounds", "10001"],
        ["--grid", "4,2"],
        ["--grid", "32"],
        ["--grid", "0,2"],
        ["--groups", "2000"],
        ["--failure-rate", "1.5"],
        ["--failure-rate", "often"],
        ["--seed", "-1"],
        ["--method", "moshpot"],
        ["--plot", "deviation.txt"],
    ],
    ids=" ".join,
)
def test_an_impossible_plan_is_refused(simulate: Run, words: list[str]) -> None:
    with pytest.raises(WrongUse):
        simulate(*words)


def test_more_peers_than_cells_may_share_them_when_asked(simulate: Run) -> None:
    result = result_of(simulate("--grid", "4,2", "--first-index", "random", "--json"))
    assert result["grid_use"] == 64.0
