"""How fast each peer has sent the last result that was had from it. Pure.

    paces = Paces()
    for source in paces.ordered(sources): ...      # those not known yet, then the fastest
    paces.sent(peer, count, seconds); paces.failed(peer)

Who follows a run by its results needs each in less than the time of a step, and one slow uplink, or
one owner's cap, is enough to be always late. So this outlives a fetch: what follows a state is
asked for in several.

Easy to get wrong: who is not known is asked first, once, or a fast one would never be found.
"""

from __future__ import annotations

from collections.abc import Iterable

from protocols.accumulation.state_sources import StateSource
from protocols.identity import PeerId

SUPPOSED_SECONDS = (
    1e-6  # for a byte, of who has failed and never sent anything: a megabyte a second
)
MOST_KNOWN = 64  # peers; a newcomer asks eight for a result at the most


class Paces:
    """Invariant: at most MOST_KNOWN; who was asked longest ago is forgotten first."""

    def __init__(self) -> None:
        self._seconds: dict[PeerId, float] = {}  # for a byte

    def ordered(self, sources: Iterable[StateSource]) -> list[StateSource]:
        """In which order to ask; of equals as they come."""
        return sorted(sources, key=lambda one: self._seconds.get(one.peer, 0.0))

    def sent(self, peer: PeerId, count: int, seconds: float) -> None:
        """So many bytes have come from it in so long, the asking included."""
        self._know(peer, seconds / max(count, 1))

    def failed(self, peer: PeerId) -> None:
        """Nothing came. It counts as half as fast as before: it may have been busy, and the others
        may be slow for ever."""
        self._know(peer, 2.0 * self._seconds.get(peer, SUPPOSED_SECONDS))

    def _know(self, peer: PeerId, seconds: float) -> None:
        self._seconds.pop(peer, None)
        self._seconds[peer] = seconds
        if len(self._seconds) > MOST_KNOWN:
            del self._seconds[next(iter(self._seconds))]
