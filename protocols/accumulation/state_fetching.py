"""Brings this peer to the run's state: by a whole state from several peers, or by results alone.

    fetched = await fetch_state(rpc, sources, look(...), kept=KeptPieces(folder))
    restore(fetched.state, ...)                                # then step with fetched.results
    followed = await follow_run(rpc, sources, mine, layouts)   # from the state that is here already

Over many links a state takes longer to arrive than the run stays in its epoch. The result of a step
is several times smaller than a state, and with it this peer makes the same step itself, to the same
bit. So a newcomer downloads one state, and beside it the results of the steps that the run makes
meanwhile. It catches up if a result arrives faster than the run makes a step; it needs such a link
to take part in rounds anyway. A peer that is only a few steps behind needs only the results.

`fetch_state` goes through these steps:

1. Choose the digest that most up-to-date peers name (state_download.py).
2. Ask for its manifest. Check it against the digest and against this peer's own model.
3. Download and verify the pieces from several sources (state_download.py), and beside them fetch
   the results that follow.

If nobody has the chosen state, or what follows it, any more, it chooses again. The pieces that did
not change are kept.

In this file: `Following` fetches results; `DownloadAndFollow` downloads a state and fetches results
beside it; `fetch_state` is the whole.

Promises:

- No byte of a result is taken before it is known that it leads to where most up-to-date peers say
  they are. (A history is a hash over the previous one and the digest of the result, and the donor
  tells the digests of all results that follow.) Each part is checked as it comes, and a liar is
  named.
- At most `room_bytes` of results are held, or one result. When they are full, fetching ends; the
  caller makes the steps and fetches again.
- A download ends early when nobody has what follows its state any more: the state would be useless.

Easy to get wrong:

- A stranger's manifest says how large a state is. Nothing is allocated, and no piece asked for,
  before it has been compared with `mine`.
- The others' slots are seconds old. A donor may be further than any slot says, so that its results
  cannot be checked yet. That is no lie.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import trio

from protocols.accumulation.keeping_up import (
    MOST_TIMES_LOST,
    ROOM_OF_STATE,
    FetchFailed,
    KeepingUp,
    TooSlow,
)
from protocols.accumulation.lineage import Lineage
from protocols.accumulation.results import (
    CommittedResult,
    ResultLayouts,
    lineage_after,
    proven_digest,
    usual_bytes,
)
from protocols.accumulation.signature import torch_release
from protocols.accumulation.state_download import (
    LOOK_SECONDS,
    OLD_SECONDS,
    Choice,
    Download,
    FetchAccount,
    FetchSettings,
    KeptPieces,
    Lied,
    Paces,
    StateSource,
    choose,
    next_chunk_bytes,
    waiting_seconds,
)
from protocols.accumulation.state_manifest import (
    Manifest,
    StateRefused,
    check,
    name_of,
    read_manifest,
)
from protocols.accumulation.state_messages import (
    MOST_RESULTS,
    RESULT,
    ROOM_OF_SMALL_BYTES,
    ManifestAnswer,
    ManifestRequest,
    ResultAccepted,
    ResultOpening,
    ResultTransfer,
    StateGone,
)
from protocols.accumulation.training_state import LiveState, TrainingState
from protocols.errors import PotluckError
from protocols.identity import PeerId
from protocols.moshpit.encoded_result import encoded_bytes, memory_of
from protocols.moshpit.layout import SMALLEST_CHUNK_BYTES, Layout, PartCut, PartHash, ResultCut
from protocols.rpc import Empty, Rpc
from protocols.tensors import NoMemory

# ---- results that follow a state

log = logging.getLogger("potluck.state")

GLANCE_SECONDS = 0.1  # how often to look at the others' epochs, as they are known here
REFUSED_SECONDS = 0.5  # before sources that do not have the next result are asked again
OPEN_SECONDS = 20.0
MOST_ASKED = 8  # sources for one result; those that a newcomer downloads from come first
LINEAGES_REMEMBERED = 64

LOST_SECONDS = 6.0
"""When all sources have refused the next result for so long, nobody will have it: slots are written
at least this often, so by then they say where their peers really are."""

DIRECT_SECONDS = 2.0
"""When the sources with a direct link have refused the next result for so long, the others are
asked, too."""


class _NotYet(PotluckError):
    """The results that a donor offers cannot be checked against the slots known now."""


@dataclass(frozen=True)
class FollowWanted:
    """The request for results. `room_bytes`: the most to hold; the first result may be larger."""

    run: str
    layouts: ResultLayouts
    room_bytes: float


class Following:
    """Fetches the results that follow a state.

        following = Following(account, wanted, start, choice_now)
        nursery.start_soon(following.run)               # beside the download of the state
        await following.caught_up()                     # following.results lead to the run's state

    Invariant: `results` lead from the start to `end`, each checked to the last byte.
    """

    def __init__(
        self,
        account: FetchAccount,
        wanted: FollowWanted,
        start: Lineage,
        choice_now: Callable[[], Choice | None],
    ) -> None:
        """`choice_now` returns where most up-to-date peers are, and which peers those are."""
        self.results: list[CommittedResult] = []
        self.end = start
        self.is_lost = False
        """Nobody has the next result."""
        self.is_full = False
        """There is no room for the next result."""
        self._account, self._wanted, self._choice_now = account, wanted, choice_now
        self._seen: deque[Lineage] = deque(maxlen=LINEAGES_REMEMBERED)
        self._changed = trio.Event()
        self._cut_short = 0
        """How many times sources took too long for the next result."""
        self._in_vain: set[PeerId] = set()
        """The sources that have taken too long for it, or failed."""
        self._all_without = False
        self._without_since = self._known_at = trio.current_time()

    @property
    def bytes(self) -> int:
        return sum(len(one.memory) for one in self.results)

    @property
    def is_there(self) -> bool:
        """Whether `end` is where the run is known to be, or our results have passed that. If no
        up-to-date peer is known, this is True only after that has lasted for LOST_SECONDS."""
        choice = self._look()
        if choice is None:
            return trio.current_time() - self._known_at > LOST_SECONDS
        return self._has_passed(choice)

    async def run(self) -> None:
        """Fetch results as the run makes steps, until cancelled or lost. When there is no room for
        more, they are lost if the run goes on for so long that nobody keeps those after them."""
        while not self.is_lost:
            choice = self._look()
            if self.is_full:
                self._tell_changed()
                if choice is not None and choice.epoch - self.end.epoch > MOST_RESULTS:
                    self.is_lost = True
                    break
                await trio.sleep(GLANCE_SECONDS)
                continue
            # a state beyond the run is invented, or of peers that the others have not followed
            is_beyond = choice is not None and choice.epoch < self.end.epoch
            self._all_without = is_beyond and not self.is_there
            if choice is not None and self._leads_on(choice) and await self._take_next(choice):
                self._tell_changed()
                continue
            now = trio.current_time()
            if not self._all_without:
                self._without_since = now
            if now - self._without_since > LOST_SECONDS or self._account.failure() is not None:
                self.is_lost = True
                break
            await trio.sleep(REFUSED_SECONDS if self._all_without else GLANCE_SECONDS)
        self._tell_changed()

    async def caught_up(self) -> bool:
        """Wait until `end` is where the run is, or no more can be held. False if the results are of
        no use, because nobody has the next one."""
        while not self.is_there and not self.is_lost and not self.is_full:
            with trio.move_on_after(GLANCE_SECONDS):
                await self._changed.wait()
        return not self.is_lost

    async def once(self) -> bool:
        """Fetch the results that exist now, without waiting for any. Whether they lead from the
        start to where the run is, or as far as there is room."""
        while not self.is_there and not self.is_full:
            choice = self._look()
            if choice is None or not (await self._take_next(choice) or self.is_full):
                return False
        return bool(self.results)

    # -- one result

    async def _take_next(self, choice: Choice) -> bool:
        """Fetch the next result from the first source that has it. One that trickles it may not
        hold us up while there are others; nor may a slow link begin anew again and again."""
        self._all_without = True
        some_took_long = False
        seconds = OLD_SECONDS * 2.0**self._cut_short if len(choice.sources) > 1 else math.inf
        for source in self._to_ask(choice)[:MOST_ASKED]:
            had = self._account.bytes_from[source.peer]
            with trio.move_on_after(seconds) as patience:
                if await self._take_from(source):
                    self._cut_short = 0
                    return True
            if patience.cancelled_caught:
                self._account.gives_up(source.peer, f"A result takes more than {seconds:g} s.")
                came = self._account.bytes_from[source.peer] - had
                self._account.paces.sent(source.peer, came, seconds)
                self._all_without = False
                some_took_long = True
                self._in_vain.add(source.peer)
            if self.is_full:
                break
        self._cut_short += some_took_long
        return False

    def _to_ask(self, choice: Choice) -> list[StateSource]:
        """The sources, the best first; for a while without those behind a relay, if there are
        others. A link through a relay takes seconds to be there, and the run goes on meanwhile."""
        sources = self._account.paces.ordered(choice.sources)
        direct = [one for one in sources if not self._account.rpc.needs_relay(one.peer)]
        is_hopeful = any(one.peer not in self._in_vain for one in direct)
        waited = trio.current_time() - self._without_since
        return direct if is_hopeful and waited < DIRECT_SECONDS else sources

    async def _take_from(self, source: StateSource) -> bool:
        paces, began = self._account.paces, trio.current_time()
        try:
            with self._account.wanting():
                result = await self._receive(source.peer)
        except StateGone as error:
            log.debug("%s: %s", source.peer, error.what)
            paces.lacked(source.peer)
            return False
        except _NotYet as error:
            log.debug("%s: %s", source.peer, error.what)
        except Lied as error:
            self._account.lied(source.peer, error)
        except PotluckError as error:
            self._account.gives_up(source.peer, error.what)
            paces.failed(source.peer)
            self._in_vain.add(source.peer)
        else:
            if result is not None:
                self.results.append(result)
                self.end = result.after
                self._in_vain.clear()
                paces.sent(source.peer, len(result.memory), trio.current_time() - began)
                return True
        self._all_without = False
        return False

    async def _receive(self, peer: PeerId) -> CommittedResult | None:
        """The next result from this peer; None if there is no room for it."""
        if not self._has_room(max((len(one.memory) for one in self.results), default=0)):
            return None  # probably no room: do not let a donor send in vain
        opening = ResultOpening(self._wanted.run, self.end.epoch, self.end.history)
        transfer: ResultTransfer
        async with self._account.rpc.open_bulk(
            peer, RESULT, opening, timeout=OPEN_SECONDS
        ) as transfer:
            said = transfer.accepted
            self._check_way(said)
            cut = self._checked_cut(said)
            layout = self._wanted.layouts.of(said.links[0].kind, self.end.epoch)
            size = encoded_bytes(layout, cut)
            if not self._has_room(size):
                return None
            try:
                memory = memory_of(size)
            except NoMemory as error:
                log.warning("%s", error)
                self.is_full = True  # or it would ask again at once, and every source begin to send
                return None
            await self._receive_parts(peer, transfer, layout, cut, memory)
            await transfer.finish(Empty())
        first = said.links[0]
        return CommittedResult(self.end, first.kind, first.digest, cut, said.nonce, memory)

    def _has_room(self, size: int) -> bool:
        self.is_full = bool(self.results) and self.bytes + size > self._wanted.room_bytes
        return not self.is_full

    def _check_way(self, said: ResultAccepted) -> None:
        """Raise _NotYet unless these results lead to where most of the others say they are, or have
        said they were since this object was made."""
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
            self._wanted.layouts.of(first.kind, self.end.epoch)
        ):
            raise Lied("It offers a result that is cut otherwise than any of this run.")
        digests = {one.reducer: one.digest for one in said.parts}
        if proven_digest(first.kind, said.nonce, digests) != first.digest:
            raise Lied("It offers a result with parts that are not those of its digest.")
        return cut

    async def _receive_parts(
        self,
        peer: PeerId,
        transfer: ResultTransfer,
        layout: Layout,
        cut: ResultCut,
        memory: memoryview,
    ) -> None:
        end = 0
        for part, said in zip(cut.parts, transfer.accepted.parts, strict=True):
            digest = PartHash()
            for chunk in cut.chunks_of(part, layout):
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
            self._known_at = trio.current_time()
            place = Lineage(choice.epoch, choice.history)
            if place not in self._seen:
                self._seen.append(place)
        return choice

    def _leads_on(self, choice: Choice) -> bool:
        """Whether the run is further than `end`. At the same epoch its parameters may have been
        averaged."""
        return choice.epoch >= self.end.epoch and not self._has_passed(choice)

    def _has_passed(self, choice: Choice) -> bool:
        """Whether this is `end`, or our results have passed it: then it comes from an old slot."""
        passed = {one.before for one in self.results} | {self.end}
        return Lineage(choice.epoch, choice.history) in passed

    def _tell_changed(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


# ---- a state, and the results after it


@dataclass(frozen=True)
class Followed:
    """Results that lead from this peer's own state to the run's, or towards it."""

    results: tuple[CommittedResult, ...]
    bytes_from: Mapping[PeerId, int]
    liars: Mapping[PeerId, str]
    seconds: float


async def follow_run(
    rpc: Rpc,
    sources: Callable[[], Sequence[StateSource]],
    mine: LiveState,
    layouts: ResultLayouts,
    *,
    settings: FetchSettings | None = None,
    paces: Paces | None = None,
    keeping_up: KeepingUp | None = None,
    too_slow: Callable[[TooSlow], None] | None = None,
) -> Followed | None:
    """Fetch the results that lead from the state `mine` to where most up-to-date peers are, or as
    many of them as may be held. None if the peers do not have them all: then fetch a state.

    `paces` and `keeping_up` are those of earlier fetches. `too_slow` is called if this peer is
    always late.
    """
    account = FetchAccount(rpc, settings or FetchSettings(), paces, keeping_up)
    began = trio.current_time()

    def latest() -> Choice | None:
        return choose(
            sources(),
            rpc.network.peer_id,
            at_least_epoch=mine.epoch,
            without=account.liars,
            named=False,
        )

    choice, start = latest(), Lineage(mine.epoch, mine.history)
    slowness = Slowness(account, mine, layouts, too_slow)
    slowness.look(latest)
    if choice is None or choice.epoch - mine.epoch > MOST_RESULTS:
        return None
    following = Following(
        account,
        FollowWanted(mine.run, layouts, _room(sum(one.bytes for one in mine.specs), account)),
        start,
        latest,
    )
    if not await following.once():
        return None
    account.keeping_up.state_is_here(trio.current_time())
    slowness.look(latest)
    seconds = trio.current_time() - began
    return Followed(tuple(following.results), dict(account.bytes_from), account.liars, seconds)


class Slowness:
    """Notices that the run is too fast for this peer's link, and reports it with figures."""

    def __init__(
        self,
        account: FetchAccount,
        mine: LiveState,
        layouts: ResultLayouts | None,
        tell: Callable[[TooSlow], None] | None,
    ) -> None:
        self._account, self._tell = account, tell
        self._state_bytes = sum(one.bytes for one in mine.specs)
        self._result_bytes = 0 if layouts is None else usual_bytes(layouts)

    async def watch(self, latest: Callable[[], Choice | None]) -> None:
        """Look every LOOK_SECONDS, until cancelled."""
        while True:
            self.look(latest)
            await trio.sleep(LOOK_SECONDS)

    def look(self, latest: Callable[[], Choice | None]) -> None:
        """Note where the run is, and report once if this peer is too slow."""
        choice, now = latest(), trio.current_time()
        if choice is not None:
            self._account.keeping_up.saw(choice.epoch, now)
        error = self.error()
        if error is not None and self._tell and not self._account.keeping_up.is_told:
            self._account.keeping_up.is_told = True
            log.warning("%s", error.what)
            self._tell(error)

    def error(self, following: Following | None = None) -> TooSlow | None:
        """The error, if this peer is too slow. `following` knows the size of the results."""
        result_bytes = self._result_bytes
        if following is not None:
            held = [len(one.memory) for one in following.results]
            result_bytes = max(held, default=0 if following.is_lost else result_bytes)
        now = trio.current_time()
        return self._account.keeping_up.too_slow(now, self._state_bytes, result_bytes)


