"""What is open with each peer, so that all of it can be ended at once: calls, handlers, transfers.

Whatever talks with a peer *enters* here with the function that ends it, and leaves when it has
ended. When a peer is no longer allowed to take part, `end_all_with` calls them all.

Promise: `end_all_with` does not wait. What it ends takes no further step after the next turn of
the event loop; what has ended may still be telling the peer why, which `ended` waits for.

Easy to get wrong: an ending function is called while others enter and leave. It must only set
things in motion (cancel a scope, wake tasks), never wait, and never raise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import trio

from protocols.errors import PotluckError
from protocols.identity import PeerId

EndWith = Callable[[PotluckError], None]


class Ending:
    """A piece of work that can be ended from outside, with the reason. `error` is that reason."""

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self.error: PotluckError | None = None

    def end_with(self, error: PotluckError) -> None:
        if self.error is None:
            self.error = error
            self.scope.cancel()

    @property
    def cut_short(self) -> PotluckError | None:
        """Why the work was cut short; None if it was not, or had just ended by itself."""
        return self.error if self.scope.cancelled_caught else None


class Engagements:
    """Everything that is open with anybody."""

    def __init__(self) -> None:
        self._of_peer: dict[PeerId, set[EndWith]] = {}
        self._left: dict[PeerId, trio.Event] = {}

    def with_peer(self, peer: PeerId) -> int:
        """How many things are open with this peer."""
        return len(self._of_peer.get(peer, ()))

    def enter(self, peer: PeerId, end_with: EndWith) -> None:
        self._of_peer.setdefault(peer, set()).add(end_with)

    def leave(self, peer: PeerId, end_with: EndWith) -> None:
        mine = self._of_peer[peer]
        mine.remove(end_with)
        if not mine:
            del self._of_peer[peer]
            if peer in self._left:
                self._left.pop(peer).set()

    @contextmanager
    def engaged(self, peer: PeerId) -> Iterator[Ending]:
        """Run the block so that it can be ended from outside; look at `cut_short` behind it."""
        ending = Ending()
        self.enter(peer, ending.end_with)
        try:
            with ending.scope:
                yield ending
        finally:
            self.leave(peer, ending.end_with)

    def end_all_with(self, peer: PeerId, error: PotluckError) -> int:
        """End everything that is open with a peer; how much that was."""
        ends = list(self._of_peer.get(peer, ()))
        for end_with in ends:
            end_with(error)
        return len(ends)

    async def ended(self, peer: PeerId) -> None:
        """Wait until nothing is open with this peer."""
        while peer in self._of_peer:
            await self._left.setdefault(peer, trio.Event()).wait()
