"""Chooses the blocks of a picture that have room, and how much of each. Pure.

    arrange([ScreenBlock(priority=1, variants=[[title]]), …], height)

A block comes in variants, from the shortest to the fullest. First every block gets its shortest,
the most important ones first; blocks without any room are left out. Then they grow in turns, so
that a long list does not take the room of everything else.

Blocks are given in the order on the screen, which is not that of their importance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rich.text import Text

AIRY_FROM: Final = 18
"""Lines: from here on an empty line precedes a block that asks for it."""

Lines = Sequence[Text]


@dataclass(frozen=True)
class ScreenBlock:
    """`priority`: 1 is kept longest. `apart`: an empty line before it, if there is room.
    `grows_first`: to its fullest, before anything else grows."""

    priority: int
    variants: Sequence[Lines]
    apart: bool = False
    grows_first: bool = False


def arrange(blocks: Sequence[ScreenBlock], height: int) -> list[Text]:
    """At most `height` lines."""
    chosen: dict[int, int] = {}  # which variant of which block
    apart: set[int] = set()
    left = height
    by_priority = sorted(
        (index for index, block in enumerate(blocks) if block.variants),
        key=lambda index: blocks[index].priority,
    )
    for index in by_priority:
        lines = len(blocks[index].variants[0])
        if lines <= left:
            chosen[index] = 0
            left -= lines
    for index in by_priority:
        if blocks[index].grows_first and index in chosen:
            left += len(blocks[index].variants[0])
            sizes = [len(variant) for variant in blocks[index].variants]
            chosen[index] = max(number for number, size in enumerate(sizes) if size <= left)
            left -= sizes[chosen[index]]
    if height >= AIRY_FROM:
        for index in by_priority:
            if blocks[index].apart and index in chosen and left > 0:
                apart.add(index)
                left -= 1
    grew = True
    while grew:
        grew = False
        for index in by_priority:
            variants = blocks[index].variants
            if index not in chosen or chosen[index] + 1 >= len(variants):
                continue
            more = len(variants[chosen[index] + 1]) - len(variants[chosen[index]])
            if more <= left:
                chosen[index] += 1
                left -= more
                grew = True
    picture: list[Text] = []
    for index in sorted(chosen):
        if index in apart and picture:
            picture.append(Text())
        picture.extend(blocks[index].variants[chosen[index]])
    return picture
