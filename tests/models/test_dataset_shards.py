"""Data sets of Hugging Face, read by their own library.

They are read from a folder that looks like one of theirs, so that nobody is asked.
"""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import httpx2
import pytest

from models.data.errors import DataSettingsError, NoDataLeft, SourceAway
from models.data.events import Retrying, SourceEvent
from models.data.settings import DataSettings, SourceSettings
from tests.models.openers import contents, opened, sentences


@pytest.fixture
def described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataSettings:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "owner" / "name"
    folder.mkdir(parents=True)
    for shard in range(4):
        lines = [json.dumps({"text": f"{shard} {line}", "label": line}) for line in range(30)]
        (folder / f"train-{shard}.jsonl").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    source = SourceSettings("datasets", dataset="owner/name", label_field="label")
    return DataSettings((source,), passes=1, shuffle_examples=5)


EXPECTED = sorted(b"%d %d" % (shard, line) for shard in range(4) for line in range(30))


@pytest.mark.slow
def test_a_data_set_is_streamed_shard_by_shard(described: DataSettings) -> None:
    with opened(described) as data:
        assert contents(data) == EXPECTED
    orders = []
    for peer in ("alice", "bob"):
        with opened(described, peer=peer) as data:
            orders.append([example.place.shard for example in data])
    assert orders[0] != orders[1]


@pytest.mark.slow
def test_reading_goes_on_at_a_position(described: DataSettings) -> None:
    with opened(described) as data:
        before = [example.content for example in islice(data, 50)]
        kept = data.position()
    with opened(described, position=kept) as data:
        assert sorted(before + [example.content for example in data]) == EXPECTED


@pytest.mark.slow
@pytest.mark.usefixtures("described")
def test_a_field_that_is_not_there_is_named() -> None:
    other = SourceSettings("datasets", dataset="owner/name", field="title")
    heard: list[SourceEvent] = []
    with opened(DataSettings((other,)), heard) as data, pytest.raises(NoDataLeft):
        next(data)
    assert "no field 'title', but: text, label" in sentences(heard)


def answered(status: int) -> httpx2.HTTPStatusError:
    request = httpx2.Request("GET", "https://hub.example")
    return httpx2.HTTPStatusError("", request=request, response=httpx2.Response(status))


@pytest.mark.usefixtures("described")
def test_a_data_set_that_is_not_here_while_the_library_is_offline_is_away() -> None:
    missing = SourceSettings("datasets", dataset="owner/missing")
    with pytest.raises(SourceAway, match="'owner/missing' cannot be reached"):
        opened(DataSettings((missing,)))


@pytest.mark.parametrize(
    ("error", "is_away"),
    [
        (ConnectionError("Couldn't reach the Hub"), True),
        (httpx2.ConnectTimeout(""), True),
        (answered(503), True),
        (answered(429), True),
        (answered(404), False),
        (FileNotFoundError("no such data set"), False),
    ],
    ids=["no connection", "timeout", "503", "429", "404", "missing"],
)
def test_a_data_set_that_is_away_for_now_is_no_wrong_setting(
    error: Exception, is_away: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that had trained for hours ended for good when it opened its data again."""

    def load_dataset(*_: object, **__: object) -> None:
        raise error

    library = types.ModuleType("datasets")
    library.__dict__.update(load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", library)
    kind = SourceAway if is_away else DataSettingsError
    with pytest.raises(kind, match="'owner/name' cannot be"):
        opened(DataSettings((SourceSettings("datasets", dataset="owner/name"),)))


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataSettingsError, match="pip install 'datasets'"):
        opened(DataSettings((SourceSettings("datasets", dataset="owner/name"),)))


class Interrupting:
    """What `datasets` gives, whose connection breaks once, with an error that is no OSError."""

    num_shards, features = 1, None
    broken = False

    def shard(self, num_shards: int, index: int) -> Interrupting:
        assert (num_shards, index) == (1, 0)
        return self

    def skip(self, count: int) -> Iterator[dict[str, str]]:
        return islice(iter(self), count, None)

    def __iter__(self) -> Iterator[dict[str, str]]:
        for number in range(4):
            if number == 2 and not self.broken:
                self.broken = True
                raise httpx2.ReadTimeout("")
            yield {"text": f"record {number}"}


def test_an_interrupted_connection_loses_and_repeats_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = types.ModuleType("datasets")
    interrupting = Interrupting()
    library.__dict__.update(load_dataset=lambda *_, **__: interrupting, Image=int)
    monkeypatch.setitem(sys.modules, "datasets", library)
    heard: list[SourceEvent] = []
    source = SourceSettings("datasets", dataset="owner/name")
    with opened(DataSettings((source,), passes=1), heard) as data:
        assert contents(data) == [b"record %d" % number for number in range(4)]
    assert [type(event) for event in heard].count(Retrying) == 1
