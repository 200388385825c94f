"""A real pseudo-terminal, with the strict one (emulator.py) behind it."""

from __future__ import annotations

import codecs
import fcntl
import os
import re
import select
import struct
import termios

from node.app.screen.terminal import LOCAL_FLAGS
from tests.screen.emulator import Emulator
from tests.waiting import PATIENCE_SECONDS, until

INCOMPLETE = re.compile(r"(\x1b(\[[?0-9;]*)?|\r+)?\Z")
"""The beginning of a sequence, of which the rest comes later."""


class Pseudo:
    """Both ends of one: ours is `descriptor`; `emulator` shows the output."""

    def __init__(self, columns: int = 80, rows: int = 24) -> None:
        self.outside, self.descriptor = os.openpty()
        self.emulator = Emulator(columns, rows)
        self.written = self._pending = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self.set_size(columns, rows)

    def set_size(self, columns: int, rows: int) -> None:
        size = struct.pack("HHHH", rows, columns, 0, 0)
        fcntl.ioctl(self.descriptor, termios.TIOCSWINSZ, size)

    def resize(self, columns: int, rows: int) -> None:
        self.read()
        self.emulator.resize(columns, rows)
        self.set_size(columns, rows)

    def read(self) -> list[str]:
        """The lines on the screen when everything written has arrived."""
        got = b""
        while select.select([self.outside], [], [], 0)[0]:
            got += os.read(self.outside, 65536)
        self._pending += self._decoder.decode(got)
        whole = len(self._pending) - len(INCOMPLETE.search(self._pending)[0])  # type: ignore[index]
        text, self._pending = self._pending[:whole], self._pending[whole:]
        self.written += text
        self.emulator.write(text.replace("\r\r\n", "\r\n"))  # the line discipline adds its own
        return self.emulator.lines()

    async def until(self, words: str) -> list[str]:
        await until(lambda: words in "\n".join(self.read()), PATIENCE_SECONDS)
        return self.emulator.lines()

    def echoes(self) -> bool:
        return bool(termios.tcgetattr(self.descriptor)[LOCAL_FLAGS] & termios.ECHO)

    def type(self, keys: bytes) -> None:
        os.write(self.outside, keys)
