"""Credit at a node that takes part: it writes its record, serves it, and adds up what others have.

    terms = Terms("poem/ORGANISER", batch=2048, steps=0)
    async with open_credit(node, session, terms, keeps=True): ...            # while it trains

Every peer writes down the steps that it was in, signs that every few seconds, and gives it to
whoever asks; when it leaves, to the keepers of the run's checkpoints. Those collect the records of
all (collecting.py), for the time after they have left. Anybody adds up the same pages to the same
result (tally.py), so nobody needs to believe a keeper (checking.py).

Promises: nothing here holds the training up, and a disk that is full costs the record, not the
training. It ends with the block, with the last steps written, and half a second after it at most.

Easy to get wrong: our own page has to be on the shelf before anybody adds up, or is asked for it.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import trio

from auth.keyring import Keyring
from node.control import Answering
from node.credit.board import Board, board_of
from node.credit.book import PAGES_HELD, Book
from node.credit.checking import Check, Checking
from node.credit.collecting import Collector
from node.credit.gathering import gather
from node.credit.people import person_of, persons_of, records_of
from node.credit.shelf import Shelf
from node.credit.summing import sums_of
from node.credit.tally import tally
from node.node import Node
from node.trainer.happenings import Happening
from node.trainer.session import Session
from node.trainer.view import PeerView
from protocols.accumulation.events import CaughtUp, SeenStep, StepTaken
from protocols.accumulation.share import MOST_BATCHES, Share
from protocols.blocking import in_thread
from protocols.credit.messages import (
    CONTENTS,
    OFFER,
    PAGE,
    SUMS,
    Contents,
    ContentsRequest,
    OfferRequest,
    PageRequest,
    PageResponse,
    Sums,
)
from protocols.credit.record import Page, page_number, read_page, sign_page
from protocols.errors import PotluckError
from protocols.guard import Caller
from protocols.identity import PeerId

LEADERBOARD: Final = "trainer leaderboard"

WRITE_SECONDS = 5.0  # how much of the record a kill may cost
PAGES_HANDED_OVER = 2  # a keeper collects every minute: what it lacks is on the newest ones
LEAVING_SECONDS = 0.5  # of the five in which a peer has left
MOST_KEEPERS = 8  # of a run; it has one or two

_log = logging.getLogger("potluck.credit")


@dataclass(frozen=True)
class Terms:
    """Of a run: its name and its organiser's fingerprint, the samples of a step (with local steps
    of all of them), and how many steps it has (0: without an end)."""

    run: str
    batch: int
    steps: int

    @property
    def most_samples(self) -> int:
        """That one peer is credited for one step."""
        return MOST_BATCHES * self.batch


@asynccontextmanager
async def open_credit(
    node: Node, session: Session, terms: Terms, *, keeps: bool
) -> AsyncIterator[None]:
    """Keep this peer's record until the block ends; the others', too, if it `keeps`. Once in a
    node's life."""
    credit = await in_thread(Credit, node, session, terms, keeps)
    session.follow(credit.take)
    node.rpc.serve(CONTENTS, credit.contents)
    node.rpc.serve(PAGE, credit.page)
    node.control.add(LEADERBOARD, credit.answer)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(credit.write_on)
            if keeps:
                collector = credit.collector()
                session.follow(collector.take)
                node.rpc.serve(OFFER, collector.offer)
                node.rpc.serve(SUMS, collector.sums)
                nursery.start_soon(collector.collect_on)
            yield
            nursery.cancel_scope.cancel()
        await credit.leave()
    finally:
        credit.write()


def shelf_folder(credit_folder: Path, run: str) -> Path:
    """Where the pages of a run lie. Named by a hash: a run's name may be long, and has any
    letters."""
    name = hashlib.blake2b(run.encode(), digest_size=16).hexdigest()
    return credit_folder / name


