"""The value under `revocations/RUN` in the directory: a list, and the keys to check it.

A node keeps the newest on disk in the same form.

Both are signed by auth keys, so any node may publish them. The keys are included because a list
that is signed by a new key may reach a node before the key does.

A slot has at most 64 KiB. A list of 60 KiB leaves room for 25 keys.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from auth.documents import WHAT_BAD_BYTES_RAISE
from auth.keyring import KeyRecord, KeyRecords
from auth.revocations import LIMIT_BYTES
from protocols.dht import LARGEST_VALUE_BYTES, Family

# A node publishes only if it finds fewer than three copies of the newest list. The rest is room for
# nodes that have not noticed yet that there are enough, or that are malicious.
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
    """A notice within the size limit: as many of the newest keys as there is room for."""
    room = (LARGEST_VALUE_BYTES - len(signed_list) - 16) // KEY_RECORD_BYTES
    return RevocationNotice(signed_list, keys[-room:] if room > 0 else ())


def kept_notice(content: bytes) -> RevocationNotice:
    """The notice in a node's file. Earlier versions kept a list without its keys there."""
    try:
        return msgspec.msgpack.decode(content, type=RevocationNotice)
    except WHAT_BAD_BYTES_RAISE:
        return RevocationNotice(content)
