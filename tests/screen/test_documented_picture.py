"""The pictures in the documents are of the screen as it is, and need nobody else to be shown."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable, Sequence
from pathlib import Path
from xml.etree import ElementTree

from rich.text import Text

from node.app.screen.canvas import Look, paint
from node.app.screen.picture import render
from tests.screen.scenes import STATES

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "volunteers.md"
PICTURE = ROOT / "docs" / "pictures" / "join.svg"
SVG = "{http://www.w3.org/2000/svg}"
MOST_BYTES = 30_000  # a page with a picture is loaded over a telephone, too


def words_in(svg: str) -> str:
    """Row by row, as they stand there."""
    rows: dict[float, list[str]] = {}
    for one in ElementTree.fromstring(svg).iter(f"{SVG}text"):
        rows.setdefault(float(one.attrib["y"]), []).append(one.text or "")
    return "\n".join(" ".join(rows[y]) for y in sorted(rows))


def test_the_page_shows_the_screen_as_it_is() -> None:
    drawn = "\n".join(line.plain for line in render(STATES["training"], 80, 23))
    assert f"```text\n{drawn}\n```\n" in PAGE.read_text("utf-8"), (
        "render(STATES['training'], 80, 23) is not what docs/volunteers.md shows"
    )


def test_the_readme_shows_a_picture_that_needs_nobody_else() -> None:
    assert "(docs/pictures/join.svg)" in (ROOT / "README.md").read_text("utf-8")
    svg = PICTURE.read_text("utf-8")
    assert len(svg.encode()) < MOST_BYTES
    assert re.findall(r"https?://[^\"]*", svg) == [SVG[1:-1]]
    kinds = {one.tag.removeprefix(SVG) for one in ElementTree.fromstring(svg).iter()}
    assert kinds == {"svg", "title", "rect", "g", "text"}, "no script, no style, no image"


def test_the_readmes_picture_is_of_the_screen_as_it_is() -> None:
    """Else it is made again: scripts/picture says how."""
    shown = words_in(PICTURE.read_text("utf-8"))
    for part in ("potluck join", "poem · ", "3 others · 3 direct", "accepted samples in"):
        assert part in shown
    here = "\n".join(line.plain for line in render(STATES["training"], 80, 23))
    for name in ("step", "loss", "batch", "given", "traffic", "device", "peers"):
        assert re.search(rf"^ {name} ", here, re.MULTILINE)
        assert re.search(rf"^{name} ", shown, re.MULTILINE)


def test_a_picture_has_the_words_and_the_bars_of_a_terminal() -> None:
    drawn: Callable[[Sequence[Text]], str] = runpy.run_path(str(ROOT / "scripts/picture"))["drawn"]
    lines = render(STATES["training"], 80, 23)
    svg = drawn([Text.from_ansi(paint(line, Look()).written) for line in lines])
    words = words_in(svg)
    assert "28,160 accepted samples in 84 steps · 33 % of them · 31.2 samples/s" in words
    assert "“carol” …DqWzXn02 relayed 118 ms 12.6 /s 151 in batch trains" in words
    green = [
        one
        for one in ElementTree.fromstring(svg).iter(f"{SVG}rect")
        if "#57ab5a" in one.attrib.values()
    ]
    assert [one.attrib["width"] for one in green] == ["84.0", "100.8", "8.4"], (
        "the state's ground, this peer's part of the bar, and its legend"
    )
