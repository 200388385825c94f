"""Waiting for what another process will do, where nothing can tell us that it did."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import trio

# For a wait of a fraction of a second, or a few: a busy machine may need twenty times as long. A
# process that needs more than this hangs. It is no test's bar, and a test that passes never waits
# for it.
PATIENCE_SECONDS: Final = 120.0

_LOOK_AGAIN_SECONDS: Final = 0.01


async def until(
    condition: Callable[[], bool] | Callable[[], Awaitable[bool]], within_seconds: float
) -> None:
    """Return when the condition holds; trio.TooSlowError when it does not hold in time."""
    with trio.fail_after(within_seconds):
        while True:
            answer = condition()
            if answer if isinstance(answer, bool) else await answer:
                return
            await trio.sleep(_LOOK_AGAIN_SECONDS)
