"""What a step was made of, so that somebody else can make the same step later.

    made = Made("step", committed.digest, committed.cut)
    result = CommittedResult.encoded_from(before, made, values, layouts)     # at who was there
    result.after                            # epoch and history of who has made this step
    steps.apply(result.values(layouts))     # at who was not: the same bits, so the same step

There are three kinds: the average that a step was made with; a lone peer's own gradients, in the
same form; and averaged parameters. They are kept and sent as the round has sent them, encoded.

Promises: `proven_digest` is that of the bytes that are here, and the history after a step is a hash
over the one before and that digest. So whoever knows the history of the run needs to believe nobody
about any of its steps.

Easy to get wrong: the digest is that of the encoded bytes, part by part as they were reduced
(moshpit/layout.py); a lone step has one part and no codec.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from blake3 import blake3
from torch import Tensor

from protocols.accumulation.lineage import Lineage, history_after_parameters, next_history
from protocols.accumulation.state_messages import MOST_RESULTS, ROOM_OF_SMALL_BYTES, ResultKind
from protocols.errors import PotluckError
from protocols.moshpit.layout import (
    Chunk,
    Layout,
    PartCut,
    PartHash,
    ResultCut,
    Segment,
    digest_of_parts,
)
from protocols.moshpit.settings import CHUNK_BYTES
from protocols.tensors import decode_into, encode_into, raw_bytes

_LONE = b"potluck lone step 1\0"

_DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Made:
    """How a result came about. `nonce`: of a lone step, so that nobody else has its digest."""

    kind: ResultKind
    digest: bytes
    cut: ResultCut | None
    nonce: bytes = b""


@dataclass(frozen=True)
class ResultLayouts:
    """How the values of a run's results lie: in rounds of steps, and of parameters."""

    exchanged: Layout
    parameters: Layout

    def of(self, kind: ResultKind) -> Layout:
        match kind:
            case "step":
                return self.exchanged
            case "lone step":
                return _not_encoded(self.exchanged)
            case "parameters":
                return self.parameters


@dataclass(frozen=True, eq=False)
class CommittedResult:
    """Invariant: `cut` covers the layout of its kind, and `memory` has its chunks' bytes."""

    before: Lineage
    kind: ResultKind
    digest: bytes
    cut: ResultCut
    nonce: bytes
    memory: memoryview

    @staticmethod
    def encoded_from(
        before: Lineage, made: Made, values: Tensor, layouts: ResultLayouts
    ) -> CommittedResult | None:
        """A copy, as it was sent; None of what cannot be encoded once more."""
        layout, cut = layouts.of(made.kind), made.cut
        if cut is None or not cut.covers(layout):
            return None
        memory, end = memoryview(bytearray(encoded_bytes(layout, cut))), 0
        try:
            for chunk in chunks(layout, cut):
                place = memory[end : end + chunk.encoded_bytes]
                encode_into(values[chunk.start : chunk.stop], chunk.codec, place, name="the result")
                end += chunk.encoded_bytes
        except PotluckError:
            return None
        return CommittedResult(before, made.kind, made.digest, cut, made.nonce, memory)

    @property
    def after(self) -> Lineage:
        return lineage_after(self.before, self.kind, self.digest)

    def values(self, layouts: ResultLayouts) -> Tensor:
        """Decoded: what all members of the round have had. MalformedMessage if it is not finite."""
        layout = layouts.of(self.kind)
        values, end = torch.empty(layout.values, dtype=_DTYPES[layout.dtype]), 0
        for chunk in chunks(layout, self.cut):
            place = self.memory[end : end + chunk.encoded_bytes]
            decode_into(values[chunk.start : chunk.stop], chunk.codec, place, layout.dtype)
            end += chunk.encoded_bytes
        return values

    def part_digests(self, layouts: ResultLayouts) -> dict[int, bytes]:
        """Of the bytes that are here. Its cost is that of hashing."""
        layout, digests, end = layouts.of(self.kind), {}, 0
        for part in self.cut.parts:
            digest = PartHash()
            for chunk in part.chunks(layout, self.cut.chunk_bytes):
                digest.add(self.memory[end : end + chunk.encoded_bytes])
                end += chunk.encoded_bytes
            digests[part.reducer] = digest.digest
        return digests


