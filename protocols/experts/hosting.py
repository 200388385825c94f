"""A server's life with its experts: which it takes, and what becomes of them.

    async with open_expert_host(rpc, directory, grids, make, folder, settings, tell) as host:
        host.hosted()                     # what it serves now
        await host.leave(seconds=4)       # withdraw, and hand the last copies over

A host begins with the experts that it had before, if nobody has taken them over, and then takes
free cells (allocation.py). It saves each expert every `checkpoint_seconds`, and sends the copy to
other servers (keepers.py). When a server dies, its slots in the directory expire, and its experts
are *orphans*: copies without a host. Every server with room looks for orphans every few seconds,
waits for a time that depends on the expert and on the server, looks again, and takes the expert
over from the newest copy. So mostly one server takes it; if two do, the one that has trained it
further keeps it, else the directory decides, and the other one stops.

Promises:

- An expert whose server dies is served again within a minute, if a server has room. It has lost at
  most the steps since its last copy was sent.
- No step is repeated and no copy is served before it was checked.
- An expert without a copy that can be used begins anew, with the weights that follow from the seed.
- If saving or sending fails, serving goes on, and the event says so.

Easy to get wrong: this server's own slots live on in the directory after a crash. A host that
starts again does not take them for another server.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final, Literal

import trio

from auth.bounded_map import BoundedMap
from protocols.blocking import in_thread
from protocols.errors import Busy, PotluckError
from protocols.experts.allocation import free_cells
from protocols.experts.client import ExpertClient
from protocols.experts.copies import (
    BrokenCopy,
    CopyStore,
    KeptCopy,
    WrongCopy,
    restore,
    take_snapshot,
)
from protocols.experts.directory import (
    CACHED_SECONDS,
    MOST_RECORDS,
    ExpertDirectory,
    in_order_of_claim,
)
from protocols.experts.grid import MOST_DIMENSIONS, ExpertGrid, Uid, WrongUid
from protocols.experts.keepers import (
    KEEPERS,
    LEAST_KEEPERS,
    MOST_SENDING_SHARE,
    MOST_TRIES,
    PUSHED_AT_ONCE,
    CopyKeeper,
    CopyOffer,
    Forms,
    ask_offers,
    fetch,
    keepers_of,
    push,
    rank,
)
from protocols.experts.messages import MOST_INFOS
from protocols.experts.runtime import ExpertBackend, Runtime, open_runtime
from protocols.experts.server import serve_experts
from protocols.identity import PeerId
from protocols.rpc import Rpc

log = logging.getLogger("potluck.experts")

CHECKPOINT_SECONDS: Final = 60.0
LARGEST_COPIES_BYTES: Final = 2 << 30

LOOK_SECONDS: Final = 8.0
"""How often a server with room looks for orphans and free cells. With the life of a slot (30 s),
the wait below and the time to fetch a copy, that is under a minute."""

SHORTEST_PAUSE_SECONDS: Final = 0.1  # between two decisions to take experts

LONGEST_WAIT_SECONDS: Final = 8.0
"""Servers that see an orphan wait for different times up to this, so that mostly one takes it."""

HANDING_ON_SECONDS: Final = 20.0
"""A server that is paused sends its newest copies for at most so long, and then withdraws. Others
still take its experts over within a minute."""

RESUMING_SECONDS: Final = 5.0  # to see which experts others have taken over meanwhile

COMPARING_SECONDS: Final = 5.0
"""For another server to say how far its experts are. Announcements wait for it, and live for 30."""

CLEARLY_FURTHER: Final = 1.1
"""A few steps more decide nothing: while both servers are called, either may soon be ahead."""

TAKEN_AT_ONCE: Final = 4  # experts: each takes memory twice for a moment, and a transfer
FETCHING_SECONDS: Final = 1800.0  # for all tries to get the copy of one expert
MOST_FAILED_FETCHES: Final = 3  # of a copy at a keeper that does not answer
BUSY_SECONDS: Final = 1800.0
"""One that says for so long, at each question what copies it has, that it is busy, has none. It
takes no work to say that, and it would prevent new experts for ever."""
SETTLING_SECONDS: Final = 2 * CACHED_SECONDS
"""Before a new host sends copies: keepers must have heard that it hosts the expert."""
STALE_COPY_SECONDS: Final = 900.0
"""A copy is dropped if it was not renewed for so long, and the expert is hosted: others keep it
now. A copy of an orphan is never dropped."""
SWEEP_SECONDS: Final = 60.0
REMEMBERED: Final = 4096
MOST_ASKED: Final = 16  # keepers of one copy: three, and those that kept it before

Origin = Literal["new", "own copy", "taken over"]
Maker = Callable[[Uid], ExpertBackend]
"""Makes an expert with fresh weights, which are the same at all servers."""


@dataclass(frozen=True)
class HostSettings:
    """- `most_experts`: how many experts the server hosts at most, those that it takes over too.
    - `uids`: exactly these; empty: those that need a server most.
    - `checkpoint_seconds`: how often each expert is saved, and its copies are sent.
    - `largest_copies_bytes`: how much it keeps for others, on disk.
    """

    most_experts: int
    uids: tuple[Uid, ...] = ()
    checkpoint_seconds: float = CHECKPOINT_SECONDS
    largest_copies_bytes: int = LARGEST_COPIES_BYTES


@dataclass(frozen=True)
class HostedExpert:
    """An expert that this server hosts. `since` and `saved` are times of trio's clock; `saved` is
    None before the first checkpoint. `steps` counts those on other servers before, too."""

    uid: Uid
    origin: Origin
    since: float
    steps: int
    examples: int
    seconds: float
    saved: float | None


@dataclass(frozen=True)
class ExpertTaken:
    """The server hosts this expert now."""

    uid: Uid
    origin: Origin
    steps: int


@dataclass(frozen=True)
class ExpertLost:
    """Another server hosts this expert too, and keeps it. This one has stopped."""

    uid: Uid


@dataclass(frozen=True)
class ExpertSaved:
    """The expert was saved, and these servers have taken a copy."""

    uid: Uid
    steps: int
    keepers: tuple[PeerId, ...]


@dataclass(frozen=True)
class SavingFailed:
    """The expert could not be saved, for this reason. The server goes on."""

    uid: Uid
    why: str


HostEvent = ExpertTaken | ExpertLost | ExpertSaved | SavingFailed


def _tell_nobody(_event: HostEvent) -> None:
    pass


# ---- pure


def wait_before_taking(uid: Uid, peer: PeerId) -> float:
    """For how long this server leaves an orphan to others. No two servers wait equally long."""
    return LONGEST_WAIT_SECONDS * int.from_bytes(rank(uid, peer)[:8], "big") / 2**64


def newest_first(offers: Mapping[PeerId, CopyOffer]) -> list[tuple[PeerId, CopyOffer]]:
    """The copies of one expert, that with the most steps first; of equals, what most keepers
    have. Steps are a keeper's word, so a copy counts only when it was fetched and checked."""
    digests = [offer.digest for offer in offers.values()]
    return sorted(
        offers.items(),
        key=lambda item: (-item[1].steps, -digests.count(item[1].digest), item[1].digest, item[0]),
    )


