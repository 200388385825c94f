"""Going on from a position: nothing is lost, nothing comes twice, whenever it was taken."""

from __future__ import annotations

import gzip
import json
import random
import resource
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from models.data.errors import PositionError
from models.data.events import ExamplesLost, SourceEvent, StartedOver
from models.data.examples import ExamplePlace
from models.data.opening import Data
from models.data.position import (
    Position,
    owed_places,
    position_from_json,
    read_position,
    write_position,
)
from models.data.settings import DataSettings, SourceSettings
from tests.models.openers import one_source, opened, sentences


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six shards of unequal size, two of them packed, with documents of several pieces."""
    folder = tmp_path_factory.mktemp("shards")
    chance = random.Random(4)
    for number in range(6):
        lines = []
        for line in range(chance.randrange(5, 60)):
            words = b" ".join(b"%d-%d-%d" % (number, line, word) for word in range(20))
            lines.append(words[: chance.randrange(8, len(words))])
        text = b"\n\n".join(lines)
        if number % 3 == 0:
            (folder / f"{number}.txt.gz").write_bytes(gzip.compress(text))
        else:
            (folder / f"{number}.txt").write_bytes(text)
    (folder / "other.jsonl").write_text(
        "".join(json.dumps({"text": f"other {line}"}) + "\n" for line in range(100))
    )
    return folder


def of_two(folder: Path, passes: int, buffer: int) -> DataSettings:
    return DataSettings(
        source=(
            SourceSettings("text", (str(folder),), 0.7),
            SourceSettings("jsonl", (str(folder / "other.jsonl"),), 0.3),
        ),
        passes=passes,
        shuffle_examples=buffer,
        piece_bytes=40,
    )


def given_with_interruptions(described: DataSettings, lengths: list[int]) -> list[ExamplePlace]:
    """The places of all examples, where reading is interrupted after so many each time."""
    places: list[ExamplePlace] = []
    kept: Position | None = None
    for length in [*lengths, None]:
        with opened(described, position=kept) as data:
            places += [example.place for example in islice(data, length)]
            kept = position_from_json(data.position().to_json())
    return places


@pytest.mark.slow
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(st.integers(0, 300), max_size=6),
    st.sampled_from([1, 7, 100, 10_000]),
    st.integers(1, 3),
)
def test_each_example_of_each_pass_comes_once_whenever_it_is_interrupted(
    shards: Path, lengths: list[int], buffer: int, passes: int
) -> None:
    described = of_two(shards, passes, buffer)
    with opened(described) as data:
        whole = Counter(example.place for example in data)
    assert max(whole.values()) == 1
    # an example that is read again may be marked by another byte; it is the same one
    again = Counter(given_with_interruptions(described, lengths))
    assert again == whole


def test_the_same_position_goes_on_in_the_same_order(shards: Path) -> None:
    described = of_two(shards, 2, 50)
    with opened(described) as data:
        for _ in islice(data, 123):
            pass
        kept = data.position()
    orders = []
    for _ in range(2):
        with opened(described, position=kept) as data:
            orders.append([example.place for example in data])
    assert orders[0] == orders[1]


def test_taking_a_position_changes_nothing(shards: Path) -> None:
    described = of_two(shards, 1, 50)
    with opened(described) as data:
        undisturbed = [example.place for example in data]

    def watched(data: Data) -> list[ExamplePlace]:
        return [example.place for example in data if data.position() is not None]

    with opened(described) as data:
        assert watched(data) == undisturbed


def test_another_peer_or_seed_has_another_order_of_the_same_examples(shards: Path) -> None:
    orders = []
    for seed, peer in ((1, "alice"), (1, "bob"), (2, "alice")):
        with opened(of_two(shards, 1, 50), seed=seed, peer=peer) as data:
            orders.append([example.place for example in data])
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(orders[2])
    assert orders[0][:20] != orders[1][:20] != orders[2][:20] != orders[0][:20]


def test_reading_goes_on_at_a_byte_and_not_at_the_beginning(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"".join(b"line %d\n" % number for number in range(1_000)))
    described = one_source("text", path, shuffle_examples=10)
    with opened(described) as data:
        before = [example.place.document for example in islice(data, 600)]
        kept = data.position()
    assert kept.sources[0].head.byte > 4_000
    # what was read is gone: only the end is needed any more
    content = path.read_bytes()
    first = min(owed.byte for owed in kept.sources[0].owed)
    path.write_bytes(b"?" * first + content[first:])
    with opened(described, position=kept) as data:
        after = [example.place.document for example in data]
    assert sorted(before + after) == list(range(1_000))


@pytest.mark.slow
def test_a_position_of_a_full_buffer_is_small(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"".join(b"%d\n" % number for number in range(20_000)))
    with opened(one_source("text", path)) as data:
        for _ in islice(data, 8_000):
            pass
        assert len(data.position().to_json()) < 7 * 10_000


def test_a_position_of_other_shards_starts_over_and_says_so(shards: Path) -> None:
    with opened(of_two(shards, 1, 50)) as data:
        for _ in islice(data, 50):
            pass
        kept = data.position()
    events: list[SourceEvent] = []
    other = one_source("text", shards / "1.txt", name="text")
    with opened(other, events, position=kept) as data:
        assert len(list(data)) > 1
    assert isinstance(events[0], StartedOver)
    assert "text starts over: its shards, or how they are cut" in sentences(events)


def test_examples_that_are_gone_when_they_are_read_again_are_counted(tmp_path: Path) -> None:
    for name in "abcd":
        (tmp_path / f"{name}.txt").write_bytes(
            b"".join(b"%s %d\n" % (name.encode(), number) for number in range(50))
        )
    described = one_source("text", tmp_path, shuffle_examples=200)
    events: list[SourceEvent] = []
    with opened(described) as data:
        before = [example.content for example in islice(data, 40)]
        kept = data.position()
    first = kept.sources[0].owed[0].shard
    (tmp_path / f"{'abcd'[first]}.txt").write_bytes(b"")
    with opened(described, events, position=kept) as data:
        after = [example.content for example in data]
    lost = sum(event.examples for event in events if isinstance(event, ExamplesLost))
    assert lost > 0
    assert len(before) + len(after) + lost == 200
    assert not set(before) & set(after)


def test_a_position_is_written_whole_and_read_back(tmp_path: Path, shards: Path) -> None:
    with opened(of_two(shards, 1, 50)) as data:
        for _ in islice(data, 99):
            pass
        kept = data.position()
    path = tmp_path / "data-position.json"
    write_position(kept, path)
    write_position(kept, path)
    assert read_position(path) == kept
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


BAD = {
    "empty": b"",
    "cut short": b'{"sources": [',
    "no object": b"[]",
    "unknown key": b'{"sources": [], "what": 1}',
    "negative": b'{"sources": [], "drawn": -1}',
    "another format": b'{"sources": [], "format": 9}',
    "no base64": b'{"sources": [], "remainder": "?"}',
    "deep": b'{"sources": ' + b"[" * 100_000,
}


@pytest.mark.parametrize("data", BAD.values(), ids=BAD.keys())
def test_a_file_that_is_no_position_is_refused_by_name(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "position").write_bytes(data)
    with pytest.raises(PositionError, match="cannot be read"):
        read_position(tmp_path / "position")


def test_a_position_that_names_shards_that_there_are_not_starts_over(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\n")
    described = one_source("text", tmp_path / "a.txt")
    with opened(described) as data:
        next(data)
        kept = data.position().to_json()
    for bad in (b'"nth":7', b'"nth":2000000000'):
        events: list[SourceEvent] = []
        lie = position_from_json(kept.replace(b'"nth":0', bad))
        with opened(described, events, position=lie) as data:
            assert len(list(data)) == 2
        assert isinstance(events[0], StartedOver)


def test_owed_places_come_back_as_they_were() -> None:
    places = {ExamplePlace(0, passing, shard, document, piece, document * 9)
              for passing in (0, 1) for shard in (2, 5) for document in (3, 4, 90)
              for piece in (0, 1)}  # fmt: skip
    from models.data.examples import Example

    owed = owed_places(Example(b"", None, place) for place in places)
    back = {(one.passing, one.shard, *place) for one in owed for place in one.places()}
    assert back == {place[1:5] for place in places}
    assert all(one.byte == one.document * 9 for one in owed)


def test_a_disk_that_is_full_leaves_the_position_of_before_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "position"
    write_position(Position([], 7), path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            write_position(Position([], 8), path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert read_position(path).drawn == 7
    assert list(tmp_path.iterdir()) == [path]
