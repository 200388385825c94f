"""An auth server's state in a temporary folder, a clock that tests set, and people who join."""

from __future__ import annotations

import atexit
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from auth.challenges import LOGIN, RENEW, prove
from auth.keys import SigningKey, peer_id_of
from auth.passes import AccessPass, open_pass
from auth.server.issuing import Granted, Issuer, IssuerSettings, ProvenPeer
from auth.server.moderation import Moderation
from auth.server.store import Store, create_store, open_store

RUN = "demo-1"
ROOT = "local:root"
ADDRESS = "192.0.2.7"
HOUR_MS = 3600 * 1000
START_MS = 1_800_000_000_000


@dataclass
class Clock:
    now_ms: int = START_MS

    def __call__(self) -> int:
        return self.now_ms

    def forward(self, milliseconds: int) -> None:
        self.now_ms += milliseconds


@dataclass(frozen=True)
class Person:
    login: str
    provider: str = "github"
    number: str = ""

    @property
    def subject(self) -> str:
        return self.number or f"subject of {self.login}"


@dataclass
class Server:
    """An open store with all that stands on it."""

    store: Store
    clock: Clock
    fingerprint: str
    steady: Clock = field(default_factory=lambda: Clock(1000))

    def __post_init__(self) -> None:
        self.moderation = Moderation(self.store, providers=("github",))
        self.issuer = Issuer(
            self.store,
            IssuerSettings(
                auth_url="https://auth.example", endpoints=("/ip4/192.0.2.1/tcp/1",),
                token_life_ms=HOUR_MS, grace_ms=HOUR_MS, keys_per_account=3,
            ),
            steady_ms=self.steady,
        )  # fmt: skip

    def allow(self, name: str, *roles: str) -> None:
        self.moderation.allow(name, roles=roles or None, actor=ROOT)

    def acts(self) -> list[str]:
        """The entries of the log, oldest first, without its first two rows."""
        rows = self.moderation.audit(limit=5000).rows
        return [row.act for row in reversed(rows)][2:]

    def newest(self, act: str) -> str:
        """The reason in the newest row of this act."""
        return self.moderation.audit(act=act, limit=1).rows[0].reason

    def pass_a_minute(self) -> None:
        """Have the writer do its housekeeping now, and wait until it has."""
        writer = self.store.writer
        writer._minute_due = 0.0
        for _ in range(2):  # it is done between these
            writer.run(lambda _transaction: None)

    def is_sound(self) -> bool:
        return self.moderation.verify().sound


class Node:
    """A volunteer's node: it has a key, and asks for passes."""

    def __init__(self, number: int, server: Server, pinned: str | None = None) -> None:
        self.key = SigningKey(number.to_bytes(32, "big"))
        self.server = server
        self.pinned = server.fingerprint if pinned is None else pinned
        self.token = b""
        self.next_challenge: bytes | None = None

    @property
    def peer(self) -> bytes:
        return self.key.public_key

    @property
    def peer_id(self) -> str:
        return peer_id_of(self.key.public_key)

    async def proven(self, purpose: str, challenge: bytes | None = None) -> ProvenPeer:
        issuer = self.server.issuer
        if challenge is None:
            challenge, _ = issuer.challenge(self.peer)
        proof = prove(self.key, challenge, RUN, self.pinned, purpose)
        return await issuer.prove(self.peer, challenge, proof, purpose, ADDRESS)

    async def join(self, person: Person) -> AccessPass:
        proven = await self.proven(LOGIN)
        return self._take(await self.server.issuer.join(proven, person, ADDRESS), proven)

    async def join_by_code(self, code: str) -> AccessPass:
        proven = await self.proven(LOGIN)
        return self._take(await self.server.issuer.join_by_code(proven, code, ADDRESS), proven)

    async def renew(self) -> AccessPass:
        proven = await self.proven(RENEW, self.next_challenge)
        return self._take(await self.server.issuer.renew(proven, self.token, ADDRESS), proven)

    def _take(self, granted: Granted, proven: ProvenPeer) -> AccessPass:
        opened = open_pass(
            granted.pass_bytes, run=RUN, fingerprint=self.pinned, peer=self.peer,
            challenge=proven.challenge,
        )  # fmt: skip
        self.token = opened.access_pass.token
        self.next_challenge = opened.access_pass.next_challenge
        return opened.access_pass


_templates = ExitStack()  # closed when the tests end
atexit.register(_templates.close)


@cache
def _made_at(now_ms: int) -> Path:
    """A new store of this moment, to be copied: making one takes 40 ms, and many syncs."""
    folder = Path(_templates.enter_context(TemporaryDirectory())) / "auth"
    create_store(folder, RUN, actor=ROOT, clock_ms=Clock(now_ms), seed=b"\x07" * 32)
    return folder


@contextmanager
def running(folder: Path, clock: Clock | None = None) -> Iterator[Server]:
    """The server of this folder, made if there is none."""
    clock = Clock() if clock is None else clock
    if not (folder / "auth.sqlite").exists():
        shutil.copytree(_made_at(clock()), folder, dirs_exist_ok=True)
    with open_store(folder, clock_ms=clock) as store:
        yield Server(store, clock, store.fingerprint)
