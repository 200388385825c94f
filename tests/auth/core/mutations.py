"""Ways in which bytes go wrong on purpose: flipped, cut, doubled, spliced, and re-spelled.

A mutation never gives back what it was given. Everything follows from the `random.Random` that is
handed in, so a failure can be repeated from its seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

Mutation = Callable[[bytes, bytes, random.Random], bytes]
"""(the bytes, other valid bytes of the same kind, chance) -> something else"""


def mutated(data: bytes, others: list[bytes], chance: random.Random) -> bytes:
    """One or a few mutations of the data; never any of the valid ones."""
    while True:
        result = data
        for _ in range(chance.choice((1, 1, 1, 2, 3))):
            result = chance.choice(MUTATIONS)(result, chance.choice(others), chance)
        if result != data and result not in others:
            return result


def bit_flips(data: bytes) -> Iterator[bytes]:
    """The data with each of its bits flipped in turn."""
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        yield bytes(flipped)


def _flip(data: bytes, _: bytes, chance: random.Random) -> bytes:
    if not data:
        return data
    flipped = bytearray(data)
    flipped[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return bytes(flipped)


def _overwrite(data: bytes, _: bytes, chance: random.Random) -> bytes:
    place = chance.randrange(len(data) + 1)
    some = chance.choice((b"\0", b"\xff", b"\xdd\xff\xff\xff\xff", chance.randbytes(3)))
    return data[:place] + some + data[place + len(some) :]


def _insert(data: bytes, _: bytes, chance: random.Random) -> bytes:
    place = chance.randrange(len(data) + 1)
    return data[:place] + chance.randbytes(chance.randrange(1, 9)) + data[place:]


def _cut(data: bytes, _: bytes, chance: random.Random) -> bytes:
    start, end = sorted(chance.randrange(len(data) + 1) for _ in range(2))
    return data[:start] + data[end:]


def _double(data: bytes, _: bytes, chance: random.Random) -> bytes:
    start, end = sorted(chance.randrange(len(data) + 1) for _ in range(2))
    return data[:end] + data[start:end] + data[end:]


def _splice(data: bytes, other: bytes, chance: random.Random) -> bytes:
    """The beginning of one and the end of another, cut at the same place."""
    place = chance.randrange(len(data) + 1)
    return data[:place] + other[place:]


def _exchange_fields(data: bytes, other: bytes, chance: random.Random) -> bytes:
    """Valid in form: some fields of the one, some of the other."""
    mine, theirs = _fields(data), _fields(other)
    if mine is None or theirs is None or len(mine[0]) != len(theirs[0]):
        return data
    fields = [chance.choice(pair) for pair in zip(mine[0], theirs[0], strict=True)]
    return msgspec.msgpack.encode(fields) + chance.choice((mine[1], theirs[1]))


def _change_a_field(data: bytes, _: bytes, chance: random.Random) -> bytes:
    """Valid in form, with a field of another value or type."""
    split = _fields(data)
    if split is None or not split[0]:
        return data
    fields, rest = split
    place = chance.randrange(len(fields))
    old = fields[place]
    values: list[Any] = [None, True, 0, -1, 1 << 63, 1.0, "", b"", [], {}, [old], chance.random()]
    if isinstance(old, int):
        values += [old + 1, old - 1, old + chance.randrange(1 << 40)]
    if isinstance(old, bytes | str) and old:
        values += [old[1:], old + old[:1], old[::-1], old[:-1] + old[:1]]
    fields[place] = chance.choice(values)
    return msgspec.msgpack.encode(fields) + rest


def _fields(data: bytes) -> tuple[list[Any], bytes] | None:
    """The array at the beginning, and what follows it: a signature, or nothing."""
    for rest in (0, 64):
        try:
            fields = msgspec.msgpack.decode(data[: len(data) - rest])
        except (msgspec.MsgspecError, ValueError, TypeError, RecursionError):
            continue
        if isinstance(fields, list):
            return fields, data[len(data) - rest :]
    return None


MUTATIONS: tuple[Mutation, ...] = (
    _flip,
    _flip,
    _overwrite,
    _insert,
    _cut,
    _double,
    _splice,
    _exchange_fields,
    _change_a_field,
)
