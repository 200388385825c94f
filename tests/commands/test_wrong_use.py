"""Mistakes in typing give exit code 2, and an error that helps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands.console import objects, potluck

PEER = "12D3KooWA7YDSPeLfowyUE7ForqcayjthCYY8LY4nAyTeE31syJR"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("", "COMMAND"),
        ("pnig", "Did you mean ping?"),
        ("stauts", "Did you mean status?"),
        ("frobnicate", "potluck --help"),
        ("version --jsno", "Did you mean --json?"),
        ("version too much", "it takes no too much"),
        ("ping", "ADDRESS"),
        ("ping --cuont 3", "Did you mean --count?"),
        (f"ping --cuont=3 /ip4/192.0.2.7/tcp/4001/p2p/{PEER}", "Did you mean --count?"),
        ("ping --count 0 x", "whole number above zero"),
        ("ping --count three x", "whole number above zero"),
        ("ping --interval nan x", "number of seconds above zero"),
        ("ping --timeout -1 x", "--timeout"),
        ("pause --for -1h", "type --for=-1h"),
        ("ping --identity mine x", "'mine'"),
        ("ping --identity onw x", "Did you mean own?"),
        ("ping 192.0.2.7:4001", "/ip4/192.0.2.7/tcp/4001/p2p/PEER-ID"),
        (f"ping {PEER}", "only a peer id"),
        ("ping /ip4/192.0.2.7/tcp/4001", "does not name the peer"),
        (f"ping /ip4/192.0.2.7/tcp/4001/p2p/{PEER[:-4]}", "cut short"),
        ("listen --listen 4001", "/ip4/"),
        ("listen --listen /dns4/node.example/tcp/4001", "--announce"),
        ("listen --announce /ip4/192.0.2.7/tcp/0", "port 0"),
        ("listen --inbound-connections none", "whole number above zero"),
        ("config", "ACTION"),
        ("config sohw", "Did you mean show?"),
        ("completion tcsh", "SHELL cannot be 'tcsh'"),
        ("completion tcsh", "bash, zsh, fish"),
        ("status --interval 0", "number of seconds above zero"),
        ("--config /does/not/exist id", "no settings file"),
    ],
)
def test_it_is_told_what_is_wrong_and_what_was_meant(words: str, told: str, tmp_path: Path) -> None:
    result = potluck(*words.split(), home=tmp_path)
    assert result.returncode == 2
    assert told in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_with_json_a_wrong_command_line_is_an_object_on_stdout(tmp_path: Path) -> None:
    result = potluck("version", "--jsn", "--json", home=tmp_path)
    (value,) = objects(result.stdout)
    assert value["error"]["exit_code"] == result.returncode == 2
    assert "--jsn" in value["error"]["what"]
    assert "--json" in value["error"]["advice"]
    assert result.stderr == ""


def test_a_flag_may_stand_before_or_after_the_command(tmp_path: Path) -> None:
    before = potluck("--json", "version", home=tmp_path)
    after = potluck("version", "--json", home=tmp_path)
    assert before.stdout == after.stdout


def test_flags_are_never_abbreviated(tmp_path: Path) -> None:
    assert potluck("status", "--wat", home=tmp_path).returncode == 2


@pytest.mark.slow
@pytest.mark.parametrize("variables", [{"POTLUCK_DEBUG": "1"}, {"POTLUCK_DEBUG": "true"}])
def test_a_traceback_is_shown_with_debug(variables: dict[str, str], tmp_path: Path) -> None:
    assert "Traceback" in potluck("pnig", home=tmp_path, **variables).stderr
    assert "Traceback" in potluck("pnig", "--debug", home=tmp_path).stderr


def test_debug_switched_off_shows_none(tmp_path: Path) -> None:
    assert "Traceback" not in potluck("pnig", home=tmp_path, POTLUCK_DEBUG="0").stderr
