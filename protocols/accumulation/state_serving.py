"""Names this peer's states by their digests, and serves them to newcomers and peers that fell
behind.

    server = StateServer(rpc, look, lock)
    nursery.start_soon(server.run)
    server.advanced()                       # after each step
    server.needed()                         # a peer may want the state: compute its digest
    server.offer                            # for this peer's progress slot

A digest is a hash over the whole state. It takes as long as reading the state: with some models,
seconds of each step. So only the first state is named, and those that a peer may want (`is_needed`
in state_download.py) or has asked for lately.

A large state takes longer to name, to be heard of and to be asked for than a short step. So such
a state is copied first, and the copy is named; it stays while the results lead on from it. It is
made in epochs that are multiples of a number (`naming_interval`), so that all donors have the same
one. While a peer downloads it, no other is made, unless half of the results are used up.

In this file: `RecentStates` keeps small states of the last steps; `Snapshots` holds the copy that
is served; `send_result` sends what a step was made of; `StateServer` answers requests.

Promises: the training thread waits only if it steps while a copy is being made (some 30 ms for
100 MB), once for each epoch that is named. The upload rate is limited so that serving costs
training a twentieth of its time at most, and the newcomer that came first is served first
(state_pace.py).

Easy to get wrong: `look`, and everything it reads, runs in a worker thread. It must not wait for
trio, nor take the lock.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import trio
from torch import Tensor

from protocols.accumulation.lineage import Lineage
from protocols.accumulation.results import Offered, ResultsKept
from protocols.accumulation.state_lock import StateLock
from protocols.accumulation.state_manifest import encode, name_of
from protocols.accumulation.state_messages import (
    LONGEST_TORCH_VERSION,
    MANIFEST,
    MOST_RESULTS,
    MOST_WANTED,
    MOST_WANTED_AT_ONCE,
    PIECES,
    RESULT,
    ManifestAnswer,
    ManifestRequest,
    PiecesOpening,
    PiecesTransfer,
    ResultAccepted,
    ResultLink,
    ResultOpening,
    ResultPart,
    ResultTransfer,
    StateGone,
    read_wanted,
)
from protocols.accumulation.state_pace import DownloadDesk, ServingCost, UploadPace
from protocols.accumulation.training_state import LiveState, TrainingState
from protocols.blocking import in_thread
from protocols.errors import Busy, MalformedMessage
from protocols.guard import Caller
from protocols.identity import PeerId
from protocols.moshpit.encoded_result import chunks
from protocols.rpc import Empty, Rpc, Transfer

if TYPE_CHECKING:
    from trio_typing import TaskStatus

# ---- small states of the last steps

LARGEST_BYTES = 4 << 20
"""Of one state: it takes a millisecond to copy, while a step takes at least 30 or so."""

MOST_BYTES = 32 << 20
"""Of all together: less than torch alone takes on a peer that trains."""

MOST_STATES = MOST_RESULTS * 3 // 4
"""Fewer than the results that are kept: a peer that takes the oldest state has the time of some
steps to ask for the result that follows it."""

WANTED_SECONDS = 3.0
"""How long states are kept after a request. A new slot and another attempt take less, and a peer
that was let in asks for results."""


class RecentStates:
    """Keeps copies of the last named states, if they are small and a peer has asked lately.

        recent.wanted()                      # a peer has asked for a state
        if recent.is_wanted: recent.keep(state)   # each newly named state, if it is_small
        recent.get(digest)

    A peer reads a digest in a slot that is some tenths of a second old, at times a whole second.
    With shorter steps, the state would be another one by the time it asks, every time. (A run with
    large states has no such short steps.)

    Nothing is kept unless a peer has asked within WANTED_SECONDS, and never more than MOST_STATES
    and MOST_BYTES. A state that is being downloaded stays in memory until it is sent.

    Invariant: within these limits, the state used last is at the end. Not thread-safe.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._states: dict[bytes, TrainingState] = {}
        self._wanted_until = -1.0

    def __len__(self) -> int:
        return len(self._states)

    def states(self) -> list[TrainingState]:
        return list(self._states.values())

    @property
    def held_bytes(self) -> int:
        return sum(len(one.memory) for one in self._states.values())

    def wanted(self) -> None:
        """A peer has asked for a state."""
        self._wanted_until = self._clock() + WANTED_SECONDS

    @property
    def is_wanted(self) -> bool:
        """Whether to keep a state that is named now."""
        return self._clock() < self._wanted_until

    def keep(self, state: TrainingState) -> None:
        """Keep a state that was just named, or is being used."""
        self._states.pop(state.digest, None)
        self._states[state.digest] = state
        while len(self._states) > MOST_STATES or self.held_bytes > MOST_BYTES:
            del self._states[next(iter(self._states))]

    def get(self, digest: bytes) -> TrainingState | None:
        return self._states.get(digest)

    def forget_unwanted(self) -> None:
        """Drop all states if nobody has asked for WANTED_SECONDS. Call it now and then."""
        if not self.is_wanted:
            self._states.clear()


