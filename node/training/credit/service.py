"""Credit at a node that trains: it writes its record, serves it, and adds up the others'.

    terms = CreditTerms("poem/ORGANISER", batch=2048, steps=0)
    async with open_credit(node, session, terms, keeps=True): ...            # while it trains

Every peer records the steps that it took part in, signs the record every few seconds, and serves it
to any peer that asks. When it leaves, it hands it to the keepers of the run's checkpoints. A keeper
(`Collector`) collects all records, so that they outlast the peers: every minute, when the run is
complete, and soon after a peer's first step, since many stay only for minutes. Then it adds them
up, for `sums` and for the figures of `potluck backbone`. The same pages give every peer the same
result (tally.py), so nobody needs to believe a keeper (sums.py). `board_of` is the leaderboard as
it is shown and printed. Peers without samples have a table of their own: these helpers serve
experts, average for others, keep checkpoints or relay. They are ordered by the samples that their
experts computed, and then by the bytes that they averaged.

Promises: nothing here holds up training, and a full disk costs the record but not the training.
However many peers ask for sums, adding up takes no more than a twentieth of the time. It ends with
the block, with the last steps written, at most half a second later.

This peer's own page has to be on the shelf before it is added up or asked for. A peer may offer
only a page of its own; otherwise it could fill the shelf with old pages of others.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import trio

from auth.keyring import Keyring
from node.core.control import Answering
from node.core.node import Node
from node.core.training_view import RunPeerView
from node.training.credit.book import PAGES_HELD, Book
from node.training.credit.shelf import Shelf, gather
from node.training.credit.sums import Check, Checking, person_of, persons_of, records_of, sums_of
from node.training.credit.tally import PersonStanding, tally
from node.training.happenings import Happening, RecordsSummed
from node.training.session import TrainingSession
from protocols.accumulation.events import MOST_BATCHES, CaughtUp, SeenStep, Share, StepTaken
from protocols.blocking import in_thread
from protocols.credit.messages import (
    CONTENTS,
    OFFER,
    PAGE,
    SUMS,
    Contents,
    ContentsRequest,
    OfferRequest,
    OfferResponse,
    PageRequest,
    PageResponse,
    Sums,
    SumsRequest,
)
from protocols.credit.record import Page, WrongPage, page_number, read_page, sign_page
from protocols.errors import PotluckError
from protocols.guard import Caller
from protocols.identity import PeerId

MOST_SHOWN: Final = 500  # of each kind
MOST_UNHEARD_SHOWN: Final = 100


class Rank(msgspec.Struct, frozen=True, kw_only=True):
    rank: int
    person: str
    is_me: bool
    samples: int
    averaged_bytes: int
    steps: int
    service_seconds: float
    longest_seconds: float
    devices: int
    alone_samples: int = 0  # in steps that this person made alone, by their own records
    alone_steps: int = 0
    served_samples: int = 0  # of others, that its experts computed for them
    witnesses: int = 0  # other persons whose records have steps of this one
    confirming: int = 0  # those of them who say nowhere less than is credited
    name: str = ""  # the last one it gave itself here, cleaned
    peer: str = ""  # one of the person's devices


class Board(msgspec.Struct, frozen=True, kw_only=True):
    """`steps`: steps of the run; `seen_steps`: those that this peer took part in. `records`: how
    many peers' records were added up. `asked`: the peers that could be asked; `unheard`: those of
    them that did not answer, with the reason. `keeps`: whether this peer keeps everybody's records
    itself. `checks`: checks of the keepers' sums, if requested."""

    run: str
    steps: int
    people: tuple[Rank, ...]
    helpers: tuple[Rank, ...]
    records: int
    seen_steps: int
    asked: int
    unheard: dict[str, str]
    keeps: bool = False
    checks: tuple[Check, ...] = ()


