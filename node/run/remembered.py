"""The newest definition of each run that this machine has seen, kept on disk.

    known = remembered(places, "poem", organiser)
    remember(places, signed)

It is what a peer begins with when nobody can be asked just now, and what keeps an older definition,
which somebody gives out again, from being believed.

Easy to get wrong: two organisers may have runs of the same name. The file's name has both.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from node.private_file import UnusableFile, read_private_file, replace_private_file
from protocols.errors import PotluckError

if TYPE_CHECKING:
    from node.places import Places
    from node.run.signed import SignedDefinition


def runs_folder(places: Places) -> Path:
    return places.data_folder / "runs"


def remembered(places: Places, run: str, organiser: str) -> SignedDefinition | None:
    """None if none was seen, and for what has become unreadable: then it is fetched anew."""
    from node.run.signed import LIMIT_BYTES, read_signed

    with contextlib.suppress(UnusableFile):
        data = read_private_file(_file(places, run, organiser), LIMIT_BYTES)
        if data is not None:
            with contextlib.suppress(PotluckError):
                return read_signed(data, run=run, organiser=organiser)
    return None


def remember(places: Places, signed: SignedDefinition) -> None:
    """Keep it in the place of an older one; OSError as the system says it."""
    name = signed.definition.name
    before = remembered(places, name, signed.organiser)
    if before is None or before.signed_ms < signed.signed_ms:
        replace_private_file(_file(places, name, signed.organiser), signed.data)


def _file(places: Places, run: str, organiser: str) -> Path:
    return runs_folder(places) / f"{run}-{organiser}.signed"
