"""A directory without an operator, whose entries cannot be forged: a Kademlia of signed slots.

Under a key, every publisher owns exactly one slot: `(key, publisher) -> value, expires, sequence,
signature`. Nobody can write, overwrite or forge another's slot. Merging is trivial, because the
newest sequence wins. Everything expires. Everything except `service` and the thin layers beside it
is pure: no I/O, no clock, no randomness of its own.
"""

from protocols.dht.bootstrap import BootstrapState, Joined
from protocols.dht.contacts import ADDRESSES_PER_CONTACT, LONGEST_ADDRESS, Contact, contact_of
from protocols.dht.families import Families, Family
from protocols.dht.keeper import Keeper, KeepingFailed, KeptSlot
from protocols.dht.reader import Breadth, SlotEntry
from protocols.dht.service import Dht, open_dht
from protocols.dht.settings import DhtSettings
from protocols.dht.slots import LARGEST_VALUE_BYTES, LONGEST_KEY_BYTES, Slot, SlotRefused, check_key

__all__ = [
    "ADDRESSES_PER_CONTACT",
    "LARGEST_VALUE_BYTES",
    "LONGEST_ADDRESS",
    "LONGEST_KEY_BYTES",
    "BootstrapState",
    "Breadth",
    "Contact",
    "Dht",
    "DhtSettings",
    "Families",
    "Family",
    "Joined",
    "Keeper",
    "KeepingFailed",
    "KeptSlot",
    "Slot",
    "SlotEntry",
    "SlotRefused",
    "check_key",
    "contact_of",
    "open_dht",
]
