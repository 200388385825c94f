"""Downloads the pieces of one state from all peers that have it, and verifies each piece.

    is_whole = await Download(account, choice, manifest, kept, look_again, progress).run()

Each newcomer asks its sources in an order of its own, several at the same time. Each source is
asked for as many pieces as it delivers. A source that sends wrong bytes is named and dropped. A
source that makes no progress is given up, and gets another chance only when no other is left. The
total time has no limit, because a slow link needs as long as it needs.

Easy to get wrong: each source has a buffer of its own, and a piece is copied from there once it is
verified. Two sources may bring the same piece, and the second must not write over the first.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import trio
from blake3 import blake3

from protocols.accumulation.keeping_up import FetchFailed, KeepingUp
from protocols.accumulation.lineage import Lineage
from protocols.accumulation.state_manifest import DIGEST_BYTES, Manifest, piece_span
from protocols.accumulation.state_messages import (
    MANIFEST,
    MOST_WANTED_AT_ONCE,
    PIECES,
    STALL_SECONDS,
    STATE_PROTOCOL,
    ManifestAnswer,
    ManifestRequest,
    PiecesOpening,
    PiecesTransfer,
    StateGone,
    wanted_chunk,
)
from protocols.accumulation.state_pace import LONGEST_WAIT_SECONDS, SHORTEST_WAIT_SECONDS
from protocols.accumulation.training_state import TrainingState
from protocols.blocking import in_thread
from protocols.errors import DeadlineExceeded, MalformedMessage, PotluckError, ProtocolMisuse
from protocols.identity import PeerId
from protocols.rpc import Empty, Rpc, Transfer
from protocols.tensors import raw_bytes, unset_bytes

# ---- which state to fetch
#
# Chooses the digest to fetch, and the order in which to ask the peers that have it. Pure.
#
#     choice = choose(sources, me, at_least_epoch=7)
#     is_needed(others, mine, seconds)            # whether a peer may have to fetch this state
#
# The up-to-date peers are the largest set that claims the same epoch and history. The chosen digest
# is the one that most of them name. Newcomers that have taken a state and made no step with it do
# not count if there are others: many of them would be the largest set, a step or more behind the
# run. They are asked for a state only if they name it. If unlike hardware makes the digests differ,
# there is no majority, and one digest is chosen and fetched from the peers that name it.
#
# A state that takes longer to name than a step is named by peers that are further by then: they
# keep a copy, and the results that lead on from it. So peers of other epochs may have it, too.
#
# While the up-to-date peers name no digest, one of an earlier epoch will do, because results have
# to lead from there to where they are. Any other may be invented.
#
# Each newcomer has an order of its own (a hash of both peers), so many newcomers spread over all
# donors.
#
# Easy to get wrong: a slot is only a claim. A single peer that claims a later epoch does not
# outweigh the others, and everything that is fetched is checked against the digest afterwards.

STEP_SAID_SECONDS = 4.0
"""After this time, the slots of all peers that made a step have arrived: slots are read at least
every three seconds, and travel for less than one."""


@dataclass(frozen=True)
class StateSource:
    """A peer that serves state, as its progress slot says."""

    peer: PeerId
    epoch: int
    history: bytes
    digest: bytes = b""  # not computed yet
    signature: bytes = b""
    torch: str = ""
    follows: bool = False
    """The peer has taken this state from others, and has made no step with it."""
    is_earlier: bool = False
    """The digest is of an earlier state, from which results lead to this epoch and history."""


@dataclass(frozen=True)
class Choice:
    """A state, and the peers that may have it, in the order in which this newcomer asks them.
    `digest` is empty if no peer names one."""

    epoch: int
    history: bytes
    digest: bytes
    sources: tuple[StateSource, ...]
    is_earlier: bool = False
    """The state is of an earlier epoch, whose history its manifest says. Results must lead from
    there to this epoch and history."""


def choose(
    sources: Iterable[StateSource],
    me: PeerId,
    *,
    at_least_epoch: int = 0,
    history: bytes | None = None,
    without: Container[PeerId] = (),
    named: bool = True,
) -> Choice | None:
    """The state to fetch; None if no peer names one. `history`: choose only states with this
    history. Without `named`, return where the run is, for a peer that needs only results: if a
    state is large and steps are short, the state is outdated before it has a digest."""
    groups: dict[tuple[int, bytes], list[StateSource]] = defaultdict(list)
    for one in sources:
        fits = one.epoch >= at_least_epoch and history in (None, one.history)
        if fits and one.peer != me and one.peer not in without:
            groups[one.epoch, one.history].append(one)
    before = math.inf
    for group in sorted(groups.values(), key=_support, reverse=True):
        if group[0].epoch >= before:
            continue
        ordered = sorted(group, key=lambda one: (one.follows, rank(one.peer, me)))
        by_digest: dict[bytes, list[StateSource]] = defaultdict(list)
        for one in ordered:
            if one.digest:
                by_digest[one.digest].append(one)
        if not by_digest and named:
            before = group[0].epoch
            continue
        if not by_digest:
            return Choice(group[0].epoch, group[0].history, b"", tuple(ordered))
        voices = {name: _voices(named) for name, named in by_digest.items()}
        best = max(voices, key=lambda name: voices[name])  # the first of equals in the order
        chosen = by_digest[best]
        silent = [one for one in ordered if not one.digest and not one.follows]
        elsewhere = [
            one
            for other in groups.values()
            if other is not group
            for one in other
            if one.digest == best and not one.follows
            if one.is_earlier or chosen[0].is_earlier
        ]
        elsewhere.sort(key=lambda one: rank(one.peer, me))
        return Choice(
            epoch=group[0].epoch,
            history=group[0].history,
            digest=best,
            sources=(*chosen, *elsewhere, *silent),
            is_earlier=chosen[0].is_earlier,
        )
    return None


def is_needed(others: Iterable[Lineage], mine: Lineage, seconds: float) -> bool:
    """Whether one of the others may want this peer's state, which is `seconds` old: it is behind,
    or on another side of a fork. A peer that has made the last step says so a moment later; so do
    those that have made the first one, and are like newcomers until then."""
    for one in others:
        is_late = one.epoch == mine.epoch - 1 and seconds < STEP_SAID_SECONDS
        if one.epoch <= mine.epoch and one != mine and not is_late:
            return True
    return False


def rank(peer: PeerId, me: PeerId) -> bytes:
    """The donor's place in the newcomer's order: the lowest is asked first."""
    return blake3(f"{me} {peer}".encode()).digest()


def _voices(sources: list[StateSource]) -> tuple[int, int]:
    """How many of them have made steps of the run, and how many there are."""
    return sum(not one.follows for one in sources), len(sources)


def _support(group: list[StateSource]) -> tuple[int, int, int, bytes]:
    return *_voices(group), group[0].epoch, group[0].history


# ---- how fast each source is
#
# Remembers how fast each peer sent its last result. Pure.
#
#   paces = Paces()
#   for source in paces.ordered(sources): ...      # unknown sources first, then the fastest
#   paces.sent(peer, count, seconds); paces.failed(peer); paces.lacked(peer)
#
# A peer that follows a run by its results needs each result in less than the time of a step. One
# slow uplink, or one owner's cap, is enough to make it late every time. So the paces are kept from
# one fetch to the next, because a peer that catches up makes several.
#
# Easy to get wrong: sources that are not known yet are asked first, once. Otherwise a fast one
# would never be found.

SUPPOSED_SECONDS = (
    1e-6  # for a byte, if a source failed and never sent anything: a megabyte a second
)
MOST_KNOWN = 64  # peers; a newcomer asks eight for a result at the most


class Paces:
    """Invariant: at most MOST_KNOWN peers; the one asked longest ago is forgotten first."""

    def __init__(self) -> None:
        self._seconds: dict[PeerId, float] = {}  # seconds for each byte

    def ordered(self, sources: Iterable[StateSource]) -> list[StateSource]:
        """The sources in the order to ask them; equals stay in the given order."""
        return sorted(sources, key=lambda one: self._seconds.get(one.peer, 0.0))

    def sent(self, peer: PeerId, count: int, seconds: float) -> None:
        """The peer sent this many bytes in this time, which includes the request."""
        self._know(peer, seconds / max(count, 1))

    def failed(self, peer: PeerId) -> None:
        """The peer sent nothing. From now on it counts as half as fast as before: it may have been
        busy only once, while the others may always be slow."""
        self._know(peer, 2.0 * self._seconds.get(peer, SUPPOSED_SECONDS))

    def lacked(self, peer: PeerId) -> None:
        """The peer did not have what it was asked for. An unknown one is asked after other unknown
        ones, or a few without anything would be asked first each time."""
        if peer not in self._seconds:
            self._know(peer, SUPPOSED_SECONDS)

    def _know(self, peer: PeerId, seconds: float) -> None:
        self._seconds.pop(peer, None)
        self._seconds[peer] = seconds
        if len(self._seconds) > MOST_KNOWN:
            del self._seconds[next(iter(self._seconds))]


# ---- what one fetch knows about its sources
#
# Records what each source of a state has sent during one fetch, and which sources lied.
#
# One account is kept over all attempts of one fetch. So a liar stays one, and patience ends when no
# source has sent anything for too long, however many attempts were made.
#
# Easy to get wrong: an error that a peer *reports* proves nothing against any peer. Only a source
# that sent bytes with another digest than the requested one is a liar.

log = logging.getLogger("potluck.state")

ALIVE_SECONDS = STALL_SECONDS / 4  # Transfer.say_alive finds it due no sooner
ASK_SECONDS = 20.0  # for a manifest or a place: dialling, and copying some gigabytes


class Lied(MalformedMessage):
    """A source sent bytes that do not have the requested digest."""


@dataclass(frozen=True)
class FetchSettings:
    """- `most_sources`: how many sources are asked at the same time.
    - `patience_seconds`: a source that sends no byte of a piece for this long is given up.
    - `give_up_seconds`: if no source sends a byte for this long, the fetch is given up.
    - `most_result_bytes`: the most bytes of results to hold, if it is more than one result.
    """

    most_sources: int = 6
    patience_seconds: float = 15.0
    give_up_seconds: float = 60.0
    most_result_bytes: float = math.inf


def waiting_seconds(answer: ManifestAnswer) -> float:
    """For how long a busy peer wants to be left alone, within what an honest one says."""
    return min(max(answer.wait_ms / 1000, SHORTEST_WAIT_SECONDS), LONGEST_WAIT_SECONDS)


class FetchAccount:
    """The account of one fetch. `given_up` and `liars` give the reasons, in words."""

    def __init__(
        self,
        rpc: Rpc,
        settings: FetchSettings,
        paces: Paces | None = None,
        keeping_up: KeepingUp | None = None,
    ) -> None:
        self.rpc, self.settings, self.paces = rpc, settings, paces or Paces()
        self.keeping_up = keeping_up or KeepingUp()
        self.bytes_from: Counter[PeerId] = Counter()
        self.given_up: dict[PeerId, str] = {}
        self.liars: dict[PeerId, str] = {}
        self._progress_at = trio.current_time()

    def was_busy(self, seconds: float) -> None:
        """For so long nobody was asked: this peer read what it had kept. It is nobody's silence."""
        self._progress_at += seconds

    def came(self, peer: PeerId, count: int) -> None:
        """This many bytes of a piece have arrived."""
        self.bytes_from[peer] += count
        self.keeping_up.came(count)
        self._progress_at = trio.current_time()

    @contextmanager
    def wanting(self) -> Iterator[None]:
        """Within the block, only the links and the donors limit how much arrives."""
        self.keeping_up.wants(trio.current_time())
        try:
            yield
        finally:
            self.keeping_up.has(trio.current_time())

    def gives_up(self, peer: PeerId, why: str) -> None:
        self.given_up[peer] = why
        log.info("%s is given up as a source of the state: %s", peer, why)

    def lied(self, peer: PeerId, error: Lied) -> None:
        """Name a liar, and avoid it for a while."""
        self.liars[peer] = error.what
        self.given_up.pop(peer, None)
        log.warning("%s sent bytes that are not the state: %s", peer, error.what)
        self.rpc.blame(peer, STATE_PROTOCOL, error)

    def failure(self) -> FetchFailed | None:
        """The error with which to give up, if no source has sent anything for `give_up_seconds`."""
        if trio.current_time() - self._progress_at < self.settings.give_up_seconds:
            return None
        told = [f"{peer}: {why}" for peer, why in {**self.given_up, **self.liars}.items()]
        return FetchFailed(
            f"No state came for {self.settings.give_up_seconds:g} seconds.",
            why="; ".join(told) or "No peer offers one.",
            advice="Check with `potluck status` whether this node reaches peers of the run.",
        )

    def direct_first(self, sources: Iterable[StateSource]) -> list[StateSource]:
        """These sources, those that are reached through a relay last: connecting through it takes
        time, and many share it."""
        return sorted(sources, key=lambda one: self.rpc.needs_relay(one.peer))

    async def ask(self, peer: PeerId, request: ManifestRequest) -> ManifestAnswer:
        """Ask for a manifest, or for a place. The answer may be how long the peer is busy."""
        return await self.rpc.call(peer, MANIFEST, request, timeout=ASK_SECONDS)


