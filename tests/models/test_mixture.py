"""Sources are mixed by probability, as long as they give; those that do not are left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from models.data.errors import NoDataLeft
from models.data.events import (
    Renormalised,
    ShardSkipped,
    SourceEnded,
    SourceEvent,
    SourceIsBack,
    SourceRests,
)
from models.data.settings import DataSettings, SourceSettings
from tests.models.openers import opened, sentences
from tests.models.virtual_clock import VirtualClock
from tests.models.web_server import Site, serving, status, web_server


def text_of(name: str, count: int) -> bytes:
    return b"".join(b"%s %d\n" % (name.encode(), number) for number in range(count))


def mixed(*sources: tuple[str, str, float], **more: int) -> DataSettings:
    """Sources as (name, path, probability)."""
    made = tuple(
        SourceSettings("text", (path,), probability, name) for name, path, probability in sources
    )
    return DataSettings(**{"source": made, "passes": 0, "shuffle_examples": 50, **more})


def two(folder: Path, first: int, second: int, **more: int) -> DataSettings:
    (folder / "a.txt").write_bytes(text_of("wikipedia", first))
    (folder / "b.txt").write_bytes(text_of("oscar", second))
    return mixed(
        ("wikipedia", str(folder / "a.txt"), 0.23), ("oscar", str(folder / "b.txt"), 0.77), **more
    )


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with web_server(tmp_path) as made:
        yield made


def test_each_source_is_drawn_with_its_probability_whatever_its_size(tmp_path: Path) -> None:
    with opened(two(tmp_path, 10, 3_000)) as data:
        drawn = Counter(example.content.split()[0] for example in islice(data, 6_000))
    assert drawn[b"wikipedia"] / 6_000 == pytest.approx(0.23, abs=0.0163)  # 3 deviations


def test_probabilities_are_proportions(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(text_of("a", 10))
    path = str(tmp_path / "a.txt")
    settings = mixed(("one", path, 1), ("three", path, 3))
    with opened(settings) as data:
        drawn = Counter(example.place.source for example in islice(data, 4_000))
    assert drawn[1] / 4_000 == pytest.approx(0.75, abs=0.021)


def test_a_source_that_ends_is_left_out_with_a_line(tmp_path: Path) -> None:
    events: list[SourceEvent] = []
    with opened(two(tmp_path, 100, 1_000, passes=1), events) as data:
        names = [example.content.split()[0] for example in data]
    assert Counter(names) == {b"wikipedia": 100, b"oscar": 1_000}
    assert [event.source for event in events if isinstance(event, SourceEnded)] == [
        "wikipedia",
        "oscar",
    ]
    changes = [event.probabilities for event in events if isinstance(event, Renormalised)]
    assert changes == [(("oscar", 1.0),)]
    assert "The mixture is now: oscar 1." in sentences(events)


@pytest.mark.slow
def test_a_source_that_breaks_is_left_out_and_comes_back(tmp_path: Path, site: Site) -> None:
    (tmp_path / "b.txt").write_bytes(text_of("oscar", 1_000))
    settings = mixed(("wikipedia", f"{site.url}/a", 0.5), ("oscar", str(tmp_path / "b.txt"), 0.5))
    site.answers["/a"] = status(404)
    events: list[SourceEvent] = []
    clock = VirtualClock()
    with opened(settings, events, clock=clock) as data:
        names = {example.content.split()[0] for example in islice(data, 500)}
        assert names == {b"oscar"}
        assert Renormalised((("oscar", 1.0),)) in events
        asked = len(site.asked)
        site.answers["/a"] = serving(text_of("wikipedia", 500))
        clock.time += 299
        next(data)
        assert len(site.asked) == asked, "it is left alone while it rests"
        clock.time += 2
        drawn = Counter(example.content.split()[0] for example in islice(data, 4_000))
    assert drawn[b"wikipedia"] / 4_000 == pytest.approx(0.5, abs=0.04)
    assert SourceIsBack("wikipedia") in events
    assert Renormalised((("wikipedia", 0.5), ("oscar", 0.5))) in events


@pytest.mark.slow
def test_while_a_source_waits_its_buffer_is_given_and_the_mixture_stays(
    tmp_path: Path, site: Site
) -> None:
    content = text_of("wikipedia", 8_000)
    site.once["/a"] = [serving(content, up_to=70_000)]
    site.answers["/a"] = status(503)
    (tmp_path / "b.txt").write_bytes(text_of("oscar", 1_000))
    settings = mixed(
        ("wikipedia", f"{site.url}/a", 0.5),
        ("oscar", str(tmp_path / "b.txt"), 0.5),
        shuffle_examples=700,
    )
    events: list[SourceEvent] = []
    clock = VirtualClock()
    with opened(settings, events, clock=clock) as data:
        while "was interrupted" not in sentences(events):
            next(data)
        drawn = Counter(example.content.split()[0] for example in islice(data, 1_000))
        assert drawn[b"wikipedia"] == pytest.approx(500, abs=60)
        assert clock.time == 0.0
        assert not any(isinstance(event, Renormalised) for event in events)
        # with its buffer empty, the other is drawn meanwhile, without a wait and without a line
        assert {example.content.split()[0] for example in islice(data, 4_000)} > {b"oscar"}
        assert clock.time == 0.0


def test_when_nothing_gives_and_something_is_broken_it_says_so(site: Site) -> None:
    settings = mixed(("a", f"{site.url}/a", 1), ("b", f"{site.url}/b", 1))
    with opened(settings) as data, pytest.raises(NoDataLeft, match="a, b cannot be read"):
        next(data)


def test_shards_that_fail_in_an_outage_are_tried_again_after_the_rest(site: Site) -> None:
    settings = mixed(("a", f"{site.url}/{{1..5}}", 1), passes=1)
    events: list[SourceEvent] = []
    clock = VirtualClock()
    with opened(settings, events, clock=clock) as data:
        with pytest.raises(NoDataLeft):
            next(data)
        for number in range(1, 6):
            site.answers[f"/{number}"] = serving(text_of(str(number), 10))
        clock.time += 301
        assert len(list(data)) == 50


def test_shards_that_stay_broken_do_not_keep_the_others_from_being_read(site: Site) -> None:
    settings = mixed(("a", f"{site.url}/{{1..9}}", 1), passes=1)
    site.answers["/9"] = serving(text_of("9", 10))
    events: list[SourceEvent] = []
    clock = VirtualClock()
    found = 0
    with opened(settings, events, clock=clock) as data:
        for _ in range(20):
            try:
                for _ in data:
                    found += 1
                break
            except NoDataLeft:
                clock.time += 3_601
    assert found == 10
    assert {event.shard for event in events if isinstance(event, ShardSkipped)} == {
        f"{site.url}/{number}" for number in range(1, 9)
    }


def test_a_source_without_a_single_example_rests_and_never_spins(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\n\n\n")
    events: list[SourceEvent] = []
    settings = mixed(("a", str(tmp_path / "a.txt"), 1))
    with opened(settings, events) as data, pytest.raises(NoDataLeft):
        next(data)
    assert [event.reason for event in events if isinstance(event, SourceRests)] == [
        "a whole pass gave not a single example."
    ]
