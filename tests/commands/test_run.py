"""`potluck run`: what an organiser types, and what each mistake is answered with."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from auth.keys import fingerprint
from node.app.commands.run_invite import (
    MOST_ADDRESSES,
    addresses_of_node_here,
    peers_named,
    worth_naming,
)
from node.app.commands.run_start import for_people
from node.app.invite_file import check_new, write_new
from node.app.views.qr import qr_lines
from node.core.control import Answering, ControlServer
from node.core.key_file import load_identity
from node.core.private_file import UnusableFile
from node.core.wrong_use import WrongUse
from node.run.folder import RunFolder
from node.run.invite import read_invite
from node.run.signed import sign_definition
from tests.commands.console import Completed, potluck_here
from tests.commands.moderated import RUN, made
from tests.homes import full_disk, home_in

PEER = "12D3KooWKnDdG3iXw9eTFijk3EWSunZcFi54Zka4wmtqtt6rPxc8"
ADDRESS = f"/ip4/192.0.2.7/tcp/4001/p2p/{PEER}"


def run(home: Path, *words: str) -> Completed:
    return potluck_here("run", *words, home=home)


def answer(home: Path, *words: str) -> dict[str, Any]:
    completed = run(home, *words, "--json")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    value: dict[str, Any] = json.loads(completed.stdout)
    return value


def refused(home: Path, *words: str, code: int = 2) -> str:
    """The error of a command that fails."""
    completed = run(home, *words)
    assert completed.returncode == code, completed.stdout + completed.stderr
    assert completed.stdout == ""
    return completed.stderr


def signed_run(home: Path, folder: Path, name: str = "poem") -> None:
    """A run that was made and signed, without a check of its model."""
    answer(home, "init", str(folder), "--name", name)
    identity = load_identity(home / "organiser.key")
    assert identity is not None
    text = (folder / "run.toml").read_bytes()
    RunFolder(folder).keep_signed(sign_definition(text, identity.signing_key, now_ms=1))


@pytest.mark.slow
def test_a_new_run_is_written_once_with_a_key_that_stays(tmp_path: Path) -> None:
    home = tmp_path / "home"
    first = answer(home, "init", str(tmp_path / "poem"))
    assert first["run"] == "poem"
    assert first["key_made"]
    key = home / "organiser.key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert "never overwritten" in refused(home, "init", str(tmp_path / "poem"))
    second = answer(home, "init", str(tmp_path / "prose"))
    assert not second["key_made"]
    assert second["organiser"] == first["organiser"]
    assert "letters, digits" in refused(home, "init", str(tmp_path / "x"), "--name", "two words")
    unknown = refused(home, "init", str(tmp_path / "x"), "--recipe", "albrt")
    assert "gpt, diloco, moe, albert, swav" in unknown
    assert "Did you mean albert?" in unknown
    assert not (tmp_path / "x").exists()
    assert answer(home, "init", str(tmp_path / "x"), "--recipe", "albert")["recipe"] == "albert"
    assert 'name = "albert"' in (tmp_path / "x" / "run.toml").read_text()


@pytest.mark.slow
def test_all_mistakes_of_a_run_are_told_at_once(tmp_path: Path) -> None:
    home, folder = tmp_path / "home", tmp_path / "poem"
    answer(home, "init", str(folder))
    file = folder / "run.toml"
    file.write_text(file.read_text().replace("batch = 1024", "bacth = 1").replace("tiny", "tony"))
    said = refused(home, "check", str(folder))
    assert "3 mistakes" in said
    assert "Did you mean batch?" in said
    assert "Did you mean tiny?" in said


@pytest.mark.parametrize(
    "words", [("--volunteers", "9" * 400), ("--samples-per-s", "1e308")], ids=lambda one: one[0]
)
def test_more_volunteers_or_samples_than_any_run_has_are_wrong_use(
    words: tuple[str, str], tmp_path: Path
) -> None:
    assert f"{words[0]} is more than" in refused(tmp_path, "check", str(tmp_path), *words)


@pytest.mark.slow
def test_an_invite_names_the_run_its_peers_and_its_organiser(tmp_path: Path) -> None:
    home, folder = tmp_path / "home", tmp_path / "poem"
    signed_run(home, folder)
    told = answer(home, "invite", str(folder), "--bootstrap", ADDRESS, "--expires", "1d")
    invite = read_invite(told["invite"])
    identity = load_identity(home / "organiser.key")
    assert identity is not None
    assert invite.organiser == fingerprint(identity.public_key)
    assert (invite.run, invite.bootstrap, invite.access) == ("poem", (ADDRESS,), None)
    assert invite.expires_ms == told["expires_ms"]
    file = tmp_path / "bob.invite"
    words = ("invite", str(folder), "--bootstrap", ADDRESS, "--file", str(file))
    assert run(home, *words).stdout.strip() == str(file)
    assert read_invite(file.read_text()).run == "poem"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert "is there already" in refused(home, *words)


@pytest.mark.parametrize(
    "status", [{"training": {"run": "prose"}}, {"training": None, "membership": {"run": "prose"}}]
)
async def test_an_invite_has_no_address_of_a_node_in_another_run(
    status: dict[str, Any], tmp_path: Path
) -> None:
    configuration = home_in(tmp_path)
    control = ControlServer(configuration.places.control_socket)

    async def tell(_arguments: Mapping[str, Any], answer: Answering) -> None:
        await answer({"addresses": [ADDRESS], **status})

    control.add("status", tell)
    async with trio.open_nursery() as nursery:
        await nursery.start(control.serve)
        ask = partial(trio.to_thread.run_sync, addresses_of_node_here, configuration)
        assert await ask("prose") == (ADDRESS,)
        with pytest.raises(WrongUse, match="is in prose, not in poem"):
            await ask("poem")
        nursery.cancel_scope.cancel()


@pytest.mark.slow
def test_a_run_that_nobody_can_be_invited_to_is_refused_with_the_reason(tmp_path: Path) -> None:
    home, folder = tmp_path / "home", tmp_path / "poem"
    assert "no run in" in refused(home, "invite", str(folder))
    answer(home, "init", str(folder))
    assert "not signed yet" in refused(home, "invite", str(folder))
    signed_run(home, tmp_path / "prose", "prose")
    assert "no node runs in this home" in refused(home, "invite", str(tmp_path / "prose"))
    words = ("invite", str(tmp_path / "prose"), "--bootstrap", ADDRESS)
    assert "makes codes" in refused(home, *words, "--new-code")
    assert "organiser's key" in refused(tmp_path / "another", "sign", str(tmp_path / "prose"))


def test_starting_a_closed_run_mentions_the_codes_that_this_home_can_make() -> None:
    assert "`potluck run invite poem --new-code" in " ".join(for_people(True, True, "poem"))
    elsewhere = " ".join(for_people(True, False, "poem"))
    assert "--new-code" not in elsewhere
    assert "`potluck join INVITE --code-file FILE`" in elsewhere
    assert "everybody who has this invite" in " ".join(for_people(False, False, "poem"))


def test_no_code_is_made_for_a_file_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "alice.invite"
    check_new(file)
    with pytest.raises(WrongUse, match="There is no folder"):
        check_new(tmp_path / "missing" / "alice.invite")
    monkeypatch.setattr(os, "access", lambda _path, _mode: False)  # which nobody refuses to root
    with pytest.raises(WrongUse, match="cannot be written"):
        check_new(file)
    with pytest.raises(UnusableFile, match="could not be written"):
        write_new(tmp_path / ("a" * 300), "a name that no file system takes")


@pytest.mark.parametrize("length", [245, 255, 256])
def test_no_code_is_made_for_a_file_whose_name_is_too_long(tmp_path: Path, length: int) -> None:
    """It is written under a longer name first, and a code is shown only once."""
    with pytest.raises(WrongUse, match="cannot be written"):
        check_new(tmp_path / ("a" * length))
    longest = tmp_path / ("a" * 220)
    check_new(longest)
    write_new(longest, "the invite")
    assert list(tmp_path.iterdir()) == [longest]


def test_no_code_is_made_for_a_file_that_is_a_link_to_nowhere(tmp_path: Path) -> None:
    file = tmp_path / "alice.invite"
    file.symlink_to(tmp_path / "nowhere")
    with pytest.raises(WrongUse, match="is there already"):
        check_new(file)


def test_a_definition_that_is_not_there_or_cannot_be_read_is_wrong_use(tmp_path: Path) -> None:
    folder = tmp_path / "poem"
    assert potluck_here("run", "check", str(folder), home=tmp_path).returncode == 2
    (folder / "run.toml").mkdir(parents=True)
    done = potluck_here("run", "check", str(folder), home=tmp_path)
    assert done.returncode == 2
    assert "run.toml cannot be read" in done.stderr


def test_a_full_disk_leaves_no_part_of_an_invite(tmp_path: Path) -> None:
    with full_disk(), pytest.raises(UnusableFile, match="could not be written"):
        write_new(tmp_path / "alice.invite", "x" * 2_000)
    assert not list(tmp_path.iterdir())
    write_new(tmp_path / "alice.invite", "the invite")
    with pytest.raises(UnusableFile, match="could not be written"):
        write_new(tmp_path / "alice.invite", "another invite")
    assert (tmp_path / "alice.invite").read_text() == "the invite"


def test_more_peers_than_an_invite_holds_are_refused_in_words() -> None:
    assert peers_named([ADDRESS] * 16) == [ADDRESS] * 16
    with pytest.raises(WrongUse, match="17 addresses do not fit"):
        peers_named([ADDRESS] * 17)


@pytest.mark.slow
def test_a_copy_of_the_folder_can_invite_in_the_organisers_name(
    tmp_path: Path,
) -> None:
    home, folder = tmp_path / "home", tmp_path / "poem"
    signed_run(home, folder)
    words = ("invite", str(folder), "--bootstrap", ADDRESS)
    organiser = answer(home, *words)["organiser"]
    assert answer(tmp_path / "another", *words)["organiser"] == organiser
    assert not (tmp_path / "another" / "organiser.key").exists()
    assert "no run in" in refused(tmp_path / "another", "sign", str(tmp_path))
    assert not (tmp_path / "another" / "organiser.key").exists(), "not for what is no run"
    answer(tmp_path / "another", "init", str(tmp_path / "other"))
    assert answer(tmp_path / "another", *words)["organiser"] == organiser


@pytest.mark.slow
def test_an_invite_to_a_closed_run_leads_to_its_auth_server_with_a_code(tmp_path: Path) -> None:
    home, folder = made(tmp_path / "home"), tmp_path / "run"
    signed_run(home, folder, RUN)
    words = ("invite", str(folder), "--bootstrap", ADDRESS)
    access = read_invite(answer(home, *words)["invite"]).access
    assert access is not None
    assert access.auth_url == "http://127.0.0.1:8480"
    assert access.code == ""
    told = answer(home, *words, "--new-code", "--name", "alice")
    closed = read_invite(told["invite"])
    assert closed.access is not None
    assert closed.access.code
    assert closed.expires_ms == told["code_expires_ms"] // 1000 * 1000


@pytest.mark.slow
def test_a_run_that_was_changed_after_signing_is_not_started(tmp_path: Path) -> None:
    home, folder = tmp_path / "home", tmp_path / "poem"
    signed_run(home, folder)
    (folder / "run.toml").write_text((folder / "run.toml").read_text() + "\n# changed\n")
    said = refused(home, "start", str(folder))
    assert "differs from the signed definition" in said
    assert f"potluck run sign {folder}" in said
    another = tmp_path / "another"
    answer(another, "init", str(tmp_path / "other"))
    said = refused(another, "start", str(folder))
    assert "get both files from the organiser again" in said, "whatever else was signed there"
    assert "signed by somebody else" in refused(another, "sign", str(folder), code=3)


def test_an_invite_has_the_addresses_that_others_may_reach() -> None:
    def at(host: str) -> str:
        return f"/{host}/tcp/4001/p2p/{PEER}"

    own, lan, world, name = map(
        at, ("ip4/127.0.0.1", "ip4/192.168.1.7", "ip4/93.184.216.34", "dns4/node.example.org")
    )
    assert worth_naming([own, lan, world, name, lan]) == (name, world, lan)
    assert worth_naming([own]) == (own,), "on one machine, for a try"
    assert len(worth_naming(at(f"ip4/10.0.0.{number}") for number in range(20))) == MOST_ADDRESSES


@pytest.mark.parametrize("colour", [True, False])
def test_a_qr_code_is_a_square_of_two_rows_a_line(colour: bool) -> None:
    lines = qr_lines("potluck-run:" + "a" * 140, colour=colour)
    widths = {len(line) for line in lines}
    assert len(widths) == 1
    escapes = len("\033[30;107m\033[0m") if colour else 0
    assert widths.pop() - escapes in (2 * len(lines), 2 * len(lines) - 1)
