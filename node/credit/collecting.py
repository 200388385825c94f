"""What a keeper of the run's checkpoints does for the others' credit: it keeps their records too.

    collector = Collector(run, shelve, gather, add_up, newest_epoch, tell, steps=0)
    collector.take(happening)              # each thing that happens
    await collector.collect_on()           # for ever

Records are collected every minute, and when the run is complete; those of who is in a step for the
first time soon after it, since many stay for minutes. Who leaves offers its last page. They are
then added up, for whoever asks (`sums`) and for the figures of `potluck backbone`.

Promises: however many ask for sums, adding up takes no more than a twentieth of the time.

Easy to get wrong: a page that is offered is its writer's own, or somebody could fill the shelf with
others' pages of long ago.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from typing import Final

import trio

from node.trainer.happenings import Happening, RecordsSummed
from protocols.accumulation.events import CaughtUp, StepTaken
from protocols.blocking import in_thread
from protocols.credit.messages import OfferRequest, OfferResponse, Sums, SumsRequest
from protocols.credit.record import WrongPage, page_number, read_page
from protocols.guard import Caller
from protocols.identity import PeerId

COLLECT_SECONDS: Final = 60.0  # between two collections
SOON_SECONDS: Final = 5.0  # at least, where newcomers ask for one
SUM_SECONDS: Final = 1.0  # how old sums may be
SUM_REST: Final = 20.0  # times as long as adding up took it is not done again
OFFERS_AT_ONCE: Final = 4  # each is verified and written to the disk, in a thread
MOST_KNOWN: Final = 4096  # members that were seen; more begin anew


class Collector:
    """`shelve` keeps a page, and `gather` collects what these peers have, or all where nobody is
    named; `add_up` blocks for seconds in a long run. `steps`: of the whole run, 0 without an
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
        """Notice newcomers, and the end of the run, also where others made its last step."""
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
        """Keep the records of all, for the time after they have left."""
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
        """Somebody leaves, and gives us its last page."""
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
            raise WrongPage("It is of steps that nobody can have made.")
        return self._shelve(data)

    async def sums(self, _caller: Caller, request: SumsRequest) -> Sums:
        return await self.newest_sums() if request.run == self._run else Sums()

    async def newest_sums(self) -> Sums:
        """What the records here come to, or came to a moment ago."""
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
