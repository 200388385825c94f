"""Saving what the directory knows to the keeper, and loading it at the start.

Whether a slot has expired depends on swarm time, and the clock of a machine that has just started
may be hours off. So slots are loaded after the first peer has been met, or after some seconds if
nobody answers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import trio

from protocols.blocking import in_thread
from protocols.dht.contacts import Contact
from protocols.dht.keeper import Keeper, KeepingFailed, KeptSlot, UnsavedSlots
from protocols.dht.slots import Slot, SlotRefused
from protocols.dht.state import DhtState, log

SLOTS_PER_SAVE = 1024  # in one transaction: some 200 KiB, well under a second on a slow disk
SLOTS_LOADED_PER_CHECKPOINT = 8  # under a millisecond of checking signatures
CLOCK_SECONDS = 5.0  # how long loading waits for swarm time

Loaded = TypeVar("Loaded")


class Persistence:
    """Loads and saves. A failure is logged, and loses only what was to be saved."""

    def __init__(self, state: DhtState, keeper: Keeper) -> None:
        self._state = state
        self._keeper = keeper
        self._saved_contacts: list[Contact] = []
        state.unsaved = self._unsaved = UnsavedSlots()

    async def load_contacts(self) -> list[Contact]:
        """Load the contacts of the last run."""
        return await self._ask(lambda: list(self._keeper.load_contacts()), [])

    async def run(self, joined: trio.Event) -> None:
        """Load the slots, then keep saving what changes."""
        with trio.move_on_after(CLOCK_SECONDS):
            await joined.wait()
        await self._load_slots()
        while True:
            await self.save()  # at once: these contacts are the way back after an early crash
            with trio.move_on_after(self._state.settings.save_seconds):
                await self._unsaved.are_many.wait()

    async def save(self) -> None:
        """Give the keeper what has changed since the last save."""
        state = self._state
        contacts = state.table.closest(state.own_id, len(state.table))
        if contacts and contacts != self._saved_contacts:
            self._saved_contacts = contacts
            await self._ask(lambda: self._keeper.save_contacts(contacts), None)
        now_ms = state.now_ms()
        kept = [KeptSlot(slot, self._forget_at(slot)) for slot in self._unsaved.take()]
        kept = [one for one in kept if one.forget_at > now_ms]
        for start in range(0, len(kept), SLOTS_PER_SAVE):
            await self._save_slots(kept[start : start + SLOTS_PER_SAVE], now_ms)

    def _forget_at(self, slot: Slot) -> int:
        return max(slot.expires, self._state.storage.forget_at(slot.key, slot.publisher))

    async def _save_slots(self, slots: list[KeptSlot], now_ms: int) -> None:
        await self._ask(lambda: self._keeper.save_slots(slots, now_ms), None)

    async def _load_slots(self) -> None:
        refused = 0
        nothing: list[KeptSlot] = []
        loaded = await self._ask(lambda: list(self._keeper.load_slots()), nothing)
        for place, kept in enumerate(loaded):
            if place % SLOTS_LOADED_PER_CHECKPOINT == 0:
                await trio.lowlevel.checkpoint()
            try:
                self._state.storage.restore(kept.slot, kept.forget_at, self._state.now_ms())
            except SlotRefused:
                refused += 1
        if loaded:
            log.info("loaded %d slots; %d were expired or invalid", len(loaded), refused)

    async def _ask(self, work: Callable[[], Loaded], otherwise: Loaded) -> Loaded:
        try:
            if self._keeper.blocks:
                return await in_thread(work)
            await trio.lowlevel.checkpoint()
            return work()
        except KeepingFailed as error:
            log.warning("%s", error)
            return otherwise
