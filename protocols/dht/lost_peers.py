"""Peers that were in the routing table and no longer answer, and when to try each again.

Most of them are gone for good. But when the network was split, each half has only its memory of
the other to find it again: so whoever was known is tried again, with growing delay. When one of
them answers, the others are likely back as well, and are all tried within seconds.

Pure: time and chance are the caller's.
"""

from __future__ import annotations

import random

from protocols.dht.contacts import Contact

LOST_PEERS = 256  # as many as a table of a swarm of ten thousand holds; the newest are kept
FIRST_RETRY_SECONDS = 5.0
LONGEST_RETRY_SECONDS = 600.0  # 256 of them: a dial every two seconds, at the very most
FORGOTTEN_AFTER_TRIES = 150  # most of a day
HEARD_OF_SECONDS = 30.0  # a lost peer that asks us something is tried at once, this often
REUNION_SECONDS = 10.0  # over this the rest is tried when one has come back


class _Lost:
    __slots__ = ("contact", "due", "taken", "tries")

    def __init__(self, contact: Contact) -> None:
        self.contact = contact
        self.due: float | None = None
        self.taken = float("-inf")
        self.tries = 0


class LostPeers:
    """Invariant: at most LOST_PEERS of them, in the order in which they were lost."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._lost: dict[int, _Lost] = {}

    def __len__(self) -> int:
        return len(self._lost)

    def __contains__(self, contact: Contact) -> bool:
        return contact.node_id in self._lost

    def add(self, contact: Contact) -> None:
        """This one did not answer; if it is lost already, nothing changes."""
        if contact.node_id not in self._lost:
            self._lost[contact.node_id] = _Lost(contact)
            if len(self._lost) > LOST_PEERS:
                del self._lost[next(iter(self._lost))]

    def discard(self, contact: Contact) -> None:
        """This one has answered; it had been given up by nobody."""
        self._lost.pop(contact.node_id, None)

    def heard_of(self, contact: Contact, now: float) -> None:
        """This one says something, though it did not answer: it may do so now."""
        lost = self._lost.get(contact.node_id)
        if lost is not None and now - lost.taken >= HEARD_OF_SECONDS:
            lost.due = now

    def found(self, contact: Contact, now: float) -> bool:
        """This one is there again (or says so); whether it had been lost."""
        if self._lost.pop(contact.node_id, None) is None:
            return False
        for lost in self._lost.values():
            lost.due = now + REUNION_SECONDS * self._chance.random()
        return True

    def all_may_be_back(self, now: float) -> None:
        """Why they did not answer may be over: it is everybody's turn now."""
        for lost in self._lost.values():
            lost.due = now

    def due(self, now: float, at_most: int) -> list[Contact]:
        """Whom to try now, those first who were tried least: they are likeliest to be there. Each
        then waits twice as long for its next turn."""
        taken: list[Contact] = []
        for node_id, lost in sorted(self._lost.items(), key=lambda one: one[1].tries):
            if lost.due is None:
                self._delay(lost, now)
            elif lost.due <= now and len(taken) < at_most:
                if lost.tries >= FORGOTTEN_AFTER_TRIES:
                    del self._lost[node_id]
                    continue
                self._delay(lost, now)
                lost.taken = now
                taken.append(lost.contact)
        return taken

    def _delay(self, lost: _Lost, now: float) -> None:
        delay = min(LONGEST_RETRY_SECONDS, FIRST_RETRY_SECONDS * 2 ** min(lost.tries, 20))
        lost.due = now + delay * (0.5 + 0.5 * self._chance.random())
        lost.tries += 1
