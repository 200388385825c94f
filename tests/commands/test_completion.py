"""The completion scripts, asked as the shells ask them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from node.app.cli.catalogue import build_parser
from node.app.commands.completion import script_for
from tests.commands.console import objects, potluck

BASH = shutil.which("bash")


def offered_by_bash(line: str, tmp_path: Path) -> list[str]:
    """Bash's completions at the end of this line."""
    script = tmp_path / "completion.bash"
    script.write_text(script_for("bash", build_parser()))
    program = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_potluck
printf '%s\\n' "${COMPREPLY[@]}"
"""
    words = line.split(" ")
    result = subprocess.run(
        [str(BASH), "--norc", "-u", "-c", program, "bash", str(script), *words],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert result.stderr == ""
    return sorted(result.stdout.split())


@pytest.mark.skipif(BASH is None, reason="bash is not installed")
@pytest.mark.parametrize(
    ("line", "some", "others"),
    [
        ("potluck ", {"ping", "status", "--json"}, {"--count", "show"}),
        ("potluck st", {"status"}, {"ping"}),
        ("potluck ping --", {"--count", "--json"}, {"--watch", "status"}),
        ("potluck ping --identity ", {"own", "new"}, {"--json"}),
        ("potluck ping --count ", set(), {"--json", "ping"}),
        ("potluck --home id ", {"id", "ping"}, {"--key-file"}),
        ("potluck --home x id --", {"--key-file"}, {"--count"}),
        ("potluck config ", {"show"}, {"ping"}),
        ("potluck config show --o", {"--origin"}, {"--json"}),
        ("potluck completion ", {"bash", "zsh", "fish"}, {"ping"}),
        ("potluck --config comp", {"completion.bash"}, {"completion"}),
        ("potluck nonsense ", {"ping"}, set()),
    ],
)
def test_bash_offers_what_can_come_next(
    line: str, some: set[str], others: set[str], tmp_path: Path
) -> None:
    offered = set(offered_by_bash(line, tmp_path))
    assert some <= offered
    assert offered.isdisjoint(others)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_names_every_command_and_flag(shell: str) -> None:
    parser = build_parser()
    script = script_for(shell, parser)
    for name, command in parser.subcommands()[0].items():
        assert name in script
        for flag in command.flags():
            if flag.startswith("--"):
                assert (f"-l {flag[2:]}" if shell == "fish" else flag) in script


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_shell_itself_accepts_its_script(shell: str, tmp_path: Path) -> None:
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed")
    script = tmp_path / f"completion.{shell}"
    script.write_text(script_for(shell, build_parser()))
    subprocess.run([program, "-n", str(script)], check=True)


@pytest.mark.slow
def test_the_script_goes_to_stdout_alone_or_in_an_object(tmp_path: Path) -> None:
    plain = potluck("completion", "fish", home=tmp_path)
    (value,) = objects(potluck("completion", "fish", "--json", home=tmp_path).stdout)
    assert value == {"shell": "fish", "script": plain.stdout}
    assert plain.stderr == ""