async def next_chunk_bytes(
    transfer: Transfer[Any, Any, Any], patience_seconds: float
) -> int | None:
    """Wait for a chunk, and tell the source meanwhile that we are alive. Returns the chunk's size,
    or None at the end.
    DeadlineExceeded if none has come for `patience_seconds`."""
    deadline = trio.current_time() + patience_seconds
    while trio.current_time() < deadline:
        with trio.move_on_after(ALIVE_SECONDS) as waiting:
            size = await transfer.next_chunk_bytes()
        if not waiting.cancelled_caught:
            return size
        await transfer.say_alive()
    raise DeadlineExceeded(f"Nothing came for {patience_seconds:g} seconds.")


# ---- which pieces to ask each source for
#
# Records which pieces are here and which are asked for, and chooses a source's next one. Pure.
#
#   board = PieceBoard(count, done)
#   board.take(peer, now)          # the number of the next piece to ask this peer for, or None
#   board.arrived(peer, now)       # the piece it has owed longest has come: is it still wanted?
#   board.lost(peer)               # the pieces it was asked for are free again
#
# Each source is asked for as many pieces ahead as it delivers in a second. When all pieces are
# asked for, a source that is free takes over the ones that would come last, if it is likely to be
# faster. So the end of a download does not wait for its slowest source. The first copy counts.
#
# Easy to get wrong: a source answers in the order in which it was asked, so the pieces that it owes
# are a queue.

