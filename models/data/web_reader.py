"""Reads the bytes of one shard from a web server, and continues after interruptions.

Promises: after an interruption the bytes are from the same file, as the server says (its ETag or
date, and its length), or the shard counts as broken. A server without ranges is asked for all of it
again, and the part already read is skipped. A trickle of bytes is interrupted like silence. Memory
holds one piece.

An answer that ends early looks complete unless its length is compared.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import httpx2

from models.data.errors import Interrupted, ShardBroken
from models.data.web import Version, Web, body_of, check_status

SLOWEST_BYTES_PER_SECOND = 1_024  # an example a second or two: no training can live on less
TRICKLE_PATIENCES = 3  # the speed is measured over this many patiences

CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)\Z", re.ASCII)
WHOLE_OR_PART = frozenset({200, 206, 416})


class WebReader:
    def __init__(self, web: Web, address: str, start: int, largest_bytes: int) -> None:
        self._web = web
        self._address = address
        self._byte = start
        self._largest_bytes = largest_bytes
        self._version = Version()
        self._open = contextlib.ExitStack()
        self._body: Iterator[bytes] | None = None
        self._pace = _Pace(web.patience_seconds * TRICKLE_PATIENCES)

    @property
    def byte(self) -> int:
        return self._byte

    def read(self) -> bytes:
        if self._byte == self._version.total:
            return b""
        try:
            if self._body is None:
                self._body = self._ask()
            data = next(self._body, b"")
        except BaseException:
            self.close()
            raise
        self._byte += len(data)
        if not data:
            self.close()
            total = self._version.total
            if total is not None and self._byte < total:
                raise Interrupted(f"it ends at byte {self._byte:,} of {total:,}")
        elif self._byte > self._largest_bytes:
            self.close()
            raise ShardBroken(_too_large(self._largest_bytes))
        return data

    def close(self) -> None:
        self._body = None
        with contextlib.suppress(Interrupted):  # it is broken, and closed now
            self._open.close()

    def _ask(self) -> Iterator[bytes]:
        headers = {}
        if self._byte:
            headers["range"] = f"bytes={self._byte}-"
        response = self._open.enter_context(self._web.opened(self._address, headers))
        check_status(response, WHOLE_OR_PART)
        encoding = response.headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("", "identity", "gzip", "x-gzip"):  # gzip is seen by its first bytes
            raise ShardBroken(f"its server packs it as {encoding[:40]!r}.")
        first, total = _extent(response, self._byte)
        self._version.check(response, total, self._byte)
        if total is not None and total > self._largest_bytes:
            raise ShardBroken(_too_large(self._largest_bytes))
        if response.status_code == 416:
            return iter(())
        return _without(self._paced(body_of(response)), self._byte - first)

    def _paced(self, body: Iterator[bytes]) -> Iterator[bytes]:
        clock = self._web.clock
        while True:
            begun = clock.now()
            data = next(body, b"")
            if not data:
                return
            self._pace.saw(len(data), clock.now() - begun)
            yield data


class _Pace:
    """Interrupted if too few bytes came in some time. Counts only time spent waiting."""

    def __init__(self, period_seconds: float) -> None:
        self._period_seconds = period_seconds
        self._seconds = 0.0
        self._bytes = 0

    def saw(self, count: int, seconds: float) -> None:
        self._seconds += seconds
        self._bytes += count
        if self._seconds < self._period_seconds:
            return
        rate = self._bytes / self._seconds
        self._seconds, self._bytes = 0.0, 0
        if rate < SLOWEST_BYTES_PER_SECOND:
            raise Interrupted(f"its server sends {rate:.0f} bytes a second")


def _extent(response: httpx2.Response, wanted: int) -> tuple[int, int | None]:
    """Where the body begins in the file, and how long the file is."""
    if response.status_code == 416:
        unsatisfied = response.headers.get("content-range", "")
        total = unsatisfied.removeprefix("bytes */")
        if total.isascii() and total.isdigit() and int(total[:18]) == wanted:
            return wanted, wanted
        raise ShardBroken(f"its server has nothing from byte {wanted:,} on.")
    if response.status_code == 200:
        length = response.headers.get("content-length", "")
        return 0, int(length[:18]) if length.isascii() and length.isdigit() else None
    match = CONTENT_RANGE.match(response.headers.get("content-range", ""))
    if match is None or int(match[1]) != wanted:
        raise ShardBroken(f"its server sends something else than what is from byte {wanted:,} on.")
    return wanted, None if match[3] == "*" else int(match[3])


def _without(body: Iterator[bytes], passed_over: int) -> Iterator[bytes]:
    for data in body:
        if passed_over >= len(data):
            passed_over -= len(data)
        else:
            yield data[passed_over:] if passed_over else data
            passed_over = 0


def _too_large(limit: int) -> str:
    return f"it has more than the {limit:,} bytes of `largest_shard_bytes`."
