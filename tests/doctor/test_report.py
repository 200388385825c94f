"""The report for a bug report has what helps, and none of what is planted all over a home."""

from __future__ import annotations

import json
import zipfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from auth.invites import Invite
from node.app.doctor import Finding, FindingLevel, Surroundings, look_around, write_report
from node.app.doctor.redaction import Redaction
from node.app.doctor.report import new_report_file
from node.core.access.pass_file import load_pass
from node.core.configuration import Configuration, read_configuration
from node.core.control import Answering, ControlServer
from node.core.status import MembershipStatus, NodeStatus
from node.core.training_view import RunPeerView, TrainerView
from node.core.wrong_use import WrongUse
from node.run.invite import RunInvite, write_invite
from node.training.questions import LINES
from protocols.identity import Identity
from tests.access.impostor import Impostor, running_impostor
from tests.access.members import log_in
from tests.doctor.homes import PEER, surroundings_of

HOMES = "/" + "home/"  # in pieces: no file of ours may name a folder of somebody's machine
CODE = "A1B2C-D3E4F-G5H6J-K7M8N"
CLIENT_SECRET = "correct-horse-battery-staple"
PUBLIC, PUBLIC_6 = "93.184.215.14", "2606:2800:21f:cb07::1"


def planted(home: Path, identity: Identity) -> dict[str, str]:
    """Write the secret files of a home; what must be found nowhere, by what it is."""
    access = Invite("albert", (), "https://auth.example", "a" * 26, CODE)
    invite = write_invite(RunInvite("albert", (), "a" * 26, access=access))
    organiser = Identity.generate()
    (home / "organiser.key").write_text(f"potluck organiser key\n{organiser.seed.hex()}\n")
    (home / "run.invite").write_text(invite)
    (home / "auth.toml").write_text(
        f'[[provider]]\nclient_secret = "{CLIENT_SECRET}"\ncontact = "mod@example.org"\n'
    )
    (home / "potluck.toml").write_text(
        '[identity]\nname = "Ada Lovelace"\n'
        '[network]\nannounce = ["/dns4/ada.dyndns.example/tcp/4001"]\n'
    )
    return {
        "key": identity.seed.hex(),
        "organiser's key": organiser.seed.hex(),
        "invite": invite,
        "a part of the invite": invite[-24:],
        "code": CODE,
        "client secret": CLIENT_SECRET,
        "e-mail address": "mod@example.org",
        "own name": "Ada Lovelace",
        "name in the DNS": "ada.dyndns.example",
    }


LINE_WITH_ALL = (
    f"code:bob “Bobby” …PXsWW5pf left; {{secrets}} at {HOMES}adalove/x, "
    "/Users/adalove/y and {home}/z, "
    f"mail bob@example.org, see https://adam:pw12345@proxy.example, from {PUBLIC} and {PUBLIC_6}, "
    f"192.168.1.7, {PEER}, …WzXn07Rd (code:carol)"
)


def status_with(line: str) -> NodeStatus:
    peer = RunPeerView(peer=PEER, name="github:daniela", said_name="Dani")
    training = TrainerView(
        run="albert", person="code:alice", name="Ada Lovelace", peers=(peer,), last_event=line
    )
    return NodeStatus(
        peer_id=PEER,
        addresses=(f"/ip4/{PUBLIC}/tcp/4001/p2p/{PEER}", f"/ip6/{PUBLIC_6}/tcp/4001"),
        membership=MembershipStatus(
            open=False, username="code:alice", auth_url="https://a.example"
        ),
        training=training,
    )


@asynccontextmanager
async def node_with_log(configuration: Configuration, line: str) -> AsyncIterator[None]:
    """What answers for the log, as a node that trains does."""

    async def lines(_: Mapping[str, Any], answer: Answering) -> None:
        await answer([{"time": 0.0, "words": line}])

    control = ControlServer(configuration.places.control_socket)
    control.add(LINES, lines)
    async with trio.open_nursery() as nursery:
        await nursery.start(control.serve)
        yield
        nursery.cancel_scope.cancel()


def contents(path: Path) -> dict[str, str]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name).decode() for name in archive.namelist()}


