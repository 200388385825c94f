"""The trio side of training together: averager, progress, and the state's server and fetcher.

    async with open_collaboration(network, rpc, dht, CollaborationSettings(...)) as collaboration:
        await trio.to_thread.run_sync(train, collaboration.bridge)

Progress and state begin when an optimizer enters the bridge. Before that it is not known what model
this peer has.

Promises: everything ends with the block, within seconds, even while the training thread is in the
middle of a step. If that thread waits in the bridge, it is woken with `CollaborationEnded`;
otherwise its next call raises it.

Easy to get wrong: the block does not wait for the training thread. The code that started the thread
must join it. And the directory's families must contain GROUP and PROGRESS (node/core/directory.py
has them).
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import trio

from nat.kinds import Nat
from protocols.accumulation.bridge import Bridge, FetchCut, FetchWanted, OptimizerEntry
from protocols.accumulation.claims import Brought
from protocols.accumulation.ended import CollaborationEnded
from protocols.accumulation.estimate import Estimate
from protocols.accumulation.events import FellBehind, PlacesTaken, TrainingEvent
from protocols.accumulation.keeping import StateKeeper
from protocols.accumulation.keeping_up import FetchFailed, KeepingUp, TooSlow
from protocols.accumulation.known import ProgressSettings
from protocols.accumulation.lifecycle import Averaged
from protocols.accumulation.lineage import Lineage
from protocols.accumulation.parameters import Codecs
from protocols.accumulation.progress_slot import MOST_PEERS, ProgressSlot
from protocols.accumulation.state_download import FetchSettings, Paces, is_needed
from protocols.accumulation.state_fetching import (
    FetchedState,
    Followed,
    KeptPieces,
    StateSource,
    fetch_state,
    follow_run,
)
from protocols.accumulation.state_manifest import StateRefused
from protocols.accumulation.state_messages import DESCRIPTION, DescriptionRequest, StateGone
from protocols.accumulation.state_pace import ServingCost
from protocols.accumulation.state_serving import StateServer, StateServingSettings
from protocols.accumulation.tracker import Tracker, open_tracker
from protocols.accumulation.training_description import TrainingDescription
from protocols.dht import Dht
from protocols.errors import DeadlineExceeded, PotluckError, ProtocolMisuse
from protocols.guard import Caller
from protocols.guest import Portal, open_portal
from protocols.identity import PeerId
from protocols.moshpit.averager import ONE_GROUP, Averager, open_averager
from protocols.moshpit.closing_time import SHARE_WAITED_FOR_MISSING
from protocols.moshpit.outcome import Outcome, Verdict
from protocols.moshpit.request import RoundRequest
from protocols.moshpit.settings import (
    GROUP_SIZE,
    MATCHMAKING_SECONDS,
    ROUND_SECONDS,
    AveragerSettings,
)
from protocols.network import Network
from protocols.rpc import Rpc
from protocols.tensors import NoMemory

if TYPE_CHECKING:
    from trio_typing import TaskStatus

log = logging.getLogger("potluck.accumulation")

MOST_DESCRIBED = 3  # peers are asked what they train, one after the other

# ---- descriptions: what a peer trains, and how
#
#     serve_description(rpc, run, mine)
#     theirs = await described_by(rpc, peer, run)
#
# Easy to get wrong: a peer's answer need not be what it trains. Compare its digest with the
# signature in the peer's slot.

ASK_SECONDS = 10.0  # the answer only makes a refusal clearer


def serve_description(rpc: Rpc, run: str, mine: TrainingDescription) -> None:
    """Answer from now on. Call it once for each rpc."""

    async def answer(_caller: Caller, request: DescriptionRequest) -> TrainingDescription:
        if request.run != run:
            raise StateGone("This peer takes part in another run.")
        return mine

    rpc.serve(DESCRIPTION, answer)


async def described_by(rpc: Rpc, peer: PeerId, run: str) -> TrainingDescription | None:
    """The description that a peer gives of its training; None if it does not answer."""
    try:
        return await rpc.call(peer, DESCRIPTION, DescriptionRequest(run), timeout=ASK_SECONDS)
    except PotluckError as error:
        log.debug("%s does not say what it trains: %s", peer, error)
        return None


@dataclass(frozen=True)
class CollaborationSettings:
    """The settings of a run on this node. All peers of a run have the same `run`,
    `target_batch`, `codec`, `round_seconds`, `group_size` and `approximate`.

    - `run`: the name of the run.
    - `target_batch`: samples of one step of the whole collaboration.
    - `codec`: how averaged values are encoded, for all or by the parameters' names (others: none).
    - `grace_seconds`: how long at most a round waits for expected peers. If nobody comes for
      15 % of it, the wait ends (moshpit/closing_time.py). A peer whose batch takes longer than
      that waits for a round that is nearly due instead of beginning a batch.
    - `round_seconds`: how long a round may take from its list to its decision.
    - `group_size`: the most members of one group. If more peers take part, they average by cohorts
      (moshpit/cohorts.py).
    - `approximate`: True lets all of them take part. If they do not fit into one group, a step is
      made with an average over a grid, whose groups do not hold the same bits.
    - `client`: whether this node can only dial out, asked whenever it matters. Then it reduces
      nothing for others and offers no state.
    - `router`: the kind of its router (nat/kinds.py), for the plans of rounds.
    - `name`: what the owner wants to be called by the others.
    - `up_bytes_per_second`, `down_bytes_per_second`: what averaging and serving states may use
      where the owner has set limits (0.6 of them: node/core/caps/settings.py). 0: as measured,
      and as much as does not slow training.
    - `begins`: False waits, when the optimizer is made, until the run has made a step or a peer is
      there that keeps its checkpoints. If all peers but the keeper have this, nobody can begin the
      run anew while the keeper is away (docs/assumptions.md, "Behind").
    - `fetching_folder`: where a partly fetched state is kept, so that a restart goes on from there.
      None keeps it in memory.
    - `most_kept_bytes`: memory for the results of steps that are kept for newcomers; one is kept in
      any case. Infinite means as much as is useful: the size of the state, but at least 256 MiB.
    - `most_followed_bytes`: the same for the results by which this peer catches up with the run.
      Infinite means twice as much.
    - `has_memory_for`: whether this peer may take so many bytes more, for a copy of its state.
      Called in a worker thread.
    """

    run: str
    target_batch: int
    codec: Codecs = "none"
    grace_seconds: float = MATCHMAKING_SECONDS
    round_seconds: float = ROUND_SECONDS
    group_size: int = GROUP_SIZE
    approximate: bool = False
    client: Callable[[], bool] = lambda: False
    router: Callable[[], Nat] = lambda: Nat.UNKNOWN
    name: str = ""
    up_bytes_per_second: float = 0.0
    down_bytes_per_second: float = 0.0
    begins: bool = True
    fetching_folder: Path | None = None
    most_kept_bytes: float = math.inf
    most_followed_bytes: float = math.inf
    has_memory_for: Callable[[int], bool] = lambda _: True

    def __post_init__(self) -> None:
        if self.target_batch < 1:
            raise ProtocolMisuse(
                f"A step cannot be made of {self.target_batch} samples.",
                advice="Set the target batch to what one machine would use, or larger.",
            )
        self.averager_settings()  # raises for settings that make no sense

    @property
    def places(self) -> int:
        """How many peers may be in a round."""
        return MOST_PEERS if self.approximate else self.group_size

    def averager_settings(self) -> AveragerSettings:
        return AveragerSettings(
            run=self.run,
            group_size=self.group_size,
            matchmaking_seconds=self.grace_seconds,
            round_seconds=self.round_seconds,
            up_bytes_per_second=self.up_bytes_per_second,
            down_bytes_per_second=self.down_bytes_per_second,
            reduces=lambda: not self.client(),
            router=self.router,
        )


@asynccontextmanager
async def open_collaboration(
    network: Network,
    rpc: Rpc,
    dht: Dht,
    settings: CollaborationSettings,
    *,
    keeper: StateKeeper | None = None,
) -> AsyncIterator[Collaboration]:
    """Take part in a run from this node, until the block ends. Open one for each rpc. The optimizer
    begins from the state that the `keeper` has, and gives it states to keep.

    Errors of the block come out unwrapped.
    """
    ended = CollaborationEnded(
        "The collaboration has ended.",
        why="Its block, or its node, has ended; nothing is averaged any more.",
        advice="End the training loop; what it has learnt is in the model.",
    )
    async with (
        open_averager(network, rpc, dht, settings.averager_settings()) as averager,
        open_portal(ended) as portal,
    ):
        collaboration = Collaboration(network, rpc, dht, averager, settings, portal, keeper)
        portal.nursery.start_soon(collaboration.bridge.hand_on_notes)
        yield collaboration


class Collaboration:
    """Made by `open_collaboration`. `bridge` is for the training thread, which calls the methods
    from `enter` to `happened` through it; the others are for the owner. All run in trio's thread.

    Easy to get wrong: the slot that is published is made of two halves that change at different
    times: what the training thread reports, and the digest of the state, which is computed a little
    after each step. A digest goes into the slot only while it is of the slot's own epoch and
    history, or while a copy and results are kept that lead there.
    """

    def __init__(
        self,
        network: Network,
        rpc: Rpc,
        dht: Dht,
        averager: Averager,
        settings: CollaborationSettings,
        portal: Portal,
        keeper: StateKeeper | None,
    ) -> None:
        self.settings = settings
        self.bridge = Bridge(portal, self, keeper)
        self._network, self._rpc, self._dht = network, rpc, dht
        self._averager, self._nursery = averager, portal.nursery
        self._tracker: Tracker | None = None
        self._server: StateServer | None = None
        self._serving_cost: ServingCost | None = None
        self._kept = KeptPieces(settings.fetching_folder)
        self._paces, self._keeping_up = Paces(), KeepingUp()
        self._slot: ProgressSlot | None = None
        self._moved_at = 0.0
        """When the slot came to its epoch and history."""
        self._fetching = trio.CancelScope()
        """The scope of the fetch under way, or of the last one."""
        self._followers: list[Callable[[TrainingEvent], None]] = []

    # -- for the owner

    def last_events(self) -> tuple[TrainingEvent, ...]:
        """The latest events, the newest last."""
        return tuple(self.bridge.events)

    def peers(self) -> dict[PeerId, ProgressSlot]:
        """The progress slots of the other peers that are alive and fit."""
        return {} if self._tracker is None else self._tracker.slots()

    def mine(self) -> ProgressSlot | None:
        """This peer's slot, with its measured rate, once an optimizer has entered."""
        return None if self._tracker is None else self._tracker.mine()

    def follow(self, tell: Callable[[TrainingEvent], None]) -> None:
        """Call `tell` with each event from now on, in trio's thread, in their order."""
        self._followers.append(tell)

    # -- what the training thread calls

    @property
    def tracker(self) -> Tracker:
        """The tracker, once an optimizer has entered. Any thread."""
        if self._tracker is None:
            raise ProtocolMisuse("Nothing has entered this bridge: make an optimizer first.")
        return self._tracker

    async def enter(self, entry: OptimizerEntry) -> None:
        """Begin to take part, until the collaboration ends."""
        await self._nursery.start(self._take_part, entry)

    def note(self, slot: ProgressSlot, *, at_once: bool, ago: float) -> None:
        before, self._slot = self._slot, slot
        if before is None or (before.epoch, before.history) != (slot.epoch, slot.history):
            self._moved_at = trio.current_time()
        self.tracker.note(self._completed(slot), at_once=at_once, ago=ago)

    async def average(self, request: RoundRequest) -> Outcome:
        settings, expected = self.settings, request.expected or 0
        over_a_grid = settings.approximate and expected > settings.group_size
        grid = self._averager.grid_for(expected) if over_a_grid else ONE_GROUP
        exchanges: list[tuple[float, float]] = []
        try:
            outcome = await self._averager.average(request, grid)
            exchanges += [
                (one.exchange_began, one.exchange_ended)
                for one in outcome.rounds
                if one.verdict is Verdict.COMMITTED
                and one.exchange_began is not None
                and one.exchange_ended is not None
            ]
        finally:  # also after an error: serving may rest since an exchange began
            if self._serving_cost is not None:
                self._serving_cost.averaged(exchanges)
        return outcome

    async def wait_for_news(self, seconds: float) -> Estimate:
        with trio.move_on_after(seconds):
            await self.tracker.changed()
        return self.tracker.estimate

    async def fetch(self, wanted: FetchWanted) -> FetchedState | Followed:
        if not wanted.is_unwanted():
            try:
                with trio.fail_after(wanted.seconds), trio.CancelScope() as self._fetching:
                    return await self._fetch_on(wanted)
            except trio.TooSlowError:
                raise DeadlineExceeded(
                    f"Nobody sent the next state within {wanted.seconds:g} seconds.",
                    why="They are busy or slow, or claim a step that was not made.",
                    advice="Nothing: this peer goes on with those that are in its own epoch.",
                ) from None
        raise FetchCut(
            "The fetch of the state was stopped; the part that has arrived is kept.",
            why="The owner of this peer wants it to rest.",
        )

    async def describe(self, peers: Sequence[PeerId]) -> TrainingDescription | None:
        for peer in peers[:MOST_DESCRIBED]:
            slot = self.tracker.said_by(peer)
            found = await described_by(self._rpc, peer, self.settings.run)
            if found is not None and slot is not None and found.digest == slot.signature:
                return found
        return None

    def cut_fetch(self) -> None:
        self._fetching.cancel()

    def round_ended(self, ended: Averaged, brought: Brought, applied: bool) -> None:
        self._averager.confirm(applied=applied)
        if applied:
            self._keeping_up.is_in()
        self.tracker.round_ended(brought, applied=applied, peers=ended.peers)

    def state_refused(self, peers: Sequence[PeerId], reason: str) -> None:
        for peer in peers:
            self.tracker.state_refused(peer, reason)

    def state_advanced(self) -> None:
        if self._server is not None:
            self._server.advanced()

    def set_away(self, is_away: bool) -> None:
        self._keeping_up.is_in()  # a peer that is away is not late
        self.tracker.set_away(is_away=is_away)

    def happened(self, event: TrainingEvent) -> None:
        if isinstance(event, FellBehind):
            log.info("%s The state of epoch %d is fetched.", event.reason, event.at_least_epoch)
        if isinstance(event, PlacesTaken):
            log.info("All %d places in the run's rounds are taken: it is followed.", event.places)
        log.debug("%s", event)
        for tell in self._followers:
            tell(event)

    # -- tasks

    async def _take_part(
        self, entry: OptimizerEntry, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Publish and read progress, and serve the state, until the collaboration ends. It has
        started when this peer's progress is published and the others' is read."""
        settings = ProgressSettings(
            entry.mode.target_samples,
            SHARE_WAITED_FOR_MISSING * self.settings.grace_seconds,
            self.settings.places,
            entry.mode.delayed,
            self.settings.run,
        )
        async with open_tracker(
            self._network,
            self._dht,
            settings,
            self._completed(entry.slot),
            counts_silence=self.settings.begins,
        ) as tracker:
            self._slot, self._tracker = entry.slot, tracker
            self._serving_cost = entry.serving_cost
            self._averager.when_asked(tracker.was_asked)
            tracker.idle_heads = lambda: self._averager.idle_heads
            tracker.step_shown_by = self._averager.step_shown_by
            self._averager.when_exchanging(self._exchange_begins)
            await tracker.looked()
            task_status.started()
            entry.results.limit(self.settings.most_kept_bytes)
            allowed = self.settings.up_bytes_per_second or None
            self._server = StateServer(
                self._rpc,
                entry.look,
                entry.lock,
                StateServingSettings(
                    upload_bytes_per_second=allowed, has_memory_for=self.settings.has_memory_for
                ),
                entry.results,
                entry.serving_cost,
            )
            serve_description(self._rpc, self.settings.run, entry.description)
            self._nursery.start_soon(self._server.run)
            self._nursery.start_soon(self._watch_who_needs_a_state, tracker, self._server)
            self._nursery.start_soon(self._watch_where_the_run_is, tracker)
            await self._publish_digests(self._server)

    async def _watch_who_needs_a_state(self, tracker: Tracker, server: StateServer) -> None:
        """Have states named while others may need them. A peer that only follows gives out no
        state: a copy and its digest cost what it needs to catch up itself. The results by which it
        has followed are in memory. One that can only dial out names none, because others cannot
        ask it."""
        while True:
            await tracker.changed()
            mine = tracker.mine()
            others = (Lineage(one.epoch, one.history) for one in tracker.slots().values())
            seconds = trio.current_time() - self._moved_at
            serves = not (mine.follows or mine.client)
            if serves and is_needed(others, Lineage(mine.epoch, mine.history), seconds):
                server.needed()

    async def _watch_where_the_run_is(self, tracker: Tracker) -> None:
        """Look for no group of an epoch that the run has ended. A peer that was cut off, or slept,
        would otherwise wait for the others until its search is over by itself."""
        while True:
            await tracker.changed()
            if tracker.estimate.behind is not None:
                self._averager.overtaken(tracker.estimate.epoch)

    async def _publish_digests(self, server: StateServer) -> None:
        """Put the digest of each newly named state into the slot."""
        offer = None
        while True:
            offer = await server.offered(offer)
            if self._slot is not None:
                self.note(self._slot, at_once=False, ago=0.0)

    def _exchange_begins(self) -> None:
        self.tracker.gathered()
        if self._serving_cost is not None:
            self._serving_cost.exchanges(trio.current_time())

    async def _fetch_on(self, wanted: FetchWanted) -> FetchedState | Followed:
        fetched: FetchedState | Followed | PotluckError
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.tracker.look_often)
            try:
                fetched = await self._fetched(wanted)
            except PotluckError as error:
                fetched = error  # raised below, where no nursery wraps it
            nursery.cancel_scope.cancel()
        if isinstance(fetched, PotluckError):
            if not isinstance(fetched, TooSlow | NoMemory):  # those are no peer's fault
                to_blame = frozenset(wanted.peers)
                if isinstance(fetched, FetchFailed):
                    to_blame -= fetched.served_by
                elif isinstance(fetched, StateRefused):
                    to_blame = fetched.named_by
                self.tracker.fetch_failed(to_blame, str(fetched))
            raise fetched
        for peer, reason in fetched.liars.items():
            self.tracker.state_refused(peer, reason)
        return fetched

    async def _fetched(self, wanted: FetchWanted) -> FetchedState | Followed:
        settings = FetchSettings(most_result_bytes=self.settings.most_followed_bytes)
        followed = await follow_run(
            self._rpc,
            self._sources,
            wanted.mine,
            wanted.layouts,
            settings=settings,
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
            settings=settings,
            kept=self._kept,
            layouts=wanted.layouts,
            too_slow=wanted.too_slow,
            paces=self._paces,
            keeping_up=self._keeping_up,
        )

    # -- within

    def _completed(self, slot: ProgressSlot) -> ProgressSlot:
        """Add what only this side knows: whether this node can only dial out, its name, its
        link, and the digest of a state that leads to this epoch and history."""
        settings = self.settings
        slot = msgspec.structs.replace(
            slot, client=settings.client(), name=settings.name, uplink=self._averager.uplink
        )
        offer = None if self._server is None else self._server.offer
        if self._server is None or offer is None or slot.client:
            return slot
        if (offer.epoch, offer.history) == (slot.epoch, slot.history):
            return msgspec.structs.replace(slot, state_digest=offer.digest)
        if self._server.leads_to(Lineage(slot.epoch, slot.history)):
            return msgspec.structs.replace(slot, earlier_digest=offer.digest)
        return slot

    def _sources(self) -> list[StateSource]:
        return [
            StateSource(
                peer,
                slot.epoch,
                slot.history,
                slot.state_digest or slot.earlier_digest,
                slot.signature,
                slot.torch,
                slot.follows,
                bool(slot.earlier_digest),
            )
            for peer, slot in self.tracker.slots().items()
            if not slot.client
        ]
