"""Checking a keeper's sums: the records that they name are had, and added up once more.

    for check in await Checking(rpc, run, shelf, put, keyring, ...).check(keepers):
        check.agrees

Nobody is believed for it: not the keeper, whose sums are compared with what their writers have
signed, and not whoever handed a page on. A keeper that left records out is found by the pages that
are here and not among its own.

Easy to get wrong: a keeper takes its own lines for what it saw (tally.py), and so must whoever
checks it. Sums made with other eyes differ, and nobody has lied.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Final

import msgspec
import trio

from auth.keyring import Keyring
from node.credit.gathering import BYTES_IN_ALL, Put, fetch_page
from node.credit.shelf import Shelf
from node.credit.summing import added_up_again, differences, missing, not_used
from protocols.blocking import in_thread
from protocols.credit.messages import SUMS, Sums, SumsRequest
from protocols.credit.record import Page, read_page
from protocols.errors import PotluckError
from protocols.identity import PeerId
from protocols.rpc import Rpc

CHECK_SECONDS: Final = 15.0  # of one keeper: somebody waits for the answer
SUMS_SECONDS: Final = 10.0  # a long run's sums are 200 KiB, and may have to be made first
MOST_CHECKED: Final = 8  # keepers; a run has one or two


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """Of one keeper. `trouble`: why it could not be checked. `differences`: what it says otherwise
    than the records. `without`: pages that it said it had added up and could not show;
    `left_out`: pages that are here and that it has not (yet) added up."""

    keeper: str
    steps: int = 0
    people: int = 0
    pages: int = 0
    differences: tuple[str, ...] = ()
    without: int = 0
    left_out: int = 0
    trouble: str = ""

    @property
    def agrees(self) -> bool:
        return not (self.trouble or self.differences or self.without)


@dataclass(frozen=True)
class Checking:
    """By whom, and with what. `until_made`: that this peer knows of the step of an epoch."""

    rpc: Rpc
    run: str
    shelf: Shelf
    put: Put
    keyring: Keyring | None
    most_samples: int
    until_made: Callable[[int], Awaitable[None]]

    async def check(self, keepers: Iterable[PeerId]) -> tuple[Check, ...]:
        """Each of them, in order; those that keep no records are not among the answers."""
        found = []
        for keeper in list(keepers)[:MOST_CHECKED]:
            checked = await self._check(keeper)
            if checked is not None:
                found.append(checked)
        return tuple(found)

    async def _check(self, keeper: PeerId) -> Check | None:
        trouble = "It did not answer in time."
        with trio.move_on_after(CHECK_SECONDS):
            try:
                request = SumsRequest(self.run)
                sums = await self.rpc.call(keeper, SUMS, request, timeout=SUMS_SECONDS)
                if not sums.used and not sums.sums:
                    return None
                trouble = (
                    f"It has added up {sums.steps:,} steps, and so many have not been made as far "
                    "as this peer knows."
                )
                await self.until_made(sums.steps - 1)
                trouble = "The records that it has added up could not be had in time."
                had = await self._have(keeper, sums)
                return await in_thread(self._compare, keeper, sums, had)
            except (PotluckError, OSError) as error:
                trouble = error.what if isinstance(error, PotluckError) else str(error)
        return Check(keeper=keeper, trouble=trouble)

    async def _have(self, keeper: PeerId, sums: Sums) -> list[tuple[PeerId, Page]]:
        """The pages that are not here as far as the keeper has them; kept here as well, but for our
        own, of which we may have lost some."""
        left, had = BYTES_IN_ALL, []
        for used in await in_thread(lambda: missing(sums, self.shelf.pages())):
            if left <= 0:
                break
            data = await fetch_page(self.rpc, keeper, self.run, used.key, used.number)
            left -= len(data)
            if data:
                await self.put(data)
                had.append(read_page(data, self.run))
        return had

    def _compare(self, keeper: PeerId, sums: Sums, had: list[tuple[PeerId, Page]]) -> Check:
        """Blocks while signatures are verified."""
        newest = {(peer, page.number): page for peer, page in [*self.shelf.pages(), *had]}
        pages = [(peer, page) for (peer, _), page in newest.items()]
        found = added_up_again(
            sums, self.keyring, pages, most_samples=self.most_samples, seen_by=keeper
        )
        lacking = missing(sums, pages)
        return Check(
            keeper=keeper,
            steps=sums.steps,
            people=len(sums.sums),
            pages=len(sums.used),
            differences=() if lacking else differences(sums, found),
            without=len(lacking),
            left_out=not_used(sums, pages),
        )
