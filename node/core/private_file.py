"""Small files of this user that are replaced whole: read within a limit, never half written.

A replacement is written beside the file and renamed over it. So a reader gets the old or the new
one, also after `kill -9` or with a full disk. The path may lead to anything: a link, a pipe,
another user's file, or a far too long one. All of those are refused with a message.

Between checking a path and opening it, the file could be replaced. So everything is checked on the
opened descriptor, and opening refuses a symbolic link.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
from pathlib import Path

from protocols.errors import PotluckError

FILE_MODE = 0o600
FOLDER_MODE = 0o700
WRITABLE_BY_OTHERS = 0o022
_DRAFT = re.compile(
    r"\..+\.([1-9][0-9]*)\.[0-9a-f]{8}"
)  # as `_draft_of` names them, and key_file.py


class UnusableFile(PotluckError):
    """The file at this place is not one that we could have written."""


def read_private_file(path: Path, limit_bytes: int) -> bytes | None:
    """The content of our own file; None without a file; UnusableFile if it is not ours."""
    # O_NONBLOCK: opening a FIFO must not wait for a writer.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        reason = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
        raise UnusableFile(f"{path} was not read: {reason}.") from None
    with open(descriptor, "rb") as file:
        check_is_ours(path, os.fstat(descriptor))
        try:
            content = file.read(limit_bytes + 1)
        except OSError as error:
            raise UnusableFile(f"{path} cannot be read: {error.strerror}.") from None
    if len(content) > limit_bytes:
        raise UnusableFile(f"{path} was not read: it has more than {limit_bytes:,} bytes.")
    return content


def check_is_ours(path: Path, status: os.stat_result) -> None:
    """UnusableFile unless this is a regular file that only this user can write."""
    if not stat.S_ISREG(status.st_mode):
        raise UnusableFile(f"{path} is not an ordinary file.")
    if status.st_uid != os.geteuid():
        raise UnusableFile(f"{path} belongs to another user.", advice="Move it away.")
    if stat.S_IMODE(status.st_mode) & WRITABLE_BY_OTHERS:
        raise UnusableFile(
            f"Others may write to {path}: its mode is {stat.S_IMODE(status.st_mode):04o}.",
            advice=f"If nobody has, run `chmod 600 {path}`; otherwise remove it.",
        )


def replace_private_file(path: Path, content: bytes) -> None:
    """Put a file with this content at `path`, in place of anything there. May raise OSError."""
    draft = _draft_of(path)
    try:
        _write_whole(draft, content)
        os.replace(draft, path)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()


def check_writable(path: Path, room_bytes: int) -> None:
    """Check that a file of this size could be written at `path` now; OSError if not."""
    draft = _draft_of(path)
    try:
        _write_whole(draft, bytes(room_bytes))
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()


def remove_drafts(folder: Path) -> None:
    """Remove the unfinished files of killed processes."""
    with contextlib.suppress(OSError):
        for one in folder.iterdir():
            draft = _DRAFT.fullmatch(one.name)
            if draft is not None and not _lives(int(draft[1])):
                one.unlink(missing_ok=True)


def _lives(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # of another user
    return True


def _draft_of(path: Path) -> Path:
    path.parent.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    return path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")


def _write_whole(draft: Path, content: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with open(os.open(draft, flags, FILE_MODE), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
