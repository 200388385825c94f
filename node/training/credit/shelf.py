"""The pages of records that this peer keeps on disk, and fetching more of them from others.

    shelf = Shelf(folder, run, own=public_key)    # reads the disk: blocks
    shelf.put_own(data)                           # our own page, as it is now; blocks
    shelf.put(data)                               # another peer's page, if it is newer; blocks
    shelf.listed(), shelf.read(key, number)
    unheard = await gather(rpc, peers, run, shelf, put, newest_page=37)

A page is one file, replaced as a whole: `kill -9` loses only the steps since the last write.

Promises: every page on the shelf was signed by its writer for this run. The shelf holds up to
LARGEST_SHELF_BYTES in MOST_LISTED pages. It makes room by dropping pages of the writer that takes
most of it, first of writers that no page of our own names; so nobody can push out real records with
those of invented writers. `gather` ends within GATHER_SECONDS, and takes no more from one peer, and
from all, than the limits below. A page without its writer's signature is not taken, and the peer
that sent it is asked for nothing more.

Of two versions of a page the one with the later step counts, not the one that came last. Otherwise
somebody could take steps away by sending an old version again. For the same reason only this peer
decides its own page; others have older versions of it. A peer may name endless pages of invented
writers. So each peer has a share of its own, and pages of impossible epochs are not asked for.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio

from node.core.private_file import UnusableFile, read_private_file, replace_private_file
from protocols.credit.messages import (
    CONTENTS,
    MOST_LISTED,
    PAGE,
    ContentsRequest,
    Listed,
    PageRequest,
)
from protocols.credit.record import (
    LARGEST_PAGE_BYTES,
    Page,
    WrongPage,
    page_digest,
    read_page,
)
from protocols.errors import PotluckError
from protocols.identity import PeerId, peer_id_of, public_key_of
from protocols.rpc import Rpc

LARGEST_SHELF_BYTES: Final = 32 << 20
"""With 32 peers the last 3,500 steps, with three 40,000. Adding up reads all of it at once. The
most costly pages possible take sixteen times this size in memory, and half a minute."""

SUFFIX: Final = ".page"
LARGEST_OWN_BYTES: Final = LARGEST_SHELF_BYTES // 2

Place = tuple[bytes, int]
"""A writer's key, and the number of a page."""


@dataclass(frozen=True)
class KeptPage:
    """A page's properties that are known without reading it."""

    digest: bytes
    bytes: int
    newness: tuple[int, int]


class Shelf:
    """Invariant: `_kept` matches the folder. Usable from any thread; only the `put` methods change
    it, one at a time, and the others read a copy."""

    def __init__(self, folder: Path, run: str, own: bytes) -> None:
        self._folder, self._run, self._own = folder, run, own
        self._kept: dict[Place, KeptPage] = {}
        self._met: set[bytes] = {own}  # peers that were in a step with us
        self._putting = threading.Lock()
        self._load()

    def has(self, listed: Listed) -> bool:
        """Whether we need not ask for it. Our own pages are never asked for."""
        if listed.key == self._own:
            return True
        kept = self._kept.get((listed.key, listed.number))
        return kept is not None and kept.digest == listed.digest

    def listed(self) -> tuple[Listed, ...]:
        """The pages that are here: our own first, then each other writer's, the newest first."""
        places = sorted(self._kept.copy().items(), key=lambda one: (-one[0][1], one[0][0]))
        places.sort(key=lambda one: one[0][0] != self._own)
        return tuple(
            Listed(key, number, kept.digest) for (key, number), kept in places[:MOST_LISTED]
        )

    def own_pages(self, count: int) -> list[Page]:
        """Our own newest pages, the oldest first."""
        numbers = sorted(number for key, number in self._kept.copy() if key == self._own)
        return [page for _, page in self._pages((self._own, one) for one in numbers[-count:])]

    def pages(self) -> list[tuple[PeerId, Page]]:
        """All pages."""
        return list(self._pages(sorted(self._kept.copy())))

    def read(self, key: bytes, number: int) -> bytes:
        """A page as its writer signed it; empty if there is none."""
        if (key, number) not in self._kept:
            return b""
        with contextlib.suppress(UnusableFile):
            return read_private_file(self._file(key, number), LARGEST_PAGE_BYTES) or b""
        return b""

    def put_own(self, data: bytes) -> bool:
        """Keep our own page as it is now, even if it has fewer steps than before."""
        return self._put(data, is_ours=True)

    def put(self, data: bytes) -> bool:
        """Keep another peer's page, if it is newer than the version here and not our own. Returns
        whether it is kept.

        WrongPage if it is no page; OSError from the system.
        """
        return self._put(data, is_ours=False)

    def _put(self, data: bytes, *, is_ours: bool) -> bool:
        peer, page = read_page(data, self._run)
        place, newness = (public_key_of(peer), page.number), _newness(page)
        if (place[0] == self._own) != is_ours:
            return False
        with self._putting:
            before = self._kept.get(place)
            if before is not None and before.newness >= newness and not is_ours:
                return False
            replace_private_file(self._file(*place), data)
            self._note(place, page, data)
            self._make_room()
            return place in self._kept

    def _load(self) -> None:
        try:
            files = sorted(self._folder.glob(f"*{SUFFIX}"))
            for draft in self._folder.glob(f".*{SUFFIX}.*"):  # left by a process that was killed
                draft.unlink(missing_ok=True)
        except OSError:
            return
        for file in files:
            with contextlib.suppress(UnusableFile, WrongPage):
                data = read_private_file(file, LARGEST_PAGE_BYTES)
                if data is not None:
                    peer, page = read_page(data, self._run)
                    place = public_key_of(peer), page.number
                    if file == self._file(*place):
                        self._note(place, page, data)
        self._make_room()

    def _note(self, place: Place, page: Page, data: bytes) -> None:
        self._kept[place] = KeptPage(page_digest(data), len(data), _newness(page))
        if place[0] == self._own:
            self._met.update(page.members)

    def _pages(self, places: Iterable[Place]) -> Iterator[tuple[PeerId, Page]]:
        for key, number in places:
            with contextlib.suppress(WrongPage):
                yield read_page(self.read(key, number), self._run)

    def _make_room(self) -> None:
        """Drop the oldest page of the writer that takes most; our own only beyond our share."""
        held: Counter[bytes] = Counter()
        for (key, _), kept in self._kept.items():
            held[key] += kept.bytes
        while held.total() > LARGEST_SHELF_BYTES or len(self._kept) > MOST_LISTED:
            largest = max(held, key=lambda key: (self._weight(key, held[key]), key))
            number = min(number for key, number in self._kept if key == largest)
            held[largest] -= self._kept.pop((largest, number)).bytes
            held = +held  # without writers that hold nothing any more
            with contextlib.suppress(OSError):
                self._file(largest, number).unlink()

    def _weight(self, key: bytes, held: int) -> tuple[bool, int]:
        is_within = key == self._own and held <= LARGEST_OWN_BYTES
        return key not in self._met, 0 if is_within else held

    def _file(self, key: bytes, number: int) -> Path:
        return self._folder / f"{peer_id_of(key)}-{number:019d}{SUFFIX}"


