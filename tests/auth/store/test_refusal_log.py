"""Refusals are all in the log, but nobody can fill the disk with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from auth.server.join_refused import JoinReason, JoinRefused
from auth.server.store import (
    MINUTE_MS,
    MOST_ADDRESSES,
    OTHERS,
    WRITTEN_EACH,
    WRITTEN_IN_ALL,
    RefusalLog,
)
from auth.server.store_errors import StoreFailed
from auth.server.writer import Transaction
from tests.auth.store.stores import Clock, Node, Person, Server, running

NOBODY = Person("nobody")


class Told:
    """Stands in for a transaction: keeps what is told to the log."""

    def __init__(self, now_ms: int) -> None:
        self.now_ms = now_ms
        self.details: list[str] = []

    def log(self, _act: object, _actor: str, _reason: str, *, detail: str) -> int:
        self.details.append(detail)
        return len(self.details)

    def if_undone(self, callback: object) -> None:
        pass


def details(log: RefusalLog, now_ms: int) -> list[str]:
    told = Told(now_ms)
    log.tell(told)  # type: ignore[arg-type]
    return told.details


async def test_the_first_few_of_an_address_are_told_and_the_rest_counted(
    server: Server,
) -> None:
    for _ in range(WRITTEN_EACH + 7):
        with pytest.raises(JoinRefused):
            await Node(1, server).join(NOBODY)
    assert server.acts() == ["refused"] * WRITTEN_EACH
    server.clock.forward(MINUTE_MS)
    server.store.writer.run(server.store.refusals.tell)
    row = server.moderation.audit(limit=1).rows[0]
    assert row.act == "refusals"
    assert row.reason == "7 more refusals in a minute, only counted."
    assert row.detail == "192.0.2.7: 7 × not-on-the-list"
    with pytest.raises(JoinRefused):
        await Node(1, server).join(NOBODY)
    assert server.acts()[-1] == "refused"  # a new minute


async def test_counted_refusals_are_logged_when_the_server_stops(folder: Path) -> None:
    clock = Clock()
    with running(folder, clock) as server:
        for _ in range(WRITTEN_EACH + 2):
            await server.issuer.refused(JoinRefused(JoinReason.CHALLENGE), "192.0.2.7")
    with running(folder, clock) as server:
        assert server.acts() == ["refused"] * WRITTEN_EACH + ["refusals"]
        assert server.is_sound()


def test_many_addresses_together_have_a_limit_too() -> None:
    log, now_ms = RefusalLog(), 10 * MINUTE_MS
    written = sum(
        log.is_written(f"192.0.2.{number}", "challenge", now_ms) for number in range(10_000)
    )
    assert written == WRITTEN_IN_ALL
    told = details(log, now_ms + MINUTE_MS)
    assert len(told) == MOST_ADDRESSES + 1
    counted = 10_000 - WRITTEN_IN_ALL - MOST_ADDRESSES
    assert told[-1] == f"{OTHERS}: {counted} × challenge"
    assert details(log, now_ms + MINUTE_MS) == []


def test_reasons_are_counted_apart_and_most_of_one_address_first() -> None:
    log, now_ms = RefusalLog(), 10 * MINUTE_MS
    for reason, times in (("challenge", WRITTEN_EACH + 1), ("denied", 3), ("signature", 2)):
        for _ in range(times):
            log.is_written("a", reason, now_ms)
    assert details(log, now_ms) == []
    assert details(log, now_ms + MINUTE_MS) == ["a: 3 × denied, 2 × signature, 1 × challenge"]


def test_while_nothing_can_be_written_the_counts_are_kept_in_bounded_memory() -> None:
    log, total = RefusalLog(), 0
    for minute in range(10, 40):
        for number in range(MOST_ADDRESSES * 2):
            for _ in range(WRITTEN_EACH + 3):
                total += not log.is_written(f"{number}", "challenge", minute * MINUTE_MS)
    told = details(log, 50 * MINUTE_MS)
    assert len(told) <= 2 * MOST_ADDRESSES
    assert sum(int(text.split(": ")[1].split(" ")[0]) for text in told) == total


def test_counts_that_could_not_be_written_are_told_later(server: Server) -> None:
    refusals = server.store.refusals
    for _ in range(WRITTEN_EACH + 2):
        refusals.is_written("a", "challenge", server.clock())
    server.clock.forward(MINUTE_MS)

    def fails(transaction: Transaction) -> None:
        refusals.tell(transaction)
        transaction.connection.execute("SELECT nonsense")

    with pytest.raises(StoreFailed):
        server.store.writer.run(fails)
    assert server.acts() == []
    server.store.writer.run(refusals.tell)
    assert server.acts() == ["refusals"]
