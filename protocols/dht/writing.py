"""Write slots: bring each to the k peers closest to its key, and say how that went.

Where the routing table knows the target's neighbourhood, the slot goes straight to those believed
closest, all at once; each answers with peers that are closer still, if it knows any that we do
not, and the slot goes on to those. So a write takes one round trip where the table is right, and
no more than a lookup where it is not. Elsewhere the k closest are looked up first.

A single slot is brought to the few closest first, and the writer waits for those. The rest of the
k get it a fifth of a second later, together with whatever else was written meanwhile: a node that
writes often sends each neighbour five messages a second, not one for each slot.

Easy to get wrong: a slot that every replica refused was not written, however many answered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import trio

from protocols.dht.asking import Asker
from protocols.dht.contacts import Contact
from protocols.dht.ids import position_of
from protocols.dht.lookup import Lookup
from protocols.dht.messages import (
    KNOWN_PER_QUERY,
    contact_from,
    prefix_of_id,
)
from protocols.dht.neighbourhood import knows_well, lookup_from, own_radius, seeds_for
from protocols.dht.publishing import BYTES_PER_BATCH, SLOTS_PER_BATCH
from protocols.dht.reading import Reader
from protocols.dht.refusals import SlotRefusal, SlotRefused
from protocols.dht.slots import Slot
from protocols.dht.state import DhtState, log
from protocols.dht.statistics import count
from protocols.dht.walking import ERRANDS_WITHOUT_A_PAUSE, Errand, Load, Walk
from protocols.errors import Unreachable
from protocols.not_allowed import NotAllowed

LARGEST_PUT = 4096  # slots of one `put_many`: what keeps its lookups within a few megabytes


SPARE_WRITES = 2  # beside those that a writer waits for, so that one slow replica costs nothing


@dataclass
class Written:
    """How a slot fared: how many replicas hold it (this node included), and who would not.

    The numbers still grow after the writer has been answered; see above.
    """

    slot: Slot
    replicas: int = 0
    refused: Counter[SlotRefusal | None] = field(default_factory=Counter)
    """By reason; None stands for a reason that a newer node gave."""
    reason: str = ""
    """What one of those who refused said."""
    newer: Slot | None = None
    """A slot of ours that stood in the way."""
    asked: int = 0
    not_allowed: NotAllowed | None = None
    """Somebody does not let us write, or we do not let ourselves."""

    def error(self) -> SlotRefused | NotAllowed | Unreachable:
        """Why nobody holds it."""
        if self.refused:
            refusal = self.refused.most_common(1)[0][0]
            return SlotRefused(
                refusal if refusal is not None else SlotRefusal.MALFORMED,
                f"Nobody would keep the slot under {self.slot.key!r}.",
                why=self.reason,
            )
        if self.not_allowed is not None:
            return self.not_allowed
        return Unreachable(
            f"Nobody could be given the slot under {self.slot.key!r}.",
            why=f"{self.asked} peers were asked." if self.asked else "No peer is known.",
            advice="This node keeps trying; `potluck dht stats` says whom it knows.",
        )


class Bringing(Errand):
    """A slot on its way to the k closest."""

    lookup: Lookup

    def __init__(
        self, state: DhtState, slot: Slot, closest: Sequence[Contact], *, at_once: bool
    ) -> None:
        super().__init__(lookup_from(state, position_of(slot.key), closest))
        self.written = Written(slot)
        self.known = [prefix_of_id(one.node_id) for one in closest]
        self._enough = state.settings.enough_written
        self._rests = not at_once
        self.lookup.alpha = self._at_once

    @property
    def is_done(self) -> bool:
        return (self._rests and self.has_enough) or self.lookup.is_done

    @property
    def has_enough(self) -> bool:
        return self.written.replicas >= self._enough

    @property
    def _at_once(self) -> int:
        """To how many more it may be on its way."""
        if not self._rests:
            return self.lookup.k
        return max(1, self._enough - self.written.replicas) + SPARE_WRITES

    def kept(self) -> None:
        """One more replica holds it."""
        self.written.replicas += 1
        self.lookup.alpha = self._at_once

    def go_on(self) -> bool:
        """Bring the slot to the rest of the k; whether there is any."""
        self._rests = False
        self.lookup.alpha = self._at_once
        return not self.is_done


def _slot_bytes(errand: Bringing) -> int:
    slot = errand.written.slot
    return len(slot.key) * 4 + len(slot.value)


LOAD = Load(SLOTS_PER_BATCH, BYTES_PER_BATCH, _slot_bytes)


class Writer:
    """Brings slots to where they belong."""

    def __init__(self, state: DhtState, asker: Asker, reader: Reader) -> None:
        self._state = state
        self._asker = asker
        self._reader = reader
        self._rest: list[Bringing] = []
        self._has_rest = trio.Event()

    async def write(self, slots: Sequence[Slot]) -> list[Written]:
        """Bring these slots to their replicas; one answer for each, in order."""
        state = self._state
        positions = {slot.key: position_of(slot.key) for slot in slots}
        far = await self._far(positions)
        found: dict[str, list[Contact]] = {}
        if far:
            looked_up = await self._reader.closest([positions[key] for key in far])
            found = dict(zip(far, looked_up, strict=True))
        errands = []
        # many slots go to all their replicas at once, so that each of those gets one message
        at_once = len(slots) > 1 or len(self._rest) >= LARGEST_PUT
        for place, slot in enumerate(slots):
            if place and place % ERRANDS_WITHOUT_A_PAUSE == 0:
                await trio.lowlevel.checkpoint()
            closest = found.get(slot.key) or seeds_for(state, positions[slot.key])
            errand = Bringing(state, slot, closest, at_once=at_once)
            self._keep_ourselves(errand)
            errands.append(errand)
        await Walk(state, errands, self._ask, LOAD).run()
        self._rest.extend(errand for errand in errands if errand.go_on())
        if self._rest:
            self._has_rest.set()
        return [errand.written for errand in errands]

    async def _far(self, positions: Mapping[str, int]) -> list[str]:
        """The keys whose neighbourhood has to be looked up first."""
        radius = own_radius(self._state)
        far = []
        for place, (key, position) in enumerate(positions.items()):
            if place and place % ERRANDS_WITHOUT_A_PAUSE == 0:
                await trio.lowlevel.checkpoint()
            if not knows_well(self._state, position, radius):
                far.append(key)
        return far

    async def bring_the_rest(self) -> None:
        """Bring slots to those replicas that no writer waits for, for ever."""
        while True:
            await self._has_rest.wait()
            await trio.sleep(self._state.settings.rest_seconds)
            self._has_rest = trio.Event()
            try:
                await self.flush()
            except trio.ClosedResourceError:
                return  # the directory ended at the very moment of waking

    async def flush(self) -> None:
        """Bring them now."""
        newest = {one.written.slot.key: one for one in self._rest}
        # of what was written again meanwhile only the last is still wanted by anybody
        self._rest = []
        now_ms = self._state.now_ms()
        wanted = [one for one in newest.values() if one.written.slot.expires > now_ms]
        if wanted:
            await Walk(self._state, wanted, self._ask, LOAD).run()

    def _keep_ourselves(self, errand: Bringing) -> None:
        state = self._state
        if not state.is_replica_of(errand.lookup.target):
            return
        try:
            state.keep(errand.written.slot)
        except SlotRefused as refused:
            self._refused(errand, refused.refusal, str(refused))
        else:
            errand.kept()

    async def _ask(
        self, contact: Contact, errands: Sequence[Bringing]
    ) -> Sequence[Iterable[Contact]]:
        slots = [errand.written.slot for errand in errands]
        for errand in errands:
            errand.written.asked += 1
        known = errands[0].known
        if len(errands) > 1:
            known = list(dict.fromkeys(one for errand in errands for one in errand.known))
        try:
            response = await self._asker.store(contact, slots, b"".join(known[:KNOWN_PER_QUERY]))
        except NotAllowed as error:
            for errand in errands:
                errand.written.not_allowed = error
            raise
        reasons = iter(response.reasons)
        for errand, refusal in zip(errands, response.refusals, strict=True):
            if refusal == 0:
                errand.kept()
            else:
                self._refused(errand, _refusal(refusal), next(reasons, ""))
        for slot in response.newer:
            self._met_newer(slot, errands)
        contacts = [contact_from(one) for one in response.contacts]
        return [contacts] * len(errands)

    def _refused(self, errand: Bringing, refusal: SlotRefusal | None, reason: str) -> None:
        errand.written.refused[refusal] += 1
        errand.written.reason = errand.written.reason or reason
        name = refusal.name.lower() if refusal is not None else "unknown"
        count(self._state.counts.own_slots_refused, name)

    def _met_newer(self, slot: Slot, errands: Sequence[Bringing]) -> None:
        for errand in errands:
            ours = errand.written.slot
            if (slot.key, slot.publisher) != (ours.key, ours.publisher):
                continue
            try:
                self._state.storage.verified.check(slot)
            except SlotRefused as refused:
                log.debug("a newer slot that is not right stood in the way: %s", refused)
            else:
                errand.written.newer = slot


def _refusal(number: int) -> SlotRefusal | None:
    try:
        return SlotRefusal(number)
    except ValueError:
        return None