def _newness(page: Page) -> tuple[int, int]:
    """Of two versions the one with the later step is newer; with the same step, the longer."""
    return max((line.moment for line in page.lines), default=0), len(page.lines)


GATHER_SECONDS = 15.0  # somebody waits for the answer
CALL_SECONDS = 8.0  # connecting over a bad link, and a question
MOST_ASKED = 128  # peers
ASKED_AT_ONCE = 8
BYTES_OF_ONE = 8 << 20
BYTES_IN_ALL = 32 << 20

Put = Callable[[bytes], Awaitable[object]]


class PageGathering:
    """One gathering, over all peers."""

    def __init__(self, rpc: Rpc, run: str, shelf: Shelf, put: Put, newest_page: int) -> None:
        self._rpc, self._run, self._shelf, self._put = rpc, run, shelf, put
        self._newest_page = newest_page
        self._left = BYTES_IN_ALL
        self._asked: set[tuple[bytes, int, bytes]] = set()

    async def ask(self, peer: PeerId) -> None:
        """Fetch the pages that this peer has and we do not. PotluckError if it does not answer."""
        request = ContentsRequest(self._run)
        contents = await self._rpc.call(peer, CONTENTS, request, timeout=CALL_SECONDS)
        of_this_one = BYTES_OF_ONE
        for listed in contents.pages:
            if of_this_one <= 0 or self._left <= 0:
                return
            if self._wants(listed):
                taken = await self._fetch(peer, listed)
                of_this_one -= taken
                self._left -= taken

    def _wants(self, listed: Listed) -> bool:
        place = listed.key, listed.number, listed.digest
        can_be = listed.number <= self._newest_page
        return can_be and place not in self._asked and not self._shelf.has(listed)

    async def _fetch(self, peer: PeerId, listed: Listed) -> int:
        place = listed.key, listed.number, listed.digest
        self._asked.add(place)
        try:
            data = await fetch_page(self._rpc, peer, self._run, listed.key, listed.number)
        except PotluckError:
            self._asked.discard(place)  # another peer may have it
            raise
        if data:
            await self._put(data)
        return len(data)


async def fetch_page(rpc: Rpc, peer: PeerId, run: str, key: bytes, number: int) -> bytes:
    """A page from this peer, signed by its writer; empty if the peer has none. WrongPage if the
    peer sent a different one."""
    answer = await rpc.call(peer, PAGE, PageRequest(run, key, number), timeout=CALL_SECONDS)
    if answer.data:
        writer, page = read_page(answer.data, run)
        if (writer, page.number) != (peer_id_of(key), number):
            raise WrongPage("It is not the requested page.")
    return answer.data


async def gather(
    rpc: Rpc, peers: Iterable[PeerId], run: str, shelf: Shelf, put: Put, *, newest_page: int
) -> dict[PeerId, str]:
    """Fetch the pages of these peers. Returns the peers that did not answer correctly, with the
    reason.

    `put` puts a page on the shelf, which waits for a disk.
    """
    gathering = PageGathering(rpc, run, shelf, put, newest_page)
    asked = list(dict.fromkeys(peers))[:MOST_ASKED]
    unheard = dict.fromkeys(asked, "It did not answer in time.")
    turns = trio.CapacityLimiter(ASKED_AT_ONCE)

    async def ask(peer: PeerId) -> None:
        async with turns:
            try:
                await gathering.ask(peer)
            except (PotluckError, OSError) as error:
                unheard[peer] = error.what if isinstance(error, PotluckError) else str(error)
            else:
                del unheard[peer]

    with trio.move_on_after(GATHER_SECONDS):
        async with trio.open_nursery() as nursery:
            for peer in asked:
                nursery.start_soon(ask, peer)
    return unheard
