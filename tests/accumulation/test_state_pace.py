"""How much a training peer sends to newcomers, by the measured cost."""

from __future__ import annotations

import random

import pytest
import trio
from trio.testing import MockClock

from protocols.accumulation.state_pace import (
    BURST_SLOWDOWN,
    MOST_SLOWDOWN,
    REST_EVERY,
    SAVED_SECONDS,
    SLOWEST_BYTES_PER_SECOND,
    SUPPOSED_COST,
    Order,
    ServingCost,
    UploadPace,
)

BATCH_SECONDS = 0.2
LINK = 1e6  # bytes a second, where rounds go over a slow one
ROUND_BYTES = 0.3e6
STEP_BATCHES = 5


class Trainer:
    """Batches that take longer if more is sent during them, and rounds, which share a link."""

    def __init__(self, *, cost: float, noise: float = 0.0) -> None:
        self.now = 0.0
        self.serving = ServingCost(lambda: self.now)
        self._cost, self._noise, self._chance = cost, noise, random.Random(7)
        self.alone(10)

    def alone(self, batches: int) -> None:
        for _ in range(batches):
            self._batch(0.0)

    def serve(self, batches: int) -> list[float]:
        """Compute while sending as much as allowed. Returns the bytes a second of each batch."""
        rates = []
        for _ in range(batches):
            self.serving.computes()
            rates.append(self._rate())
            self._batch(rates[-1])
        return rates

    def spend(self) -> None:
        """Spend all time that was saved."""
        self.serve(round(2 * SAVED_SECONDS / BATCH_SECONDS / BURST_SLOWDOWN))

    def step(self, *, serves: bool, link: float = LINK) -> float:
        """Some batches and a round. Returns how long they took."""
        began = self.now
        for _ in range(STEP_BATCHES):
            self.serving.computes()
            self._batch(min(self._rate(), link) if serves else 0.0)
        self.serving.exchanges(self.now)
        exchange = self.now, ROUND_BYTES / link
        rate = min(self._rate(), link / 2) if serves else 0.0  # of two flows each has its half
        seconds = ROUND_BYTES / (link - rate)
        while self.now < exchange[0] + seconds:
            self.serving.sent(round(rate * 0.05), self.now)
            self.now += 0.05
        self.now = exchange[0] + seconds
        self.serving.averaged([(exchange[0], self.now)])
        return self.now - began

    def _rate(self) -> float:
        return 0.0 if self.serving.rests(self.now) else self.serving.bytes_per_second(self.now)

    def _batch(self, rate: float) -> None:
        self.serving.computes()
        seconds = BATCH_SECONDS * (1.0 + self._cost * rate)
        seconds *= 1.0 + self._chance.gauss(0.0, self._noise)
        self.now += seconds
        self.serving.sent(round(rate * seconds), self.now)
        self.serving.computed()


def mean(rates: list[float]) -> float:
    return sum(rates) / len(rates)


@pytest.mark.parametrize("cost", [0.2e-9, 3e-9, 30e-9])
def test_as_much_is_sent_as_slows_a_batch_by_a_twentieth(cost: float) -> None:
    """The cost of a byte on this machine is measured, not supposed."""
    trainer = Trainer(cost=cost)
    trainer.spend()
    assert 0.8 * MOST_SLOWDOWN < mean(trainer.serve(200)) * cost < 1.2 * MOST_SLOWDOWN


@pytest.mark.parametrize("quiet", [0, 400])
def test_a_peer_that_has_served_nobody_sends_a_state_at_once_and_pays_for_it_later(
    quiet: int,
) -> None:
    """130 MB at a twentieth of a core need eight seconds. Meanwhile, short steps are made faster
    than their results could be sent."""
    trainer = Trainer(cost=SUPPOSED_COST)
    if quiet:
        trainer.spend()
        trainer.alone(quiet)
    began, sent = trainer.now, 0.0
    while sent < 130e6:
        (rate,) = trainer.serve(1)
        sent += rate * BATCH_SECONDS
    assert trainer.now - began < 1.5
    while trainer.now - began < 60.0:
        sent += trainer.serve(1)[0] * BATCH_SECONDS
    lost_seconds = sent * SUPPOSED_COST
    assert lost_seconds < 1.2 * (SAVED_SECONDS + 60.0 * MOST_SLOWDOWN)


def test_rounds_over_a_slow_uplink_are_slowed_by_no_more_than_batches() -> None:
    """If a peer serves as fast as the link carries, its rounds take twice as long."""
    trainer = Trainer(cost=1e-10)
    alone = mean([trainer.step(serves=False) for _ in range(20)])
    first = trainer.step(serves=True)
    assert first > 1.2 * alone
    for _ in range(60):
        trainer.step(serves=True)  # what was saved is spent
    served = mean([trainer.step(serves=True) for _ in range(80)])
    assert 1.01 * alone < served < 1.07 * alone
    assert trainer.serving.bytes_per_second(trainer.now) > 0.05 * LINK


def test_rounds_over_a_fast_link_take_nothing_from_newcomers() -> None:
    trainer, link = Trainer(cost=1e-10), 1e9
    for steps in (20, 60):
        for _ in range(steps):
            trainer.step(serves=steps == 60, link=link)
    rate = trainer.serving.bytes_per_second(trainer.now)
    assert rate > 0.5 * MOST_SLOWDOWN / 1e-10


