"""What stands behind the bridge, in trio's thread: averager, tracker, state server and fetcher.

    side = NetworkSide(network, rpc, dht, averager, settings, nursery)
    bridge.set_far_side(side)

Each thing that the training thread asks for becomes a task here, whose result or error of ours is
the answer. A task that is cancelled gives none: the bridge has ended by then, and told everybody.

Easy to get wrong: the slot that is published is made of two halves that change at different times:
what the training thread says, and the digest of the state, which is computed a little after each
step. A digest goes into the slot only while it is of the slot's own epoch and history.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import msgspec
import trio

from protocols.accumulation.bridge import Entry, FetchCut, FetchWanted, Wanted
from protocols.accumulation.describing import described_by, serve_description
from protocols.accumulation.events import Event, FellBehind, PlacesTaken
from protocols.accumulation.keeping_up import FetchFailed, KeepingUp, TooSlow
from protocols.accumulation.lifecycle_events import Ending
from protocols.accumulation.progress import Estimate
from protocols.accumulation.progress_slot import ProgressSlot
from protocols.accumulation.state_fetching import Fetched, KeptPieces, StateSource, fetch_state
from protocols.accumulation.state_paces import Paces
from protocols.accumulation.state_serving import StateServer, StateServingSettings
from protocols.accumulation.state_with_results import Followed, follow_run
from protocols.accumulation.tracker import Tracker, TrackerSettings, open_tracker
from protocols.accumulation.training_description import TrainingDescription
from protocols.accumulation.waiting import Answer
from protocols.dht.service import Dht
from protocols.errors import PotluckError, ProtocolMisuse
from protocols.identity import PeerId
from protocols.moshpit.averager import Averager
from protocols.moshpit.closing_time import SHARE_WAITED_FOR_MISSING
from protocols.moshpit.outcome import Outcome
from protocols.network import Network
from protocols.rpc import Rpc

if TYPE_CHECKING:
    from protocols.accumulation.collaboration import CollaborationSettings

log = logging.getLogger("potluck.accumulation")

MOST_DESCRIBED = 3  # peers are asked what they train, one after the other
EVENTS_AHEAD = 256  # that a subscriber may leave unread: minutes of a busy run

Value = TypeVar("Value")


class NetworkSide:
    """The `FarSide` (bridge.py) of a real collaboration. Invariant: what `_entered` needs is there
    once `enter` has been answered."""

    def __init__(
        self,
        network: Network,
        rpc: Rpc,
        dht: Dht,
        averager: Averager,
        settings: CollaborationSettings,
        nursery: trio.Nursery,
    ) -> None:
        self._network, self._rpc, self._dht = network, rpc, dht
        self._averager, self._settings, self._nursery = averager, settings, nursery
        self._tracker: Tracker | None = None
        self._server: StateServer | None = None
        self._kept = KeptPieces(settings.fetching_folder)
        self._paces, self._keeping_up = Paces(), KeepingUp()
        self._slot: ProgressSlot | None = None
        self._fetching = trio.CancelScope()
        """Of the fetch that is under way, or was the last one."""
        self._subscribers: list[trio.MemorySendChannel[Event]] = []

    # -- in any thread

    def estimate(self) -> Estimate:
        return self._entered().estimate

    # -- in trio's thread

    def note(self, slot: ProgressSlot, *, at_once: bool, ago: float) -> None:
        self._slot = slot
        self._entered().note(self._completed(slot), at_once=at_once, ago=ago)

    def enter(self, entry: Entry, answer: Answer[None]) -> None:
        self._nursery.start_soon(self._take_part, entry, answer)

    def average(self, wanted: Wanted, answer: Answer[Outcome]) -> None:
        self._begin(answer, lambda: self._average(wanted))

    def look_again(self, after: int, answer: Answer[Estimate]) -> None:
        self._begin(answer, lambda: self._look_again(after))

    def wait_for_news(self, seconds: float, answer: Answer[Estimate]) -> None:
        self._begin(answer, lambda: self._wait_for_news(seconds))

    def sleep(self, seconds: float, answer: Answer[None]) -> None:
        async def pause() -> None:
            await trio.sleep(seconds)

        self._begin(answer, pause)

    def fetch(self, wanted: FetchWanted, answer: Answer[Fetched | Followed]) -> None:
        self._begin(answer, lambda: self._fetch(wanted))

    def cut_fetch(self) -> None:
        self._fetching.cancel()

    def describe(self, peers: Sequence[PeerId], answer: Answer[TrainingDescription | None]) -> None:
        self._begin(answer, lambda: self._describe(peers))

    def round_ended(
        self, ending: Ending, brought: Mapping[PeerId, float], *, applied: bool
    ) -> None:
        if applied:
            self._keeping_up.is_in()
        self._entered().round_ended(ending, brought, applied=applied)

    def state_refused(self, peers: Iterable[PeerId], reason: str) -> None:
        for peer in peers:
            self._entered().state_refused(peer, reason)

    def state_advanced(self) -> None:
        if self._server is not None:
            self._server.advanced()

    def set_away(self, *, is_away: bool) -> None:
        self._keeping_up.is_in()  # while it is away it is not late for anything
        self._entered().set_away(is_away=is_away)

    def mine(self) -> ProgressSlot | None:
        return None if self._tracker is None else self._tracker.mine()

    def peers(self) -> dict[PeerId, ProgressSlot]:
        return {} if self._tracker is None else self._tracker.slots()

    def happened(self, event: Event) -> None:
        if isinstance(event, FellBehind):
            log.info("%s The state of epoch %d is fetched.", event.reason, event.at_least_epoch)
        if isinstance(event, PlacesTaken):
            log.info("All %d places in the run's rounds are taken: it is followed.", event.places)
        log.debug("%s", event)
        for subscriber in tuple(self._subscribers):
            try:
                subscriber.send_nowait(event)
            except trio.WouldBlock:
                log.debug("a subscriber misses %s", type(event).__name__)
            except trio.BrokenResourceError:
                self._subscribers.remove(subscriber)

    def subscribe(self) -> trio.MemoryReceiveChannel[Event]:
        sender, receiver = trio.open_memory_channel[Event](EVENTS_AHEAD)
        self._subscribers.append(sender)
        return receiver

    # -- tasks

    async def _take_part(self, entry: Entry, answer: Answer[None]) -> None:
        """Say and read progress, and serve the state, until the collaboration ends."""
        settings = TrackerSettings(
            self._settings.run,
            entry.target_samples,
            patience_seconds=SHARE_WAITED_FOR_MISSING * self._settings.grace_seconds,
            counts_silence=self._settings.begins,
            places=self._settings.places,
        )
        first = self._completed(entry.slot)
        async with open_tracker(self._network, self._dht, settings, first) as tracker:
            self._slot, self._tracker = entry.slot, tracker
            self._averager.when_asked(tracker.was_asked)
            await tracker.looked()
            answer.give(None)
            if not self._settings.client:
                allowed = self._settings.up_bytes_per_second or None
                self._server = StateServer(
                    self._rpc,
                    entry.look,
                    entry.lock,
                    StateServingSettings(upload_bytes_per_second=allowed),
                    entry.results,
                    entry.serving_cost,
                )
                serve_description(self._rpc, self._settings.run, entry.description)
                self._nursery.start_soon(self._server.run)
                await self._publish_digests(self._server)
            await trio.sleep_forever()

    async def _publish_digests(self, server: StateServer) -> None:
        """A state that has been named goes into the slot."""
        offer = None
        while True:
            offer = await server.offered(offer)
            if self._slot is not None:
                self.note(self._slot, at_once=False, ago=0.0)

    async def _average(self, wanted: Wanted) -> Outcome:
        settings = self._settings
        over_a_grid = settings.approximate and wanted.expected > settings.group_size
        return await self._averager.average(
            wanted.vector,
            weight=wanted.weight,
            most_weight=wanted.most_weight,
            epoch=wanted.epoch,
            topic=wanted.topic,
            expected=wanted.expected,
            awaited=wanted.awaited,
            votes=wanted.votes,
            grid=self._averager.grid_for(wanted.expected) if over_a_grid else None,
        )

    async def _look_again(self, after: int) -> Estimate:
        return await self._entered().look_again(after)

    async def _wait_for_news(self, seconds: float) -> Estimate:
        with trio.move_on_after(seconds):
            await self._entered().changed()
        return self.estimate()

    async def _fetch(self, wanted: FetchWanted) -> Fetched | Followed:
        if not wanted.is_unwanted():
            with trio.CancelScope() as self._fetching:
                return await self._fetch_on(wanted)
        raise FetchCut(
            "What was being fetched is left where it is.",
            why="The owner of this peer wants it to rest.",
        )

    async def _fetch_on(self, wanted: FetchWanted) -> Fetched | Followed:
        fetched: Fetched | Followed | PotluckError
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._entered().look_often)
            try:
                fetched = await self._fetched(wanted)
            except PotluckError as error:
                fetched = error  # raised below, where no nursery wraps it
            nursery.cancel_scope.cancel()
        if isinstance(fetched, PotluckError):
            if not isinstance(fetched, TooSlow):  # which is nobody's fault but the link's
                served_by = fetched.served_by if isinstance(fetched, FetchFailed) else frozenset()
                to_blame = [peer for peer in wanted.peers if peer not in served_by]
                self._entered().fetch_failed(to_blame, str(fetched))
            raise fetched
        for peer, reason in fetched.liars.items():
            self._entered().state_refused(peer, reason)
        return fetched

    async def _fetched(self, wanted: FetchWanted) -> Fetched | Followed:
        followed = await follow_run(
            self._rpc,
            self._sources,
            wanted.mine,
            wanted.layouts,
            paces=self._paces,
            keeping_up=self._keeping_up,
            too_slow=wanted.too_slow,
        )
        return followed or await fetch_state(
            self._rpc,
            self._sources,
            wanted.mine,
            at_least_epoch=wanted.at_least_epoch,
            history=wanted.history,
            kept=self._kept,
            layouts=wanted.layouts,
            too_slow=wanted.too_slow,
            paces=self._paces,
            keeping_up=self._keeping_up,
        )

    async def _describe(self, peers: Sequence[PeerId]) -> TrainingDescription | None:
        for peer in peers[:MOST_DESCRIBED]:
            slot = self._entered().said_by(peer)
            found = await described_by(self._rpc, peer, self._settings.run)
            if found is not None and slot is not None and found.digest == slot.signature:
                return found
        return None

    def _begin(self, answer: Answer[Value], task: Callable[[], Awaitable[Value]]) -> None:
        async def run() -> None:
            try:
                value = await task()
            except PotluckError as error:
                answer.fail(error)
            else:
                answer.give(value)

        self._nursery.start_soon(run)

    # -- within

    def _entered(self) -> Tracker:
        if self._tracker is None:
            raise ProtocolMisuse("Nothing has entered this bridge: make an optimizer first.")
        return self._tracker

    def _completed(self, slot: ProgressSlot) -> ProgressSlot:
        """With what only this side knows: how this node is reached, and the digest of the state, if
        that is of this epoch and history."""
        settings = self._settings
        slot = msgspec.structs.replace(slot, client=settings.client, name=settings.name)
        offer = None if self._server is None else self._server.offer
        if offer is None or (offer.epoch, offer.history) != (slot.epoch, slot.history):
            return slot
        return msgspec.structs.replace(slot, state_digest=offer.digest, serves_state=True)

    def _sources(self) -> list[StateSource]:
        return [
            StateSource(
                peer,
                slot.epoch,
                slot.history,
                slot.state_digest,
                slot.signature,
                slot.torch,
                slot.follows,
            )
            for peer, slot in self._entered().slots().items()
            if slot.serves_state
        ]
