"""What a node remembers of a key that it reads again and again. Pure.

    view = views.of(key)
    view.take(slot)                                  # it has been checked
    view.turn(replicas, 5, now, chance)              # which of them to ask, the first first
    view.missing(names)                              # of what a replica has named

Reading a key again should cost what has changed under it, not what is there. So a view keeps the
slots that were read, and of each replica the cursor up to which it has told its changes. A look
asks two replicas of the key: the *source* brings the slots that came to it since the last look,
the *witness* only names them. The source is one of those that writers wait for, so that a look
finds what was written before it: the others get it later, and one at the rim, which not every
writer takes for a replica, may never get it. The witness is any replica. Both are drawn by chance,
each reader's own, so that the replicas of a key that everybody reads share the work; and both anew
every `TURN_SECONDS`, so that two that hide a slot together do so for a turn, and one alone cannot
hide any.

Easy to get wrong: a cursor may move on only when everything up to it has been had. What a replica
has named and nobody has brought is named again by the next look.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from random import Random

from protocols.dht.contacts import Contact
from protocols.dht.messages import prefix_of_slot
from protocols.dht.slots import Slot, supersedes

TURN_SECONDS = 5.0
"""Two turns are shorter than any slot's publisher may be silent before it is missed."""

SURVEY_SECONDS = 30.0
"""How long the replicas of a key that a survey has found are taken for its replicas."""

VIEWS_KEPT = 16
"""A family allows 4 MiB under a key at most; a run has a handful of keys that are read often."""

OLD_NAMES_KEPT = 4096
"""Beside those of the slots in a view, so that a replica that is behind does not bring what was
replaced long ago. Half a megabyte, at the key that changes most."""


class View:
    """Invariants: `slots` holds the newest slot of each publisher that was met, every one of them
    checked; `_names` has the names of all of them."""

    def __init__(self) -> None:
        self.slots: dict[bytes, Slot] = {}
        self.cursors: dict[int, bytes] = {}
        """Of each replica, by its node id."""
        self.own_change = 0
        """Up to which this node's own storage was read, where it is a replica itself."""
        self.replicas: list[Contact] = []
        """Of the last survey, closest first."""
        self._surveyed_at = float("-inf")
        self._names: set[bytes] = set()
        self._source: int | None = None
        self._witness: int | None = None
        self._source_is_new = True
        self._turn_ends = float("-inf")

    @property
    def bringing_source(self) -> int | None:
        """The source, unless it is asked for the first time in its turn: then it names what it has,
        or it would bring again all that has changed since it was asked long ago."""
        return None if self._source_is_new else self._source

    def take(self, slot: Slot) -> None:
        self._names.add(prefix_of_slot(slot))
        held = self.slots.get(slot.publisher)
        if held is None or supersedes(slot, held):
            self.slots[slot.publisher] = slot
        if len(self._names) > len(self.slots) + OLD_NAMES_KEPT:
            self._names = set(map(prefix_of_slot, self.slots.values()))

    def expire(self, now_ms: int) -> None:
        for publisher in [one.publisher for one in self.slots.values() if one.expires <= now_ms]:
            del self.slots[publisher]

    def missing(self, names: Iterable[bytes]) -> list[bytes]:
        """Those of these slots that this node has never had."""
        return [name for name in names if name not in self._names]

    def surveyed(self, replicas: Sequence[Contact], now: float) -> None:
        """All replicas were looked for, and these were found."""
        self.replicas, self._surveyed_at = list(replicas), now
        there = {one.node_id for one in replicas}
        self.cursors = {one: at for one, at in self.cursors.items() if one in there}

    def strangers_among(self, replicas: Iterable[Contact]) -> int:
        """How many of these the last survey has not heard."""
        heard = {one.node_id for one in self.replicas}
        return sum(one.node_id not in heard for one in replicas)

    def wants_survey(self, has_strangers: bool, now: float, chance: Random) -> bool:
        """Whether it is time for the next survey; then it counts as begun. Those who look at one
        key do not all come at once."""
        seconds = TURN_SECONDS if has_strangers else SURVEY_SECONDS
        if now - self._surveyed_at < seconds * (0.75 + 0.5 * chance.random()):
            return False
        self._surveyed_at = now
        return True

    def turn(
        self, replicas: Sequence[Contact], first: int, now: float, chance: Random
    ) -> list[Contact]:
        """These replicas, closest first, in the order in which they are to be asked: the source,
        which is among the `first` so many of them, the witness, others."""
        if now >= self._turn_ends:
            self._turn_ends = now + TURN_SECONDS * (0.75 + 0.5 * chance.random())
            self._source = self._witness = None
        source = next((one for one in replicas if one.node_id == self._source), None)
        self._source_is_new = source is None
        if source is None:
            source = chance.choice(replicas[:first])
            self._source = source.node_id
        others = [one for one in replicas if one is not source]
        chance.shuffle(others)
        if others and all(one.node_id != self._witness for one in others):
            self._witness = others[0].node_id
        others.sort(key=lambda one: one.node_id != self._witness)
        return [source, *others]

    def failed(self, contact: Contact) -> None:
        """It did not answer, or not in time: others take its turn."""
        if contact.node_id == self._source:
            self._source = None
        if contact.node_id == self._witness:
            self._witness = None


class Views:
    """Of the keys that were read last. Invariant: at most `VIEWS_KEPT`."""

    def __init__(self) -> None:
        self._views: OrderedDict[str, View] = OrderedDict()

    def of(self, key: str) -> View:
        """The view of this key, which may be a new one."""
        view = self._views.setdefault(key, View())
        self._views.move_to_end(key)
        if len(self._views) > VIEWS_KEPT:
            self._views.popitem(last=False)
        return view


class Handful:
    """Chooses whom one look asks: so many of these, in this order, and for each that fails or is
    slow the next.

    Invariant: each of them is in `_waiting`, `_open` or `slow_ones`, or has answered or failed.
    """

    def __init__(self, order: Iterable[Contact], enough: int) -> None:
        self._waiting = deque(order)
        self._open: set[int] = set()
        self._enough = enough
        self.answers = 0
        self.slow_ones: dict[int, Contact] = {}
        self.failed_ones: list[Contact] = []

    def next_queries(self) -> list[Contact]:
        chosen = []
        while self._waiting and self.answers + len(self._open) < self._enough:
            contact = self._waiting.popleft()
            self._open.add(contact.node_id)
            chosen.append(contact)
        return chosen

    def answered(self, contact: Contact, _closer: Iterable[Contact]) -> None:
        self._leave(contact)
        self.answers += 1

    def failed(self, contact: Contact) -> None:
        self._leave(contact)
        self.failed_ones.append(contact)

    def slow(self, contact: Contact) -> None:
        if contact.node_id in self._open:
            self._leave(contact)
            self.slow_ones[contact.node_id] = contact

    @property
    def is_done(self) -> bool:
        if self.answers >= self._enough:
            return True
        return not (self._waiting or self._open or self.slow_ones)

    @property
    def waits_for_slow_only(self) -> bool:
        return bool(self.slow_ones and self.answers) and not (self._waiting or self._open)

    def _leave(self, contact: Contact) -> None:
        self._open.discard(contact.node_id)
        self.slow_ones.pop(contact.node_id, None)
