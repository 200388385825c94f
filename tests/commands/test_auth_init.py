"""`potluck auth init`: from nothing to something that can be started, and safe to repeat."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from auth.server.settings import KEYS, read_settings, settings_in
from node.app.commands.auth_init import settings_text
from tests.commands.console import Completed, potluck


def init(home: Path, *flags: str) -> dict[str, Any]:
    done = potluck("auth", "init", "--json", *flags, home=home)
    assert done.returncode == 0, done.stdout + done.stderr
    value: dict[str, Any] = json.loads(done.stdout)
    return value


def failure(done: Completed) -> str:
    assert done.returncode == 2, done.stdout + done.stderr
    return done.stderr


@pytest.mark.slow
def test_no_flag_is_required(tmp_path: Path) -> None:
    done = potluck("auth", "init", home=tmp_path)
    assert done.returncode == 0
    assert done.stderr == ""
    for word in ("fingerprint", "potluck auth serve", "potluck auth allow", "potluck auth backup"):
        assert word in done.stdout
    settings = read_settings(tmp_path / "auth.toml")
    assert settings.run.startswith("run-at-")
    assert settings.public_url.startswith("https://")


@pytest.mark.slow
def test_a_second_call_changes_nothing(tmp_path: Path) -> None:
    first = init(tmp_path)
    text = (tmp_path / "auth.toml").read_bytes()
    second = init(tmp_path)
    assert (first["settings_made"], first["database_made"]) == (True, True)
    assert (second["settings_made"], second["database_made"]) == (False, False)
    assert second["fingerprint"] == first["fingerprint"]
    assert (tmp_path / "auth.toml").read_bytes() == text


@pytest.mark.slow
def test_missing_files_are_made_again(tmp_path: Path) -> None:
    first = init(tmp_path, "--run", "ours")
    (tmp_path / "auth.toml").unlink()
    again = init(tmp_path, "--run", "ours")
    assert (again["settings_made"], again["database_made"]) == (True, False)
    assert again["fingerprint"] == first["fingerprint"]


@pytest.mark.slow
def test_a_flag_does_not_overrule_what_is_written_down(tmp_path: Path) -> None:
    init(tmp_path, "--run", "ours")
    before = (tmp_path / "auth.toml").read_bytes()
    said = failure(potluck("auth", "init", "--run", "theirs", home=tmp_path))
    assert 'run = "theirs"' in said
    assert (tmp_path / "auth.toml").read_bytes() == before
    assert init(tmp_path, "--run", "ours")["run"] == "ours", "the same again is no contradiction"


@pytest.mark.slow
def test_a_database_of_another_run_is_not_taken(tmp_path: Path) -> None:
    init(tmp_path, "--run", "ours")
    (tmp_path / "auth.toml").unlink()
    said = failure(potluck("auth", "init", "--run", "theirs", home=tmp_path))
    assert "ours" in said
    assert not (tmp_path / "auth.toml").exists(), "nothing half done"


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--public-url", "auth.example.org"),
        ("--public-url", "https://auth.example.org/path"),
        ("--run", ""),
        ("--endpoint", "192.0.2.7:4001"),
    ],
)
@pytest.mark.slow
def test_a_flag_that_cannot_be_right_makes_nothing(flag: str, value: str, tmp_path: Path) -> None:
    said = failure(potluck("auth", "init", flag, value, home=tmp_path))
    assert flag in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_its_files_are_closed_to_other_users(tmp_path: Path) -> None:
    init(tmp_path)
    for path in tmp_path.rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert not mode & 0o077, f"{path}: {mode:04o}"


def test_every_setting_there_is_is_in_the_file() -> None:
    text = settings_text({"run": "r", "public_url": "https://a.example"})
    for key in KEYS:
        name = key.name.rpartition(".")[2]
        assert f"\n{name} = " in text or f"\n#{name} = " in text, key.name


def test_the_file_is_right_also_with_every_default_uncommented() -> None:
    known = {"run": "r", "public_url": "https://a.example"}
    text = settings_text(known)
    shown, peer = "12D3KooW…", "12D3KooWKnDdG3iXw9eTFijk3EWSunZcFi54Zka4wmtqtt6rPxc8"
    lines = [
        line[1:].replace(shown, peer) if _is_setting(line) else line for line in text.splitlines()
    ]
    plain = settings_in(text.encode(), Path("/x/auth.toml"))
    all_said = settings_in("\n".join(lines).encode(), Path("/x/auth.toml"))
    assert all_said.listen == plain.listen
    assert all_said.token_life_seconds == plain.token_life_seconds
    assert [one.kind for one in all_said.providers] == ["code", "github", "oidc"]
    assert [one.kind for one in plain.providers] == ["code"]


def _is_setting(line: str) -> bool:
    return line.startswith("#") and not line.startswith("# ")


@pytest.mark.parametrize("run", ['a"b', "a\\b", "#x", "é\x7f"])
def test_every_value_of_a_flag_survives_being_written_and_read(run: str) -> None:
    text = settings_text({"run": run, "public_url": "https://a.example"})
    import tomllib

    assert tomllib.loads(text)["run"] == run


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root to give a folder away"
)
def test_root_does_not_write_into_another_users_folder(tmp_path: Path) -> None:
    init(tmp_path)
    os.chown(tmp_path / "auth", 65534, 65534)
    for words in (("init",), ("allow", "github:alice")):
        done = potluck("auth", *words, home=tmp_path)
        assert done.returncode == 3
        assert "sudo -u" in done.stderr
