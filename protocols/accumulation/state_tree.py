"""The odds and ends of a state: nested settings and counters, with tensors among them.

    plain = separate(optimizer_settings, "groups", tensors)   # tensors go into the mapping
    metadata = pack(plain)                                     # bytes, canonical
    tree = join(unpack(metadata), tensors)                     # what it was

A tree has tensors, numbers, strings, bytes, True, False and None in lists, tuples and dicts. In
its plain form every container says what it was and a tensor is the name under which it travels;
dicts are sorted, so that equal trees have equal bytes, whatever the order they were filled in.

Promise: anything else is refused by the path that leads to it, and nothing is ever executed or
looked up by name. `unpack` raises MalformedMessage and nothing else, whatever the bytes.

Easy to get wrong: True is an int to Python, and a Counter is a dict. `shaped_like` gives back the
container that this peer's own tree has in the same place.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import msgspec
from torch import Tensor

from protocols.accumulation.state_manifest import LARGEST_METADATA_BYTES, StateRefused
from protocols.errors import LimitExceeded, MalformedMessage

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
            f"What the state has beside its tensors takes {len(packed):,} bytes; at most "
            f"{LARGEST_METADATA_BYTES:,} can travel.",
            advice="Keep long lists of numbers in tensors.",
        )
    return packed


def unpack(packed: bytes) -> Any:
    """The plain tree in these bytes, of the right form throughout."""
    if len(packed) > LARGEST_METADATA_BYTES:
        raise LimitExceeded(f"Metadata of {len(packed):,} bytes came.")
    try:
        plain = msgspec.msgpack.decode(packed)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        reason = str(error)[:100]
        raise MalformedMessage(f"These bytes are no metadata of a state: {reason}.") from None
    _check(plain, 0, [0])
    return plain


def join(plain: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The tree of a checked plain form. MalformedMessage for the name of no tensor."""
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
    """The same tree with the kinds of dicts that this peer's own has in the same places."""
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


def check_kinds(theirs: Any, own: Any, what: str) -> None:
    """StateRefused where this peer's own settings have another kind of value in the same place:
    loaded, they would break a later step, far from where they came from."""
    if theirs is None or own is None:
        return
    here, there = _kind(own), _kind(theirs)
    if here != there:
        raise StateRefused(
            f"In the state, {what} is {there}; here it is {here}.",
            why="The peers of a run make their optimizer and its schedule in the same way.",
            advice="Take the optimizer and the schedule that the run's organiser has published.",
        )
    if isinstance(own, Mapping):
        for name in own.keys() & theirs.keys():
            check_kinds(theirs[name], own[name], f"{what}/{name}")
    elif isinstance(own, list | tuple) and len(own) == len(theirs):
        for number, (one, other) in enumerate(zip(theirs, own, strict=True)):
            check_kinds(one, other, f"{what}/{number}")


def _kind(value: Any) -> str:
    if isinstance(value, bool | int | float | Tensor):
        return "a number"
    if isinstance(value, Mapping):
        return "settings by name"
    if isinstance(value, list | tuple):
        return "a list"
    return f"of the type {type(value).__name__}"


def _check(plain: Any, depth: int, nodes: list[int]) -> None:
    nodes[0] += 1
    if depth > MOST_DEPTH or nodes[0] > MOST_NODES:
        raise MalformedMessage("The metadata of a state is nested too deeply, or too long.")
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
        raise MalformedMessage("The metadata of a state has a key that is no text or number.")
    return entry[0], entry[1]
