"""A guest's thread calls functions of trio's, and neither waits for the other longer than it must.

Threads and trio really run here, in real time: what wakes a thread is what is tested.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from typing import TypeVar

import pytest
import trio

from protocols.errors import Busy, DeadlineExceeded, PotluckError
from protocols.guest import GuestCall, Portal, open_portal
from tests.waiting import PATIENCE_SECONDS

Result = TypeVar("Result")


class Closed(PotluckError):
    """The error that the owner of these portals chose."""


def visit(guest: Callable[[Portal], Result]) -> Result:
    """Call this function in a thread while a portal is open, and return its result."""

    async def main() -> Result:
        with trio.fail_after(PATIENCE_SECONDS):
            async with open_portal(Closed("It has closed.")) as portal:
                return await trio.to_thread.run_sync(guest, portal)

    return trio.run(main)


async def doubled(number: int) -> int:
    await trio.sleep(0.01)
    return 2 * number


def test_a_guest_gets_what_an_async_function_returns() -> None:
    assert visit(lambda portal: portal.begin(doubled, 21).wait()) == 42


def test_several_calls_are_under_way_at_once() -> None:
    def guest(portal: Portal) -> list[int]:
        met = trio.Event()

        async def first() -> int:
            await met.wait()
            return 1

        async def second() -> int:
            met.set()
            return 2

        return [call.wait() for call in (portal.begin(first), portal.begin(second))]

    assert visit(guest) == [1, 2]


def test_posted_functions_are_called_in_order_and_in_trios_thread() -> None:
    def guest(portal: Portal) -> tuple[list[int], set[int], int]:
        numbers: list[int] = []
        threads: set[int] = set()

        def note(number: int) -> None:
            numbers.append(number)
            threads.add(threading.get_ident())

        for number in range(100):
            portal.post(note, number)
        portal.begin(trio.lowlevel.checkpoint).wait()
        return numbers, threads, threading.get_ident()

    numbers, threads, guests = visit(guest)
    assert numbers == list(range(100))
    assert len(threads) == 1
    assert guests not in threads


def test_trio_goes_on_while_a_guest_computes_or_waits() -> None:
    """Nothing but the guest's thread is blocked."""
    go_on = threading.Event()

    def guest(portal: Portal) -> None:
        call = portal.begin(trio.sleep_forever, timeout=0.2)
        go_on.wait()  # as one that computes
        with pytest.raises(DeadlineExceeded):
            call.wait()

    async def main() -> None:
        async with open_portal(Closed("It has closed.")) as portal, trio.open_nursery() as nursery:
            nursery.start_soon(trio.to_thread.run_sync, guest, portal)
            for _ in range(10):
                await trio.sleep(0.01)
            go_on.set()

    trio.run(main)


def test_an_error_of_ours_is_raised_afresh_in_each_thread_that_waits() -> None:
    original = Busy("Not now.", why="It is full.", advice="Come later.")

    async def refuse() -> None:
        raise original

    def guest(portal: Portal) -> list[Busy]:
        call, raised = portal.begin(refuse), []
        for _ in range(2):
            with pytest.raises(Busy) as caught:
                call.wait()
            raised.append(caught.value)
        return raised

    first, second = visit(guest)
    assert len({id(first), id(second), id(original)}) == 3
    assert str(first) == str(second) == str(original)
    assert len(traceback.extract_tb(first.__traceback__)) == len(
        traceback.extract_tb(second.__traceback__)
    )


def test_a_call_that_takes_too_long_is_cancelled_and_named() -> None:
    cancelled = threading.Event()

    async def hang() -> None:
        try:
            await trio.sleep_forever()
        finally:
            cancelled.set()

    def guest(portal: Portal) -> None:
        with pytest.raises(DeadlineExceeded, match=r"within 0\.05 s"):
            portal.begin(hang, timeout=0.05).wait()
        assert cancelled.is_set()
        assert portal.begin(doubled, 1, timeout=PATIENCE_SECONDS).wait() == 2

    visit(guest)


def test_a_deadline_of_the_functions_own_is_its_own_matter() -> None:
    """Its error is not taken for the call's deadline."""

    async def wait_a_little() -> str:
        with trio.move_on_after(0.01):
            await trio.sleep_forever()
        return "moved on"

    assert visit(lambda portal: portal.begin(wait_a_little, timeout=60.0).wait()) == "moved on"


