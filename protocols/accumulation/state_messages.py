"""`/potluck/state/1.0.0`: the messages between a newcomer and a peer whose state it fetches.

    newcomer                                     donor
    manifest(ManifestRequest)            ->
                                         <-      ManifestAnswer(manifest, torch)   or wait_ms

    description(DescriptionRequest)      ->
                                         <-      TrainingDescription

    OPEN   PiecesOpening(digest)         ->
                                         <-      ACCEPT
    CHUNK  numbers of pieces, 4 bytes each ->
                                         <-      CHUNK  the bytes of these pieces, in this order
    CLOSE                                ->
                                         <-      CLOSE

    OPEN   ResultOpening(from where)     ->
                                         <-      ACCEPT  ResultAccepted(links, parts)
                                         <-      CHUNK   the encoded chunks of the result, in order
    CLOSE                                ->
                                         <-      CLOSE

The newcomer asks for a few pieces ahead, and for more as they arrive, so a fast donor is asked for
more of them. The donor cuts the bytes into chunks as it likes, and decides how fast it sends them.

A peer that has a state and is some steps behind asks for the results of these steps, one after
another. `links` are those of that result and of all later ones at this donor. With them the
newcomer sees, before any byte of a result arrives, that these results lead to where the run is.

Easy to get wrong: the digest names a state of one epoch. A donor answers for the requested digest,
or with `StateGone`; another state would be of no use.
"""

from __future__ import annotations

import struct
from typing import Annotated, Literal

from msgspec import Meta

from protocols.accumulation.lineage import HISTORY_BYTES
from protocols.accumulation.state_manifest import (
    LARGEST_MANIFEST_BYTES,
    LARGEST_PIECE_BYTES,
    LONGEST_RUN_NAME,
    Digest,
)
from protocols.accumulation.training_description import TrainingDescription
from protocols.errors import MalformedMessage, PotluckError
from protocols.moshpit.ballots import LARGEST_GROUP, Member
from protocols.moshpit.layout import LARGEST_CHUNK_BYTES, MOST_VALUES
from protocols.rpc import BulkMethod, Count, Empty, Message, Method, Milliseconds, Transfer

STATE_PROTOCOL = "/potluck/state/1.0.0"

LONGEST_TORCH_VERSION = 64
REQUEST_LIMIT_BYTES = 512
RESULT_LIMIT_BYTES = 32 << 10  # of the answer to a ResultOpening: a group has up to 256 parts
STALL_SECONDS = 10.0
"""A transfer without a sign of life for this long is given up. There are other sources, and the
pieces that arrived are kept."""
NONCE_BYTES = 16
MOST_RESULTS = 16
"""The results that a donor keeps. A newcomer takes each when it is made, and may fall this far
behind."""
ROOM_OF_SMALL_BYTES = 256 << 20
"""Kept results may take this much memory even beside a smaller state. The results of three steps
are as large as a state, and a newcomer needs the time of several steps to take the state over."""
MOST_WANTED_AT_ONCE = 64  # numbers in one chunk
MOST_WANTED = 256  # pieces that one newcomer may ask for ahead: 256 MiB are enough

ResultKind = Literal["step", "lone step", "parameters"]
"""The kind of values that were averaged: see results.py."""

_NUMBER = struct.Struct("<I")


class StateGone(PotluckError):
    """The donor does not have the requested state: it is at another epoch now."""

    exit_code = 4


class ManifestRequest(Message, frozen=True):
    """Asks for the state with this digest. With `place_only`, its manifest is known already."""

    run: Annotated[str, Meta(max_length=LONGEST_RUN_NAME)]
    digest: Digest
    place_only: bool = False


class ManifestAnswer(Message, frozen=True):
    """The encoded manifest, and a place to download that is kept for some seconds; or how long to
    wait for a place.

    `torch` is the donor's version. It is no part of the state, so it is not in the manifest.
    """

    manifest: Annotated[bytes, Meta(max_length=LARGEST_MANIFEST_BYTES)]
    torch: Annotated[str, Meta(max_length=LONGEST_TORCH_VERSION)] = ""
    wait_ms: Milliseconds = 0


