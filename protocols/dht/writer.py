"""Writing slots: send each to the k peers closest to its key, or fewer if its family says so, and
report the result.

If the routing table knows the target's neighbourhood, the slot goes directly to the peers believed
closest, all at once. Each answers with closer peers that we do not know, if any, and the slot goes
to those too. So a write takes one round trip if the table is right, and no more than a lookup if it
is not. Otherwise the k closest are looked up first.

A single slot goes to the few closest peers first, and the writer waits for those. The rest of the k
get it a fifth of a second later, together with other slots written meanwhile. So a node that writes
often sends each neighbour five messages a second, not one for each slot.

A slot that every replica refused was not written, however many answered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import trio

from protocols.dht.contacts import Contact
from protocols.dht.ids import position_of
from protocols.dht.lookup import Lookup
from protocols.dht.messages import (
    KNOWN_PER_QUERY,
    contact_from,
    prefix_of_id,
)
from protocols.dht.publisher import BYTES_PER_BATCH, SLOTS_PER_BATCH
from protocols.dht.reader import SlotReader
from protocols.dht.requester import Requester
from protocols.dht.slots import Slot, SlotRefusal, SlotRefused
from protocols.dht.state import DhtState, count, log
from protocols.dht.walk import (
    OPERATIONS_PER_CHECKPOINT,
    MessageLimits,
    Operation,
    Walk,
    knows_well,
    lookup_from,
    own_radius,
    seeds_for,
)
from protocols.errors import PotluckError, ProtocolMisuse, Unreachable
from protocols.not_allowed import NotAllowed

LARGEST_PUT = 4096  # slots of one `put_many`: limits its lookups to a few megabytes


SPARE_WRITES = 2  # beside those that a writer waits for, so that one slow replica costs no time


@dataclass
class Written:
    """The result for a slot: how many replicas hold it (with this node), and the refusals.

    The numbers still grow after the write has returned; see above.
    """

    slot: Slot
    replicas: int = 0
    refused: Counter[SlotRefusal | None] = field(default_factory=Counter)
    """By reason; None stands for a reason that only a newer node knows."""
    reason: str = ""
    """The text of one of the refusals."""
    newer: Slot | None = None
    """A newer slot of ours that blocked this one."""
    asked: int = 0
    not_allowed: NotAllowed | None = None
    """A peer does not let us write, or we do not have the right."""

    def error(self) -> SlotRefused | NotAllowed | Unreachable:
        """Why no replica holds it."""
        if self.refused:
            refusal = self.refused.most_common(1)[0][0]
            return SlotRefused(
                refusal if refusal is not None else SlotRefusal.MALFORMED,
                f"Every peer refused the slot under {self.slot.key!r}.",
                why=self.reason,
            )
        if self.not_allowed is not None:
            return self.not_allowed
        return Unreachable(
            f"The slot under {self.slot.key!r} reached no peer.",
            why=f"{self.asked} peers were asked." if self.asked else "No peer is known.",
            advice="This node keeps trying; `potluck dht stats` shows the peers that it knows.",
        )


class SlotWrite(Operation):
    """The writing of one slot to the k peers closest to its key."""

    lookup: Lookup

    def __init__(
        self, state: DhtState, slot: Slot, closest: Sequence[Contact], *, at_once: bool
    ) -> None:
        replicas = state.replicas_of(slot.key)
        super().__init__(lookup_from(state, position_of(slot.key), closest[:replicas], replicas))
        self.written = Written(slot)
        self.known = [prefix_of_id(one.node_id) for one in closest[:replicas]]
        self._enough = state.settings.enough_written
        self._pauses_when_enough = not at_once
        self.lookup.alpha = self._at_once

    @property
    def is_done(self) -> bool:
        return (self._pauses_when_enough and self.has_enough) or self.lookup.is_done

    @property
    def has_enough(self) -> bool:
        return self.written.replicas >= self._enough

    @property
    def _at_once(self) -> int:
        """The number of further peers to send it to now."""
        if not self._pauses_when_enough:
            return self.lookup.k
        return max(1, self._enough - self.written.replicas) + SPARE_WRITES

    def kept(self) -> None:
        """One more replica holds it."""
        self.written.replicas += 1
        self.lookup.alpha = self._at_once

    def go_on(self) -> bool:
        """Go on to the rest of the k; return whether there are any."""
        self._pauses_when_enough = False
        self.lookup.alpha = self._at_once
        return not self.is_done


def _slot_bytes(operation: SlotWrite) -> int:
    slot = operation.written.slot
    return len(slot.key) * 4 + len(slot.value)


MESSAGE_LIMITS = MessageLimits(SLOTS_PER_BATCH, BYTES_PER_BATCH, _slot_bytes)


class Writer:
    """Writes slots to their replicas."""

    def __init__(self, state: DhtState, requester: Requester, reader: SlotReader) -> None:
        self._state = state
        self._requester = requester
        self._reader = reader
        self._rest: list[SlotWrite] = []
        self._has_rest = trio.Event()

    async def write(self, slots: Sequence[Slot]) -> list[Written]:
        """Write these slots to their replicas; return one result for each, in order."""
        state = self._state
        positions = {slot.key: position_of(slot.key) for slot in slots}
        far = await self._far(positions)
        found: dict[str, list[Contact]] = {}
        if far:
            replicas = max(map(state.replicas_of, far))
            looked_up = await self._reader.closest([positions[key] for key in far], replicas)
            found = dict(zip(far, looked_up, strict=True))
        operations = []
        # many slots go to all their replicas at once, so that each replica gets one message
        at_once = len(slots) > 1 or len(self._rest) >= LARGEST_PUT
        for place, slot in enumerate(slots):
            if place and place % OPERATIONS_PER_CHECKPOINT == 0:
                await trio.lowlevel.checkpoint()
            closest = found.get(slot.key) or seeds_for(state, positions[slot.key])
            operation = SlotWrite(state, slot, closest, at_once=at_once)
            self._store_here(operation)
            operations.append(operation)
        await Walk(state, operations, self._ask, MESSAGE_LIMITS).run()
        self._rest.extend(operation for operation in operations if operation.go_on())
        if self._rest:
            self._has_rest.set()
        return [operation.written for operation in operations]

    async def _far(self, positions: Mapping[str, int]) -> list[str]:
        """The keys whose neighbourhood has to be looked up first."""
        radius = own_radius(self._state)
        far = []
        for place, (key, position) in enumerate(positions.items()):
            if place and place % OPERATIONS_PER_CHECKPOINT == 0:
                await trio.lowlevel.checkpoint()
            if not knows_well(self._state, position, radius):
                far.append(key)
        return far

    async def write_the_rest(self) -> None:
        """Keep sending slots to the replicas that no writer waits for."""
        while True:
            await self._has_rest.wait()
            await trio.sleep(self._state.settings.rest_seconds)
            self._has_rest = trio.Event()
            try:
                await self.flush()
            except trio.ClosedResourceError:
                return  # the directory ended at the moment of waking

    async def flush(self) -> None:
        """Send them now."""
        newest = {one.written.slot.key: one for one in self._rest}
        # only the last of several slots under one key is still wanted
        self._rest = []
        now_ms = self._state.now_ms()
        wanted = [one for one in newest.values() if one.written.slot.expires > now_ms]
        if wanted:
            await Walk(self._state, wanted, self._ask, MESSAGE_LIMITS).run()

    def _store_here(self, operation: SlotWrite) -> None:
        state = self._state
        if not state.is_replica_of(operation.written.slot.key, operation.lookup.target):
            return
        try:
            state.keep(operation.written.slot)
        except SlotRefused as refused:
            self._refused(operation, refused.refusal, str(refused))
        else:
            operation.kept()

    async def _ask(
        self, contact: Contact, operations: Sequence[SlotWrite]
    ) -> Sequence[Iterable[Contact]]:
        slots = [operation.written.slot for operation in operations]
        for operation in operations:
            operation.written.asked += 1
        known = operations[0].known
        if len(operations) > 1:
            known = list(dict.fromkeys(one for operation in operations for one in operation.known))
        try:
            response = await self._requester.store(
                contact, slots, b"".join(known[:KNOWN_PER_QUERY])
            )
        except NotAllowed as error:
            for operation in operations:
                operation.written.not_allowed = error
            raise
        reasons = iter(response.reasons)
        for operation, refusal in zip(operations, response.refusals, strict=True):
            if refusal == 0:
                operation.kept()
            else:
                self._refused(operation, _refusal(refusal), next(reasons, ""))
        for slot in response.newer:
            self._note_newer(slot, operations)
        contacts = [contact_from(one) for one in response.contacts]
        return [contacts] * len(operations)

    def _refused(self, operation: SlotWrite, refusal: SlotRefusal | None, reason: str) -> None:
        operation.written.refused[refusal] += 1
        operation.written.reason = operation.written.reason or reason
        name = refusal.name.lower() if refusal is not None else "unknown"
        count(self._state.counts.own_slots_refused, name)

    def _note_newer(self, slot: Slot, operations: Sequence[SlotWrite]) -> None:
        for operation in operations:
            ours = operation.written.slot
            if (slot.key, slot.publisher) != (ours.key, ours.publisher):
                continue
            try:
                self._state.storage.verified.check(slot)
            except SlotRefused as refused:
                log.debug("a peer answered with an invalid newer slot: %s", refused)
            else:
                operation.written.newer = slot


def _refusal(number: int) -> SlotRefusal | None:
    try:
        return SlotRefusal(number)
    except ValueError:
        return None


# This node's own slots: put them, repeat them in time, withdraw them.
#
# `Publisher` knows what is due and signs it; this part sends it to the replicas. A slot that could
# not be sent is tried again with growing delay until it expires.


# The longest sleep between two checks of what is due: swarm time may be corrected meanwhile.
LONGEST_SLEEP_SECONDS = 30.0

SIGNED_PER_CHECKPOINT = 32  # signing takes some 50 microseconds

# If fewer than this part of the asked replicas hold a slot, it is soon repeated.
ENOUGH_OF_THEM = 0.5


class Publications:
    """This node's own slots, kept at their replicas."""

    def __init__(self, state: DhtState, writer: Writer) -> None:
        self._state = state
        self._writer = writer
        self._changed = trio.Event()

    def prepare(self, key: str, value: object, ttl_seconds: float, *, keep_up: bool) -> Slot:
        """Make a signed slot under this key; SlotRefused if every node would refuse it."""
        state = self._state
        state.check_open()
        family = state.families.family_of(key)
        raw = family.encode(value)
        ttl_ms = int(ttl_seconds * 1000)
        if ttl_ms > family.longest_ttl_ms:
            raise SlotRefused(
                SlotRefusal.EXPIRY_TOO_FAR,
                f"A slot of the family {family.name} cannot live for {ttl_seconds:,.0f} s.",
                why=f"The family allows {family.longest_ttl_seconds:,.0f} s.",
                advice="Use a shorter ttl: this node repeats the slot for as long as it runs.",
            )
        slot = state.publisher.put(key, raw, ttl_ms, state.now_ms(), keep_up=keep_up)
        state.storage.verified.remember(slot)
        return slot

    def prepare_withdrawal(self, key: str) -> Slot:
        state = self._state
        family = state.families.family_of(key)
        slot = state.publisher.withdraw(key, state.now_ms(), family.longest_ttl_ms)
        state.storage.verified.remember(slot)
        return slot

    def check_number(self, slots: int) -> None:
        if slots > LARGEST_PUT:
            raise ProtocolMisuse(
                f"{slots:,} slots are too many at once.", why=f"{LARGEST_PUT:,} is the most."
            )

    async def publish(self, slots: Sequence[Slot]) -> list[Written]:
        """Write slots to their replicas, and note the results."""
        self.check_number(len(slots))
        self._changed.set()
        written = await self._writer.write(slots)
        outbid = [self._outbid(one) for one in written]
        again = [slot for slot in outbid if slot is not None]
        if again:
            second = {one.slot.key: one for one in await self._writer.write(again)}
            written = [second.get(one.slot.key, one) for one in written]
        for one in written:
            self._note(one)
        return written

    async def keep_up(self) -> None:
        """Keep repeating what is due."""
        state = self._state
        while True:
            next_due = state.publisher.next_due()
            seconds = LONGEST_SLEEP_SECONDS
            if next_due is not None:
                seconds = min(seconds, max(0.0, (next_due - state.now_ms()) / 1000))
            with trio.move_on_after(seconds):
                await self._changed.wait()
            self._changed = trio.Event()
            due = await self._due(state.now_ms())
            for start in range(0, len(due), LARGEST_PUT):
                await self._republish(due[start : start + LARGEST_PUT])

    async def _due(self, now_ms: int) -> list[Slot]:
        publisher = self._state.publisher
        due: list[Slot] = []
        while (moment := publisher.next_due()) is not None and moment <= now_ms:
            due += publisher.due(now_ms, SIGNED_PER_CHECKPOINT)
            await trio.lowlevel.checkpoint()
        return due

    async def _republish(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            self._state.storage.verified.remember(slot)
        self._state.counts.republished += len(slots)
        try:
            await self.publish(slots)
        except PotluckError as error:
            log.warning("could not republish %d slots: %s", len(slots), error)
            for slot in slots:
                self._state.publisher.failed(slot.key, self._state.now_ms())

    def _outbid(self, written: Written) -> Slot | None:
        if written.newer is None:
            return None
        slot = self._state.publisher.met(written.newer, self._state.now_ms())
        if slot is not None:
            self._state.storage.verified.remember(slot)
        return slot

    def _note(self, written: Written) -> None:
        publisher = self._state.publisher
        key = written.slot.key
        willing = written.asked - written.refused.total()
        enough = min(self._state.settings.enough_written, ENOUGH_OF_THEM * willing)
        if written.replicas and written.replicas >= enough:
            publisher.published(key)
        else:
            publisher.failed(key, self._state.now_ms())
            self._changed.set()
