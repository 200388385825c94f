"""What stands in the directory under `revocations/RUN`: a list, and the keys to judge it by.

Both are signed by auth keys, so it does not matter who publishes them. The keys come along because
a list that is signed by a new key may reach a node before the key does.

Easy to get wrong: a slot of 64 KiB is all there is. A list of 60 KiB leaves room for 25 keys.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from auth.keyring import KeyRecord, KeyRecords
from auth.revocations import LIMIT_BYTES
from protocols.dht.families import Family
from protocols.dht.slots import LARGEST_VALUE_BYTES

# A node publishes only where it finds fewer than three copies of the newest list; the rest is
# room for those who have not noticed yet that they are too many, or who mean ill.
PUBLISHERS = 32


class RevocationNotice(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One publisher's copy of the newest list."""

    revocations: Annotated[bytes, Meta(max_length=LIMIT_BYTES)]
    keys: KeyRecords = ()


REVOCATIONS = Family(
    "revocations",
    RevocationNotice,
    value_limit_bytes=LARGEST_VALUE_BYTES,
    slots_per_key=PUBLISHERS,
)

KEY_RECORD_BYTES = 140  # the most that one takes in MessagePack


def notice_of(signed_list: bytes, keys: tuple[KeyRecord, ...]) -> RevocationNotice:
    """A notice that fits: the newest keys, as many as there is room for."""
    room = (LARGEST_VALUE_BYTES - len(signed_list) - 16) // KEY_RECORD_BYTES
    return RevocationNotice(signed_list, keys[-room:] if room > 0 else ())