def is_small(live: LiveState) -> bool:
    """Whether a copy of this state may be kept beside others."""
    return size_of(live) <= LARGEST_BYTES


def size_of(live: LiveState) -> int:
    return sum(one.bytes for one in live.specs)


# ---- the copy that is served

MOST_COPIES = 2
HEARD_SECONDS = 1.0
"""From a named state to a newcomer's request: the slot is written, and read, and the donors are
asked, one after the other if the first does not answer."""
PART_SECONDS = 60.0
SLOWEST_BYTES_PER_SECOND = 4096.0
"""A turn's bytes may take so long, whatever else the other side says: it would hold a place, and a
copy of the state. Eight donors at a line of 1 Mb/s bring four times as much each."""
IDLE_SECONDS = 20.0  # the longest that a peer may have a place, and a copy, and ask for nothing
KEPT_SECONDS = 15.0  # for an unused copy: a peer may have lost its link, or be about to begin


class _Snapshot:
    def __init__(self, state: TrainingState) -> None:
        self.state = state
        self.users = set[trio.CancelScope]()
        self.last_used = trio.current_time()


class Snapshots:
    """Copies of states, made when a peer asks, or to name a large state.

        async with snapshots.use(digest) as state: ...      # StateGone if the state has changed
        state = await snapshots.make()                      # Busy if two are being downloaded

    The state does not change between steps, so it can be copied at any time before the next one.
    The copy lasts as long as a peer downloads it, and a short while longer, so that no newcomer is
    left with half a state that nobody has any more.

    Promises: one copy at most, and a second only while the first is in use. Both are made in a
    worker thread, with the lock held for reading; memory is reused. The small `recent` states come
    on top.

    Easy to get wrong: a copy may differ from the state that was hashed, if a buffer changed outside
    of a step. Then the state is reported as gone.
    """

    def __init__(
        self,
        look: Callable[[], LiveState],
        lock: StateLock,
        has_memory_for: Callable[[int], bool],
        is_of_use: Callable[[Lineage], bool] = lambda _: True,
    ) -> None:
        """`is_of_use`: whether a peer that gets this state can still get to where the run is."""
        self._look, self._lock, self._has_memory_for = look, lock, has_memory_for
        self._is_of_use = is_of_use
        self._copies: dict[bytes, _Snapshot] = {}
        self._spare: Tensor | None = None
        self._copying = trio.Lock()
        self.recent = RecentStates(trio.current_time)

    def __len__(self) -> int:
        return len(self._copies)

    def states(self) -> list[TrainingState]:
        return [one.state for one in self._copies.values()] + self.recent.states()

    def has(self, digest: bytes) -> bool:
        return digest in self._copies or self.recent.get(digest) is not None

    @asynccontextmanager
    async def use(self, digest: bytes) -> AsyncIterator[TrainingState]:
        """The state with this digest. It stays in memory while the block lasts.

        StateGone if this peer has another one by now; Busy if two others are being downloaded.
        """
        recent = self.recent.get(digest)
        if recent is not None:
            self.recent.keep(recent)  # its manifest was asked for, and its pieces will be
            yield recent
            return
        snapshot = await self._snapshot(digest)
        with trio.CancelScope() as scope:
            snapshot.users.add(scope)
            try:
                yield snapshot.state
            finally:
                snapshot.users.discard(scope)
                snapshot.last_used = trio.current_time()
        if scope.cancelled_caught:
            raise StateGone(
                f"The steps after epoch {snapshot.state.epoch} are not kept here any more.",
                why="The state was taken too slowly, and others wait for a newer one.",
                advice="Fetch a newer state.",
            )

    def forget_unused(self) -> None:
        """Drop the copies that nobody has used for KEPT_SECONDS."""
        self.recent.forget_unwanted()
        now = trio.current_time()
        for digest, one in list(self._copies.items()):
            if not one.users and now - one.last_used >= KEPT_SECONDS:
                del self._copies[digest]
        if not self._copies:
            self._spare = None

    def is_used(self, digest: bytes) -> bool:
        """Whether a peer downloads the state with this digest, or is about to."""
        known = self._copies.get(digest)
        if known is None:
            return False
        return bool(known.users) or trio.current_time() < known.last_used + HEARD_SECONDS

    async def make(self) -> TrainingState:
        """A copy of the present state. It is kept like one that a peer has asked for."""
        async with self._copying:
            return (await self._made()).state

    async def _snapshot(self, digest: bytes) -> _Snapshot:
        async with self._copying:
            known = self._copies.get(digest) or await self._made()
        if known.state.digest != digest:
            raise StateGone(
                f"This peer is at epoch {known.state.epoch} now, which is another state.",
                why="It has stepped since it named that state.",
                advice="Look at the progress of the peers again.",
            )
        return known

    async def _made(self) -> _Snapshot:
        self._make_room()
        memory, self._spare = self._spare, None
        try:
            state = await in_thread(self._copy, memory)
        except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError when memory is out
            log.warning("the state cannot be copied for a newcomer: %s", error)
            raise Busy("There is no memory for a copy of the state.", why=str(error)) from error
        return self._copies.setdefault(state.digest, _Snapshot(state))

    def _make_room(self) -> None:
        """Drop the unused copies; their memory is used for the next one. If two are in use, end
        the downloads of those that are of no use any more, to have room at a later try."""
        for digest, one in list(self._copies.items()):
            if not one.users:
                self._spare = one.state.memory
                del self._copies[digest]
        if len(self._copies) >= MOST_COPIES:
            for one in self._copies.values():
                if not self._is_of_use(Lineage(one.state.epoch, one.state.history)):
                    for user in one.users:
                        user.cancel()
            raise Busy("Two older states are being downloaded from this peer.")

    def _copy(self, memory: Tensor | None) -> TrainingState:
        """Runs in a worker thread."""
        with self._lock.reading():
            live = self._look()
            size = size_of(live)
            if memory is None and not self._has_memory_for(size):
                raise MemoryError(f"with its {size:,} bytes this node would reach its limit")
            state = live.copy(memory)
        _ = state.digest  # computed here, while others may step
        return state


