"""The pages of records that this peer keeps on disk: its own, and those of others that it has seen.

    shelf = Shelf(folder, run, own=public_key)    # reads what is there: blocks
    shelf.put_own(data)                           # our own page, as it is now; blocks
    shelf.put(data)                               # a page of another's, if it is newer; blocks
    shelf.listed(), shelf.read(key, number)

A page is one file, replaced whole: `kill -9` loses the steps since the last write and no more.

Promises: only what its writer has signed for this run is on the shelf; it holds up to
LARGEST_SHELF_BYTES in MOST_LISTED pages, and makes room at the cost of whoever takes most of it:
first of writers whom no page of our own names, so that nobody drives out the others' records with
those of writers that were made up.

Easy to get wrong: of two versions of a page the one with the later step counts, not the one that
came last. Otherwise an old one that somebody gives out again would take steps away. And nobody but
ourselves says what our own page is, or the same would happen to that.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from node.private_file import UnusableFile, read_private_file, replace_private_file
from protocols.credit.messages import MOST_LISTED, Listed
from protocols.credit.record import (
    LARGEST_PAGE_BYTES,
    Page,
    WrongPage,
    page_digest,
    read_page,
)
from protocols.identity import PeerId, peer_id_of, public_key_of

LARGEST_SHELF_BYTES: Final = 32 << 20
"""At 32 peers the last 3,500 steps, at three 40,000. What is added up is read at once: made up to
be as costly as can be, so much takes sixteen times its size in memory, and half a minute."""

SUFFIX: Final = ".page"
LARGEST_OWN_BYTES: Final = LARGEST_SHELF_BYTES // 2

Place = tuple[bytes, int]
"""A writer's key, and the number of a page."""


@dataclass(frozen=True)
class Kept:
    """What is known of a page without reading it."""

    digest: bytes
    bytes: int
    newness: tuple[int, int]


class Shelf:
    """Invariant: `_kept` has what the folder has. For any thread; putting alone changes it, one at
    a time, and the others look at a copy."""

    def __init__(self, folder: Path, run: str, own: bytes) -> None:
        self._folder, self._run, self._own = folder, run, own
        self._kept: dict[Place, Kept] = {}
        self._met: set[bytes] = {own}  # who was in a step with us
        self._putting = threading.Lock()
        self._load()

    def has(self, listed: Listed) -> bool:
        """Whether nobody else needs to be asked for it: our own pages only we can have."""
        if listed.key == self._own:
            return True
        kept = self._kept.get((listed.key, listed.number))
        return kept is not None and kept.digest == listed.digest

    def listed(self) -> tuple[Listed, ...]:
        """What can be had here: our own pages, then the others', of each the newest first."""
        places = sorted(self._kept.copy().items(), key=lambda one: (-one[0][1], one[0][0]))
        places.sort(key=lambda one: one[0][0] != self._own)
        return tuple(
            Listed(key, number, kept.digest) for (key, number), kept in places[:MOST_LISTED]
        )

    def own_pages(self, count: int) -> list[Page]:
        """Our own newest ones, the oldest first."""
        numbers = sorted(number for key, number in self._kept.copy() if key == self._own)
        return [page for _, page in self._pages((self._own, one) for one in numbers[-count:])]

    def pages(self) -> list[tuple[PeerId, Page]]:
        """All of them."""
        return list(self._pages(sorted(self._kept.copy())))

    def read(self, key: bytes, number: int) -> bytes:
        """A page as its writer signed it; empty if there is none."""
        if (key, number) not in self._kept:
            return b""
        with contextlib.suppress(UnusableFile):
            return read_private_file(self._file(key, number), LARGEST_PAGE_BYTES) or b""
        return b""

    def put_own(self, data: bytes) -> bool:
        """Keep our own page as it is now: what we have said last counts, also if it is less."""
        return self._put(data, is_ours=True)

    def put(self, data: bytes) -> bool:
        """Keep a page that somebody gave us, if it is newer than the version that is here, and not
        our own; whether it is kept.

        WrongPage if it is none; OSError as the system says it.
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
            for draft in self._folder.glob(f".*{SUFFIX}.*"):  # of a process that was killed
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
        self._kept[place] = Kept(page_digest(data), len(data), _newness(page))
        if place[0] == self._own:
            self._met.update(page.members)

    def _pages(self, places: Iterable[Place]) -> Iterator[tuple[PeerId, Page]]:
        for key, number in places:
            with contextlib.suppress(WrongPage):
                yield read_page(self.read(key, number), self._run)

    def _make_room(self) -> None:
        """Let go of the oldest page of whoever takes most; of our own only beyond our part."""
        held: Counter[bytes] = Counter()
        for (key, _), kept in self._kept.items():
            held[key] += kept.bytes
        while held.total() > LARGEST_SHELF_BYTES or len(self._kept) > MOST_LISTED:
            largest = max(held, key=lambda key: (self._weight(key, held[key]), key))
            number = min(number for key, number in self._kept if key == largest)
            held[largest] -= self._kept.pop((largest, number)).bytes
            held = +held  # without those who hold nothing any more
            with contextlib.suppress(OSError):
                self._file(largest, number).unlink()

    def _weight(self, key: bytes, held: int) -> tuple[bool, int]:
        is_within = key == self._own and held <= LARGEST_OWN_BYTES
        return key not in self._met, 0 if is_within else held

    def _file(self, key: bytes, number: int) -> Path:
        return self._folder / f"{peer_id_of(key)}-{number:019d}{SUFFIX}"


def _newness(page: Page) -> tuple[int, int]:
    """Of two versions the one with the later step is newer; of as late ones, the longer."""
    return max((line.moment for line in page.lines), default=0), len(page.lines)