def lineage_after(before: Lineage, kind: ResultKind, digest: bytes) -> Lineage:
    """Where a peer is that was there, and has taken over a result with this digest."""
    if kind == "parameters":
        history = history_after_parameters(before.history, before.epoch, digest)
        return Lineage(before.epoch, history)
    return Lineage(before.epoch + 1, next_history(before.history, before.epoch, digest))


def proven_digest(kind: ResultKind, nonce: bytes, part_digests: dict[int, bytes]) -> bytes:
    """The digest of the result whose parts have these."""
    digest = digest_of_parts(part_digests)
    return blake3(_LONE + nonce + digest).digest() if kind == "lone step" else digest


def lone_step(values: Tensor, layouts: ResultLayouts, nonce: bytes) -> Made:
    """What a peer that is alone makes its step of. `nonce`: NONCE_BYTES by chance, so that it makes
    a history of its own."""
    layout = layouts.of("lone step")
    cut = ResultCut((PartCut(0, 0, layout.values),), CHUNK_BYTES)
    digest, bytes_of = PartHash(), raw_bytes(values)
    for chunk in chunks(layout, cut):
        size = layout.value_bytes
        digest.add(bytes_of[size * chunk.start : size * chunk.stop])
    return Made("lone step", proven_digest("lone step", nonce, {0: digest.digest}), cut, nonce)


def chunks(layout: Layout, cut: ResultCut) -> Iterable[Chunk]:
    """The chunks of a result, in the order in which they are sent and lie in memory."""
    for part in cut.parts:
        yield from part.chunks(layout, cut.chunk_bytes)


def encoded_bytes(layout: Layout, cut: ResultCut) -> int:
    """How much memory a result takes."""
    return sum(layout.encoded_bytes(part.start, part.stop, cut.chunk_bytes) for part in cut.parts)


def usual_bytes(layouts: ResultLayouts) -> int:
    """How much a step's result takes, whatever it is cut into, but for a few scales."""
    layout = layouts.exchanged
    return layout.encoded_bytes(0, layout.values, CHUNK_BYTES)


def _not_encoded(layout: Layout) -> Layout:
    codec: Literal["none", "float64"] = "float64" if layout.dtype == "float64" else "none"
    return Layout(tuple(Segment(one.name, one.values, codec) for one in layout.segments))


# ---- the results that a peer keeps
#
# The results of a peer's last steps, while somebody follows the run by them.
#
#   kept.follow(state_bytes)                     # trio: a newcomer begins to fetch the state
#   kept.add(before, made, values)               # the training thread: just before it steps
#   kept.following(Lineage(7, history))          # the results that lead on from there
#
# A newcomer on a slow link has the state of an epoch when the run is some epochs further. It then
# makes the steps in between itself, with the results that they were made of (state_fetching.py).
#
# Promises: nothing is copied while nobody follows, which is when nobody has asked for anything for
# three steps and two seconds. At most MOST_RESULTS are kept, encoded as the round has sent them,
# and never more bytes than one copy of the state has (or ROOM_OF_SMALL_BYTES), or than the owner
# allows (`limit`), but for the last one.
#
# Easy to get wrong: `add` is called with the lock of the state for changing, before the values are
# used: a step changes them. And so a copy of the state that was made after `follow` is never of an
# epoch whose step is not kept.

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
        self._most_bytes, self._limit = 0, math.inf
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

    def limit(self, most_bytes: float) -> None:
        """Hold no more than that from now on."""
        with self._lock:
            self._limit = most_bytes

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
        room = min(max(self._most_bytes, ROOM_OF_SMALL_BYTES), self._limit)
        while len(self._results) > 1 and (
            len(self._results) > MOST_RESULTS
            or sum(len(one.memory) for one in self._results) > room
        ):
            self._results.popleft()
