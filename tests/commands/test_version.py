"""`potluck version` is back at once, because it imports next to nothing."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from node.net.version import VERSION
from tests.commands.console import CHECKOUT, environment, objects, potluck, running
from tests.leaving import Leaving

# A quick command must not import these: each takes longer than the whole command may.
HEAVY = (
    "asyncio",
    "cryptography",
    "libp2p",
    "msgspec",
    "multiaddr",
    "numpy",
    "platformdirs",
    "rich",
    "tomllib",
    "torch",
    "trio",
    "typing_extensions",
)


def test_it_prints_the_version(tmp_path: Path) -> None:
    result = potluck("version", home=tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (0, f"potluck {VERSION}\n", "")


def test_it_is_also_a_flag(tmp_path: Path) -> None:
    assert potluck("--version", home=tmp_path).stdout == f"potluck {VERSION}\n"


def test_with_json_it_is_one_object(tmp_path: Path) -> None:
    (value,) = objects(potluck("version", "--json", home=tmp_path).stdout)
    assert value == {
        "potluck": VERSION,
        "python": ".".join(str(part) for part in sys.version_info[:3]),
        "platform": sys.platform,
    }


@pytest.mark.usefixtures("really_started")
@pytest.mark.parametrize("module", ["node", "node.app.main"])
def test_each_way_to_run_it_as_a_module_is_the_command(module: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, "version"],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, f"potluck {VERSION}\n")
    wrong = [sys.executable, "-m", module, "pong"]
    assert subprocess.run(wrong, env=environment(tmp_path), capture_output=True).returncode == 2


def test_it_is_the_version_that_the_package_is_built_as() -> None:
    document = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
    assert document["project"]["version"] == VERSION


@pytest.mark.parametrize(
    "words",
    [["version"], ["--version"], ["version", "--json"], ["--help"], ["ping", "--help"]],
    ids=" ".join,
)
def test_quick_commands_import_nothing_heavy(words: list[str], tmp_path: Path) -> None:
    program = (
        "import sys, json\n"
        "from node.app.main import main\n"
        f"main({words!r})\n"
        "print(json.dumps(sorted(sys.modules)), file=sys.stderr)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        check=True,
    )
    imported = {module.partition(".")[0] for module in json.loads(result.stderr.splitlines()[-1])}
    assert imported.isdisjoint(HEAVY), sorted(imported.intersection(HEAVY))


def test_only_the_module_of_the_named_command_is_imported(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from node.app.main import main\n"
        "main(['version'])\n"
        "print(*(m for m in sys.modules if m.startswith('node.app.')), file=sys.stderr)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        check=True,
    )
    imported = {name.removeprefix("node.app.") for name in result.stderr.split()}
    frame = {f"cli.{name}" for name in ("catalogue", "exit_codes", "output", "parser")}
    assert imported == {"main", "cli", *frame, "commands", "commands.version"}


@pytest.mark.slow
def test_it_is_back_within_a_bearable_time(tmp_path: Path) -> None:
    """0.05 s is usual."""
    seconds = []
    for _ in range(3):
        with running("version", home=tmp_path) as command:
            seconds.append(Leaving(command.pid).wait())
    assert min(seconds) < 0.3
