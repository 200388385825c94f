"""A definition that the organiser has signed later than the one this peer trains by: found, told,
and given out to newcomers. What is trained here does not change before the next start.

    watcher = NewerDefinition(network, rpc, served, signed, tell=…, keep=…)
    await watcher.run(signed_file=None)         # until cancelled

Every peer asks a few others now and then, and is answered in some bytes as long as there is nothing
newer; so what is signed in one home reaches all of a run within a few minutes, whoever is away. The
organiser's own peer looks at its folder.

Promises: only what the organiser has signed is believed, told or given out; each is told once.

Easy to get wrong: this runs beside the training for days. Whatever is wrong with a file or a peer
is no reason to end it.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Final

import trio

from node.private_file import read_private_file
from node.run.changes import parts_that_part, said
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
MOST_ASKED: Final = 3  # peers, at a time: with others asking, too, news are everywhere in minutes


class NewerDefinition:
    """Invariant: `newest` is genuine, and what is given out to newcomers."""

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
        """Ask and look, until cancelled. `signed_file`: the organiser's own, where it is here."""
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
            self._tell_once(f"{SIGNED}, which cannot be taken here. {words}")
            return
        except (PotluckError, OSError):
            return  # it is looked for again; what was given out before still is
        if found.signed_ms <= self.newest.signed_ms:
            return
        self.newest = found
        self._served.keep(found.definition.name, found.data)
        await self._keep(found)
        apart = parts_that_part(self._trained.definition, found.definition)
        when = (
            f"It changes {said(apart)}: whoever takes it does not train with those who have not. "
            "Start again (Ctrl-C, and the same command) to take it, too."
            if apart
            else "It counts from your next start; until then this peer trains by the one before, "
            "together with everybody else."
        )
        self._tell_once(f"{SIGNED}. {when}")

    def _tell_once(self, words: str) -> None:
        if words != self._told:
            self._told = words
            self._tell(words)
