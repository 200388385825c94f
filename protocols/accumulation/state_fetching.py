"""Fetching a state from several peers at once, verified against the digest that most name.

    fetched = await fetch_state(rpc, sources, look(...), kept=KeptPieces(folder))
    restore(fetched.state, ...)

    1. choose the digest that most up-to-date peers name                       (state_sources.py)
    2. ask for its manifest, check it against the digest and this peer's own model
    3. download the pieces from several sources, each verified                (state_download.py)
       beside it take what the steps are made of that the run makes now  (state_with_results.py)

When nobody has the chosen state any more, or what follows it, the choice is made anew; what is here
already and did not change stays.

Easy to get wrong: nothing is allocated, and no piece asked for, before the manifest has been
compared with `mine`: what a stranger says a state's size is decides how much memory is taken.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import trio

from protocols.accumulation.committed_result import CommittedResult, ResultLayouts
from protocols.accumulation.keeping_up import FetchFailed, KeepingUp, TooSlow
from protocols.accumulation.signature import torch_release
from protocols.accumulation.state_account import Account, FetchSettings, Lied
from protocols.accumulation.state_download import LOOK_SECONDS, Download
from protocols.accumulation.state_kept import KeptPieces
from protocols.accumulation.state_manifest import (
    Manifest,
    StateRefused,
    check,
    name_of,
    read_manifest,
)
from protocols.accumulation.state_messages import ManifestAnswer, ManifestRequest
from protocols.accumulation.state_paces import Paces
from protocols.accumulation.state_sources import Choice, StateSource, choose
from protocols.accumulation.state_with_results import DownloadAndFollow, Slowness
from protocols.accumulation.training_state import LiveState, TrainingState
from protocols.errors import PotluckError
from protocols.identity import PeerId
from protocols.rpc import Rpc

__all__ = [
    "FetchFailed",
    "FetchSettings",
    "Fetched",
    "KeptPieces",
    "StateSource",
    "TooSlow",
    "fetch_state",
]

log = logging.getLogger("potluck.state")

STEPPED_SECONDS = 0.1  # between looks at whether a state that is gone has been followed by another
HEDGE_SECONDS = 1.0  # after which the next source is asked for the manifest, beside the first


@dataclass(frozen=True)
class Fetched:
    """A state that was fetched and verified, and what came of each source."""

    state: TrainingState
    bytes_from: Mapping[PeerId, int]
    kept_bytes: int
    """That were here before."""
    given_up: Mapping[PeerId, str]
    """Why, in words."""
    liars: Mapping[PeerId, str]
    is_majority: bool
    """Whether most of the up-to-date peers named this state. Otherwise theirs all differ."""
    seconds: float
    results: tuple[CommittedResult, ...] = ()
    """Of the steps that the run has made since."""


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
) -> Fetched:
    """The state of up-to-date peers, verified piece by piece.

    `sources` is asked again while fetching, so that new peers can help. `mine` is what this
    peer's own model looks like (its values do not matter): another model is refused before memory
    is taken. `history`: take only states of this history. `kept` survives an interruption: hand
    the same over again. `progress` is called with the bytes that are here, and of all. With
    `layouts` the results of the steps that the run makes meanwhile are fetched as well, and
    `too_slow` is told if that is more than comes; `paces` and `keeping_up` are those of earlier
    fetches.

    StateRefused, with the differences, if the state is of another model, dtype or torch release;
    FetchFailed, naming what befell each source, when nothing comes any more; TooSlow when the run
    has gone on so far that what follows the state cannot be had any more. Limit the total with a
    cancel scope.
    """
    account = Account(rpc, settings or FetchSettings(), paces, keeping_up)
    kept = kept or KeptPieces()
    began, kept_bytes = trio.current_time(), 0
    slowness = Slowness(account, mine, layouts, too_slow)
    both = DownloadAndFollow(account, layouts, slowness)

    def choice_now() -> Choice | None:
        return choose(
            sources(),
            rpc.network.peer_id,
            at_least_epoch=at_least_epoch,
            history=history,
            without=account.liars,
        )

    def latest() -> Choice | None:
        return choose(
            sources(), rpc.network.peer_id, at_least_epoch=at_least_epoch, without=account.liars
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
            await kept.begin(manifest)
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
    fetched = Fetched(
        kept.finish(),
        dict(account.bytes_from),
        kept_bytes,
        account.given_up,
        account.liars,
        chosen.is_majority,
        seconds,
        both.results,
    )
    log.info("%s", _summary(fetched))
    return fetched


async def _until_another(choice: Choice | None, choice_now: Callable[[], Choice | None]) -> None:
    """Wait until another state is to be chosen; or, as the same may be had after all, a while."""
    with trio.move_on_after(LOOK_SECONDS):
        while True:
            await trio.sleep(STEPPED_SECONDS)
            now = choice_now()
            if now is not None and (choice is None or now.digest != choice.digest):
                return


async def _manifest_of(
    choice: Choice, account: Account, mine: LiveState, choice_now: Callable[[], Choice | None]
) -> Manifest | None:
    """The manifest of the chosen state from the first who has it; None if nobody does, or as soon
    as another state is the one to choose: who says to be busy would hold this peer for ever.

    StateRefused if it is not for this peer. One source's word does not decide that: its release of
    torch is in no digest, and a liar among the donors would turn newcomers away with it.
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
            for source in choice.sources:
                settled = trio.Event()
                nursery.start_soon(ask, source, settled, nursery.cancel_scope)
                with trio.move_on_after(HEDGE_SECONDS):
                    await settled.wait()
        watching.cancel_scope.cancel()
    if refused and not found:
        raise refused[0]
    return found[0] if found else None


