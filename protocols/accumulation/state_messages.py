"""`/potluck/state/1.0.0`: what goes between a newcomer and a peer whose state it fetches.

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

The newcomer asks for pieces as they come in, a few ahead, so that a fast donor gets more of them.
A donor cuts the bytes into chunks as it likes. It paces them: how fast it sends is its own affair.

Who has a state and is some steps behind asks for what these were made of, one result after the
other. `links` are that result's and those of all that follow at this donor: by them the newcomer
sees, before a byte comes, that this way leads to where the run is.

Easy to get wrong: the digest names a state, and a state is of one epoch. A donor answers for the
digest that it was asked for or says `StateGone`; what it has instead is of no use.
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
from protocols.rpc import BulkMethod, Count, Empty, Message, Method, Milliseconds

STATE_PROTOCOL = "/potluck/state/1.0.0"

LONGEST_TORCH_VERSION = 64
REQUEST_LIMIT_BYTES = 512
RESULT_LIMIT_BYTES = 32 << 10  # the answer to its opening: a group has up to 256 parts
STALL_SECONDS = 10.0
"""Without a sign of life a transfer is given up: there are other sources, and what came is kept."""
NONCE_BYTES = 16
MOST_RESULTS = 16
"""That a donor keeps. A newcomer takes each as it is made; this is how far it may fall back."""
ROOM_OF_SMALL_BYTES = 256 << 20
"""That results may take in any case, if there are as many: a state of up to so many bytes may be
followed for more than the three steps whose results are as large as it. A newcomer needs as long as
some steps to take it over."""
MOST_WANTED_AT_ONCE = 64  # numbers in one chunk
MOST_WANTED = 256  # pieces that one newcomer has asked for and not got: 256 MiB are enough ahead

ResultKind = Literal["step", "lone step", "parameters"]
"""Of what the average was: see results.py."""

_NUMBER = struct.Struct("<I")


class StateGone(PotluckError):
    """The donor does not have the state that it was asked for: it is at another epoch by now."""

    exit_code = 4


class ManifestRequest(Message, frozen=True):
    """The state of this digest is wanted; with `place_only`, its manifest is known already."""

    run: Annotated[str, Meta(max_length=LONGEST_RUN_NAME)]
    digest: Digest
    place_only: bool = False


class ManifestAnswer(Message, frozen=True):
    """The encoded manifest, and a place to download for some seconds; or how long to wait for one.

    `torch` is the donor's version. It is not in the manifest, for it is no part of the state.
    """

    manifest: Annotated[bytes, Meta(max_length=LARGEST_MANIFEST_BYTES)]
    torch: Annotated[str, Meta(max_length=LONGEST_TORCH_VERSION)] = ""
    wait_ms: Milliseconds = 0


class DescriptionRequest(Message, frozen=True):
    """What this peer trains in the run, and how."""

    run: Annotated[str, Meta(max_length=LONGEST_RUN_NAME)]


class PiecesOpening(Message, frozen=True):
    """Pieces of the state of this digest are wanted."""

    run: Annotated[str, Meta(max_length=LONGEST_RUN_NAME)]
    digest: Digest


class ResultOpening(Message, frozen=True):
    """The result that leads on from this epoch and history is wanted."""

    run: Annotated[str, Meta(max_length=LONGEST_RUN_NAME)]
    epoch: Count
    history: Annotated[bytes, Meta(min_length=HISTORY_BYTES, max_length=HISTORY_BYTES)]


class ResultLink(Message, frozen=True):
    """One result by its digest, which makes the next history of the one before."""

    kind: ResultKind
    digest: Digest


class ResultPart(Message, frozen=True):
    """Values `start` up to `stop`, by the digest of what their reducer has sent."""

    reducer: Member
    start: Annotated[int, Meta(ge=0, le=MOST_VALUES)]
    stop: Annotated[int, Meta(ge=0, le=MOST_VALUES)]
    digest: Digest


class ResultAccepted(Message, frozen=True):
    """How the result is cut and checked. `links`: its own, and those of what follows it."""

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


def wanted_chunk(pieces: list[int]) -> bytes:
    """Numbers of pieces as a chunk."""
    return b"".join(map(_NUMBER.pack, pieces))


def read_wanted(chunk: bytes | bytearray, piece_count: int) -> list[int]:
    """The numbers in a chunk; MalformedMessage unless all of them are of pieces that there are."""
    if len(chunk) % _NUMBER.size or len(chunk) > MOST_WANTED_AT_ONCE * _NUMBER.size:
        raise MalformedMessage(f"{len(chunk):,} bytes are no list of pieces.")
    numbers = [number for (number,) in _NUMBER.iter_unpack(chunk)]
    if any(number >= piece_count for number in numbers):
        raise MalformedMessage(f"A piece was asked for that is not among {piece_count:,}.")
    return numbers