# ---- sending a result


async def send_result(
    transfer: ResultTransfer,
    offered: Offered,
    turn: Callable[[int], AbstractAsyncContextManager[None]],
) -> None:
    """Send one result to a peer that follows the run: its description, then its encoded chunks.

    `turn` waits until this many bytes may be sent in its block. The chunks are those of the round,
    whatever the uplink's speed: the receiver checks hashes over exactly these.
    """
    result, end = offered.first, 0
    layout = offered.layouts.of(result.kind, result.before.epoch)
    await transfer.accept(_described(offered))
    for chunk in chunks(layout, result.cut):
        place = result.memory[end : end + chunk.encoded_bytes]
        end += len(place)
        async with turn(len(place)):
            await transfer.send_chunk(place)
    await transfer.finish(Empty())


def _described(offered: Offered) -> ResultAccepted:
    result = offered.first
    return ResultAccepted(
        links=tuple(ResultLink(one.kind, one.digest) for one in offered.results),
        parts=tuple(
            ResultPart(one.reducer, one.start, one.stop, offered.part_digests[one.reducer])
            for one in result.cut.parts
        ),
        chunk_bytes=result.cut.chunk_bytes,
        nonce=result.nonce,
    )


# ---- the server

log = logging.getLogger("potluck.state")

SWEEP_SECONDS = 5.0
STEPS_MEASURED = 8
NEEDED_SHARE = 2.0
"""A newcomer gets this many times the rate that its results need. The other half is for its state,
which so takes twice as long as it would alone."""
STEPS_HELD = 3.0  # a newcomer that asks nothing for so many steps is in, or gone
SHORTEST_HELD_SECONDS = 0.5