AHEAD_SECONDS = 1.0  # more than a round trip of a bad link (600 ms), so that it never runs dry
FEWEST_AHEAD = 2
MOST_AHEAD = 16
UNKNOWN_SECONDS = 1.0  # a source that has not delivered anything yet is left alone for this long
SMOOTHING = 0.3  # the weight of the newest piece in a source's pace


class _Source:
    def __init__(self, now: float) -> None:
        self.owes: deque[int] = deque()
        self.pace: float | None = None  # seconds for a piece
        self.since = now  # the last arrival, or the first request after it owed nothing


class PieceBoard:
    """Invariant: a piece is here, or in `_free` and in no queue, or in one or more queues."""

    def __init__(self, count: int, here: Iterable[int] = ()) -> None:
        self.count = count
        self.here = set(here)
        self._free = deque(number for number in range(count) if number not in self.here)
        self._sources: dict[PeerId, _Source] = {}

    @property
    def is_complete(self) -> bool:
        return len(self.here) == self.count

    def take(self, peer: PeerId, now: float) -> int | None:
        """The next piece to ask this peer for; None if it owes enough, or if nothing is left."""
        source = self._sources.setdefault(peer, _Source(now))
        if len(source.owes) >= self._ahead(source):
            return None
        number = self._next_free()
        if number is None:
            number = self._worth_taking_over(source, now)
        if number is None:
            return None
        if not source.owes:
            source.since = now
        source.owes.append(number)
        return number

    def arrived(self, peer: PeerId, now: float) -> bool:
        """The piece that this peer has owed longest has come, and is verified. Returns whether it
        is still wanted."""
        source = self._sources[peer]
        number = source.owes.popleft()
        seconds = now - source.since
        source.since = now
        known = source.pace
        source.pace = seconds if known is None else known + SMOOTHING * (seconds - known)
        return number not in self.here

    def keep(self, number: int) -> None:
        """This piece is here, verified."""
        self.here.add(number)

    def lost(self, peer: PeerId) -> None:
        """Nothing more comes from this peer."""
        source = self._sources.pop(peer, None)
        if source is not None:
            self._put_back(source.owes)

    def _put_back(self, numbers: Iterable[int]) -> None:
        owed = {number for one in self._sources.values() for number in one.owes}
        free = set(self._free)
        self._free.extendleft(
            number
            for number in numbers
            if number not in self.here and number not in owed and number not in free
        )

    def _next_free(self) -> int | None:
        while self._free:
            number = self._free.popleft()
            if number not in self.here:
                return number
        return None

    def _ahead(self, source: _Source) -> int:
        if source.pace is None:
            return FEWEST_AHEAD
        wished = math.ceil(AHEAD_SECONDS / max(source.pace, 1e-3))
        return min(max(wished, FEWEST_AHEAD), MOST_AHEAD)

    def _worth_taking_over(self, thief: _Source, now: float) -> int | None:
        """The piece that would come last of those that others owe, if `thief` would be sooner."""
        first: dict[int, float] = {}  # when the first of the sources that owe it would bring it
        for source in self._sources.values():
            for place, number in enumerate(source.owes):
                if number not in self.here:
                    expected = _expected(source, place, now)
                    first[number] = min(first.get(number, math.inf), expected)
        for number in thief.owes:
            first.pop(number, None)
        if not first:
            return None
        number = max(first, key=lambda one: first[one])
        return number if _expected(thief, len(thief.owes), now) < first[number] else None


