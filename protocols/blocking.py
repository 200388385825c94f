"""Work that would hold the event loop: in a worker thread, and in a simulation at once.

    digest = await in_thread(hash_everything, state)

A virtual clock passes when no task has anything to do, and it does not see a thread at work: it
would jump past every deadline. So a simulation says `do_at_once()` when it begins, and from then on
such work takes no time at all, which is also what the same seed needs for the same run.

Easy to get wrong: cancelling does not end a thread. The wait ends when the work does, so keep it
short, or let it look for a sign to stop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, TypeVarTuple, Unpack

import trio

Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")

_AT_ONCE: trio.lowlevel.RunVar[bool] = trio.lowlevel.RunVar("blocking work at once", default=False)


async def in_thread(
    function: Callable[[Unpack[Arguments]], Result], *arguments: *Arguments
) -> Result:
    """What the function returns, or raises. It is always a checkpoint."""
    if _AT_ONCE.get():
        await trio.lowlevel.checkpoint()
        return function(*arguments)
    return await trio.to_thread.run_sync(function, *arguments)


def do_at_once() -> None:
    """For the rest of this trio run, threads are not used."""
    _AT_ONCE.set(True)
