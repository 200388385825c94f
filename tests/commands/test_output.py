"""Data on stdout, talk on stderr, and no way for a stranger's text to command the terminal."""

from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.app.cli.output import LONGEST_LINE, Output, folded, printable
from node.core.failure import failure_of
from protocols.errors import PotluckError, Refused, Unreachable
from tests.commands.console import COMMAND, environment


@given(st.text())
def test_printable_text_has_only_printable_characters_and_line_ends(text: str) -> None:
    shown = printable(text)
    assert all(character.isprintable() or character in "\n\t" for character in shown)
    assert shown.count("\n") == text.count("\n")
    assert all(len(line) <= LONGEST_LINE for line in shown.split("\n"))


def test_a_result_is_never_cut_and_has_no_control_characters() -> None:
    invite = "potluck-run:" + "a" * LONGEST_LINE
    assert Output().line({}, f"{invite}\n\x1b") == f"{invite}\n\N{REPLACEMENT CHARACTER}"


@given(st.text(alphabet=st.characters(codec="utf-8", categories=["L", "N", "P"]), max_size=100))
def test_ordinary_text_is_printed_as_it_is(text: str) -> None:
    assert printable(text) == text


@given(st.text())
def test_a_json_line_is_one_line_of_ascii(text: str) -> None:
    line = Output(json=True).line({"text": text}, text)
    assert line.isascii()
    assert line.isprintable()


def test_nan_and_infinity_are_null_in_json() -> None:
    value = {"loss": math.nan, "losses": [1.5, math.inf], "of": ({"ann": -math.inf},), "step": 3}
    assert json.loads(Output(json=True).line(value, ""), parse_constant=pytest.fail) == {
        "loss": None,
        "losses": [1.5, None],
        "of": [{"ann": None}],
        "step": 3,
    }


@pytest.mark.parametrize("words", [["completion", "zsh"], ["--help"], ["config", "show"]])
def test_a_reader_that_has_left_ends_the_command_quietly(words: list[str], tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        result = subprocess.run(
            [*COMMAND, *words],
            env=environment(tmp_path),
            stdout=writing,
            stderr=subprocess.PIPE,
            check=False,
        )
    finally:
        os.close(writing)
    assert (result.returncode, result.stderr) == (141, b"")


def test_a_full_disk_is_an_error_and_not_a_traceback(tmp_path: Path) -> None:
    with open("/dev/full", "wb") as full:
        result = subprocess.run(
            [*COMMAND, "version"],
            env=environment(tmp_path),
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert result.returncode == 1
    assert b"No space left on device" in result.stderr
    assert b"Traceback" not in result.stderr


def test_a_terminal_without_unicode_gets_something(tmp_path: Path) -> None:
    result = subprocess.run(
        [*COMMAND, "ping", "--help"],
        env=environment(tmp_path, PYTHONIOENCODING="ascii"),
        capture_output=True,
        check=False,
    )
    assert result.returncode == 0
    assert b"12D3KooW?" in result.stdout


def test_a_closed_stdout_is_no_traceback(tmp_path: Path) -> None:
    result = subprocess.run(
        ["sh", "-c", '"$@" >&-', "sh", *COMMAND, "id"],
        env=environment(tmp_path),
        capture_output=True,
        check=False,
    )
    assert b"Traceback" not in result.stderr


def test_a_failure_keeps_what_why_and_advice() -> None:
    failure = failure_of(Unreachable("Gone.", why="Unplugged.", advice="Plug in."))
    assert failure.as_mapping() == {
        "what": "Gone.",
        "why": "Unplugged.",
        "advice": "Plug in.",
        "exit_code": 4,
    }


def test_the_cause_that_says_most_is_found_in_a_group() -> None:
    group = ExceptionGroup(
        "", [ValueError("x"), ExceptionGroup("", [OSError(28, "full")]), Refused("No.")]
    )
    assert (failure_of(group).what, failure_of(group).exit_code) == ("No.", 3)
    assert "full" in failure_of(ExceptionGroup("", [ValueError("x"), OSError(28, "full")])).what


def test_an_error_of_the_system_names_the_file_and_what_to_do() -> None:
    failure = failure_of(OSError(28, "No space left on device", "/var/x"))
    assert "/var/x" in failure.what
    assert "free some space" in failure.advice


def test_a_bug_is_called_one() -> None:
    failure = failure_of(ZeroDivisionError("division by zero"))
    assert "ZeroDivisionError: division by zero" in failure.what
    assert "--debug" in failure.advice
    assert failure.exit_code == 1


def test_every_error_of_ours_has_a_documented_exit_code() -> None:
    from node.app.cli.exit_codes import MEANINGS

    def all_kinds(kind: type[PotluckError]) -> list[type[PotluckError]]:
        return [kind, *(deep for sub in kind.__subclasses__() for deep in all_kinds(sub))]

    assert {kind.exit_code for kind in all_kinds(PotluckError)} <= set(MEANINGS)


def test_long_lines_for_a_person_are_broken_between_words_except_commands_and_addresses() -> None:
    assert folded("  next: go home now\nshort", 15, " " * 4) == "  next: go home\n    now\nshort"
    assert folded("run: " + "x" * 30, 12) == "run:\n" + "x" * 30
    assert folded("as it was written", None) == "as it was written"
    assert folded("too narrow for that", 8, " " * 8) == "too narrow for that"
