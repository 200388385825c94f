"""`/potluck/expert-copies/1.0.0`: servers of experts keep copies for one another.

    offers  [uids]                      ->  [uid, steps, digest, bytes] of each copy that is kept
    keep    [uid, digest, bytes]        ->  is it wanted; then its bytes, as chunks
    copy    [uid, digest]               ->  the bytes of this copy, as chunks

The server of an expert sends each new copy to the `KEEPERS` servers that come first for this expert
in an order that all share (`keepers_of`), or to `LEAST_KEEPERS` if its link has not the time for
more. A server that does not answer is passed over, so a keeper that has died is replaced with the
next copy. A server that takes the expert over asks the keepers for
what they have, and fetches the newest copy.

A keeper only takes a copy from the server that hosts the expert, as the directory says, or that has
sent the copy before it. So nobody can put a false copy in the place of a true one at a keeper, but
the server of the expert itself, which could also answer its calls falsely. A keeper itself can: a
copy and its steps are not signed. It can give a false one to the server that takes the expert over,
and with enough steps that one is taken.

The size is bounded before a byte comes, by what copies of this kind of expert have, by a quota and
by the number of transfers. Bytes go to a file chunk by chunk, and count only when the whole file is
checked (`CopyForm.check`).
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final, TypeVar

import trio
from blake3 import blake3
from msgspec import Meta

from protocols.blocking import in_thread
from protocols.errors import Busy, DeadlineExceeded, PotluckError
from protocols.experts.copies import (
    DIGEST_BYTES,
    MOST_STEPS,
    BrokenCopy,
    CopyForm,
    CopyStore,
    KeptCopy,
    WrongCopy,
    restore,
)
from protocols.experts.directory import MOST_COPY_RECORDS
from protocols.experts.grid import ExpertGrid, Uid, WrongUid, parse_uid
from protocols.experts.messages import MOST_INFOS, UidText
from protocols.experts.runtime import ExpertBackend
from protocols.guard import Caller
from protocols.identity import PeerId
from protocols.rpc import BulkMethod, Empty, Message, Method, Rpc, Transfer

Result = TypeVar("Result")

log = logging.getLogger("potluck.experts")

COPIES_PROTOCOL: Final = "/potluck/expert-copies/1.0.0"

KEEPERS: Final = 3
"""Of each copy. With the expert's own server, four have to die at once before anything is lost. If
half of eight servers die, that is one in 35 of the dead ones' experts; with two keepers it is one
in 7, and with four none, but each costs the upload of another copy."""

LEAST_KEEPERS: Final = 2
MOST_SENDING_SHARE: Final = 0.5
"""A third copy is sent as long as sending takes less of the time than this."""

MOST_TRIES: Final = 6  # servers asked to keep a copy, one after another
OPENING_SECONDS: Final = 15.0  # for a peer to accept a transfer, connecting included
OFFERS_SECONDS: Final = 10.0  # for a keeper to say what it has, connecting included
LONGEST_TRANSFER_SECONDS: Final = 900.0  # 200 MB at 2 Mbit/s
TRANSFER_BYTES_PER_SECOND: Final = 20_000.0  # of a line of 1 Mbit/s that sends several copies
TRANSFER_SECONDS: Final = 30.0  # beside that, to check a copy and to write it to the disk
MOST_RECEIVED_AT_ONCE: Final = 4  # copies: each is a file that grows, and a chunk in memory
PUSHED_AT_ONCE: Final = 2  # by one server
MOST_SENT_AT_ONCE: Final = 8
MOST_SENT_TO_ONE: Final = (
    4  # as many as a server takes at once; one that does not read holds no more
)
SHARE_OF_A_PEER: Final = 0.5  # of the quota, for the copies from one server
CHUNK_BYTES: Final = 256 << 10
LARGEST_COPY_BYTES: Final = 1 << 40  # of any expert; the form of an expert has its own bound

Digest = Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
CopyBytes = Annotated[int, Meta(ge=1, le=LARGEST_COPY_BYTES)]


class UnknownCopy(PotluckError):
    """The keeper does not have this copy, or has another one by now."""

    surely_not_executed = True


class CopyRefused(PotluckError):
    """The keeper does not take this copy: somebody else hosts the expert."""

    surely_not_executed = True


ERRORS: Final = {
    "unknown-copy": UnknownCopy,
    "copy-refused": CopyRefused,
    "wrong-copy": WrongCopy,
    "wrong-uid": WrongUid,
}


class OffersRequest(Message, frozen=True):
    uids: Annotated[tuple[UidText, ...], Meta(max_length=MOST_INFOS)]


class CopyOffer(Message, frozen=True):
    """A copy that a keeper has. `digest`: the BLAKE3 of its bytes."""

    uid: UidText
    steps: Annotated[int, Meta(ge=1, le=MOST_STEPS)]
    digest: Digest
    size: CopyBytes


class OffersAnswer(Message, frozen=True):
    """Those of the copies that this server has."""

    offers: Annotated[tuple[CopyOffer, ...], Meta(max_length=MOST_INFOS)]


class KeepOpening(Message, frozen=True):
    uid: UidText
    digest: Digest
    size: CopyBytes


class KeepAccepted(Message, frozen=True):
    """Whether the bytes are wanted: the keeper may have this very copy."""

    wanted: bool


class CopyOpening(Message, frozen=True):
    uid: UidText
    digest: Digest


OFFERS: Final = Method(
    COPIES_PROTOCOL, "offers", OffersRequest, OffersAnswer, errors=ERRORS, training=True
)
KEEP: Final = BulkMethod(
    COPIES_PROTOCOL,
    "keep",
    KeepOpening,
    accepted=KeepAccepted,
    closing=Empty,
    closed=Empty,
    chunk_limit_bytes=CHUNK_BYTES,
    errors=ERRORS,
    training=True,
)
COPY: Final = BulkMethod(
    COPIES_PROTOCOL,
    "copy",
    CopyOpening,
    accepted=Empty,
    closing=Empty,
    closed=Empty,
    chunk_limit_bytes=CHUNK_BYTES,
    errors=ERRORS,
    training=True,
)

AnyTransfer = Transfer[Any, Any, Any]


def keepers_of(uid: Uid, servers: Iterable[PeerId]) -> list[PeerId]:
    """These servers, in the order in which they keep copies of this expert (rendezvous hashing).
    Each server has an order of its own for each expert; if one goes, the order of the others
    stays."""
    return sorted(servers, key=lambda peer: rank(uid, peer))


def rank(uid: Uid, peer: PeerId) -> bytes:
    """The place of a server in the order for this expert."""
    return hashlib.sha256(f"keeper {uid} {peer}".encode()).digest()


class Forms:
    """The forms of copies, for the experts of all grids. Each is made when it is first needed."""

    def __init__(self, grids: Sequence[ExpertGrid], make: Callable[[Uid], ExpertBackend]) -> None:
        self._grids = {grid.name: grid for grid in grids}
        self._make = make
        self._forms: dict[str, CopyForm] = {}
        self._making = trio.Lock()

    async def of(self, uid: Uid) -> CopyForm:
        """WrongUid if it is in no grid."""
        grid = self._grids.get(uid.grid)
        if grid is None or uid not in grid:
            raise WrongUid(
                f"{uid} is in no grid of this run.",
                why=f"The grids are {', '.join(sorted(self._grids))}.",
            )
        async with self._making:
            if uid.grid not in self._forms:
                self._forms[uid.grid] = await in_thread(self._form, grid)
            return self._forms[uid.grid]

    def made(self, uid: Uid) -> CopyForm:
        """The form of an expert for which `of` was called before."""
        return self._forms[uid.grid]

    def _form(self, grid: ExpertGrid) -> CopyForm:
        return CopyForm(self._make(grid.at(0)))


class CopyKeeper:
    """The answering side.

    - `is_own(uid)`: whether this server hosts the expert itself.
    - `hosts_of(uid)`: the other servers that host it, the one that keeps it first.
    - `kept(uid)` is called when a copy has come, or is still the newest.

    Invariant: the copies of experts that it does not host, with those on their way, have at most
    `limit_bytes`, and at most `MOST_COPY_RECORDS` prefixes.
    """

    def __init__(
        self,
        rpc: Rpc,
        store: CopyStore,
        forms: Forms,
        is_own: Callable[[Uid], bool],
        hosts_of: Callable[[Uid], Awaitable[Sequence[PeerId]]],
        kept: Callable[[Uid], None],
        limit_bytes: int,
    ) -> None:
        self._rpc, self._store, self._forms = rpc, store, forms
        self._is_own, self._hosts_of, self._note_kept = is_own, hosts_of, kept
        self._limit_bytes = limit_bytes
        self._sources: dict[Uid, PeerId] = {}
        self._on_the_way: dict[Uid, int] = {}
        self._senders: Counter[PeerId] = Counter()
        self._sending: Counter[PeerId] = Counter()
        rpc.serve(OFFERS, self._offers)
        rpc.serve_bulk(KEEP, self._keep)
        rpc.serve_bulk(COPY, self._copy)

    def kept(self) -> list[Uid]:
        """The experts of others of which it has copies."""
        return [copy.uid for copy in self._store.kept() if not self._is_own(copy.uid)]

    # -- what it has

    def _offers(self, _caller: Caller, request: OffersRequest) -> OffersAnswer:
        found = [self._store.find(parse_uid(text)) for text in dict.fromkeys(request.uids)]
        return OffersAnswer(
            tuple(
                CopyOffer(str(one.uid), one.steps, one.digest, one.size)
                for one in found
                if one is not None
            )
        )

    async def _copy(self, caller: Caller, transfer: AnyTransfer, opening: CopyOpening) -> None:
        copy = self._store.find(parse_uid(opening.uid))
        if copy is None or copy.digest != opening.digest:
            raise UnknownCopy(f"This copy of {opening.uid} is not here.")
        to_it, in_all = self._sending[caller.peer], self._sending.total()
        if to_it >= MOST_SENT_TO_ONE or in_all >= MOST_SENT_AT_ONCE:
            raise Busy(f"{in_all} copies are sent from here.", advice="Ask again later.")
        self._sending[caller.peer] += 1
        try:
            with trio.move_on_after(LONGEST_TRANSFER_SECONDS):
                try:
                    file = await in_thread(self._store.open, copy)
                except OSError:
                    raise UnknownCopy(f"The copy of {copy.uid} cannot be read.") from None
                with file:
                    await transfer.accept(Empty())
                    await _send_file(transfer, file)
                    await transfer.finish(Empty())
        finally:
            self._sending -= Counter((caller.peer,))

    # -- what it takes

    async def _keep(self, caller: Caller, transfer: AnyTransfer, opening: KeepOpening) -> None:
        uid = parse_uid(opening.uid)
        form = await self._forms.of(uid)
        if not form.learns or opening.size > form.largest_bytes:
            raise WrongCopy(
                f"A copy of {uid} has at most {form.largest_bytes:,} bytes, not {opening.size:,}."
            )
        await self._check_source(caller.peer, uid)
        copy = self._store.find(uid)
        if copy is not None and copy.digest == opening.digest:
            self._sources[uid] = caller.peer
            self._note_kept(uid)
            await transfer.accept(KeepAccepted(wanted=False))
            await transfer.finish(Empty())
            return

        def take(draft: Path) -> None:
            self._store.put(draft, uid, form.check(draft, uid))

        with (
            self._room(caller.peer, uid, opening.size),
            trio.move_on_after(LONGEST_TRANSFER_SECONDS),
        ):
            await transfer.accept(KeepAccepted(wanted=True))
            try:
                await receive_copy(transfer, self._store, uid, opening.digest, opening.size, take)
            except BrokenCopy as error:
                self._rpc.blame(caller.peer, COPIES_PROTOCOL, error)
                raise
            self._sources[uid] = caller.peer
            self._note_kept(uid)
            await transfer.finish(Empty())

    async def _check_source(self, peer: PeerId, uid: Uid) -> None:
        """CopyRefused unless this peer hosts the expert."""
        if not self._is_own(uid):
            hosts = await self._hosts_of(uid)
            if peer in hosts[:1] or (not hosts and self._sources.get(uid) == peer):
                return
        raise CopyRefused(
            f"{peer} does not host {uid}, as far as is known here.",
            why="Another server hosts it, or it was announced only now.",
        )

    @contextmanager
    def _room(self, peer: PeerId, uid: Uid, size: int) -> Iterator[None]:
        """Room for a copy that this peer sends. Busy if there is none."""
        if (
            uid in self._on_the_way
            or self._senders[peer] >= PUSHED_AT_ONCE
            or len(self._on_the_way) >= MOST_RECEIVED_AT_ONCE
        ):
            raise Busy(f"{len(self._on_the_way)} copies are on their way here.")
        kept = [copy for copy in self._store.kept() if not self._is_own(copy.uid)]
        others = {copy.uid: copy.size for copy in kept if copy.uid != uid} | self._on_the_way
        prefixes = {prefix for one in (*others, uid) for prefix in one.prefixes()}
        held = sum(others.values())
        of_peer = sum(size for one, size in others.items() if self._sources.get(one) == peer)
        if (
            held + size > self._limit_bytes
            or of_peer + size > self._limit_bytes * SHARE_OF_A_PEER
            or len(prefixes) > MOST_COPY_RECORDS
        ):
            raise Busy(
                f"This server keeps {len(others):,} copies with {held:,} bytes already.",
                advice="Ask another one.",
            )
        self._on_the_way[uid] = size
        self._senders[peer] += 1
        try:
            yield
        finally:
            del self._on_the_way[uid]
            self._senders[peer] -= 1
            self._senders += Counter()  # which forgets the zeros


# ---- the asking side


async def ask_offers(rpc: Rpc, peer: PeerId, uids: Sequence[Uid]) -> dict[Uid, CopyOffer]:
    """The copies of these experts that this keeper has. Raises the errors of `rpc.call`."""
    asked = {str(uid): uid for uid in uids[:MOST_INFOS]}
    answer = await rpc.call(peer, OFFERS, OffersRequest(tuple(asked)), timeout=OFFERS_SECONDS)
    return {asked[one.uid]: one for one in answer.offers if one.uid in asked}


async def fetch(
    rpc: Rpc,
    peer: PeerId,
    offer: CopyOffer,
    store: CopyStore,
    form: CopyForm,
    make: Callable[[Uid], ExpertBackend],
) -> ExpertBackend:
    """Fetch the copy that this keeper offers, and make the expert from it. When all is well, the
    copy is kept, and one that this server had saved itself is put aside. WrongCopy, BrokenCopy,
    UnknownCopy, Busy, and the errors of transfers."""
    uid = parse_uid(offer.uid)
    if offer.size > form.largest_bytes:
        raise WrongCopy(f"A copy of {uid} has at most {form.largest_bytes:,} bytes.")

    def take(draft: Path) -> ExpertBackend:
        label = form.check(draft, uid)
        if label.steps != offer.steps:
            raise BrokenCopy(f"This copy of {uid} does not have {offer.steps:,} steps.")
        backend = make(uid)
        restore(backend, draft, form)
        store.put_own_aside(uid)
        store.put(draft, uid, label)
        return backend

    opening = CopyOpening(offer.uid, offer.digest)
    try:
        with in_time(peer, uid, offer.size):
            async with rpc.open_bulk(peer, COPY, opening, timeout=OPENING_SECONDS) as transfer:
                await transfer.send_closing(Empty())
                return await receive_copy(transfer, store, uid, offer.digest, offer.size, take)
    except BrokenCopy as error:
        rpc.blame(peer, COPIES_PROTOCOL, error)
        raise


async def push(
    rpc: Rpc, copy: KeptCopy, store: CopyStore, servers: Iterable[PeerId], count: int
) -> tuple[PeerId, ...]:
    """Send a copy to so many keepers among these servers. Returns those that have it now."""
    have: list[PeerId] = []
    for peer in keepers_of(copy.uid, servers)[:MOST_TRIES]:
        if len(have) == count:
            break
        try:
            await _push_to(rpc, copy, store, peer)
        except PotluckError as error:
            log.info("%s does not keep a copy of %s: %s", peer, copy.uid, error)
        else:
            have.append(peer)
    return tuple(have)


@contextmanager
def in_time(peer: PeerId, uid: Uid, size: int) -> Iterator[None]:
    """DeadlineExceeded if a transfer of a copy takes too long. A peer that only says that it is
    alive, again and again, would hold it open for ever."""
    seconds = OPENING_SECONDS + TRANSFER_SECONDS + size / TRANSFER_BYTES_PER_SECOND
    with trio.move_on_after(min(seconds, LONGEST_TRANSFER_SECONDS)) as scope:
        yield
    if scope.cancelled_caught:
        raise DeadlineExceeded(f"The copy of {uid} was not transferred with {peer} in time.")


async def _push_to(rpc: Rpc, copy: KeptCopy, store: CopyStore, peer: PeerId) -> None:
    opening = KeepOpening(str(copy.uid), copy.digest, copy.size)
    try:
        file = await in_thread(store.open, copy)
    except OSError as error:
        raise UnknownCopy(f"The copy of {copy.uid} cannot be read: {error.strerror}.") from None
    with file, in_time(peer, copy.uid, copy.size):
        async with rpc.open_bulk(peer, KEEP, opening, timeout=OPENING_SECONDS) as transfer:
            if transfer.accepted.wanted:
                await _send_file(transfer, file)
            await transfer.finish(Empty())


# ---- both sides


async def _send_file(transfer: AnyTransfer, file: BinaryIO) -> None:
    while part := await in_thread(_read, file):
        await transfer.send_chunk(part)


def _read(file: BinaryIO) -> bytes:
    try:
        return file.read(CHUNK_BYTES)
    except OSError as error:
        raise UnknownCopy(f"The copy cannot be read: {error.strerror}.") from None


def _open_to_write(path: Path) -> BinaryIO:
    return open(path, "wb")


async def receive_copy(
    transfer: AnyTransfer,
    store: CopyStore,
    uid: Uid,
    digest: bytes,
    size: int,
    take: Callable[[Path], Result],
) -> Result:
    """Receive the chunks of a copy into a file, up to the other side's closing message. Returns
    what `take` makes of the file, in a worker thread. Busy if the disk has no room."""
    buffer, found, received = bytearray(CHUNK_BYTES), blake3(), 0
    try:
        with store.draft(uid) as draft:
            with await in_thread(_open_to_write, draft) as file:
                while count := await transfer.receive_chunk_into(buffer):
                    received += count
                    if received > size:
                        raise BrokenCopy(f"More than {size:,} bytes of a copy of {uid} came.")
                    part = memoryview(buffer)[:count]
                    found.update(part)
                    await in_thread(file.write, part)
            if found.digest(DIGEST_BYTES) != digest:
                raise BrokenCopy(f"{received:,} bytes came that are not the copy of {uid}.")
            return await in_thread(take, draft)
    except OSError as error:
        raise Busy(f"A copy of {uid} cannot be written here: {error.strerror}.") from None