class DownloadAndFollow:
    """Downloads a state, and fetches the results that follow it at the same time."""

    def __init__(
        self, account: FetchAccount, layouts: ResultLayouts | None, slowness: Slowness
    ) -> None:
        self._account, self._layouts, self._slowness = account, layouts, slowness
        self._times_lost = 0
        self.results: tuple[CommittedResult, ...] = ()

    async def run(
        self,
        download: Download,
        manifest: Manifest,
        latest: Callable[[], Choice | None],
    ) -> bool:
        """Whether the state is complete and `results` lead from it to where the run is, or as far
        as they may be held. TooSlow if this peer would always stay behind."""
        if self._layouts is None:
            with self._account.wanting():
                return await download.run()
        self.results = ()  # of an earlier attempt: they would be held beside the new ones
        wanted = FollowWanted(
            manifest.run, self._layouts, _room(manifest.stream_bytes, self._account)
        )
        start = Lineage(manifest.epoch, manifest.history)
        following = Following(self._account, wanted, start, latest)
        is_whole = is_of_use = False
        failure: PotluckError | None = None

        async def follow() -> None:
            await following.run()
            if not is_whole:
                nursery.cancel_scope.cancel()  # the state would be useless

        async with trio.open_nursery() as nursery:
            nursery.start_soon(follow)
            try:
                with self._account.wanting():
                    is_whole = await download.run()
                if is_whole:
                    self._account.keeping_up.state_is_here(trio.current_time())
                is_of_use = is_whole and await following.caught_up()
            except PotluckError as error:
                failure = error  # raised below, where no nursery wraps it
            nursery.cancel_scope.cancel()
        if is_of_use:
            self.results = tuple(following.results)
        else:
            self._times_lost += following.is_lost or following.is_full
            self._account.keeping_up.times_lost += following.is_lost or following.is_full
            self._slowness.look(latest)
        if not is_of_use or following.is_full:
            failure = failure or self._slowness.error(following)
        if failure is None and self._times_lost >= MOST_TIMES_LOST:
            failure = FetchFailed(
                f"The run has gone on {self._times_lost} times before the state was here, and the "
                "results of the steps made meanwhile could not be fetched.",
                why="The peers that had them went away, or the run goes on in large jumps.",
                advice="It is tried again. If that is always so, join over a faster link.",
            )
        if failure is not None:
            self.results = ()
            following.results.clear()  # the error's traceback, which may be kept, leads to them
            raise failure
        return is_of_use


