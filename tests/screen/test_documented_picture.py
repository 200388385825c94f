"""The pictures in the documents are of the screen as it is, and need nobody else to be shown."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from lab.pictures import PICTURES, drawn, picture, shown
from lab.scenes import PICTURED, STATES

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "pictures"
SVG = "{http://www.w3.org/2000/svg}"
MOST_BYTES = 30_000  # a page with a picture is loaded over a telephone, too


def words_in(svg: str) -> str:
    """Row by row, as they stand there."""
    rows: dict[float, list[str]] = {}
    for one in ElementTree.fromstring(svg).iter(f"{SVG}text"):
        rows.setdefault(float(one.attrib["y"]), []).append(one.text or "")
    return "\n".join(" ".join(rows[y]) for y in sorted(rows))


@pytest.mark.parametrize("name", PICTURES)
def test_each_picture_is_of_the_screen_as_it_is(name: str) -> None:
    kept = (FOLDER / name).read_text("utf-8")
    assert kept == picture(name), ".venv/bin/python scripts/picture terminal"


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_needs_nobody_else(name: str) -> None:
    svg = (FOLDER / name).read_text("utf-8")
    assert len(svg.encode()) < MOST_BYTES
    assert re.findall(r"https?://[^\"]*", svg) == [SVG[1:-1]]
    kinds = {one.tag.removeprefix(SVG) for one in ElementTree.fromstring(svg).iter()}
    assert kinds == {"svg", "title", "rect", "path", "g", "text"}, "no script, no style, no image"


def test_the_documents_show_them_all() -> None:
    pages = (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
    shown_there = "".join(page.read_text("utf-8") for page in pages)
    for name in PICTURES:
        assert f"pictures/{name})" in shown_there


def test_a_picture_has_the_words_and_the_curve_of_a_terminal() -> None:
    svg = drawn(shown(PICTURED["training"], 80, 24), 80, "training")
    words = words_in(svg)
    assert "28,160 accepted samples in 84 steps · 33 % of them" in words
    assert "“carol” …DqWzXn02 relayed 12.6 /s 118 ms 151 in batch trains" in words
    curves = re.findall(r'<path d="(M[^"]*z)" fill="#39c5cf"', svg)
    assert sum(path.count("M") for path in curves) >= 2 * (80 - 8), "a dot in each column of dots"


@pytest.mark.parametrize("state", STATES)
def test_every_state_can_be_drawn(state: str) -> None:
    svg = drawn(shown(STATES[state], 80, 24), 80, state)
    assert STATES[state].view.phase.value in words_in(svg)
