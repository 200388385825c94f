"""The node's identity on disk: one Ed25519 seed in one file that only its owner can read.

A key file is created whole or not at all: it is written beside its place and then linked, so a
crash or a full disk leaves no half key. If two processes create the same file at once, both end
with the same key. A file that others could read or replace is refused, because anyone who has the
key can act as this node.

The file is text: a line that names its kind, then the seed in hexadecimal. Between checking a path
and opening it, the file could be replaced. So everything is checked on the opened descriptor
(`fstat`), and opening refuses a symbolic link (O_NOFOLLOW).
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from pathlib import Path

from node.core.disk_trouble import disk_trouble
from protocols.errors import PotluckError
from protocols.identity import Identity

KEY_FILE_MODE = 0o600
KEY_FOLDER_MODE = 0o700
SEED_BYTES = 32
FIRST_LINE = "potluck ed25519 key, keep it secret"
# The real file has 101 bytes; a little more is read, to notice a longer file.
LONGEST_KEY_FILE_BYTES = 256


class KeyFileError(PotluckError):
    """The key file cannot be used as it is. Nothing was changed."""


def load_or_create_identity(path: Path | str) -> Identity:
    """The identity at `path`. If there is no file, make one, and any missing folders."""
    path = Path(path)
    seed = _read(path)
    if seed is None:
        _create(path)
        seed = _read(path)
    if seed is None:
        raise KeyFileError(
            f"The key file {path} vanished while it was being made.",
            why="Another program removed it.",
            advice="Try again.",
        )
    return Identity.from_seed(seed)


def load_identity(path: Path | str) -> Identity | None:
    """The identity at `path`; None if there is no file."""
    seed = _read(Path(path))
    return None if seed is None else Identity.from_seed(seed)


def _read(path: Path) -> bytes | None:
    # O_NONBLOCK: opening a FIFO must not wait for a writer.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise KeyFileError(
                f"The key file {path} is a symbolic link, so it was not used.",
                why="The owner of its folder can point a link at another key.",
                advice="Give the path of the real file.",
            ) from None
        raise _unusable(path, error) from error
    try:
        _check_owner_and_mode(path, os.fstat(descriptor))
        content = os.read(descriptor, LONGEST_KEY_FILE_BYTES)
    finally:
        os.close(descriptor)
    return _parse(path, content)


def _check_owner_and_mode(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise KeyFileError(
            f"The key file {path} is not an ordinary file.",
            why="It is a folder or a device." if stat.S_ISDIR(status.st_mode) else "",
            advice="Name a file; it is made if it does not exist.",
        )
    if status.st_uid != os.geteuid():
        raise KeyFileError(
            f"The key file {path} belongs to another user.",
            why="Its owner could read it and pose as this node, or change it.",
            advice="Run as that user, or name a file of your own.",
        )
    mode = stat.S_IMODE(status.st_mode)
    if mode & ~KEY_FILE_MODE:
        raise KeyFileError(
            f"Others may use the key file {path}: its mode is {mode:04o}.",
            why="Anyone who reads it can pose as this node.",
            advice=f"If nobody has read it, run `chmod 600 {path}`; otherwise delete it, and a "
            "new one is made (the node then has a new peer id).",
        )


def _parse(path: Path, content: bytes) -> bytes:
    try:
        first_line, seed_line, *rest = content.decode("ascii").split("\n")
        seed = bytes.fromhex(seed_line)
    except ValueError:
        first_line, seed, rest = "", b"", []
    if first_line != FIRST_LINE or len(seed) != SEED_BYTES or rest != [""]:
        raise KeyFileError(
            f"The file {path} is not a potluck key.",
            why="It may be something else, or damaged.",
            advice="Name another file, or move this one away, and a new key is made (the node "
            "then has a new peer id).",
        )
    return seed


def _create(path: Path) -> None:
    """Put a new key at `path`. If a file is there already, keep that."""
    seed = Identity.generate().seed
    content = f"{FIRST_LINE}\n{seed.hex()}\n".encode("ascii")
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(mode=KEY_FOLDER_MODE, parents=True, exist_ok=True)
        try:
            _write_whole(draft, content)
            # A hard link fails if the name is taken, where a rename would replace it. So the second
            # of two racing processes uses the key of the first.
            with contextlib.suppress(FileExistsError):
                os.link(draft, path, follow_symlinks=False)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(draft)
        _keep_across_power_loss(path.parent)
    except OSError as error:
        raise _unusable(path, error) from error


def _write_whole(draft: Path, content: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = os.open(draft, flags, KEY_FILE_MODE)
    with open(descriptor, "wb") as file:
        os.fchmod(descriptor, KEY_FILE_MODE)  # whatever the umask has set
        file.write(content)
        file.flush()
        os.fsync(descriptor)


def _keep_across_power_loss(folder: Path) -> None:
    """Sync the folder: the file's name is an entry of it, and is on disk only with it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unusable(path: Path, error: OSError) -> KeyFileError:
    why, advice = disk_trouble(error, path.parent)
    return KeyFileError(
        f"The key file {path} cannot be used, and this command needs a key.",
        why=why,
        advice=f"{advice} Another home: --home DIRECTORY, or POTLUCK_HOME.",
    )
