"""Bringing an exchange with a provider to its end though whoever waited for it has left.

A provider gives a token once. When a client hangs up while it is on its way, the exchange goes on
for moments, so that the login can be finished by the next who asks. When the server is stopped it
is the same; so the moments must be short.

Easy to get wrong: what the exchange brings must be put where it belongs inside of it. To the one
who has left, nothing can be returned.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import trio

from auth.server.providers.errors import LoginError

# Providers answer in a tenth of a second or two; a stopped server has 1.5 s for everything.
LAST_MOMENTS_SECONDS: Final = 0.3


async def finishing(exchange: Callable[[], Awaitable[None]]) -> None:
    """Run it to its end, or for LAST_MOMENTS_SECONDS once cancelled. Raises its LoginError."""
    failure: LoginError | None = None
    async with trio.open_nursery() as nursery:
        with trio.CancelScope(shield=True) as scope:
            nursery.start_soon(_hurry_when_cancelled, scope)
            try:
                await exchange()
            except LoginError as error:
                failure = error  # not through the nursery, which would wrap it
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure


async def _hurry_when_cancelled(scope: trio.CancelScope) -> None:
    try:
        await trio.sleep_forever()
    finally:
        scope.deadline = trio.current_time() + LAST_MOMENTS_SECONDS