def _room(state_bytes: int, account: FetchAccount) -> float:
    """How many bytes of results may be held beside a state."""
    room = ROOM_OF_STATE * max(state_bytes, ROOM_OF_SMALL_BYTES)
    return min(room, account.settings.most_result_bytes)


__all__ = [
    "FetchFailed",
    "FetchSettings",
    "FetchedState",
    "KeptPieces",
    "StateSource",
    "TooSlow",
    "fetch_state",
]


# ---- the whole

STEPPED_SECONDS = 0.1  # between checks whether another state is to be chosen
HEDGE_SECONDS = 1.0  # after which the next source is asked for the manifest, too


@dataclass(frozen=True)
class FetchedState:
    """A state that was fetched and verified, and what each source contributed."""

    state: TrainingState
    named_by: frozenset[PeerId]
    """The peers that name it as the run's."""
    bytes_from: Mapping[PeerId, int]
    kept_bytes: int
    """Bytes that were here before."""
    given_up: Mapping[PeerId, str]
    """The sources that were given up, and why."""
    liars: Mapping[PeerId, str]
    seconds: float
    results: tuple[CommittedResult, ...] = ()
    """Results of the steps that the run has made since."""


async def fetch_state(
    rpc: Rpc,
    sources: Callable[[], Sequence[StateSource]],
    mine: LiveState,
    *,
    at_least_epoch: int = 0,
    history: bytes | None = None,
    kept: KeptPieces | None = None,
    settings: FetchSettings | None = None,
    progress: Callable[[int, int], None] | None = None,
    layouts: ResultLayouts | None = None,
    too_slow: Callable[[TooSlow], None] | None = None,
    paces: Paces | None = None,
    keeping_up: KeepingUp | None = None,
) -> FetchedState:
    """The state of up-to-date peers, verified piece by piece.

    - `sources` is called again while fetching, so that new peers can help.
    - `mine` describes this peer's own model; its values do not matter. A state of another model is
      refused before memory is taken.
    - `history`: take only states of this history.
    - `kept` survives an interruption: pass the same object again.
    - `progress` is called with the bytes that are here, and the total.
    - `layouts`: if given, the results of the steps that the run makes meanwhile are fetched, too.
    - `too_slow` is called if these come too slowly.
    - `paces` and `keeping_up` are those of earlier fetches.

    StateRefused, with the differences, if the state is of another model, dtype or torch release.
    FetchFailed, with the failure of each source, when nothing comes any more. TooSlow when the link
    is too slow ever to catch up with the run. Limit the total time with a cancel scope.
    """
    account = FetchAccount(rpc, settings or FetchSettings(), paces, keeping_up)
    kept = kept or KeptPieces()
    began, kept_bytes = trio.current_time(), 0
    slowness = Slowness(account, mine, layouts, too_slow)
    both = DownloadAndFollow(account, layouts, slowness)

    def choice_now() -> Choice | None:
        return choose(
            [one for one in sources() if layouts is not None or not one.is_earlier],
            rpc.network.peer_id,
            at_least_epoch=at_least_epoch,
            history=history,
            without=account.liars,
        )

    def latest() -> Choice | None:
        return choose(
            sources(),
            rpc.network.peer_id,
            at_least_epoch=at_least_epoch,
            without=account.liars,
            named=False,
        )

    async def fetch() -> Choice:
        nonlocal kept_bytes
        while True:
            choice = choice_now()
            manifest = None
            if choice is not None:
                manifest = await _manifest_of(choice, account, mine, choice_now)
            if choice is None or manifest is None:
                failure = account.failure()
                if failure is not None:
                    raise failure
                await _until_another(choice, choice_now)
                continue
            began = trio.current_time()
            await kept.begin(manifest)
            account.was_busy(trio.current_time() - began)
            kept_bytes = kept_bytes or kept.bytes_here
            download = Download(account, choice, manifest, kept, choice_now, progress)
            if await both.run(download, manifest, latest):
                return choice

    chosen: Choice | PotluckError
    async with trio.open_nursery() as nursery:
        nursery.start_soon(slowness.watch, latest)
        try:
            chosen = await fetch()
        except PotluckError as error:
            chosen = error  # raised below, where no nursery wraps it
        nursery.cancel_scope.cancel()
    if isinstance(chosen, FetchFailed):
        chosen.served_by = frozenset(account.bytes_from)
    if isinstance(chosen, PotluckError):
        raise chosen
    seconds = trio.current_time() - began
    fetched = FetchedState(
        await kept.finish(),
        _named_by(chosen),
        dict(account.bytes_from),
        kept_bytes,
        account.given_up,
        account.liars,
        seconds,
        both.results,
    )
    log.info("%s", _summary(fetched))
    return fetched