async def _manifest_from(
    source: StateSource, choice: Choice, account: Account, mine: LiveState
) -> Manifest:
    """The manifest as this source has it, checked in every way."""
    request = ManifestRequest(mine.run, choice.digest)
    answer = await account.ask(source.peer, request)
    while answer.wait_ms:
        log.info("%s is busy with other downloads for %g s", source.peer, answer.wait_ms / 1000)
        await trio.sleep(answer.wait_ms / 1000)
        answer = await account.ask(source.peer, request)
    if name_of(answer.manifest) != choice.digest:
        raise Lied(_what_it_is(answer, choice))
    manifest = read_manifest(answer.manifest)
    if (manifest.epoch, manifest.history) != (choice.epoch, choice.history):
        raise Lied(f"It offers a state of epoch {manifest.epoch} as that of epoch {choice.epoch}.")
    _check_torch(answer.torch)
    check(manifest, mine.signature, mine.run)
    return manifest


def _check_torch(version: str) -> None:
    here, there = torch_release(torch.__version__), torch_release(version)
    if here != there:
        raise StateRefused(
            f"The run trains with torch {there or '(no version named)'}; here it is torch {here}.",
            why="Another release may compute otherwise and keep other statistics.",
            advice=f"Install torch {there} here." if there else "",
        )


def _what_it_is(answer: ManifestAnswer, choice: Choice) -> str:
    """In words, what a source offers in place of the state whose digest it was asked for."""
    try:
        manifest = read_manifest(answer.manifest)
    except PotluckError:
        return "It offers something that is no state under the digest of one."
    return (
        f"It offers a state of epoch {manifest.epoch} under the digest of another, of epoch "
        f"{choice.epoch}."
    )


def _summary(fetched: Fetched) -> str:
    state, brought = fetched.state, sum(fetched.bytes_from.values())
    speed = brought / max(fetched.seconds, 1e-3) / 1e6
    return (
        f"fetched the state of epoch {state.epoch}: {len(state.memory) / 1e6:.1f} MB from "
        f"{len(fetched.bytes_from)} peers in {fetched.seconds:.1f} s ({speed:.1f} MB/s)"
    )
