"""`scripts/simulate run`: what it prints, checks and refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab.__main__ import parse
from lab.simulate import virtual_run
from lab.simulate.liars import Lie
from lab.simulate.run_view import COSTS, growth
from lab.simulate.virtual_run import RunPlan, broken_promises
from lab.simulate.virtual_trainer import MATCHMAKING_SECONDS, Trainer
from node.app.cli.exit_codes import DONE, FAILED
from node.core.wrong_use import WrongUse

Run = Callable[..., tuple[int, dict[str, Any]]]

SHORT = ("--peers", "4", "--steps", "2", "--step-seconds", "5")
NOT_FROM_THE_SEED = ("cpu_ms_per_s", "memory_MiB", "wall_seconds")


@pytest.fixture
def simulate(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command in this process; its exit code, and its object."""

    def run(*words: str) -> tuple[int, dict[str, Any]]:
        function, arguments = parse(["simulate", "run", *words, "--json"])
        code = function(arguments)
        figures: dict[str, Any] = json.loads(capsys.readouterr().out)
        return code, figures

    return run


@pytest.mark.slow
def test_peers_that_die_and_come_make_one_line_of_steps_and_a_seed_repeats_them(
    simulate: Run,
) -> None:
    churn = (*SHORT, "--churn", "15", "--newcomers", "1", "--seed", "3")
    code, first = simulate(*churn)
    assert code == DONE
    assert (first["variants_max"], first["histories_max"]) == (1, 1)
    assert first["steps"] == 2
    assert first["deaths"] > 0
    assert first["newcomers"] == first["deaths"] + 1
    assert first["calm_steps_per_minute"] > 0.0
    _, again = simulate(*churn)
    for name in NOT_FROM_THE_SEED:
        del first[name], again[name]
    assert first == again


