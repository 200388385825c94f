"""People who should be out, or in once, and try to come back another way."""

from __future__ import annotations

import pytest

from auth.server.join_refused import JoinReason
from auth.server.moderation import NotDone
from auth.tokens import read_token
from tests.auth.store.stores import HOUR_MS, ROOT, Node, Person, Server
from tests.auth.store.test_issuing import refused

ALICE = Person("alice")


async def test_a_thief_is_not_back_when_the_owner_of_the_name_is(server: Server) -> None:
    """A login was stolen, the name revoked, and allowed when the login was its owner's again."""
    server.allow("alice")
    owner, thief = Node(1, server), Node(2, server)
    await owner.join(ALICE)
    await thief.join(ALICE)
    server.moderation.revoke("alice", actor=ROOT)
    server.allow("alice")
    with refused(JoinReason.LOGIN_OVER):
        await thief.renew()
    await owner.join(ALICE)


async def test_a_name_that_was_denied_logs_in_again_too(server: Server) -> None:
    server.allow("alice")
    node = Node(1, server)
    await node.join(ALICE)
    server.moderation.deny("alice", actor=ROOT)
    server.allow("alice")
    with refused(JoinReason.LOGIN_OVER):
        await node.renew()
    await node.join(ALICE)


async def test_somebody_let_go_of_does_not_come_back_by_the_code_they_used(server: Server) -> None:
    code = server.moderation.code_new(name="bob", actor=ROOT).code
    old, new = Node(1, server), Node(2, server)
    await old.join_by_code(code)
    server.moderation.allow("code:bob", rebind=True, actor=ROOT)
    with refused(JoinReason.CODE_USED_UP):
        await old.join_by_code(code)
    with refused(JoinReason.LOGIN_OVER):
        await old.renew()
    await new.join_by_code(server.moderation.code_new(name="bob", actor=ROOT).code)


async def test_somebody_revoked_by_mistake_comes_back_by_the_code_they_used(server: Server) -> None:
    code = server.moderation.code_new(name="bob", actor=ROOT).code
    node = Node(1, server)
    await node.join_by_code(code)
    server.moderation.revoke("code:bob", actor=ROOT)
    with refused(JoinReason.REVOKED):
        await node.join_by_code(code)
    server.moderation.allow("code:bob", actor=ROOT)
    assert read_token((await node.join_by_code(code)).token).username == "code:bob"


async def test_keys_that_logged_in_by_and_by_do_not_all_come_back_at_once(server: Server) -> None:
    """Each three could log in as soon as those before them had fallen silent."""
    server.allow("alice")
    nodes = [Node(number, server) for number in range(1, 10)]
    for three in (nodes[:3], nodes[3:6], nodes[6:]):
        for node in three:
            await node.join(ALICE)
        server.clock.forward(2 * HOUR_MS + 1)
    for node in nodes:
        node.next_challenge = None
    for node in nodes[:3]:
        await node.renew()
    for node in nodes[3:]:
        with refused(JoinReason.TOO_MANY_KEYS):
            await node.renew()
    server.clock.forward(2 * HOUR_MS + 1)
    nodes[3].next_challenge = None
    await nodes[3].renew()


async def test_all_nodes_of_an_account_come_back_after_an_outage(server: Server) -> None:
    server.allow("alice")
    nodes = [Node(number, server) for number in range(1, 4)]
    for node in nodes:
        await node.join(ALICE)
    server.clock.forward(24 * HOUR_MS)
    for node in nodes:
        node.next_challenge = None
        await node.renew()


async def test_a_code_that_let_nobody_in_puts_nobody_on_the_list(server: Server) -> None:
    """A name that appears without a row in the log would be a riddle."""
    code = server.moderation.code_new(uses=2, actor=ROOT).code
    node, other = Node(1, server), Node(2, server)
    server.moderation.revoke(node.peer_id, actor=ROOT)
    for _ in range(2):
        with refused(JoinReason.PEER_REVOKED):
            await node.join_by_code(code)
    assert server.moderation.accounts().total == 0
    assert read_token((await other.join_by_code(code)).token).username == "code:c1-1"
    assert server.is_sound()


async def test_nobody_is_given_the_name_of_whom_a_code_will_let_in(server: Server) -> None:
    with pytest.raises(NotDone, match="c1-2"):
        server.moderation.code_new(name="c1-2", actor=ROOT)
    with pytest.raises(NotDone, match="c1-2"):
        server.moderation.code_new(name="code:C1-2", actor=ROOT)


async def test_the_log_is_searched_by_names_as_accounts_are_called(server: Server) -> None:
    """Also by names that were refused, in whichever case the provider writes them."""
    with refused(JoinReason.NOT_ON_THE_LIST):
        await Node(1, server).join(Person("Mallory"))
    with refused(JoinReason.NOT_ON_THE_LIST):
        await Node(1, server).join(Person("mallory", provider="uni"))
    with refused(JoinReason.NOT_ON_THE_LIST):
        await Node(1, server).join(Person("not a name"))

    def found(name: str) -> list[str | None]:
        return [row.name for row in server.moderation.audit(name=name).rows]

    assert found("github:mallory") == found("github:MALLORY") == ["github:mallory"]
    assert found("mallory") == ["uni:mallory", "github:mallory"]
    assert found("nobody") == []


def test_a_name_at_a_provider_that_there_is_not_is_told_apart(server: Server) -> None:
    assert server.moderation.allow("github:alice", actor=ROOT).provider_is_known
    assert not server.moderation.allow("githbu:bob", actor=ROOT).provider_is_known
