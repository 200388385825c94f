"""Enrolment codes: shown once, kept as hashes, good for so many uses and for so long."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from auth.roles import Role
from auth.server import codes
from auth.server.join_refused import JoinReason
from auth.server.moderation import NotDone
from auth.tokens import read_token
from tests.auth.store.stores import HOUR_MS, ROOT, Node, Server, running
from tests.auth.store.test_issuing import refused


def new(server: Server, **wanted: object) -> str:
    return server.moderation.code_new(actor=ROOT, **wanted).code  # type: ignore[arg-type]


async def username(node: Node, code: str) -> str:
    return read_token((await node.join_by_code(code)).token).username


async def test_a_single_code_lets_one_node_in(server: Server) -> None:
    code = new(server)
    assert await username(Node(1, server), code) == "code:c1-1"
    with refused(JoinReason.CODE_USED_UP):
        await Node(2, server).join_by_code(code)
    assert server.acts() == ["code made", "joined", "refused"]
    assert server.newest("joined") == "By enrolment code c1."


async def test_the_same_node_gets_in_again_by_the_code_it_used(server: Server) -> None:
    code = new(server)
    node = Node(1, server)
    assert await username(node, code) == await username(node, code)
    server.clock.forward(30 * 24 * HOUR_MS)
    assert await username(node, code) == "code:c1-1"
    assert server.moderation.codes().codes[0].uses == 1


async def test_each_use_of_a_code_without_a_name_is_somebody_else(server: Server) -> None:
    code = new(server, uses=2)
    names = [await username(Node(number, server), code) for number in (1, 2)]
    assert names == ["code:c1-1", "code:c1-2"]
    with refused(JoinReason.CODE_USED_UP):
        await Node(3, server).join_by_code(code)


async def test_a_code_with_a_name_is_one_person_on_several_machines(server: Server) -> None:
    code = new(server, uses=2, name="Bob", roles=("monitor",))
    access_pass = await Node(1, server).join_by_code(code)
    assert read_token(access_pass.token).roles == (Role.MONITOR,)
    assert await username(Node(2, server), code) == "code:bob"
    account = server.moderation.account("bob")
    assert (account.name, account.keys, account.live_tokens) == ("code:bob", 2, 2)


async def test_a_code_for_everybody_has_no_end(server: Server) -> None:
    code = new(server, uses=None, life_ms=None)
    server.clock.forward(10_000 * HOUR_MS)
    for number in range(1, 8):
        assert await username(Node(number, server), code) == f"code:c1-{number}"
    view = server.moderation.codes().codes[0]
    assert (view.uses, view.uses_allowed, view.expires_ms, view.state) == (7, None, None, "open")


async def test_a_code_that_expired_or_was_cancelled_lets_nobody_new_in(server: Server) -> None:
    short, cancelled = new(server, uses=2, life_ms=HOUR_MS), new(server, uses=2)
    early = Node(1, server)
    await early.join_by_code(short)
    server.clock.forward(HOUR_MS)
    with refused(JoinReason.CODE_EXPIRED):
        await Node(2, server).join_by_code(short)
    await early.join_by_code(short)
    server.moderation.code_cancel("c2", actor=ROOT)
    with refused(JoinReason.CODE_CANCELLED):
        await Node(2, server).join_by_code(cancelled)
    with pytest.raises(NotDone, match="was cancelled already"):
        server.moderation.code_cancel("C2", actor=ROOT)


async def test_a_code_is_cancelled_by_its_letters_too(server: Server) -> None:
    """Of one that was found in a chat nobody knows the number."""
    leaked, other = new(server), new(server)
    assert server.moderation.code_cancel(leaked.lower(), actor=ROOT).state == "cancelled"
    with refused(JoinReason.CODE_CANCELLED):
        await Node(1, server).join_by_code(leaked)
    await Node(1, server).join_by_code(other)
    with pytest.raises(NotDone, match="does not exist"):
        server.moderation.code_cancel("AAAAA-AAAAA-AAAAA-AAAAA", actor=ROOT)


async def test_an_invalid_code_is_refused_and_makes_no_account(server: Server) -> None:
    for text in ("", "AAAAA-AAAAA-AAAAA-AAAAA", "x" * 100_000, "\ud800", "c1"):
        with refused(JoinReason.CODE_UNKNOWN):
            await Node(1, server).join_by_code(text)
    assert server.moderation.accounts().total == 0


async def test_a_person_who_was_denied_does_not_get_in_by_their_code(server: Server) -> None:
    code = new(server, name="bob")
    server.moderation.deny("code:bob", actor=ROOT)
    with refused(JoinReason.DENIED):
        await Node(1, server).join_by_code(code)
    assert server.moderation.codes().codes[0].uses == 0
    with pytest.raises(NotDone, match="code:bob may not take part"):
        new(server, name="bob")


async def test_a_code_goes_on_after_a_backup_was_put_back_and_its_people_were_denied(
    server: Server, tmp_path: Path
) -> None:
    code = new(server, uses=5)
    await Node(1, server).join_by_code(code)
    server.moderation.backup(tmp_path / "backup", actor=ROOT)
    for number in (2, 3):
        await Node(number, server).join_by_code(code)
    with running(tmp_path / "backup", server.clock) as restored:
        for name in ("code:c1-2", "code:c1-3"):
            restored.moderation.deny(name, actor=ROOT)
        assert await username(Node(4, restored), code) == "code:c1-4"
        assert await username(Node(5, restored), code) == "code:c1-5"
        assert restored.moderation.codes().codes[0].uses == 3


async def test_two_codes_for_one_name_are_the_same_person(server: Server) -> None:
    first, second = new(server, name="bob"), new(server, name="code:bob")
    await Node(1, server).join_by_code(first)
    await Node(2, server).join_by_code(second)
    assert server.moderation.account("bob").keys == 2


def test_a_code_that_makes_no_sense_is_not_made(server: Server) -> None:
    for wanted in (
        {"uses": 0}, {"uses": 1_000_000}, {"life_ms": 0}, {"roles": ()}, {"roles": ("boss",)},
        {"name": "github:alice"},
    ):  # fmt: skip
        with pytest.raises(NotDone):
            new(server, **wanted)
    assert server.moderation.codes().total == 0


def test_codes_are_listed_newest_first_and_never_in_clear(server: Server, folder: Path) -> None:
    code = new(server, note="for the class")
    new(server, name="bob", life_ms=1)
    server.clock.forward(10)
    assert [view.state for view in server.moderation.codes().codes] == ["expired", "open"]
    assert [view.code_id for view in server.moderation.codes(open_only=True).codes] == ["c1"]
    content = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert b"for the class" in content
    for spelling in (code, code.replace("-", ""), code.lower()):
        assert spelling.encode() not in content


@given(st.binary(min_size=codes.CODE_RANDOM_BYTES, max_size=codes.CODE_RANDOM_BYTES))
def test_however_a_code_is_typed_it_is_the_same(random: bytes) -> None:
    code = codes.spell_code(random)
    assert re.fullmatch(r"([0-9A-HJKMNP-TV-Z]{5}-){3}[0-9A-HJKMNP-TV-Z]{5}", code)
    plain = codes.hash_of(code)
    assert plain is not None
    for typed in (
        code.lower(), code.replace("-", ""), code.replace("-", " "), f"  {code} ",
        code.replace("0", "O"), code.replace("1", "l"), code.replace("1", "I"),
    ):  # fmt: skip
        assert codes.hash_of(typed) == plain


@given(st.text(max_size=80))
def test_any_text_is_a_code_or_none(text: str) -> None:
    found = codes.hash_of(text)
    assert found is None or len(found) == 32