Turn = Callable[[int], AbstractAsyncContextManager[None]]
"""Waits until this many bytes may be sent to a peer. They are sent in the block."""

_RESULTS, _PIECES = 0, 1  # the order in which one peer's transfers have their turns


@dataclass(frozen=True)
class StateOffer:
    """The part of this peer's progress slot that names its state."""

    epoch: int
    history: bytes
    digest: bytes


@dataclass(frozen=True)
class StateServingSettings:
    """How much serving may cost.

    - `most_downloads`: how many peers may download at the same time. The others are told when to
      ask again.
    - `upload_bytes_per_second`: the owner's limit for all downloads together; None: no limit.
    - `has_memory_for`: whether this peer may take so many bytes more, for a copy of its state.
      Called in a worker thread.
    """

    most_downloads: int = 8
    upload_bytes_per_second: float | None = None
    has_memory_for: Callable[[int], bool] = lambda _: True


def naming_interval(naming_seconds: float, step_seconds: float, kept_steps: int) -> int | None:
    """Large states are named in epochs that are multiples of this: a power of two, so that donors
    of unlike speed have some of them in common, and as small as leaves the time to name a state and
    to ask for it. None if that would be more than half of `kept_steps`: a newcomer must find all
    results after its state."""
    interval, needed = 1, naming_seconds + HEARD_SECONDS
    while 0.0 < interval * step_seconds < needed:
        interval *= 2
    return interval if interval == 1 or 2 * interval <= kept_steps else None


