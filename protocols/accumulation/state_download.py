"""Downloading the pieces of one state from all who have it, each verified before it is kept.

    is_whole = await Download(account, choice, manifest, kept, look_again, progress).run()

Sources are asked in the newcomer's own order, some at the same time, each for as many pieces as it
delivers (state_board.py). One that sends wrong bytes is named and dropped. One that makes no
progress is given up, and gets another chance only when nobody else is left. There is no limit to
the total time: a slow link takes as long as it takes.

Easy to get wrong: a piece is received into memory of its source and copied when it is verified.
Two sources may bring the same piece, and the second must not write over the first.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

import trio
from blake3 import blake3

from protocols.accumulation.keeping_up import FetchFailed
from protocols.accumulation.state_account import Account, Lied, next_chunk_bytes
from protocols.accumulation.state_board import PieceBoard
from protocols.accumulation.state_kept import KeptPieces
from protocols.accumulation.state_manifest import DIGEST_BYTES, Manifest
from protocols.accumulation.state_messages import (
    MOST_WANTED_AT_ONCE,
    PIECES,
    ManifestRequest,
    PiecesOpening,
    StateGone,
    wanted_chunk,
)
from protocols.accumulation.state_sources import Choice
from protocols.bulk import Transfer
from protocols.errors import PotluckError
from protocols.identity import PeerId
from protocols.messages import Empty

LOOK_SECONDS = 1.0  # how often the sources are looked at again
OPEN_SECONDS = 20.0
RETRY_SECONDS = 5.0  # before one that failed is asked again, when nobody else is left
WATCH_SECONDS = 10.0  # over which sources are compared when others wait to be asked
SLOW_SHARE = 0.1  # of the fastest: one that is slower makes room for one not yet asked

OLD_SECONDS = 120.0
"""Without a whole piece, and the choice is made anew if the others have another state by now. Until
then even 70 kb/s bring one; a source that trickles bytes would else hold its newcomer for ever."""

PiecesTransfer = Transfer[Empty, Empty, Empty]


class Download:
    """The pieces of one state. Use it once."""

    def __init__(
        self,
        account: Account,
        choice: Choice,
        manifest: Manifest,
        kept: KeptPieces,
        look_again: Callable[[], Choice | None],
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """`kept` has begun with this manifest. `look_again` chooses anew among those who are there
        by then."""
        self._account, self._choice, self._manifest, self._kept = account, choice, manifest, kept
        self._look_again, self._progress = look_again, progress
        self._most = account.settings.most_sources
        self._board = PieceBoard(manifest.piece_count, kept.here)
        self._bytes_here, self._bytes_of_all = kept.bytes_here, manifest.stream_bytes
        self._known = {one.peer: one for one in choice.sources}
        self._active: dict[PeerId, trio.CancelScope] = {}
        self._failed_at: dict[PeerId, float] = {}
        self._busy_until: dict[PeerId, float] = {}
        self._gone: set[PeerId] = set()
        self._changed = trio.Event()
        self._watched_from = self._piece_at = trio.current_time()
        self._watched = Counter(account.bytes_from)

    async def run(self) -> bool:
        """Whether all pieces are here; otherwise others have another state by now.

        FetchFailed when nothing has come from anybody for long.
        """
        failure: FetchFailed | None = None
        async with trio.open_nursery() as nursery:
            while not self._board.is_complete:
                choice = self._look_again()
                self._learn(choice)
                self._make_room_for_others()
                for peer in self._to_ask():
                    self._active[peer] = trio.CancelScope()
                    nursery.start_soon(self._fetch_from, peer)
                failure = self._account.failure()
                is_old = choice is not None and choice.digest != self._choice.digest
                waited = trio.current_time() - self._piece_at
                if failure is not None or (is_old and (not self._active or waited > OLD_SECONDS)):
                    break
                await self._until_changed()
                await self._kept.write_down()
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure
        return self._board.is_complete

    def _learn(self, choice: Choice | None) -> None:
        """Who else has this state by now."""
        if choice is not None and choice.digest == self._choice.digest:
            self._known.update({one.peer: one for one in choice.sources})

    def _make_room_for_others(self) -> None:
        """Of sources that are all asked for a while, drop the slowest if others wait."""
        now = trio.current_time()
        if now - self._watched_from < WATCH_SECONDS:
            return
        came = Counter(self._account.bytes_from)
        brought = {peer: came[peer] - self._watched[peer] for peer in self._active}
        self._watched_from, self._watched = now, came
        if len(self._active) < self._most or not self._not_yet_asked():
            return
        slowest = min(brought, key=lambda peer: brought[peer])
        if brought[slowest] < SLOW_SHARE * max(brought.values()):
            self._account.gives_up(slowest, "It is slow, and others had not been asked yet.")
            self._active[slowest].cancel()

    def _not_yet_asked(self) -> list[PeerId]:
        now = trio.current_time()
        tried = {*self._active, *self._failed_at, *self._gone, *self._account.liars}
        tried |= {peer for peer, until in self._busy_until.items() if until > now}
        return [peer for peer in self._known if peer not in tried]

    def _to_ask(self) -> list[PeerId]:
        """Whom to begin with now: those not asked yet; who failed only if nobody else is left."""
        room = self._most - len(self._active)
        fresh = self._not_yet_asked()[:room]
        if fresh or self._active:
            return fresh
        now = trio.current_time()
        failed = sorted(self._failed_at, key=lambda peer: self._failed_at[peer])
        never = self._gone | self._account.liars.keys()
        rested = [peer for peer in failed if now - self._failed_at[peer] >= RETRY_SECONDS]
        return [peer for peer in rested if peer not in never][:room]

    async def _fetch_from(self, peer: PeerId) -> None:
        """Pieces from one source, for as long as it has any that are wanted."""
        self._failed_at.pop(peer, None)
        try:
            with self._active[peer]:
                if await self._has_place(peer):
                    await self._receive_pieces(peer)
                    return
        except Lied as error:
            self._account.lied(peer, error)
        except StateGone as error:
            self._gone.add(peer)
            self._account.gives_up(peer, error.what)
        except PotluckError as error:
            self._failed_at[peer] = trio.current_time()
            self._account.gives_up(peer, error.what)
        finally:
            if self._active[peer].cancelled_caught:
                self._failed_at[peer] = trio.current_time()
            self._board.lost(peer)
            del self._active[peer]
            self._tell_changed()

    async def _has_place(self, peer: PeerId) -> bool:
        """Whether this source has room for us; if not, it is asked again when it said."""
        request = ManifestRequest(self._manifest.run, self._choice.digest, place_only=True)
        answer = await self._account.ask(peer, request)
        if answer.wait_ms:
            seconds = answer.wait_ms / 1000
            self._busy_until[peer] = trio.current_time() + seconds
            self._account.gives_up(peer, f"It is busy with other downloads for {seconds:.0f} s.")
        return not answer.wait_ms

    async def _receive_pieces(self, peer: PeerId) -> None:
        opening = PiecesOpening(self._manifest.run, self._choice.digest)
        transfer: PiecesTransfer
        async with self._account.rpc.open_bulk(
            peer, PIECES, opening, timeout=OPEN_SECONDS
        ) as transfer:
            self._account.given_up.pop(peer, None)
            owed: deque[int] = deque()
            memory = memoryview(bytearray(self._manifest.piece_bytes))
            while not self._board.is_complete:
                wanted = self._wanted_of(peer)
                if wanted:
                    await transfer.send_chunk(wanted_chunk(wanted))
                    owed.extend(wanted)
                if owed:
                    await self._receive_piece(peer, transfer, owed.popleft(), memory)
                else:
                    await self._until_changed()
                    await transfer.say_alive()
            await transfer.finish(Empty())

    def _wanted_of(self, peer: PeerId) -> list[int]:
        wanted: list[int] = []
        while len(wanted) < MOST_WANTED_AT_ONCE:
            number = self._board.take(peer, trio.current_time())
            if number is None:
                break
            wanted.append(number)
        return wanted

    async def _receive_piece(
        self, peer: PeerId, transfer: PiecesTransfer, number: int, memory: memoryview
    ) -> None:
        span = self._kept.span(number)
        piece = memory[: span.stop - span.start]
        await self._receive_into(piece, peer, transfer, number)
        if blake3(piece).digest(DIGEST_BYTES) != self._manifest.piece_digest(number):
            raise Lied(f"Piece {number:,} of the state came with other bytes than it has.")
        if self._board.arrived(peer, trio.current_time()):
            self._kept.put(number, piece)
            self._board.keep(number)
            self._piece_at = trio.current_time()
            self._bytes_here += len(piece)
            if self._progress is not None:
                self._progress(self._bytes_here, self._bytes_of_all)
            self._tell_changed()

    async def _receive_into(
        self, piece: memoryview, peer: PeerId, transfer: PiecesTransfer, number: int
    ) -> None:
        """The bytes of one piece, in as many chunks as the source likes."""
        rest = piece
        while len(rest):
            size = await next_chunk_bytes(transfer, self._account.settings.patience_seconds)
            if size is None or size > len(rest):
                raise Lied(f"It sent another number of bytes for piece {number:,} than it has.")
            await transfer.receive_chunk_into(rest)
            rest = rest[size:]
            self._account.came(peer, size)

    def _tell_changed(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def _until_changed(self) -> None:
        with trio.move_on_after(LOOK_SECONDS):
            await self._changed.wait()
