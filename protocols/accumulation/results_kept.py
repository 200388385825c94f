"""The results of a peer's last steps, while somebody follows the run by them.

    kept.follow(state_bytes)                     # trio: a newcomer begins to fetch the state
    kept.add(before, made, values)               # the training thread: just before it steps
    kept.following(Lineage(7, history))          # the results that lead on from there

A newcomer on a slow link has the state of an epoch when the run is some epochs further. It then
makes the steps in between itself, with the results that they were made of (state_following.py).

Promises: nothing is copied while nobody follows, which is when nobody has asked for anything for
three steps and two seconds. At most MOST_RESULTS are kept, encoded as the round has sent them, and
never more bytes than one copy of the state has (or ROOM_OF_SMALL_BYTES), but for the last one.

Easy to get wrong: `add` is called with the lock of the state for changing, before the values are
used: a step changes them. And so a copy of the state that was made after `follow` is never of an
epoch whose step is not kept.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from protocols.accumulation.committed_result import (
    CommittedResult,
    Made,
    ResultLayouts,
    proven_digest,
    usual_bytes,
)
from protocols.accumulation.forks import Lineage
from protocols.accumulation.state_messages import MOST_RESULTS, ROOM_OF_SMALL_BYTES

log = logging.getLogger("potluck.state")

STEPS_FOLLOWED = 3
"""For so many steps results are kept after the last question: who has caught up may still miss the
round that is under way, and the next one too, before it has computed a batch."""

FOLLOWED_SECONDS = 2.0
"""And for so long: who has caught up may also have to read a slot, which is a second old at times,
before it asks again; a run may make a dozen steps meanwhile."""


@dataclass(frozen=True, eq=False)
class Offered:
    """A result that can be shown to others, by the digests of its parts, and what follows it."""

    results: tuple[CommittedResult, ...]
    layouts: ResultLayouts
    part_digests: Mapping[int, bytes]

    @property
    def first(self) -> CommittedResult:
        return self.results[0]

    @property
    def bytes(self) -> int:
        return len(self.first.memory)


class ResultsKept:
    """Of one peer, for any thread. Invariant: each result begins where the one before ends."""

    def __init__(
        self, layouts: ResultLayouts, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.layouts = layouts
        self._clock = clock
        self._lock = threading.Lock()
        self._results: deque[CommittedResult] = deque()
        self._steps_left, self._until = 0, 0.0
        self._most_bytes = 0
        self._proven: dict[Lineage, dict[int, bytes]] = {}

    def __len__(self) -> int:
        return len(self._results)

    @property
    def bytes(self) -> int:
        return sum(len(one.memory) for one in tuple(self._results))

    @property
    def usual_bytes(self) -> int:
        """Of one result: of the largest that is kept, or as many as a round's takes."""
        held = max((len(one.memory) for one in tuple(self._results)), default=0)
        return max(held, usual_bytes(self.layouts))

    def follow(self, state_bytes: int = 0) -> None:
        """Somebody wants to know what the next steps are made of."""
        with self._lock:
            self._steps_left, self._until = STEPS_FOLLOWED, self._clock() + FOLLOWED_SECONDS
            self._most_bytes = max(self._most_bytes, state_bytes)

    def add(self, before: Lineage, made: Made, values: Tensor) -> None:
        """A step is about to be made of this. Copies it only if somebody follows."""
        if self._is_followed():
            self._keep(CommittedResult.encoded_from(before, made, values, self.layouts))

    def take_over(self, results: Sequence[CommittedResult]) -> None:
        """Steps that others have made are about to be made of these. Who follows this peer, which
        has followed itself, gets them from here, too; they are in memory in any case."""
        for one in results:
            if self._is_followed():
                self._keep(one)

    def _is_followed(self) -> bool:
        """As of the next step; what nobody follows is forgotten."""
        with self._lock:
            is_followed = bool(self._steps_left) or self._clock() < self._until
            self._steps_left = max(0, self._steps_left - 1)
            if not is_followed:
                self._results.clear()
                self._most_bytes = 0
            return is_followed

    def _keep(self, result: CommittedResult | None) -> None:
        with self._lock:
            if result is None or (self._results and self._results[-1].after != result.before):
                self._results.clear()
            if result is not None:
                self._results.append(result)
                self._keep_few()

    def following(self, before: Lineage) -> Offered | None:
        """The result that leads on from there, and all that come after it; None if it is not kept,
        or if nobody could check it. Takes as long as hashing it, the first time."""
        with self._lock:
            results = tuple(self._results)
            known = self._proven.get(before)
        places = [place for place, one in enumerate(results) if one.before == before]
        if not places:
            return None
        found = results[places[0] :]
        digests = found[0].part_digests(self.layouts) if known is None else known
        if proven_digest(found[0].kind, found[0].nonce, digests) != found[0].digest:
            log.info("a result cannot be shown to others: a reducer has encoded it strangely")
            with self._lock:
                self._results.clear()
            return None
        with self._lock:
            kept = {one.before for one in self._results}
            self._proven[before] = digests
            self._proven = {where: one for where, one in self._proven.items() if where in kept}
        return Offered(found, self.layouts, digests)

    def _keep_few(self) -> None:
        room = max(self._most_bytes, ROOM_OF_SMALL_BYTES)
        while len(self._results) > 1 and (
            len(self._results) > MOST_RESULTS
            or sum(len(one.memory) for one in self._results) > room
        ):
            self._results.popleft()
