"""Key families: the rules for all keys with the same beginning.

A family declares the type and the size of its values, how many publishers and bytes one key may
have, and how long a slot may live. Every node checks each slot against them before it keeps it. So
whatever is read from the directory has the declared type.

A node refuses families that it does not know, so a new family works only among nodes that all
declare it. To change its type, a family must still read the old form (append fields with defaults)
or take a new name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from protocols.dht.slots import LARGEST_VALUE_BYTES, Slot, SlotRefusal, SlotRefused, check_key
from protocols.errors import MalformedMessage, ProtocolMisuse
from protocols.rpc import MessageType, encode

VALUE_LIMIT_BYTES = 4096  # a record, not a file; a family that needs more declares it
SLOTS_PER_KEY = 256  # four times the largest swarm that we measure on one machine
BYTES_PER_KEY = 2 << 20  # for all of those with values of the usual size, and more
# How much a reader can fetch of one key from one replica; see reader.PAGES_PER_KEY.
LARGEST_BYTES_PER_KEY = 4 << 20
LONGEST_TTL_SECONDS = 24 * 3600.0  # a publisher that was away for a day is gone

# Clocks differ, and swarm time is an estimate. A publisher that asks for the longest allowed life
# must not be refused because its clock is slightly ahead.
CLOCK_TOLERANCE_MS = 60_000

_FAMILY_NAME = re.compile(r"[a-z][a-z0-9_-]{0,31}")


@dataclass(frozen=True)
class Family:
    """The declaration of all keys `name/…`. `type` is anything that msgspec can decode.

    `bytes_per_key` limits the slots of all publishers under one key at one node, each counted with
    its overhead (storage.py). `check` is optional. It gets a decoded value of the right type and
    returns what is wrong with it, or None: for rules beyond types, such as a signature inside. It
    runs on data of strangers: it must be fast, and may not raise. `replicas`: how many peers keep a
    slot, if that is fewer than usual, as for slots that are written again every few seconds.
    `outranks(value, other)`: whether a checked value takes the place of another publisher's under a
    key that is full; `other` is None for a slot without a value.
    """

    name: str
    type: Any
    value_limit_bytes: int = VALUE_LIMIT_BYTES
    slots_per_key: int = SLOTS_PER_KEY
    longest_ttl_seconds: float = LONGEST_TTL_SECONDS
    bytes_per_key: int = BYTES_PER_KEY
    check: Callable[[str, Any], str | None] | None = None
    replicas: int | None = None
    outranks: Callable[[Any, Any | None], bool] | None = None
    _values: MessageType[Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not _FAMILY_NAME.fullmatch(self.name):
            raise ProtocolMisuse(f"{self.name!r} is not the name of a key family.")
        if not 0 < self.value_limit_bytes <= LARGEST_VALUE_BYTES:
            raise ProtocolMisuse(
                f"Family {self.name} allows {self.value_limit_bytes} bytes for a value.",
                why=f"It can be 1 to {LARGEST_VALUE_BYTES}.",
            )
        if self.replicas is not None and self.replicas < 1:
            raise ProtocolMisuse(f"Family {self.name} has no replicas.")
        if self.slots_per_key < 1 or not self.longest_ttl_seconds > 0:
            raise ProtocolMisuse(f"Family {self.name} allows no slot at all.")
        if not self.value_limit_bytes < self.bytes_per_key <= LARGEST_BYTES_PER_KEY:
            raise ProtocolMisuse(
                f"Family {self.name} allows {self.bytes_per_key:,} bytes under a key.",
                why=f"It has to be more than one value has, and at most {LARGEST_BYTES_PER_KEY:,}.",
            )
        values = MessageType(self.type, f"value of family {self.name}")
        object.__setattr__(self, "_values", values)

    @property
    def longest_ttl_ms(self) -> int:
        return int(self.longest_ttl_seconds * 1000)

    def decode(self, value: bytes) -> Any:
        """Decode a value; SlotRefused if it is not of the family's type."""
        self.check_size(value)
        try:
            return self._values.decode(value)
        except MalformedMessage as error:
            raise SlotRefused(
                SlotRefusal.WRONG_SCHEMA,
                f"This value does not fit the family {self.name}.",
                why=str(error),
                advice="The two sides may run different versions: upgrade the older one.",
            ) from error

    def encode(self, value: object) -> bytes:
        """Encode a value; SlotRefused if every node would refuse it."""
        try:
            raw = encode(value)
        except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
            raise SlotRefused(
                SlotRefusal.WRONG_SCHEMA,
                f"This {type(value).__name__} cannot be a value of the family {self.name}.",
                why=str(error),
            ) from error
        self.decode(raw)
        return raw

    def check_size(self, value: bytes) -> None:
        if len(value) > self.value_limit_bytes:
            raise SlotRefused(
                SlotRefusal.TOO_LARGE,
                f"This value has {len(value):,} bytes.",
                why=f"The family {self.name} allows {self.value_limit_bytes:,}.",
                advice="Publish where the data can be fetched, not the data.",
            )


