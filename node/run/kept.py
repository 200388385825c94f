"""The files of runs that this machine keeps between two starts: their size, and how to remove some.

    known = remembered(places, "poem", organiser)
    remember(places, signed)
    kept_bytes(places)                            # of all that a volunteer's home keeps
    remove_fetched_in_part(places, but=folder)    # the bytes that were freed

The newest definition of each run is remembered. A peer starts with it when it can reach nobody,
and rejects an older one.

The key, pass, credit records, definitions and position in the data are small and exist nowhere
else, so they stay. A partly fetched state may take gigabytes, and the run's peers have a newer one.
So it is removed when this home does not train in that run any more.

These folders may contain anything by now. Only files with our own names are removed, and no link is
followed. Two organisers may have runs of the same name, so the file's name has both.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from node.core.private_file import UnusableFile, read_private_file, replace_private_file
from protocols.errors import PotluckError

if TYPE_CHECKING:
    from node.core.places import Places
    from node.run.definition import RunDefinition
    from node.run.signed import SignedDefinition


STATE_FILE = "state-being-fetched"  # as state_download.py names it, which imports torch
_ENDING = ".fetching"


def fetching_folder(places: Places, run: str, organiser: str) -> Path:
    """The folder for a state of this run while it is fetched."""
    return places.runs_folder / f"{run}-{organiser}{_ENDING}"


def experts_folder(places: Places, organiser: str, definition: RunDefinition) -> Path:
    """The folder for the experts that this machine serves, and for copies of others'. They exist
    nowhere else, or hardly anywhere, so they stay. Those of a definition with other experts are
    of no use for this one."""
    kind = definition.kind_of_experts
    return places.runs_folder / f"{definition.name}-{organiser}-{kind}.experts"


def kept_bytes(places: Places) -> int:
    """The size of a volunteer's files in this home, without unknown files in its folders."""
    single = (
        places.pass_file,
        places.revocations_file,
        places.peers_file,
        places.dht_file,
        places.traffic_file,
    )
    folders = (places.credit_folder, places.runs_folder)
    return _bytes_of([*single, *(file for folder in folders for file in _files_below(folder))])


def fetched_in_part_bytes(places: Places) -> int:
    """The size of states that were being fetched when their node ended."""
    return _bytes_of(_fetched_in_part(places))


def remove_fetched_in_part(places: Places, *, but: Path) -> int:
    """Remove those of all runs except the one with this folder; returns the bytes freed. Blocks.
    A file that cannot be removed stays and does no harm."""
    freed = 0
    for file in [one for one in _fetched_in_part(places) if one.parent != but]:
        size = _bytes_of([file])
        with contextlib.suppress(OSError):
            file.unlink()
            freed += size
            file.parent.rmdir()
    return freed


def _fetched_in_part(places: Places) -> Iterator[Path]:
    for folder in sorted(places.runs_folder.glob(f"*{_ENDING}")):
        file = folder / STATE_FILE
        if not folder.is_symlink() and not file.is_symlink() and file.is_file():
            yield file


def _files_below(folder: Path) -> Iterator[Path]:
    for place, _folders, names in os.walk(folder):
        yield from (Path(place) / name for name in names)


def _bytes_of(files: Iterable[Path]) -> int:
    found = 0
    for file in files:
        with contextlib.suppress(OSError):
            status = file.lstat()
            found += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return found


def remembered(places: Places, run: str, organiser: str) -> SignedDefinition | None:
    """None if there is none, or if it has become unreadable: then it is fetched anew."""
    from node.run.signed import LIMIT_BYTES, read_signed

    with contextlib.suppress(UnusableFile):
        data = read_private_file(_file(places, run, organiser), LIMIT_BYTES)
        if data is not None:
            with contextlib.suppress(PotluckError):
                return read_signed(data, run=run, organiser=organiser)
    return None


def remember(places: Places, signed: SignedDefinition) -> None:
    """Replace the remembered definition; OSError from the system."""
    name = signed.definition.name
    before = remembered(places, name, signed.organiser)
    if before is None or before.signed_ms < signed.signed_ms:
        replace_private_file(_file(places, name, signed.organiser), signed.data)


def _file(places: Places, run: str, organiser: str) -> Path:
    return places.runs_folder / f"{run}-{organiser}.signed"
