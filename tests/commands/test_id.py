"""`potluck id`: the identity is made once, kept privately, and never silently replaced."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from protocols.identity import peer_id_of
from tests.commands.console import objects, potluck


@pytest.mark.slow
def test_the_first_call_makes_the_key_and_later_ones_find_it(tmp_path: Path) -> None:
    first = potluck("id", home=tmp_path)
    again = potluck("id", home=tmp_path)
    assert first.returncode == again.returncode == 0
    assert first.stdout == again.stdout
    assert first.stdout.startswith("12D3KooW")
    assert str(tmp_path / "identity.key") in first.stderr
    assert again.stderr == ""


def test_the_key_file_is_private_and_alone(tmp_path: Path) -> None:
    potluck("id", home=tmp_path)
    (key_file,) = tmp_path.iterdir()
    assert stat.S_IMODE(key_file.stat().st_mode) == 0o600


def test_with_json_it_has_the_public_key_that_the_peer_id_names(tmp_path: Path) -> None:
    (value,) = objects(potluck("id", "--json", home=tmp_path).stdout)
    assert peer_id_of(bytes.fromhex(value["public_key"])) == value["peer_id"]
    assert value["key_file"] == str(tmp_path / "identity.key")
    assert value["created"] is True


@pytest.mark.slow
def test_a_key_that_others_may_read_is_not_used(tmp_path: Path) -> None:
    potluck("id", home=tmp_path)
    (tmp_path / "identity.key").chmod(0o644)
    result = potluck("id", home=tmp_path)
    assert result.returncode == 1
    assert result.stdout == ""
    assert "chmod 600" in result.stderr


def test_a_home_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file, where a folder should be")
    result = potluck("id", home=tmp_path / "home")
    assert result.returncode == 1
    assert str(tmp_path / "home") in result.stderr
    assert "Traceback" not in result.stderr
