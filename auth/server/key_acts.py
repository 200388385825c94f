"""The acts of moderators on the auth keys: a new one, one taken out of use, a courier's token.

A new key is published at once and signs only after the overlap, when every node has met it in its
keyring. A key that may be in wrong hands is withdrawn: from then on no token of it counts, and
every node that is still allowed gets a new token by itself, at its next renewal.

Easy to get wrong: withdrawing the key that signs. There must be another one, endorsed while the
old one still counted; so it is made first, in the same transaction, and signs at once.
"""

from __future__ import annotations

import secrets

import msgspec

from auth.errors import AuthError
from auth.keys import SEED_BYTES, SigningKey, fingerprint
from auth.roles import Role
from auth.server import listings, revoked, signing_keys
from auth.server.audit import Act, Entry
from auth.server.signing_keys import SigningKeys
from auth.server.store import Store
from auth.server.transaction import Transaction
from auth.tokens import DEFAULT_LIFE_MS, Token, sign_token

SHORTEST_OVERLAP_MS = 90_000
"""Nodes ask for lists and keys every 20 s or so; four misses, and the difference of clocks."""

COURIER_NAME = "auth-server"
COURIER_LIFE_MS = 5 * 60 * 1000


class KeyRotated(msgspec.Struct, frozen=True, kw_only=True):
    new: listings.KeyView
    old: listings.KeyView
    signs_from_ms: int


class KeyWithdrawn(msgspec.Struct, frozen=True, kw_only=True):
    withdrawn: listings.KeyView
    new: listings.KeyView | None
    """The key that was made because the withdrawn one was the one in use."""
    list_number: int


class NoSuchKey(AuthError):
    """There is no auth key with this id or fingerprint here, or it was withdrawn already."""


class KeyActs:
    def __init__(self, store: Store) -> None:
        self._store = store

    def rotate(
        self, *, overlap_ms: int = DEFAULT_LIFE_MS, actor: str, reason: str = ""
    ) -> KeyRotated:
        """A new key: published now, signing after the overlap (the life of a token, usually)."""

        def operation(transaction: Transaction) -> KeyRotated:
            now_ms, keys = transaction.now_ms, self._store.latest_keys()
            old = keys.active_row(now_ms)
            if keys.newest().record.from_ms > now_ms:
                raise NoSuchKey(
                    "A new key is on its way already.",
                    why=f"{keys.newest().key_id.hex()} is published, and signs when its time "
                    "comes.",
                    advice="Wait for that; if it must not be used, withdraw it.",
                )
            from_ms = now_ms + max(overlap_ms, SHORTEST_OVERLAP_MS)
            after = self._make(transaction, keys, from_ms, actor, reason)
            self._store.publish(transaction, keys=after)
            return KeyRotated(
                new=listings.key_view(after, after.rows[-1], now_ms),
                old=listings.key_view(after, old, now_ms),
                signs_from_ms=from_ms,
            )

        return self._store.writer.run(operation, urgent=True)

    def withdraw(self, key: str, *, actor: str, reason: str = "") -> KeyWithdrawn:
        """Nothing that this key (its id or fingerprint) signed counts any more, from now on."""

        def operation(transaction: Transaction) -> KeyWithdrawn:
            now_ms, keys = transaction.now_ms, self._store.latest_keys()
            row = _find(keys, key)
            made = None
            newer = [other for other in keys.rows if other.place > row.place]
            if not any(
                other.withdrawn_ms is None and other.record.from_ms <= now_ms for other in newer
            ):
                keys = self._make(transaction, keys, now_ms, actor, "in place of a withdrawn key")
                made = keys.rows[-1]
            signing_keys.withdraw(transaction.connection, row.key_id, now_ms)
            after = keys.without(row.key_id, now_ms)
            self._store.publish(transaction, keys=after)
            transaction.log(
                Entry(
                    act=Act.KEY_WITHDRAWN, actor=actor, reason=reason,
                    detail=f"{row.key_id.hex()} {fingerprint(row.record.public_key)}",
                )
            )  # fmt: skip
            path = self._store.paths.keys / signing_keys.file_name(row.key_id)
            transaction.after_commit(lambda: signing_keys.remove_key_file(path))
            gone = after.rows[row.place]
            return KeyWithdrawn(
                withdrawn=listings.key_view(after, gone, now_ms),
                new=None if made is None else listings.key_view(after, made, now_ms),
                list_number=self._store.latest_list_number(),
            )

        return self._store.writer.run(operation, urgent=True)

    def courier_token(
        self, peer: bytes, *, life_ms: int = COURIER_LIFE_MS, actor: str, reason: str = ""
    ) -> bytes:
        """A token for a key of the server's own, to bring a list to the peers while it is stopped.

        It has a short life, the role of a backbone, and stands in the audit log only.
        """

        def operation(transaction: Transaction) -> tuple[Token, SigningKey]:
            now_ms = transaction.now_ms
            key = self._store.latest_keys().active(now_ms)
            _, earliest_ms = revoked.against(transaction.connection, peer, COURIER_NAME)
            issued_ms = max(now_ms, earliest_ms)
            token = Token(
                run=self._store.run,
                username=COURIER_NAME,
                peer=peer,
                roles=(Role.BACKBONE,),
                serial=transaction.next_serial(),
                key_id=key.key_id,
                issued_ms=issued_ms,
                expires_ms=issued_ms + life_ms,
            )
            transaction.log(
                Entry(act=Act.COURIER, actor=actor, reason=reason, name=COURIER_NAME, peer=peer,
                      serial=token.serial, detail=f"for {life_ms // 1000} s")
            )  # fmt: skip
            return token, key

        return sign_token(*self._store.writer.run(operation, urgent=True))

    def _make(
        self, transaction: Transaction, keys: SigningKeys, from_ms: int, actor: str, reason: str
    ) -> SigningKeys:
        key = SigningKey(secrets.token_bytes(SEED_BYTES))
        row = keys.successor(key, transaction.now_ms, from_ms)
        path = signing_keys.write_key_file(self._store.paths.keys, key)
        transaction.if_undone(lambda: signing_keys.remove_key_file(path))
        signing_keys.keep_row(transaction.connection, row)
        transaction.log(
            Entry(act=Act.KEY_MADE, actor=actor, reason=reason,
                  detail=f"{key.key_id.hex()} {fingerprint(key.public_key)}")
        )  # fmt: skip
        return keys.with_new(row, key)


def _find(keys: SigningKeys, wanted: str) -> signing_keys.KeyRow:
    wanted = wanted.strip().lower()
    for row in keys.rows:
        if wanted in (row.key_id.hex(), fingerprint(row.record.public_key)):
            if row.withdrawn_ms is not None:
                raise NoSuchKey(
                    f"The key {wanted} was withdrawn already.",
                    why="That cannot be taken back.",
                    advice="`potluck auth keys list` shows when.",
                )
            return row
    raise NoSuchKey(
        f"There is no auth key {wanted[:64]!r} here.",
        why="It is mistyped, or of another run.",
        advice="`potluck auth keys list` shows the ids and fingerprints.",
    )
