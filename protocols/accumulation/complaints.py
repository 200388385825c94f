"""Logs, once for each peer, why it does not count or cannot be followed.

Easy to get wrong: any stranger can give reason to complain, so what is remembered is bounded.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from protocols.accumulation.estimate import Ignored
from protocols.accumulation.progress_slot import MOST_PEERS
from protocols.accumulation.signature import torch_release
from protocols.identity import PeerId

log = logging.getLogger("potluck.accumulation")


class Complaints:
    """The complaints of one tracker."""

    def __init__(self) -> None:
        self._last: dict[PeerId, str] = {}
        self._other_torch: set[PeerId] = set()

    def do_not_count(self, ignored: Iterable[Ignored]) -> None:
        """Log why each of these does not count, and again if the reason changes."""
        if len(self._last) > MOST_PEERS:
            self._last.clear()
        for one in ignored:
            if self._last.get(one.peer) != one.kind:
                self._last[one.peer] = one.kind
                log.warning("%s does not count: %s", one.peer, one.reason)

    def has_a_twin(self, me: PeerId) -> None:
        """Two nodes with one identity overwrite each other's slot, and count as one."""
        if self._last.get(me) is None:
            self._last[me] = "twin"
            log.warning(
                "Another node publishes progress with this node's identity. Each of the two "
                "overwrites what the other says. Give every node a key of its own."
            )

    def has_torch(self, peer: PeerId, its: str, ours: str) -> None:
        """With another release of torch, two peers can average, but neither can take the other's
        state."""
        own, theirs = torch_release(ours), torch_release(its)
        if not own or not theirs or own == theirs or peer in self._other_torch:
            return
        if len(self._other_torch) > MOST_PEERS:
            self._other_torch.clear()
        self._other_torch.add(peer)
        log.warning(
            "%s trains with torch %s and this peer with torch %s, so neither can take the other's "
            "state. Install the release that most peers of the run have.",
            peer,
            theirs,
            own,
        )
