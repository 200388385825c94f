"""`potluck service`: a user unit for systemd that starts the run of last time, without a secret."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from node.app.systemd import NoServices, ServiceUnit, require_systemd, unit_folder, unit_name
from node.core.key_file import load_or_create_identity
from node.core.places import find_places
from node.core.running_lock import hold_running_lock
from node.core.wrong_use import WrongUse
from node.training.join.admission import keep_invite
from tests.commands.console import Completed, objects, potluck, potluck_here
from tests.joining.test_invite_sources import INVITE

SYSTEMCTL = """#!/bin/sh
echo "$@" >>"$0.journal"
[ -e "$0.fails" ] || exit 0
case "$@" in *"$(cat "$0.fails")"*) echo "Failed to connect to bus" >&2; exit 1 ;; esac
"""


class Machine:
    """A home that has joined an open run, and a systemd that writes down what it is asked."""

    def __init__(self, folder: Path) -> None:
        self.home, self.tools = folder / "a home", folder / "tools"
        self.tools.mkdir()
        self.home.mkdir(mode=0o700)
        self.systemctl = self.tools / "systemctl"
        self.systemctl.write_text(SYSTEMCTL)
        self.systemctl.chmod(0o755)
        self.unit = folder / "units" / "systemd" / "user" / "potluck-a-home.service"
        self.key = self.home / "identity.key"
        self.places = find_places({}, home=str(self.home))

    def joined(self, *, closed: bool = False) -> Machine:
        load_or_create_identity(self.key)
        keep_invite(self.places, INVITE if closed else msgspec.structs.replace(INVITE, access=None))
        return self

    def asked(self) -> list[str]:
        return Path(f"{self.systemctl}.journal").read_text().splitlines()

    def service(self, *words: str, **variables: str) -> Completed:
        return potluck(
            "service",
            *words,
            home=self.home,
            PATH=f"{self.tools}:/usr/bin:/bin",
            XDG_CONFIG_HOME=str(self.unit.parents[2]),
            **variables,
        )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.slow
def test_it_is_written_enabled_and_started_and_removed_again(machine: Machine) -> None:
    machine.joined()
    told = machine.service("install", "--json", POTLUCK_LOGIN_CODE="a-secret")
    assert told.returncode == 0, told.stderr
    assert objects(told.stdout)[0]["started"]
    assert "POTLUCK_LOGIN_CODE" in told.stderr
    text = machine.unit.read_text()
    assert "a-secret" not in text
    assert f'Environment="POTLUCK_HOME={machine.home}"\n' in text
    name = machine.unit.name
    assert machine.asked() == [
        "--user show-environment",
        "--user daemon-reload",
        f"--user enable {name}",
        f"--user start {name}",
    ]
    assert machine.service("uninstall").returncode == 0
    assert not machine.unit.exists()
    assert machine.asked()[4:] == [
        "--user show-environment",
        f"--user disable --now {name}",
        "--user daemon-reload",
    ]


def _installed(machine: Machine, *words: str) -> Completed:
    """What would be installed, without asking systemd."""
    return potluck_here("service", "install", "--show", *words, home=machine.home)


def test_it_serves_experts_with_the_flags_that_were_typed(machine: Machine) -> None:
    machine.joined()
    told = _installed(machine, "experts", "serve", "--grid", "ffn0:0-3.*")
    assert told.returncode == 0, told.stderr
    assert "Description=potluck: serves experts of the run poem\n" in told.stdout
    command = ' experts serve --grid "ffn0:0-3.*" --plain\n'
    (line,) = [one for one in told.stdout.splitlines(True) if one.startswith("ExecStart=")]
    assert line.endswith(command)
    assert "trains in the run poem" in _installed(machine, "join", "--experts", "0").stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("run", "check", "poem"), "cannot run `potluck run check`"),
        (("experts", "list"), "cannot run `potluck experts list`"),
        (("experts", "serve", "--exprts", "3"), "no flag --exprts"),
        (("experts", "serve", "--home", "x"), "--home stand before"),
        (("experts", "serve", "potluck-run:abc"), "takes no invite"),
        (("join", "--code-file", "x"), "takes no invite"),
        (("join", "--trust-module", "mine.py"), "not a whole path"),
    ],
)
def test_what_no_unit_can_run_is_refused(
    machine: Machine, words: tuple[str, ...], says: str
) -> None:
    told = _installed(machine.joined(), *words)
    assert (told.returncode, says in told.stderr) == (2, True), told.stderr


@pytest.mark.slow
def test_a_node_that_runs_in_the_home_is_not_started_a_second_time(machine: Machine) -> None:
    machine.joined()
    with hold_running_lock(machine.places, machine.key):
        told = machine.service("install")
    assert told.returncode == 0, told.stderr
    assert "A node is running in this home" in told.stdout
    assert not any(one.startswith("--user start") for one in machine.asked())


@pytest.mark.slow
def test_a_home_that_cannot_start_by_itself_is_told_what_to_do_first(machine: Machine) -> None:
    told = machine.service("install")
    assert (told.returncode, "no invite to join with" in told.stderr) == (2, True)
    told = machine.joined(closed=True).service("install")
    assert (told.returncode, "no key or pass for poem" in told.stderr) == (2, True)
    assert not machine.unit.exists()


@pytest.mark.slow
def test_without_a_service_manager_nothing_is_written_and_the_commands_are_shown(
    machine: Machine,
) -> None:
    machine.joined()
    Path(f"{machine.systemctl}.fails").write_text("--user")
    told = machine.service("install")
    assert told.returncode == 1
    assert "Failed to connect to bus" in told.stderr
    assert "enable-linger" in told.stderr
    assert not machine.unit.exists()


@pytest.mark.slow
def test_a_unit_that_cannot_be_started_is_not_left_behind(machine: Machine) -> None:
    machine.joined()
    fails = Path(f"{machine.systemctl}.fails")
    fails.write_text("start ")
    assert machine.service("install").returncode == 1
    assert not machine.unit.exists()
    fails.unlink()
    assert machine.service("install").returncode == 0
    before = machine.unit.read_text()
    fails.write_text("enable ")
    (machine.home / "a.toml").touch()
    assert machine.service("install", "--config", str(machine.home / "a.toml")).returncode == 1
    assert machine.unit.read_text() == before, "the one that worked stays"


@pytest.mark.slow
def test_a_unit_of_another_home_is_not_removed_without_its_name(machine: Machine) -> None:
    assert machine.joined().service("install").returncode == 0
    elsewhere = str(machine.home / "a home")
    told = machine.service("uninstall", "--home", elsewhere)
    assert (told.returncode, "belongs to another home" in told.stderr) == (2, True), told.stderr
    assert machine.unit.exists()
    assert not any("disable" in one for one in machine.asked())
    name = machine.unit.stem
    assert machine.service("uninstall", "--home", elsewhere, "--name", name).returncode == 0
    assert not machine.unit.exists()


@pytest.mark.slow
def test_a_unit_that_potluck_did_not_write_is_left_alone(machine: Machine) -> None:
    machine.joined()
    text = f'[Service]\nExecStart=syncthing\nEnvironment="POTLUCK_HOME={machine.home}"\n'
    machine.unit.parent.mkdir(parents=True)
    theirs = machine.unit.with_name("syncthing.service")
    theirs.write_text(text)
    for action in ("install", "uninstall"):
        told = machine.service(action, "--name", "syncthing")
        assert (told.returncode, "was not written by" in told.stderr) == (2, True), told.stderr
        assert theirs.read_text() == text
    assert set(machine.asked()) == {"--user show-environment"}


def test_a_machine_without_systemd_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(NoServices) as raised:
        require_systemd()
    assert "potluck join" in raised.value.advice or "launchd" in raised.value.advice


@pytest.mark.parametrize("folder", ["home", '100 % "mine" \\o/ $HOME'])
def test_systemd_reads_the_unit_as_intended(tmp_path: Path, folder: str) -> None:
    program = tmp_path / "100 % mine" / "potluck"
    program.parent.mkdir()
    program.symlink_to(sys.executable)
    unit = ServiceUnit(
        "potluck",
        "po%em",
        (str(program), "join", "--plain"),
        {"POTLUCK_HOME": str(tmp_path / folder)},
    )
    text = unit.text()
    assert "po%%em" in text
    assert "TimeoutStopSec=10" in text
    assert "RestartPreventExitStatus=2 3" in text
    if shutil.which("systemd-analyze") is None:
        return
    file = tmp_path / "potluck.service"
    file.write_text(text)
    checked = subprocess.run(
        ["systemd-analyze", "--user", "verify", str(file)],
        env={"PATH": "/usr/bin:/bin", "XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (checked.returncode, checked.stderr) == (0, "")


def test_a_folder_that_no_unit_can_name_is_refused() -> None:
    with pytest.raises(WrongUse, match="cannot start"):
        ServiceUnit("potluck", "poem", ('/tmp/"mine"/potluck',)).text()
    with pytest.raises(WrongUse, match="cannot be written into a unit"):
        ServiceUnit("potluck", "poem", ("/tmp/a\nb",)).text()


def test_units_are_named_after_their_homes() -> None:
    assert unit_name(None, None) == "potluck"
    assert unit_name(None, "/anywhere/my poem") == "potluck-my-poem"
    assert unit_name("poem.service", "/anywhere") == "poem"
    with pytest.raises(WrongUse):
        unit_name("../poem", None)


def test_they_are_where_the_user_keeps_settings() -> None:
    assert unit_folder({"HOME": "/h"}) == Path("/h/.config/systemd/user")
    assert unit_folder({"HOME": "/h", "XDG_CONFIG_HOME": "/c"}) == Path("/c/systemd/user")