class StateServer:
    """Serves this peer's state of one run. Make only one for each rpc."""

    def __init__(
        self,
        rpc: Rpc,
        look: Callable[[], LiveState],
        lock: StateLock,
        settings: StateServingSettings | None = None,
        results: ResultsKept | None = None,
        cost: ServingCost | None = None,
    ) -> None:
        """Serves `/potluck/state/1.0.0` from now on, but has nothing to offer before `run` begins.

        `look` is called in a worker thread, with the lock held for reading. `results`: what the
        last steps were made of; None: no results are offered. `cost`: measures what serving costs
        training; None if this peer does not train.
        """
        self.settings = settings or StateServingSettings()
        self.offer: StateOffer | None = None
        """The newest state whose digest is known. May be read in any thread."""
        self._look, self._lock, self._results = look, lock, results
        is_of_use = (lambda _: True) if results is None else results.are_after
        self._snapshots = Snapshots(look, lock, self.settings.has_memory_for, is_of_use)
        self._desk = DownloadDesk(self.settings.most_downloads)
        self._pace = UploadPace(self.settings.upload_bytes_per_second, cost)
        self._advanced, self._offered = trio.Event(), trio.Event()
        self._run: str | None = None
        self._needed_until = -math.inf
        self._changes, self._naming, self._named = 0, -1, -1
        """How often the state has changed, and the count for which a digest is being computed, and
        was computed last."""
        self._is_large, self._naming_seconds, self._skipped_until = False, 0.0, -math.inf
        self._taking_pieces: Counter[PeerId] = Counter()
        self._stepped_at: deque[float] = deque(maxlen=STEPS_MEASURED)
        rpc.serve(MANIFEST, self._answer_manifest)
        rpc.serve_bulk(PIECES, self._send_pieces)
        rpc.serve_bulk(RESULT, self._send_result)

    def needed(self) -> None:
        """A peer may want a state of this one: name the present one, and those of the next
        WANTED_SECONDS."""
        now = trio.current_time()
        self._needed_until = now + WANTED_SECONDS
        if self._naming != self._changes and now >= self._skipped_until:
            self._advanced.set()

    @property
    def downloads(self) -> int:
        """How many peers are downloading."""
        return self._desk.downloading

    @property
    def copies(self) -> int:
        """How many copies of states are held for them."""
        return len(self._snapshots)

    def served_states(self) -> list[TrainingState]:
        """All copies that are held."""
        return self._snapshots.states()

    def advanced(self) -> None:
        """The state has changed: name it anew, if it is needed. Call it in trio's thread, as all
        methods here."""
        self._changes += 1
        self._skipped_until = -math.inf
        self._advanced.set()
        self._stepped_at.append(trio.current_time())
        is_kept_for_others = self._is_large and self._is_needed
        if self._results is not None and (self._desk.downloading or is_kept_for_others):
            self._results.follow()  # keep results on: a download may outlast the last request

    async def offered(self, after: StateOffer | None = None) -> StateOffer:
        """Wait for an offer other than `after`."""
        while self.offer is None or self.offer == after:
            await self._offered.wait()
        return self.offer

    def leads_to(self, place: Lineage) -> bool:
        """Whether a copy of the state of `offer` is here, and the results that lead from it to this
        place."""
        offer, results = self.offer, self._results
        if offer is None or results is None or not self._snapshots.has(offer.digest):
            return False
        start = Lineage(offer.epoch, offer.history)
        return start == place or results.lead(start, place)

    async def run(self, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Name the first state and those that are needed, and serve, until cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._sweep)
                task_status.started()
                await self._name_state()
                while True:
                    await self._advanced.wait()
                    self._advanced = trio.Event()
                    if self._is_needed:
                        await self._name_state()
        finally:
            self.offer = self._run = None

    @property
    def _is_needed(self) -> bool:
        return trio.current_time() < self._needed_until

    async def _name_state(self) -> None:
        self._naming = self._changes
        if self._is_large and self._is_needed:
            await self._name_by_a_copy()
        else:
            await self._name_live()

    async def _name_live(self) -> None:
        recent, naming = self._snapshots.recent, self._naming
        run, offer, state, self._is_large = await in_thread(self._measure, recent.is_wanted)
        self._named = naming
        if state is not None:
            recent.keep(state)
        self._set_offer(run, offer)

    async def _name_by_a_copy(self) -> None:
        """Name a large state, unless the copy that peers download will do for others, or the next
        epoch that all donors choose is not there yet."""
        naming = self._naming
        place, state_bytes = await in_thread(self._place)
        began = trio.current_time()
        if self._results is not None:
            kept_steps = self._results.usual_steps(state_bytes)
            interval = naming_interval(self._naming_seconds, self._step_seconds(), kept_steps)
            if interval is None:  # the newest state has the fewest results after it
                await self._name_live()
                return
            if self._will_do(place, kept_steps):
                self._skip_until(began + HEARD_SECONDS)
                return
            named_by = self._naming_seconds + HEARD_SECONDS
            if place.epoch % interval and began < self._stepped_at[-1] + named_by:
                self._skip_until(self._stepped_at[-1] + named_by)
                return  # the next step is probably made before somebody has asked for this state
            self._results.follow(state_bytes)  # from before the copy is made
        try:
            state = await self._snapshots.make()
        except Busy:
            self._skip_until(trio.current_time() + HEARD_SECONDS)
            return
        self._naming_seconds = trio.current_time() - began
        if (state.epoch, state.history) == place:
            self._named = naming
        self._set_offer(state.run, StateOffer(state.epoch, state.history, state.digest))

    def _skip_until(self, moment: float) -> None:
        """Leave the present state without a name until then. If it is needed still, it is named."""
        self._naming, self._skipped_until = -1, moment

    def _will_do(self, place: Lineage, kept_steps: int) -> bool:
        """Whether peers download the state of `offer`, and half of the results that may be kept
        after it are still to come."""
        offer = self.offer
        if offer is None or 2 * (place.epoch - offer.epoch) > kept_steps:
            return False
        return self._snapshots.is_used(offer.digest) and self.leads_to(place)

    def _set_offer(self, run: str, offer: StateOffer) -> None:
        if offer != self.offer:
            self._run, self.offer = run, offer
            self._offered.set()
            self._offered = trio.Event()

    def _place(self) -> tuple[Lineage, int]:
        """Runs in a worker thread. Also returns the size of the state."""
        with self._lock.reading():
            live = self._look()
        return Lineage(live.epoch, live.history), size_of(live)

    def _measure(self, is_wanted: bool) -> tuple[str, StateOffer, TrainingState | None, bool]:
        """Runs in a worker thread. Also returns a copy if one is wanted and the state is small, and
        whether it is large."""
        with self._lock.reading():
            live = self._look()
            state = live.copy() if is_wanted and is_small(live) else None
            body = b"" if state is not None else encode(live.manifest())
        digest = name_of(body) if state is None else state.digest
        offer = StateOffer(live.epoch, live.history, digest)
        return live.run, offer, state, not is_small(live)

    async def _sweep(self) -> None:
        while True:
            await trio.sleep(SWEEP_SECONDS)
            self._snapshots.forget_unused()

    # Answering

    async def _answer_manifest(self, caller: Caller, request: ManifestRequest) -> ManifestAnswer:
        self._check_has(request.run, request.digest)
        step_seconds = self._step_seconds()
        held_seconds = max(STEPS_HELD * step_seconds, SHORTEST_HELD_SECONDS)
        wait = self._desk.ask(
            caller.peer,
            trio.current_time(),
            self._most_newcomers(step_seconds),
            held_seconds,
            self._taking_pieces if self._pace.is_busy else (),
        )
        if wait:
            return ManifestAnswer(b"", _version(), max(1, round(1000 * wait)))
        if self._results is not None:  # from before the copy is made
            self._results.follow()
        if request.place_only:
            return ManifestAnswer(b"", _version())
        async with self._snapshots.use(request.digest) as state:
            return ManifestAnswer(state.body, _version())

    async def _send_pieces(
        self, caller: Caller, transfer: PiecesTransfer, opening: PiecesOpening
    ) -> None:
        self._check_has(opening.run, opening.digest)
        self._check_has_place(caller.peer)
        async with self._snapshots.use(opening.digest) as state:
            if self._results is not None:
                self._results.follow(len(state.memory))
            self._begin(caller.peer, len(state.memory))
            self._taking_pieces[caller.peer] += 1
            try:
                await transfer.accept(Empty())
                turn = self._turn_of(caller.peer, transfer, _PIECES)
                await _Sending(transfer, state, self._pace, turn).run()
            finally:
                self._taking_pieces[caller.peer] -= 1
                self._taking_pieces += Counter()  # which forgets the zeros
                self._desk.end(caller.peer)

    async def _send_result(
        self, caller: Caller, transfer: ResultTransfer, opening: ResultOpening
    ) -> None:
        kept = self._results
        if kept is None or opening.run != self._run:
            raise StateGone("This peer keeps no results of that run.")
        kept.follow()
        found = await in_thread(self._following, kept, Lineage(opening.epoch, opening.history))
        if found is None:
            raise StateGone(
                f"The results of the steps after epoch {opening.epoch} are not kept here.",
                why="Nobody had asked for them when that step was made, or it is too long ago.",
                advice="Fetch a state instead.",
            )
        self._begin(caller.peer, found.bytes)
        try:
            await send_result(transfer, found, self._turn_of(caller.peer, transfer, _RESULTS))
        finally:
            self._desk.end(caller.peer)

    def _following(self, kept: ResultsKept, before: Lineage) -> Offered | None:
        """Runs in a worker thread. A step is announced when it begins, so its result may not be
        kept yet. It is, as soon as the state's lock can be held for reading again."""
        found = kept.following(before)
        if found is None:
            with self._lock.reading():
                pass
            found = kept.following(before)
        return found

    def _begin(self, peer: PeerId, count: int) -> None:
        """Begin a transfer. The peer's place is checked again: it may have been given up when
        another of its transfers ended, or because a copy took long."""
        self._check_has_place(peer)
        self._desk.begin(peer, trio.current_time(), count)

    def _check_has_place(self, peer: PeerId) -> None:
        wait = self._desk.ask(peer, trio.current_time())
        if wait:
            raise Busy(
                f"{self.settings.most_downloads} peers are downloading from here.",
                advice=f"Ask again in {wait:.0f} seconds.",
            )

    def _turn_of(self, peer: PeerId, transfer: Transfer[Any, Any, Any], kind: int) -> Turn:
        @asynccontextmanager
        async def turn(count: int) -> AsyncIterator[None]:
            place = self._desk.place_in_line(peer, trio.current_time())
            order = int(self._taking_pieces[peer] > 0), place, kind
            async with self._pace.turn(count, order, transfer.say_alive):
                self._desk.sends(peer, trio.current_time())
                seconds = PART_SECONDS + count / SLOWEST_BYTES_PER_SECOND
                with trio.move_on_after(seconds) as patience:
                    yield
            if patience.cancelled_caught:
                raise Busy(
                    f"{peer} took less than {count:,} bytes in {seconds:.0f} seconds.",
                    advice="Others are served meanwhile. Ask for a place again.",
                )
            self._desk.sent(peer, count, trio.current_time())

        return turn

    def _step_seconds(self) -> float:
        """How long the run's steps take; 0.0 while that is unknown."""
        if len(self._stepped_at) < 2:
            return 0.0
        since = max(trio.current_time(), self._stepped_at[-1]) - self._stepped_at[0]
        return since / len(self._stepped_at)

    def _most_newcomers(self, step_seconds: float) -> int | None:
        """How many newcomers can be served at once. Each needs all results beside its state. With
        less than NEEDED_SHARE times the rate of the results, it would never catch up."""
        rate = self._pace.bytes_per_second
        if self._results is None or rate is None or not step_seconds:
            return None
        needed = self._results.usual_bytes / step_seconds * NEEDED_SHARE
        return max(1, int(rate / needed))

    def _check_has(self, run: str, digest: bytes) -> None:
        offer = self.offer
        if offer is None:
            raise StateGone("This peer has no state to offer yet.")
        if run != self._run:
            raise StateGone("This peer takes part in another run.")
        self._snapshots.recent.wanted()
        self.needed()
        is_offered = digest == offer.digest and self._named == self._changes
        if not is_offered and not self._snapshots.has(digest):
            if self._results is not None:  # too late for this one, the peer takes a later one
                self._results.follow()
            raise StateGone(
                "This peer has another state now.",
                why="It has stepped since it named that one.",
                advice="Look at the progress of the peers again.",
            )


