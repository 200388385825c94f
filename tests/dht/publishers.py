"""Publishers and slots that are the same in every run."""

from __future__ import annotations

import msgspec

from protocols.dht import Slot
from protocols.dht.slots import sign_slot
from protocols.identity import Identity

NOW = 1_800_000_000_000  # milliseconds: some day in 2027
SECOND = 1000
HOUR = 3600 * SECOND
DAY = 24 * HOUR


def publisher(number: int) -> Identity:
    return Identity.from_seed(number.to_bytes(32, "big"))


ALICE, BOB, CAROL = (publisher(number) for number in range(1, 4))


def text(value: str) -> bytes:
    """A value of the family `note`."""
    return msgspec.msgpack.encode(value)


def note(
    identity: Identity = ALICE,
    key: str = "note/hello",
    value: str = "hello",
    sequence: int = 1,
    expires: int = NOW + HOUR,
    *,
    withdrawn: bool = False,
) -> Slot:
    raw = b"" if withdrawn else text(value)
    return sign_slot(identity, key, raw, sequence, expires, withdrawn)
