"""One answer that many logins need: asked once for all who wait, kept for a time.

A discovery document and a key set change rarely and are needed by every login. Whoever needs one
that is too old asks for it while the others wait for the same answer. A failure is kept too, for
moments: a hundred waiting logins must not become a hundred timeouts, one after the other.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, Generic, TypeVar

import trio

from auth.server.providers.errors import ProviderUnavailable

# An hour: what providers' own cache headers commonly say; a withdrawn key is trusted no longer.
KEPT_SECONDS: Final = 3600.0

# Between two questions about the same thing, whatever makes them necessary: a token with an unknown
# key id must not let a stranger make us ask as often as they like.
AT_LEAST_APART_SECONDS: Final = 5.0

T = TypeVar("T")


class Remembered(Generic[T]):
    def __init__(self, ask: Callable[[], Awaitable[T]]) -> None:
        self._ask = ask
        self._lock = trio.Lock()
        self._value: T | None = None
        self._failure: ProviderUnavailable | None = None
        self._asked = float("-inf")  # when the value, or the failure, came

    async def get(self, *, not_older_than: float = KEPT_SECONDS) -> T:
        """The answer, asked anew when it is older than so many seconds; ProviderUnavailable.

        Never asked anew within AT_LEAST_APART_SECONDS: then what came last is said again.
        """
        async with self._lock:
            age = trio.current_time() - self._asked
            if self._failure is not None and age < AT_LEAST_APART_SECONDS:
                raise type(self._failure)(
                    self._failure.what,
                    why=self._failure.why,
                    advice=self._failure.advice,
                    retry_after=self._failure.retry_after,
                )
            wanted_age = max(not_older_than, AT_LEAST_APART_SECONDS)
            if self._value is None or age >= wanted_age:
                await self._refresh()
            assert self._value is not None
            return self._value

    async def _refresh(self) -> None:
        # Whoever is cancelled in here leaves no answer, so that the next one asks.
        self._value = self._failure = None
        try:
            self._value = await self._ask()
        except ProviderUnavailable as failure:
            self._failure = failure
            self._asked = trio.current_time()
            raise
        else:
            self._asked = trio.current_time()
