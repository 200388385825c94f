"""The block of peers: how many, how each is reached, and what each does. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from rich.cells import cell_len
from rich.text import Text

from node.app.screen.cells import clean, clip, count, fit, pad
from node.app.screen.layout import ScreenBlock
from node.app.screen.numbers import named, within
from node.core.display_name import label
from node.core.training_view import RunPeerView, TrainerView
from node.training.words import role_words

MOST_PEERS: Final = 12
"""Lines of the list; `potluck peers` has them all."""

NAME_MOST: Final = 16
LIST_FROM: Final = 30
"""Columns that a line of the list has at least."""

BETWEEN: Final = "  "
LAST: Final = "\U0010ffff"  # sorts behind every name
_REACHED: Final = ("direct", "punched", "relayed")
UNREACHED: Final = "not reached"


def peers_block(view: TrainerView, room: int) -> ScreenBlock:
    peers = sorted(view.peers, key=_order)
    if not peers:
        return ScreenBlock(9, [])
    heading = named("peers", Text(fit(_heading(peers, room), within(room))), room)
    variants = [[heading]]
    if room >= LIST_FROM:
        rows = _rows(peers[:MOST_PEERS], within(room))
        for many in range(1, len(rows) + 1):
            lines = [heading, *(named("", row, room) for row in rows[:many])]
            hidden = len(peers) - many
            if hidden:
                more = Text(f"and {hidden:,} more: potluck peers", "dim")
                lines.append(named("", more, room))
            variants.append(lines)
    return ScreenBlock(9, variants, apart=True)


def _order(peer: RunPeerView) -> tuple[bool, bool, str, str]:
    """A fixed order, so that the list does not jump; reachable peers come first."""
    return (
        peer.reach not in _REACHED,
        bool(peer.ignored),
        peer.name or peer.said_name or LAST,
        peer.peer,
    )


def _way(peer: RunPeerView) -> str:
    return peer.reach if peer.reach in _REACHED else UNREACHED


def _heading(peers: Sequence[RunPeerView], room: int) -> list[str]:
    ways = Counter(_way(one) for one in peers)
    noun = "" if within(room) != room else " peer" if len(peers) == 1 else " peers"
    return [
        f"{len(peers):,} other{noun}" if len(peers) == 1 or noun else f"{len(peers):,} others",
        ", ".join(f"{ways[way]:,} {way}" for way in (*_REACHED, UNREACHED) if ways[way]),
    ]


def _rows(peers: Sequence[RunPeerView], room: int) -> list[Text]:
    """One line for each, in columns; columns without full room are left out."""
    table = [
        (
            label(clean(one.peer), clean(one.name), one.said_name),
            _way(one),
            "" if one.round_trip_ms is None else f"{count(one.round_trip_ms)} ms",
            "" if one.samples_per_second is None else f"{count(one.samples_per_second, 1)} /s",
            "" if one.samples is None else f"{count(one.samples)} in batch",
            clip(role_words(clean(one.role), keeps=one.keeps), NAME_MOST),
        )
        for one in peers
    ]
    widths = [max(cell_len(row[column]) for row in table) for column in range(len(table[0]))]
    rows = []
    for peer, cells in zip(peers, table, strict=True):
        line = ""
        for column, cell in enumerate(cells):
            if not widths[column]:
                continue
            placed = cell.rjust(widths[column]) if 2 <= column <= 4 else pad(cell, widths[column])
            longer = f"{line}{BETWEEN}{placed}" if line else placed
            if cell_len(longer) > room:
                break
            line = longer
        row = Text(clip(line, room), "" if peer.reach in _REACHED else "dim")
        ignored = f"{BETWEEN}ignored: {clean(peer.ignored)}" if peer.ignored else ""
        if ignored and row.cell_len + 12 <= room:
            row.append(clip(ignored, room - row.cell_len), "bold")
        rows.append(row)
    return rows
