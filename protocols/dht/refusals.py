"""Why a slot is not taken: a code for machines, and a sentence for people.

What is over a limit or does not fit is refused, never silently dropped; so every "no" in this
room is a `SlotRefused` that says which of these it is.

Easy to get wrong: the numbers travel. Append, never renumber; and a reader that meets a number
that it does not know takes it for a refusal of an unknown kind, not for a broken message.
"""

from __future__ import annotations

import enum

from protocols.errors import Refused


class SlotRefusal(enum.IntEnum):
    """The reason. 0 is not used: on the wire it can mean that nothing was refused."""

    MALFORMED = 1
    """The key, the publisher, a number or a length is not what a slot may have."""
    BAD_SIGNATURE = 2
    """The publisher did not sign this."""
    UNKNOWN_FAMILY = 3
    """No type was declared here for keys that begin so."""
    WRONG_SCHEMA = 4
    """The value is not of the type that the key's family declares."""
    TOO_LARGE = 5
    """The value has more bytes than the key's family allows."""
    EXPIRED = 6
    EXPIRY_TOO_FAR = 7
    """It would live longer than the key's family allows."""
    OLDER_SEQUENCE = 8
    """A newer slot of this publisher under this key is here, or was."""
    SLOTS_PER_KEY = 9
    """As many publishers as the key's family allows are under this key already."""
    KEYS_PER_PUBLISHER = 10
    """This publisher has slots under as many keys as one may have at one node."""
    MEMORY = 11
    """The node has as many bytes of slots as it allows itself."""
    BYTES_PER_PUBLISHER = 12
    """This publisher has as many bytes here as one may have at one node."""
    BYTES_PER_KEY = 13
    """The slots under this key have as many bytes together as its family allows."""
    BYTES_PER_SENDER = 14
    """Who brought it has brought as many bytes as one network may bring to one node."""


class SlotRefused(Refused):
    """This slot was not taken. `refusal` says why, for machines."""

    def __init__(self, refusal: SlotRefusal, what: str, *, why: str = "", advice: str = "") -> None:
        super().__init__(what, why=why, advice=advice)
        self.refusal = refusal
