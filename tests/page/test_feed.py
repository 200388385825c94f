"""The page's data: each viewer gets all of it once, and then what has changed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from node.app.page.feed import NEWS_KEPT, Feed
from node.training.history import Point


def points(*steps: int, loss: float = 1.0) -> tuple[Point, ...]:
    return tuple(Point(step, 1, loss, 10.0, 10.0 * step, 1.0 * step, 1.0, 2) for step in steps)


def read(data: bytes) -> Any:
    return json.loads(data)


class Viewer:
    """Keeps what it is sent, as the page's script does."""

    def __init__(self) -> None:
        self.mark = ""
        self.sections: dict[str, Any] = {}
        self.steps: list[float] = []

    def look(self, feed: Feed) -> Any:
        data = feed.since(self.mark)
        self.mark = feed.mark
        if not data:
            return None
        news = read(data)
        if "points" in news:
            self.steps = [one[0] for one in news["points"]]
        for one in news.get("more", []):
            self.steps = [step for step in self.steps if step < one[0]] + [one[0]]
        self.sections |= {
            name: value for name, value in news.items() if name not in ("mark", "points", "more")
        }
        return news


def test_a_viewer_gets_everything_and_then_only_what_has_changed() -> None:
    feed, viewer = Feed(), Viewer()
    feed.update({"run": 1, "people": ["a"]}, points(1, 2))
    assert viewer.look(feed).keys() == {"mark", "run", "people", "points"}
    assert viewer.look(feed) is None
    feed.update({"run": 2, "people": ["a"]}, points(1, 2, 3))
    news = viewer.look(feed)
    assert news.keys() == {"mark", "run", "more"}
    assert viewer.steps == [1, 2, 3]


def test_a_viewer_that_missed_some_states_gets_the_newest_of_each_section() -> None:
    feed, viewer = Feed(), Viewer()
    feed.update({"run": 1, "people": ["a"]}, points(1))
    viewer.look(feed)
    for number in range(2, 30):
        feed.update({"run": number, "people": ["a", number // 20]}, points(*range(1, number + 1)))
    viewer.look(feed)
    assert viewer.sections == {"run": 29, "people": ["a", 1]}
    assert viewer.steps == list(range(1, 30))


def test_a_viewer_that_was_away_for_too_long_gets_the_whole_curve() -> None:
    feed, viewer = Feed(), Viewer()
    feed.update({}, points(1))
    viewer.look(feed)
    most = NEWS_KEPT + 5
    for number in range(2, most):
        feed.update({}, points(*range(1, number + 1)))
    assert "points" in viewer.look(feed)
    assert viewer.steps == list(range(1, most))


def test_a_run_that_went_back_is_drawn_anew() -> None:
    feed, viewer = Feed(), Viewer()
    feed.update({}, points(1, 2, 3, 4))
    viewer.look(feed)
    feed.update({}, points(1, 2, 3, loss=9.0))
    viewer.look(feed)
    assert viewer.steps == [1, 2, 3]


def test_a_run_that_went_back_and_on_within_a_second_is_drawn_anew() -> None:
    feed, viewer = Feed(), Viewer()
    feed.update({}, points(1, 2, 3))
    viewer.look(feed)
    feed.update({}, (*points(1), *points(2, 3, 4, loss=9.0)))
    assert "points" in viewer.look(feed)


@pytest.mark.parametrize("mark", ["", "x", "-1", "elsewhere-1", "-", "1-" + "9" * 500, "-٣"])
def test_a_viewer_of_another_process_or_with_a_wrong_mark_gets_everything(mark: str) -> None:
    feed = Feed()
    feed.update({"run": 1}, points(1))
    assert read(feed.since(mark)).keys() == {"mark", "run", "points"}
    assert read(feed.since(f"{feed.boot}-{'9' * 11}") or b"null") is None


def test_the_same_news_are_encoded_once_for_all_viewers() -> None:
    feed = Feed()
    feed.update({"run": 1}, points(1))
    assert feed.since("") is feed.since("")
