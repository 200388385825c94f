"""An auth key, tokens, and nodes that have them: what tests of the token guard start from."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

from auth.keyring import Keyring, endorse
from auth.keys import SigningKey, fingerprint
from auth.revocations import Entry, NameEntry, RevocationList, Revocations, sign_list
from auth.roles import Role
from auth.tokens import Token, sign_token
from protocols.access import Access, TokenGuard
from protocols.guard import Guard
from protocols.identity import Identity, PeerId
from protocols.network import Network

RUN = "test-run"
HOUR_MS = 3_600_000
FOREVER_MS = 1 << 42


def seed(word: str) -> bytes:
    return hashlib.sha256(word.encode()).digest()


@dataclass
class Authority:
    """A stand-in for an auth server: it signs, and knows no clock."""

    run: str = RUN
    key: SigningKey = field(default_factory=lambda: SigningKey(seed("auth key")))
    serial: int = 0
    number: int = 0

    def __post_init__(self) -> None:
        self.records = [endorse(self.run, self.key.public_key, 0, FOREVER_MS, self.key)]

    @property
    def pinned(self) -> str:
        return fingerprint(self.records[0].public_key)

    def keyring(self) -> Keyring:
        return Keyring.from_pinned(self.run, self.pinned, self.records)

    def rotate(self) -> None:
        """Sign with a new key from now on, which the old one endorses."""
        new = SigningKey(seed(f"auth key {len(self.records)}"))
        self.records.append(endorse(self.run, new.public_key, 0, FOREVER_MS, self.key))
        self.key = new

    def token(
        self,
        peer: bytes,
        now_ms: int,
        *,
        name: str = "someone",
        roles: tuple[Role, ...] = (Role.VOLUNTEER,),
        life_ms: int = HOUR_MS,
        run: str | None = None,
    ) -> bytes:
        self.serial += 1
        return sign_token(
            Token(
                run or self.run,
                name,
                peer,
                roles,
                self.serial,
                self.key.key_id,
                now_ms,
                now_ms + life_ms,
            ),
            self.key,
        )

    def revoke(
        self,
        *names: str,
        at_ms: int,
        entries: tuple[Entry, ...] = (),
        withdrawn: tuple[bytes, ...] = (),
    ) -> bytes:
        """A signed list of everything that is revoked: these people, and these entries."""
        self.number += 1
        named = tuple(NameEntry(name, at_ms, FOREVER_MS) for name in names)
        return sign_list(
            RevocationList(
                self.run, self.number, at_ms, named + entries, withdrawn, self.key.key_id
            ),
            self.key,
        )


class Careless(Access):
    """Like a hostile node: shows any token that it is given, and asks for anything it likes."""

    shown: bytes = b""

    @property
    def token(self) -> bytes | None:
        return self.shown

    @token.setter
    def token(self, data: bytes | None) -> None:
        self.shown = data or b""

    def own_token(self, now_ms: int) -> bytes:  # noqa: ARG002
        return self.shown


class Admission:
    """Makes a guard for each node of a test, and keeps what each has in hand."""

    def __init__(self, *careless: str, **names_and_roles: tuple[Role, ...]) -> None:
        self.authority = Authority()
        self._careless = careless
        self.accesses: dict[PeerId, Access] = {}
        self._roles = names_and_roles

    @property
    def pair(self) -> tuple[Callable[[Network], Guard], Callable[[Network], Guard]]:
        return (lambda it: self.admit(it, "alice"), lambda it: self.admit(it, "bob"))

    def of(self, network: Network) -> Access:
        return self.accesses[network.peer_id]

    def admit(self, network: Network, name: str) -> TokenGuard:
        """The guard of a node whose owner has just logged in."""
        access = self.access(network.identity, name, clock_of(network))
        self.accesses[network.peer_id] = access
        return TokenGuard(access, network.random)

    def access(self, identity: Identity, name: str, clock_ms: Callable[[], int]) -> Access:
        authority = self.authority
        roles = self._roles.get(name, (Role.VOLUNTEER,))
        token = authority.token(identity.public_key, clock_ms(), name=name, roles=roles)
        type_ = Careless if name in self._careless else Access
        return type_(
            identity,
            authority.run,
            authority.keyring(),
            Revocations(authority.run),
            clock_ms,
            token=token,
        )

    def renew(self, network: Network, name: str, **how: object) -> None:
        access = self.of(network)
        access.token = self.authority.token(
            access.key.public_key,
            access.clock_ms(),
            name=name,
            **how,  # type: ignore[arg-type]
        )


def clock_of(network: Network) -> Callable[[], int]:
    return lambda: int(network.wall_time() * 1000)
