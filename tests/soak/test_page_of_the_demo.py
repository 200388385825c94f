"""The page of `potluck demo` in a real browser, from its first seconds on."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.page.browser import missing
from lab.page.demo import MOMENTS, watch_demo

LEAST_BYTES = 50_000  # of a picture; an empty one has a tenth of it


@pytest.mark.soak
@pytest.mark.xdist_group("demo")
@pytest.mark.skipif(bool(missing()), reason=f"no browser for it: {missing()}")
async def test_the_page_shows_the_curve_four_volunteers_one_killed_and_one_late(
    tmp_path: Path,
) -> None:
    seen = await watch_demo(tmp_path)
    assert seen.told[-1]["failures"] == []
    assert seen.troubles == []
    pictures = {*(f"{second:02d}" for second in MOMENTS), "end"}
    assert set(seen.moments) == pictures
    assert all((tmp_path / f"demo-{name}.png").stat().st_size > LEAST_BYTES for name in pictures)
    end = seen.moments["end"]
    assert end["curves"] == 1
    names = {name for one in seen.moments.values() for name in one["names"]}
    assert len(names) == 5, "four volunteers, and the peer that keeps the run"
    assert end["events"].count(" came (") >= 4
    assert end["events"].count(" went") >= 1
    assert len(end["board"]) >= 4, "those that were there from the start, and the keeper"
