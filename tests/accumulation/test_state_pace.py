"""How much a peer that trains sends to newcomers, by what that is measured to cost it."""

from __future__ import annotations

import random

import pytest
import trio

from protocols.accumulation.state_pace import (
    MOST_SLOWDOWN,
    REST_EVERY,
    SLOWEST_BYTES_PER_SECOND,
    SUPPOSED_COST,
    Order,
    ServingCost,
    UploadPace,
)

BATCH_SECONDS = 0.2


class Trainer:
    """Batches that take longer the more is sent during them."""

    def __init__(self, *, cost: float, noise: float = 0.0) -> None:
        self.now = 0.0
        self.serving = ServingCost(lambda: self.now)
        self._cost, self._noise, self._chance = cost, noise, random.Random(7)
        self.alone(10)

    def alone(self, batches: int) -> None:
        for _ in range(batches):
            self._batch(0.0)

    def serve(self, batches: int) -> list[float]:
        """With all that may be sent; how many bytes a second that was, batch by batch."""
        rates = []
        for _ in range(batches):
            self.serving.computes()
            rates.append(0.0 if self.serving.rests else self.serving.bytes_per_second)
            self._batch(rates[-1])
        return rates

    def _batch(self, rate: float) -> None:
        self.serving.computes()
        seconds = BATCH_SECONDS * (1.0 + self._cost * rate)
        seconds *= 1.0 + self._chance.gauss(0.0, self._noise)
        self.serving.sent(round(rate * seconds))
        self.now += seconds
        self.serving.computed()


def mean(rates: list[float]) -> float:
    return sum(rates) / len(rates)


@pytest.mark.parametrize("cost", [0.2e-9, 3e-9, 30e-9])
def test_as_much_is_sent_as_slows_a_batch_by_a_twentieth(cost: float) -> None:
    """Whatever a byte costs on this machine: it is measured, not supposed."""
    trainer = Trainer(cost=cost)
    trainer.serve(40)
    sent = [rate for rate in trainer.serve(40) if rate]
    assert max(sent) * cost < 1.2 * MOST_SLOWDOWN
    assert mean(sent) * cost > 0.8 * MOST_SLOWDOWN


def test_what_costs_nothing_is_soon_sent_a_hundred_times_as_fast() -> None:
    sent = Trainer(cost=0.0).serve(12)
    assert max(sent) > 100 * MOST_SLOWDOWN / SUPPOSED_COST


def test_batches_that_vary_neither_stop_the_serving_nor_let_it_run_away() -> None:
    trainer = Trainer(cost=1e-9, noise=0.1)
    trainer.serve(100)
    sent = trainer.serve(400)
    assert 0.2 * MOST_SLOWDOWN < mean(sent) * 1e-9 < 2.0 * MOST_SLOWDOWN
    assert min(one for one in sent if one) >= SLOWEST_BYTES_PER_SECOND


def test_one_stretch_in_some_is_left_alone_and_what_it_is_compared_with_is_always_new() -> None:
    """The machine has other work by now: that is not what serving costs."""
    trainer = Trainer(cost=1e-9)
    assert trainer.serve(80).count(0.0) == 80 // REST_EVERY
    before = mean(trainer.serve(40))
    trainer._cost, slower = 1e-9, 1.5
    for _ in range(200):
        trainer.serving.computes()
        rate = 0.0 if trainer.serving.rests else trainer.serving.bytes_per_second
        trainer.serving.sent(round(rate * slower * BATCH_SECONDS))
        trainer.now += slower * BATCH_SECONDS * (1.0 + 1e-9 * rate)
        trainer.serving.computed()
    assert mean(trainer.serve(8)) > 0.5 * before


def test_a_rest_ends_with_the_batch_that_it_is_for() -> None:
    trainer = Trainer(cost=1e-9)
    while not trainer.serving.rests:
        trainer.serve(1)
        trainer.serving.computes()
    trainer._batch(0.0)
    trainer.serving.computes()
    assert not trainer.serving.rests


def test_a_batch_that_never_ends_does_not_hold_newcomers_up() -> None:
    trainer = Trainer(cost=1e-9)
    while not trainer.serving.rests:
        trainer.serve(1)
        trainer.serving.computes()
    trainer.now += 60.0
    assert not trainer.serving.rests


async def nobody() -> None: ...


@pytest.mark.usefixtures("autojump_clock")
async def test_turns_go_to_the_first_in_the_line_and_to_results_before_pieces() -> None:
    pace, had = UploadPace(1000.0), list[Order]()

    async def take(order: Order) -> None:
        for _ in range(3):
            await pace.turn(1000, order, nobody)
            had.append(order)

    orders = [(1, 2, 1), (1, 1, 1), (1, 2, 0), (0, 3, 0), (1, 1, 0)]
    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        await pace.turn(2000, (0, 0, 0), nobody)  # so that all of them wait
        for order in orders:
            nursery.start_soon(take, order)
    assert had == [order for order in sorted(orders) for _ in range(3)]
    assert trio.current_time() - began == pytest.approx(16.0, abs=0.2)


@pytest.mark.usefixtures("autojump_clock")
async def test_who_waits_long_for_a_turn_is_told_that_we_are_there() -> None:
    pace, told = UploadPace(1000.0), []

    async def say_alive() -> None:
        told.append(trio.current_time())

    await pace.turn(30_000, (0, 0, 0), nobody)
    await pace.turn(1, (0, 0, 0), say_alive)
    assert len(told) >= 10
