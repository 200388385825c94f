"""The kept files of runs: the organiser's folder, and the newest definitions that were seen."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path

import pytest

from auth.keys import fingerprint
from node.app.cli.output import Output
from node.app.commands.run_start import listening_as_before
from node.core.configuration import Configuration, read_configuration
from node.core.places import find_places
from node.core.running_lock import AlreadyRunning
from node.core.wrong_use import WrongUse
from node.run.folder import RunFolder, organiser_here, organiser_key
from node.run.kept import remember, remembered
from node.run.signed import SignedDefinition, read_signed, sign_definition
from protocols.runs.messages import NotTheDefinition
from tests.runs.definitions import FINGERPRINT, MALLORY, NAME, NOW_MS, ORGANISER, TEXT

PEER = "12D3KooWKnDdG3iXw9eTFijk3EWSunZcFi54Zka4wmtqtt6rPxc8"


def signed(now_ms: int) -> SignedDefinition:
    data = sign_definition(TEXT, ORGANISER, now_ms=now_ms)
    return read_signed(data, run=NAME, organiser=FINGERPRINT)


def test_the_newest_definition_that_was_seen_is_remembered(tmp_path: Path) -> None:
    places = find_places({}, home=str(tmp_path))
    assert remembered(places, NAME, FINGERPRINT) is None
    for now_ms, newest in ((5, 5), (9, 9), (7, 9)):
        remember(places, signed(now_ms))
        found = remembered(places, NAME, FINGERPRINT)
        assert found is not None
        assert found.signed_ms == newest
    assert remembered(places, NAME, "another") is None
    assert remembered(places, "prose", FINGERPRINT) is None


def test_an_unreadable_definition_is_forgotten_and_replaced(tmp_path: Path) -> None:
    places = find_places({}, home=str(tmp_path))
    remember(places, signed(5))
    (file,) = places.runs_folder.iterdir()
    file.write_bytes(b"half of it")
    assert remembered(places, NAME, FINGERPRINT) is None
    remember(places, signed(1))
    assert remembered(places, NAME, FINGERPRINT) is not None


def test_a_folder_without_a_run_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(WrongUse, match="potluck run init"):
        RunFolder(tmp_path).text()
    assert RunFolder(tmp_path).signed(FINGERPRINT) is None


def test_the_definition_of_another_organiser_is_not_taken_for_our_own(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "my poem")
    folder.keep_signed(sign_definition(TEXT, MALLORY, now_ms=NOW_MS))
    with pytest.raises(NotTheDefinition) as caught:
        folder.signed(FINGERPRINT)
    assert caught.value.what == f"{folder.signed_file} is signed by somebody else."
    assert f"`potluck backbone '{tmp_path}/my poem'`" in caught.value.advice
    assert "sign again" not in caught.value.advice, "that would make another run of it"
    folder.signed_file.write_bytes(b"half of it")
    with pytest.raises(NotTheDefinition) as caught:
        folder.signed(FINGERPRINT)
    assert caught.value.advice.endswith(f"`potluck run sign '{tmp_path}/my poem'`.")


def test_a_key_of_this_home_is_not_the_key_of_every_folder(tmp_path: Path) -> None:
    places, folder = find_places({}, home=str(tmp_path / "home")), RunFolder(tmp_path / "poem")
    key = organiser_key(places, make=True)
    assert organiser_here(places, folder) == fingerprint(key.public_key)
    folder.keep_signed(sign_definition(TEXT, key, now_ms=NOW_MS))
    assert organiser_here(places, folder) == fingerprint(key.public_key)
    folder.keep_signed(sign_definition(TEXT, MALLORY, now_ms=NOW_MS))
    assert organiser_here(places, folder) is None


def test_the_organisers_key_is_made_only_where_that_is_wanted(tmp_path: Path) -> None:
    places = find_places({}, home=str(tmp_path))
    with pytest.raises(WrongUse, match="no organiser's key"):
        organiser_key(places)
    made = organiser_key(places, make=True)
    assert organiser_key(places).public_key == made.public_key


def test_one_process_at_a_time_keeps_the_run_in_a_folder(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with folder.held():
        with pytest.raises(AlreadyRunning, match="keeps the run"), folder.held():
            pass
        assert not list(tmp_path.iterdir()), "and nothing is left of it"
    with folder.held():
        pass


def test_ports_are_remembered_by_the_kind_of_address(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.ports() == {}
    folder.keep_ports(
        [
            f"/ip4/192.0.2.7/tcp/4001/p2p/{PEER}",
            f"/ip4/127.0.0.1/tcp/4001/p2p/{PEER}",
            f"/ip6/::1/tcp/4002/p2p/{PEER}",
            f"/dns4/node.example.org/tcp/443/p2p/{PEER}",
        ]
    )
    assert folder.ports() == {"ip4": 4001, "ip6": 4002}


@pytest.mark.parametrize("content", [b"ip4 99999\n", b"ip4 -1\n", b"\xff\n", b"", b"x" * 999])
def test_ports_that_cannot_be_are_none(content: bytes, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.ports_file.write_bytes(content)
    assert folder.ports() == {}


def configured(home: Path, listen: str) -> Configuration:
    environment: Mapping[str, str] = {"POTLUCK_NETWORK_LISTEN": listen}
    return read_configuration(environment=environment, home=str(home))


def test_a_run_listens_where_it_did_unless_a_port_was_named_or_is_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        folder.keep_ports([f"/ip4/127.0.0.1/tcp/{port}/p2p/{PEER}"])

        def addresses(listen: str) -> tuple[str, ...]:
            found = listening_as_before(configured(tmp_path, listen), folder, Output())
            return found.listen_addresses

        assert addresses("/ip4/127.0.0.1/tcp/0") == ("/ip4/127.0.0.1/tcp/0",)
        assert f"port {port}" in capsys.readouterr().err
        assert addresses("/ip4/127.0.0.1/tcp/4001") == ("/ip4/127.0.0.1/tcp/4001",)
    assert addresses("/ip4/127.0.0.1/tcp/0") == (f"/ip4/127.0.0.1/tcp/{port}",)
    # it cannot be listened on twice
    both = addresses("/ip4/0.0.0.0/tcp/0,/ip4/127.0.0.1/tcp/0")
    assert both == (f"/ip4/0.0.0.0/tcp/{port}", "/ip4/127.0.0.1/tcp/0")
