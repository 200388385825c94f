"""One source: its shards in this peer's order, pass after pass, cut into examples.

Promises: a shard that breaks is skipped with an event, after the examples before the break were
given. A source that gives nothing from several shards in a row, or in a whole pass, is broken, and
never spins. Broken or not, `head` and `owed` are always its present position, and `examples` can be
called again to continue from there.

An example belongs to the head or to the owed ones, and never to both. The head moves before the
example is given, so that a position taken after it is right.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Generator, Iterator

from models.data.cutting import cut
from models.data.errors import ShardBroken, SourceBroken
from models.data.events import (
    DocumentsSkipped,
    ExamplesLost,
    OnEvent,
    PassBegun,
    Retrying,
    ShardSkipped,
    SourceEnded,
    StartedOver,
)
from models.data.examples import (
    Document,
    Example,
    ExamplePlace,
    Mark,
    Pause,
    Shards,
    SkippedDocument,
)
from models.data.order import shard_order
from models.data.position import ReadHead, SourcePosition, mark_of
from models.data.settings import SourceSettings, TokenizerSettings, is_address

MOST_BROKEN_IN_A_ROW = 3  # shards; with more, the source itself is broken

OwedPlaces = dict[tuple[int, int], tuple[Mark, set[tuple[int, int]]]]
"""By pass and shard: where to begin reading, and the (document, piece) to give."""


class Source:
    def __init__(
        self,
        number: int,
        name: str,
        shards: Shards,
        *,
        piece_bytes: int,
        passes: int,
        seed: int,
        fingerprint: str,
        on_event: OnEvent,
        position: SourcePosition | None,
    ) -> None:
        self.number = number
        self.name = name
        self._shards = shards
        self._piece_bytes = piece_bytes
        self._passes = passes
        self._seed = seed
        self._on_event = on_event
        self._limit = min(MOST_BROKEN_IN_A_ROW, len(shards.names))
        self._broken_in_a_row = 0
        self._row_began = ReadHead()
        self._returned_to: ReadHead | None = None
        self._gave_in_pass = self._rested_in_pass = False
        self.fingerprint = fingerprint
        self._head = ReadHead()
        self._owed: OwedPlaces = {}
        self.drawn_before = 0
        if position is not None:
            self._go_to(position)

    # -- the position

    @property
    def head(self) -> ReadHead:
        return self._head

    def owed(self) -> list[tuple[int, int, Mark, frozenset[tuple[int, int]]]]:
        """The examples that a position owed and that were not read again yet: pass, shard, mark,
        places."""
        return [
            (passing, shard, mark, frozenset(places))
            for (passing, shard), (mark, places) in self._owed.items()
        ]

    def _go_to(self, position: SourcePosition) -> None:
        names = self._shards.names
        if position.fingerprint != self.fingerprint:
            reason = "its shards, or how they are cut, are not those of the saved position"
        elif position.head.nth > len(names) or any(
            owed.shard >= len(names) for owed in position.owed
        ):
            reason = "the saved position names shards that there are not"
        else:
            self._head = position.head
            for owed in position.owed:
                key = owed.passing, owed.shard
                mark, places = self._owed.get(key, (mark_of(owed), set()))
                self._owed[key] = min(mark, mark_of(owed)), places.union(owed.places())
            self.drawn_before = position.drawn
            self._gave_in_pass = position.head != ReadHead(passing=position.head.passing)
            return
        self._on_event(StartedOver(self.name, reason))

    # -- reading

    def examples(self) -> Generator[Example | Pause, None, None]:
        """Examples from the present position. SourceBroken when asking now is pointless."""
        yield from self._owed_before_head()
        while not self._passes or self._head.passing < self._passes:
            order = self._order()
            if self._head == ReadHead(passing=self._head.passing):
                self._on_event(PassBegun(self.name, self._head.passing + 1, len(order)))
            if self._head.nth < len(order):
                shard = order[self._head.nth]
                reason = yield from self._head_shard(shard)
                self._next_shard(reason)
            else:
                self._next_pass()
        self._on_event(SourceEnded(self.name, self._head.passing))

    def _order(self) -> tuple[int, ...]:
        return shard_order(len(self._shards.names), self._seed, self._head.passing)

    def _next_shard(self, broken: str) -> None:
        """Go to the next shard in the order. SourceBroken after too many that gave nothing.

        Those are tried once more after the rest, because they may have failed in an outage.
        """
        if not broken:
            self._broken_in_a_row = 0
        elif self._broken_in_a_row == 0:
            self._row_began = self._head
        self._head = ReadHead(self._head.passing, self._head.nth + 1)
        if broken:
            self._broken_in_a_row += 1
            if self._broken_in_a_row >= self._limit:
                self._broken_in_a_row = 0
                self._rested_in_pass = True
                if self._row_began != self._returned_to:
                    self._head = self._returned_to = self._row_began
                raise SourceBroken(broken)

    def _next_pass(self) -> None:
        spins = not (self._gave_in_pass or self._rested_in_pass)
        self._gave_in_pass = self._rested_in_pass = False
        self._head = ReadHead(self._head.passing + 1)
        if spins:
            raise SourceBroken("a whole pass gave not a single example.")

    def _head_shard(self, shard: int) -> Generator[Example | Pause, None, str]:
        """The rest of the head's shard, with what is owed of it. Returns why it gave nothing."""
        begun = self._head
        key = begun.passing, shard
        mark, owed = self._owed.get(key, (Mark(begun.document, begun.byte), set()))
        start = begun.document, begun.piece
        gave = False
        try:
            for item in self._pieces(begun.passing, shard, mark):
                if isinstance(item, Pause):
                    yield item
                    continue
                place = item.place
                at = place.document, place.piece
                if at >= start:
                    self._head = ReadHead(
                        begun.passing, begun.nth, place.document, place.byte, place.piece + 1
                    )
                    gave = self._gave_in_pass = True
                elif at in owed:
                    owed.discard(at)
                else:
                    continue
                yield item
        except ShardBroken as error:
            self._give_up_owed(key, str(error))
            return "" if gave or start != (0, 0) else str(error)
        finally:
            if key in self._owed and not owed:
                del self._owed[key]
        self._give_up_owed(key, "they are not there any more.")
        return ""

    def _owed_before_head(self) -> Iterator[Example | Pause]:
        """The examples that a position owes from other shards than the head's."""
        order = self._order()
        now = order[self._head.nth] if self._head.nth < len(order) else None
        for key in sorted(self._owed):
            if key == (self._head.passing, now):
                continue
            mark, owed = self._owed[key]
            reason = "they are not there any more."
            try:
                for item in self._pieces(*key, mark):
                    if isinstance(item, Pause):
                        yield item
                        continue
                    at = item.place.document, item.place.piece
                    if at in owed:
                        owed.discard(at)
                        yield item
                    if not owed:
                        break
            except ShardBroken as error:
                reason = str(error)
            self._give_up_owed(key, reason)

    def _give_up_owed(self, key: tuple[int, int], reason: str) -> None:
        _, left = self._owed.pop(key, (None, set()))
        if left:
            self._on_event(ExamplesLost(self.name, self._shards.names[key[1]], len(left), reason))

    def _pieces(self, passing: int, shard: int, start: Mark) -> Iterator[Example | Pause]:
        """The examples of one shard. Reports skipped ones; ShardBroken goes on to the caller."""
        name = self._shards.names[shard]

        def on_retry(reason: str, attempt: int, wait: float) -> None:
            self._on_event(Retrying(self.name, name, reason, attempt, wait))

        skipped: dict[str, tuple[int, int]] = {}
        documents = 0
        try:
            for item in self._shards.read(shard, start, on_retry):
                if isinstance(item, Document):
                    documents += 1
                    number, byte = item.mark
                    for piece, content in enumerate(cut(item.content, self._piece_bytes)):
                        place = ExamplePlace(self.number, passing, shard, number, piece, byte)
                        yield Example(content, item.label, place)
                elif isinstance(item, SkippedDocument):
                    kind = item.reason.partition(" (")[0]
                    count, first = skipped.get(kind, (0, item.mark.document + 1))
                    skipped[kind] = count + 1, first
                else:
                    yield item
        except ShardBroken as error:
            self._on_event(ShardSkipped(self.name, name, documents, str(error)))
            raise
        finally:
            for kind, (count, first) in skipped.items():
                self._on_event(DocumentsSkipped(self.name, name, count, first, kind))


def fingerprint_of(
    source: SourceSettings,
    tokenizer: TokenizerSettings | None,
    piece_bytes: int,
    names: tuple[str, ...],
) -> str:
    """A fingerprint of everything that decides which example has which place."""
    digest = hashlib.blake2b(digest_size=16)
    parts = [source.kind, source.field, source.label_field, source.documents, str(piece_bytes)]
    parts += [source.dataset, source.subset, source.split]
    parts += [] if tokenizer is None else [tokenizer.sha256]
    # not the folder: data may be moved together with its checkpoint
    parts += [name if is_address(name) else os.path.basename(name) for name in names]
    for part in parts:
        digest.update(part.encode("utf-8", "surrogateescape") + b"\0")
    return digest.hexdigest()
