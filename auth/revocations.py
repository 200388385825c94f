"""Excluding peers before their tokens expire: a numbered, signed list.

An entry names a peer, a user or a token's serial, and a time. It refuses the tokens that were
issued *before* that time; a person who is allowed again gets a new token, which is valid. An entry
can be dropped once every token that it refuses has expired.

The list travels from the auth server to every node and from node to node, so it is small
(LIMIT_BYTES) and any node can verify it alone. Of two genuine lists the newer wins: the one of the
deeper key (see `keyring`), then the higher number. So a stolen old key cannot freeze the list by
signing an enormous number.

"Issued before" is strict. If a server revokes in the same millisecond in which it issued a token,
it must use the next millisecond as the time of revocation.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec
from blake3 import blake3
from msgspec import Meta

from auth.documents import DocumentType, encode
from auth.errors import AuthError, UntrustedDocument
from auth.fields import LARGEST_COUNT, KeyId, PublicKey, RunName, Serial, TimeMs, Username
from auth.keyring import MOST_KEYS, Keyring
from auth.keys import KEY_ID_BYTES, SIGNATURE_BYTES, SigningKey
from auth.tokens import Token

DOMAIN = b"potluck revocations 1"
LIMIT_BYTES = 60 << 10  # fits a slot of the directory, and a quick poll
MOST_ENTRIES = 4_096  # the shortest has 23 bytes: more do not fit
WITHDRAWN_BYTES = KEY_ID_BYTES + 2  # of each withdrawn key, encoded


class PeerEntry(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, tag="p"):
    """Revokes one key: a stolen laptop."""

    peer: PublicKey
    revoked_at_ms: TimeMs
    forget_at_ms: TimeMs


class NameEntry(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, tag="n"):
    """Revokes one person, with every key they have."""

    username: Username
    revoked_at_ms: TimeMs
    forget_at_ms: TimeMs


class SerialEntry(
    msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, tag="s"
):
    """Revokes one token."""

    serial: Serial
    revoked_at_ms: TimeMs
    forget_at_ms: TimeMs


Entry = PeerEntry | NameEntry | SerialEntry


class RevocationList(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Everything that one auth key has revoked in its run. Higher numbers replace lower ones."""

    run: RunName
    number: Annotated[int, Meta(ge=0, le=LARGEST_COUNT)]
    issued_ms: TimeMs
    entries: Annotated[tuple[Entry, ...], Meta(max_length=MOST_ENTRIES)]
    withdrawn: Annotated[tuple[KeyId, ...], Meta(max_length=MOST_KEYS)]  # ids of auth keys
    key_id: KeyId


_LISTS = DocumentType(RevocationList, "revocation list", DOMAIN, LIMIT_BYTES)


class RevocationsFull(AuthError):
    """There are more revocations than a list can carry."""

    def __init__(self, size: int, *, room: str = "") -> None:
        super().__init__(
            f"The revocation list would have {size:,} bytes{room}; {LIMIT_BYTES:,} can be spread.",
            why="Very many were revoked within the life of a token. (Revoking a person by name "
            "takes one entry, for all of their keys.)",
            advice="Withdraw the auth key that signs (`potluck auth keys list` shows it): "
            "`potluck auth keys withdraw KEY` refuses every token that it has signed, and takes "
            "the entries for those off the list. If another key signed a few hours ago, or the "
            "server was put back from a backup in the last week, first withdraw every older key "
            "in the same way (and before that, give the server each key that it lacks). Nodes that "
            "are still allowed get new tokens by themselves. Then repeat this command.",
        )


def sign_list(revocations: RevocationList, key: SigningKey) -> bytes:
    """The signed bytes; RevocationsFull if it is too large to be spread."""
    if revocations.key_id != key.key_id:
        raise ValueError("the list names another key than the one that signs it")
    size = len(encode(revocations)) + SIGNATURE_BYTES
    if size > LIMIT_BYTES or len(revocations.entries) > MOST_ENTRIES:
        raise RevocationsFull(size)
    return _LISTS.sign(revocations, key)


