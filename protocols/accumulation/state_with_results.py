"""A state and the results of the steps that the run makes while it is fetched; or these alone.

    both = DownloadAndFollow(account, layouts, too_slow)
    is_whole = await both.run(download, manifest, run, latest)   # then both.results lead on from it
    followed = await follow_run(rpc, sources, mine, layouts)     # from a state that is here already

Promises: a download ends early when nobody has any more what follows the state that it brings: that
state would be of no use. What comes may end short of where the run is, where more cannot be held at
once: then steps are made of it, and from there on the run is followed anew.

Easy to get wrong: a link that is too slow is told so with figures, and is not the donors' fault.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import trio

from protocols.accumulation.committed_result import CommittedResult, ResultLayouts, usual_bytes
from protocols.accumulation.forks import Lineage
from protocols.accumulation.keeping_up import (
    MOST_TIMES_LOST,
    ROOM_OF_STATE,
    FetchFailed,
    KeepingUp,
    TooSlow,
)
from protocols.accumulation.state_account import Account, FetchSettings
from protocols.accumulation.state_download import LOOK_SECONDS, Download
from protocols.accumulation.state_following import Following, FollowWanted
from protocols.accumulation.state_manifest import Manifest
from protocols.accumulation.state_messages import MOST_RESULTS, ROOM_OF_SMALL_BYTES
from protocols.accumulation.state_paces import Paces
from protocols.accumulation.state_sources import Choice, StateSource, choose
from protocols.accumulation.training_state import LiveState
from protocols.errors import PotluckError
from protocols.identity import PeerId
from protocols.rpc import Rpc

log = logging.getLogger("potluck.state")


@dataclass(frozen=True)
class Followed:
    """What leads from this peer's own state to where the run is, or towards it."""

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
    """What leads from the state `mine` to where most of the up-to-date peers are, or as much of it
    as may be held, if they have it all; None if not: then a state is to be fetched. `paces` and
    `keeping_up` are those of earlier fetches; `too_slow` is told if this peer is always late."""
    account = Account(rpc, settings or FetchSettings(), paces, keeping_up)
    began = trio.current_time()

    def latest() -> Choice | None:
        return choose(
            sources(), rpc.network.peer_id, at_least_epoch=mine.epoch, without=account.liars
        )

    choice, start = latest(), Lineage(mine.epoch, mine.history)
    slowness = Slowness(account, mine, layouts, too_slow)
    slowness.look(latest)
    if choice is None or choice.epoch - mine.epoch > MOST_RESULTS:
        return None
    following = Following(
        account,
        FollowWanted(mine.run, layouts, _room(sum(one.bytes for one in mine.specs))),
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
    """Whether the run is too fast for what comes, and telling so."""

    def __init__(
        self,
        account: Account,
        mine: LiveState,
        layouts: ResultLayouts | None,
        tell: Callable[[TooSlow], None] | None,
    ) -> None:
        self._account, self._tell = account, tell
        self._state_bytes = sum(one.bytes for one in mine.specs)
        self._result_bytes = 0 if layouts is None else usual_bytes(layouts)

    async def watch(self, latest: Callable[[], Choice | None]) -> None:
        """Look again and again, until cancelled."""
        while True:
            self.look(latest)
            await trio.sleep(LOOK_SECONDS)

    def look(self, latest: Callable[[], Choice | None]) -> None:
        """Where the run is; and say so where it goes too slowly."""
        choice, now = latest(), trio.current_time()
        if choice is not None:
            self._account.keeping_up.saw(choice.epoch, now)
        error = self.error()
        if error is not None and self._tell and not self._account.keeping_up.is_told:
            self._account.keeping_up.is_told = True
            log.warning("%s", error.what)
            self._tell(error)

    def error(self, following: Following | None = None) -> TooSlow | None:
        """`following`: what is known of the results by it."""
        result_bytes = self._result_bytes
        if following is not None:
            held = [len(one.memory) for one in following.results]
            result_bytes = max(held, default=0 if following.is_lost else result_bytes)
        now = trio.current_time()
        return self._account.keeping_up.too_slow(now, self._state_bytes, result_bytes)


class DownloadAndFollow:
    """Downloads beside which the run is followed, and what is known of how fast that goes."""

    def __init__(self, account: Account, layouts: ResultLayouts | None, slowness: Slowness) -> None:
        self._account, self._layouts, self._slowness = account, layouts, slowness
        self._times_lost = 0
        self.results: tuple[CommittedResult, ...] = ()

    async def run(
        self,
        download: Download,
        manifest: Manifest,
        latest: Callable[[], Choice | None],
    ) -> bool:
        """Whether the state is whole, and its results lead to where the run is, or as far as they
        may be held. TooSlow where it would always stay behind."""
        if self._layouts is None:
            with self._account.wanting():
                return await download.run()
        wanted = FollowWanted(manifest.run, self._layouts, _room(manifest.stream_bytes))
        start = Lineage(manifest.epoch, manifest.history)
        following = Following(self._account, wanted, start, latest)
        is_whole = is_of_use = False
        failure: PotluckError | None = None

        async def follow() -> None:
            await following.run()
            if not is_whole:
                nursery.cancel_scope.cancel()  # it would be of no use

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
        self.results = tuple(following.results)
        if not is_of_use:
            self._times_lost += following.is_lost or following.is_full
            self._account.keeping_up.times_lost += following.is_lost or following.is_full
            self._slowness.look(latest)
        if not is_of_use or following.is_full:
            failure = failure or self._slowness.error(following)
        if failure is None and self._times_lost >= MOST_TIMES_LOST:
            failure = FetchFailed(
                f"The run has gone on {self._times_lost} times before the state was here, and what "
                "it was made of meanwhile could not be had.",
                why="Those who had it went away, or the run goes on in large jumps.",
                advice="It is tried again. If that is always so, join over a faster link.",
            )
        if failure is not None:
            raise failure
        return is_of_use


def _room(state_bytes: int) -> int:
    """How many bytes of results may be held beside a state."""
    return int(ROOM_OF_STATE * max(state_bytes, ROOM_OF_SMALL_BYTES))
