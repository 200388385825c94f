"""Credit at a node that takes part: it writes its record, serves it, and adds up what others have.

    async with open_credit(node, session, "poem/ORGANISER", collects=True): ...   # while it trains

Every peer writes down the steps that it was in, signs that every few seconds, and gives it to
whoever asks. A keeper of the run's checkpoints also collects the records of the others every
minute, for the time after they have left. Anybody adds up the same pages to the same result
(tally.py), so nobody needs to believe a keeper.

Promises: nothing here holds the training up, and a disk that is full costs the record, not the
training. It ends with the block, with the last steps written.

Easy to get wrong: our own page has to be on the shelf before anybody adds up, or is asked for it.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import trio

from node.control import Answering
from node.credit.board import Board, board_of
from node.credit.book import PAGES_HELD, Book
from node.credit.gathering import gather
from node.credit.people import persons_of, records_of
from node.credit.shelf import Shelf
from node.credit.tally import tally
from node.node import Node
from node.trainer.happenings import Happening
from node.trainer.session import Session
from protocols.accumulation.events import StepTaken
from protocols.credit.messages import (
    CONTENTS,
    PAGE,
    Contents,
    ContentsRequest,
    PageRequest,
    PageResponse,
)
from protocols.credit.record import Page, page_number, sign_page
from protocols.errors import PotluckError
from protocols.guard import Caller
from protocols.identity import PeerId

LEADERBOARD: Final = "trainer leaderboard"

WRITE_SECONDS = 5.0  # how much of the record a kill may cost
COLLECT_SECONDS = 60.0  # between two collections of a keeper

_log = logging.getLogger("potluck.credit")


@asynccontextmanager
async def open_credit(
    node: Node, session: Session, run: str, *, collects: bool
) -> AsyncIterator[None]:
    """Keep this peer's record until the block ends. Once in a node's life."""
    credit = await trio.to_thread.run_sync(Credit, node, session, run)
    session.follow(credit.take)
    node.rpc.serve(CONTENTS, credit.contents)
    node.rpc.serve(PAGE, credit.page)
    node.control.add(LEADERBOARD, credit.answer)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(credit.write_on)
            if collects:
                nursery.start_soon(credit.collect_on)
            yield
            nursery.cancel_scope.cancel()
    finally:
        credit.write()


def _nobody(_peer: PeerId) -> None:
    """What peers show of themselves in an open run."""


def shelf_folder(credit_folder: Path, run: str) -> Path:
    """Where the pages of a run lie. Named by a hash: a run's name may be long, and has any
    letters."""
    name = hashlib.blake2b(run.encode(), digest_size=16).hexdigest()
    return credit_folder / name


class Credit:
    """The record of one run on this node."""

    def __init__(self, node: Node, session: Session, run: str) -> None:
        self._node, self._session, self._run = node, session, run
        self._identity = node.network.identity
        folder = shelf_folder(node.configuration.places.credit_folder, run)
        self._shelf = Shelf(folder, run, self._identity.public_key)
        self._book = Book(run, self._identity.public_key)
        for page in self._shelf.own_pages(PAGES_HELD):
            self._book.restore(page)
        self._noting, self._writing = threading.Lock(), threading.Lock()
        self._gathering = trio.Lock()
        self._has_failed = False

    def take(self, happening: Happening) -> None:
        """A step was made: write down who brought what."""
        if isinstance(happening, StepTaken) and happening.shares:
            with self._noting:
                self._book.note(
                    happening.epoch,
                    happening.history,
                    happening.shares,
                    moment=int(self._node.network.wall_time()),
                    of_samples=happening.samples,
                    over_a_grid=happening.over_a_grid,
                )

    # -- writing

    async def write_on(self) -> None:
        """Write what is new every few seconds, for ever."""
        while True:
            await trio.sleep(WRITE_SECONDS)
            await trio.to_thread.run_sync(self.write)

    def write(self) -> None:
        """Sign what is new, and put it on the shelf. Blocks for some milliseconds."""
        member = self._node.membership
        token = b"" if member is None else member.access.token or b""
        with self._writing:
            with self._noting:
                pages = [self._book.page(number, token) for number in self._book.take_changed()]
            for page in pages:
                self._put(page)

    def _put(self, page: Page) -> None:
        try:
            self._shelf.put(sign_page(self._identity, page))
        except (PotluckError, OSError) as error:
            if not self._has_failed:
                _log.warning("this peer's record of what it gave cannot be kept: %s", error)
            self._has_failed = True

    # -- giving it to others

    def contents(self, _caller: Caller, request: ContentsRequest) -> Contents:
        return Contents(self._shelf.listed()) if request.run == self._run else Contents()

    async def page(self, _caller: Caller, request: PageRequest) -> PageResponse:
        if request.run != self._run:
            return PageResponse()
        data = await trio.to_thread.run_sync(self._shelf.read, request.key, request.number)
        return PageResponse(data)

    # -- adding up

    async def collect_on(self) -> None:
        """Keep the records of all, for the time after they have left."""
        while True:
            await trio.sleep(COLLECT_SECONDS)
            await self._gather()

    async def answer(self, _arguments: Mapping[str, Any], answer: Answering) -> None:
        """The leaderboard, for the owner of this node."""
        asked, unheard = await self._gather()
        await answer(await trio.to_thread.run_sync(self._add_up, asked, unheard))

    async def _gather(self) -> tuple[int, dict[PeerId, str]]:
        peers = [PeerId(one.peer) for one in self._session.view().peers]
        async with self._gathering:
            await trio.to_thread.run_sync(self.write)
            newest = page_number(max(self._newest_epoch, 0))
            unheard = await gather(
                self._node.rpc, peers, self._run, self._shelf, self._keep, newest_page=newest
            )
        return len(peers), unheard

    async def _keep(self, data: bytes) -> None:
        await trio.to_thread.run_sync(self._shelf.put, data)

    def _add_up(self, asked: int, unheard: dict[PeerId, str]) -> Board:
        member = self._node.membership
        keyring = None if member is None else member.keyring
        records = records_of(keyring, self._shelf.pages())
        persons = persons_of(records, _nobody if member is None else member.access.shown_by)
        standings = tally(records, persons, newest_epoch=self._newest_epoch)
        return board_of(
            self._session.run,
            self._newest_epoch + 1,
            standings,
            mine=persons.get(self._identity.peer_id, self._identity.peer_id),
            records=len({record.peer for record in records}),
            asked=asked,
            unheard={str(peer): why for peer, why in unheard.items()},
        )

    @property
    def _newest_epoch(self) -> int:
        """The last one that can have been made, as far as this peer knows."""
        return self._session.account.epoch - 1
