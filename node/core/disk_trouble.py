"""The meaning of a disk error for a person: the cause, and what to do."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from protocols.errors import PotluckError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_CLOSED = {errno.EACCES, errno.EPERM}
_NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP}
_IN_THE_WAY = {errno.EEXIST, errno.ENOTDIR, errno.EISDIR}


def disk_trouble(error: OSError, folder: Path) -> tuple[str, str]:
    """The cause, and the advice."""
    reason = error.strerror or "an error of the system"
    there = next((at for at in (folder, *folder.parents) if os.path.exists(at)), folder)
    if error.errno in _FULL:
        why = f"There is no room: {reason}."
        return why, f"Free some space on the disk of {folder}, or choose another folder."
    if error.errno == errno.EROFS:
        why = f"The disk is read-only: {reason}."
        return why, f"Make {there} writable, or choose another folder."
    if error.errno in _NO_LOCKS:
        why = f"That file system has no locks, which keep a second node out: {reason}."
        return why, f"Choose a folder on a disk of this machine instead of {folder}."
    if error.errno in _IN_THE_WAY:
        why = f"A file or folder is in the way: {reason}."
        return why, f"Look at {folder}, and move it away; or choose another folder."
    if error.errno in _CLOSED:
        why = f"This user may not write there: {reason}."
        return why, f"Change the permissions of {there}, or choose another folder."
    return f"The system says: {reason}.", f"Check {folder} and its disk."


class HomeUnusable(PotluckError):
    """The home of this node cannot be written to."""


@contextmanager
def kept_in(folder: Path) -> Iterator[None]:
    """Raise HomeUnusable if the block fails to write in this folder of a home."""
    try:
        yield
    except OSError as error:
        why, advice = disk_trouble(error, folder)
        raise HomeUnusable(
            f"This node's home cannot be written to: {folder}.",
            why=why,
            advice=f"{advice} Another home: --home DIRECTORY, or POTLUCK_HOME.",
        ) from None
