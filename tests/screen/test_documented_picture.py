"""The picture in docs/volunteers.md is the renderer's own."""

from __future__ import annotations

from pathlib import Path

from node.screen.picture import render
from tests.screen.scenes import STATES

PAGE = Path(__file__).parents[2] / "docs" / "volunteers.md"


def test_the_page_shows_the_screen_as_it_is() -> None:
    drawn = "\n".join(line.plain for line in render(STATES["training"], 80, 23))
    assert f"```text\n{drawn}\n```\n" in PAGE.read_text("utf-8"), (
        "render(STATES['training'], 80, 23) is not what docs/volunteers.md shows"
    )
