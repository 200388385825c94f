"""Going on from a state by the results of the steps that the run has made since.

    following = Following(account, wanted, start, choice_now)
    nursery.start_soon(following.run)                   # beside the download of the state
    await following.caught_up()                         # following.results lead to where the run is

The state of an epoch takes longer to come than the run stays in that epoch, on many links. What a
step was made of is several times smaller than a state, and with it this peer makes the step itself,
to the same bit. So it gets in if a result comes in less time than the run needs for a step, which
it must be able to in any case if it wants to take part in rounds.

Promises: no byte is taken before it is known that the way leads to where most up-to-date peers say
they are: a history is a hash over the one before and the digest of the result, and the donor tells
the digests of all results that follow. Each part is checked as it comes, and a liar is named. At
most `room_bytes` are held; when these are full, it ends there: whoever has made steps of them goes
on with another one.

Easy to get wrong: the others' slots are seconds old. A donor may be further than any slot says, and
then its way cannot be checked yet; that is no lie.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import trio

from protocols.accumulation.committed_result import (
    CommittedResult,
    ResultLayouts,
    encoded_bytes,
    lineage_after,
    proven_digest,
)
from protocols.accumulation.forks import Lineage
from protocols.accumulation.state_account import Account, Lied, next_chunk_bytes
from protocols.accumulation.state_messages import (
    RESULT,
    ResultAccepted,
    ResultOpening,
    StateGone,
)
from protocols.accumulation.state_sources import Choice, StateSource
from protocols.bulk import Transfer
from protocols.errors import PotluckError
from protocols.identity import PeerId
from protocols.messages import Empty
from protocols.moshpit.layout import SMALLEST_CHUNK_BYTES
from protocols.moshpit.result_cut import PartCut, PartHash, ResultCut

log = logging.getLogger("potluck.state")

LOOK_SECONDS = 0.1  # how often the others' epochs are looked at, as they are known here
REFUSED_SECONDS = 0.5  # before those who do not have what follows are asked again
OPEN_SECONDS = 20.0
MOST_ASKED = 8  # sources for one result: those that a newcomer downloads from are among the first
LINEAGES_REMEMBERED = 64

LOST_SECONDS = 6.0
"""When all sources have said for so long that they do not have what follows, nobody will: slots are
written at least so often, so by then they say where their peers really are."""

ResultTransfer = Transfer[ResultAccepted, Empty, Empty]


class _NotYet(PotluckError):
    """A donor's way cannot be checked, as the slots are now."""


@dataclass(frozen=True)
class FollowWanted:
    """What is followed. `room_bytes`: of results, at most."""

    run: str
    layouts: ResultLayouts
    room_bytes: int


