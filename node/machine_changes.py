"""A machine that has slept, or is somewhere else than before: noticed at once, and gone after.

    async with … nursery:
        nursery.start_soon(MachineWatch(network, dht).run)

A laptop wakes up, or changes from one network to another. Its connections are dead and nothing says
so: whoever was at the other end hung up while it slept, or sends to an address that is nobody's
now. The keep-alive of each would find out in its own time, and the directory, where nobody answered
for long, would try again in its own. Instead, at such a moment every link is asked for a sign of
life and closed where none comes, and all who are known are tried again at once.

Easy to get wrong: most clocks stand still while a machine sleeps, trio's among them. So sleep shows
as time on a clock that goes on, of which there is more than this task has waited for. A process
that was stopped looks the same, and for those at the other end it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import trio

from node.access.server_time import machine_clocks
from node.trainer.words import span
from protocols.dht.service import Dht
from protocols.errors import Unreachable
from protocols.identity import PeerId
from protocols.network import Network

LOOK_SECONDS: Final = 2.0  # reading the interfaces takes a third of a millisecond
ASLEEP_SECONDS: Final = 8.0
"""So much later than due, this task has slept: a loaded machine is late by two or three seconds. By
the keep-alive, peers give up a connection that was silent for thirteen."""

SIGN_OF_LIFE_SECONDS: Final = 2.0  # for an answer, where the link was not measured to be slower
ROUND_TRIPS: Final = 4.0  # of the slowest kind: a queue may be full of what was sent before

log = logging.getLogger("potluck.network")

Changed = Callable[[str], None]


class MachineWatch:
    """For one node. `elapsed` goes on while the machine sleeps. Where no clock does but the one on
    the wall, somebody who sets that forward makes it look, which does no harm."""

    def __init__(
        self, network: Network, dht: Dht, *, elapsed: Callable[[], float] | None = None
    ) -> None:
        self._network, self._dht = network, dht
        clocks = machine_clocks()
        self._elapsed = elapsed or (clocks.elapsed if clocks.counts_sleep else clocks.wall)
        self._followers: list[Changed] = []

    def follow(self, tell: Changed) -> None:
        """Be told in words, in trio's thread, of each change; it must not wait."""
        self._followers.append(tell)

    async def run(self) -> None:
        """For ever."""
        places = frozenset(self._network.addresses())
        while True:
            began = self._elapsed()
            await trio.sleep(LOOK_SECONDS)
            slept = self._elapsed() - began - LOOK_SECONDS
            places_before, places = places, frozenset(self._network.addresses())
            if slept > ASLEEP_SECONDS:
                self._tell(f"this machine slept for {span(slept)}: looking who is still there")
            elif places_before - places and places:
                self._tell("this machine has another address: looking who is still there")
            elif not places_before and places:
                self._tell("this machine has an address again: looking for the others")
            else:
                continue
            self._dht.try_again_now()
            await self._ask_for_life()

    def _tell(self, words: str) -> None:
        log.info("%s", words)
        for follower in tuple(self._followers):
            follower(words)

    async def _ask_for_life(self) -> None:
        async with trio.open_nursery() as nursery:
            for link in self._network.links():
                trip = link.round_trip_seconds or 0.0
                patience = max(SIGN_OF_LIFE_SECONDS, ROUND_TRIPS * trip)
                nursery.start_soon(self._ask, link.peer, link.bytes_received, patience)

    async def _ask(self, peer: PeerId, received: int, patience: float) -> None:
        with trio.move_on_after(patience) as silence, suppress(Unreachable):  # gone by itself
            await self._network.ping(peer)
        if not silence.cancelled_caught:
            return
        link = self._network.link(peer)
        if link is not None and link.bytes_received <= received:
            log.info("the link to %s gives no sign of life after the change", peer)
            await self._network.disconnect(peer)
