"""What a state consists of, and by what name it goes. Pure.

    manifest = make_manifest(run, epoch, history, signature, tensors, metadata, piece_digests)
    body = encode(manifest); name_of(body)             # the 32 bytes that name this very state
    manifest = read_manifest(body, limits)             # on the other side, checked

The *stream* of a state is its tensors' raw little-endian bytes by ascending name, each beginning
at a multiple of 8, zeros between them. It is cut into pieces of `piece_bytes`, and the manifest
has the BLAKE3 of each. The digest of a state is that of its manifest's bytes, so it names every
byte of the tensors, the metadata, the epoch and the history.

Easy to get wrong: a manifest comes from a stranger and says how much memory to take. Nothing is
allocated before `check` has compared it with what this peer's own model can need.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated

from blake3 import blake3
from msgspec import Meta

from protocols.accumulation.signature import (
    LONGEST_OPTIMIZER_NAME,
    SIGNATURE_BYTES,
    Signature,
    TensorSpec,
    differences,
)
from protocols.errors import LimitExceeded, MalformedMessage, Refused
from protocols.messages import Count, Message, decode, encode

DIGEST_BYTES = 32
PIECE_BYTES = 1 << 20
"""One chunk of a transfer. At 1 Mb/s a piece takes 8 seconds, so the end of a download does not
hang on a slow source for longer; and 20 GB have 20,000 pieces, whose digests are 640 KB."""
LARGEST_PIECE_BYTES = 4 << 20
SMALLEST_PIECE_BYTES = 1 << 10
ALIGNMENT_BYTES = 8  # of the widest value, so that a tensor can be viewed where it lies
MOST_TENSORS = 20_000  # 24 layers with AdamW have about 900
LARGEST_METADATA_BYTES = 512 << 10  # param groups, schedules and counters: a few KB
LARGEST_MANIFEST_BYTES = 4 << 20  # a unary message; room for a state of some 100 GB
LONGEST_RUN_NAME = 128
LONGEST_HISTORY_BYTES = 32

STATISTICS_PER_VALUE = 5
"""Statistics for each value of the model, in its own dtype or float32: Adam keeps two, Adam with
AMSGrad three, a master copy is one more, an outer step's momentum another."""
STATISTICS_FREE_BYTES = 16 << 20  # for models so small that counters outweigh them

_DOMAIN = b"potluck state 1\0"

Digest = Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]


class StateRefused(Refused):
    """A state that is not for this peer: another model, another dtype, another run."""


class Manifest(Message, frozen=True):
    """All of a state but the bytes of its tensors."""

    run: Annotated[str, Meta(max_length=LONGEST_RUN_NAME)]
    epoch: Count
    history: Annotated[bytes, Meta(max_length=LONGEST_HISTORY_BYTES)]
    signature: Annotated[bytes, Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]
    optimizer: Annotated[str, Meta(max_length=LONGEST_OPTIMIZER_NAME)]
    tensors: Annotated[tuple[TensorSpec, ...], Meta(max_length=MOST_TENSORS)]
    metadata: Annotated[bytes, Meta(max_length=LARGEST_METADATA_BYTES)]
    piece_bytes: Annotated[int, Meta(ge=SMALLEST_PIECE_BYTES, le=LARGEST_PIECE_BYTES)]
    pieces: bytes  # their digests, one behind the other

    @property
    def stream_bytes(self) -> int:
        offsets = offsets_of(self.tensors)
        return offsets[-1] + self.tensors[-1].bytes if offsets else 0

    @property
    def piece_count(self) -> int:
        return len(self.pieces) // DIGEST_BYTES

    def piece_digest(self, number: int) -> bytes:
        return self.pieces[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]

    def model(self) -> Signature:
        """The signature of the model whose state it is, from its own tensors."""
        return Signature(self.optimizer, tuple(one for one in self.tensors if is_of_model(one)))


def is_of_model(spec: TensorSpec) -> bool:
    """Whether a tensor of a state belongs to the model itself: a parameter or a buffer."""
    return spec.name.startswith(("model/", "buffer/"))


def offsets_of(tensors: Sequence[TensorSpec]) -> list[int]:
    """Where each tensor begins in the stream."""
    offsets, end = [], 0
    for one in tensors:
        start = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        offsets.append(start)
        end = start + one.bytes
    return offsets


def piece_span(number: int, piece_bytes: int, stream_bytes: int) -> slice:
    """Where in the stream a piece lies."""
    start = number * piece_bytes
    return slice(start, min(start + piece_bytes, stream_bytes))


def name_of(body: bytes | memoryview) -> bytes:
    """The digest of the state whose encoded manifest this is."""
    return blake3(_DOMAIN).update(body).digest(DIGEST_BYTES)


def statistics_limit(mine: Signature) -> int:
    """How many bytes all that is not the model itself may take, in a state for this model."""
    widest = sum(one.values * max(4, one.bytes // max(1, one.values)) for one in mine.tensors)
    return STATISTICS_PER_VALUE * widest + STATISTICS_FREE_BYTES


def read_manifest(body: bytes | memoryview) -> Manifest:
    """The manifest in these bytes, consistent in itself; MalformedMessage if it is not."""
    if len(body) > LARGEST_MANIFEST_BYTES:
        raise LimitExceeded(f"A manifest of {len(body):,} bytes came.")
    manifest = decode(Manifest, body)
    names = [one.name for one in manifest.tensors]
    if any(first >= second for first, second in pairwise(names)):
        raise MalformedMessage("The tensors of a manifest are not in ascending order of names.")
    size = manifest.stream_bytes
    expected = -(-size // manifest.piece_bytes)
    if len(manifest.pieces) != expected * DIGEST_BYTES:
        raise MalformedMessage(
            f"A manifest has {len(manifest.pieces):,} bytes of digests for {expected:,} pieces."
        )
    if manifest.model().digest != manifest.signature:
        raise MalformedMessage("The signature in a manifest is not that of its tensors.")
    return manifest


def check(manifest: Manifest, mine: Signature, run: str) -> None:
    """StateRefused, in words, unless this state fits the model of this peer.

    What it claims beyond the model's own tensors is bounded by `statistics_limit`.
    """
    if manifest.run != run:
        raise StateRefused(f"It is a state of the run {manifest.run!r}, not of {run!r}.")
    found = differences(mine, manifest.model())
    if found:
        raise StateRefused(
            f"It is a state of another model: {'; '.join(found)}.",
            why="The two sides build their models from different settings or program versions.",
            advice="Take the model, dtype and optimizer that the run's organiser has published.",
        )
    extra = manifest.stream_bytes - mine.bytes
    allowed = statistics_limit(mine) + ALIGNMENT_BYTES * len(manifest.tensors)
    if extra > allowed:
        raise StateRefused(
            f"Its statistics take {extra:,} bytes; for this model at most {allowed:,} are taken.",
            why="The peer that offers it made them up, or its optimizer is an unusual one.",
        )


__all__ = [
    "DIGEST_BYTES",
    "PIECE_BYTES",
    "Digest",
    "Manifest",
    "StateRefused",
    "check",
    "encode",
    "is_of_model",
    "name_of",
    "offsets_of",
    "piece_span",
    "read_manifest",
    "statistics_limit",
]
