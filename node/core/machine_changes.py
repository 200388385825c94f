"""Noticing at once that the machine has slept, or is on another network.

    async with … nursery:
        nursery.start_soon(MachineWatch(network, dht).run)

When a laptop wakes up, or changes networks, its connections are dead without notice: the other ends
hung up while it slept, or send to its old address. The keep-alive of each would find out in its own
time, and the directory would retry silent peers in its own time. Instead, every link is asked for a
sign of life at such a moment and closed if none comes, and all known peers are tried again at once.

Most clocks stop while a machine sleeps, trio's among them. So a sleep is detected by a clock that
goes on: more time has passed on it than this task has waited for. A stopped process looks the same,
and for its peers it is the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import trio

from nat.addresses import ip_of
from node.core.duration import span
from node.net import machine_clocks
from protocols.dht import Dht
from protocols.errors import Unreachable
from protocols.identity import PeerId
from protocols.network import TraversableNetwork

LOOK_SECONDS: Final = 2.0  # reading the interfaces takes a third of a millisecond
ASLEEP_SECONDS: Final = 8.0
"""If this task wakes up so much later than due, the machine has slept.

A loaded machine is late by two or three seconds. The keep-alive of peers gives up a connection that
was silent for ten.
"""

SIGN_OF_LIFE_SECONDS: Final = 2.0  # for an answer, unless the link was measured to be slower
ROUND_TRIPS: Final = 4.0  # of the slowest recent one: a queue may be full of earlier data

log = logging.getLogger("potluck.network")

Changed = Callable[[str], None]


class MachineWatch:
    """Watches one node. `elapsed` goes on while the machine sleeps.

    Without such a clock it is the wall clock. If that is set forward, a check follows, which does
    no harm.
    """

    def __init__(
        self, network: TraversableNetwork, dht: Dht, *, elapsed: Callable[[], float] | None = None
    ) -> None:
        self._network, self._dht = network, dht
        clocks = machine_clocks()
        self._elapsed = elapsed or (clocks.elapsed if clocks.counts_sleep else clocks.wall)
        self._followers: list[Changed] = []

    def follow(self, tell: Changed) -> None:
        """Call `tell` with a text at each change, in trio's thread; it must not wait."""
        self._followers.append(tell)

    async def run(self) -> None:
        """Watch, for ever."""
        places = self._places()
        while True:
            began = self._elapsed()
            await trio.sleep(LOOK_SECONDS)
            slept = self._elapsed() - began - LOOK_SECONDS
            places_before, places = places, self._places()
            if slept > ASLEEP_SECONDS:
                self._tell(
                    f"this machine slept for {span(slept)}: checking which peers are still there"
                )
            elif places_before - places and places:
                self._tell("this machine has another address: checking which peers are still there")
            elif not places_before and places:
                self._tell("this machine has an address again: looking for the others")
            else:
                continue
            self._dht.try_again_now()
            await self._ask_for_life()

    def _places(self) -> frozenset[str]:
        """Where others could reach this machine. Loopback stays when a cable is pulled."""
        listened = self._network.listened_addresses()
        return frozenset(one for one in listened if (ip := ip_of(one)) and not ip.is_loopback)

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
        with trio.move_on_after(patience) as silence, suppress(Unreachable):  # already gone
            await self._network.ping(peer)
        if not silence.cancelled_caught:
            return
        link = self._network.link(peer)
        if link is not None and link.bytes_received <= received:
            log.info("the link to %s gives no sign of life after the change", peer)
            await self._network.disconnect(peer)
