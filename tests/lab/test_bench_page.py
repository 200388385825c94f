"""`scripts/bench page` runs, and its figures are what they say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

from lab.bench import page
from lab.bench.page import PageViewer, followed, heard_by, is_met, lines
from lab.bench.page_server import PageServer
from tests.commands.console import laboratory, objects

MET: dict[str, Any] = {
    "viewers": 200,
    "seconds": 300.0,
    "cores": 0.06,
    "cores_alone": 0.001,
    "growth_bytes": 9_000_000,
    "lost_viewers": 0,
    "MB_per_s": 2.5,
    "longest_silence_s": 1.2,
    "page_bytes": 124_000,
    "page_bytes_compressed": 37_000,
    "page_seconds": 0.02,
    "painted_seconds": 0.4,
    "painted_seconds_cold": 1.6,
}


@pytest.mark.parametrize(
    "missed",
    [
        {"cores": 0.11},
        {"growth_bytes": 21_000_000},
        {"lost_viewers": 1},
        {"page_bytes": 151_000},
        {"painted_seconds": 1.1},
        {"page_seconds": 1.1, "painted_seconds": None},
    ],
    ids=lambda one: next(iter(one)),
)
def test_each_bar_of_the_page_counts(missed: dict[str, Any]) -> None:
    assert is_met(MET)
    assert is_met({**MET, "painted_seconds": None}), "there is no browser everywhere"
    assert not is_met({**MET, **missed})
    assert "0.06 cores (0.001 without any)" in lines(MET)


def test_the_longest_silence_reaches_from_the_beginning_to_the_end() -> None:
    often, late, never = (PageViewer("http://127.0.0.1:1") for _ in range(3))
    often.heard, often.bytes = [0.5, 10.0, 11.0, 12.5], 3_000_000
    late.heard = [13.0]
    assert heard_by([often], 10.0, 13.0) == {"MB_per_s": 1.0, "longest_silence_s": 1.5}
    assert heard_by([often, late], 10.0, 14.0)["longest_silence_s"] == 3.0
    assert heard_by([often, never], 10.0, 16.0)["longest_silence_s"] == 6.0


@pytest.mark.slow
async def test_a_few_viewers_follow_a_short_history(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a browser, which has tests of its own."""
    monkeypatch.setattr(page, "missing", lambda: "it is left out")
    async with trio.open_nursery() as nursery:
        server = PageServer(nursery)
        made = await server.serve(peers=5, hours=0.02)
        told = await followed(server.used, made["url"], viewers=5, seconds=0.4)
        nursery.cancel_scope.cancel()
    assert (told["lost_viewers"], told["painted_seconds"]) == (0, None)
    assert told["MB_per_s"] > 0
    assert 10_000 < told["page_bytes_compressed"] < told["page_bytes"] < 150_000


@pytest.mark.soak
def test_two_hundred_viewers_cost_little(tmp_path: Path) -> None:
    """The paint depends on what else the machine does, so only the figures of the page count."""
    words = ("bench", "page", "--seconds", "30", "--hours", "2", "--json")
    done = laboratory(*words, home=tmp_path)
    (told,) = objects(done.stdout)
    assert told["viewers"] == 200
    assert is_met({**told, "painted_seconds": None}), told
