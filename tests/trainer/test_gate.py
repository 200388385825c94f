"""The gate of a training loop, and its departure: named reasons, any thread, never a wait."""

from __future__ import annotations

import threading

import trio
import trio.testing

from node.training.departure import Departure
from node.training.gate import Closed, Gate
from protocols.errors import PotluckError
from tests.waiting import PATIENCE_SECONDS


def test_it_is_open_when_nobody_has_a_reason() -> None:
    gate = Gate()
    assert gate.is_open
    gate.close("pause", "paused by you")
    gate.close("quota", "the month's quota is used up", until=1e9)
    gate.close("pause", "paused by you until noon", until=2e9)
    assert gate.reasons() == (
        Closed("pause", "paused by you until noon", 2e9),
        Closed("quota", "the month's quota is used up", 1e9),
    )
    gate.open("pause")
    gate.open("pause")
    assert not gate.is_open
    gate.open("quota")
    assert gate.is_open


def test_a_loop_waits_in_it_until_the_last_reason_has_gone() -> None:
    gate, passed = Gate(), threading.Event()
    gate.close("one", "")
    gate.close("other", "")

    def loop() -> None:
        gate.wait()
        passed.set()

    thread = threading.Thread(target=loop)
    thread.start()
    gate.open("one")
    assert not passed.wait(0.02)
    gate.open("other")
    assert passed.wait(PATIENCE_SECONDS)
    thread.join()


def test_the_end_lets_everybody_through() -> None:
    gate = Gate()
    gate.close("pause", "")
    thread = threading.Thread(target=gate.wait)
    thread.start()
    gate.end()
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive()
    gate.wait()  # from now on


def test_a_watcher_is_told_of_every_change_and_of_nothing_else() -> None:
    gate, told = Gate(), list[bool]()
    gate.watch(lambda: told.append(gate.is_open))
    gate.close("pause", "words")
    gate.close("pause", "words")
    gate.open("pause")
    gate.open("pause")
    assert told == [False, True]


async def test_a_departure_only_ever_becomes_more_urgent() -> None:
    departure, told = Departure(), list[tuple[bool, bool]]()
    departure.watch(lambda: told.append((departure.wanted, departure.at_once)))
    with trio.fail_after(PATIENCE_SECONDS):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(departure.until_wanted)
            nursery.start_soon(departure.until_at_once)
            await trio.testing.wait_all_tasks_blocked()
            await trio.to_thread.run_sync(departure.leave)
            await departure.until_wanted()
            departure.leave()
            departure.leave(at_once=True)
            departure.leave()
    assert told == [(True, False), (True, True)]


def test_a_forced_departure_has_a_reason_unless_the_owner_wanted_it_before() -> None:
    forced, wanted, error = Departure(), Departure(), PotluckError("too little memory")
    forced.leave(error=error)
    wanted.leave()
    wanted.leave(error=error)
    assert (forced.error, wanted.error) == (error, None)
