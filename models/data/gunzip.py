"""Unpacks gzip as it arrives, in bounded memory, and says where it breaks.

Promises: no call returns more than `LARGEST_OUTPUT_BYTES`. Several members in a row are one text,
as `cat a.gz b.gz` makes them, and zeros after the last are padding. A shard that would unpack to
far more than its size (a decompression bomb) is given up early.

zlib does not report gzip that was cut off as an error; it waits for more. Only `end` can tell.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from models.data.errors import ShardBroken

MAGIC = b"\x1f\x8b"
LARGEST_OUTPUT_BYTES = 1 << 20  # at once; a chunk of 256 KiB of text is about as much
MOST_EXPANSION = 200  # text packs 3 to 10 times, logs 50; zlib's utmost is 1032
UNSUSPECTED_BYTES = 16 << 20  # may expand to any size: small files of one repeated line exist


class Gunzip:
    """Takes packed bytes, gives unpacked ones."""

    def __init__(self) -> None:
        self._member: zlib._Decompress | None = None
        self._taken = 0
        self._given = 0
        self._in_padding = False

    @property
    def given(self) -> int:
        """How many unpacked bytes there were so far."""
        return self._given

    def feed(self, data: bytes) -> Iterator[bytes]:
        while data:
            if self._member is None:
                data = self._begin_member(data)
                continue
            before = len(data)
            try:
                output = self._member.decompress(data, LARGEST_OUTPUT_BYTES)
            except zlib.error as error:
                raise ShardBroken(
                    f"it is damaged gzip between byte {self._taken:,} and byte "
                    f"{self._taken + before:,} ({error})."
                ) from None
            ended = self._member.eof
            data = self._member.unused_data if ended else self._member.unconsumed_tail
            self._taken += before - len(data)
            self._given += len(output)
            if ended:
                self._member = None
            self._check_expansion()
            if output:
                yield output

    def end(self) -> None:
        """ShardBroken if there should be more."""
        if self._member is not None:
            raise ShardBroken(
                f"its gzip is truncated: the file ends at byte {self._taken:,}, in the middle of "
                f"the data, after {self._given:,} unpacked bytes."
            )

    def _begin_member(self, data: bytes) -> bytes:
        if self._taken and (self._in_padding or data[0] == 0):
            self._in_padding = True
            if data.strip(b"\0"):
                raise ShardBroken(f"there is no gzip behind byte {self._taken:,}.")
            self._taken += len(data)
            return b""
        self._member = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
        return data

    def _check_expansion(self) -> None:
        if self._given > max(UNSUSPECTED_BYTES, MOST_EXPANSION * self._taken):
            raise ShardBroken(
                f"it unpacks to more than {MOST_EXPANSION} times its size (byte {self._taken:,} "
                f"gave {self._given:,}): that is no text, but a decompression bomb."
            )
