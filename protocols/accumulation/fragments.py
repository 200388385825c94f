"""Divides the parameters into fragments, of which each round of local steps averages one. Pure.

    fragments = fragments_of([("embedding", 16384), ("blocks.0.widen", 16384), …], count=4)
    fragments[epoch % 4]                     # the names that the round of this epoch averages

This is the schedule of Streaming DiLoCo (Douillard et al. 2025, arXiv 2501.18512): every fragment
is exchanged once in H inner steps, and the next one H/F inner steps later. Layers are dealt to the
fragments in turn, so that each has layers from all depths (the paper's strided pattern). A layer is
what has the same name up to its first number. Parameters outside of the layers, such as an
embedding, go to the fragment that has the fewest values, the largest of them first.

Promise: it depends on nothing but the names and sizes of the parameters and their order, so all
peers of a run have the same fragments.
"""

from __future__ import annotations

from collections.abc import Sequence

from protocols.errors import ProtocolMisuse


def fragments_of(sizes: Sequence[tuple[str, int]], count: int) -> tuple[tuple[str, ...], ...]:
    """The names in each fragment, in the order in which they were given. ProtocolMisuse if a
    fragment would have none."""
    if count == 1:
        return (tuple(name for name, _ in sizes),)
    layers: dict[str, list[tuple[str, int]]] = {}
    others: list[tuple[str, int]] = []
    for name, values in sizes:
        layer = _layer_of(name)
        (others if layer is None else layers.setdefault(layer, [])).append((name, values))
    parts = len(layers) + len(others)
    if parts < count:
        raise ProtocolMisuse(
            f"fragments={count} is more than the model can be divided into: {parts}.",
            why=f"It has {len(layers)} layers and {len(others)} parameters outside of them, and "
            "a fragment has whole layers.",
            advice=f"Set fragments to {parts} or less.",
        )
    dealt: list[list[tuple[str, int]]] = [[] for _ in range(count)]
    for number, own in enumerate(layers.values()):
        dealt[number % count] += own
    for one in sorted(others, key=lambda other: -other[1]):
        min(dealt, key=lambda fragment: (_values(fragment), len(fragment))).append(one)
    place = {name: number for number, (name, _) in enumerate(sizes)}
    return tuple(tuple(sorted((name for name, _ in one), key=place.__getitem__)) for one in dealt)


def _layer_of(name: str) -> str | None:
    """The name up to its first number: `blocks.3` of `blocks.3.attention.output.weight`."""
    words = name.split(".")
    for number, word in enumerate(words):
        if word.isascii() and word.isdecimal():
            return ".".join(words[: number + 1])
    return None


def _values(fragment: Sequence[tuple[str, int]]) -> int:
    return sum(values for _, values in fragment)