def board_of(
    run: str,
    steps: int,
    standings: Iterable[PersonStanding],
    *,
    mine: str,
    records: int,
    seen_steps: int,
    asked: int,
    unheard: Mapping[str, str],
    keeps: bool = False,
    checks: tuple[Check, ...] = (),
    names: Mapping[PeerId, str] | None = None,
) -> Board:
    found = list(standings)
    helpers = [one for one in found if one.helps]
    helpers.sort(
        key=lambda one: (
            -one.served_samples,
            -one.averaged_bytes,
            -one.service_seconds,
            one.person,
        )
    )
    return Board(
        run=run,
        steps=steps,
        people=_ranked([one for one in found if not one.helps], mine, names or {}),
        helpers=_ranked(helpers, mine, names or {}),
        records=records,
        seen_steps=seen_steps,
        asked=asked,
        keeps=keeps,
        checks=checks,
        unheard=dict(sorted(unheard.items())[:MOST_UNHEARD_SHOWN]),
    )


def _ranked(
    standings: list[PersonStanding], mine: str, names: Mapping[PeerId, str]
) -> tuple[Rank, ...]:
    return tuple(
        Rank(
            rank=rank,
            person=one.person,
            is_me=one.person == mine,
            samples=one.samples,
            averaged_bytes=one.averaged_bytes,
            steps=one.steps,
            service_seconds=round(one.service_seconds, 3),
            longest_seconds=round(one.longest_seconds, 3),
            devices=len(one.devices),
            alone_samples=one.alone_samples,
            alone_steps=one.alone_steps,
            served_samples=one.served_samples,
            witnesses=one.witnesses,
            confirming=one.confirming,
            name=next((names[peer] for peer in one.devices if names.get(peer)), ""),
            peer=one.devices[0] if one.devices else "",
        )
        for rank, one in enumerate(standings[:MOST_SHOWN], start=1)
    )


COLLECT_SECONDS: Final = 60.0  # between two collections
SOON_SECONDS: Final = 5.0  # the least wait before a collection that newcomers cause
SUM_SECONDS: Final = 1.0  # how old sums may be
SUM_REST: Final = 20.0  # rest this many times as long as adding up took
OFFERS_AT_ONCE: Final = 4  # each is verified and written to the disk, in a thread
MOST_KNOWN: Final = 4096  # members seen; with more, the list begins anew


