"""Watches for a later definition by the organiser, tells the owner, and serves it to newcomers.
This peer trains by it only after the next start.

    watcher = NewerDefinition(network, rpc, served, signed, tell=…, keep=…)
    await watcher.run(signed_file=None)         # until cancelled

Every peer asks a few others now and then; the answer is a few bytes if there is nothing newer. So a
new definition reaches the whole run within a few minutes, even if some peers are away. The
organiser's own peer looks at its folder.

Promises: only a definition signed by the organiser is believed, reported or served; each is
reported once.

This runs for days beside the training, so no error of a file or a peer ends it.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Final

import trio

from node.core.private_file import read_private_file
from node.run.definition import incompatible_parts, places_in_words
from node.run.signed import LIMIT_BYTES, SignedDefinition, read_signed
from protocols.errors import PotluckError
from protocols.network import Network
from protocols.rpc import Rpc
from protocols.runs.fetching import fetch_definition
from protocols.runs.messages import UnusableDefinition
from protocols.runs.serving import ServedDefinitions

ASK_SECONDS: Final = 60.0  # between two questions; each costs some hundred bytes
LOOK_SECONDS: Final = 5.0  # between two looks at the organiser's folder
SIGNED: Final = "the organiser has signed another definition of this run"
MOST_ASKED: Final = 3  # peers, at a time: since all peers ask, news is everywhere in minutes


class NewerDefinition:
    """Invariant: `newest` is genuine, and served to newcomers."""

    def __init__(
        self,
        network: Network,
        rpc: Rpc,
        served: ServedDefinitions,
        signed: SignedDefinition,
        *,
        tell: Callable[[str], None],
        keep: Callable[[SignedDefinition], Awaitable[None]],
    ) -> None:
        self._network, self._rpc, self._served = network, rpc, served
        self._trained, self.newest = signed, signed
        self._tell, self._keep = tell, keep
        self._told = ""

    async def run(self, signed_file: Path | None) -> None:
        """Ask and look, until cancelled. `signed_file`: the organiser's own, if it is here."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._ask_on)
            if signed_file is not None:
                nursery.start_soon(self._look_on, signed_file)

    async def _ask_on(self) -> None:
        while True:
            await trio.sleep(ASK_SECONDS)
            peers = [link.peer for link in self._network.links()]
            if peers:
                asked = random.sample(peers, min(MOST_ASKED, len(peers)))
                await self._take(
                    partial(
                        fetch_definition,
                        self._rpc,
                        asked,
                        self._trained.definition.name,
                        self._accept,
                        known=self.newest,
                    )
                )

    async def _look_on(self, file: Path) -> None:
        async def look() -> SignedDefinition:
            data = await trio.to_thread.run_sync(read_private_file, file, LIMIT_BYTES)
            return self.newest if data in (None, self.newest.data) else self._accept(data)

        while True:
            await trio.sleep(LOOK_SECONDS)
            await self._take(look)

    def _accept(self, data: bytes) -> SignedDefinition:
        return read_signed(
            data,
            run=self._trained.definition.name,
            organiser=self._trained.organiser,
            not_before_ms=self.newest.signed_ms,
        )

    async def _take(self, find: Callable[[], Awaitable[SignedDefinition]]) -> None:
        try:
            found = await find()
        except UnusableDefinition as error:
            words = " ".join(part for part in (error.what, error.why, error.advice) if part)
            self._tell_once(f"{SIGNED}, which cannot be used here. {words}")
            return
        except (PotluckError, OSError):
            return  # retried later; the previous one is still served
        if found.signed_ms <= self.newest.signed_ms:
            return
        self.newest = found
        self._served.keep(found.definition.name, found.data)
        await self._keep(found)
        apart = incompatible_parts(self._trained.definition, found.definition)
        when = (
            f"It changes {places_in_words(apart)}: peers that take it do not train with the "
            "others. Restart (Ctrl-C, and the same command) to take it, too."
            if apart
            else "It applies from your next start; until then this peer trains by the earlier one, "
            "with everybody else."
        )
        self._tell_once(f"{SIGNED}. {when}")

    def _tell_once(self, words: str) -> None:
        if words != self._told:
            self._told = words
            self._tell(words)
