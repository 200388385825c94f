"""Signatures that were checked already, so that the same slot costs Ed25519 once.

The same slot arrives many times: from each of its replicas in one read, and again at every
republishing. Verifying takes about 80 microseconds, hashing about 1; so what was verified is
remembered by its digest, which covers the signature and everything that is signed.

Easy to get wrong: only what *passed* is remembered. Remembering failures as well would let a
stranger fill this with rubbish at the price of one message.
"""

from __future__ import annotations

from protocols.dht.slots import Slot, check_form, check_signature, digest_of

REMEMBERED_SLOTS = 16_384  # about 2.5 MiB; more than one node's replicas and reads in a minute


class VerifiedSlots:
    """Invariant: at most `limit` digests, each of a slot whose signature was right.

    The oldest half is forgotten at once when it is full, which costs less than keeping an order.
    """

    def __init__(self, limit: int = REMEMBERED_SLOTS) -> None:
        if limit < 2:
            raise ValueError("remembering needs room for two")
        self._half = limit // 2
        self._recent: set[bytes] = set()
        self._before: set[bytes] = set()
        self.signatures_checked = 0
        """How often Ed25519 was really computed: for statistics and tests."""

    def __len__(self) -> int:
        return len(self._recent) + len(self._before)

    def check(self, slot: Slot) -> None:
        """SlotRefused unless the publisher signed exactly this."""
        check_form(slot)
        digest = digest_of(slot)
        if digest in self._recent:
            return
        if digest in self._before:
            self._before.discard(digest)
        else:
            self.signatures_checked += 1
            check_signature(slot)
        self._remember(digest)

    def remember(self, slot: Slot) -> None:
        """Take a slot that this node signed itself for verified."""
        self._remember(digest_of(slot))

    def _remember(self, digest: bytes) -> None:
        if len(self._recent) >= self._half:
            self._before = self._recent
            self._recent = set()
        self._recent.add(digest)