def test_the_end_wakes_every_waiting_guest_and_refuses_later_calls() -> None:
    count = 3
    waiting, raised = threading.Barrier(count + 1), []

    def guest(portal: Portal) -> None:
        call = portal.begin(trio.sleep_forever)
        waiting.wait()
        with pytest.raises(Closed, match="It has closed") as caught:
            call.wait()
        raised.append(caught.value)
        assert portal.ended
        for refused in (
            portal.check,
            lambda: portal.post(raised.clear),
            lambda: portal.begin(trio.sleep, 0),
            call.wait,
        ):
            with pytest.raises(Closed):
                refused()

    async def main() -> None:
        async with trio.open_nursery() as threads, open_portal(Closed("It has closed.")) as portal:
            for _ in range(count):
                threads.start_soon(trio.to_thread.run_sync, guest, portal)
            await trio.to_thread.run_sync(waiting.wait)
            assert not portal.ended

    trio.run(main)
    assert len({id(error) for error in raised}) == count


def test_the_end_does_not_wait_for_a_guest() -> None:
    computes, go_on = threading.Event(), threading.Event()

    def guest(portal: Portal) -> None:
        computes.set()
        go_on.wait()
        with pytest.raises(Closed):
            portal.begin(doubled, 1)

    async def main() -> None:
        async with trio.open_nursery() as threads:
            async with open_portal(Closed("It has closed.")) as portal:
                threads.start_soon(trio.to_thread.run_sync, guest, portal)
                await trio.to_thread.run_sync(computes.wait)
            assert not go_on.is_set()
            go_on.set()

    trio.run(main)


def test_a_guest_may_outlive_the_whole_trio_run() -> None:
    portals, calls = list[Portal](), list[GuestCall[None]]()

    async def main() -> None:
        async with open_portal(Closed("It has closed.")) as portal:
            portals.append(portal)
            calls.append(portal.begin(trio.sleep_forever))

    trio.run(main)
    for refused in (calls[0].wait, lambda: portals[0].post(print), lambda: portals[0].check()):
        with pytest.raises(Closed):
            refused()


def test_a_call_that_the_end_overtakes_is_answered_and_never_made() -> None:
    """It was asked for before the end, and trio comes to it only after the end."""
    called: list[str] = []

    async def begin() -> None:
        called.append("begun")

    async def main() -> GuestCall[None]:
        async with open_portal(Closed("It has closed.")) as portal:
            call = portal.begin(begin)
            portal.post(called.append, "posted")
        await trio.sleep(0.01)
        return call

    call = trio.run(main)
    with pytest.raises(Closed):
        call.wait()
    assert not called


async def breaks() -> None:
    raise ValueError("a bug")


def fails() -> None:
    raise ValueError("a bug")


def fails_as_ours() -> None:
    raise Busy("a bug")


@pytest.mark.parametrize(
    ("ask", "expected"),
    [
        (lambda portal: portal.begin(breaks), ValueError),
        (lambda portal: portal.post(fails), ValueError),
        (lambda portal: portal.post(fails_as_ours), Busy),  # there is no call that could get it
    ],
)
def test_any_other_error_ends_the_block_and_wakes_the_guests(
    ask: Callable[[Portal], object], expected: type[Exception]
) -> None:
    woken: list[float] = []

    def guest(portal: Portal) -> None:
        call = portal.begin(trio.sleep_forever)
        ask(portal)
        with pytest.raises(Closed):
            call.wait()
        woken.append(time.monotonic())

    async def main() -> None:
        async with trio.open_nursery() as threads, open_portal(Closed("It has closed.")) as portal:
            threads.start_soon(trio.to_thread.run_sync, guest, portal)
            await trio.sleep_forever()

    with pytest.RaisesGroup(expected, flatten_subgroups=True):
        trio.run(main)
    assert woken


def test_an_error_of_the_block_comes_out_unwrapped_and_wakes_the_guest() -> None:
    calls: list[GuestCall[None]] = []

    async def main() -> None:
        async with open_portal(Closed("It has closed.")) as portal:
            calls.append(portal.begin(trio.sleep_forever))
            await trio.lowlevel.checkpoint()
            fails()

    with pytest.raises(ValueError, match="a bug"):
        trio.run(main)
    with pytest.raises(Closed):
        calls[0].wait()


def test_cancelling_the_owner_wakes_the_guest() -> None:
    def guest(portal: Portal) -> None:
        with pytest.raises(Closed):
            portal.begin(trio.sleep_forever).wait()

    async def main() -> None:
        async with trio.open_nursery() as threads:
            with trio.move_on_after(0.05) as scope:
                async with open_portal(Closed("It has closed.")) as portal:
                    threads.start_soon(trio.to_thread.run_sync, guest, portal)
                    await trio.sleep_forever()
            assert scope.cancelled_caught

    trio.run(main)
