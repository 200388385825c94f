"""The writing thread: one transaction for all that waits, and each undone alone if it fails."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable

import pytest
import trio

from auth.server.audit import Act
from auth.server.store_errors import DiskFull, StoreBusy, StoreClosed, StoreFailed
from auth.server.writer import MOST_IN_TRANSACTION, MOST_WAITING, URGENT_WAITING, Transaction
from tests.auth.store.stores import Server


def note(reason: str) -> Callable[[Transaction], int]:
    return lambda transaction: transaction.log(Act.REFUSED, "peer", reason)


class Gate:
    """Keeps the writing thread inside a transaction until it is opened."""

    def __init__(self, server: Server) -> None:
        self.writer = server.store.writer
        self.entered, self.opened = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        def wait(_transaction: Transaction) -> None:
            self.entered.set()
            assert self.opened.wait(30)

        self.writer.run(wait)

    def __enter__(self) -> None:
        self.thread.start()
        assert self.entered.wait(30)

    def __exit__(self, *_: object) -> None:
        self.opened.set()
        self.thread.join()


def reasons(server: Server) -> list[str]:
    return [row.reason for row in reversed(server.moderation.audit(limit=5000).rows)][2:]


async def test_operations_that_wait_together_are_one_transaction(server: Server) -> None:
    begun: list[int] = []

    def operation(transaction: Transaction) -> None:
        begun.append(id(transaction))
        note("x")(transaction)

    async with trio.open_nursery() as nursery:
        with Gate(server):
            for _ in range(100):
                nursery.start_soon(server.store.writer.perform, operation)
            await trio.testing.wait_all_tasks_blocked()
    assert len(begun) == 100
    assert len(set(begun)) == 1
    assert server.is_sound()


async def test_a_group_has_a_greatest_size(server: Server) -> None:
    sizes: dict[int, int] = {}

    def operation(transaction: Transaction) -> None:
        sizes[transaction.now_ms] = sizes.get(transaction.now_ms, 0) + 1
        server.clock.forward(1)  # each transaction takes the time once

    async with trio.open_nursery() as nursery:
        with Gate(server):
            for _ in range(MOST_IN_TRANSACTION + 10):
                nursery.start_soon(server.store.writer.perform, operation)
            await trio.testing.wait_all_tasks_blocked()
    assert sorted(sizes.values()) == [10, MOST_IN_TRANSACTION]


async def test_an_operation_that_fails_is_undone_alone(server: Server) -> None:
    answers: dict[int, object] = {}

    async def ask(number: int) -> None:
        def operation(transaction: Transaction) -> int:
            serial = transaction.next_serial()
            note(f"number {number}")(transaction)
            if number % 3 == 0:
                raise ZeroDivisionError(number)
            if number % 3 == 1:
                transaction.connection.execute("INSERT INTO audit VALUES (1,1,1,1,1,1,1,1,1,1)")
            return serial

        try:
            answers[number] = await server.store.writer.perform(operation)
        except (ZeroDivisionError, StoreFailed) as error:
            answers[number] = type(error)

    async with trio.open_nursery() as nursery:
        with Gate(server):
            for number in range(12):
                nursery.start_soon(ask, number)
            await trio.testing.wait_all_tasks_blocked()
    good = [number for number in range(12) if number % 3 == 2]
    assert {answers[number] for number in good} == {1, 2, 3, 4}  # no serial was lost
    assert {answers[number] for number in (0, 3, 6, 9)} == {ZeroDivisionError}
    assert {answers[number] for number in (1, 4, 7, 10)} == {StoreFailed}
    assert sorted(reasons(server)) == sorted(f"number {number}" for number in good)
    assert server.is_sound()


async def test_deferred_actions_run_only_for_committed_operations(server: Server) -> None:
    happened: list[str] = []

    def operation(how: str) -> Callable[[Transaction], None]:
        def run(transaction: Transaction) -> None:
            transaction.after_commit(lambda: happened.append(f"{how} committed"))
            transaction.if_undone(lambda: happened.append(f"{how} undone"))
            if how == "bad":
                raise ValueError(how)

        return run

    with pytest.raises(ValueError, match="bad"):
        await server.store.writer.perform(operation("bad"))
    await server.store.writer.perform(operation("good"))
    assert happened == ["bad undone", "good committed"]


async def test_a_commit_that_fails_fails_all_of_it_and_the_next_one_works(
    server: Server,
) -> None:
    def deferred(transaction: Transaction) -> None:
        """Breaks a rule that SQLite looks at when it commits."""
        transaction.connection.execute("PRAGMA defer_foreign_keys = ON")
        transaction.connection.execute("INSERT INTO peers VALUES (x'01', 12345, 1, 1, 1)")

    errors: list[StoreFailed] = []

    async def ask(operation: Callable[[Transaction], object]) -> None:
        try:
            await server.store.writer.perform(operation)
        except StoreFailed as error:
            errors.append(error)

    async with trio.open_nursery() as nursery:
        with Gate(server):
            nursery.start_soon(ask, note("innocent"))
            nursery.start_soon(ask, deferred)
            await trio.testing.wait_all_tasks_blocked()
    assert len(errors) == 2
    assert not server.store.health().writable
    assert "FOREIGN KEY" in server.store.health().trouble
    assert reasons(server) == []
    await server.store.writer.perform(note("after it"))
    assert server.store.health().writable
    assert reasons(server) == ["after it"]
    assert server.is_sound()


def test_a_disk_that_is_full_for_one_operation_is_a_trouble_of_the_store(
    server: Server,
) -> None:
    """SQLite can find no room in the middle of an operation, and the commit still works."""

    limit(server, 1)
    with pytest.raises(DiskFull):
        server.store.writer.run(large)
    assert not server.store.health().writable
    server.store.writer.run(lambda _: None)  # reads only: proves nothing
    assert not server.store.health().writable
    limit(server, 1 << 30)
    server.store.writer.run(note("written"))
    assert server.store.health().writable
    assert server.is_sound()


def test_a_trouble_that_is_over_is_found_out_within_a_minute_though_nobody_asks(
    server: Server,
) -> None:
    """A balancer sends nobody to a server that is not ready, so nothing would be written."""

    limit(server, 1)
    with pytest.raises(DiskFull):
        server.store.writer.run(large)
    limit(server, 1 << 30)
    acts = server.acts()
    server.store.writer.run(lambda _: None)
    assert not server.store.health().writable
    server.pass_a_minute()
    assert server.store.health().writable
    assert server.acts() == acts
    assert server.is_sound()


def limit(server: Server, pages: int) -> None:
    server.store.writer.run(
        lambda transaction: transaction.connection.execute(f"PRAGMA max_page_count = {pages}")
    )


def large(transaction: Transaction) -> None:
    transaction.connection.execute(
        "INSERT INTO accounts VALUES (NULL, 'p', 'l', NULL, 'volunteer', 'allowed', 1, '', 1,"
        " '', hex(zeroblob(100000)))"
    )


async def test_too_many_that_wait_are_told_to_come_later_but_not_moderators(
    server: Server,
) -> None:
    async with trio.open_nursery() as nursery:
        with Gate(server):
            for _ in range(MOST_WAITING):
                nursery.start_soon(server.store.writer.perform, note("passes"))
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(StoreBusy) as caught:
                await server.store.writer.perform(note("one more"))
            assert caught.value.exit_code == 4
            for _ in range(URGENT_WAITING):
                nursery.start_soon(lambda: server.store.writer.perform(note("act"), urgent=True))
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(StoreBusy):
                await server.store.writer.perform(note("one more"), urgent=True)
            assert server.store.health().waiting == MOST_WAITING + URGENT_WAITING
    assert reasons(server)[:URGENT_WAITING] == ["act"] * URGENT_WAITING
    assert len(reasons(server)) == MOST_WAITING + URGENT_WAITING


async def test_somebody_who_went_away_before_their_turn_has_changed_nothing(
    server: Server,
) -> None:
    with Gate(server):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.store.writer.perform, note("gone"))
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
    await server.store.writer.perform(note("still here"))
    assert reasons(server) == ["still here"]


def test_many_threads_make_one_chain_without_gaps(server: Server) -> None:
    numbers: list[int] = []

    def write(who: int) -> None:
        for turn in range(25):
            numbers.append(server.store.writer.run(note(f"{who}.{turn}")))

    threads = [threading.Thread(target=write, args=(who,)) for who in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers) == list(range(3, 203))
    assert server.is_sound()
    for who in range(8):  # each thread's own rows are in its order
        mine = [reason for reason in reasons(server) if reason.startswith(f"{who}.")]
        assert mine == [f"{who}.{turn}" for turn in range(25)]


async def test_answers_reach_an_event_loop_that_has_ended_without_harm(server: Server) -> None:
    gate = Gate(server)

    async def leave() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.store.writer.perform, note("left behind"))
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()

    with gate:
        await trio.to_thread.run_sync(trio.run, leave)
    assert reasons(server) == []


def test_a_commit_waits_for_the_disk(server: Server) -> None:
    def pragmas(transaction: Transaction) -> list[object]:
        names = ("journal_mode", "synchronous", "fullfsync", "foreign_keys", "trusted_schema")
        read = transaction.connection.execute
        return [read(f"PRAGMA {name}").fetchone()[0] for name in names]

    assert server.store.writer.run(pragmas) == ["wal", 2, 1, 1, 0]


def test_nothing_is_taken_on_after_closing(server: Server) -> None:
    server.store.writer.close()
    with pytest.raises(StoreClosed):
        server.store.writer.run(note("too late"))


def test_an_error_of_sqlite_never_comes_out_as_itself(server: Server) -> None:
    with pytest.raises(StoreFailed) as caught:
        server.store.writer.run(
            lambda transaction: transaction.connection.execute("SELECT nonsense")
        )
    assert not isinstance(caught.value, sqlite3.Error)
    assert caught.value.advice


def test_a_clock_that_went_back_is_told_of_once(server: Server) -> None:
    server.store.writer.run(note("before"))
    server.clock.forward(-600_000)
    server.store.writer.run(note("after"))
    server.store.writer.run(note("later"))
    assert reasons(server) == ["before", "The clock went back by 600.0 s.", "after", "later"]
    assert server.is_sound()