@pytest.mark.slow
def test_a_peer_whose_bits_differ_is_found_and_the_command_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It begins with one parameter that is a little different, at one peer."""
    begin = Trainer.__init__

    def begin_elsewhere(self: Trainer, *arguments: Any) -> None:
        begin(self, *arguments)
        if self.name == "peer-1":
            self.parameters[7] = 1e-6

    monkeypatch.setattr(Trainer, "__init__", begin_elsewhere)
    function, arguments = parse(["simulate", "run", *SHORT])
    assert function(arguments) == FAILED
    assert "held 2 different states" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_several_sizes_are_compared_and_drawn(simulate: Run, tmp_path: Path) -> None:
    picture = tmp_path / "sizes.svg"
    code, told = simulate("--peers", "2,4", *SHORT[2:], "--plot", str(picture))
    assert code == DONE
    assert [one["peers"] for one in told["runs"]] == [2, 4]
    assert all(one["variants_max"] == 1 for one in told["runs"])
    assert set(told["growth"]) >= {"control_bytes_per_s_p50", "cpu_ms_per_s"}
    assert "hottest peer" in picture.read_text()


def test_a_cost_that_doubles_when_peers_are_four_times_as_many_grows_like_the_root() -> None:
    runs = [
        dict.fromkeys(COSTS, 0.0) | {"peers": peers, "calls_per_s_p50": 3.0 * peers**0.5}
        for peers in (16, 64, 256)
    ]
    assert growth(runs) == {"calls_per_s_p50": 0.5}


@pytest.mark.slow
def test_peers_that_only_dial_out_and_are_unlike_take_part_and_deaths_are_made_up_for(
    simulate: Run,
) -> None:
    code, figures = simulate(
        *("--peers", "8", "--steps", "3", "--step-seconds", "5", "--seed", "2"),
        *("--dial-out", "0.4", "--rates", "9", "--deaths", "2"),
    )
    assert code == DONE
    assert figures["deaths"] == 2
    assert figures["back_s"] is not None
    assert figures["counted_share"] > 0.8


@pytest.mark.slow
def test_peers_that_lie_are_named_and_the_others_hold_the_same_bits(
    simulate: Run,
) -> None:
    """One claims samples, one keeps most of what it has back."""
    code, figures = simulate(
        *("--peers", "8", "--steps", "3", "--step-seconds", "5", "--liars", "0.25")
    )
    assert code == DONE
    assert (figures["liars"], figures["liars_named"]) == (2, 2)
    assert figures["lies_named"] == ["claims", "keeps"]


@pytest.mark.slow
def test_peers_that_only_follow_for_want_of_a_place_are_counted() -> None:
    """In one group, as in a cohort with more peers than places."""
    figures = virtual_run.simulate(RunPlan(5, steps=2, seed=7, step_seconds=5.0, group_size=4))
    assert figures["without_place"] == 1
    assert figures["shares"] == [0.8, 0.8]


A_TRY_SECONDS = MATCHMAKING_SECONDS + 5.0  # of a round that fails, and what is computed for it


@pytest.mark.soak
@pytest.mark.parametrize("lie", Lie)
def test_a_liar_costs_a_step_at_most_one_try_more(lie: Lie) -> None:
    """In cohorts of six. One that says the same for ever says nothing that counts."""
    figures = virtual_run.simulate(
        RunPlan(24, steps=8, seed=7, group_size=16, liars=1 / 24, lies=(lie,))
    )
    assert not broken_promises(figures)
    calm_seconds = 60.0 / figures["calm_steps_per_minute"]
    assert figures["longest_gap_s"] < calm_seconds + A_TRY_SECONDS
    assert figures["liars_named"] == 1 or lie is Lie.REPEATS


@pytest.mark.slow
def test_peers_that_lie_together_cost_a_run_by_cohorts_little() -> None:
    """All three say that there are more samples than there are, two of them as heads."""
    plan = RunPlan(
        16,
        steps=4,
        seed=8,
        step_seconds=5.0,
        batch_seconds=0.5,
        group_size=8,
        liars=3 / 16,
        lies=(Lie.BOASTS, Lie.TELLS, Lie.CLAIMS),
    )
    figures = virtual_run.simulate(plan)
    assert not broken_promises(figures)
    assert figures["liars_named"] == 3
    assert figures["share_in_step_min"] == 1.0
    assert figures["steps_per_minute"] >= 0.8 * figures["calm_steps_per_minute"]


@pytest.mark.soak
def test_a_tenth_of_64_peers_may_lie() -> None:
    figures = virtual_run.simulate(
        RunPlan(64, steps=10, seed=1, group_size=16, rates=10.0, liars=0.1)
    )
    assert not broken_promises(figures)
    assert figures["share_in_step_min"] > 0.9
    assert figures["steps_per_minute"] >= 0.8 * figures["calm_steps_per_minute"]
    calm_seconds = 60.0 / figures["calm_steps_per_minute"]
    assert figures["longest_gap_s"] < calm_seconds + A_TRY_SECONDS


@pytest.mark.slow
def test_a_run_that_makes_no_steps_is_told_so(
    simulate: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(virtual_run, "LONGEST_STEP_SECONDS", 1.0)
    code, figures = simulate("--peers", "2", "--steps", "1", "--target", "1000000")
    assert code == FAILED
    assert figures["steps"] == 0
    assert "It made 0 of 1 steps" in broken_promises(figures)[0]


def test_without_a_target_a_step_takes_what_all_compute_in_its_time() -> None:
    plan = RunPlan(peers=64, steps=1, seed=0, step_seconds=10.0, batch_seconds=0.5, batch_samples=2)
    assert plan.target_samples == 64 * 2 * 10 / 0.5


@pytest.mark.parametrize(
    "words",
    [
        ["--peers", "1"],
        ["--peers", "5000"],
        ["--peers", "4,1"],
        ["--peers", "4,x"],
        ["--rates", "0.5"],
        ["--partition", "1"],
        ["--dial-out", "-0.1"],
        ["--liars", "1"],
        ["--deaths", "-1"],
        ["--plot", "sizes.svg"],
        ["--peers", "4,8", "--plot", "sizes.pdf"],
        ["--steps", "0"],
        ["--up", "1Mb"],
        ["--churn", "0"],
        ["--newcomers", "-1"],
        ["--latency", "-0.1"],
        ["--group-size", "1"],
    ],
    ids=" ".join,
)
def test_an_impossible_plan_is_refused(simulate: Run, words: list[str]) -> None:
    with pytest.raises(WrongUse):
        simulate(*words)


@pytest.mark.parametrize(
    "words",
    [
        ["--peers", "24", "--group-size", "6"],
        ["--peers", "6", "--newcomers", "1", "--group-size", "6"],
        ["--peers", "400", "--group-size", "16"],
    ],
    ids=" ".join,
)
def test_more_peers_than_have_a_place_are_refused(
    simulate: Run, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setattr(virtual_run, "simulate", lambda *_, **__: {})
    with pytest.raises(WrongUse, match="too many for groups") as refused:
        simulate(*words)
    assert "--group-size" in refused.value.advice


@pytest.mark.parametrize("rate", ["1Mb", "5bananas"])
def test_a_wrong_rate_is_refused_in_whole_sentences(simulate: Run, rate: str) -> None:
    with pytest.raises(WrongUse, match="is not an amount") as refused:
        simulate("--up", rate)
    assert not any(ending in refused.value.what for ending in ("..", ". .", "?.", ". ,"))
