"""Run work that would block the event loop in a worker thread.

    digest = await in_thread(hash_everything, state)

In a simulation the work runs inline, and takes no virtual time. A virtual clock advances when no
task is runnable, and it does not see a working thread, so it would jump past every deadline. It
also could not give the same run for the same seed. A simulation therefore calls `do_at_once()` when
it begins.

Cancellation does not stop a thread. The wait ends when the work ends, so keep the work short, or
let it check for a sign to stop.
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
    """Return what the function returns, or raise what it raises. Always a checkpoint."""
    if _AT_ONCE.get():
        await trio.lowlevel.checkpoint()
        return function(*arguments)
    return await trio.to_thread.run_sync(function, *arguments)


def do_at_once() -> None:
    """Use no threads for the rest of this trio run."""
    _AT_ONCE.set(True)


def is_done_at_once() -> bool:
    """Whether this is a simulation, for work that has a thread of its own otherwise."""
    return _AT_ONCE.get()