class Following:
    """Invariant: `results` lead from the start to `end`, each checked to the last byte."""

    def __init__(
        self,
        account: Account,
        wanted: FollowWanted,
        start: Lineage,
        choice_now: Callable[[], Choice | None],
    ) -> None:
        """`choice_now` is where most of the up-to-date peers are, and who they are."""
        self.results: list[CommittedResult] = []
        self.end = start
        self.is_lost = False
        """Nobody has what follows, or there is no room for any of it."""
        self.is_full = False
        """There is no room for the next result beside those that are here."""
        self._account, self._wanted, self._choice_now = account, wanted, choice_now
        self._seen: deque[Lineage] = deque(maxlen=LINEAGES_REMEMBERED)
        self._changed = trio.Event()
        self._all_without = False
        self._without_since = trio.current_time()

    @property
    def bytes(self) -> int:
        return sum(len(one.memory) for one in self.results)

    @property
    def is_there(self) -> bool:
        """Whether nothing is known of the run that is further."""
        choice = self._look()
        return choice is None or not self._leads_on(choice)

    async def run(self) -> None:
        """Take what follows, as it comes about, until cancelled, lost or full."""
        while not self.is_lost and not self.is_full:
            choice = self._look()
            self._all_without = False
            if choice is not None and self._leads_on(choice) and await self._take_next(choice):
                self._tell_changed()
                continue
            now = trio.current_time()
            if not self._all_without:
                self._without_since = now
            if now - self._without_since > LOST_SECONDS or self._account.failure() is not None:
                self.is_lost = True
                break
            await trio.sleep(REFUSED_SECONDS if self._all_without else LOOK_SECONDS)
        self._tell_changed()

    async def caught_up(self) -> bool:
        """Wait until the end is where the run is, or no more can be held; False if what is here is
        of no use."""
        while not self.is_there and not self.is_lost and not self.is_full:
            with trio.move_on_after(LOOK_SECONDS):
                await self._changed.wait()
        return not self.is_lost

    async def once(self) -> bool:
        """The same from now on, without waiting for what is not there: whether the start is on the
        run's way at all."""
        while not self.is_there and not self.is_full:
            choice = self._look()
            if choice is None or not (await self._take_next(choice) or self.is_full):
                return False
        return bool(self.results)

    # -- one result

    async def _take_next(self, choice: Choice) -> bool:
        """The result that leads on from the end, from the first source that has it."""
        sources = self._account.paces.ordered(choice.sources)
        self._all_without = True
        for source in sources[:MOST_ASKED]:
            if await self._take_from(source):
                return True
            if self.is_full:
                break
        return False

    async def _take_from(self, source: StateSource) -> bool:
        paces, began = self._account.paces, trio.current_time()
        try:
            with self._account.wanting():
                result = await self._receive(source.peer)
        except StateGone as error:
            log.debug("%s: %s", source.peer, error.what)
            return False
        except _NotYet as error:
            log.debug("%s: %s", source.peer, error.what)
        except Lied as error:
            self._account.lied(source.peer, error)
        except PotluckError as error:
            self._account.gives_up(source.peer, error.what)
            paces.failed(source.peer)
        else:
            if result is not None:
                self.results.append(result)
                self.end = result.after
                paces.sent(source.peer, len(result.memory), trio.current_time() - began)
                return True
        self._all_without = False
        return False

    async def _receive(self, peer: PeerId) -> CommittedResult | None:
        """None where there is no room for it."""
        opening = ResultOpening(self._wanted.run, self.end.epoch, self.end.history)
        transfer: ResultTransfer
        async with self._account.rpc.open_bulk(
            peer, RESULT, opening, timeout=OPEN_SECONDS
        ) as transfer:
            said = transfer.accepted
            self._check_way(said)
            cut = self._checked_cut(said)
            layout = self._wanted.layouts.of(said.links[0].kind)
            size = encoded_bytes(layout, cut)
            if self.bytes + size > self._wanted.room_bytes:
                self.is_full, self.is_lost = True, not self.results
                return None
            memory = memoryview(bytearray(size))
            await self._receive_parts(peer, transfer, cut, memory)
            await transfer.finish(Empty())
        first = said.links[0]
        return CommittedResult(self.end, first.kind, first.digest, cut, said.nonce, memory)

    def _check_way(self, said: ResultAccepted) -> None:
        """That it leads to where most of the others say they are, or have said since we began."""
        place = self.end
        for link in said.links:
            place = lineage_after(place, link.kind, link.digest)
            if place in self._seen:
                return
        raise _NotYet(f"Its way to epoch {place.epoch} is not one that others claim by now.")

    def _checked_cut(self, said: ResultAccepted) -> ResultCut:
        first = said.links[0]
        cut = ResultCut(
            tuple(PartCut(one.reducer, one.start, one.stop) for one in said.parts),
            said.chunk_bytes,
        )
        if cut.chunk_bytes < SMALLEST_CHUNK_BYTES or not cut.covers(
            self._wanted.layouts.of(first.kind)
        ):
            raise Lied("It offers a result that is cut otherwise than any of this run.")
        digests = {one.reducer: one.digest for one in said.parts}
        if proven_digest(first.kind, said.nonce, digests) != first.digest:
            raise Lied("It offers a result with parts that are not those of its digest.")
        return cut

    async def _receive_parts(
        self, peer: PeerId, transfer: ResultTransfer, cut: ResultCut, memory: memoryview
    ) -> None:
        layout, end = self._wanted.layouts.of(transfer.accepted.links[0].kind), 0
        for part, said in zip(cut.parts, transfer.accepted.parts, strict=True):
            digest = PartHash()
            for chunk in part.chunks(layout, cut.chunk_bytes):
                place = memory[end : end + chunk.encoded_bytes]
                await self._receive_chunk(transfer, place)
                self._account.came(peer, len(place))
                digest.add(place)
                end += len(place)
            if digest.digest != said.digest:
                raise Lied("A part of a result came with other bytes than it has.")

    async def _receive_chunk(self, transfer: ResultTransfer, place: memoryview) -> None:
        size = await next_chunk_bytes(transfer, self._account.settings.patience_seconds)
        if size != len(place):
            raise Lied("It sent another number of bytes for a chunk of a result than it has.")
        await transfer.receive_chunk_into(place)

    # -- where the run is

    def _look(self) -> Choice | None:
        choice = self._choice_now()
        if choice is not None:
            place = Lineage(choice.epoch, choice.history)
            if place not in self._seen:
                self._seen.append(place)
        return choice

    def _leads_on(self, choice: Choice) -> bool:
        """Whether the run is further than our end. At the same epoch its parameters may have been
        averaged; a choice that we have been past is an old slot."""
        if choice.epoch != self.end.epoch:
            return choice.epoch > self.end.epoch
        passed = {one.before for one in self.results} | {self.end}
        return Lineage(choice.epoch, choice.history) not in passed

    def _tell_changed(self) -> None:
        self._changed.set()
        self._changed = trio.Event()
