"""A file on a web server that can be read anywhere, by ranges, as Parquet needs.

Promises: all ranges come from one unchanged file, also when it is opened again with the same
Version; otherwise it counts as broken. An answer with another range than the one asked for is never
used.

A server without ranges answers with the whole file from its beginning.
"""

from __future__ import annotations

import io

from models.data.errors import Interrupted, ShardBroken
from models.data.web import Version, Web, body_of, check_status
from models.data.web_reader import CONTENT_RANGE

PART = frozenset({206, 200})
LARGEST_RANGE_BYTES = 2 << 30  # the largest row group; read at once, into memory


class RangeFile(io.RawIOBase):
    """A seekable raw stream, which knows its size from the first answer."""

    def __init__(self, web: Web, address: str, largest_bytes: int, version: Version) -> None:
        super().__init__()
        self._web = web
        self._address = address
        self._largest_bytes = largest_bytes
        self._byte = 0
        self._version = version
        self._size = self._first_size()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._byte

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._byte, io.SEEK_END: self._size}[whence]
        self._byte = max(0, base + offset)
        return self._byte

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        count = min(len(view), self._size - self._byte)
        if count <= 0:
            return 0
        if count > LARGEST_RANGE_BYTES:
            raise ShardBroken(f"{count:,} bytes of it would have to be read at once.")
        view[:count] = self._range(self._byte, count)
        self._byte += count
        return count

    def _first_size(self) -> int:
        with self._web.opened(self._address, {"range": "bytes=0-0"}) as response:
            check_status(response, PART)
            match = CONTENT_RANGE.match(response.headers.get("content-range", ""))
            if response.status_code != 206 or match is None or match[3] == "*":
                raise ShardBroken(
                    "its server does not serve ranges, which Parquet needs: put it on one that "
                    "does, or on the disk."
                )
            size = int(match[3])
            self._version.check(response, size, self._byte)
        if size > self._largest_bytes:
            raise ShardBroken(f"it has more than {self._largest_bytes:,} bytes.")
        return size

    def _range(self, first: int, count: int) -> bytes:
        last = first + count - 1
        data = bytearray()
        with self._web.opened(self._address, {"range": f"bytes={first}-{last}"}) as response:
            check_status(response, PART)
            match = CONTENT_RANGE.match(response.headers.get("content-range", ""))
            if match is None or (int(match[1]), int(match[2])) != (first, last):
                raise ShardBroken("its server does not send the range that it was asked for.")
            self._version.check(response, None if match[3] == "*" else int(match[3]), first)
            for part in body_of(response):
                data += part
                if len(data) > count:
                    raise ShardBroken("its server sends more than the range it was asked for.")
        if len(data) < count:
            raise Interrupted(f"a range ended {count - len(data):,} bytes early")
        return bytes(data)
