"""Describes the contents of a state, and names the state by a digest of that. Pure.

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

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any

import msgspec
from blake3 import blake3
from msgspec import Meta
from torch import Tensor

from protocols.accumulation.signature import (
    LONGEST_OPTIMIZER_NAME,
    SIGNATURE_BYTES,
    Signature,
    TensorSpec,
    differences,
)
from protocols.errors import LimitExceeded, MalformedMessage, Refused
from protocols.identity import PeerId
from protocols.rpc import Count, Message, decode, encode

# ---- the tree of an optimizer's values
#
# The rest of a state: nested settings and counters, with tensors among them.
#
#     plain = separate(optimizer_settings, "groups", tensors)   # tensors go into the mapping
#     metadata = pack(plain)                                     # bytes, canonical
#     tree = join(unpack(metadata), tensors)                     # what it was
#
# A tree has tensors, numbers, strings, bytes, True, False and None in lists, tuples and dicts. In
# its plain form, every container says which type it had, and a tensor is the name under which it
# travels. Dicts are sorted, so equal trees have equal bytes, in whatever order they were filled.
#
# Promise: anything else is refused, and the error names the path to it. Nothing is ever executed or
# looked up by name. `unpack` raises only MalformedMessage, whatever the bytes.
#
# Easy to get wrong: True is an int to Python, and a Counter is a dict. `shaped_like` restores the
# container type that this peer's own tree has in the same place.

MOST_DEPTH = 16  # a schedule of schedules has six
MOST_NODES = 200_000  # a counter for each parameter of a large model is 10,000
LARGEST_INTEGER = 1 << 63

_LIST, _TUPLE, _DICT, _TENSOR = range(4)

_ENCODER = msgspec.msgpack.Encoder()


def separate(tree: Any, path: str, tensors: dict[str, Tensor], depth: int = 0) -> Any:
    """The plain form of a tree; its tensors go into `tensors` under their paths."""
    if tree is None or isinstance(tree, bool | str | bytes):
        return tree
    if isinstance(tree, Tensor):
        if path in tensors:
            raise StateRefused(f"Two tensors of the state have the same name, {path}.")
        tensors[path] = tree
        return [_TENSOR, path]
    if isinstance(tree, int):
        if not -LARGEST_INTEGER <= tree < LARGEST_INTEGER:
            raise StateRefused(f"{path} is an integer of more than 64 bits.")
        return int(tree)
    if isinstance(tree, float):
        return float(tree)
    if depth >= MOST_DEPTH:
        raise StateRefused(f"{path} is nested more than {MOST_DEPTH} deep.")
    if isinstance(tree, list | tuple):
        kind = _LIST if isinstance(tree, list) else _TUPLE
        return [kind] + [
            separate(one, f"{path}/{number}", tensors, depth + 1) for number, one in enumerate(tree)
        ]
    if isinstance(tree, Mapping):
        for key in tree:
            if isinstance(key, bool) or not isinstance(key, str | int):
                raise StateRefused(f"{path} has a key that is neither text nor a number: {key!r}.")
        entries = sorted(tree.items(), key=lambda entry: (isinstance(entry[0], int), entry[0]))
        inside = f"{path}/" if path else ""
        return [_DICT] + [
            [key, separate(one, f"{inside}{key}", tensors, depth + 1)] for key, one in entries
        ]
    raise StateRefused(
        f"{path} is a {type(tree).__module__}.{type(tree).__qualname__}, which cannot travel.",
        why="A state holds tensors, numbers, text, True, False, None, lists, tuples and dicts.",
        advice="Take it out of the state_dict, or turn it into one of these.",
    )


def pack(plain: Any) -> bytes:
    """The bytes of a plain tree; StateRefused if they are too many."""
    packed = _ENCODER.encode(plain)
    if len(packed) > LARGEST_METADATA_BYTES:
        raise StateRefused(
            f"The state's metadata takes {len(packed):,} bytes; at most "
            f"{LARGEST_METADATA_BYTES:,} can travel.",
            advice="Keep long lists of numbers in tensors.",
        )
    return packed


def unpack(packed: bytes) -> Any:
    """The plain tree in these bytes. Its form is checked throughout."""
    if len(packed) > LARGEST_METADATA_BYTES:
        raise LimitExceeded(f"Metadata of {len(packed):,} bytes came.")
    try:
        plain = msgspec.msgpack.decode(packed)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        reason = str(error)[:100]
        raise MalformedMessage(f"These bytes are not a state's metadata: {reason}.") from None
    _check(plain, 0, [0])
    return plain


def join(plain: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The tree of a checked plain form. MalformedMessage if it names a tensor that is not there."""
    if not isinstance(plain, list):
        return plain
    kind, *content = plain
    if kind == _TENSOR:
        tensor = tensors.get(content[0])
        if tensor is None:
            raise MalformedMessage(f"The metadata of a state names {content[0]}, which it lacks.")
        return tensor
    if kind == _DICT:
        return {key: join(one, tensors) for key, one in content}
    items = [join(one, tensors) for one in content]
    return items if kind == _LIST else tuple(items)