async def test_what_is_planted_in_every_file_is_nowhere_in_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = tmp_path / "adalove"  # a home directory, whose name is the user's
    home = owner / "potluck"
    impostor, identity = Impostor(), Identity.generate()
    async with running_impostor(tmp_path, impostor) as server:
        await log_in(home, identity, impostor, server)
    secrets = planted(home, identity)
    environment_code = "Q9W8E-R7T6Y-U5I4O-P3A2S"
    monkeypatch.setenv("HOME", str(owner))
    monkeypatch.setenv("POTLUCK_LOGIN_CODE", environment_code)
    monkeypatch.setenv("POTLUCK_INVITE", "potluck-run:c2hvcnQ")
    configuration = read_configuration(environment={"POTLUCK_HOME": str(home)})
    kept = load_pass(configuration.places.pass_file)
    assert kept is not None
    in_file = configuration.places.pass_file.read_text()
    secrets |= {
        "pass": msgspec.json.decode(in_file)["access_pass"],
        "code in the environment": environment_code,
        "invite in the environment": "potluck-run:c2hvcnQ",
    }
    line = LINE_WITH_ALL.format(secrets=" ".join(secrets.values()), home=owner)
    surroundings = replace(look_around(configuration), node=status_with(line))
    says = f"{line} {in_file} code:alice"
    findings = [Finding("disk", FindingLevel.ERROR, says, f"Look at {home}.").as_mapping()]
    path = tmp_path / "report.zip"
    async with node_with_log(configuration, line):
        await trio.to_thread.run_sync(
            write_report, path, {"ok": False, "findings": findings}, surroundings
        )

    found = contents(path)
    whole = "\n".join([*found, *found.values()]) + path.read_bytes().decode("latin-1")
    for what, secret in secrets.items():
        assert secret not in whole, what
    for name in ("adalove", "alice", "Bobby", "code:bob", "carol", "daniela", "Dani", "adam:pw"):
        assert name not in whole, name
    for address in ("bob@example.org", PUBLIC, PUBLIC_6):
        assert address not in whole, address
    assert {"findings.json", "status.json", "settings.json", "versions.json", "log.txt"} < set(
        found
    )
    assert PEER in found["status.json"]
    assert "192.168.1.7" in found["log.txt"]
    assert "…PXsWW5pf left" in found["log.txt"]
    assert json.loads(found["findings.json"])["findings"][0]["advice"] == "Look at ~/potluck."
    assert path.stat().st_mode & 0o777 == 0o600


def test_without_a_node_there_is_no_status_and_no_log(tmp_path: Path) -> None:
    path = tmp_path / "report.zip"
    write_report(path, {"ok": True, "findings": []}, surroundings_of(tmp_path / "home"))
    assert set(contents(path)) == {
        "README.txt", "findings.json", "versions.json", "settings.json",
    }  # fmt: skip
    assert not (tmp_path / "home").exists()


def test_a_report_never_replaces_a_file(tmp_path: Path) -> None:
    path = tmp_path / "report.zip"
    path.write_text("mine")
    with pytest.raises(WrongUse, match="exists already"):
        new_report_file(str(path))
    with pytest.raises(WrongUse, match="no folder"):
        new_report_file(str(tmp_path / "nowhere" / "report.zip"))
    with pytest.raises(FileExistsError):
        write_report(path, {}, Surroundings(surroundings_of(tmp_path).configuration))
    assert path.read_text() == "mine"


# -- what is taken out, and what is not


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("potluck-run:abcdefgh1234", "(secret)"),
        ("potluck:abcdefgh1234_-x", "(secret)"),
        (f"code {CODE}.", "code (secret)."),
        ("0123456789abcdef" * 4, "(secret)"),
        ("see http://me:pw@proxy:3128/", "see http://(secret)@proxy:3128/"),
        ("mail ada@example.org", "mail (person)"),
        (f"{HOMES}ada/potluck/x", "~/potluck/x"),
        ("/Users/ada/Library", "~/Library"),
        ("code:bob “Bob” …PXsWW5pf left", "(person) (person) …PXsWW5pf left"),
        ("…PXsWW5pf (code:bob) left", "…PXsWW5pf (person) left"),
        ("/ip4/93.184.215.14/tcp/1", "/ip4/93.184.x.x(#1)/tcp/1"),
        ("/ip6/2606:2800:21f:cb07::1/tcp/1", "/ip6/2606:2800:x(#1)/tcp/1"),
    ],
)
def test_what_looks_like_a_secret_or_a_person_is_taken_out(text: str, left: str) -> None:
    assert Redaction().text(text) == left


@pytest.mark.parametrize(
    "text",
    [
        PEER,
        f"/ip4/192.168.1.7/tcp/4001/p2p/{PEER}",
        "/ip6/fd00::2/tcp/1 and /ip6/::/tcp/0 and ::1",
        "/dns4/backbone.example.org/tcp/4001",
        "torch 2.13.0+cu130 computes on NVIDIA H100 80GB HBM3.",
        "21:04:31 step 312 with 4 peers: 344 of 1,024 samples are yours",
        "The system says: No space left on device.",
    ],
)
def test_what_helps_stays(text: str) -> None:
    assert Redaction(users=("root", "vm")).text(text) == text


def test_two_addresses_stay_two() -> None:
    redaction = Redaction()
    assert redaction.value(["93.184.215.14", "93.184.215.15", "93.184.215.14"]) == [
        "93.184.x.x(#1)", "93.184.x.x(#2)", "93.184.x.x(#1)",
    ]  # fmt: skip


def test_a_user_is_taken_out_of_words_but_not_out_of_other_words() -> None:
    redaction = Redaction(users=("ada",))
    assert redaction.text("/srv/ada/x of Ada: adapter") == "/srv/(person)/x of (person): adapter"
