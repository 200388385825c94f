"""Keep up what this node publishes: put it, say it again in time, take it back.

`Publisher` knows what is due and signs it; here it is brought to its replicas. Whatever could not
be brought is tried again with growing delay, for as long as it is to live.
"""

from __future__ import annotations

from collections.abc import Sequence

import trio

from protocols.dht.refusals import SlotRefusal, SlotRefused
from protocols.dht.slots import Slot
from protocols.dht.state import DhtState, log
from protocols.dht.writing import LARGEST_PUT, Writer, Written
from protocols.errors import PotluckError, ProtocolMisuse

# The longest sleep between two looks at what is due: swarm time may be corrected meanwhile.
LONGEST_SLEEP_SECONDS = 30.0

SIGNED_WITHOUT_A_PAUSE = 32  # signing takes some 50 microseconds

# Of replicas: if fewer hold a slot than this part of those who were asked, it is soon said again.
ENOUGH_OF_THEM = 0.5


class Publications:
    """The own slots of this node and their way to the replicas."""

    def __init__(self, state: DhtState, writer: Writer) -> None:
        self._state = state
        self._writer = writer
        self._changed = trio.Event()

    def prepare(self, key: str, value: object, ttl_seconds: float, *, keep_up: bool) -> Slot:
        """A signed slot under this key; SlotRefused if every node would refuse it."""
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
                advice="It is kept up for as long as this node runs, however short it lives.",
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
        """Bring slots to their replicas, and note how that went."""
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
        """Say again what is due, for ever."""
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
                await self._say_again(due[start : start + LARGEST_PUT])

    async def _due(self, now_ms: int) -> list[Slot]:
        publisher = self._state.publisher
        due: list[Slot] = []
        while (moment := publisher.next_due()) is not None and moment <= now_ms:
            due += publisher.due(now_ms, SIGNED_WITHOUT_A_PAUSE)
            await trio.lowlevel.checkpoint()
        return due

    async def _say_again(self, slots: Sequence[Slot]) -> None:
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
