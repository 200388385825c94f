"""The auth keys that a run trusts: each but the first is endorsed by an older one.

An invite pins one key by its fingerprint. Auth keys rotate, and invites are on paper and in chat
logs. So a new key is signed by an earlier one, and the chain of records leads from the pinned key
to the one that signs today:

    pinned in the invite -> K1 (signs itself) -> endorses K2 -> endorses K3, which signs tokens now

During the overlap tokens of K2 and K3 are both valid. A key signs tokens only between its `from_ms`
and `until_ms`; its endorsements stay valid for longer, or old invites would die with it. A
*withdrawn* key (lost, stolen) is no longer trusted: none of its tokens is valid, and no key that it
endorses from now on.

Easy to get wrong: a thief with a stolen key can endorse keys as well as we can. A key's *depth* is
its distance from the pinned one, and a shallower key never overrules a deeper one. So the successor
decides about the predecessor, and not the other way round. A key has one successor: the first one
seen. Any other key that it endorses stands *beside* the chain. It is valid (a server that was
restored from a backup has to rotate anew), but it is no deeper than the key where it left the
chain, however long a thief makes his own chain, and it falls with that key. A person with only an
invite that pins a stolen key cannot be protected: withdraw the key, and make new invites.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

from auth.documents import encode
from auth.errors import UntrustedDocument
from auth.fields import KeyId, PublicKey, RunName, Signature, TimeMs
from auth.keys import SigningKey, VerifyingKey, fingerprint, is_nobodys_key, key_id
from auth.tokens import CLOCK_TOLERANCE_MS, Token

DOMAIN = b"potluck key 1"
MOST_KEYS = 32  # a rotation each month for two years and a half; then new invites are due
MOST_BESIDE = 8  # of those: a thief must not use up the room for later keys
MOST_WITHDRAWN = 1_024  # ids; far more than a run ever withdraws


class KeyRecord(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """An auth key, the time in which it signs, and the signature of the key that endorses it.

    The first key of a run endorses itself. Times are milliseconds since 1970.
    """

    public_key: PublicKey
    from_ms: TimeMs
    until_ms: TimeMs
    endorsed_by: KeyId
    signature: Signature

    @property
    def key_id(self) -> bytes:
        return key_id(self.public_key)


KeyRecords = Annotated[tuple[KeyRecord, ...], Meta(max_length=MOST_KEYS)]


def endorse(
    run: RunName, public_key: bytes, from_ms: int, until_ms: int, by: SigningKey
) -> KeyRecord:
    """A record of the key, endorsed by an older one (or by itself, for a run's first)."""
    if not from_ms < until_ms:
        raise ValueError("a key is valid from before until after")
    signature = by.sign(DOMAIN, _endorsed(run, public_key, from_ms, until_ms, by.key_id))
    return KeyRecord(public_key, from_ms, until_ms, by.key_id, signature)


class TrustedKey(msgspec.Struct, frozen=True):
    """A key that the chain of endorsements reaches, `depth` steps from the pinned one.

    `left_at` is the id of the key at which it left the chain, if it stands beside it; empty if it
    is in the chain itself.
    """

    key: VerifyingKey
    record: KeyRecord
    depth: int
    left_at: bytes = b""

    def signs_at(self, time_ms: int) -> bool:
        """Whether its signatures at that time are valid; the signer's clock may be a little
        behind."""
        earliest_ms = self.record.from_ms - CLOCK_TOLERANCE_MS
        return earliest_ms <= time_ms <= self.record.until_ms


class Keyring:
    """The trusted auth keys of one run.

    Invariant: every key here is the pinned one, or was endorsed by a key here that was not
    withdrawn when the record was added. `find` never returns a withdrawn key.
    """

    def __init__(self, run: str, root: KeyRecord) -> None:
        """Trust this key unconditionally. `from_pinned` checks its fingerprint."""
        self.run = run
        self._trusted = {root.key_id: TrustedKey(VerifyingKey(root.public_key), root, 0)}
        self._withdrawn: dict[bytes, int] = {}  # by id: the depth of the key that withdrew it

    @classmethod
    def from_pinned(cls, run: str, pinned: str, records: Iterable[KeyRecord]) -> Keyring:
        """The keys that are reached from the one with this fingerprint; UntrustedDocument if none.

        Records without a trusted endorsement are left out.
        """
        records = tuple(records)
        for record in records:
            if fingerprint(record.public_key) == pinned and _vouched_for(run, record, records):
                keyring = cls(run, record)
                keyring.add(records)
                return keyring
        raise UntrustedDocument(
            "The auth server's keys are not those that the invite speaks of.",
            why=f"None of them has the fingerprint {pinned}: it is another server, or it has been "
            "set up anew.",
            advice="Ask the run's moderators for a new invite, and tell them about this.",
        )

    def add(self, records: Iterable[KeyRecord]) -> int:
        """Add the keys that a trusted key endorses, in any order; returns how many."""
        waiting = list(records)[:MOST_KEYS]
        before = len(self._trusted)
        reached = True
        while reached:  # each record is verified once, when its endorser is there
            ready = [record for record in waiting if self.find(record.endorsed_by)]
            waiting = [record for record in waiting if record not in ready]
            reached = bool(ready)
            for record in ready:
                self._take(record)
        return len(self._trusted) - before

    def withdraw(self, key_ids: Iterable[bytes], *, by: bytes) -> None:
        """Stop trusting these keys, as key `by` says. It has no say about deeper keys than itself.

        A key that is not known yet is withdrawn as well: its record may come later. There is always
        room for those that are known.
        """
        word = self.find(by)
        if word is None:
            return
        for withdrawn in key_ids:
            has_room = len(self._withdrawn) < MOST_WITHDRAWN
            is_known = withdrawn in self._withdrawn or withdrawn in self._trusted
            if (is_known or has_room) and withdrawn != by:
                self._withdrawn[withdrawn] = max(word.depth, self._withdrawn.get(withdrawn, 0))

    def find(self, wanted: bytes) -> TrustedKey | None:
        """The trusted key with this id, unless it was withdrawn."""
        trusted = self._trusted.get(wanted)
        if trusted is None or trusted.depth <= self._withdrawn.get(wanted, -1):
            return None
        if trusted.left_at and self.find(trusted.left_at) is None:
            return None
        return trusted

    def allows(self, token: Token) -> TrustedKey | None:
        """The key that may have signed this token; None if no trusted key could have at that
        time."""
        trusted = self.find(token.key_id)
        if trusted is None or not trusted.signs_at(token.issued_ms):
            return None
        return trusted

    @property
    def records(self) -> tuple[KeyRecord, ...]:
        """All records, from which the same keyring can be made again (without withdrawals)."""
        return tuple(trusted.record for trusted in self._trusted.values())

    @property
    def withdrawn(self) -> frozenset[bytes]:
        """The ids of keys that were trusted once and are no more."""
        return frozenset(id_ for id_ in self._trusted if self.find(id_) is None)

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """The fingerprints of all keys here that are not withdrawn: an invite may pin any."""
        return tuple(
            fingerprint(trusted.key.public_key)
            for id_, trusted in self._trusted.items()
            if self.find(id_) is not None
        )

    def _take(self, record: KeyRecord) -> None:
        """Trust one more key, if there is room and its record is valid."""
        endorser = self.find(record.endorsed_by)
        if endorser is None or record.key_id in self._trusted or len(self._trusted) >= MOST_KEYS:
            return
        if _is_endorsed(self.run, record, endorser.key):
            key = VerifyingKey(record.public_key)
            left_at = endorser.left_at
            if not left_at and self._has_successor(record.endorsed_by):
                left_at = record.endorsed_by
            if not left_at:
                self._trusted[key.key_id] = TrustedKey(key, record, endorser.depth + 1)
            elif self._beside() < MOST_BESIDE:
                self._trusted[key.key_id] = TrustedKey(key, record, endorser.depth, left_at)

    def _has_successor(self, id_: bytes) -> bool:
        """Whether a key in the chain has a successor already, withdrawn or not."""
        return any(
            trusted.record.endorsed_by == id_ and not trusted.left_at and other != id_
            for other, trusted in self._trusted.items()
        )

    def _beside(self) -> int:
        return sum(1 for trusted in self._trusted.values() if trusted.left_at)


def _vouched_for(run: str, record: KeyRecord, records: tuple[KeyRecord, ...]) -> bool:
    """Whether a pinned key's record is complete: signed by itself, or by a key in `records`.

    The key is trusted because it is pinned; this finds mistakes in its record.
    """
    return any(
        _is_endorsed(run, record, VerifyingKey(other.public_key))
        for other in records[:MOST_KEYS]
        if other.key_id == record.endorsed_by
    )


def _is_endorsed(run: str, record: KeyRecord, by: VerifyingKey) -> bool:
    if not record.from_ms < record.until_ms or is_nobodys_key(record.public_key):
        return False
    signed = _endorsed(run, record.public_key, record.from_ms, record.until_ms, record.endorsed_by)
    return by.verify(DOMAIN, record.signature, signed)


def _endorsed(
    run: str, public_key: bytes, from_ms: int, until_ms: int, endorsed_by: bytes
) -> bytes:
    return encode((run, public_key, from_ms, until_ms, endorsed_by))
