"""Run a command's async part so that Ctrl-C and SIGTERM end it cleanly within two seconds.

The first signal cancels everything; each `finally` and `async with` then does its work, so
sockets, locks and half-written files are gone when the process is. If that takes longer than
PATIENCE_SECONDS (a library that shields its clean-up, a thread that will not end), the process is
ended by force, after the clean-up that was registered with `at_hard_exit`.

A command that trains is told first (`leave`). It may end by itself within LEAVING_SECONDS, and is
cancelled by a second signal.

A signal handler that raises inside trio can hit any line of any task, and of trio itself, which
then reports a bug in trio. So no handler raises. Signals become an ordinary event inside the loop;
those that come while it begins or ends are set aside until the loop can handle them; only the alarm
acts by itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from types import FrameType

import trio

from node.app.cli.exit_codes import TERMINATED
from node.core.collector import collect_seldom, freeze_objects
from node.core.stopping_signals import stopping_signals

# The promise is two seconds from the signal to the shell's prompt.
PATIENCE_SECONDS = 1.5
# If a round is finished first, five: this leaves time for the interpreter's own end.
LEAVING_SECONDS = 4.4
# If it then writes a last checkpoint of some gigabytes: a little less than systemd is told to wait.
KEEPING_SECONDS = 27.0

_hard_exit_callbacks: list[Callable[[], None]] = []


def run_until_signal(
    main: Callable[[], Awaitable[int]],
    *,
    terminated: int = TERMINATED,
    leave: Callable[[], bool] | None = None,
    patience_seconds: float | None = None,
    clock: trio.abc.Clock | None = None,
) -> int:
    """The exit code of `main`, or of the signal that ended it: 130, or `terminated` for SIGTERM.

    `leave` is called at the first signal, and returns whether `main` now ends by itself. If not,
    and at the second signal, `main` is cancelled. `patience_seconds`: for all of that, if not the
    usual. `clock` is trio's; tests give a virtual one.
    """
    patience = patience_seconds or (PATIENCE_SECONDS if leave is None else LEAVING_SECONDS)
    has_held_back = freeze_objects()  # what was imported so far stays
    aside = _SetAside()
    before = {each: signal.signal(each, aside) for each in stopping_signals()}
    try:
        code = trio.run(_supervise, main, terminated, leave, patience, aside, clock=clock)
    finally:
        for each, handler in before.items():
            if handler is not None:  # it is not Python's
                signal.signal(each, handler)
        if has_held_back:
            collect_seldom()  # the command may import more, and begin another loop
    aside.hand_on()
    return code


class _SetAside:
    """Keeps a signal that comes while trio's loop begins or ends: nobody can handle it yet, and
    nothing may be raised there."""

    def __init__(self) -> None:
        self._number: int | None = None
        self._is_over = False

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        if not self._is_over:
            self._number = self._number or number

    def hand_on(self) -> None:
        """To the present handler of signals."""
        number, self._number = self._number, None
        if number is not None:
            signal.raise_signal(number)

    def close(self) -> None:
        """An earlier signal has ended the loop; later ones are ignored."""
        self._number, self._is_over = None, True


@contextlib.contextmanager
def at_hard_exit(callback: Callable[[], None]) -> Iterator[None]:
    """In this block, `callback` is called also if the process has to be ended by force.

    It runs inside a signal handler: it may remove files, but must not wait.
    """
    _hard_exit_callbacks.append(callback)
    try:
        yield
    finally:
        _hard_exit_callbacks.remove(callback)


def bound_the_end(code: int, patience_seconds: float = LEAVING_SECONDS) -> None:
    """Leave by force with this code if leaving, which has begun without a signal, takes too long.
    Call it in the main thread."""
    if sys.platform != "win32" and signal.getitimer(signal.ITIMER_REAL)[0] <= 0:
        _set_alarm(code, patience_seconds)


async def _supervise(
    main: Callable[[], Awaitable[int]],
    terminated: int,
    leave: Callable[[], bool] | None,
    patience: float,
    aside: _SetAside,
) -> int:
    code = 0
    stopped_by: int | None = None

    async def watch_signals(received: AsyncIterator[int]) -> None:
        nonlocal stopped_by
        async for number in received:
            is_first, stopped_by = stopped_by is None, stopped_by or number
            if not (is_first and leave is not None and leave()):
                nursery.cancel_scope.cancel()

    with trio.open_signal_receiver(*stopping_signals()) as received:
        _set_the_alarm_at_once(terminated, patience)
        aside.hand_on()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(watch_signals, received)
                code = await main()
                nursery.cancel_scope.cancel()
        except Exception:
            # Errors while everything is being cancelled are caused by that.
            if stopped_by is None:
                raise
    if stopped_by is None:
        return code
    aside.close()
    return _code_of(stopped_by, terminated)


def _code_of(number: int, terminated: int) -> int:
    return terminated if number == signal.SIGTERM else 128 + number


def _set_the_alarm_at_once(terminated: int, patience_seconds: float) -> None:
    """Have the first signal set the alarm itself, before the loop handles it. The second one leaves
    no more time than usual.

    The loop may be blocked: a plain write to a full pipe, whose reader is paused, blocks it.
    """
    signals = 0

    def around(deliver: Callable[[int, FrameType | None], object]) -> None:
        def receive(number: int, frame: FrameType | None) -> None:
            nonlocal signals
            signals += 1
            if signals == 1:
                _set_alarm(_code_of(number, terminated), patience_seconds)
            elif signals == 2 and patience_seconds > LEAVING_SECONDS:
                _set_alarm(_code_of(number, terminated), LEAVING_SECONDS)
            deliver(number, frame)

        signal.signal(each, receive)

    for each in stopping_signals():
        to_the_loop = signal.getsignal(each)
        if callable(to_the_loop):
            around(to_the_loop)


def _set_alarm(code: int, patience_seconds: float) -> None:
    """Leave by force after a while. Never revoked: it also covers the interpreter's own end."""
    if sys.platform == "win32":
        return

    def leave_now(_number: int, _frame: FrameType | None) -> None:
        try:
            for callback in _hard_exit_callbacks:
                with contextlib.suppress(OSError):
                    callback()
        finally:  # whatever a callback raises, this is the last chance to end the process
            os._exit(code)

    signal.signal(signal.SIGALRM, leave_now)
    signal.setitimer(signal.ITIMER_REAL, patience_seconds)
