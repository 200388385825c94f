"""The demo's folder, among the temporary ones: gone with the demo, and with the next one at last.

    with demo_folder(keep=False) as folder: ...

Promises: it is removed when the block ends, unless it is kept; what a demo left that was killed
(SIGKILL, the power) is removed by the next one, by its lock, which nobody holds any more. One that
is kept has no lock, and is never removed.

Easy to get wrong: a demo that is just beginning has a folder and no lock yet, or a lock file that
it does not hold yet. So only folders of some age are looked at.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from node.running_lock import AlreadyRunning, hold_lock

PREFIX: Final = "potluck-demo-"
BEGINNING_SECONDS: Final = 60.0
"""A demo makes its folder and takes its lock within a millisecond; a stopped machine needs more."""


@contextlib.contextmanager
def demo_folder(*, keep: bool) -> Iterator[Path]:
    """A new one, for this user alone."""
    remove_abandoned(Path(tempfile.gettempdir()), time.time())
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    if keep:
        yield folder
        return
    try:
        with hold_lock(_lock_of(folder), _somebody_else):
            yield folder
    finally:
        remove(folder)


def remove(folder: Path) -> None:
    """All of it. Also for a signal's handler."""
    shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned(temporary: Path, now: float) -> None:
    """The folders of demos of this user that were killed."""
    for folder in temporary.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError, AlreadyRunning):
            status = folder.lstat()
            is_ours = status.st_uid == os.geteuid()
            is_old = now - status.st_mtime > BEGINNING_SECONDS
            if is_ours and is_old and not folder.is_symlink() and _lock_of(folder).is_file():
                with hold_lock(_lock_of(folder), _somebody_else):
                    remove(folder)


def _lock_of(folder: Path) -> Path:
    return folder / "demo.lock"


def _somebody_else(_pid: str) -> AlreadyRunning:
    return AlreadyRunning("Another demo has this folder.")