class _Sending:
    """Sends the pieces that one peer asks for, until it asks for no more."""

    def __init__(
        self,
        transfer: PiecesTransfer,
        state: TrainingState,
        pace: UploadPace,
        turn: Turn,
    ) -> None:
        self._transfer, self._state, self._pace, self._turn = transfer, state, pace, turn

    async def run(self) -> None:
        wanted, asked = trio.open_memory_channel[int](MOST_WANTED)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._receive_wishes, wanted)
            await self._send_pieces(asked)
        await self._transfer.finish(Empty())

    async def _receive_wishes(self, wanted: trio.MemorySendChannel[int]) -> None:
        buffer = bytearray(4 * MOST_WANTED_AT_ONCE)
        async with wanted:
            while True:
                size = await self._transfer.receive_chunk_into(buffer)
                if size is None:
                    return
                for number in read_wanted(buffer[:size], self._state.manifest.piece_count):
                    try:
                        wanted.send_nowait(number)
                    except trio.WouldBlock:
                        raise MalformedMessage(
                            f"More than {MOST_WANTED} pieces were asked for ahead."
                        ) from None

    async def _send_pieces(self, asked: trio.MemoryReceiveChannel[int]) -> None:
        while (number := await self._next_wish(asked)) is not None:
            piece = self._state.piece(number)
            while len(piece):
                part = piece[: self._pace.turn_bytes]
                piece = piece[len(part) :]
                async with self._turn(len(part)):
                    await self._transfer.send_chunk(part)

    async def _next_wish(self, asked: trio.MemoryReceiveChannel[int]) -> int | None:
        """The next piece to send; None: the peer asks for no more."""
        with trio.move_on_after(IDLE_SECONDS):
            try:
                return await asked.receive()
            except trio.EndOfChannel:
                return None
        raise Busy(
            f"No piece was asked for in {IDLE_SECONDS:g} seconds: the place is given to others.",
            advice="Ask for a place again.",
        )


def _version() -> str:
    return torch.__version__[:LONGEST_TORCH_VERSION]
