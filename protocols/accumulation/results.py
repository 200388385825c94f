"""Keeps the results that steps were made of, so that another peer can make the same steps later.

    made = Made("step", committed.digest, committed.cut)
    result = CommittedResult.encoded_from(before, made, values, layouts)     # in the round
    result.after                            # epoch and history after this step
    steps.apply(result.values(layouts))     # at another peer: the same bits, so the same step

There are three kinds: the average that a step was made with; the gradients of a peer that was
alone, in the same form; and averaged parameters. They are kept and sent encoded, as the round sent
them.

Promises: `proven_digest` is computed from the bytes that are here, and the history after a step is
a hash over the history before it and that digest. So a peer that knows the run's history need not
trust any other peer about its steps.

Easy to get wrong: the digest is over the encoded bytes, in the parts in which they were reduced
(moshpit/layout.py). A lone step has one part and no codec.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from blake3 import blake3
from torch import Tensor

from protocols.accumulation.lineage import Lineage, history_after_parameters, next_history
from protocols.accumulation.state_messages import MOST_RESULTS, ROOM_OF_SMALL_BYTES, ResultKind
from protocols.errors import PotluckError
from protocols.moshpit.encoded_result import (
    chunks,
    decode_result,
    encode_result,
    part_digests,
)
from protocols.moshpit.layout import (
    Layout,
    PartCut,
    PartHash,
    ResultCut,
    Segment,
    digest_of_parts,
)
from protocols.moshpit.settings import CHUNK_BYTES
from protocols.tensors import raw_bytes

_LONE = b"potluck lone step 1\0"

_DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Made:
    """How a result was made. `nonce`: of a lone step, so that no other step has its digest."""

    kind: ResultKind
    digest: bytes
    cut: ResultCut | None
    nonce: bytes = b""


@dataclass(frozen=True)
class ResultLayouts:
    """The layouts of a run's results: in rounds of gradients (of each epoch in turn), and of
    parameters."""

    exchanged: Sequence[Layout]
    parameters: Layout

    def of(self, kind: ResultKind, epoch: int) -> Layout:
        """The layout of a result that leads on from this epoch."""
        match kind:
            case "step":
                return self.exchanged[epoch % len(self.exchanged)]
            case "lone step":
                return _not_encoded(self.exchanged[epoch % len(self.exchanged)])
            case "parameters":
                return self.parameters


@dataclass(frozen=True, eq=False)
class CommittedResult:
    """Invariant: `cut` covers the layout of its kind, and `memory` has the bytes of its chunks."""

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
        """Encode a copy, as it was sent; None if it cannot be encoded again."""
        layout, cut = layouts.of(made.kind, before.epoch), made.cut
        if cut is None or not cut.covers(layout):
            return None
        try:
            memory = encode_result(values, layout, cut)
        except PotluckError:
            return None
        return CommittedResult(before, made.kind, made.digest, cut, made.nonce, memory)

    @property
    def after(self) -> Lineage:
        return lineage_after(self.before, self.kind, self.digest)

    def values(self, layouts: ResultLayouts) -> Tensor:
        """The decoded values, as all members of the round had them. MalformedMessage if one is not
        finite."""
        layout = layouts.of(self.kind, self.before.epoch)
        values = torch.empty(layout.values, dtype=_DTYPES[layout.dtype])
        decode_result(self.memory, layout, self.cut, values)
        return values

    def part_digests(self, layouts: ResultLayouts) -> dict[int, bytes]:
        """The digests of the bytes that are here. This hashes all of them."""
        layout = layouts.of(self.kind, self.before.epoch)
        return part_digests(self.memory, layout, self.cut)


def lineage_after(before: Lineage, kind: ResultKind, digest: bytes) -> Lineage:
    """Epoch and history of a peer after it has applied a result with this digest."""
    if kind == "parameters":
        history = history_after_parameters(before.history, before.epoch, digest)
        return Lineage(before.epoch, history)
    return Lineage(before.epoch + 1, next_history(before.history, before.epoch, digest))


def proven_digest(kind: ResultKind, nonce: bytes, part_digests: dict[int, bytes]) -> bytes:
    """The digest of the result with these digests of parts."""
    digest = digest_of_parts(part_digests)
    return blake3(_LONE + nonce + digest).digest() if kind == "lone step" else digest


def lone_step(
    values: Tensor, layouts: ResultLayouts, epoch: int, nonce: bytes, *, followed: bool
) -> Made:
    """The source of a step that a peer makes alone, from this epoch. `nonce`: NONCE_BYTES random
    bytes, so that the step leads to a history of its own. Unless somebody follows, the values are
    not hashed: nobody else will make this step."""
    if not followed:
        return Made("lone step", blake3(_LONE + nonce).digest(), None, nonce)
    layout = layouts.of("lone step", epoch)
    cut = ResultCut((PartCut(0, 0, layout.values),), CHUNK_BYTES)
    digest, bytes_of = PartHash(), raw_bytes(values)
    for chunk in chunks(layout, cut):
        size = layout.value_bytes
        digest.add(bytes_of[size * chunk.start : size * chunk.stop])
    return Made("lone step", proven_digest("lone step", nonce, {0: digest.digest}), cut, nonce)


def usual_bytes(layouts: ResultLayouts) -> int:
    """The bytes of a step's result, except for a few scales; the cut makes no difference. In the
    mean, if rounds average one fragment after the other."""
    sizes = [one.encoded_bytes(0, one.values, CHUNK_BYTES) for one in layouts.exchanged]
    return -(-sum(sizes) // len(sizes))


def _not_encoded(layout: Layout) -> Layout:
    codec: Literal["none", "float64"] = "float64" if layout.dtype == "float64" else "none"
    return Layout(tuple(Segment(one.name, one.values, codec) for one in layout.segments))


# ---- the results that a peer keeps
#
# Keeps the results of a peer's last steps while another peer follows the run by them.
#
#   kept.follow(state_bytes)                     # trio: a newcomer begins to fetch the state
#   kept.add(before, made, values)               # the training thread: just before it steps
#   kept.following(Lineage(7, history))          # the results that lead on from there
#
# When a newcomer on a slow link has the state of an epoch, the run is some epochs further. It then
# makes the steps in between itself, from their results (state_fetching.py).
#
# Promises: nothing is copied while no peer follows, that is, if no peer has asked for anything for
# three steps and two seconds. At most MOST_RESULTS are kept, encoded as the round sent them. Apart
# from the last one, they take no more bytes than one copy of the state (or ROOM_OF_SMALL_BYTES),
# and no more than the owner allows (`limit`).
#
# Easy to get wrong: call `add` with the state's lock held for changing, and before the values are
# used, because a step changes them. The lock also makes sure that if a state is copied after
# `follow`, the result of the step that follows it is kept.

log = logging.getLogger("potluck.state")

STEPS_FOLLOWED = 3
"""Results are kept for this many steps after the last request. A peer that has caught up may still
miss the round under way, and the next one, before it has computed a batch."""

FOLLOWED_SECONDS = 2.0
"""They are also kept for this long. A peer that has caught up may have to read a slot before it
asks again. A slot may be a second old, and a run may make a dozen steps meanwhile."""


@dataclass(frozen=True, eq=False)
class Offered:
    """A result for others, with the digests of its parts, and the results that follow it."""

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
    """The results kept by one peer. Thread-safe. Invariant: each result begins where the one before
    it ends."""

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
        """The size of the largest kept result, or of a round's result if none is kept."""
        held = max((len(one.memory) for one in tuple(self._results)), default=0)
        return max(held, usual_bytes(self.layouts))

    def usual_steps(self, state_bytes: int) -> int:
        """How many results are kept beside a state of this size."""
        kept = int(self._room(state_bytes) / max(1, self.usual_bytes))
        return max(1, min(MOST_RESULTS, kept))

    def limit(self, most_bytes: float) -> None:
        """Hold no more than this from now on."""
        with self._lock:
            self._limit = most_bytes

    def lead(self, before: Lineage, after: Lineage) -> bool:
        """Whether the kept results lead from one place to the other."""
        results = tuple(self._results)
        starts = [place for place, one in enumerate(results) if one.before == before]
        return bool(starts) and any(one.after == after for one in results[starts[0] :])

    def are_after(self, place: Lineage) -> bool:
        """Whether the kept results lead on from this place, as far as can be told."""
        results = tuple(self._results)
        return not results or place in {one.before for one in results} or results[-1].after == place

    def follow(self, state_bytes: int = 0) -> None:
        """A peer wants the results of the next steps."""
        with self._lock:
            self._steps_left, self._until = STEPS_FOLLOWED, self._clock() + FOLLOWED_SECONDS
            self._most_bytes = max(self._most_bytes, state_bytes)

    def add(self, before: Lineage, made: Made, values: Tensor) -> None:
        """A step is about to be made from this. It is copied only if a peer follows."""
        if self._is_followed():
            self._keep(CommittedResult.encoded_from(before, made, values, self.layouts))

    def take_over(self, results: Sequence[CommittedResult]) -> None:
        """This peer is about to make steps from these fetched results. It keeps them for peers that
        follow it in turn; they are in memory anyway."""
        for one in results:
            if self._is_followed():
                self._keep(one)

    @property
    def is_followed(self) -> bool:
        """Whether a peer follows."""
        return bool(self._steps_left) or self._clock() < self._until

    def _is_followed(self) -> bool:
        """Whether a peer follows as of the next step. If not, the results are forgotten."""
        with self._lock:
            is_followed = self.is_followed
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
        """The result that follows this lineage, and all later ones; None if it is not kept, or
        could not be checked by others. The first call hashes it."""
        with self._lock:
            results = tuple(self._results)
            known = self._proven.get(before)
        places = [place for place, one in enumerate(results) if one.before == before]
        if not places:
            return None
        found = results[places[0] :]
        digests = found[0].part_digests(self.layouts) if known is None else known
        if proven_digest(found[0].kind, found[0].nonce, digests) != found[0].digest:
            log.info("a result cannot be offered to others: a reducer encoded it in another way")
            with self._lock:
                self._results.clear()
            return None
        with self._lock:
            kept = {one.before for one in self._results}
            self._proven[before] = digests
            self._proven = {where: one for where, one in self._proven.items() if where in kept}
        return Offered(found, self.layouts, digests)

    def _keep_few(self) -> None:
        room = self._room(self._most_bytes)
        while len(self._results) > 1 and (
            len(self._results) > MOST_RESULTS
            or sum(len(one.memory) for one in self._results) > room
        ):
            self._results.popleft()

    def _room(self, state_bytes: int) -> float:
        return min(max(state_bytes, ROOM_OF_SMALL_BYTES), self._limit)
