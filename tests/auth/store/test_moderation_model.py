"""Any order of joining, renewing and moderators' acts, held to a model of a dozen lines."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import trio
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from auth.keyring import Keyring
from auth.revocations import Revocations
from auth.server.accounts import UnknownName
from auth.server.join_refused import JoinReason, JoinRefused
from auth.server.moderation import NotDone
from auth.tokens import Token, read_token
from tests.auth.store.stores import ROOT, RUN, Clock, Node, Person, running

names = st.sampled_from(["alice", "bob"])
numbers = st.integers(0, 2)


@dataclass
class Issued:
    token: Token
    name: str
    node: int
    ended: bool = False  # with its name
    revoked: bool = False  # by its serial


class Moderated(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.open = ExitStack()
        self.clock = Clock()
        self.server = self.open.enter_context(running(self.folder / "auth", self.clock))
        self.nodes = [Node(number + 1, self.server) for number in range(3)]
        self.pinned = self.server.fingerprint
        self.states: dict[str, str] = {}
        self.owners: dict[int, str] = {}
        self.banned: set[int] = set()
        self.issued: list[Issued] = []
        self.peers = Revocations(RUN)

    def teardown(self) -> None:
        assert self.server.is_sound()
        self.open.close()
        shutil.rmtree(self.folder)

    # -- what the model expects ----------------------------------------------------------------

    def against(self, node: int, name: str, *, joining: bool) -> JoinReason | None:
        if joining and name not in self.states:
            return JoinReason.NOT_ON_THE_LIST
        if node in self.banned:
            return JoinReason.PEER_REVOKED
        if self.states[name] != "allowed":
            return JoinReason(self.states[name])
        owner = self.owners.get(node, name)
        if owner != name and self.states[owner] != "allowed":
            return JoinReason.PEER_OF_ANOTHER
        return None

    def ask(self, node: int, name: str, *, joining: bool) -> None:
        expected = self.against(node, name, joining=joining)
        asker = self.nodes[node]
        asker.next_challenge = None
        reason = None
        try:
            trio.run(partial(asker.join, Person(name)) if joining else asker.renew)
        except JoinRefused as refusal:
            reason = refusal.reason
        assert reason is expected
        if reason is None:
            self.owners[node] = name
            self.issued.append(Issued(read_token(asker.token), name, node))

    def end(self, name: str, state: str) -> None:
        self.states[name] = state
        for issued in self.issued:
            issued.ended = issued.ended or issued.name == name

    # -- what happens --------------------------------------------------------------------------

    @rule(node=numbers, name=names)
    def join(self, node: int, name: str) -> None:
        self.ask(node, name, joining=True)

    @rule(node=numbers)
    def renew(self, node: int) -> None:
        if node in self.owners:
            self.ask(node, self.owners[node], joining=False)
        elif self.nodes[node].token:  # its name was ended and allowed again
            self.nodes[node].next_challenge = None
            with pytest.raises(JoinRefused) as refused:
                trio.run(self.nodes[node].renew)
            assert refused.value.reason is JoinReason.LOGIN_OVER

    @rule(name=names)
    def allow(self, name: str) -> None:
        self.server.allow(name)
        if self.states.get(name, "allowed") != "allowed":
            self.owners = {node: owner for node, owner in self.owners.items() if owner != name}
        self.states[name] = "allowed"

    @rule(name=names)
    def deny(self, name: str) -> None:
        change = self.server.moderation.deny(name, actor=ROOT).change
        assert (change == "unchanged") == (self.states.get(name) == "denied")
        if change != "unchanged":
            self.end(name, "denied")

    @rule(name=names)
    def revoke(self, name: str) -> None:
        try:
            self.server.moderation.revoke(name, actor=ROOT)
        except (NotDone, UnknownName):
            assert self.states.get(name) in (None, "revoked")
        else:
            self.end(name, "revoked")

    @rule(node=numbers)
    def ban_or_lift(self, node: int) -> None:
        if node in self.banned:
            self.server.moderation.allow(self.nodes[node].peer_id, actor=ROOT)
        else:
            self.server.moderation.revoke(self.nodes[node].peer_id, actor=ROOT)
        self.banned ^= {node}

    @precondition(lambda self: self.issued)
    @rule(data=st.data())
    def revoke_or_lift_one_token(self, data: st.DataObject) -> None:
        issued = data.draw(st.sampled_from(self.issued))
        serial = str(issued.token.serial)
        if issued.revoked:
            self.server.moderation.allow(serial, actor=ROOT)
        else:
            self.server.moderation.revoke(serial, actor=ROOT)
        issued.revoked = not issued.revoked

    @rule(milliseconds=st.sampled_from([0, 1, 60_000]))
    def wait(self, milliseconds: int) -> None:
        self.clock.forward(milliseconds)

    @rule()
    def start_again(self) -> None:
        self.open.close()
        self.server = self.open.enter_context(running(self.folder / "auth", self.clock))
        for node in self.nodes:
            node.server = self.server

    @invariant()
    def every_peer_refuses_what_was_revoked_and_nothing_else(self) -> None:
        store = self.server.store
        keyring = Keyring.from_pinned(RUN, self.pinned, store.keys.records)
        self.peers.accept(store.revocation_list().signed, keyring)
        for issued in self.issued:
            dead = issued.ended or issued.revoked or issued.node in self.banned
            assert self.peers.refuses(issued.token) == dead, issued


Moderated.TestCase.settings = settings(
    max_examples=12,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestModerated = pytest.mark.slow(Moderated.TestCase)