def shaped_like(tree: Any, own: Any) -> Any:
    """The same tree, with the dict types that this peer's own tree has in the same places."""
    if isinstance(tree, dict):
        known = own if isinstance(own, Mapping) else {}
        entries = {key: shaped_like(one, known.get(key)) for key, one in tree.items()}
        if isinstance(own, Counter):
            return Counter(entries)
        if isinstance(own, OrderedDict):
            return OrderedDict(entries)
        if isinstance(own, defaultdict):
            return defaultdict(own.default_factory, entries)
        return entries
    if isinstance(tree, list | tuple):
        others = (
            own if isinstance(own, list | tuple) and len(own) == len(tree) else [None] * len(tree)
        )
        items = [shaped_like(one, other) for one, other in zip(tree, others, strict=True)]
        return items if isinstance(tree, list) else tuple(items)
    return tree


AS_PUBLISHED = "Take the optimizer and the schedule that the run's organiser has published."


def check_kinds(theirs: Any, own: Any, what: str) -> None:
    """StateRefused if this peer's own settings have another kind of value in the same place. Such
    settings would break a later step, when nobody remembers where they came from."""
    if own is None:
        return
    here, there = _kind(own), _kind(theirs)
    if here != there:
        raise StateRefused(
            f"In the state, {what} is {there}; here it is {here}.",
            why="The peers of a run make their optimizer and its schedule in the same way.",
            advice=AS_PUBLISHED,
        )
    if isinstance(own, Mapping):
        for name in own.keys() & theirs.keys():
            check_kinds(theirs[name], own[name], f"{what}/{name}")
    elif isinstance(own, list | tuple):
        if len(own) != len(theirs) and own and all(_is_number(one) for one in own):
            raise StateRefused(
                f"In the state, {what} has {len(theirs)} numbers; here it has {len(own)}.",
                advice=AS_PUBLISHED,
            )
        for number, (one, other) in enumerate(zip(theirs, own, strict=False)):
            check_kinds(one, other, f"{what}/{number}")


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float | Tensor)


def _kind(value: Any) -> str:
    if _is_number(value):
        return "a number"
    if isinstance(value, Mapping):
        return "settings by name"
    if isinstance(value, list | tuple):
        return "a list"
    return f"of the type {type(value).__name__}"


def _check(plain: Any, depth: int, nodes: list[int]) -> None:
    nodes[0] += 1
    if depth > MOST_DEPTH or nodes[0] > MOST_NODES:
        raise MalformedMessage("The metadata of a state is too deeply nested, or too long.")
    if plain is None or isinstance(plain, bool | int | float | str | bytes):
        return
    if not isinstance(plain, list) or not plain or type(plain[0]) is not int or plain[0] > _TENSOR:
        raise MalformedMessage("The metadata of a state has a container of no known kind.")
    kind, *content = plain
    if kind == _TENSOR:
        if len(content) != 1 or not isinstance(content[0], str):
            raise MalformedMessage("The metadata of a state has a tensor without a name.")
        return
    if kind == _DICT:
        content = [_entry(one) for one in content]
        keys = [(isinstance(one[0], int), one[0]) for one in content]
        if any(first >= second for first, second in pairwise(keys)):
            raise MalformedMessage("The metadata of a state has a dict out of order.")
        content = [one for _, one in content]
    for one in content:
        _check(one, depth + 1, nodes)


