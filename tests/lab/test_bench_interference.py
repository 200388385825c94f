"""`scripts/bench interference` runs, and computes the right figures from its windows."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.bench.interference import ARMS, Window, figures_of, spared_share
from tests.commands.console import laboratory, objects


def windows(**rates: float) -> dict[str, list[Window]]:
    return {
        arm: [Window(rates.get(arm, 20.0), 50.0, 0.1 if arm != "alone" else 0.0)] for arm in ARMS
    }


def test_the_worse_of_the_two_directions_is_reported() -> None:
    told = figures_of(windows(receiving=19.0, sending=17.0), threads=1, cores=2)
    assert told["arms"]["receiving"]["kept"] == pytest.approx(0.95)
    assert told["kept"] == pytest.approx(0.85)
    assert not told["met"]


def test_the_other_end_is_spared_only_where_the_training_takes_every_core() -> None:
    assert spared_share(threads=1, cores=2, others=0.1) == 1.0
    assert spared_share(threads=2, cores=2, others=0.1) == pytest.approx(0.95)
    told = figures_of(windows(receiving=19.0, sending=19.0), threads=2, cores=2)
    assert told["kept"] == pytest.approx(1.0)


def test_the_cost_of_a_separate_process_has_no_bar() -> None:
    assert figures_of(windows(elsewhere=1.0), threads=1, cores=2)["met"]


@pytest.mark.slow
def test_the_training_goes_on_beside_a_transfer(tmp_path: Path) -> None:
    flags = ("--turns", "1", "--seconds", "0.3", "--width", "32", "--megabytes", "10")
    result = laboratory("bench", "interference", "--json", *flags, home=tmp_path)
    assert result.returncode in (0, 1), result.stderr  # whether the bar is met is no test's affair
    (told,) = objects(result.stdout)
    assert "arms" in told, told  # it failed, and says why
    # how fast this machine is now is no test's affair either
    assert all(arm["steps_per_s"] > 0 for arm in told["arms"].values())
    assert {arm for arm, figures in told["arms"].items() if figures["MB_per_s"] > 0} == {
        "elsewhere",
        "receiving",
        "sending",
    }