def _expected(source: _Source, place: int, now: float) -> float:
    """When the piece at this place of the source's queue is expected."""
    if not source.owes and source.pace is None:
        return now + UNKNOWN_SECONDS
    began = source.since if source.owes else now
    pace = UNKNOWN_SECONDS if source.pace is None else source.pace
    if began + pace >= now:
        return began + (place + 1) * pace
    overdue = now - began  # its next piece is late, and may need at least this long again
    return now + overdue + place * max(pace, overdue)


# ---- pieces kept between two fetches
#
# Keeps the pieces of a state that are here already, in memory and optionally in a file.
#
#     kept = KeptPieces(folder)                # None: in memory only
#     await kept.begin(manifest)               # `kept.here` has the pieces that are here already
#     kept.put(number, data); await kept.write_down()
#     state = await kept.finish()
#
# An interrupted download continues where it was: in the same process with the same object, in
# another one through the file. Pieces are found again by their digests, so the file need not be
# trusted, and pieces that did not change from one epoch to the next are not fetched again.
#
# Promise: if the disk is full or the file cannot be written, nothing more is kept on disk, and the
# log says so. The download goes on.
#
# Easy to get wrong: `begin` takes memory for the whole state at once. Call it only after the
# manifest was checked against this peer's own model.


FILE_NAME = "state-being-fetched"


