"""The screen of `potluck join` and `potluck backbone` as SVG, for docs/pictures.

The frames are of scenes (scenes.py), drawn by the code of the screen itself, so a test can tell
that the pictures are of the screen as it is.

The picture is SVG without scripts, fonts or addresses of others, which is what git hosts show. Each
stretch of text says how long it is, so that it stands in its columns in whatever font there is.
Bars, frames and curves are drawn as shapes.
"""

from __future__ import annotations

import argparse
import html
import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Final

from rich.cells import cell_len
from rich.console import Console
from rich.segment import Segment
from rich.text import Text

from lab.page import demo
from lab.page import pictures as page
from lab.scenes import PICTURED, STATES
from node.app.screen import Look, Scene, frame

FOLDER: Final = Path(__file__).resolve().parents[2] / "docs" / "pictures"
PICTURES: Final = {
    "terminal-60x15.svg": ("training", 60, 15),
    "terminal-80x24.svg": ("training", 80, 24),
    "terminal-120x40.svg": ("training", 120, 40),
    "terminal-backbone.svg": ("backbone", 120, 30),
}

CELL, LINE, MARGIN, BASE = 8.4, 18, 12, 13  # of the drawing, in its units; the font's is 14
GROUND, INK, FAINT = "#15181e", "#d5d9e0", "#868e9b"
INKS: Final = (  # black, red, green, yellow, blue, magenta, cyan, white; then the bright ones
    *("#15181e", "#e5534b", "#57ab5a", "#daaa3f", "#316dca", "#b083f0", "#39c5cf", "#d5d9e0"),
    *("#868e9b", "#ff938a", "#6bc46d", "#eac55f", "#6cb6ff", "#dcbdfb", "#56d4dd", "#ffffff"),
)
WORDS: Final = re.compile(r"\S+(?: \S+)*")  # wider gaps are left to the places of what follows
FONTS: Final = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
BRAILLE: Final = 0x2800
DOTS: Final = ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (0, 3), (1, 3))
"""Column and row of the dot of each bit."""
BARS: Final = {"━": ((9, 4),), "═": ((7.5, 1.5), (12.5, 1.5))}
"""Of each line of a bar: where its middle is, and how thick it is."""
DOT: Final = 2.2  # its width and height
LINES: Final = {  # from the middle of a cell: to the left, right, up, down
    "─": (1, 1, 0, 0),
    "│": (0, 0, 1, 1),
    "╭": (0, 1, 0, 1),
    "╮": (1, 0, 0, 1),
    "╰": (0, 1, 1, 0),
    "╯": (1, 0, 1, 0),
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the pictures in docs/pictures.")
    kinds = parser.add_subparsers(metavar="KIND", required=True)
    add_parser(kinds)
    page.add_parser(kinds)
    demo.add_parser(kinds)
    arguments = parser.parse_args()
    code: int = arguments.make(arguments, FOLDER)
    return code


def add_parser(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = kinds.add_parser("terminal", help="of the screen of `potluck join` and `backbone`")
    parser.add_argument("picture", type=Path, nargs="?", help="one file to write, and no others")
    parser.add_argument("--state", choices=[*PICTURED, *STATES], default="training")
    parser.add_argument("--size", default="80x24", help="columns and rows (80x24)")
    parser.add_argument("--of", type=Path, metavar="FILE", help="draw what a terminal showed")
    parser.set_defaults(make=make)


def make(arguments: argparse.Namespace, folder: Path) -> int:
    if arguments.picture is None:
        for name in PICTURES:
            (folder / name).write_text(picture(name), "utf-8")
        return 0
    columns, rows = (int(one) for one in arguments.size.split("x"))
    if arguments.of is None:
        lines = shown((PICTURED | STATES)[arguments.state], columns, rows)
    else:
        text = arguments.of.read_text("utf-8").rstrip()
        lines = [Text.from_ansi(line) for line in text.split("\n")]
    arguments.picture.write_text(drawn(lines, columns, arguments.state), "utf-8")
    return 0


def picture(name: str) -> str:
    """One of `PICTURES` as SVG."""
    state, columns, rows = PICTURES[name]
    return drawn(shown(PICTURED[state], columns, rows), columns, state)


def shown(scene: Scene, columns: int, rows: int) -> list[Text]:
    """The frame as a terminal with colours gets it."""
    return [Text.from_ansi(line.written) for line in frame(scene, columns, rows, Look())]


def drawn(lines: Sequence[Text], columns: int, title: str) -> str:
    """The lines as SVG."""
    width, height = round(columns * CELL + 2 * MARGIN), len(lines) * LINE + 2 * MARGIN
    shapes = [shape for row, line in enumerate(lines) for shape in row_of(line, row)]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
            f' width="{width}" height="{height}" role="img">',
            f"<title>the screen of potluck: {title}</title>",
            f'<rect width="{width}" height="{height}" rx="8" fill="{GROUND}"/>',
            f'<g font-family="{FONTS}" font-size="14" fill="{INK}" shape-rendering="crispEdges">',
            *shapes,
            "</g>",
            "</svg>",
            "",
        ]
    )


