"""One node per home and per key: a second start is refused, and told which process was first.

The lock is a kernel lock (flock) on `run/node.lock`, held as long as the node lives. It is released
with the process, however that ends. So after `kill -9` the next start works at once; the remaining
file means nothing. The key file is locked as well: the same key in two homes is the same node
twice, and its peers would see two machines with one name.

If a lock file is removed at the end, two processes can each hold a lock: one on the removed file,
one on a new file of the same name. So a process that gets the lock checks that the name still leads
to the locked file, and tries again if not.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from auth.file_lock import try_lock
from node.core.places import Places
from protocols.errors import PotluckError, Refused

RUN_FOLDER_MODE = 0o700
LONGEST_PID = 20  # characters
LOOK_SECONDS = 0.02  # between two looks at a lock that is about to be free


class AlreadyRunning(Refused):
    """Another node runs with this home or this key."""


@contextlib.contextmanager
def hold_running_lock(places: Places, key_file: Path) -> Iterator[None]:
    """Hold the locks of this home and this key. AlreadyRunning if another process has one."""
    make_private_folder(places.run_folder)
    with (
        hold_lock(places.lock_file, lambda pid: _already_running(places.lock_file, pid)),
        _lock_key(key_file),
    ):
        yield


def holder_of(lock_file: Path) -> os.stat_result | None:
    """Stands for the node that has this lock now, or is the last one that had it."""
    with contextlib.suppress(FileNotFoundError):
        return lock_file.lstat()
    return None


def has_let_go(lock_file: Path, holder: os.stat_result | None, seconds: float) -> bool:
    """Whether this holder lets go of the lock within this time. Until then no node can start."""
    until = time.monotonic() + seconds
    while holder is not None:
        try:
            descriptor = os.open(lock_file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return True
        try:
            now = os.fstat(descriptor)  # the number of a removed file may be that of the next one
            is_same = os.path.samestat(now, holder) and now.st_mtime_ns == holder.st_mtime_ns
            if not is_same or try_lock(descriptor):  # one that was killed has left an unlocked file
                return True
        finally:
            os.close(descriptor)
        if time.monotonic() >= until:
            return False
        time.sleep(LOOK_SECONDS)
    return True


def make_private_folder(folder: Path) -> None:
    """Make the folder, or check that it is ours and that no other user can read or write it."""
    folder.mkdir(mode=RUN_FOLDER_MODE, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise PotluckError(
            f"{folder} is not a folder of this user's own.",
            why="Another user could put files there in the node's name.",
            advice="Remove it, or choose another place with POTLUCK_HOME.",
        )
    if stat.S_IMODE(status.st_mode) & 0o022:
        raise PotluckError(
            f"Others may write to {folder}: its mode is {stat.S_IMODE(status.st_mode):04o}.",
            why="They could have put a socket there that answers in the node's name.",
            advice=f"If all its files are yours, run `chmod 700 {folder}`.",
        )
    if stat.S_IMODE(status.st_mode) & ~RUN_FOLDER_MODE:
        folder.chmod(RUN_FOLDER_MODE)


@contextlib.contextmanager
def hold_lock(path: Path, refusal: Callable[[str], AlreadyRunning]) -> Iterator[None]:
    """Hold a lock file with our pid in it. `refusal` makes the error from the holder's text."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if not try_lock(descriptor):
                holder = os.read(descriptor, LONGEST_PID)
                raise refusal(holder.decode("ascii", "replace").strip())
            if not _leads_to(path, descriptor):
                continue
            os.ftruncate(descriptor, 0)
            os.write(descriptor, str(os.getpid()).encode())
            try:
                yield
            finally:
                # It was removed while locked: see the module's docstring.
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
            return
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def _lock_key(key_file: Path) -> Iterator[None]:
    descriptor = os.open(key_file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if not try_lock(descriptor):
            raise AlreadyRunning(
                f"Another node already runs with the key {key_file}.",
                why="It has another home, so its pid is not known here.",
                advice="Stop that node, or give this one a key of its own (--key-file).",
            )
        yield
    finally:
        os.close(descriptor)


def _leads_to(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _already_running(path: Path, pid: str) -> AlreadyRunning:
    who = f"with pid {pid}" if pid.isdigit() else "and is just starting"
    stop = f"`kill {pid}` stops it" if pid.isdigit() else "look at it in a moment"
    return AlreadyRunning(
        f"A node already runs in this home, {who}.",
        why=f"It holds {path}.",
        advice=f"`potluck status` shows it; {stop}. A second node needs a home of its own "
        "(POTLUCK_HOME or --home).",
    )