async def _until_another(choice: Choice | None, choice_now: Callable[[], Choice | None]) -> None:
    """Wait until another state is to be chosen, but at most LOOK_SECONDS: the same one may be
    available after all."""
    with trio.move_on_after(LOOK_SECONDS):
        while True:
            await trio.sleep(STEPPED_SECONDS)
            now = choice_now()
            if now is not None and (choice is None or now.digest != choice.digest):
                return


async def _manifest_of(
    choice: Choice, account: FetchAccount, mine: LiveState, choice_now: Callable[[], Choice | None]
) -> Manifest | None:
    """The manifest of the chosen state, from the first source that has it. None if no source does,
    or as soon as another state is to be chosen: otherwise sources that say they are busy could hold
    this peer for ever.

    StateRefused if the state does not fit this peer and no source has one that does. One source's
    word is not enough: its torch release is in no digest, so a liar could turn newcomers away.
    """
    found: list[Manifest] = []
    refused: list[StateRefused] = []

    async def ask(source: StateSource, settled: trio.Event, scope: trio.CancelScope) -> None:
        try:
            found.append(await _manifest_from(source, choice, account, mine))
            scope.cancel()
        except StateRefused as error:
            refused.append(error)
            account.gives_up(source.peer, error.what)
        except Lied as error:
            account.lied(source.peer, error)
        except PotluckError as error:
            account.gives_up(source.peer, error.what)
        settled.set()

    async def until_another_is_chosen(scope: trio.CancelScope) -> None:
        now: Choice | None = choice
        while now is not None and now.digest == choice.digest:
            await trio.sleep(LOOK_SECONDS)
            now = choice_now()
        scope.cancel()

    async with trio.open_nursery() as watching:
        watching.start_soon(until_another_is_chosen, watching.cancel_scope)
        async with trio.open_nursery() as nursery:
            for source in account.direct_first(choice.sources):
                settled = trio.Event()
                nursery.start_soon(ask, source, settled, nursery.cancel_scope)
                with trio.move_on_after(HEDGE_SECONDS):
                    await settled.wait()
        watching.cancel_scope.cancel()
    if refused and not found:
        refused[0].named_by = _named_by(choice) | _named_by(choice_now(), choice.digest)
        raise refused[0]
    return found[0] if found else None


