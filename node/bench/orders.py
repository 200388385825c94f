"""Standard input as lines, for processes that end when it does.

Easy to get wrong: reading stdin in a thread cannot be cancelled, so a process that fails would
hang until somebody closed its stdin. A pipe can be waited for like a socket instead.
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator

import trio


async def lines_of_stdin() -> AsyncIterator[str]:
    """Each line without its end, until the other end of the pipe is closed."""
    held = b""
    async with trio.lowlevel.FdStream(os.dup(sys.stdin.fileno())) as stdin:
        async for data in stdin:
            *lines, held = (held + data).split(b"\n")
            for line in lines:
                yield line.decode()
