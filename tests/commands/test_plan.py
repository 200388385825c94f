"""`potluck plan`: the paper's setups from their files, and a reader that lets no mistake pass."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from nat.relay_limits import RelayLimits
from node.app.plan_file import LARGEST_FILE_BYTES, MOST_PEERS, read_plan_file
from node.app.views.plan_view import plan_lines
from node.core.wrong_use import WrongUse
from protocols.moshpit.plan_strategy import best_strategy
from tests.commands.console import CHECKOUT, COMMAND, environment, objects, potluck

PLANS = CHECKOUT / "docs" / "plans"
KEYS = [
    "fractions",
    "computes",
    "round_seconds",
    "allreduce_seconds",
    "parameter_server_seconds",
    "steps_per_second",
    "solve_ms",
]
COHORT_SECONDS = ["round_seconds", "handing_down_seconds"]

TOP = "values = 1000\nbytes_per_value = 4\nbatch = 32\n"
ALICE = """
[[peer]]
name = "alice"
samples_per_s = 10
up_mbps = 20
down_mbps = 100
computes = true
dial_out_only = false
"""
BOB = ALICE.replace("alice", "bob")
LINK = '\n[[link]]\nfrom = "alice"\nto = "bob"\nmbps = 1\n'


def refusal_of(text: str, tmp_path: Path) -> WrongUse:
    file = tmp_path / "plan.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(WrongUse) as raised:
        read_plan_file(str(file))
    return raised.value


@pytest.mark.parametrize(
    ("name", "all_reduce", "server"),
    [("a", 1.0, 4.0), ("b", 1.0, 8.0), ("c", 1.92, 4.6), ("d", 1.68, 1.14)],
)
def test_the_papers_setups_from_their_files(name: str, all_reduce: float, server: float) -> None:
    plan = best_strategy(read_plan_file(str(PLANS / f"{name}.toml")))
    assert round(plan.allreduce_seconds / plan.round_seconds, 2) == all_reduce
    assert round(plan.parameter_server_seconds / plan.round_seconds, 2) == server
    assert sum(plan.fractions) == 1.0


@pytest.mark.slow
def test_with_json_it_is_one_object(tmp_path: Path) -> None:
    result = potluck("plan", "--json", str(PLANS / "c.toml"), home=tmp_path)
    assert result.returncode == 0
    assert result.stderr == ""
    (plan,) = objects(result.stdout)
    assert list(plan) == KEYS
    assert round(plan["allreduce_seconds"] / plan["round_seconds"], 2) == 1.92
    assert round(plan["parameter_server_seconds"] / plan["round_seconds"], 2) == 4.6
    assert sum(plan["fractions"]) == 1.0
    assert plan["solve_ms"] > 0


@pytest.mark.slow
def test_stdin_is_read_for_a_dash(tmp_path: Path) -> None:
    with (PLANS / "d.toml").open("rb") as file:
        result = subprocess.run(
            [*COMMAND, "plan", "-", "--json"],
            env=environment(tmp_path),
            stdin=file,
            capture_output=True,
            check=True,
            timeout=30,
        )
    plan = json.loads(result.stdout)
    assert plan["computes"] == [True] * 16 + [False]
    assert len(plan["fractions"]) == 17


@pytest.mark.parametrize(
    "name", ["a", "b", "c", "d", pytest.param("limited", marks=pytest.mark.slow)]
)
def test_a_person_is_shown_a_table_a_picture_and_what_it_gains(name: str) -> None:
    collaboration = read_plan_file(str(PLANS / f"{name}.toml"))
    strategy = best_strategy(collaboration)
    text = plan_lines(collaboration, strategy, solve_ms=1.0)
    lines = text.splitlines()
    assert lines[0].split()[:2] == ["peer", "samples/s"]
    assert "█" in text
    assert "▶ everybody" in text
    assert f"{strategy.allreduce_seconds / strategy.round_seconds:.2f} times as long" in text
    assert all(len(line) <= 100 for line in lines)
    assert ("link alice ──▶ bob" in text) == (name == "limited")


def test_peers_that_are_alike_are_one_row() -> None:
    collaboration = read_plan_file(str(PLANS / "d.toml"))
    text = plan_lines(collaboration, best_strategy(collaboration), solve_ms=1.0)
    assert "home01 … home16 (16)" in text
    assert "home02" not in text


def test_a_thousand_different_peers_fill_no_more_than_a_screen(tmp_path: Path) -> None:
    peers = [ALICE.replace("20", str(20 + i)).replace("alice", f"p{i}") for i in range(MOST_PEERS)]
    file = tmp_path / "plan.toml"
    file.write_text(TOP + "".join(peers), encoding="utf-8")
    collaboration = read_plan_file(str(file))
    text = plan_lines(collaboration, best_strategy(collaboration), solve_ms=1.0)
    assert len(text.splitlines()) < 100
    assert "and 960 more rows" in text


def many(count: int, *, group_size: int | None = None) -> str:
    """A file of so many equal peers."""
    top = TOP if group_size is None else f"{TOP}group_size = {group_size}\n"
    return top + "".join(ALICE.replace("alice", f"p{i}") for i in range(count))


def test_as_many_peers_as_fit_into_a_group_or_more_average_by_cohorts(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    for text, count in ((many(63), 0), (many(64), 4), (many(16, group_size=16), 4)):
        file.write_text(text, encoding="utf-8")
        assert len(read_plan_file(str(file)).cohorts) == count


@pytest.mark.parametrize(("peers", "group_size"), [(400, 16), (8, 4)])
def test_more_peers_than_can_average_are_refused(
    tmp_path: Path, peers: int, group_size: int
) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(many(peers, group_size=group_size), encoding="utf-8")
    with pytest.raises(WrongUse, match="too many for groups") as refused:
        read_plan_file(str(file))
    assert "group_size" in refused.value.advice


def test_a_person_is_shown_the_cohorts_and_what_each_part_of_a_step_takes(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(many(64), encoding="utf-8")
    collaboration = read_plan_file(str(file))
    strategy = best_strategy(collaboration)
    text = plan_lines(collaboration, strategy, solve_ms=1.0)
    lines = text.splitlines()
    assert "64 peers in 4 cohorts" in lines[0]
    rows = [line.split() for line in lines if line and line.split()[0] in ("1", "2", "3", "4")]
    for row, one in zip(rows, strategy.cohorts, strict=True):
        assert row[1] == str(len(one.members))
        assert row[-2] == collaboration.peers[one.members[0]].name
    assert sum(int(row[1]) for row in rows) == 64
    assert "among the 4 heads" in text
    assert all(len(line) <= 100 for line in lines)
    # alike peers of a cohort are one row, and the busiest of them is the cohort's head
    peers = [line for line in lines if line.startswith("p") and "…" in line]
    for line, one in zip(peers, strategy.cohorts, strict=True):
        busy = [strategy.link_seconds[i][0] for i in one.members]
        assert busy[0] == max(busy)
        assert f" {busy[0] / strategy.round_seconds:.0%} ".replace("%", " %") in line


@pytest.mark.slow
def test_a_program_is_told_the_cohorts(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(many(64), encoding="utf-8")
    result = potluck("plan", "--json", str(file), home=tmp_path / "home")
    (plan,) = objects(result.stdout)
    assert list(plan) == [*KEYS, "heads_seconds", "cohorts"]
    assert sorted(i for one in plan["cohorts"] for i in one["peers"]) == list(range(64))
    parts = [max(one[key] for one in plan["cohorts"]) for key in COHORT_SECONDS]
    assert plan["round_seconds"] == pytest.approx(plan["heads_seconds"] + sum(parts))


def test_dial_out_only_may_be_left_out(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(TOP + ALICE.replace("dial_out_only = false\n", ""), encoding="utf-8")
    assert not read_plan_file(str(file)).peers[0].dial_out_only


def test_parts_keep_off_a_pair_that_only_meets_through_a_relay(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    carol, relayed = ALICE.replace("alice", "carol"), LINK.replace("mbps = 1", "relayed = true")
    file.write_text(TOP + ALICE + BOB + carol + relayed, encoding="utf-8")
    collaboration = read_plan_file(str(file))
    assert collaboration.relayed == {(0, 1)}
    circuit = RelayLimits().circuit_bytes_per_second
    assert collaboration.limits == {(0, 1): circuit, (1, 0): circuit}
    assert best_strategy(collaboration).fractions == (0.0, 0.0, 1.0)


@pytest.mark.slow
def test_a_relay_carries_parts_if_nobody_is_met_directly_by_all(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    slow = LINK.replace("mbps = 1", "mbps = 1\nrelayed = true")
    file.write_text(TOP + ALICE + BOB + slow, encoding="utf-8")
    strategy = best_strategy(read_plan_file(str(file)))
    assert sum(strategy.fractions) == 1.0
    # a vector each way, one of them over the link of a megabit
    assert strategy.round_seconds == pytest.approx(4000 / 125_000, rel=0.5)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (TOP, "`peer` is missing"),
        (TOP + "peer = []", "no peer"),
        (TOP + "peer = 3", "not a list of tables"),
        (TOP + '[peer]\nname = "alice"', "not a list of tables"),
        (TOP + "peer = [1, 2]", "not a list of tables"),
        (ALICE, "`batch` is missing"),
        ("speed = 3\n" + TOP + ALICE, "no `speed`"),
        (TOP + ALICE + "speed = 3\n", "no `speed` in peer 1"),
        (TOP + ALICE.replace("up_mbps", "up_mpbs"), "no `up_mpbs`"),
        (TOP + ALICE.replace("up_mbps = 20\n", ""), "`up_mbps` is missing"),
        (TOP + ALICE.replace("computes = true\n", ""), "`computes` is missing"),
        (TOP + ALICE.replace('name = "alice"\n', ""), "`name` is missing"),
        (TOP + ALICE + ALICE, "Two peers"),
        (TOP + ALICE.replace("20", "-20"), "is -20"),
        (TOP + ALICE.replace("20", "0"), "is 0"),
        (TOP + ALICE.replace("20", "nan"), "is nan"),
        (TOP + ALICE.replace("20", "inf"), "is inf"),
        (TOP + ALICE.replace("20", "true"), "is true"),
        (TOP + ALICE.replace("20", '"20"'), "is '20'"),
        (TOP + ALICE.replace("20", "9" * 400), "too large a number"),
        (TOP + ALICE.replace("20", "9" * 5000), "not valid TOML"),
        (TOP + ALICE.replace("20", "[[[]]]"), "is a list"),
        (TOP + ALICE.replace("20", "0x" + "f" * 5000), "too large a number"),
        (TOP + ALICE.replace("= 10", "= -1"), "`samples_per_s`"),
        (TOP + ALICE.replace("true", '"maybe"'), "`computes`"),
        (TOP + ALICE.replace("true", "1"), "`computes`"),
        (TOP + ALICE.replace("false", '"no"'), "`dial_out_only`"),
        (TOP + ALICE.replace('"alice"', '""'), "name of peer 1"),
        (TOP + ALICE.replace('"alice"', "7"), "name of peer 1"),
        (TOP + ALICE.replace('"alice"', f'"{"a" * 65}"'), "name of peer 1"),
        (TOP + ALICE.replace('"alice"', '"a\\u001b[31m"'), "name of peer 1"),
        (TOP.replace("1000", "1000.5") + ALICE, "`values`"),
        (TOP.replace("1000", "0") + ALICE, "`values`"),
        (TOP.replace("= 4", "= 0") + ALICE, "`bytes_per_value`"),
        (TOP.replace("32", "nan") + ALICE, "`batch`"),
        (TOP + "group_size = 1\n" + ALICE, "`group_size`"),
        (TOP + "group_size = 257\n" + ALICE, "`group_size`"),
        (TOP + "group_size = 8.5\n" + ALICE, "`group_size`"),
        (TOP + ALICE + BOB + LINK.replace('"bob"', '"bbo"'), "`to` of link 1"),
        (TOP + ALICE + BOB + LINK.replace('"bob"', "3"), "`to` of link 1"),
        (TOP + ALICE + BOB + LINK.replace('"bob"', '"alice"'), "to itself"),
        (TOP + ALICE + BOB + LINK + LINK, "link 2"),
        (TOP + ALICE + BOB + LINK.replace("mbps = 1", "mbps = 0"), "`mbps` of link 1"),
        (TOP + ALICE + BOB + LINK.replace("mbps = 1\n", ""), "`mbps` is missing in link 1"),
        (TOP + ALICE + BOB + LINK + "latency = 3\n", "no `latency`"),
        (TOP + ALICE + BOB + LINK + "relayed = 1\n", "`relayed` of link 1"),
        (TOP + "".join(ALICE.replace("alice", f"{i}") for i in range(MOST_PEERS + 1)), "1,001"),
        ("#" * (LARGEST_FILE_BYTES + 1), "larger than a megabyte"),
        ("peer", "not valid TOML"),
        ("a = " + "[" * 100_000, "not valid TOML"),
        ("\udcff", "not valid TOML"),
    ],
)
def test_every_mistake_is_told(text: str, told: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(WrongUse) as raised:
        read_plan_file(str(file))
    assert told in raised.value.what
    assert raised.value.why
    assert raised.value.advice
    assert raised.value.exit_code == 2
    assert len(str(raised.value)) < 1000


def test_a_misspelt_word_is_answered_with_the_nearest(tmp_path: Path) -> None:
    error = refusal_of(TOP + ALICE.replace("up_mbps", "upmbps"), tmp_path)
    assert error.advice == "Did you mean `up_mbps`?"
    error = refusal_of(TOP + ALICE + BOB + LINK.replace('"bob"', '"bobb"'), tmp_path)
    assert error.advice == "Did you mean 'bob'?"


@pytest.mark.parametrize("path", ["missing.toml", ".", "\0"])
def test_a_file_that_cannot_be_read_is_told(path: str) -> None:
    with pytest.raises(WrongUse) as raised:
        read_plan_file(path)
    assert raised.value.advice


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("computes = true", "computes = false", "Nobody computes"),
        ("dial_out_only = false", "dial_out_only = true", "Nobody can reduce"),
        ("samples_per_s = 10", "samples_per_s = -3", "`samples_per_s`"),
    ],
)
def test_an_impossible_plan_ends_with_code_2(old: str, new: str, told: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text((TOP + ALICE + BOB).replace(old, new), encoding="utf-8")
    result = potluck("plan", "--json", str(file), home=tmp_path / "home")
    assert result.returncode == 2
    (answer,) = objects(result.stdout)
    error: dict[str, Any] = answer["error"]
    assert told in error["what"]
    assert error["why"]
    assert error["advice"]
    assert error["exit_code"] == 2
