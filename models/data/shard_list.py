"""Finds the shards of a source's paths: files, folders, patterns, addresses, counted braces.

Promises: the same paths give the same shards in the same order, sorted, each once. A path without
any shard is an error now, and not a source that silently gives nothing.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator
from pathlib import Path

from models.data.errors import DataSettingsError
from models.data.settings import Kind, is_address

MOST_SHARDS = 100_000  # names of 100 bytes and their order are 20 MB; more are better packed
MOST_NAMED_BYTES = 32 << 20
MOST_BRACES = 3

COUNTED = re.compile(r"\{(\d{1,9})\.\.(\d{1,9})\}")
ENDINGS = {
    "text": (".txt", ".txt.gz", ".text", ".text.gz"),
    "jsonl": (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz", ".json.gz"),
    "parquet": (".parquet",),
}


def shard_names(paths: tuple[str, ...], kind: Kind, folder: Path) -> tuple[str, ...]:
    """The shards of these paths; those on the disk are looked up beneath `folder`."""
    found: dict[str, None] = {}
    named = size = 0  # also those named before: a path that is repeated often takes time, too
    for written in paths:
        before = len(found)
        for path in _counted(written):
            for name in [path] if is_address(path) else _on_disk(path, kind, folder):
                found[name] = None
                named += 1
                size += len(name)
                if named > MOST_SHARDS or size > MOST_NAMED_BYTES:
                    raise DataSettingsError(
                        f"{written[:200]!r} names more than {MOST_SHARDS:,} shards, or names with "
                        f"more than {MOST_NAMED_BYTES >> 20} MiB.",
                        advice="Pack the documents into fewer files.",
                    )
        if len(found) == before and written not in found:
            _check_named_before(written, kind, folder)
    return tuple(sorted(found))


def _check_named_before(written: str, kind: Kind, folder: Path) -> None:
    """Raises unless everything that this path names was named by another one before."""
    first = next(_counted(written), written)
    if is_address(first) or next(_on_disk(first, kind, folder), None) is not None:
        return
    raise DataSettingsError(
        f"{written[:200]!r} names no shard.",
        why=f"There is no such file, or no {kind} in that folder ({', '.join(ENDINGS[kind])}).",
        advice=f"Paths are looked up from {folder}.",
    )


def _counted(path: str, depth: int = 0) -> Iterator[str]:
    """`a-{08..10}` is a-08, a-09, a-10."""
    match = COUNTED.search(path)
    if match is None:
        yield path
        return
    first, last = int(match[1]), int(match[2])
    if last < first or last - first >= MOST_SHARDS or depth == MOST_BRACES:
        raise DataSettingsError(
            f"The braces in {path[:200]!r} cannot be counted.",
            why=f"They go upwards, over at most {MOST_SHARDS:,} shards, {MOST_BRACES} times.",
        )
    for number in range(first, last + 1):
        text = str(number).zfill(len(match[1]))
        yield from _counted(path[: match.start()] + text + path[match.end() :], depth + 1)


def _on_disk(path: str, kind: Kind, folder: Path) -> Iterator[str]:
    """The files that a path on the disk names, as absolute paths."""
    whole = os.path.normpath(os.path.join(folder, os.path.expanduser(path)))
    if os.path.isdir(whole):
        endings = ENDINGS[kind]
        for where, folders, files in os.walk(whole):
            folders.sort()
            yield from (
                os.path.join(where, file) for file in files if file.lower().endswith(endings)
            )
    elif os.path.exists(whole):
        yield whole
    else:
        found = glob.iglob(whole, recursive=True)
        yield from (file for file in found if not os.path.isdir(file))