def _entry(entry: Any) -> tuple[str | int, Any]:
    if not isinstance(entry, list) or len(entry) != 2:
        raise MalformedMessage("The metadata of a state has a dict with half an entry.")
    if isinstance(entry[0], bool) or not isinstance(entry[0], str | int):
        raise MalformedMessage("The metadata of a state has a key that is not text or a number.")
    return entry[0], entry[1]


DIGEST_BYTES = 32
PIECE_BYTES = 1 << 20
"""One chunk of a transfer. At 1 Mb/s a piece takes 8 seconds, so the end of a download waits for a
slow source no longer than that. 20 GB have 20,000 pieces, whose digests take 640 KB."""
LARGEST_PIECE_BYTES = 4 << 20
SMALLEST_PIECE_BYTES = 1 << 10
ALIGNMENT_BYTES = 8  # the widest value, so that a tensor can be a view of the stream
MOST_TENSORS = 20_000  # 24 layers with AdamW have about 900
LARGEST_METADATA_BYTES = 512 << 10  # param groups, schedules and counters: a few KB
LARGEST_MANIFEST_BYTES = 4 << 20  # a unary message; room for a state of some 100 GB
LONGEST_RUN_NAME = 128
LONGEST_HISTORY_BYTES = 32

STATISTICS_PER_VALUE = 5
"""Statistics for each value of the model, in its own dtype or float32: Adam keeps two, Adam with
AMSGrad three, a master copy is one more, an outer step's momentum another."""
STATISTICS_FREE_BYTES = 16 << 20  # for small models, whose counters are larger than they are

_DOMAIN = b"potluck state 1\0"

Digest = Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]


class StateRefused(Refused):
    """The state does not fit this peer: it is of another model, dtype or run."""

    named_by: frozenset[PeerId] = frozenset()
    """The peers that name this state as the run's."""


class Manifest(Message, frozen=True):
    """Everything in a state except the bytes of its tensors."""

    run: Annotated[str, Meta(max_length=LONGEST_RUN_NAME)]
    epoch: Count
    history: Annotated[bytes, Meta(max_length=LONGEST_HISTORY_BYTES)]
    signature: Annotated[bytes, Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]
    optimizer: Annotated[str, Meta(max_length=LONGEST_OPTIMIZER_NAME)]
    tensors: Annotated[tuple[TensorSpec, ...], Meta(max_length=MOST_TENSORS)]
    metadata: Annotated[bytes, Meta(max_length=LARGEST_METADATA_BYTES)]
    piece_bytes: Annotated[int, Meta(ge=SMALLEST_PIECE_BYTES, le=LARGEST_PIECE_BYTES)]
    pieces: bytes  # the digests of the pieces, one after another

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
        """The signature of the state's model, from the manifest's own tensors."""
        return Signature(self.optimizer, tuple(one for one in self.tensors if is_of_model(one)))


def is_of_model(spec: TensorSpec) -> bool:
    """Whether a tensor of a state belongs to the model itself: a parameter or a buffer."""
    return spec.name.startswith(("model/", "buffer/"))


def offsets_of(tensors: Sequence[TensorSpec]) -> list[int]:
    """The offset of each tensor in the stream."""
    offsets, end = [], 0
    for one in tensors:
        start = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        offsets.append(start)
        end = start + one.bytes
    return offsets


def piece_span(number: int, piece_bytes: int, stream_bytes: int) -> slice:
    """The place of a piece in the stream."""
    start = number * piece_bytes
    return slice(start, min(start + piece_bytes, stream_bytes))


def name_of(body: bytes | memoryview) -> bytes:
    """The digest of the state with this encoded manifest."""
    return blake3(_DOMAIN).update(body).digest(DIGEST_BYTES)


def statistics_limit(mine: Signature) -> int:
    """How many bytes a state for this model may have besides the model itself."""
    widest = sum(one.values * max(4, one.bytes // max(1, one.values)) for one in mine.tensors)
    return STATISTICS_PER_VALUE * widest + STATISTICS_FREE_BYTES


def read_manifest(body: bytes | memoryview) -> Manifest:
    """Read a manifest, and check that it is consistent; MalformedMessage if it is not."""
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
    """Raise StateRefused, with the reason, unless this state fits the model of this peer.

    `statistics_limit` bounds what the manifest claims besides the model's own tensors.
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
            f"Its statistics take {extra:,} bytes; for this model at most {allowed:,} are allowed.",
            why="The peer that offers it made them up, or its optimizer is unusual.",
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