class Credit:
    """The record of one run on this node."""

    def __init__(self, node: Node, session: Session, terms: Terms, keeps: bool) -> None:
        self._node, self._session, self._keeps = node, session, keeps
        self._terms, self._run = terms, terms.run
        run, self._identity = terms.run, node.network.identity
        folder = shelf_folder(node.configuration.places.credit_folder, run)
        self._shelf = Shelf(folder, run, self._identity.public_key)
        self._book = Book(run, self._identity.public_key)
        for page in self._shelf.own_pages(PAGES_HELD):
            self._book.restore(page)
        self._noting, self._writing = threading.Lock(), threading.Lock()
        self._gathering = trio.Lock()
        self._has_failed = False
        self._company: tuple[PeerView, ...] = ()  # at the last step

    def take(self, happening: Happening) -> None:
        """A step was made: write down who brought what. Also one that this peer has taken over from
        others, if it was in the round: else steps of two would have nobody to tell of them."""
        if isinstance(happening, CaughtUp):
            with self._noting:
                if not happening.leads_on:
                    self._book.gave_up_alone()
                for seen in happening.seen:
                    self._note(seen, seen.shares)
        if isinstance(happening, StepTaken):
            shares = happening.shares
            if not happening.members:  # it was made alone
                shares = (Share(self._identity.peer_id, happening.own_samples),)
            with self._noting:
                self._note(happening, shares, over_a_grid=happening.over_a_grid)
            self._company = self._session.view().peers

    def _note(
        self, step: StepTaken | SeenStep, shares: tuple[Share, ...], *, over_a_grid: bool = False
    ) -> None:
        self._book.note(
            step.epoch,
            step.history,
            shares,
            moment=int(self._node.network.wall_time()),
            of_samples=step.samples,
            over_a_grid=over_a_grid,
        )

    # -- writing

    async def write_on(self) -> None:
        """Write what is new every few seconds, for ever."""
        while True:
            await trio.sleep(WRITE_SECONDS)
            await in_thread(self.write)

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
            self._shelf.put_own(sign_page(self._identity, page))
        except (PotluckError, OSError) as error:
            if not self._has_failed:
                why = getattr(error, "strerror", None) or error
                _log.warning("this peer's record of what it gave cannot be kept: %s", why)
            self._has_failed = True

    # -- giving it to others

    async def contents(self, _caller: Caller, request: ContentsRequest) -> Contents:
        if request.run != self._run:
            return Contents()
        await self._write_what_is_new()
        return Contents(self._shelf.listed())

    async def page(self, _caller: Caller, request: PageRequest) -> PageResponse:
        if request.run != self._run:
            return PageResponse()
        data = await in_thread(self._shelf.read, request.key, request.number)
        return PageResponse(data)

    async def leave(self) -> None:
        """This peer leaves: its newest pages go to the keepers that are there; and one that keeps
        the records of all takes a last look at them."""
        link = self._node.network.link
        here = [one for one in self._company if link(PeerId(one.peer)) is not None]
        keepers = [PeerId(one.peer) for one in here if one.keeps]
        with trio.move_on_after(LEAVING_SECONDS):
            await self._write_what_is_new()
            async with trio.open_nursery() as nursery:
                for keeper in keepers[:MOST_KEEPERS]:
                    nursery.start_soon(self._offer_to, keeper)
                if self._keeps:
                    nursery.start_soon(self._gather_from, [PeerId(one.peer) for one in here])

    async def _offer_to(self, keeper: PeerId) -> None:
        key = self._identity.public_key
        for number in sorted(self._book.numbers, reverse=True)[:PAGES_HANDED_OVER]:
            data = self._shelf.read(key, number)
            request = OfferRequest(self._run, data)
            with suppress(PotluckError):  # it has the rest of the record, or it is gone itself
                await self._node.rpc.call(keeper, OFFER, request, timeout=LEAVING_SECONDS)

    def _keepers_here(self) -> tuple[PeerId, ...]:
        peers = self._session.view().peers
        return tuple(PeerId(one.peer) for one in peers if one.keeps)[:MOST_KEEPERS]

    async def _write_what_is_new(self) -> None:
        if self._book.has_changed:
            await in_thread(self.write)

    # -- adding up

    def collector(self) -> Collector:
        """For a keeper."""
        return Collector(
            self._run,
            self.shelve,
            self._gather,
            self._sums,
            lambda: self._newest_epoch,
            self._session.happened,
            steps=self._terms.steps,
        )

    async def answer(self, arguments: Mapping[str, Any], answer: Answering) -> None:
        """The leaderboard, for the owner of this node; with `check`, the keepers' sums compared
        with the records."""
        asked, unheard = await self._gather()
        checks = (
            await self._checking().check(self._keepers_here()) if arguments.get("check") else ()
        )
        await answer(await in_thread(self._add_up, asked, unheard, checks))

    async def _gather(self, only: Collection[PeerId] = ()) -> tuple[int, dict[PeerId, str]]:
        """Take what these have, or all who are there."""
        peers = [PeerId(one.peer) for one in self._session.view().peers]
        return await self._gather_from([one for one in peers if not only or one in only])

    async def _gather_from(self, peers: list[PeerId]) -> tuple[int, dict[PeerId, str]]:
        async with self._gathering:
            await self._write_what_is_new()
            newest = page_number(max(self._newest_epoch, 0))
            unheard = await gather(
                self._node.rpc, peers, self._run, self._shelf, self._keep, newest_page=newest
            )
        return len(peers), unheard

    async def _keep(self, data: bytes) -> bool:
        return await in_thread(self.shelve, data)

    def shelve(self, data: bytes) -> bool:
        """Keep somebody's page, if that is somebody of this run. WrongPage if it is no page."""
        peer, page = read_page(data, self._run)
        return bool(person_of(self._keyring, peer, page)) and self._shelf.put(data)

    def _checking(self) -> Checking:
        return Checking(
            self._node.rpc,
            self._run,
            self._shelf,
            self._keep,
            self._keyring,
            self._terms.most_samples,
            self._until_made,
        )

    async def _until_made(self, epoch: int) -> None:
        while self._newest_epoch < epoch:
            await self._session.news()

    def _sums(self) -> Sums:
        """What the records here come to, for others. Blocks."""
        if self._book.has_changed:
            self.write()
        return sums_of(
            self._keyring,
            self._shelf.pages(),
            steps=self._newest_epoch + 1,
            most_samples=self._terms.most_samples,
            seen_by=self._identity.peer_id,
        )

    def _add_up(self, asked: int, unheard: dict[PeerId, str], checks: tuple[Check, ...]) -> Board:
        member, me = self._node.membership, self._identity.peer_id
        records = records_of(self._keyring, self._shelf.pages())
        persons = persons_of(records, None if member is None else member.access.shown_by)
        standings = tally(
            records,
            persons,
            newest_epoch=self._newest_epoch,
            most_samples=self._terms.most_samples,
            seen_by=me,
        )
        return board_of(
            self._session.run,
            self._newest_epoch + 1,
            standings,
            mine=persons.get(me, me),
            records=len({record.peer for record in records}),
            seen_steps=sum(len(record.page.lines) for record in records if record.peer == me),
            asked=asked,
            unheard={str(peer): why for peer, why in unheard.items()},
            keeps=self._keeps,
            checks=checks,
            names={
                me: self._session.name,
                **{PeerId(one.peer): one.said_name for one in self._session.view().peers},
            },
        )

    @property
    def _keyring(self) -> Keyring | None:
        member = self._node.membership
        return None if member is None else member.keyring

    @property
    def _newest_epoch(self) -> int:
        """The last one that can have been made, as far as this peer knows."""
        return self._session.account.epoch - 1
