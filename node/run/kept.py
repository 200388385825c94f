"""What runs leave on this machine's disk between two starts: how much it is, and what may go.

    kept_bytes(places)                            # of all that a volunteer's home keeps
    remove_fetched_in_part(places, but=folder)    # bytes that are free again

Key, pass, records of credit, definitions and how far data has been read are small, and nobody else
has them: they stay. A state that was fetched in part may be gigabytes; every run's own peers have a
newer one, so that of a run in which this home does not train any more is removed.

Easy to get wrong: what lies in these folders may be anything by now. Only what is ours by its name
is removed, and no link is followed.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from node.run.remembered import runs_folder

if TYPE_CHECKING:
    from node.places import Places

STATE_FILE = "state-being-fetched"  # as state_kept.py calls it, which needs torch to be asked
_ENDING = ".fetching"


def fetching_folder(places: Places, run: str, organiser: str) -> Path:
    """Where a state of this run is kept while it is fetched."""
    return runs_folder(places) / f"{run}-{organiser}{_ENDING}"


def kept_bytes(places: Places) -> int:
    """Of a volunteer's files in this home, whatever else lies in the folder."""
    single = (
        places.pass_file,
        places.revocations_file,
        places.peers_file,
        places.dht_file,
        places.traffic_file,
    )
    folders = (places.credit_folder, runs_folder(places))
    return _bytes_of([*single, *(file for folder in folders for file in _files_below(folder))])


def fetched_in_part_bytes(places: Places) -> int:
    """Of states that were being fetched when their node ended."""
    return _bytes_of(_fetched_in_part(places))


def remove_fetched_in_part(places: Places, *, but: Path) -> int:
    """Of all runs but the one with this folder; how many bytes are free again. Blocks. What cannot
    be removed stays: it is in nobody's way."""
    freed = 0
    for file in [one for one in _fetched_in_part(places) if one.parent != but]:
        size = _bytes_of([file])
        with contextlib.suppress(OSError):
            file.unlink()
            freed += size
            file.parent.rmdir()
    return freed


def _fetched_in_part(places: Places) -> Iterator[Path]:
    for folder in sorted(runs_folder(places).glob(f"*{_ENDING}")):
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