class DescriptionRequest(Message, frozen=True):
    """Asks what the peer trains in the run, and how."""

    run: Annotated[str, Meta(max_length=LONGEST_RUN_NAME)]


class PiecesOpening(Message, frozen=True):
    """Asks for pieces of the state with this digest."""

    run: Annotated[str, Meta(max_length=LONGEST_RUN_NAME)]
    digest: Digest


class ResultOpening(Message, frozen=True):
    """Asks for the result that follows this epoch and history."""

    run: Annotated[str, Meta(max_length=LONGEST_RUN_NAME)]
    epoch: Count
    history: Annotated[bytes, Meta(min_length=HISTORY_BYTES, max_length=HISTORY_BYTES)]


class ResultLink(Message, frozen=True):
    """One result, by its digest. With the history before it, the digest gives the next history."""

    kind: ResultKind
    digest: Digest


class ResultPart(Message, frozen=True):
    """Values `start` up to `stop`, with the digest of the bytes that their reducer sent."""

    reducer: Member
    start: Annotated[int, Meta(ge=0, le=MOST_VALUES)]
    stop: Annotated[int, Meta(ge=0, le=MOST_VALUES)]
    digest: Digest


class ResultAccepted(Message, frozen=True):
    """How the result is cut and checked. `links`: its own link, and those of the later results."""

    links: Annotated[tuple[ResultLink, ...], Meta(min_length=1, max_length=MOST_RESULTS)]
    parts: Annotated[tuple[ResultPart, ...], Meta(min_length=1, max_length=LARGEST_GROUP)]
    chunk_bytes: Annotated[int, Meta(ge=0, le=LARGEST_CHUNK_BYTES)]
    nonce: Annotated[bytes, Meta(max_length=NONCE_BYTES)] = b""


_ERRORS = {"state-gone": StateGone}

MANIFEST: Method[ManifestRequest, ManifestAnswer] = Method(
    STATE_PROTOCOL,
    "manifest",
    ManifestRequest,
    ManifestAnswer,
    REQUEST_LIMIT_BYTES,
    LARGEST_MANIFEST_BYTES,
    errors=_ERRORS,
    training=True,
)

DESCRIPTION: Method[DescriptionRequest, TrainingDescription] = Method(
    STATE_PROTOCOL,
    "description",
    DescriptionRequest,
    TrainingDescription,
    REQUEST_LIMIT_BYTES,
    LARGEST_MANIFEST_BYTES,
    errors=_ERRORS,
    training=True,
)

PIECES: BulkMethod[PiecesOpening, Empty, Empty, Empty] = BulkMethod(
    STATE_PROTOCOL,
    "pieces",
    PiecesOpening,
    Empty,
    Empty,
    Empty,
    LARGEST_PIECE_BYTES,
    REQUEST_LIMIT_BYTES,
    STALL_SECONDS,
    errors=_ERRORS,
    training=True,
)

RESULT: BulkMethod[ResultOpening, ResultAccepted, Empty, Empty] = BulkMethod(
    STATE_PROTOCOL,
    "result",
    ResultOpening,
    ResultAccepted,
    Empty,
    Empty,
    LARGEST_CHUNK_BYTES,
    RESULT_LIMIT_BYTES,
    STALL_SECONDS,
    errors=_ERRORS,
    training=True,
)

PiecesTransfer = Transfer[Empty, Empty, Empty]
ResultTransfer = Transfer[ResultAccepted, Empty, Empty]


def wanted_chunk(pieces: list[int]) -> bytes:
    """Encode numbers of pieces as a chunk."""
    return b"".join(map(_NUMBER.pack, pieces))


def read_wanted(chunk: bytes | bytearray, piece_count: int) -> list[int]:
    """The numbers in a chunk; MalformedMessage if one of them is of no piece of the state."""
    if len(chunk) % _NUMBER.size or len(chunk) > MOST_WANTED_AT_ONCE * _NUMBER.size:
        raise MalformedMessage(f"{len(chunk):,} bytes are not a list of pieces.")
    numbers = [number for (number,) in _NUMBER.iter_unpack(chunk)]
    if any(number >= piece_count for number in numbers):
        raise MalformedMessage(f"A requested piece is not one of the {piece_count:,}.")
    return numbers