def row_of(line: Text, row: int) -> Iterator[str]:
    x, top = float(MARGIN), MARGIN + row * LINE
    for segment in line.render(Console(width=max(line.cell_len, 1), color_system="standard")):
        ink, ground, weight = inks_of(segment)
        for kind, letters in groupby(segment.text, key=kind_of):
            text = "".join(letters)
            cells = cell_len(text) * CELL
            if ground:
                yield rectangle(x, top, cells, f'fill="{ground}"')
            if kind == "braille":
                yield f'<path d="{dots_of(text, x, top)}" fill="{ink}"/>'
            elif kind == "line":
                yield f'<path d="{strokes_of(text, x, top)}" stroke="{ink}" fill="none"/>'
            elif kind in BARS:
                for middle, thick in BARS[kind]:
                    stroke = f'stroke="{ink}" stroke-width="{thick}"'
                    yield f'<path d="M{x:.1f} {top + middle}h{cells:.1f}" {stroke}/>'
            else:
                yield from words_of(text, x, top, f'fill="{ink}"{weight}')
            x += cells


def words_of(text: str, x: float, top: float, look: str) -> Iterator[str]:
    for words in WORDS.finditer(text):
        left, long = cell_len(text[: words.start()]) * CELL, cell_len(words[0]) * CELL
        yield (
            f'<text x="{x + left:.1f}" y="{top + BASE}" textLength="{long:.1f}" {look}>'
            f"{html.escape(words[0])}</text>"
        )


def rectangle(x: float, top: float, cells: float, look: str) -> str:
    return f'<rect x="{x:.1f}" y="{top}" width="{cells:.1f}" height="{LINE}" {look}/>'


def dots_of(text: str, x: float, top: float) -> str:
    """A square for each dot."""
    return "".join(
        f"M{x + at * CELL + (0.25 + 0.5 * column) * CELL - DOT / 2:.1f}"
        f" {top + (0.5 + row) * LINE / 4 - DOT / 2:.1f}h{DOT}v{DOT}h-{DOT}z"
        for at, letter in enumerate(text)
        for bit, (column, row) in enumerate(DOTS)
        if (ord(letter) - BRAILLE) >> bit & 1
    )


def strokes_of(text: str, x: float, top: float) -> str:
    found = []
    middle = top + LINE / 2
    at = 0.0
    for letter, many in groupby(text):
        long = len(list(many)) * CELL
        left, right, up, down = LINES[letter]
        begin = x + at + (0 if left else CELL / 2)
        end = x + at + long - (0 if right else CELL / 2)
        if left or right:
            found.append(f"M{begin:.1f} {middle:g}H{end:.1f}")
        if up or down:
            first, last = top if up else middle, top + LINE if down else middle
            found.append(f"M{x + at + CELL / 2:.1f} {first:g}V{last:g}")
        at += long
    return "".join(found)


def kind_of(letter: str) -> str:
    if letter in LINES:
        return "line"
    if BRAILLE <= ord(letter) < BRAILLE + 256:
        return "braille"
    return letter if letter in BARS else "text"


def inks_of(segment: Segment) -> tuple[str, str, str]:
    """The colour of the letters and of what is behind them, and how bold they are."""
    style = segment.style
    if style is None:
        return INK, "", ""
    number = None if style.color is None else style.color.number
    behind = None if style.bgcolor is None else style.bgcolor.number
    ink = INKS[number] if number is not None else FAINT if style.dim else INK
    ground = "" if behind is None else INKS[behind]
    if style.reverse:
        ink, ground = ground or GROUND, ink
    return ink, ground, ' font-weight="bold"' if style.bold else ""
