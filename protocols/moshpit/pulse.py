"""Who of a round's members is alive, by the bytes that come over their links.

A message on a slow link waits behind the chunks that were queued before it, for many seconds
where a home connection's buffers are full. So that nothing was answered says little while bytes
arrive from a member, and much when none do: a process that is stopped or cut off sends nothing.

Easy to get wrong: bytes that arrive say that a member lives, and not that it got what we sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import trio

from protocols.identity import PeerId
from protocols.network import Network

BEAT_SECONDS = 0.5  # between two looks at the links
FRESH_SECONDS = 3.5  # several chunks of a slow link, each from another member


class Pulse:
    """When each member was last heard of, by its place in the list."""

    def __init__(
        self, network: Network, peers: Sequence[PeerId], heard: Callable[[int], None]
    ) -> None:
        self._network = network
        self._peers = tuple(peers)
        self._heard = heard
        self._received = [0] * len(self._peers)
        self._last: list[float | None] = [None] * len(self._peers)

    def is_fresh(self, place: int) -> bool:
        """Whether anything has come from this member a moment ago."""
        last = self._last[place]
        return last is not None and trio.current_time() - last <= FRESH_SECONDS

    async def follow(self) -> None:
        """Look at the links for ever, and tell of every member that was heard."""
        self._look(tell=False)
        while True:
            await trio.sleep(BEAT_SECONDS)
            self._look(tell=True)

    def _look(self, *, tell: bool) -> None:
        for place, peer in enumerate(self._peers):
            link = self._network.link(peer)
            received = 0 if link is None else link.bytes_received
            if received > self._received[place] and tell:
                self._last[place] = trio.current_time()
                self._heard(place)
            self._received[place] = received
