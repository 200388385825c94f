"""The built-in data set: the source code of this machine's own Python standard library.

Real text, some ten megabytes of it, that is on every machine: nothing to download, no licence
question. A document is one file.

Files are assigned to the shards by a hash of their path in the library. So machines with the same
Python have the same shards, and those with another one have nearly the same. Tests are left out:
they are half of the library, and repetitive.

An installation may have no source code at all (an embedded Python has a zip of compiled modules).
That is an error that says so, and not an empty data set.
"""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from models.data.errors import DataError
from models.data.examples import Document, Mark, OnRetry, Reading, SkippedDocument

SHARDS = 64  # of some ten files each: enough to be in another order for everybody
FEWEST_FILES = 20  # with fewer it is only a remainder of a standard library
MOST_FILES = 20_000  # Python 3.13 has 1,700 with its tests
LARGEST_FILE_BYTES = 8 << 20  # the largest of 3.13 has 0.7 MB

LEFT_OUT = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "node_modules"}
)

Opener = Callable[[str], bytes]


class StandardLibraryShards:
    """The library's files, dealt into `SHARDS` shards. Reading is by path, from folder or zip."""

    def __init__(self, places: tuple[Path, ...] | None = None) -> None:
        files, self._open = _source_code(_likely_places() if places is None else places)
        self._shards: list[list[str]] = [[] for _ in range(SHARDS)]
        for file in files:
            self._shards[_shard_of(file)].append(file)

    @property
    def names(self) -> tuple[str, ...]:
        # another version has other files, so positions of one are invalid in the other
        version = sys.version.split()[0]
        return tuple(f"shard {number} of Python {version}" for number in range(1, SHARDS + 1))

    def read(self, shard: int, start: Mark, on_retry: OnRetry) -> Reading:  # noqa: ARG002
        for number, file in enumerate(self._shards[shard]):
            if number < start.document:
                continue
            try:
                content = self._open(file)
            except (OSError, zipfile.BadZipFile, NotImplementedError) as error:
                yield SkippedDocument(Mark(number), f"{file} cannot be read ({error})")
                continue
            if content.strip():
                yield Document(content, None, Mark(number))


def _likely_places() -> tuple[Path, ...]:
    """Where the library may be: its folder, or the zip of an embedded Python."""
    version = f"python{sys.version_info.major}{sys.version_info.minor}.zip"
    places = [Path(sysconfig.get_path("stdlib")), Path(os.__file__ or ".").parent]
    places += [Path(entry) for entry in sys.path if entry.endswith(version)]
    return tuple(dict.fromkeys(places))


def _source_code(places: tuple[Path, ...]) -> tuple[list[str], Opener]:
    for place in places:
        if place.is_dir():
            files, opener = _folder(place)
        elif place.is_file():
            files, opener = _zip(place)
        else:
            continue
        if len(files) >= FEWEST_FILES:
            return files, opener
    looked = ", ".join(str(place) for place in places)
    raise DataError(
        "The source code of Python's standard library is not on this machine.",
        why=f"This Python has compiled modules only, or is incomplete; looked in: {looked}.",
        advice="Use a Python from python.org or the system's packages, or name other data "
        "in the settings ([[data.source]]).",
    )


def _folder(place: Path) -> tuple[list[str], Opener]:
    def read(file: str) -> bytes:
        with open(place / file, "rb") as stream:
            return stream.read(LARGEST_FILE_BYTES)

    found: list[str] = []
    for where, folders, files in os.walk(place):
        folders[:] = sorted(name for name in folders if name not in LEFT_OUT)
        for file in files:
            path = Path(where, file)
            if file.endswith(".py") and path.is_file():
                found.append(path.relative_to(place).as_posix())
    return sorted(found)[:MOST_FILES], read


def _zip(place: Path) -> tuple[list[str], Opener]:
    def read(file: str) -> bytes:
        with zipfile.ZipFile(place) as archive, archive.open(file) as stream:
            return stream.read(LARGEST_FILE_BYTES)

    try:
        with zipfile.ZipFile(place) as archive:
            return sorted(_of_the_library(archive.namelist()))[:MOST_FILES], read
    except (OSError, zipfile.BadZipFile):
        return [], read


def _of_the_library(names: list[str]) -> Iterator[str]:
    for name in names:
        if name.endswith(".py") and LEFT_OUT.isdisjoint(PurePosixPath(name).parts):
            yield name


def _shard_of(file: str) -> int:
    digest = hashlib.blake2b(file.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "big") % SHARDS
