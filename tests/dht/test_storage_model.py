"""Storage against a model so naive that it must be right: a dictionary, scanned whole each time.

The limits are tiny and the publishers few, so that every limit is met often.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as some
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from protocols.dht import Families, Family, Slot, SlotRefused
from protocols.dht.families import CLOCK_TOLERANCE_MS
from protocols.dht.slots import SlotRefusal, digest_of, sign_slot
from protocols.dht.storage import (
    OURSELVES,
    SLOT_OVERHEAD_BYTES,
    Sender,
    Storage,
    StorageLimits,
    Stored,
)
from protocols.identity import Identity
from tests.dht.publishers import NOW, SECOND, publisher, text

SLOTS_PER_KEY = 2
KEYS_PER_PUBLISHER = 3
LONGEST_TTL_SECONDS = 100
VALUE_LIMIT_BYTES = 200
TOTAL_BYTES = 6 * SLOT_OVERHEAD_BYTES + 100
BYTES_PER_KEY = 2 * SLOT_OVERHEAD_BYTES + 120
BYTES_PER_PUBLISHER = 3 * SLOT_OVERHEAD_BYTES + 130
BYTES_PER_SENDER = 3 * SLOT_OVERHEAD_BYTES + 140

PUBLISHERS = [publisher(number) for number in range(1, 5)]
KEYS = [f"{family}/{name}" for family in ("word", "number") for name in "abc"]
VALUES = [text(""), text("x" * 60), text("x" * 90), text("x" * 300), msgspec.msgpack.encode(7)]

# Two from one network, one from nowhere public, and this node itself.
SENDERS = [
    Sender(PUBLISHERS[0].public_key, "192.0.2.0/24"),
    Sender(PUBLISHERS[1].public_key, "192.0.2.0/24"),
    Sender(PUBLISHERS[2].public_key, "carol"),
    OURSELVES,
]

FAMILIES = Families(
    Family(name, type_, VALUE_LIMIT_BYTES, SLOTS_PER_KEY, LONGEST_TTL_SECONDS, BYTES_PER_KEY)
    for name, type_ in (("word", str), ("number", int))
)


@dataclass
class Kept:
    slot: Slot | None
    sequence: int
    forget_at: int
    share: str

    @property
    def size(self) -> int:
        return SLOT_OVERHEAD_BYTES + (len(self.slot.value) if self.slot else 0)


class NaiveStorage:
    def __init__(self) -> None:
        self.kept: dict[tuple[str, bytes], Kept] = {}

    def size(self, key: str = "", publisher: bytes = b"", share: str = "") -> int:
        return sum(
            one.size
            for (its_key, its_publisher), one in self.kept.items()
            if key in ("", its_key)
            and publisher in (b"", its_publisher)
            and share in ("", one.share)
        )

    def expire(self, now: int) -> None:
        for name, one in list(self.kept.items()):
            if one.slot is not None and one.slot.expires <= now:
                one.slot = None
            if one.slot is None and one.forget_at <= now:
                del self.kept[name]

    def share(self, slot: Slot, sender: Sender) -> str | None:
        """The share that the slot would count for; None if none has room."""
        known = self.kept.get((slot.key, slot.publisher))
        wanted = sender.share
        if wanted and sender.public_key != slot.publisher:
            wanted += ", of others"
        size = SLOT_OVERHEAD_BYTES + len(slot.value)
        for share in [wanted, *([known.share] if known else [])]:
            growth = size - (known.size if known and known.share == share else 0)
            if not share or growth <= 0 or self.size(share=share) + growth <= BYTES_PER_SENDER:
                return share
        return None

    def judge(self, slot: Slot, sender: Sender, authentic: bool, now: int) -> SlotRefusal | Stored:
        family, _, _ = slot.key.partition("/")
        name = (slot.key, slot.publisher)
        known = self.kept.get(name)
        if slot.withdrawn and slot.value:
            return SlotRefusal.MALFORMED
        if len(slot.value) > VALUE_LIMIT_BYTES:
            return SlotRefusal.TOO_LARGE
        if slot.expires <= now:
            return SlotRefusal.EXPIRED
        if slot.expires > now + LONGEST_TTL_SECONDS * SECOND + CLOCK_TOLERANCE_MS:
            return SlotRefusal.EXPIRY_TOO_FAR
        if known is None:
            if sum(key == slot.key for key, _ in self.kept) >= SLOTS_PER_KEY:
                return SlotRefusal.SLOTS_PER_KEY
        elif known.slot == slot:
            return Stored.UNCHANGED
        elif slot.sequence < known.sequence or (
            slot.sequence == known.sequence
            and (known.slot is None or digest_of(slot) > digest_of(known.slot))
        ):
            return SlotRefusal.OLDER_SEQUENCE
        growth = SLOT_OVERHEAD_BYTES + len(slot.value) - (known.size if known else 0)
        if growth > 0:
            if self.size(key=slot.key) + growth > BYTES_PER_KEY:
                return SlotRefusal.BYTES_PER_KEY
            if known is None and self.keys_of(slot.publisher) >= KEYS_PER_PUBLISHER:
                return SlotRefusal.KEYS_PER_PUBLISHER
            if self.size(publisher=slot.publisher) + growth > BYTES_PER_PUBLISHER:
                return SlotRefusal.BYTES_PER_PUBLISHER
            if self.size() + growth > TOTAL_BYTES:
                return SlotRefusal.MEMORY
        if self.share(slot, sender) is None:
            return SlotRefusal.BYTES_PER_SENDER
        if not slot.withdrawn and type(msgspec.msgpack.decode(slot.value)) is not (
            str if family == "word" else int
        ):
            return SlotRefusal.WRONG_SCHEMA
        if not authentic:
            return SlotRefusal.BAD_SIGNATURE
        return Stored.REPLACED if known and known.slot else Stored.NEW

    def keys_of(self, publisher: bytes) -> int:
        return sum(one == publisher for _, one in self.kept)

    def store(self, slot: Slot, sender: Sender) -> None:
        name = (slot.key, slot.publisher)
        known = self.kept.get(name)
        forget_at = max(slot.expires, known.forget_at if known else 0)
        share = self.share(slot, sender)
        assert share is not None
        self.kept[name] = Kept(slot, slot.sequence, forget_at, share)

    def brought_again(self, slot: Slot, sender: Sender) -> None:
        known = self.kept[slot.key, slot.publisher]
        if sender.public_key == slot.publisher and known.share != sender.share:
            others = self.size(share=sender.share)
            if not sender.share or others + known.size <= BYTES_PER_SENDER:
                known.share = sender.share


class StorageMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        limits = StorageLimits(
            TOTAL_BYTES, KEYS_PER_PUBLISHER, BYTES_PER_PUBLISHER, BYTES_PER_SENDER
        )
        self.storage = Storage(FAMILIES, limits)
        self.naive = NaiveStorage()
        self.now = NOW
        self.ever_sent: list[Slot] = []
        self.last_taken: dict[tuple[str, bytes], Slot] = {}

    def bring(self, slot: Slot, authentic: bool, sender: Sender = OURSELVES) -> None:
        self.naive.expire(self.now)
        wanted = self.naive.judge(slot, sender, authentic, self.now)
        try:
            outcome: Stored | SlotRefusal = self.storage.store(slot, self.now, sender)
        except SlotRefused as refused:
            outcome = refused.refusal
        assert outcome is wanted
        if wanted is Stored.UNCHANGED:
            self.naive.brought_again(slot, sender)
        elif isinstance(wanted, Stored):
            self.naive.store(slot, sender)
            self.last_taken[slot.key, slot.publisher] = slot

    @rule(
        who=some.sampled_from(PUBLISHERS),
        key=some.sampled_from(KEYS),
        value=some.sampled_from(VALUES),
        sequence=some.integers(0, 4),
        life=some.sampled_from([-1, 0, 1, 30, 60, 99, 100, 160, 161]),
        sender=some.sampled_from(SENDERS),
    )
    def publish(
        self, who: object, key: str, value: bytes, sequence: int, life: int, sender: Sender
    ) -> None:
        slot = sign_slot(who, key, value, sequence, self.now + life * SECOND)  # type: ignore[arg-type]
        self.ever_sent.append(slot)
        self.bring(slot, authentic=True, sender=sender)

    @rule(who=some.sampled_from(PUBLISHERS), key=some.sampled_from(KEYS))
    def leave_a_floor(self, who: Identity, key: str) -> None:
        """A slot with a long life is replaced by one that expires in a moment."""
        value = VALUES[0] if key.startswith("word") else VALUES[-1]
        for sequence, life in ((3, 100), (4, 1)):
            slot = sign_slot(who, key, value, sequence, self.now + life * SECOND)
            self.ever_sent.append(slot)
            self.bring(slot, authentic=True)
        self.wait(2)

    @rule(
        who=some.sampled_from(PUBLISHERS),
        key=some.sampled_from(KEYS),
        sequence=some.integers(0, 4),
        life=some.sampled_from([1, 60]),
    )
    def withdraw(self, who: object, key: str, sequence: int, life: int) -> None:
        slot = sign_slot(who, key, b"", sequence, self.now + life * SECOND, True)  # type: ignore[arg-type]
        self.ever_sent.append(slot)
        self.bring(slot, authentic=True)

    @rule(choice=some.integers(0, 1000), sender=some.sampled_from(SENDERS))
    def replay(self, choice: int, sender: Sender) -> None:
        if self.ever_sent:
            slot = self.ever_sent[choice % len(self.ever_sent)]
            self.bring(slot, authentic=True, sender=sender)

    @rule(
        choice=some.integers(0, 1000),
        field=some.sampled_from(["key", "publisher", "sequence", "expires", "value", "withdrawn"]),
    )
    def forge(self, choice: int, field: str) -> None:
        if not self.ever_sent:
            return
        slot = self.ever_sent[choice % len(self.ever_sent)]
        other = {
            "key": KEYS[(KEYS.index(slot.key) + 1) % len(KEYS)],
            "publisher": publisher(99).public_key,
            "sequence": slot.sequence + 1,
            "expires": slot.expires + 1,
            "value": b"" if slot.value == VALUES[0] else VALUES[0],
            "withdrawn": not slot.withdrawn,
        }
        if slot.withdrawn and field in ("value", "withdrawn"):
            return
        if field == "value" and not other["value"]:
            return
        self.bring(msgspec.structs.replace(slot, **{field: other[field]}), authentic=False)

    @rule(seconds=some.sampled_from([1, 1, 29, 30, 61, 200]))
    def wait(self, seconds: int) -> None:
        self.now += seconds * SECOND

    @rule()
    def restart(self) -> None:
        """Everything that is known, over a restart, in some other order."""
        known = self.naive.kept
        self.naive.expire(self.now)
        earlier, limits = self.storage, self.storage.limits
        self.storage = Storage(FAMILIES, limits)
        for key, publisher_key in reversed(list(known)):
            forget_at = earlier.forget_at(key, publisher_key)
            proof = self.last_taken[key, publisher_key]
            self.storage.restore(proof, forget_at, self.now)
            known[key, publisher_key].share = ""

    @rule()
    def tidy(self) -> None:
        self.storage.expire(self.now)
        self.naive.expire(self.now)

    @invariant()
    def it_gives_what_the_model_gives(self) -> None:
        if not hasattr(self, "naive"):
            return
        for key in KEYS:
            wanted = [
                one.slot
                for (other, _), one in self.naive.kept.items()
                if other == key and one.slot is not None and one.slot.expires > self.now
            ]
            found = self.storage.get(key, self.now)
            assert sorted(map(digest_of, found)) == sorted(map(digest_of, wanted))

    @invariant()
    def every_byte_is_accounted_for(self) -> None:
        if not hasattr(self, "naive"):
            return
        assert self.storage.total_bytes == self.naive.size() <= TOTAL_BYTES
        assert len(self.storage) == len(self.naive.kept)
        assert self.storage.key_count == len({key for key, _ in self.naive.kept})
        assert self.storage.publisher_count == len({one for _, one in self.naive.kept})
        shares = {one.share for one in self.naive.kept.values()} - {""}
        assert self.storage.share_count == len(shares)
        soonest = (
            one.slot.expires if one.slot else one.forget_at for one in self.naive.kept.values()
        )
        assert self.storage.next_expiry() == min(soonest, default=None)


TestStorageAgainstTheModel = pytest.mark.slow(StorageMachine.TestCase)
TestStorageAgainstTheModel.settings = settings(stateful_step_count=40, deadline=None)
