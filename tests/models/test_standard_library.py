"""The built-in data: real Python source, dealt into the same shards on every machine."""

from __future__ import annotations

import zipfile
from itertools import islice
from pathlib import Path

import pytest

from models.data.errors import DataError
from models.data.examples import Document, Mark
from models.data.opening import open_data
from models.data.standard_library import SHARDS, StandardLibraryShards


def quiet(*retry: object) -> None:
    raise AssertionError(f"a disk is not asked twice: {retry}")


def read(shards: StandardLibraryShards) -> list[list[bytes]]:
    return [
        [item.content for item in shards.read(shard, Mark(), quiet) if isinstance(item, Document)]
        for shard in range(len(shards.names))
    ]


def a_library(folder: Path, files: int = 30) -> Path:
    library = folder / "python"
    for name in ("test", "json/tests", "site-packages/x", "json"):
        (library / name).mkdir(parents=True, exist_ok=True)
        (library / name / "one.py").write_text("left out\n" if name != "json" else "kept\n")
    for number in range(files):
        (library / f"module{number}.py").write_text(f"number = {number}\n")
    (library / "compiled.pyc").write_bytes(b"x")
    return library


def test_it_is_here_and_gives_text_at_once() -> None:
    with open_data(seed=1, peer="alice") as data:
        found = b"".join(example.content for example in islice(data, 200))
    assert b"def " in found
    assert len(found) > 100_000
    found.decode("latin-1")


def test_tests_and_installed_packages_are_left_out(tmp_path: Path) -> None:
    found = {content for shard in read(StandardLibraryShards((a_library(tmp_path),)))
             for content in shard}  # fmt: skip
    assert found == {b"kept\n"} | {b"number = %d\n" % number for number in range(30)}


def test_the_split_is_the_same_on_every_machine_and_from_a_zip(tmp_path: Path) -> None:
    library = a_library(tmp_path)
    packed = tmp_path / "python311.zip"
    with zipfile.ZipFile(packed, "w") as archive:
        for path in library.rglob("*.py"):
            archive.write(path, path.relative_to(library).as_posix())
    from_folder = read(StandardLibraryShards((library,)))
    assert len(from_folder) == SHARDS
    assert read(StandardLibraryShards((packed,))) == from_folder
    # a file more changes only the shard that it is in
    (library / "another.py").write_text("more\n")
    more = read(StandardLibraryShards((library,)))
    assert sum(one != other for one, other in zip(from_folder, more, strict=True)) == 1


def test_reading_can_begin_in_the_middle_of_a_shard(tmp_path: Path) -> None:
    shards = StandardLibraryShards((a_library(tmp_path, 300),))
    sizes = [len(contents) for contents in read(shards)]
    largest = sizes.index(max(sizes))
    whole = list(shards.read(largest, Mark(), quiet))
    assert len(whole) > 2
    assert list(shards.read(largest, Mark(2), quiet)) == whole[2:]


def test_a_python_without_source_code_is_named(tmp_path: Path) -> None:
    empty, damaged = tmp_path / "empty", tmp_path / "python311.zip"
    empty.mkdir()
    damaged.write_bytes(b"no zip")
    with pytest.raises(DataError, match=r"not on this machine.*compiled modules only.*data"):
        StandardLibraryShards((empty, damaged, tmp_path / "nowhere"))


def test_an_incomplete_library_is_none(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not on this machine"):
        StandardLibraryShards((a_library(tmp_path, files=3),))
