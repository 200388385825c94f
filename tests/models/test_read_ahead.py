"""A thread reads ahead: in order, for one block, and its position is the consumer's."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch

from models.data.batches import WindowBatches
from models.data.clock import MachineClock, ReadingStopped
from models.data.errors import NoDataLeft
from models.data.opening import open_data
from models.data.reading_ahead import reading_ahead
from models.data.settings import DataSettings
from tests.models.openers import one_source
from tests.models.web_server import Site, serving, status, web_server
from tests.waiting import PATIENCE_SECONDS

WAITS_SECONDS = 60  # who left the block without ending its reader would wait for as long


@pytest.fixture
def described(tmp_path: Path) -> DataSettings:
    text = b"\n".join(b"line number %d" % number for number in range(400))
    (tmp_path / "a.txt").write_bytes(text)
    return one_source("text", tmp_path, shuffle_examples=30)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with web_server(tmp_path) as made:
        yield made


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def reading_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "potluck data"]


def test_batches_come_in_the_same_order_as_without(described: DataSettings) -> None:
    with open_data(described, seed=1) as data:
        plain = list(WindowBatches(data, rows=2, window=50))
    with (
        open_data(described, seed=1) as data,
        reading_ahead(WindowBatches(data, rows=2, window=50), 3) as batches,
    ):
        ahead = list(batches)
    assert len(ahead) == len(plain)
    assert all(torch.equal(one, other) for one, other in zip(ahead, plain, strict=True))
    assert not reading_threads()


def test_only_so_many_are_read_ahead_and_the_position_is_of_those_given(
    described: DataSettings,
) -> None:
    with open_data(described, seed=1) as data:
        plain = WindowBatches(data, rows=2, window=50)
        list(islice(plain, 5))
        expected = plain.position()
    with (
        open_data(described, seed=1) as data,
        reading_ahead(WindowBatches(data, rows=2, window=50), 4) as batches,
    ):
        list(islice(batches, 5))
        until(lambda: batches.ready == 4)
        assert batches.position() == expected
        assert batches.ready == 4


def test_leaving_the_block_ends_a_reader_that_waits_for_a_server(site: Site) -> None:
    site.answers["/a"] = site.silent()
    described = one_source("text", f"{site.url}/a", patience_seconds=WAITS_SECONDS)
    with (
        open_data(described, seed=1) as data,
        reading_ahead(WindowBatches(data, rows=2, window=50), 4),
    ):
        until(lambda: bool(site.asked))
        begun = time.monotonic()
    assert time.monotonic() - begun < WAITS_SECONDS / 2
    assert not reading_threads()


def test_leaving_the_block_ends_a_reader_that_waits_for_its_next_attempt(site: Site) -> None:
    site.answers["/a"] = status(503, retry_after=str(WAITS_SECONDS))
    described = one_source("text", f"{site.url}/a")
    with (
        open_data(described, seed=1) as data,
        reading_ahead(WindowBatches(data, rows=2, window=50), 4),
    ):
        until(lambda: bool(site.asked))
        begun = time.monotonic()
    assert time.monotonic() - begun < WAITS_SECONDS / 2
    assert not reading_threads()


class StopsAtTheThird(MachineClock):
    """Stopped by its owner when it is looked at for the third time."""

    looks = 0

    def check(self) -> None:
        self.looks += 1
        if self.looks == 3:
            self.stop()
        super().check()


def test_a_reader_that_passes_over_a_large_shard_and_gives_nothing_is_stopped(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.txt").write_bytes(b"\n" * (2 << 20))
    clock = StopsAtTheThird()
    with (
        open_data(one_source("text", tmp_path), seed=1, clock=clock) as data,
        pytest.raises(ReadingStopped),
    ):
        next(data)
    assert clock.looks == 3


def test_an_error_in_the_block_ends_the_reader_and_goes_on(described: DataSettings) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        open_data(described, seed=1) as data,
        reading_ahead(WindowBatches(data, rows=2, window=50), 4),
    ):
        raise ZeroDivisionError
    assert not reading_threads()


def test_an_error_while_reading_is_raised_in_place_of_the_batch(site: Site) -> None:
    described = one_source("text", f"{site.url}/missing")
    with (
        open_data(described, seed=1) as data,
        reading_ahead(WindowBatches(data, rows=2, window=50), 4) as batches,
    ):
        for _ in range(2):
            with pytest.raises(NoDataLeft):
                next(batches)


@pytest.mark.slow
def test_a_reader_that_was_stopped_goes_on_at_its_position(site: Site) -> None:
    content = b"\n".join(b"line number %d" % number for number in range(9_000))
    head = b'HTTP/1.1 200 OK\r\ncontent-length: %d\r\netag: "a"\r\n\r\n' % len(content)
    site.once["/a"] = [site.silent(head + content[:100_000])]
    site.answers["/a"] = serving(content)
    described = one_source("text", f"{site.url}/a", patience_seconds=60, shuffle_examples=100)
    with (
        open_data(described, seed=1) as data,
        reading_ahead(WindowBatches(data, rows=2, window=50), 4) as batches,
    ):
        before = [bytes(batch.flatten().tolist()) for batch in islice(batches, 600)]
        kept = batches.position()
    with open_data(described, seed=1, position=kept) as data:
        rest = WindowBatches(data, rows=1, window=1)
        after = [bytes(batch.flatten().tolist()) for batch in rest]
    lines = b"".join(before + after).split(b"\0")[:-1]
    assert sorted(lines) == sorted(content.split(b"\n"))


def test_closed_data_says_so(site: Site) -> None:
    site.answers["/a"] = serving(b"a\n" * 100)
    data = open_data(one_source("text", f"{site.url}/a"), seed=1)
    data.close()
    with pytest.raises(ReadingStopped, match="closed"):
        next(data)
