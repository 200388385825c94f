"""The data settings of a run's file, and the errors for mistakes."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from models.data.errors import DataSettingsError
from models.data.opening import open_data
from models.data.settings import (
    DataSettings,
    SourceSettings,
    data_settings,
    refuse_this_machine,
    source_names,
)
from models.data.shard_list import shard_names

TABLE = """
[data]
shuffle_examples = 5_000
passes = 2

[[data.source]]
kind = "jsonl"
paths = ["https://data.example.org/wikipedia-{000..099}.jsonl.gz"]
field = "text"
probability = 0.23

[[data.source]]
kind = "text"
paths = ["shards/oscar-*.txt.gz"]
probability = 0.77
"""


def test_a_table_of_a_file_becomes_settings() -> None:
    settings = data_settings(tomllib.loads(TABLE)["data"])
    assert settings.shuffle_examples == 5_000
    assert [source.probability for source in settings.source] == [0.23, 0.77]
    assert source_names(settings) == ("jsonl", "text")


def test_without_settings_the_data_is_the_standard_library() -> None:
    assert data_settings({}).source == (SourceSettings("standard-library"),)
    assert DataSettings().shuffle_examples == 10_000


TEXT = {"kind": "text", "paths": ["a.txt"]}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "misspelt": ({"shufle_examples": 1}, "Did you mean shuffle_examples"),
    "misspelt in a source": (
        {"source": [TEXT, {**TEXT, "probabilty": 1}]},
        "number 2 has no key 'probabilty'. Did you mean probability",
    ),
    "unknown": ({"source": [{**TEXT, "zzz": 1}]}, "There are: "),
    "unknown kind": ({"source": [{"kind": "csv"}]}, "csv"),
    "no kind": ({"source": [{"paths": ["a"]}]}, "kind"),
    "wrong type": ({"passes": "2"}, "passes"),
    "negative probability": ({"source": [{**TEXT, "probability": -1}]}, "probability"),
    "no number": ({"source": [{**TEXT, "probability": float("nan")}]}, "probability"),
    "no sources": ({"source": []}, "no source"),
    "sources that are none": ({"source": 3}, "source"),
    "too many sources": ({"source": [TEXT] * 65}, "64"),
    "no paths": ({"source": [{"kind": "text"}]}, "no `paths`"),
    "paths for nothing": ({"source": [{"kind": "standard-library", "paths": ["a"]}]}, "no use"),
    "another protocol": ({"source": [{**TEXT, "paths": ["ftp://a/b"]}]}, "no http"),
    "an address of nowhere": ({"source": [{**TEXT, "paths": ["http:///a"]}]}, "no http"),
    "an address that is none": ({"source": [{**TEXT, "paths": ["http://[::1"]}]}, "no http"),
    "an odd path": ({"source": [{**TEXT, "paths": ["a\0b"]}]}, "no path"),
    "no data set": ({"source": [{"kind": "datasets"}]}, "dataset"),
    "an odd data set": ({"source": [{"kind": "datasets", "dataset": "../x"}]}, "no name like"),
    "labels of text": ({"source": [{**TEXT, "label_field": "x"}]}, "no labels"),
    "the same field twice": (
        {"source": [{"kind": "jsonl", "paths": ["a"], "label_field": "text"}]},
        "two names",
    ),
    "tiny pieces": ({"piece_bytes": 3}, "piece_bytes"),
    "huge buffer": ({"shuffle_examples": 10**9}, "shuffle_examples"),
}


@pytest.mark.parametrize(("table", "words"), WRONG.values(), ids=WRONG.keys())
def test_a_mistake_is_named(table: dict[str, Any], words: str) -> None:
    with pytest.raises(DataSettingsError) as refused:
        data_settings(table)
    assert words in str(refused.value)
    assert refused.value.exit_code == 2


MADE_WRONG: dict[str, dict[str, Any]] = {
    "no buffer": {"shuffle_examples": 0},
    "a negative buffer": {"shuffle_examples": -5},
    "no patience": {"patience_seconds": float("nan")},
    "a negative probability": {
        "source": (SourceSettings("standard-library", probability=-1.0),) * 2
    },
    "a kind that there is not": {"source": (SourceSettings("csv"),)},  # type: ignore[arg-type]
    "one path that is no list": {"source": (SourceSettings("text", "a.txt"),)},  # type: ignore[arg-type]
    "buffers that no position holds": {
        "source": (SourceSettings("standard-library"),) * 3,
        "shuffle_examples": 500_000,
    },
    "documents that no position holds": {"piece_bytes": 0, "largest_document_bytes": 1 << 30},
}


@pytest.mark.parametrize("made", MADE_WRONG.values(), ids=MADE_WRONG.keys())
def test_settings_made_in_python_are_checked_like_those_of_a_file(made: dict[str, Any]) -> None:
    with pytest.raises(DataSettingsError):
        open_data(DataSettings(**made), seed=1)


def test_no_two_sources_are_called_alike() -> None:
    names = [SourceSettings("text", ("a",), name=name) for name in ("text (3)", "", "")]
    assert len(set(source_names(DataSettings(tuple(names))))) == 3


FROM_AFAR = {
    "a file": "/etc/passwd",
    "a file of the user": "~/.ssh/id_ed25519",
    "a folder": ".",
    "this machine": "http://localhost/a.txt",
    "this machine by number": "http://127.0.0.1:8080/a.txt",
    "the router": "http://192.168.0.1/a.txt",
    "the cloud's secrets": "http://169.254.169.254/latest/meta-data",
    "its number in six": "http://[::1]/a.txt",
    "its number, short": "http://127.1/a.txt",
    "its number in one": "http://2130706433/a.txt",
    "its number in base 16": "http://0x7f.1/a.txt",
    "its number in four within six": "http://[::ffff:127.0.0.1]/a.txt",
    "its number translated": "http://[64:ff9b::7f00:1]/a.txt",
    "with a dot behind": "http://10.0.0.1./a.txt",
}


@pytest.mark.parametrize("path", FROM_AFAR.values(), ids=FROM_AFAR.keys())
def test_settings_from_the_network_may_not_name_this_machine(path: str) -> None:
    settings = DataSettings((SourceSettings("text", (path,)),))
    with pytest.raises(DataSettingsError, match="somebody else"):
        refuse_this_machine(settings)


@pytest.mark.parametrize("name", ["json", "documents/private"])
def test_data_sets_from_the_network_may_not_be_folders_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "documents/private").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    refuse_this_machine(DataSettings((SourceSettings("datasets", dataset="owner/name"),)))
    with pytest.raises(DataSettingsError, match="this machine's disk"):
        refuse_this_machine(DataSettings((SourceSettings("datasets", dataset=name),)))


def test_settings_from_the_network_may_name_the_internet_and_the_library() -> None:
    web = SourceSettings("text", ("https://data.example.org/a.txt", "http://93.184.215.14/b"))
    refuse_this_machine(DataSettings((web, SourceSettings("standard-library"))))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "deep").mkdir()
    for name in ("b.txt", "a.txt.gz", "deep/c.TXT", "notes.md", "d.jsonl"):
        (tmp_path / name).write_bytes(b"x")
    return tmp_path


def names(folder: Path, *paths: str) -> list[str]:
    found = shard_names(paths, "text", folder)
    return [Path(name).relative_to(folder).as_posix() for name in found]


def test_a_folder_means_what_is_of_its_kind_in_it(folder: Path) -> None:
    assert names(folder, ".") == ["a.txt.gz", "b.txt", "deep/c.TXT"]
    assert names(folder, str(folder)) == names(folder, ".")


def test_patterns_and_files_are_taken_at_their_word(folder: Path) -> None:
    assert names(folder, "*.md", "b.txt") == ["b.txt", "notes.md"]
    assert names(folder, "**/*.TXT") == ["deep/c.TXT"]


def test_a_shard_that_is_named_twice_counts_once(folder: Path) -> None:
    assert names(folder, ".", "*.txt", "b.txt") == names(folder, ".")


def test_counted_braces_are_addresses_in_a_row() -> None:
    found = shard_names(("https://x.org/{1..2}/a-{08..10}.txt",), "text", Path("/"))
    assert found == tuple(f"https://x.org/{one}/a-{two}.txt" for one in "12"
                          for two in ("08", "09", "10"))  # fmt: skip


@pytest.mark.parametrize("path", ["no-such.txt", "*.nothing", "deep/*.md"])
def test_a_path_that_names_nothing_is_an_error(folder: Path, path: str) -> None:
    with pytest.raises(DataSettingsError, match="names no shard"):
        shard_names((path,), "text", folder)


@pytest.mark.parametrize("path", ["https://x/{5..1}", "https://x/{0..999999999}",
                                  "https://x/{0..9}{0..9}{0..9}{0..9}"])  # fmt: skip
def test_braces_that_cannot_be_counted_are_an_error(path: str) -> None:
    with pytest.raises(DataSettingsError, match="cannot be counted"):
        shard_names((path,), "text", Path("/"))


@pytest.mark.slow
def test_more_shards_than_fit_into_memory_are_an_error() -> None:
    with pytest.raises(DataSettingsError, match="more than 100,000"):
        shard_names(("https://x/{0..99999}", "https://y/{0..9}"), "text", Path("/"))


def test_shards_with_names_that_take_gigabytes_are_an_error() -> None:
    with pytest.raises(DataSettingsError, match="more than 32 MiB"):
        shard_names(("https://x/" + 4000 * "a" + "{0..99999}",), "text", Path("/"))


@pytest.mark.slow
def test_the_same_shards_named_again_and_again_take_no_longer() -> None:
    with pytest.raises(DataSettingsError, match="more than 100,000"):
        shard_names(("https://x/{0..99998}",) * 2_000, "text", Path("/"))