class Collector:
    """`shelve` keeps a page. `gather` collects the pages of these peers, or of all if none are
    named. `add_up` blocks for seconds in a long run. `steps`: of the whole run, 0 without an
    end."""

    def __init__(
        self,
        run: str,
        shelve: Callable[[bytes], bool],
        gather: Callable[[Collection[PeerId]], Awaitable[object]],
        add_up: Callable[[], Sums],
        newest_epoch: Callable[[], int],
        tell: Callable[[Happening], None],
        *,
        steps: int,
    ) -> None:
        self._run, self._shelve, self._steps = run, shelve, steps
        self._gather, self._add_up, self._tell = gather, add_up, tell
        self._newest_epoch = newest_epoch
        self._known: set[PeerId] = set()
        self._newcomers: set[PeerId] = set()
        self._came, self._completed = trio.Event(), trio.Event()
        self._adding_up, self._offers = trio.Lock(), trio.CapacityLimiter(OFFERS_AT_ONCE)
        self._sums, self._sums_until = Sums(), 0.0

    def take(self, happening: Happening) -> None:
        """Notice newcomers, and the end of the run, even if others made its last step."""
        match happening:
            case StepTaken(epoch=epoch, members=members):
                self._notice(members)
                at = epoch + 1
            case CaughtUp(epoch=at):
                pass
            case _:
                return
        if 0 < self._steps <= at:
            self._completed.set()

    def _notice(self, members: Collection[PeerId]) -> None:
        if len(self._known) > MOST_KNOWN:
            self._known.clear()
        newcomers = set(members) - self._known
        self._known |= newcomers
        self._newcomers |= newcomers
        if newcomers and len(members) > 1:
            self._came.set()

    async def collect_on(self) -> None:
        """Collect all records, so that they outlast the peers."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._collect_from_newcomers)
            nursery.start_soon(self._collect_at_the_end)
            while True:
                await trio.sleep(COLLECT_SECONDS)
                await self._collect(())

    async def _collect_from_newcomers(self) -> None:
        while True:
            await self._came.wait()
            self._came = trio.Event()
            newcomers, self._newcomers = self._newcomers, set()
            await self._collect(newcomers)
            await trio.sleep(SOON_SECONDS)

    async def _collect_at_the_end(self) -> None:
        await self._completed.wait()
        await self._collect(())

    async def _collect(self, peers: Collection[PeerId]) -> None:
        await self._gather(peers)
        await trio.sleep_until(self._sums_until)
        await self.newest_sums()

    async def offer(self, caller: Caller, request: OfferRequest) -> OfferResponse:
        """A peer leaves, and hands over its last page."""
        if request.run != self._run:
            return OfferResponse()
        async with self._offers:
            taken = await in_thread(self._put, caller.peer, request.data)
        return OfferResponse(taken)

    def _put(self, peer: PeerId, data: bytes) -> bool:
        writer, page = read_page(data, self._run)
        if writer != peer:
            raise WrongPage("It is not a page of the peer that offers it.")
        if page.number > page_number(max(self._newest_epoch(), 0)):
            raise WrongPage("It contains impossible steps.")
        return self._shelve(data)

    async def sums(self, _caller: Caller, request: SumsRequest) -> Sums:
        return await self.newest_sums() if request.run == self._run else Sums()

    async def newest_sums(self) -> Sums:
        """The sums of the records here, at most a moment old."""
        async with self._adding_up:
            began = trio.current_time()
            if began >= self._sums_until:
                self._sums = await in_thread(self._add_up)
                ended = trio.current_time()
                self._sums_until = ended + max(SUM_SECONDS, SUM_REST * (ended - began))
                self._tell(_told_of(self._sums))
            return self._sums


def _told_of(sums: Sums) -> RecordsSummed:
    return RecordsSummed(
        steps=sums.steps,
        samples=sum(one.samples for one in sums.sums),
        averaged_bytes=sum(one.averaged_bytes for one in sums.sums),
        people=sum(1 for one in sums.sums if one.samples),
        helpers=sum(1 for one in sums.sums if not one.samples),
        writers=len({one.key for one in sums.used}),
        pages=len(sums.used),
    )


LEADERBOARD: Final = "trainer leaderboard"

WRITE_SECONDS = 5.0  # seconds of the record that a kill may lose
PAGES_HANDED_OVER = 2  # a keeper collects every minute, so it lacks only the newest ones
LEAVING_SECONDS = 0.5  # of the five in which a peer has left
MOST_NAMES = 1000  # of peers that were here, as many as are shown
MOST_KEEPERS = 8  # of a run; it has one or two

_log = logging.getLogger("potluck.credit")


@dataclass(frozen=True)
class CreditTerms:
    """The run's name with its organiser's fingerprint, the samples of a step (with local steps, of
    all of them), and how many steps the run has (0: without an end)."""

    run: str
    batch: int
    steps: int

    @property
    def most_samples(self) -> int:
        """The most that one peer is credited for one step."""
        return MOST_BATCHES * self.batch


@asynccontextmanager
async def open_credit(
    node: Node, session: TrainingSession, terms: CreditTerms, *, keeps: bool
) -> AsyncIterator[None]:
    """Keep this peer's record until the block ends, and the others' if `keeps`. Once in a node's
    life."""
    credit = await in_thread(CreditService, node, session, terms, keeps)
    session.follow(credit.take)
    node.rpc.serve(CONTENTS, credit.contents)
    node.rpc.serve(PAGE, credit.page)
    node.control.add(LEADERBOARD, credit.answer)
    session.leaderboard = credit.board
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
        with trio.CancelScope(shield=True):
            await in_thread(credit.write)


def shelf_folder(credit_folder: Path, run: str) -> Path:
    """The folder for a run's pages. Its name is a hash, because a run's name may be long and have
    any letters."""
    name = hashlib.blake2b(run.encode(), digest_size=16).hexdigest()
    return credit_folder / name


class CreditService:
    """The record of one run on this node."""

    def __init__(
        self, node: Node, session: TrainingSession, terms: CreditTerms, keeps: bool
    ) -> None:
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
        self._company: tuple[RunPeerView, ...] = ()  # at the last step
        self._names: dict[PeerId, str] = {}  # the names that they gave themselves, the newest last

    def take(self, happening: Happening) -> None:
        """Record the shares of a step. This includes a step that this peer took over from others
        after taking part in its round; otherwise a step of two would have nobody else to confirm
        it."""
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
            for one in self._company:
                self._remember_name(PeerId(one.peer), one.said_name)

    def _remember_name(self, peer: PeerId, name: str) -> None:
        """For the leaderboard, which shows the name after the peer has left."""
        self._names.pop(peer, None)
        if name:
            self._names[peer] = name
        if len(self._names) > MOST_NAMES:
            del self._names[next(iter(self._names))]

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
            served=self._session.take_served_rows() if step.own_samples else {},
        )

    # -- writing

    async def write_on(self) -> None:
        """Write new steps every few seconds, forever."""
        while True:
            await trio.sleep(WRITE_SECONDS)
            await in_thread(self.write)

    def write(self) -> None:
        """Sign new steps and put them on the shelf. Blocks for some milliseconds."""
        member = self._node.membership
        token = b"" if member is None else member.access.token or b""
        with self._writing:
            with self._noting:
                pages = [self._book.page(number, token) for number in self._book.take_changed()]
            errors = [self._put(page) for page in pages]
            with self._noting:
                self._book.not_written(
                    page.number for page, error in zip(pages, errors, strict=True) if error
                )
            if pages:
                self._tell(next(filter(None, errors), None))

    def _put(self, page: Page) -> Exception | None:
        try:
            self._shelf.put_own(sign_page(self._identity, page))
        except (PotluckError, OSError) as error:
            return error
        return None

    def _tell(self, error: Exception | None) -> None:
        if error is not None and not self._has_failed:
            _log.warning(
                "This peer's record of its contribution cannot be kept: %s. It is tried again "
                "every %.0f seconds.",
                getattr(error, "strerror", None) or error,
                WRITE_SECONDS,
            )
        if error is None and self._has_failed:
            _log.info("this peer's record of its contribution is kept again")
        self._has_failed = error is not None

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
        """This peer leaves. Its newest pages go to the keepers that are there; a keeper collects
        everybody's records a last time."""
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
            with suppress(PotluckError):  # the keeper has the rest of the record, or is gone itself
                await self._node.rpc.call(keeper, OFFER, request, timeout=LEAVING_SECONDS)

    def _keepers_here(self) -> tuple[PeerId, ...]:
        peers = self._session.view().peers
        return tuple(PeerId(one.peer) for one in peers if one.keeps)[:MOST_KEEPERS]

    async def _write_what_is_new(self) -> None:
        if self._book.has_changed:
            await in_thread(self.write)

    # -- adding up

    def collector(self) -> Collector:
        """The collector, for a keeper."""
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
        await answer(await self.board(asked, unheard, checks))

    async def board(
        self,
        asked: int = 0,
        unheard: dict[PeerId, str] | None = None,
        checks: tuple[Check, ...] = (),
    ) -> Board:
        """The leaderboard, by the records that are here."""
        names = {
            self._identity.peer_id: self._session.name,
            **self._names,
            **{PeerId(one.peer): one.said_name for one in self._session.view().peers},
        }
        return await in_thread(self._add_up, asked, unheard or {}, checks, names)

    async def _gather(self, only: Collection[PeerId] = ()) -> tuple[int, dict[PeerId, str]]:
        """Fetch the pages of these peers, or of all that can be reached."""
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
        """Keep a page if its writer belongs to this run. WrongPage if it is no page."""
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
        """The sums of the records here, for others. Blocks."""
        if self._book.has_changed:
            self.write()
        return sums_of(
            self._keyring,
            self._shelf.pages(),
            steps=self._newest_epoch + 1,
            most_samples=self._terms.most_samples,
            seen_by=self._identity.peer_id,
        )

    def _add_up(
        self,
        asked: int,
        unheard: dict[PeerId, str],
        checks: tuple[Check, ...],
        names: dict[PeerId, str],
    ) -> Board:
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
            names=names,
        )

    @property
    def _keyring(self) -> Keyring | None:
        member = self._node.membership
        return None if member is None else member.keyring

    @property
    def _newest_epoch(self) -> int:
        """The last epoch that can have been made, as far as this peer knows."""
        return self._session.account.epoch - 1
