"""Reads the bytes of one file on the disk, from any byte on, piece by piece.

Only plain files: opening a pipe would wait forever, and a device has no end.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO, Protocol

from models.data.errors import Interrupted, ShardBroken

CHUNK_BYTES = 256 * 1024


class ByteReader(Protocol):
    """The bytes of one shard in order."""

    @property
    def byte(self) -> int:
        """How many bytes of the shard come before the next one read."""
        ...

    def read(self) -> bytes:
        """Some bytes, or none at the end. Interrupted: ask again later. ShardBroken: do not."""
        ...

    def close(self) -> None: ...


class DiskReader:
    def __init__(self, path: Path, start: int) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._byte = start

    @property
    def byte(self) -> int:
        return self._byte

    def read(self) -> bytes:
        try:
            if self._file is None:
                self._file = open_plain_file(self._path)
                self._file.seek(self._byte)
            data = self._file.read(CHUNK_BYTES)
        except OSError as error:  # a network disk that is gone for a moment, for example
            self.close()
            raise Interrupted(error.strerror or str(error)) from None
        self._byte += len(data)
        return data

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def open_plain_file(path: Path) -> BinaryIO:
    """ShardBroken if there is none that may be read."""
    # without O_NONBLOCK, opening a named pipe waits until somebody writes to it
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        number = os.open(path, flags)
    except (FileNotFoundError, NotADirectoryError, PermissionError, IsADirectoryError) as error:
        raise ShardBroken(f"it cannot be opened ({error.strerror}).") from None
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise ShardBroken("it is no plain file.")
    return os.fdopen(number, "rb")
