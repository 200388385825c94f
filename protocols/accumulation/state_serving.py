"""Naming the state of each epoch, and serving it to newcomers and those who fell behind.

    server = StateServer(rpc, look, lock)
    nursery.start_soon(server.run)
    server.advanced()                       # after each step; the digest is computed in a thread
    server.offer                            # what goes into this peer's progress slot

Promises: the training thread waits for a reader of its parameters only if it steps while a copy is
being made (some 60 ms for 100 MB), which happens once for each epoch that somebody downloads.
What is sent is limited in rate by what it is measured to cost the training, a twentieth at most
(state_pace.py), and the newcomer that came first is served first (state_desk.py).

Easy to get wrong: `look` and everything it reads run in a worker thread. It must not wait for the
trio side, nor take the lock.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import trio

from protocols.accumulation.forks import Lineage
from protocols.accumulation.result_sending import ResultTransfer, send_result
from protocols.accumulation.results_kept import ResultsKept
from protocols.accumulation.state_desk import DownloadDesk
from protocols.accumulation.state_lock import StateLock
from protocols.accumulation.state_manifest import encode, name_of
from protocols.accumulation.state_messages import (
    LONGEST_TORCH_VERSION,
    MANIFEST,
    MOST_WANTED,
    MOST_WANTED_AT_ONCE,
    PIECES,
    RESULT,
    ManifestAnswer,
    ManifestRequest,
    PiecesOpening,
    ResultOpening,
    StateGone,
    read_wanted,
)
from protocols.accumulation.state_pace import ServingCost, UploadPace
from protocols.accumulation.state_recent import is_small
from protocols.accumulation.state_snapshots import Snapshots
from protocols.accumulation.training_state import LiveState, TrainingState
from protocols.blocking import in_thread
from protocols.bulk import Transfer
from protocols.errors import Busy, MalformedMessage
from protocols.guard import Caller
from protocols.identity import PeerId
from protocols.messages import Empty
from protocols.rpc import Rpc

if TYPE_CHECKING:
    from trio_typing import TaskStatus

log = logging.getLogger("potluck.state")

SWEEP_SECONDS = 5.0
STEPS_MEASURED = 8
NEEDED_SHARE = 2.0
"""What a newcomer is given by the results that it needs: the other half is for its state, which so
takes twice the time that it would take alone."""
STEPS_HELD = 3.0  # without a question a newcomer is in, or gone
SHORTEST_HELD_SECONDS = 0.5

PiecesTransfer = Transfer[Empty, Empty, Empty]
Turn = Callable[[int], Awaitable[None]]
"""Waits until a peer may be sent so many bytes."""

_RESULTS, _PIECES = 0, 1  # the order in which one peer's transfers have their turns


@dataclass(frozen=True)
class StateOffer:
    """What this peer can say of its state in its progress slot."""

    epoch: int
    history: bytes
    digest: bytes


@dataclass(frozen=True)
class StateServingSettings:
    """How much serving may cost.

    - `most_downloads`: peers that download at the same time; the others are told when to ask.
    - `upload_bytes_per_second`: of all downloads together, as the owner allows; None: no limit.
    """

    most_downloads: int = 8
    upload_bytes_per_second: float | None = None


class StateServer:
    """The state of this peer, for one run. One for each rpc."""

    def __init__(
        self,
        rpc: Rpc,
        look: Callable[[], LiveState],
        lock: StateLock,
        settings: StateServingSettings | None = None,
        results: ResultsKept | None = None,
        cost: ServingCost | None = None,
    ) -> None:
        """Serves `/potluck/state/1.0.0` from now on, and has something when `run` has begun.

        `look` is called in a worker thread, with the lock held for reading. `results`: what the
        last steps were made of; None has nothing of that to offer. `cost`: what serving costs the
        training of this peer; None where nothing trains.
        """
        self.settings = settings or StateServingSettings()
        self.offer: StateOffer | None = None
        """Of the newest epoch whose digest is known. To be read from any thread."""
        self._look, self._lock, self._results = look, lock, results
        self._snapshots = Snapshots(look, lock)
        self._desk = DownloadDesk(self.settings.most_downloads)
        self._pace = UploadPace(self.settings.upload_bytes_per_second, cost)
        self._advanced, self._offered = trio.Event(), trio.Event()
        self._run: str | None = None
        self._taking_pieces: Counter[PeerId] = Counter()
        self._stepped_at: deque[float] = deque(maxlen=STEPS_MEASURED)
        rpc.serve(MANIFEST, self._answer_manifest)
        rpc.serve_bulk(PIECES, self._send_pieces)
        rpc.serve_bulk(RESULT, self._send_result)

    @property
    def downloads(self) -> int:
        """How many peers are downloading."""
        return self._desk.downloading

    @property
    def copies(self) -> int:
        """How many copies of a state are held for them."""
        return len(self._snapshots)

    def served_states(self) -> list[TrainingState]:
        """The copies themselves."""
        return self._snapshots.states()

    def advanced(self) -> None:
        """The state has changed: name it anew. (On the trio side, as everything here.)"""
        self._advanced.set()
        self._stepped_at.append(trio.current_time())
        if self._results is not None and self._desk.downloading:
            self._results.follow()  # a download may take longer than anybody asks for results

    async def offered(self, after: StateOffer | None = None) -> StateOffer:
        """Wait for an offer other than `after`."""
        while self.offer is None or self.offer == after:
            await self._offered.wait()
        return self.offer

    async def run(self, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Name every state from the present one on, and serve, until cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._sweep)
                self._advanced.set()
                task_status.started()
                while True:
                    await self._advanced.wait()
                    self._advanced = trio.Event()
                    await self._name_state()
        finally:
            self.offer = self._run = None

    async def _name_state(self) -> None:
        recent = self._snapshots.recent
        run, offer, state = await in_thread(self._measure, recent.is_wanted)
        if state is not None:
            recent.keep(state)
        if offer != self.offer:
            self._run, self.offer = run, offer
            self._offered.set()
            self._offered = trio.Event()

    def _measure(self, is_wanted: bool) -> tuple[str, StateOffer, TrainingState | None]:
        """In a worker thread. With a copy if that is wanted, and small."""
        with self._lock.reading():
            live = self._look()
            state = live.copy() if is_wanted and is_small(live) else None
            body = b"" if state is not None else encode(live.manifest())
        digest = name_of(body) if state is None else state.digest
        return live.run, StateOffer(live.epoch, live.history, digest), state

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
            caller.peer, trio.current_time(), self._most_newcomers(step_seconds), held_seconds
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
        self._check_has_place(caller.peer)
        found = await in_thread(kept.following, Lineage(opening.epoch, opening.history))
        if found is None:
            raise StateGone(
                f"What was made of the state of epoch {opening.epoch} is not kept here.",
                why="Nobody had asked for it when that step was made, or it is too long ago.",
                advice="Fetch a state instead.",
            )
        self._begin(caller.peer, found.bytes)
        try:
            await send_result(transfer, found, self._turn_of(caller.peer, transfer, _RESULTS))
        finally:
            self._desk.end(caller.peer)

    def _begin(self, peer: PeerId, count: int) -> None:
        """The place that it had may have been given up meanwhile: with another transfer of the same
        peer, or because a copy took long."""
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
        async def turn(count: int) -> None:
            place = self._desk.place_in_line(peer, trio.current_time())
            order = int(self._taking_pieces[peer] > 0), place, kind
            await self._pace.turn(count, order, transfer.say_alive)
            self._desk.sent(peer, count, trio.current_time())

        return turn

    def _step_seconds(self) -> float:
        """Of the run; 0.0 while it is not known."""
        if len(self._stepped_at) < 2:
            return 0.0
        since = max(trio.current_time(), self._stepped_at[-1]) - self._stepped_at[0]
        return since / len(self._stepped_at)

    def _most_newcomers(self, step_seconds: float) -> int | None:
        """How many get in at once with what may be sent: each needs all results beside its state.
        With less than NEEDED_SHARE of its rate for these it would take for ever."""
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
        if digest != offer.digest and not self._snapshots.has(digest):
            if self._results is not None:  # whoever is too late for this one takes a later one
                self._results.follow()
            raise StateGone(
                f"This peer is at epoch {offer.epoch} now, which is another state.",
                why="It has stepped since it named that state.",
                advice="Look at the progress of the peers again.",
            )


class _Sending:
    """One peer's transfer, from accepting to the end."""

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
        async for number in asked:
            piece = self._state.piece(number)
            while len(piece):
                part = piece[: self._pace.turn_bytes]
                piece = piece[len(part) :]
                await self._turn(len(part))
                await self._transfer.send_chunk(part)


def _version() -> str:
    return torch.__version__[:LONGEST_TORCH_VERSION]
