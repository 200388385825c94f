"""The slots under a group's key: ours is put there, and the others' are read.

A slot says that its publisher looks for the group, whether it can be dialled, and where. It says
nothing of whether the publisher still lives, and it is read seconds after it was put.

Easy to get wrong: a slot costs the directory several messages, and so does a read. Whoever is held
by a leader that is there needs neither, and among peers that meet again that is nearly everybody.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

import trio

from protocols.errors import PotluckError
from protocols.moshpit.gathering_effects import Candidate
from protocols.moshpit.matchmaking_messages import LAYOUT_MARK_BYTES, GroupSlot
from protocols.moshpit.search_context import SearchContext

if TYPE_CHECKING:
    from protocols.dht.reading import Entry as SlotEntry
    from protocols.dht.service import Dht

log = logging.getLogger("potluck.moshpit")

FIRST_READS_SECONDS = (0.02, 0.05, 0.1, 0.2)  # between the first reads of the slots,
READ_SECONDS = 0.5  # and between all that follow
PUBLISH_AFTER_SECONDS = 0.15  # the leader of the last time answers sooner, or it is not there
FULL_READ_EVERY = 4  # reads; the others ask the first few replicas only
SLOT_OUTLIVES_SECONDS = 5.0  # the search, so that a peer that is about to come still sees it


class GroupSlots:
    """For one search. Both tasks end with its nursery."""

    def __init__(self, context: SearchContext, dht: Dht) -> None:
        self._context = context
        self._dht = dht
        self._mark = context.terms.layout_digest[:LAYOUT_MARK_BYTES]

    async def publish(self, after_seconds: float) -> None:
        """Put our slot, unless we are held by a leader before: then it has a slot, and that will
        do for as long as it is there."""
        context, gathering = self._context, self._context.gathering
        with trio.move_on_after(after_seconds):
            await context.until(gathering.is_held)
        await context.until(lambda: not gathering.is_held())
        if gathering.ended:
            return
        slot = GroupSlot(context.search.offer.reduces, self._mark, context.own_addresses())
        seconds = context.search.matchmaking_seconds + SLOT_OUTLIVES_SECONDS
        try:
            await self._dht.put(context.terms.key, slot, seconds, keep_up=False)
        except PotluckError as error:  # those who joined us know us without it
            log.warning("nobody keeps our slot under %s: %s", context.terms.key, error)

    async def read(self) -> None:
        """Read the slots for as long as that is of use, and tell the gathering of them."""
        context, gathering = self._context, self._context.gathering
        pauses = itertools.chain(FIRST_READS_SECONDS, itertools.repeat(READ_SECONDS))
        for number in itertools.count(1):
            await context.until(lambda: gathering.looks_for_slots)
            try:
                entries = await self._dht.get(
                    context.terms.key, latest_enough=number % FULL_READ_EVERY != 0
                )
            except PotluckError as error:  # those who know us may still invite us
                log.debug("the slots under %s could not be read: %s", context.terms.key, error)
            else:
                self._take(entries.values())
            gathering.slots_were_read(trio.current_time())
            context.go_on()
            await trio.sleep(next(pauses))

    def _take(self, entries: Iterable[SlotEntry]) -> None:
        context, now = self._context, trio.current_time()
        for entry in sorted(entries, key=lambda one: context.order(one.publisher)):
            slot, publisher = entry.value, entry.publisher
            if publisher == context.me or not isinstance(slot, GroupSlot):
                continue
            if slot.layout != self._mark:
                why = f"it averages another layout or chunk size, {slot.layout.hex()}"
                context.gathering.saw_other_layout(publisher, why, now)
                continue
            context.network.learn_addresses(publisher, slot.addresses)
            candidate = Candidate(publisher, slot.reduces)
            context.gathering.saw_slot(candidate, entry.sequence, now)