def _named_by(choice: Choice | None, digest: bytes | None = None) -> frozenset[PeerId]:
    """The peers that name the chosen state, if it is the one with this digest."""
    if choice is None or digest not in (None, choice.digest):
        return frozenset()
    return frozenset(one.peer for one in choice.sources if one.digest == choice.digest)


async def _manifest_from(
    source: StateSource, choice: Choice, account: FetchAccount, mine: LiveState
) -> Manifest:
    """The manifest from this source, fully checked."""
    request = ManifestRequest(mine.run, choice.digest)
    answer = await account.ask(source.peer, request)
    while answer.wait_ms:
        seconds = waiting_seconds(answer)
        log.info("%s is busy with other downloads for %g s", source.peer, seconds)
        await trio.sleep(seconds)
        answer = await account.ask(source.peer, request)
    if name_of(answer.manifest) != choice.digest:
        raise Lied(_what_it_is(answer, choice))
    manifest = read_manifest(answer.manifest)
    _check_claim(source, manifest, choice)
    _check_torch(answer.torch)
    check(manifest, mine.signature, mine.run)
    return manifest


def _check_claim(source: StateSource, manifest: Manifest, choice: Choice) -> None:
    """Raise Lied if the source's own slot names this state as another one. Others may have named it
    falsely, and that is not the fault of a source that has it."""
    said = source if source.digest else choice
    if said.is_earlier:
        is_as_said = said.epoch - MOST_RESULTS <= manifest.epoch <= said.epoch
    else:
        is_as_said = (manifest.epoch, manifest.history) == (said.epoch, said.history)
    if is_as_said:
        return
    what = f"It offers a state of epoch {manifest.epoch} as that of epoch {said.epoch}."
    raise Lied(what) if source.digest else StateGone(what)


def _check_torch(version: str) -> None:
    here, there = torch_release(torch.__version__), torch_release(version)
    if here != there:
        raise StateRefused(
            f"The run trains with torch {there or '(no version named)'}; here it is torch {here}.",
            why="Another release may compute otherwise and keep other statistics.",
            advice=f"Install torch {there} here." if there else "",
        )


def _what_it_is(answer: ManifestAnswer, choice: Choice) -> str:
    """Describes what a source offers in place of the state that it was asked for."""
    try:
        manifest = read_manifest(answer.manifest)
    except PotluckError:
        return "It offers something that is no state under the digest of one."
    return (
        f"It offers a state of epoch {manifest.epoch} under the digest of another, of epoch "
        f"{choice.epoch}."
    )


def _summary(fetched: FetchedState) -> str:
    state, brought = fetched.state, sum(fetched.bytes_from.values())
    speed = brought / max(fetched.seconds, 1e-3) / 1e6
    return (
        f"fetched the state of epoch {state.epoch}: {len(state.memory) / 1e6:.1f} MB from "
        f"{len(fetched.bytes_from)} peers in {fetched.seconds:.1f} s ({speed:.1f} MB/s)"
    )
