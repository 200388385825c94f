"""A stream as py-libp2p's host, identify, ping and relay use it: its IMuxedStream.

Everything is in channel.py; this adds the library's names (`read`, `write`, `close`, ...) and
errors.

`read` raises at the end, where the channel's `receive_some` returns b"". `close` is a half-close
here, where `aclose` closes both directions.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

import trio
from libp2p.abc import IMuxedStream
from libp2p.stream_muxer.exceptions import (
    MuxedStreamClosed,
    MuxedStreamEOF,
    MuxedStreamReset,
)

from node.net.transport.channel import YamuxChannel

if TYPE_CHECKING:
    from node.net.transport.connection import YamuxConnection


class YamuxStream(YamuxChannel, IMuxedStream):  # type: ignore[misc]  # the library is untyped here
    """YamuxConnection makes these; nothing else should."""

    def __init__(self, stream_id: int, connection: YamuxConnection, is_initiator: bool) -> None:
        super().__init__(stream_id, connection, is_initiator)
        self._write_lock = trio.Lock()

    async def read(self, n: int | None = None) -> bytes:
        """Some bytes, at most `n`; MuxedStreamEOF at the end, MuxedStreamReset after a reset."""
        if n == 0:
            return b""
        try:
            data = await self.receive_joined(None if n is None or n < 0 else n)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise MuxedStreamReset(str(error)) from error
        if not data:
            raise MuxedStreamEOF("The other side will send nothing more.")
        return data

    async def write(self, data: bytes) -> None:
        try:
            async with self._write_lock:
                await self.send_all(data)
        except trio.BrokenResourceError as error:
            raise MuxedStreamReset(str(error)) from error
        except trio.ClosedResourceError as error:
            raise MuxedStreamClosed(str(error)) from error

    async def close(self) -> None:
        """Half-close, as in the library: nothing more is sent, reading goes on.

        The library may never use the stream again, so the connection resets it if the peer does not
        close its half in time.
        """
        if self._ending is None and not self._send_finished:
            self._finish_sending()
            self._connection.await_peer_close(self)
        await trio.lowlevel.checkpoint()

    async def close_write(self) -> None:
        if self._ending is None:
            self._finish_sending()
        await trio.lowlevel.checkpoint()

    async def close_read(self) -> None:
        """Stop receiving; bytes that the peer still sends within its window are dropped."""
        self._stop_receiving()
        await trio.lowlevel.checkpoint()

    async def reset(self) -> None:
        self.reset_now()
        await trio.lowlevel.checkpoint()

    def is_closed(self) -> bool:
        return self._ending is not None or self._is_done

    def set_deadline(self, ttl: int) -> None:
        raise NotImplementedError("Yamux knows no deadlines; use trio.fail_after around the call.")

    def get_remote_address(self) -> tuple[str, int] | None:
        return self._connection.get_remote_address()

    async def __aenter__(self) -> YamuxStream:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        await self.close()