def cells_to_take(
    grids: Sequence[ExpertGrid], live: Collection[Uid], count: int, chance: Random
) -> list[Uid]:
    """So many free cells of these grids, as evenly as possible, the emptiest grid first."""
    chosen: list[Uid] = []
    taken = set(live)
    emptiest = sorted(grids, key=lambda grid: sum(uid in grid for uid in taken) / grid.cells)
    for _ in range(2):  # the second time what full grids have left over
        for number, grid in enumerate(emptiest):
            share = math.ceil((count - len(chosen)) / (len(emptiest) - number))
            cells = free_cells(grid, taken, share, chance)
            chosen += cells
            taken.update(cells)
    return chosen


class Vacancies:
    """The cells that this server may take, and when. Pure: the time is an argument.

    Invariant: the time of a cell does not change while it stays vacant.
    """

    def __init__(self, peer: PeerId) -> None:
        self._peer = peer
        self._due: dict[Uid, float] = {}

    def saw(self, vacant: Iterable[Uid], now: float, at_once: Collection[Uid] = ()) -> None:
        """These cells are vacant now, and no others."""
        before = self._due
        self._due = {
            uid: now if uid in at_once else now + wait_before_taking(uid, self._peer)
            for uid in vacant
        }
        self._due.update({uid: before[uid] for uid in self._due.keys() & before.keys()})

    def take_due(self, now: float, count: int) -> list[Uid]:
        """Up to `count` cells whose time has come, the longest due first."""
        due = sorted((at, uid) for uid, at in self._due.items() if at <= now)[:count]
        for _, uid in due:
            del self._due[uid]
        return [uid for _, uid in due]

    @property
    def next_at(self) -> float:
        return min(self._due.values(), default=math.inf)