def test_serving_that_costs_nothing_is_soon_a_hundred_times_as_fast() -> None:
    sent = Trainer(cost=0.0).serve(12)
    assert max(sent) > 100 * MOST_SLOWDOWN / SUPPOSED_COST


def test_batches_that_vary_neither_stop_the_serving_nor_let_it_run_away() -> None:
    trainer = Trainer(cost=1e-9, noise=0.1)
    trainer.spend()
    sent = trainer.serve(400)
    assert 0.2 * MOST_SLOWDOWN < mean(sent) * 1e-9 < 2.0 * MOST_SLOWDOWN
    assert min(one for one in sent if one) >= SLOWEST_BYTES_PER_SECOND


def test_some_stretches_are_without_serving_and_the_comparison_is_always_recent() -> None:
    """The machine has other work now, which is not a cost of serving."""
    trainer = Trainer(cost=1e-9)
    trainer.spend()
    assert trainer.serve(80).count(0.0) == 80 // REST_EVERY
    before = mean(trainer.serve(40))
    trainer._cost, slower = 1e-9, 1.5
    for _ in range(200):
        trainer.serving.computes()
        rate = trainer._rate()
        trainer.now += slower * BATCH_SECONDS * (1.0 + 1e-9 * rate)
        trainer.serving.sent(round(rate * slower * BATCH_SECONDS), trainer.now)
        trainer.serving.computed()
    assert mean(trainer.serve(8)) > 0.5 * before


def test_a_rest_ends_with_the_batch_that_it_is_for() -> None:
    trainer = Trainer(cost=1e-9)
    while not trainer.serving.rests(trainer.now):
        trainer.serve(1)
        trainer.serving.computes()
    trainer._batch(0.0)
    trainer.serving.computes()
    assert not trainer.serving.rests(trainer.now)


def test_nothing_rests_while_a_round_gathers() -> None:
    """The round may wait for the newcomer that is being served, and exchanges nothing yet."""
    trainer = Trainer(cost=1e-9)
    trainer.step(serves=True)
    assert not trainer.serving.rests(trainer.now), "the next one gathers"
    trainer.serving.exchanges(trainer.now)
    assert trainer.serving.rests(trainer.now)
    trainer.serving.averaged([(trainer.now, trainer.now + 0.1)])
    assert not trainer.serving.rests(trainer.now)


def test_an_exchange_that_is_told_twice_ends_no_training() -> None:
    trainer = Trainer(cost=1e-9)
    exchange = trainer.now + 0.1, trainer.now + 0.2
    trainer.serving.averaged([exchange, exchange])
    assert trainer.serving.seconds_per_byte >= 0.0


def test_a_batch_that_never_ends_does_not_hold_newcomers_up() -> None:
    trainer = Trainer(cost=1e-9)
    while not trainer.serving.rests(trainer.now):
        trainer.serve(1)
        trainer.serving.computes()
    trainer.now += 60.0
    assert not trainer.serving.rests(trainer.now)


async def nobody() -> None: ...


async def test_turns_go_to_the_first_in_the_line_and_to_results_before_pieces(
    autojump_clock: MockClock,
) -> None:
    pace, had = UploadPace(1000.0), list[Order]()

    async def take(order: Order) -> None:
        for _ in range(3):
            async with pace.turn(1000, order, nobody):
                had.append(order)

    orders = [(1, 2, 1), (1, 1, 1), (1, 2, 0), (0, 3, 0), (1, 1, 0)]
    began = autojump_clock.current_time()
    async with trio.open_nursery() as nursery, pace.turn(2000, (0, 0, 0), nobody):
        for order in orders:  # all of them wait
            nursery.start_soon(take, order)
    assert had == [order for order in sorted(orders) for _ in range(3)]
    assert trio.current_time() - began == pytest.approx(16.0, abs=0.2)


async def test_a_newcomer_that_waits_long_for_a_turn_is_told_that_the_donor_is_alive(
    autojump_clock: MockClock,
) -> None:
    pace, told = UploadPace(1000.0), []

    async def say_alive() -> None:
        told.append(autojump_clock.current_time())

    async with pace.turn(30_000, (0, 0, 0), nobody):
        pass
    async with pace.turn(1, (0, 0, 0), say_alive):
        pass
    assert len(told) >= 10


async def test_a_fast_newcomer_gets_everything_and_a_slow_one_keeps_nobody_waiting(
    autojump_clock: MockClock,
) -> None:
    """Without any limit except this machine's own."""
    pace, had = UploadPace(None), list[str]()
    assert pace.is_busy, "as long as nothing is known"

    async def take(name: str, order: Order, seconds: float) -> None:
        for _ in range(20):
            async with pace.turn(1 << 20, order, nobody):
                await trio.sleep(seconds)
            had.append(name)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(take, "second", (1, 2, 1), 0.01)
        nursery.start_soon(take, "first", (1, 1, 1), 0.01)
    assert had.index("second", 1) > 19, "it had one turn, before the other one was there"
    assert pace.is_busy
    had.clear()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(take, "first", (1, 1, 1), 1.0)
        nursery.start_soon(take, "second", (1, 2, 1), 0.01)
    assert had[:10] == ["second"] * 10
    assert not pace.is_busy
    assert autojump_clock.current_time() > 20.0
