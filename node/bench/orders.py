"""What a process of the bench is told on standard input, and what it answers on standard output.

An order is one JSON object a line: `{"do": "unary", …}` calls the coroutine `unary` of whoever
obeys; what it returns, or `{"error": …}`, is printed as one line. The process ends when its stdin
does.

Easy to get wrong: reading stdin in a thread cannot be cancelled, so a process that fails would
hang until somebody closed its stdin. A pipe can be waited for like a socket instead.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

import trio

from protocols.errors import PotluckError


class Obedient(Protocol):
    """Somebody who takes orders: each public coroutine is one."""

    def introduction(self) -> dict[str, Any]:
        """What it prints before it is asked anything."""


async def obey_with_nursery(make: Callable[[trio.Nursery], Obedient]) -> None:
    """The whole of such a process, where whoever obeys needs a nursery; only errors are logged."""
    logging.getLogger().setLevel(logging.ERROR)
    async with trio.open_nursery() as nursery:
        await obey(make(nursery))
        nursery.cancel_scope.cancel()


async def obey(obedient: Obedient) -> None:
    """Do what stdin says, line by line, until it ends; also in the middle of doing something."""
    lines_in, lines = trio.open_memory_channel[str](0)
    async with trio.open_nursery() as nursery:

        async def read() -> None:
            async for line in lines_of_stdin():
                await lines_in.send(line)
            nursery.cancel_scope.cancel()

        nursery.start_soon(read)
        _answer(obedient.introduction())
        async for line in lines:
            order = json.loads(line)
            command: Callable[..., Awaitable[Any]] = getattr(obedient, order.pop("do"))
            try:
                _answer(await command(**order))
            except* PotluckError as errors:  # some commands have nurseries of their own
                _answer({"error": "; ".join(str(error) for error in errors.exceptions)})


def _answer(value: object) -> None:
    print(json.dumps(value), flush=True)


async def lines_of_stdin() -> AsyncIterator[str]:
    """Each line without its end, until the other end of the pipe is closed, or is broken.

    A socket is broken when whoever asks is gone without having read the last answer.
    """
    held = b""
    async with trio.lowlevel.FdStream(os.dup(sys.stdin.fileno())) as stdin:
        with contextlib.suppress(trio.BrokenResourceError):
            async for data in stdin:
                *lines, held = (held + data).split(b"\n")
                for line in lines:
                    yield line.decode()
