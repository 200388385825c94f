"""The doctor on a closed run: the pass, an auth server over real HTTPS, and the clock."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from auth.invites import Invite
from auth.revocations import NameEntry
from node.app.doctor import Finding, FindingLevel, Surroundings, look_around
from node.app.doctor.access import (
    check_auth_server,
    check_clock,
    check_pass,
    judge_offset,
)
from node.core.access.pass_file import keep_pass, load_pass
from node.core.status import DirectoryStatus, NodeStatus
from node.run.invite import RunInvite
from node.training.join import keep_invite
from protocols.identity import Identity
from tests.access.https_servers import ScriptedServer, make_certificate, response
from tests.access.impostor import STRANGER, Impostor, root_record, running_impostor
from tests.access.members import log_in, write_key
from tests.doctor.homes import configuration_of, only, surroundings_of

DAY_SECONDS = 86_400


async def member(home: Path, impostor: Impostor, server: ScriptedServer) -> Surroundings:
    """The surroundings in a home that has logged in."""
    return look_around(await log_in(home, Identity.generate(), impostor, server))


def by_topic(findings: Sequence[Finding]) -> dict[str, FindingLevel]:
    return {one.topic: one.level for one in findings}


async def test_an_open_run_has_neither_pass_nor_server(tmp_path: Path) -> None:
    surroundings = surroundings_of(tmp_path)
    found = [*await check_pass(surroundings), *await check_auth_server(surroundings)]
    assert [one.level for one in found] == [FindingLevel.NOTE, FindingLevel.NOTE]


async def test_a_good_pass_a_server_and_a_clock_are_fine_and_nothing_is_renewed(
    tmp_path: Path,
) -> None:
    impostor = Impostor()
    async with running_impostor(tmp_path, impostor) as server:
        surroundings = await member(tmp_path / "home", impostor, server)
        kept = surroundings.configuration.places.pass_file.read_bytes()
        asked = len(impostor.asked)
        (of_pass,) = await check_pass(surroundings)
        found = await check_auth_server(surroundings)
    assert of_pass.level is FindingLevel.OK
    assert "code:alice in albert" in of_pass.says
    assert by_topic(found) == {"auth server": FindingLevel.OK, "clock": FindingLevel.OK}
    assert not {"/v1/renew", "/v1/login", "/v1/challenge"} & set(impostor.asked[asked:])
    assert surroundings.configuration.places.pass_file.read_bytes() == kept


async def test_an_expired_pass_is_renewed_by_logging_in(tmp_path: Path) -> None:
    impostor = Impostor(clock=lambda: time.time() - 3 * DAY_SECONDS)
    async with running_impostor(tmp_path, impostor) as server:
        configuration = await log_in(tmp_path / "home", Identity.generate(), impostor, server)
    path = configuration.places.pass_file
    kept = load_pass(path)
    assert kept is not None
    keep_pass(path, msgspec.structs.replace(kept, clock_offset_ms=0))
    surroundings = look_around(configuration)
    finding = only(await check_pass(surroundings), FindingLevel.WARNING)
    assert "expired" in finding.says
    assert "potluck login" in finding.advice
    with_node = Surroundings(configuration, NodeStatus(), membership=surroundings.membership)
    assert only(await check_pass(with_node), FindingLevel.ERROR).topic == "pass"


async def test_a_pass_for_another_key_does_not_count(tmp_path: Path) -> None:
    impostor = Impostor()
    async with running_impostor(tmp_path, impostor) as server:
        configuration = await log_in(tmp_path / "home", Identity.generate(), impostor, server)
    write_key(configuration.key_file, Identity.generate())
    finding = only(await check_pass(look_around(configuration)), FindingLevel.ERROR)
    assert "cannot use the access pass" in finding.says
    configuration.key_file.unlink()
    finding = only(await check_pass(look_around(configuration)), FindingLevel.ERROR)
    assert "not the key" in finding.says


async def test_a_pass_that_was_not_renewed_because_of_a_refusal_says_so(tmp_path: Path) -> None:
    impostor = Impostor()
    async with running_impostor(tmp_path, impostor) as server:
        configuration = await log_in(tmp_path / "home", Identity.generate(), impostor, server)
    path = configuration.places.pass_file
    kept = load_pass(path)
    assert kept is not None
    keep_pass(path, msgspec.structs.replace(kept, refused="You may not take part."))
    finding = only(await check_pass(look_around(configuration)), FindingLevel.ERROR)
    assert "You may not take part." in finding.says


async def test_a_revoked_pass_is_found_at_the_server(tmp_path: Path) -> None:
    impostor = Impostor()
    async with running_impostor(tmp_path, impostor) as server:
        surroundings = await member(tmp_path / "home", impostor, server)
        now_ms = impostor.now_ms + 1
        impostor.revoke(1, NameEntry("code:alice", now_ms, now_ms + 10**9))
        assert [one.level for one in await check_pass(surroundings)] == [FindingLevel.OK]
        found = await check_auth_server(surroundings)
    finding = only(found, FindingLevel.ERROR)
    assert finding.topic == "pass"
    assert "moderators" in finding.advice


async def test_a_closed_run_without_a_pass_is_an_error_and_its_server_is_asked(
    tmp_path: Path,
) -> None:
    impostor, certificate = Impostor(), make_certificate()
    async with running_impostor(tmp_path, impostor, certificate) as server:
        access = Invite("albert", (), server.url, impostor.fingerprint, "", certificate.sha256)
        configuration = configuration_of(tmp_path / "home")
        invite = RunInvite("albert", (), impostor.fingerprint, access=access)
        keep_invite(configuration.places, invite)
        surroundings = look_around(configuration)
        assert "is closed" in only(await check_pass(surroundings), FindingLevel.ERROR).says
        found = await check_auth_server(surroundings)
    assert by_topic(found) == {"auth server": FindingLevel.OK, "clock": FindingLevel.OK}


async def test_a_server_that_is_down_is_an_error(tmp_path: Path) -> None:
    impostor = Impostor()
    async with running_impostor(tmp_path, impostor) as server:
        surroundings = await member(tmp_path / "home", impostor, server)
    finding = only(await check_auth_server(surroundings), FindingLevel.ERROR)
    assert finding.topic == "auth server"
    assert "no connection" in finding.says


async def test_a_server_without_the_runs_key_is_an_error(tmp_path: Path) -> None:
    impostor = Impostor()
    async with running_impostor(tmp_path, impostor) as server:
        surroundings = await member(tmp_path / "home", impostor, server)
        impostor.key, impostor.records = STRANGER, (root_record(STRANGER),)
        finding = only(await check_auth_server(surroundings), FindingLevel.ERROR)
    assert "is not the auth server" in finding.says


async def test_a_portal_in_front_of_the_server_is_an_error(tmp_path: Path) -> None:
    impostor = Impostor()
    async with running_impostor(tmp_path, impostor) as server:
        surroundings = await member(tmp_path / "home", impostor, server)
        page = response("302 Found", b"", "Location: http://hotel.example/login")
        impostor.answers["/v1/keys"] = lambda _impostor, _question: page
        finding = only(await check_auth_server(surroundings), FindingLevel.ERROR)
    assert "captive portal" in finding.advice


# -- the clock


async def test_a_clock_that_differs_from_the_servers_is_a_warning(tmp_path: Path) -> None:
    impostor = Impostor()
    async with running_impostor(tmp_path, impostor) as server:
        surroundings = await member(tmp_path / "home", impostor, server)
        impostor.clock = lambda: time.time() + 300
        finding = only(await check_auth_server(surroundings), FindingLevel.WARNING)
    assert finding.topic == "clock"
    assert "5.0 minutes behind the auth server's" in finding.says


@pytest.mark.parametrize(
    ("offset_ms", "level"),
    [
        (1_999, FindingLevel.OK),
        (-2_001, FindingLevel.WARNING),
        (2 * DAY_SECONDS * 1000, FindingLevel.ERROR),
    ],
)
def test_an_offset_is_judged_by_what_it_breaks(offset_ms: int, level: FindingLevel) -> None:
    assert judge_offset(offset_ms, "the auth server's").level is level


async def test_a_running_node_has_measured_the_clock_against_its_peers(tmp_path: Path) -> None:
    directory = DirectoryStatus(joined="joined", clock_offset_ms=-60_000)
    surroundings = Surroundings(configuration_of(tmp_path), NodeStatus(directory=directory))
    finding = only(await check_clock(surroundings), FindingLevel.WARNING)
    assert "60.0 seconds ahead of most peers'" in finding.says