def check_room_for_keys(data: bytes) -> None:
    """RevocationsFull unless this list has room to withdraw every key that a run can have."""
    size = len(data) + (MOST_KEYS - len(read_list(data).withdrawn)) * WITHDRAWN_BYTES
    if size > LIMIT_BYTES:
        raise RevocationsFull(size, room=", with the room to withdraw auth keys")


def read_list(data: bytes) -> RevocationList:
    """The list in these bytes, unverified; MalformedDocument if they are not a list."""
    return _LISTS.read(data)


def collapsed(entries: Iterable[Entry], now_ms: int) -> tuple[Entry, ...]:
    """The entries that still refuse something, one for each subject, the latest of each."""
    latest: dict[tuple[type[Entry], bytes | str | int], Entry] = {}
    for entry in entries:
        if entry.forget_at_ms <= now_ms:
            continue
        named = (type(entry), _named(entry))
        known = latest.get(named)
        if known is None or known.revoked_at_ms < entry.revoked_at_ms:
            latest[named] = entry
    return tuple(latest.values())


def _named(entry: Entry) -> bytes | str | int:
    match entry:
        case PeerEntry(peer=peer):
            return peer
        case NameEntry(username=username):
            return username
        case SerialEntry(serial=serial):
            return serial


def held_digest(signed_list: bytes) -> str:
    """By which a node says to the server which list it holds."""
    return blake3(signed_list).hexdigest(16)


class Revocations:
    """The newest list that was accepted, in a form for quick lookups."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.newest = b""  # the signed bytes, to be passed on; empty at first
        self.number = -1
        self.issued_ms = 0
        self._depth = -1
        self._peers: dict[bytes, int] = {}
        self._names: dict[str, int] = {}
        self._serials: set[int] = set()

    def accept(self, data: bytes, keyring: Keyring) -> bool:
        """Use a list if it is genuine and newer than ours; returns whether it was.

        MalformedDocument or UntrustedDocument if it is not a genuine list. A list that withdraws
        auth keys withdraws them from the keyring.
        """
        if data == self.newest:
            return False
        revocations = read_list(data)
        trusted = keyring.find(revocations.key_id)
        if (
            revocations.run != self.run
            or trusted is None
            or not trusted.signs_at(revocations.issued_ms)
            or not _LISTS.genuine(data, trusted.key)
        ):
            raise UntrustedDocument(
                "A revocation list is not signed by a key of this run's auth server.",
                why="It is of another run, was made by somebody else, or is signed with a key "
                "that is newer than those known here.",
                advice="Fetch the auth server's keys, and then the list again.",
            )
        if (trusted.depth, revocations.number) <= (self._depth, self.number):
            return False
        self._take(data, revocations, trusted.depth)
        keyring.withdraw(revocations.withdrawn, by=revocations.key_id)
        return True

    def refuses(self, token: Token) -> bool:
        """Whether the token was revoked, by its serial, its peer or its user."""
        return token.serial in self._serials or self.refuses_its_owner(token)

    def refuses_its_owner(self, token: Token) -> bool:
        """Whether its peer or its user was revoked, so that no other token of it counts either."""
        return token.issued_ms < max(
            self._peers.get(token.peer, 0), self._names.get(token.username, 0)
        )

    def __len__(self) -> int:
        return len(self._peers) + len(self._names) + len(self._serials)

    def _take(self, data: bytes, revocations: RevocationList, depth: int) -> None:
        self.newest = data
        self.number = revocations.number
        self.issued_ms = revocations.issued_ms
        self._depth = depth
        self._peers, self._names, self._serials = {}, {}, set()
        for entry in revocations.entries:
            at_ms = entry.revoked_at_ms
            match entry:
                case PeerEntry(peer=peer):
                    self._peers[peer] = max(at_ms, self._peers.get(peer, 0))
                case NameEntry(username=username):
                    self._names[username] = max(at_ms, self._names.get(username, 0))
                case SerialEntry(serial=serial):
                    self._serials.add(serial)
