"""What survives a restart: somebody who keeps contacts and slots on a disk, if there is one.

The directory works without a keeper. With one it hands over, now and then and as it ends, whom it
would ask first after a restart and which slots it keeps for the swarm; and it begins with what it
is given back.

All methods are ordinary code, called one at a time: in a thread where the keeper `blocks`, in the
event loop where it answers from memory (a simulation's virtual clock waits for no thread). They may
raise `KeepingFailed`, which is to be said and survived: a full disk is no reason to leave a swarm.

Easy to get wrong: what comes back is as untrusted as what comes from the network. A disk can be
damaged, restored from last month, or edited; so contacts have to answer before they count, and
slots go through the same checks as any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from protocols.dht.contacts import Contact
from protocols.dht.slots import Slot
from protocols.errors import PotluckError


class KeepingFailed(PotluckError):
    """What should be kept could not be written."""


@dataclass(frozen=True)
class KeptSlot:
    """A slot, and until when its sequence stands in the way of older ones: not before it expires,
    and later if it took the place of one that was to live longer. Then it is kept for that long:
    it proves the sequence."""

    slot: Slot
    forget_at: int


class Keeper(Protocol):
    """Keeps what the directory knows across a restart."""

    @property
    def blocks(self) -> bool:
        """Whether calls wait for a disk, so that they belong in a thread."""

    def load_contacts(self) -> Sequence[Contact]:
        """Whom to ask first: the likeliest to be there first. Bounded."""

    def save_contacts(self, contacts: Sequence[Contact]) -> None:
        """Keep these, the likeliest to be there first.

        Earlier ones stay behind them while there is room: a node that comes home to an empty
        network has to know tomorrow whom it knew yesterday.
        """

    def load_slots(self) -> Sequence[KeptSlot]:
        """Every slot that was saved and is not forgotten; their form and signature unchecked."""

    def save_slots(self, slots: Sequence[KeptSlot], now_ms: int) -> None:
        """Keep these in place of earlier ones of the same key and publisher.

        What was to be forgotten by `now_ms`, in swarm time, is.
        """