class KeptPieces:
    """Invariant: the bytes of every piece in `here` have the digest that is in the manifest."""

    def __init__(self, folder: Path | None = None) -> None:
        self._file = None if folder is None else folder / FILE_NAME
        self._manifest: Manifest | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._unwritten: list[int] = []
        self.here: set[int] = set()

    @property
    def manifest(self) -> Manifest:
        if self._manifest is None:
            raise ProtocolMisuse("No state has been begun.")
        return self._manifest

    @property
    def bytes_here(self) -> int:
        return sum(_length(self.span(number)) for number in self.here)

    def span(self, number: int) -> slice:
        """The place of a piece in the stream."""
        return piece_span(number, self.manifest.piece_bytes, len(self._memory))

    async def begin(self, manifest: Manifest) -> None:
        """Keep pieces of this state from now on. Finds those that are here, in memory and file.
        NoMemory if there is none for it."""
        await in_thread(self._begin, manifest)

    def put(self, number: int, data: memoryview) -> None:
        """Keep a piece that has been verified."""
        raw_bytes(self._memory)[self.span(number)] = data
        self.here.add(number)
        if self._file is not None:
            self._unwritten.append(number)

    async def write_down(self) -> None:
        """Write the pieces that are not in the file yet."""
        if self._unwritten and self._file is not None:
            await in_thread(self._write_down)

    async def finish(self) -> TrainingState:
        """Return the whole state. The file is removed, and nothing is kept any more."""
        if len(self.here) != self.manifest.piece_count:
            raise ProtocolMisuse("Not all pieces of the state are here.")
        state = TrainingState(self.manifest, self._memory)
        self._manifest, self.here, self._unwritten = None, set(), []
        self._memory = torch.empty(0, dtype=torch.uint8)
        if self._file is not None:
            with trio.CancelScope(shield=True):  # or the state would be lost
                await in_thread(_remove_with_folder, self._file)
        return state

    def _begin(self, manifest: Manifest) -> None:
        """In a worker thread."""
        before, here = self._manifest, self.here
        self._manifest, self.here, self._unwritten = manifest, set(), []
        if before is None or before.stream_bytes != manifest.stream_bytes:
            self._manifest, self.here = None, set()
            self._memory = torch.empty(0, dtype=torch.uint8)  # free it before taking more
            self._memory = unset_bytes(manifest.stream_bytes)
            self._manifest = manifest
            if self._file is not None:
                self._read_back(self._file, manifest)
        elif before.piece_bytes == manifest.piece_bytes:
            self.here = {
                number
                for number in here
                if before.piece_digest(number) == manifest.piece_digest(number)
            }

    def _read_back(self, file: Path, manifest: Manifest) -> None:
        memory = raw_bytes(self._memory)
        found = 0
        try:
            with open(file, "rb", buffering=0) as kept:
                for number in range(manifest.piece_count):
                    if number in self.here:
                        continue
                    span = self.span(number)
                    kept.seek(span.start)
                    if kept.readinto(memory[span]) != _length(span):
                        break
                    digest = blake3(memory[span]).digest(DIGEST_BYTES)
                    if digest == manifest.piece_digest(number):
                        self.here.add(number)
                        found += 1
        except FileNotFoundError:
            return
        except OSError as error:
            log.warning("%s cannot be read, so its download begins anew: %s", file, error)
        if found:
            log.info("continuing with %d pieces of a state that were here before", found)

    def _write_down(self) -> None:
        """In a worker thread."""
        assert self._file is not None
        unwritten, self._unwritten = self._unwritten, []
        memory = raw_bytes(self._memory)
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            # never through a link, which another user might have put there
            flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(self._file, flags, 0o600)
            try:
                for number in unwritten:
                    _write_at(descriptor, memory, self.span(number))
            finally:
                os.close(descriptor)
        except OSError as error:
            log.warning(
                "the state being fetched is not kept on disk, so an interruption would lose it: "
                "%s (%s)",
                error.strerror,
                self._file,
            )
            self._remove()

    def _remove(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.unlink(missing_ok=True)
        self._file = None


def _remove_with_folder(file: Path) -> None:
    """In a worker thread: with some gigabytes, it takes a second."""
    with contextlib.suppress(OSError):  # the next download writes over a file that is left
        file.unlink(missing_ok=True)
        file.parent.rmdir()


def _write_at(descriptor: int, memory: memoryview, span: slice) -> None:
    position = span.start
    while position < span.stop:
        position += os.pwrite(descriptor, memory[position : span.stop], position)


def _length(span: slice) -> int:
    return int(span.stop - span.start)


LOOK_SECONDS = 1.0  # how often the sources are looked at again
OPEN_SECONDS = 20.0
RETRY_SECONDS = 5.0  # before a failed source is asked again, if no other is left
WATCH_SECONDS = 10.0  # how long sources are compared while others wait to be asked
SLOW_SHARE = 0.1  # of the fastest: a slower source makes room for one that was not asked yet
EXCHANGED_EVERY = 3  # comparisons in which none is slow beside the others: then they may all be

OLD_SECONDS = 120.0
"""If no whole piece comes for this long, the choice is made anew if the others have another state
now. Even 70 kb/s bring a piece in this time. Otherwise a source that trickles bytes could hold its
newcomer for ever."""


class Download:
    """Downloads the pieces of one state. Use it once."""

    def __init__(
        self,
        account: FetchAccount,
        choice: Choice,
        manifest: Manifest,
        kept: KeptPieces,
        look_again: Callable[[], Choice | None],
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """`kept` has begun with this manifest. `look_again` chooses anew among the peers that are
        there when it is called."""
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
        self._exchanges = 0

    async def run(self) -> bool:
        """Returns True when all pieces are here, False if the others have another state now.

        FetchFailed if no source has sent anything for too long.
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
        """Add the peers that have this state now."""
        if choice is not None and choice.digest == self._choice.digest:
            self._known.update({one.peer: one for one in choice.sources})

    def _make_room_for_others(self) -> None:
        """If others wait to be asked, drop the slowest source, once all were asked for a while."""
        now = trio.current_time()
        if now - self._watched_from < WATCH_SECONDS:
            return
        came = Counter(self._account.bytes_from)
        brought = {peer: came[peer] - self._watched[peer] for peer in self._active}
        self._watched_from, self._watched = now, came
        if len(self._active) < self._most or not self._not_yet_asked():
            return
        slowest = min(brought, key=lambda peer: brought[peer])
        # among the others there may be a faster one, also if all of these are slow
        self._exchanges += 1
        is_slow = brought[slowest] < SLOW_SHARE * max(brought.values())
        if is_slow or self._exchanges % EXCHANGED_EVERY == 0:
            self._account.gives_up(slowest, "It is slow, and others were not asked yet.")
            self._active[slowest].cancel()

    def _not_yet_asked(self) -> list[PeerId]:
        """Those to ask first in front."""
        now = trio.current_time()
        tried = {*self._active, *self._failed_at, *self._gone, *self._account.liars}
        tried |= {peer for peer, until in self._busy_until.items() if until > now}
        fresh = [one for peer, one in self._known.items() if peer not in tried]
        direct_first = [one.peer for one in self._account.direct_first(fresh)]
        # a peer that was busy stands behind those that were never asked, and the one that was
        # busy last behind all
        return sorted(direct_first, key=lambda peer: self._busy_until.get(peer, 0.0))

    def _to_ask(self) -> list[PeerId]:
        """The sources to begin with now: new ones, or failed ones if no other is left."""
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
        """Fetch pieces from one source for as long as it has any that are wanted."""
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
        """Whether this source has room for us. If not, it is asked again when it told us to."""
        request = ManifestRequest(self._manifest.run, self._choice.digest, place_only=True)
        answer = await self._account.ask(peer, request)
        if answer.wait_ms:
            seconds = waiting_seconds(answer)
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
            raise Lied(f"Piece {number:,} of the state came with wrong bytes.")
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
        """Receive the bytes of one piece, in as many chunks as the source likes."""
        rest = piece
        while len(rest):
            size = await next_chunk_bytes(transfer, self._account.settings.patience_seconds)
            if size is None or size > len(rest):
                raise Lied(f"It sent the wrong number of bytes for piece {number:,}.")
            await transfer.receive_chunk_into(rest)
            rest = rest[size:]
            self._account.came(peer, size)

    def _tell_changed(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def _until_changed(self) -> None:
        with trio.move_on_after(LOOK_SECONDS):
            await self._changed.wait()
