"""The doctor on a home: modes of files, the disk, the running node."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from node.app.doctor import FindingLevel
from node.app.doctor.home import (
    DiskFacts,
    ModeFacts,
    check_disk,
    check_files,
    check_node,
    check_settings,
    disk_facts,
    judge_disk,
    judge_mode,
)
from node.app.doctor.surroundings import Surroundings
from node.core.configuration import read_configuration
from node.core.key_file import load_or_create_identity
from node.core.status import DirectoryStatus, NodeStatus
from node.core.training_view import TrainerPhase, TrainerView
from node.net import VERSION
from tests.doctor.homes import configuration_of, only, surroundings_of


async def test_a_fresh_machine_has_nothing_wrong_and_stays_as_it_is(tmp_path: Path) -> None:
    home = tmp_path / "home"
    surroundings = surroundings_of(home)
    for check in (check_node, check_settings, check_files, check_disk):
        assert {one.level for one in await check(surroundings)} <= {
            FindingLevel.OK,
            FindingLevel.NOTE,
        }
    assert not home.exists()


async def test_files_of_the_owner_alone_are_fine(tmp_path: Path) -> None:
    load_or_create_identity(tmp_path / "identity.key")
    (finding,) = await check_files(surroundings_of(tmp_path))
    assert finding.level is FindingLevel.OK


@pytest.mark.parametrize(
    ("name", "mode", "does"),
    [
        ("identity.key", 0o644, "may read"),
        ("identity.key", 0o660, "may change"),
        ("organiser.key", 0o640, "may read"),
        ("access.pass", 0o604, "may read"),
        ("auth.toml", 0o644, "may read"),
    ],
)
async def test_a_secret_that_others_may_use_gets_the_command_that_closes_it(
    tmp_path: Path, name: str, mode: int, does: str
) -> None:
    path = tmp_path / name
    if name == "identity.key":
        load_or_create_identity(path)
    else:
        path.write_text("x")
    path.chmod(mode)
    finding = only(await check_files(surroundings_of(tmp_path)), FindingLevel.ERROR)
    assert f"{does} {path}" in finding.says
    await trio.run_process(finding.advice.split("`")[1], shell=True)
    assert path.stat().st_mode & 0o777 == 0o600


async def test_a_settings_file_may_be_read_but_not_changed_by_others(tmp_path: Path) -> None:
    file = tmp_path / "potluck.toml"
    file.write_text("")
    file.chmod(0o644)
    surroundings = surroundings_of(tmp_path)
    assert [one.level for one in await check_files(surroundings)] == [FindingLevel.OK]
    file.chmod(0o666)
    finding = only(await check_files(surroundings), FindingLevel.ERROR)
    assert finding.advice == f"Run `chmod go-w {file}`."


async def test_a_home_that_others_may_change_is_an_error(tmp_path: Path) -> None:
    home = tmp_path / "a home"
    home.mkdir()
    home.chmod(0o777)
    finding = only(await check_files(surroundings_of(home)), FindingLevel.ERROR)
    assert finding.advice == f"Run `chmod 700 '{home}'`."


async def test_a_damaged_key_is_an_error(tmp_path: Path) -> None:
    key = tmp_path / "identity.key"
    key.write_text("nonsense")
    key.chmod(0o600)
    finding = only(await check_files(surroundings_of(tmp_path)), FindingLevel.ERROR)
    assert "is not a potluck key" in finding.says


def test_a_file_of_another_user_is_an_error_but_root_may_own_the_settings() -> None:
    path = Path("potluck.toml")
    assert judge_mode(ModeFacts(path, 0o644, 0, is_secret=False), user=1000) is None
    key = judge_mode(ModeFacts(Path("identity.key"), 0o600, 0, is_secret=True), user=1000)
    assert key is not None
    assert key.advice == "Run `sudo chown 1000 identity.key`."


# -- the disk


@pytest.mark.parametrize(
    ("free_bytes", "level"),
    [
        (1_000_000, FindingLevel.ERROR),
        (1_000_000_000, FindingLevel.WARNING),
        (10_000_000_000, FindingLevel.OK),
    ],
)
def test_a_disk_is_judged_by_what_is_free(free_bytes: int, level: FindingLevel) -> None:
    finding = judge_disk(DiskFacts(Path("/srv/potluck"), free_bytes))
    assert finding.level is level
    assert "/srv/potluck" in finding.says


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("needs root, to mount a small disk")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_is_found_by_writing(small_disk: Path) -> None:
    with pytest.raises(OSError, match="No space"):
        (small_disk / "filler").write_bytes(bytes(1_000_000))
    finding = judge_disk(disk_facts(small_disk))
    assert finding.level is FindingLevel.ERROR
    assert "There is no room" in finding.says
    assert [one.name for one in small_disk.iterdir()] == ["filler"]


async def test_a_file_in_the_place_of_the_home_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("")
    finding = only(await check_disk(surroundings_of(tmp_path / "home")), FindingLevel.ERROR)
    assert "cannot be written to" in finding.says


# -- the running node


def with_node(home: Path, node: NodeStatus) -> Surroundings:
    return Surroundings(configuration_of(home), node)


async def test_a_node_that_runs_well_is_fine(tmp_path: Path) -> None:
    (finding,) = await check_node(with_node(tmp_path, NodeStatus(version=VERSION, pid=7)))
    assert finding.level is FindingLevel.OK
    assert "pid 7" in finding.says


async def test_a_node_of_another_version_has_to_be_started_again(tmp_path: Path) -> None:
    found = await check_node(with_node(tmp_path, NodeStatus(version="0.0.9")))
    assert "0.0.9" in only(found, FindingLevel.WARNING).says


async def test_a_node_that_cannot_join_says_where_it_tried(tmp_path: Path) -> None:
    directory = DirectoryStatus(joined="trying", cannot_join={"/ip4/192.0.2.1/tcp/1": "refused"})
    node = NodeStatus(version=VERSION, directory=directory)
    finding = only(await check_node(with_node(tmp_path, node)), FindingLevel.ERROR)
    assert "/ip4/192.0.2.1/tcp/1: refused" in finding.says


async def test_a_lost_run_comes_with_the_trainers_own_advice(tmp_path: Path) -> None:
    view = TrainerView(
        run="poem", phase=TrainerPhase.NETWORK_LOST, doing="no route", advice="Plug it in."
    )
    node = NodeStatus(version=VERSION, training=view)
    finding = only(await check_node(with_node(tmp_path, node)), FindingLevel.ERROR)
    assert finding.advice == "Plug it in."


async def test_a_misspelt_variable_is_a_warning(tmp_path: Path) -> None:
    environment = {"POTLUCK_HOME": str(tmp_path), "POTLUCK_NETWORK_LISTN": "x"}
    surroundings = Surroundings(read_configuration(environment=environment))
    finding = only(await check_settings(surroundings), FindingLevel.WARNING)
    assert "POTLUCK_NETWORK_LISTN" in finding.says
