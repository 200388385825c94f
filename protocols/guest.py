"""A portal through which a thread outside of trio, the guest, calls the functions of a node.

    async with (                                    # in trio's thread
        trio.open_nursery() as threads,
        open_portal(NodeEnded("The node has ended.")) as portal,
    ):
        threads.start_soon(trio.to_thread.run_sync, work, portal)
        ...

    call = portal.begin(fetch, key, timeout=5.0)    # in the guest's thread; returns at once
    portal.post(note, progress)                     # never waits, and has no result
    value = call.wait()                             # blocks until `fetch` has ended

Promises: nothing here makes trio wait for the guest. The guest waits only in `GuestCall.wait`, and
never after the end of the block: each waiting guest is then woken with the error that the owner
chose, and every later call raises it. If a begun function raises an error of ours, that is raised
in the guest's thread. Any other error ends the block, as it does in a task of a nursery.

The block does not wait for the guest's thread. The code that started the thread must join it, and
outside of the block: a block that itself waits for the thread cannot be cancelled, because the
guest is only woken when the block ends.
"""

from __future__ import annotations

import math
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar, TypeVarTuple, Unpack

import trio

from protocols.errors import DeadlineExceeded, PotluckError, again

Value = TypeVar("Value")
Arguments = TypeVarTuple("Arguments")


@asynccontextmanager
async def open_portal(ended: PotluckError) -> AsyncIterator[Portal]:
    """A portal that is open until the block ends. From then on `ended` is raised in the guests'
    threads. The end cancels the calls under way. Errors of the block come out unwrapped."""
    failure: BaseException | None = None
    async with trio.open_nursery() as nursery:
        portal = Portal(nursery, trio.lowlevel.current_trio_token(), ended)
        try:
            yield portal
        except BaseException as error:  # noqa: BLE001 - raised below, where no nursery wraps it
            failure = error
        finally:
            portal.end()  # first, so that the guests get this error, not that of a cancelled call
            nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure


class GuestCall(Generic[Value]):
    """One call of a guest: its value or its error, once there is one. Any thread may wait for it,
    and more than once. Invariant: a value or an error never changes; only trio's thread sets it."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._value: tuple[Value] | None = None
        self._error: PotluckError | None = None

    def wait(self) -> Value:
        """Block this thread until the call is over. Raises the error, if it ended with one: a fresh
        copy each time, so that the tracebacks of several threads do not grow into each other."""
        self._over.wait()
        if self._error is not None:
            raise again(self._error)
        assert self._value is not None
        return self._value[0]

    def give(self, value: Value) -> None:
        """Give the value, unless the call is over."""
        if not self._over.is_set():
            self._value = (value,)
            self._over.set()

    def fail(self, error: PotluckError) -> None:
        """Give an error, unless the call is over."""
        if not self._over.is_set():
            self._error = error
            self._over.set()


class Portal:
    """Made by `open_portal`. Any thread may use it, except where a section says otherwise."""

    def __init__(
        self, nursery: trio.Nursery, token: trio.lowlevel.TrioToken, ended: PotluckError
    ) -> None:
        self.nursery = nursery
        """The tasks of the calls. The owner's own tasks may live in it, too, until the end."""
        self._token, self._error = token, ended
        self._lock = threading.Lock()
        self._open: set[GuestCall[Any]] = set()
        self._ended = False

    @property
    def ended(self) -> bool:
        return self._ended

    def check(self) -> None:
        """Raise the error of the end, if the portal has ended."""
        if self._ended:
            raise again(self._error)

    def begin(
        self,
        function: Callable[[Unpack[Arguments]], Awaitable[Value]],
        *arguments: *Arguments,
        timeout: float = math.inf,
    ) -> GuestCall[Value]:
        """Run an async function in a task of trio's. After `timeout` seconds it is cancelled, and
        the call fails with DeadlineExceeded."""
        call = GuestCall[Value]()
        with self._lock:
            self.check()
            self._open.add(call)

        async def run() -> None:
            with trio.move_on_after(timeout) as scope:
                try:
                    value = await function(*arguments)
                except PotluckError as error:
                    call.fail(error)
                else:
                    call.give(value)
            if scope.cancelled_caught:
                call.fail(DeadlineExceeded(f"The call did not end within {timeout:g} s."))
            with self._lock:
                self._open.discard(call)

        self.post(self.nursery.start_soon, run)
        return call

    def post(self, function: Callable[[Unpack[Arguments]], object], *arguments: *Arguments) -> None:
        """Call a plain function in trio's thread, unless the portal ends first. Never waits.
        Functions are called in the order in which they were posted."""
        self.check()

        def unless_ended() -> None:
            if self._ended:
                return
            try:
                function(*arguments)
            except Exception as error:  # noqa: BLE001 - raised in the nursery: here it would end
                self.nursery.start_soon(_raise, error)  # the whole trio run as an internal error

        try:
            self._token.run_sync_soon(unless_ended)
        except trio.RunFinishedError:
            raise again(self._error) from None

    # -- for trio's thread

    def end(self) -> None:
        """Wake every waiting guest, and refuse all further calls."""
        with self._lock:
            self._ended = True
            waiting, self._open = self._open, set()
        for call in waiting:
            call.fail(self._error)


async def _raise(error: Exception) -> None:
    raise error
