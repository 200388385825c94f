"""One dial per peer at a time, shared by all who wait for it.

Ten calls to a peer without a link must make one connection, not ten; and a caller who gives up
must not take the others' dial with it. The dial is therefore a task of the network's nursery: it
goes on while anybody waits, and is cancelled, completely, before the last waiter's cancellation
returns.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import trio

from protocols.errors import PotluckError
from protocols.identity import PeerId
from protocols.remote_errors import again

T = TypeVar("T")


class _Dial(Generic[T]):
    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self.ended = trio.Event()
        self.waiting = 0
        self.result: T | None = None
        self.error: PotluckError | None = None


class SharedDials(Generic[T]):
    """Dials under way, by peer. Invariant: each has at least one waiter, or is being cancelled
    and no longer in the table."""

    def __init__(
        self,
        dial: Callable[[PeerId], Awaitable[T]],
        discard: Callable[[T], Awaitable[None]],
        nursery: trio.Nursery,
    ) -> None:
        self._dial = dial
        self._discard = discard
        self._nursery = nursery
        self._under_way: dict[PeerId, _Dial[T]] = {}

    async def reach(self, peer: PeerId) -> T:
        """Join the dial to this peer, or begin one; what it raises, all who wait get."""
        dial = self._under_way.get(peer)
        if dial is None:
            dial = self._under_way[peer] = _Dial()
            self._nursery.start_soon(self._run, peer, dial)
        dial.waiting += 1
        try:
            await dial.ended.wait()
        except BaseException:
            dial.waiting -= 1
            if not dial.waiting:
                await self._call_off(peer, dial)
            raise
        dial.waiting -= 1
        if dial.error is not None:
            raise again(dial.error)
        if dial.result is None:
            raise trio.ClosedResourceError("the network has ended")
        return dial.result

    async def _call_off(self, peer: PeerId, dial: _Dial[T]) -> None:
        """Nobody waits any more. Short: everything in a dial closes by force when cancelled."""
        self._forget(peer, dial)
        dial.scope.cancel()
        with trio.CancelScope(shield=True):
            await dial.ended.wait()
            if dial.result is not None:  # it succeeded in the very moment of the cancellation
                await self._discard(dial.result)

    async def _run(self, peer: PeerId, dial: _Dial[T]) -> None:
        try:
            with dial.scope:
                dial.result = await self._dial(peer)
        except PotluckError as error:
            dial.error = error
        finally:
            self._forget(peer, dial)
            dial.ended.set()

    def _forget(self, peer: PeerId, dial: _Dial[T]) -> None:
        if self._under_way.get(peer) is dial:
            del self._under_way[peer]
