"""Data sets of Hugging Face, where that library is installed (it is not in the development extra).

They are read from a folder that looks like one of theirs, so that nobody is asked.
"""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest

from models.data.errors import DataSettingsError, NoDataLeft
from models.data.events import SourceEvent
from models.data.settings import DataSettings, SourceSettings
from tests.models.openers import contents, opened, sentences


@pytest.fixture
def described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataSettings:
    pytest.importorskip("datasets", reason="datasets is not installed: the extra `datasets`")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
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


def test_a_data_set_is_streamed_shard_by_shard(described: DataSettings) -> None:
    with opened(described) as data:
        assert contents(data) == EXPECTED
    orders = []
    for peer in ("alice", "bob"):
        with opened(described, peer=peer) as data:
            orders.append([example.place.shard for example in data])
    assert orders[0] != orders[1]


def test_reading_goes_on_at_a_position(described: DataSettings) -> None:
    with opened(described) as data:
        before = [example.content for example in islice(data, 50)]
        kept = data.position()
    with opened(described, position=kept) as data:
        assert sorted(before + [example.content for example in data]) == EXPECTED


@pytest.mark.usefixtures("described")
def test_a_field_that_is_not_there_is_named() -> None:
    other = SourceSettings("datasets", dataset="owner/name", field="title")
    heard: list[SourceEvent] = []
    with opened(DataSettings((other,)), heard) as data, pytest.raises(NoDataLeft):
        next(data)
    assert "no field 'title', but: text, label" in sentences(heard)


@pytest.mark.usefixtures("described")
def test_a_data_set_that_is_not_there_is_a_settings_error() -> None:
    missing = SourceSettings("datasets", dataset="owner/missing")
    with pytest.raises(DataSettingsError, match="'owner/missing' cannot be opened"):
        opened(DataSettings((missing,)))


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataSettingsError, match=r"potluck\[datasets\]"):
        opened(DataSettings((SourceSettings("datasets", dataset="owner/name"),)))