class SendingShare:
    """How much of the last interval was spent on sending copies. Pure: the time is an argument."""

    def __init__(self, interval_seconds: float) -> None:
        self._interval = interval_seconds
        self._sent: deque[tuple[float, float]] = deque()  # from when to when

    def note(self, began: float, now: float) -> None:
        self._sent.append((began, now))

    def at(self, now: float) -> float:
        since = now - self._interval
        while self._sent and self._sent[0][1] <= since:
            self._sent.popleft()
        return sum(ended - max(began, since) for began, ended in self._sent) / self._interval


# ---- the host


@asynccontextmanager
async def open_expert_host(
    rpc: Rpc,
    directory: ExpertDirectory,
    grids: Sequence[ExpertGrid],
    make: Maker,
    folder: Path,
    settings: HostSettings,
    tell: Callable[[HostEvent], None] = _tell_nobody,
) -> AsyncIterator[ExpertHost]:
    """Host experts of these grids for the length of the block. Call it once for an Rpc.

    The block starts before the first expert is taken. At its end the announcements are withdrawn;
    without `leave` before, steps since the last checkpoints are lost. Errors of the block are
    raised without an exception group. `folder` is made if it is missing; OSError if that fails.
    WrongUid if a uid of the settings is in no grid.
    """
    failure: BaseException | None = None
    async with open_runtime() as runtime:
        host = ExpertHost(rpc, runtime, directory, grids, make, folder, settings, tell)
        await host.prepare()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(host.run)
            try:
                yield host
            except BaseException as error:  # noqa: BLE001 - raised below, where no nursery wraps it
                failure = error
            nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure


@dataclass
class _Hosted:
    backend: ExpertBackend
    origin: Origin
    since: float
    save_at: float
    saved: float | None = None


