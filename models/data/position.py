"""Where reading has got to, small enough for a checkpoint, as JSON.

Promised: reading that continues from a position gives, of the passes under way, every example that
was not given before the position was taken, each once, and no other. That holds to the example, at
any moment, for any number of interruptions, also while examples that waited in the buffer are still
being fetched again. The order differs from that without an interruption (the buffer fills anew);
the same position, seed and settings give the same order every time.

Not promised: shards that change meanwhile (a web server's are compared as they are read, the disk's
are not), and shards that break when they are read again, whose examples are then missing, with an
event that counts them. If the settings name other shards, or cut them otherwise, reading starts
over, with an event.

The buffer's contents are not stored, only where each example came from, some three bytes each; a
full buffer of ten thousand makes about 60 kB of JSON. They are read again from their shards, so
continuing costs at most reading the last 50 000 examples (`shuffle_buffer.LONGEST_WAIT`), while the
first of them are already trained on.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Annotated

import msgspec

from models.data.errors import PositionError
from models.data.examples import Example, ExamplePlace, Mark

LARGEST_POSITION_BYTES = 64 << 20  # of a buffer of a million examples
LARGEST_REMAINDER_BYTES = 32 << 20  # a third more in JSON, and there is room for the rest
FORMAT = 1

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Text = Annotated[str, msgspec.Meta(max_length=512)]


class Owed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Examples of one shard in one pass that were read, and not given yet.

    `examples` has two numbers for each, in order: how many documents it is behind the one before
    (the first: behind `document`), and its piece in the document.
    """

    passing: Count
    shard: Number
    document: Count
    byte: Count
    examples: list[Count]

    def places(self) -> Iterator[tuple[int, int]]:
        """(document, piece) of each."""
        document = self.document
        for step, piece in zip(self.examples[::2], self.examples[1::2], strict=False):
            document += step
            yield document, piece


class ReadHead(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far a source was read: the next example is this piece of this document."""

    passing: Count = 0
    nth: Number = 0  # shard in the order of the pass
    document: Count = 0
    byte: Count = 0
    piece: Count = 0


class SourcePosition(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: Text
    fingerprint: Text
    """Of the source's data and how it is cut; with another one, the position is invalid."""
    drawn: Count
    head: ReadHead
    owed: list[Owed]


class Position(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sources: list[SourcePosition]
    drawn: Count = 0
    remainder: bytes = b""
    """Bytes of the last examples that did not fill a window."""
    format: Count = FORMAT

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)


def owed_places(examples: Iterable[Example]) -> list[Owed]:
    """The examples of one source, by pass and shard."""
    places = sorted({example.place for example in examples}, key=_by_shard)
    found = []
    for (passing, shard), group in groupby(places, key=lambda place: (place.passing, place.shard)):
        in_shard = list(group)
        first = in_shard[0]
        numbers = []
        document = first.document
        for place in in_shard:
            numbers += [place.document - document, place.piece]
            document = place.document
        found.append(Owed(passing, shard, first.document, first.byte, numbers))
    return found


def _by_shard(place: ExamplePlace) -> tuple[int, int, int, int]:
    return place.passing, place.shard, place.document, place.piece


def mark_of(owed: Owed) -> Mark:
    return Mark(owed.document, owed.byte)


def position_from_json(data: bytes) -> Position:
    """The position in this JSON; PositionError if it is none."""
    if len(data) > LARGEST_POSITION_BYTES:
        raise _unreadable(f"it has more than {LARGEST_POSITION_BYTES:,} bytes")
    try:
        position = msgspec.json.decode(data, type=Position)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise _unreadable(str(error)) from None
    if position.format != FORMAT:
        raise _unreadable(f"it is of format {position.format}, and this potluck knows {FORMAT}")
    if len(position.remainder) > LARGEST_REMAINDER_BYTES:
        raise _unreadable("its remainder is too long")
    return position


def write_position(position: Position, path: Path) -> None:
    """Write the whole file or nothing: under another name, synced, and renamed. OSError leaves
    nothing behind and the earlier position in its place."""
    unfinished = path.with_name(path.name + ".unfinished")
    try:
        with open(unfinished, "wb") as stream:
            stream.write(position.to_json())
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(unfinished, path)
    except OSError:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise


def read_position(path: Path) -> Position:
    """PositionError if the file is not a position. OSError if there is no file."""
    with open(path, "rb") as stream:
        return position_from_json(stream.read(LARGEST_POSITION_BYTES + 1))


def _unreadable(reason: str) -> PositionError:
    return PositionError(
        "The saved position in the data cannot be read.",
        why=f"{reason[:300].rstrip('.')}.",
        advice="Remove it to read the data from its beginning; the model is not touched.",
    )