NOTE = Family("note", str)
"""A text, to try the directory by hand."""


class Families:
    """The families that a node knows. `note` is always among them."""

    def __init__(self, families: Iterable[Family] = ()) -> None:
        self._families = {NOTE.name: NOTE}
        for family in families:
            self.declare(family)

    def __iter__(self) -> Iterator[Family]:
        return iter(self._families.values())

    def declare(self, family: Family) -> None:
        """Add a family. Adding the same one twice is harmless; another of the same name is an
        error.
        """
        known = self._families.setdefault(family.name, family)
        if known != family:
            raise ProtocolMisuse(
                f"The family {family.name} is declared twice, and differently.",
                advice="Give one of the two another name.",
            )

    def family_of(self, key: str) -> Family:
        """The family of a key; SlotRefused if the key is invalid or its family unknown."""
        check_key(key)
        name = key.partition("/")[0]
        family = self._families.get(name)
        if family is None:
            raise SlotRefused(
                SlotRefusal.UNKNOWN_FAMILY,
                f"No family {name[:40]!r} of keys is known here.",
                why=f"This node knows {', '.join(sorted(self._families))}.",
                advice="For trying by hand, use a key that begins with note/.",
            )
        return family

    def replicas_of(self, key: str) -> int | None:
        """How many peers keep the slots under a key, if that is fewer than usual."""
        family = self._families.get(key.partition("/")[0])
        return None if family is None else family.replicas

    def encode(self, key: str, value: object) -> bytes:
        return self.family_of(key).encode(value)

    def decode(self, slot: Slot) -> Any:
        """Decode the value of a slot that is not withdrawn."""
        return self.family_of(slot.key).decode(slot.value)


def check_time(family: Family, slot: Slot, now_ms: int) -> None:
    """SlotRefused if the slot has expired, or would live longer than its family allows."""
    if slot.expires <= now_ms:
        raise SlotRefused(
            SlotRefusal.EXPIRED,
            f"The slot under {slot.key!r} expired {(now_ms - slot.expires) / 1000:,.1f} s ago.",
            advice="If it was new, the clock of its publisher is behind the swarm's.",
        )
    if slot.expires - now_ms > family.longest_ttl_ms + CLOCK_TOLERANCE_MS:
        raise SlotRefused(
            SlotRefusal.EXPIRY_TOO_FAR,
            f"The slot under {slot.key!r} wants to live {(slot.expires - now_ms) / 1000:,.0f} s.",
            why=f"The family {family.name} allows {family.longest_ttl_seconds:,.0f} s.",
            advice="Its publisher's node republishes it for as long as it runs.",
        )


def check_value(family: Family, slot: Slot) -> None:
    """SlotRefused unless the value is of the family's type; a withdrawn slot has none."""
    if slot.withdrawn:
        return
    value = family.decode(slot.value)
    if family.check is not None:
        wrong = family.check(slot.key, value)
        if wrong is not None:
            raise SlotRefused(
                SlotRefusal.WRONG_SCHEMA,
                f"This value does not fit the family {family.name}.",
                why=wrong,
            )