class ExpertHost:
    """Made by `open_expert_host`. All methods are for trio's thread.

    Invariant: the runtime has exactly the experts of `_hosted`.
    """

    def __init__(
        self,
        rpc: Rpc,
        runtime: Runtime,
        directory: ExpertDirectory,
        grids: Sequence[ExpertGrid],
        make: Maker,
        folder: Path,
        settings: HostSettings,
        tell: Callable[[HostEvent], None],
    ) -> None:
        self.runtime = runtime
        """Computes for the experts. A trainer on the same node calls them there."""
        self._rpc, self._directory, self._grids = rpc, directory, tuple(grids)
        self._copies = directory.of_copies()
        self._make, self._settings, self._tell = make, settings, tell
        self._me = rpc.network.peer_id
        self._chance = rpc.network.random
        self._store = CopyStore(folder, self._me, most_aside=settings.most_experts)
        self._forms = Forms(grids, make)
        self._hosted: dict[Uid, _Hosted] = {}
        self._taking: set[Uid] = set()
        self._in_doubt: set[Uid] = set()
        """Hosted experts of which a keeper offers a newer copy. Until that is here and was checked,
        they are served as they are, and not saved: their copies would replace the newer ones."""
        self._leaving = False
        self._pauses = self._withdrawn = False
        self._vacancies = Vacancies(self._me)
        self._sending = SendingShare(settings.checkpoint_seconds)
        self._failed_fetches = BoundedMap[tuple[Uid, PeerId], int](REMEMBERED)
        self._busy_since = BoundedMap[PeerId, float](REMEMBERED)
        """Keepers that were busy at each question since then."""
        self._renewed_at: dict[Uid, float] = {}
        self._hosts_changed, self._copies_changed = _Signal(), _Signal()
        self._saves_changed, self._pause_changed = _Signal(), _Signal()
        serve_experts(rpc, runtime)
        self._keeper = CopyKeeper(
            rpc,
            self._store,
            self._forms,
            is_own=lambda uid: uid in self._hosted or uid in self._taking,
            hosts_of=self._other_hosts,
            kept=self._note_kept,
            limit_bytes=settings.largest_copies_bytes,
        )

    @property
    def load(self) -> float:
        """About how many seconds of work wait here."""
        return self.runtime.load()

    @property
    def paused(self) -> bool:
        return self._pauses

    def hosted(self) -> tuple[HostedExpert, ...]:
        return tuple(
            HostedExpert(
                uid,
                one.origin,
                one.since,
                one.backend.statistics.steps,
                one.backend.statistics.backward_rows,
                one.backend.statistics.seconds,
                one.saved,
            )
            for uid, one in sorted(self._hosted.items())
        )

    def pause(self) -> None:
        """Answer Busy, send the newest copies, and withdraw from the directory. Then others take
        over."""
        self._pauses = self.runtime.paused = True
        self._pause_changed.set()

    def resume(self) -> None:
        """Serve again what no other server has taken over."""
        self._pauses = False
        self._pause_changed.set()

    async def leave(self, seconds: float) -> None:
        """Stop serving, save all experts, and send their last copies, within this time; returns
        sooner if all is done. The end of the block then withdraws the announcements, within
        `LEAVING_SECONDS` more: others take over what is in the copies by then. Another call, while
        the first goes on, does nothing."""
        if self._leaving:
            return
        self._leaving = True
        for uid in self._hosted:
            self.runtime.remove(uid)
        await self._hand_on(seconds)
        self._hosted.clear()

    async def _hand_on(self, seconds: float) -> None:
        """Save all experts and send their copies, within this time: each as soon as it is saved,
        those with the most unsaved steps first."""
        limit = trio.CapacityLimiter(PUSHED_AT_ONCE)

        async def send(copy: KeptCopy) -> None:
            async with limit:
                await self._send(copy, LEAST_KEEPERS)

        with trio.move_on_after(seconds):
            async with trio.open_nursery() as nursery:
                for uid, one in sorted(self._hosted.items(), key=self._unsaved_steps, reverse=True):
                    if uid in self._in_doubt:
                        continue
                    copy = await self._save(uid, one)
                    if copy is not None:
                        nursery.start_soon(send, copy)

    def _unsaved_steps(self, hosted: tuple[Uid, _Hosted]) -> int:
        uid, one = hosted
        copy = self._store.find(uid)
        return one.backend.statistics.steps - (copy.steps if copy else 0)

    # -- the tasks

    async def prepare(self) -> None:
        """Check the settings, and the files that are in the folder."""
        for uid in self._settings.uids:
            await self._forms.of(uid)
        for uid in await in_thread(self._store.names):
            try:
                form = await self._forms.of(uid)
            except WrongUid as error:
                log.warning("The copy of %s in this folder is not used: %s", uid, error)
            else:
                await in_thread(self._store.load, uid, form)

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._keep_announcing)
            nursery.start_soon(self._keep_announcing_copies)
            nursery.start_soon(self._keep_pausing)
            nursery.start_soon(self._keep_taking)
            nursery.start_soon(self._keep_saving)
            nursery.start_soon(self._keep_sweeping)

    async def _keep_announcing(self) -> None:
        await self._directory.keep_announcing(
            lambda: () if self._withdrawn else self._hosted.keys(),
            lambda: self.load,
            self._lose,
            self._hosts_changed.wait,
            self._trained_further,
        )

    async def _keep_announcing_copies(self) -> None:
        await self._copies.keep_announcing(
            self._keeper.kept, lambda: 0.0, lambda _: None, self._copies_changed.wait
        )

    async def _keep_pausing(self) -> None:
        limit = trio.CapacityLimiter(TAKEN_AT_ONCE)
        async with trio.open_nursery() as nursery:
            while True:
                await self._pause_changed.wait()
                newer: dict[Uid, dict[PeerId, CopyOffer]] = {}
                if self._pauses:
                    await self._hand_on(HANDING_ON_SECONDS)
                elif self._withdrawn:
                    with trio.move_on_after(RESUMING_SECONDS):
                        await self._lose_what_others_host()
                        await self._look_for_newer(newer)
                for uid in newer.keys() & self._hosted.keys() - self._in_doubt:
                    self._in_doubt.add(uid)
                    one = self._hosted[uid]
                    nursery.start_soon(self._go_on_with_newer, uid, one, newer[uid], limit)
                self._withdrawn = self.runtime.paused = self._pauses
                self._hosts_changed.set()

    async def _lose_what_others_host(self) -> None:
        """Otherwise trainers would call both servers until the announcements are compared."""
        below = await self._directory.read({uid.parent for uid in self._hosted})
        self._lose(
            [
                uid
                for uid in self._hosted
                if any(host.peer != self._me for host in below[uid.parent].get(uid.cells[-1], ()))
            ]
        )

    async def _look_for_newer(self, newer: dict[Uid, dict[PeerId, CopyOffer]]) -> None:
        """Another server may have taken an expert over meanwhile, trained it on, and left. Its copy
        would be replaced by what this one had before. Notes in `newer` what keepers say of that."""
        servers = await self._servers()
        likely: dict[PeerId, list[Uid]] = {}
        for uid in self._hosted:
            for peer in keepers_of(uid, servers)[:MOST_TRIES]:
                if peer != self._me:
                    likely.setdefault(peer, []).append(uid)

        async def ask(peer: PeerId, uids: Sequence[Uid]) -> None:
            with suppress(PotluckError):
                for uid, offer in (await ask_offers(self._rpc, peer, uids)).items():
                    if self._is_behind(uid, offer.steps):
                        newer.setdefault(uid, {})[peer] = offer

        async with trio.open_nursery() as nursery:
            for peer, uids in likely.items():
                for start in range(0, len(uids), MOST_INFOS):
                    nursery.start_soon(ask, peer, uids[start : start + MOST_INFOS])

    async def _go_on_with_newer(
        self,
        uid: Uid,
        one: _Hosted,
        offers: Mapping[PeerId, CopyOffer],
        limit: trio.CapacityLimiter,
    ) -> None:
        """Give this expert up for the newest of these copies, once it is here and was checked. If
        none can be used, nothing happens: a keeper can offer any number of steps."""
        backend = None
        try:
            async with limit:
                with trio.move_on_after(FETCHING_SECONDS):
                    backend = await self._fetch_newest(uid, offers)
        except Exception as error:  # noqa: BLE001 - what others chose, or memory: serving goes on
            log.warning("No newer copy of %s was taken over: %r", uid, error)
        finally:
            self._in_doubt.discard(uid)
            self._saves_changed.set()
        if backend is None or backend.statistics.steps <= one.backend.statistics.steps:
            return
        if self._hosted.get(uid) is one and not self._leaving:
            self._lose([uid])
            self._host(uid, backend, "taken over")

    async def _fetch_newest(
        self, uid: Uid, offers: Mapping[PeerId, CopyOffer]
    ) -> ExpertBackend | None:
        form = await self._forms.of(uid)
        for peer, offer in newest_first(offers):
            try:
                return await fetch(self._rpc, peer, offer, self._store, form, self._make)
            except PotluckError as error:
                log.warning("The copy of %s at %s cannot be used: %s", uid, peer, error)
        return None

    def _is_behind(self, uid: Uid, steps: int) -> bool:
        """Whether there is a copy with more steps than the expert has here, all of which are saved
        here as well."""
        one, own = self._hosted.get(uid), self._store.find(uid)
        if one is None or steps <= one.backend.statistics.steps:
            return False
        return not one.backend.statistics.steps or (
            own is not None and own.steps == one.backend.statistics.steps
        )

    async def _keep_taking(self) -> None:
        await self._directory.joined()
        look_at, is_first = trio.current_time(), True
        limit = trio.CapacityLimiter(TAKEN_AT_ONCE)
        async with trio.open_nursery() as nursery:
            while True:
                now = trio.current_time()
                if now >= look_at:
                    if self._room():
                        await self._look(is_first=is_first)
                        now, is_first = trio.current_time(), False
                    look_at = now + LOOK_SECONDS * self._chance.uniform(0.8, 1.0)
                for uid in self._vacancies.take_due(now, self._room()):
                    self._taking.add(uid)
                    nursery.start_soon(self._take, uid, limit)
                pause = min(look_at, self._vacancies.next_at) - now
                await trio.sleep(max(SHORTEST_PAUSE_SECONDS, pause))

    async def _keep_saving(self) -> None:
        while True:
            times = [one.save_at for uid, one in self._hosted.items() if uid not in self._in_doubt]
            next_at = min(times, default=math.inf)
            with trio.move_on_at(next_at):
                await self._saves_changed.wait()
            for uid, one in list(self._hosted.items()):
                is_hosted = self._hosted.get(uid) is one and not self._leaving
                if is_hosted and uid not in self._in_doubt and one.save_at <= trio.current_time():
                    one.save_at = trio.current_time() + self._settings.checkpoint_seconds
                    copy = await self._save(uid, one)
                    if copy is not None:
                        began = trio.current_time()
                        has_time = self._sending.at(began) < MOST_SENDING_SHARE
                        await self._send(copy, KEEPERS if has_time else LEAST_KEEPERS)
                        self._sending.note(began, trio.current_time())

    async def _keep_sweeping(self) -> None:
        while True:
            await trio.sleep(SWEEP_SECONDS)
            oldest = trio.current_time() - STALE_COPY_SECONDS
            for uid in self._keeper.kept():
                if self._renewed_at.setdefault(uid, trio.current_time()) <= oldest:
                    if await self._is_trained_on(uid):
                        try:
                            await in_thread(self._store.remove, uid)
                        except OSError as error:
                            log.warning("The copy of %s cannot be removed: %s", uid, error)
                        self._copies_changed.set()
                    self._renewed_at.pop(uid, None)

    async def _is_trained_on(self, uid: Uid) -> bool:
        """Whether a server hosts this expert, and answers that it has made all the steps of the
        copy here. One that only announces it may not make the keepers forget it."""
        hosts, copy = await self._other_hosts(uid), self._store.find(uid)
        if not hosts or copy is None:
            return False
        try:
            there = await ExpertClient(self._rpc).info(hosts[0], [uid], timeout=COMPARING_SECONDS)
        except PotluckError as error:
            log.info("%s did not say how far %s is: %s", hosts[0], uid, error)
            return False
        return uid in there and there[uid].steps >= copy.steps

    # -- taking experts

    def _room(self) -> int:
        """For how many more experts there is room here, and in the directory."""
        if self.paused or self._leaving:
            return 0
        prefixes = {one for uid in (*self._hosted, *self._taking) for one in uid.prefixes()}
        if len(prefixes) > MOST_RECORDS - MOST_DIMENSIONS:
            return 0
        return self._settings.most_experts - len(self._hosted) - len(self._taking)

    async def _look(self, *, is_first: bool) -> None:
        """Look which cells are vacant: those of orphans, and free ones if there are not enough."""
        live: set[Uid] = set()
        kept = {copy.uid for copy in self._store.kept()}
        for grid in self._grids:
            for uid, hosts in (await self._directory.live(grid)).items():
                if any(host.peer != self._me for host in hosts):
                    live.add(uid)
            kept.update(await self._copies.live(grid))
        live.update(self._hosted, self._taking)
        if self._settings.uids:
            orphans: list[Uid] = []
            free = [uid for uid in self._settings.uids if uid not in live]
        else:
            orphans = sorted(uid for uid in kept - live if any(uid in grid for grid in self._grids))
            more = max(0, self._room() - len(orphans))
            free = cells_to_take(self._grids, live | kept, more, self._chance)
        own = [copy.uid for copy in self._store.kept() if copy.server == self._me]
        at_once = [*free, *own] if is_first else []
        self._vacancies.saw([*orphans, *free], trio.current_time(), at_once)

    async def _take(self, uid: Uid, limit: trio.CapacityLimiter) -> None:
        try:
            async with limit:
                with trio.move_on_after(FETCHING_SECONDS):
                    await self._take_if_vacant(uid)
        except (PotluckError, OSError) as error:
            log.warning("%s was not taken: %s", uid, error)
        except Exception as error:  # noqa: BLE001 - what others chose, or memory: it is tried again
            log.warning("%s was not taken: %r", uid, error)
        finally:
            self._taking.discard(uid)

    async def _take_if_vacant(self, uid: Uid) -> None:
        began = trio.current_time()
        if await self._other_hosts(uid, anew=True):
            self._forget_failures(uid)
            return
        found = await self._obtain(uid, began)
        if found is None:
            return
        self._forget_failures(uid)
        if await self._other_hosts(uid, anew=True):
            return
        if self._leaving:
            return
        self._host(uid, *found)

    def _host(self, uid: Uid, backend: ExpertBackend, origin: Origin) -> None:
        now = trio.current_time()
        first_save = self._settings.checkpoint_seconds if origin == "new" else SETTLING_SECONDS
        self._hosted[uid] = _Hosted(backend, origin, now, now + first_save)
        self.runtime.add(backend)
        self._hosts_changed.set()
        self._copies_changed.set()
        self._saves_changed.set()
        self._tell(ExpertTaken(uid, origin, backend.statistics.steps))

    async def _obtain(self, uid: Uid, began: float) -> tuple[ExpertBackend, Origin] | None:
        """The expert, from the newest copy that can be used; else a new one. None if a keeper may
        yet have a copy, or no peer has answered anything since the taking began."""
        form = await self._forms.of(uid)
        offers, is_sure = await self._offers(uid)
        own = self._store.find(uid)
        if own is not None:
            offers[self._me] = CopyOffer(str(uid), own.steps, own.digest, own.size)
        for peer, offer in sorted(  # a keeper that offers much and sends nothing goes last
            newest_first(offers), key=lambda item: self._has_failed_often(uid, item[0])
        ):
            try:
                if own is not None and offer.digest == own.digest:
                    origin: Origin = "own copy" if own.server == self._me else "taken over"
                    return await in_thread(self._restored, own), origin
                backend = await fetch(self._rpc, peer, offer, self._store, form, self._make)
            except (WrongCopy, BrokenCopy) as error:
                log.warning("The copy of %s at %s cannot be used: %s", uid, peer, error)
                if peer == self._me:
                    await in_thread(self._store.remove, uid)
            except PotluckError as error:
                is_sure &= self._note_failure(uid, peer, error)
            else:
                return backend, "taken over"
        is_offline = -math.inf < self._directory.heard_at < began
        if not is_sure or is_offline:  # offline, it reads only what it has itself
            return None
        return await in_thread(self._make, uid), "new"

    def _restored(self, own: KeptCopy) -> ExpertBackend:
        backend = self._make(own.uid)
        restore(backend, self._store.path(own.uid), self._forms.made(own.uid))
        return backend

    async def _offers(self, uid: Uid) -> tuple[dict[PeerId, CopyOffer], bool]:
        """What the keepers of this expert offer, and whether all have answered, or never do."""
        below = (await self._copies.read([uid.parent]))[uid.parent]
        announced = [host.peer for host in below.get(uid.cells[-1], ())]
        likely = keepers_of(uid, await self._servers())  # the directory may miss some
        keepers = [
            peer
            for peer in dict.fromkeys([*announced[:MOST_ASKED], *likely[:MOST_TRIES]])
            if peer != self._me
        ]
        offers: dict[PeerId, CopyOffer] = {}
        failed: list[bool] = []

        async def ask(peer: PeerId) -> None:
            try:
                found = await ask_offers(self._rpc, peer, [uid])
            except Busy:
                now = trio.current_time()
                since = self._busy_since[peer] = self._busy_since.get(peer, now)
                failed.append(now - since >= BUSY_SECONDS)
            except PotluckError as error:
                failed.append(self._note_failure(uid, peer, error))
            else:
                self._busy_since.pop(peer, None)
                offers.update({peer: found[uid]} if uid in found else {})

        async with trio.open_nursery() as nursery:
            for peer in keepers:
                nursery.start_soon(ask, peer)
        return offers, all(failed)

    def _note_failure(self, uid: Uid, peer: PeerId, error: PotluckError) -> bool:
        """Whether to go on without this keeper, because it has failed too often."""
        log.info("no copy of %s from %s: %s", uid, peer, error)
        if isinstance(error, Busy):  # the keeper, or the disk here
            return False
        self._failed_fetches[uid, peer] = self._failed_fetches.get((uid, peer), 0) + 1
        return self._has_failed_often(uid, peer)

    def _forget_failures(self, uid: Uid) -> None:
        """It has a host. When it needs one again, its keepers may be well."""
        for one in [key for key in self._failed_fetches if key[0] == uid]:
            del self._failed_fetches[one]

    def _has_failed_often(self, uid: Uid, peer: PeerId) -> bool:
        return self._failed_fetches.get((uid, peer), 0) >= MOST_FAILED_FETCHES

    async def _other_hosts(self, uid: Uid, *, anew: bool = False) -> list[PeerId]:
        """The other servers that host this expert, the one that keeps it first."""
        read = self._directory.read if anew else self._directory.hosts
        hosts = (await read([uid.parent]))[uid.parent].get(uid.cells[-1], ())
        return [host.peer for host in in_order_of_claim(uid, hosts) if host.peer != self._me]

    # -- losing and saving them

    async def _trained_further(self, peer: PeerId, uids: Collection[Uid]) -> set[Uid]:
        """Those of these experts that have made clearly more steps here than at this server."""
        steps = {
            uid: self._hosted[uid].backend.statistics.steps for uid in uids & self._hosted.keys()
        }
        trained = sorted(uid for uid, own in steps.items() if own)
        further = set[Uid]()

        async def ask(uids: Sequence[Uid]) -> None:
            try:
                there = await ExpertClient(self._rpc).info(peer, uids, timeout=COMPARING_SECONDS)
            except PotluckError as error:
                log.info("%s did not say how far its experts are: %s", peer, error)
                return
            further.update(
                uid
                for uid in uids
                if uid not in there or steps[uid] > CLEARLY_FURTHER * there[uid].steps
            )

        async with trio.open_nursery() as nursery:
            for start in range(0, len(trained), MOST_INFOS):
                nursery.start_soon(ask, trained[start : start + MOST_INFOS])
        return further

    def _lose(self, uids: Iterable[Uid]) -> None:
        """Other servers keep these: stop."""
        for uid in uids:
            if uid in self._hosted and not self._leaving:
                del self._hosted[uid]
                self.runtime.remove(uid)
                self._copies_changed.set()
                self._tell(ExpertLost(uid))

    async def _save(self, uid: Uid, one: _Hosted) -> KeptCopy | None:
        """The copy of this expert as it is now, in a file. None if it has made no step, or if it
        cannot be saved."""
        if not one.backend.statistics.steps:
            return None
        try:
            copy = self._store.find(uid)
            if copy is None or copy.steps != one.backend.statistics.steps:
                form = await self._forms.of(uid)
                snapshot = await self.runtime.run(take_snapshot, one.backend)
                copy = await in_thread(self._store.save, snapshot, form)
        except Exception as error:  # noqa: BLE001 - a full disk, or memory: serving goes on
            log.warning("%s was not saved: %r", uid, error)
            self._tell(SavingFailed(uid, str(error)))
            return None
        one.saved = trio.current_time()
        return copy

    async def _send(self, copy: KeptCopy, keepers_wanted: int) -> None:
        """Send a copy to its keepers."""
        servers = await self._servers()
        keepers = await push(self._rpc, copy, self._store, servers, keepers_wanted)
        self._tell(ExpertSaved(copy.uid, copy.steps, keepers))

    async def _servers(self) -> set[PeerId]:
        """The other servers of this run, read anew: one that came just now can keep copies."""
        return await self._directory.servers(self._grids) - {self._me}

    def _note_kept(self, uid: Uid) -> None:
        self._renewed_at[uid] = trio.current_time()
        self._copies_changed.set()


class _Signal:
    """Wakes the one task that waits for it. Several signals before it waits are one."""

    def __init__(self) -> None:
        self._event = trio.Event()

    def set(self) -> None:
        self._event.set()

    async def wait(self) -> None:
        await self._event.wait()
        self._event = trio.Event()
