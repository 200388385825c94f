"""Many batches are under way at once, and the loop gets the gradients of one after the other."""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
import trio
from torch import Tensor, nn

from lab.bench.local_experts import LocalExperts
from protocols.errors import PotluckError
from protocols.experts import (
    AsyncTrainer,
    DMoE,
    DoneBatch,
    ExpertGrid,
    GridGate,
    TooFewExperts,
    Uid,
)
from protocols.guest import Portal, open_portal
from tests.experts.test_layer import Closed, an_expert, visit
from tests.waiting import PATIENCE_SECONDS

WIDTH = 6


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)).double()


def batches(count: int) -> list[Tensor]:
    torch.manual_seed(4)
    return list(torch.randn(count, 5, WIDTH, dtype=torch.float64))


def loss_of(network: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = (network(batch) - batch.sum(dim=1, keepdim=True)).square().mean()
    return loss


def no_threads_are_left() -> bool:
    return not [one for one in threading.enumerate() if one.name.startswith("potluck batch")]


def test_one_batch_at_a_time_is_ordinary_training() -> None:
    """To the last bit."""
    ordinary, asynchronous = model(), model()
    losses = []
    optimizer = torch.optim.Adam(ordinary.parameters(), lr=0.01)
    for batch in batches(20):
        optimizer.zero_grad()
        loss = loss_of(ordinary, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    optimizer = torch.optim.Adam(asynchronous.parameters(), lr=0.01)
    done = []
    for one in AsyncTrainer(asynchronous, loss_of, in_flight=1).run(batches(20)):
        optimizer.step()
        optimizer.zero_grad()
        done.append(one)
    assert [one.loss for one in done] == losses
    assert [one.staleness for one in done] == [0] * 20
    for mine, theirs in zip(ordinary.parameters(), asynchronous.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_every_gradient_is_that_of_the_parameters_of_the_batchs_beginning() -> None:
    """With eight in flight, and an owner that changes the parameters after each."""
    network = model()
    history = [copy.deepcopy(network.state_dict())]  # after each turn
    twin = model()
    seen = Counter[int]()
    given = batches(60)
    numbered = {id(batch): number for number, batch in enumerate(given)}
    for turn, done in enumerate(AsyncTrainer(network, loss_of, in_flight=8).run(given)):
        seen[numbered[id(done.batch)]] += 1
        assert 0 <= done.staleness <= turn
        twin.load_state_dict(history[turn - done.staleness])
        twin.zero_grad()
        loss = loss_of(twin, done.batch)
        loss.backward()
        assert done.loss == loss.item()
        for mine, theirs in zip(network.parameters(), twin.parameters(), strict=True):
            assert mine.grad is not None
            assert theirs.grad is not None
            assert torch.equal(mine.grad, theirs.grad)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter -= 0.05 * parameter.grad
        network.zero_grad()
        history.append(copy.deepcopy(network.state_dict()))
    assert seen == dict.fromkeys(range(60), 1)
    assert no_threads_are_left()


def test_batches_are_in_flight_together_and_no_more_are_drawn_than_that() -> None:
    in_flight = 5
    together = threading.Barrier(in_flight)
    drawn: list[Tensor] = []

    def source() -> Iterator[Tensor]:
        for batch in batches(3 * in_flight):
            drawn.append(batch)
            yield batch

    def meet(network: nn.Module, batch: Tensor) -> Tensor:
        together.wait(PATIENCE_SECONDS)  # fails unless five are there at once
        return loss_of(network, batch)

    finished = 0
    for _ in AsyncTrainer(model(), meet, in_flight=in_flight).run(source()):
        finished += 1
        assert len(drawn) - finished < in_flight
    assert finished == 3 * in_flight


def test_frozen_and_unused_parameters_have_no_gradient() -> None:
    network = model()
    network[0].bias.requires_grad_(False)
    network.register_parameter("unused", nn.Parameter(torch.zeros(2)))
    for _ in AsyncTrainer(network, loss_of, in_flight=2).run(batches(4)):
        assert network[0].bias.grad is None
        assert network.get_parameter("unused").grad is None
        assert network[0].weight.grad is not None


def test_a_step_for_several_turns_has_the_sum_of_their_gradients() -> None:
    network, twin = model(), model()
    given = batches(6)
    done = list(AsyncTrainer(network, loss_of, in_flight=3).run(given))
    for one in done:  # in the same order: sums of floats depend on it
        loss_of(twin, one.batch).backward()
    for mine, theirs in zip(network.parameters(), twin.parameters(), strict=True):
        assert theirs.grad is not None
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-14, atol=0.0)


def sometimes_too_few(network: nn.Module, batch: Tensor) -> Tensor:
    if batch[0, 0] > 0.0:
        raise TooFewExperts("Nobody answers.")
    return loss_of(network, batch)


def test_a_batch_without_a_result_is_counted_and_dropped() -> None:
    given = batches(12)
    positive = sum(bool(batch[0, 0] > 0.0) for batch in given)
    assert 0 < positive < 12
    told: list[TooFewExperts] = []
    trainer = AsyncTrainer(model(), sometimes_too_few, in_flight=4, tell_dropped=told.append)
    assert len(list(trainer.run(given))) == 12 - positive
    assert trainer.dropped == len(told) == positive


def test_when_the_patience_is_over_the_last_refusal_is_raised() -> None:
    def never(network: nn.Module, batch: Tensor) -> Tensor:  # noqa: ARG001
        raise TooFewExperts("Nobody answers.")

    trainer = AsyncTrainer(model(), never, in_flight=3, patience_seconds=0.0)
    with pytest.raises(TooFewExperts, match="Nobody answers"):
        list(trainer.run(batches(10)))
    assert trainer.dropped == 1
    assert no_threads_are_left()


def test_any_other_error_is_raised_in_the_loop() -> None:
    def broken(network: nn.Module, batch: Tensor) -> Tensor:
        return loss_of(network, batch[:, :2])  # of a wrong shape

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        list(AsyncTrainer(model(), broken, in_flight=3).run(batches(10)))
    assert no_threads_are_left()


def test_a_loop_that_is_left_early_leaves_no_thread() -> None:
    for done in AsyncTrainer(model(), loss_of, in_flight=4).run(batches(40)):
        assert isinstance(done, DoneBatch)
        break
    assert no_threads_are_left()


# With experts


GRID = ExpertGrid("ffn", (2, 4))


class Mixture(nn.Module):
    def __init__(self, experts: LocalExperts, portal: Portal) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.experts = DMoE(GridGate(WIDTH, GRID), experts, portal, k=3)
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y: Tensor = self.last(x + self.experts(x))
        return y


def some_experts(*, failure_rate: float = 0.0) -> LocalExperts:
    return LocalExperts(
        {GRID.at(number): an_expert(WIDTH, number) for number in range(GRID.cells)},
        lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        failure_rate=failure_rate,
    )


@pytest.mark.slow
def test_experts_and_gate_are_trained_with_many_batches_in_flight() -> None:
    experts = some_experts(failure_rate=0.1)

    def guest(portal: Portal) -> list[float]:
        mixture = Mixture(experts, portal).double()
        optimizer = torch.optim.SGD(mixture.parameters(), lr=0.01)
        losses = []
        trainer = AsyncTrainer(mixture, loss_of, in_flight=8)
        for done in trainer.run(batches(150)):
            optimizer.step()
            optimizer.zero_grad()
            losses.append(done.loss)
        assert len(losses) + trainer.dropped == 150
        return losses

    losses = visit(guest)
    assert sum(losses[-20:]) < 0.5 * sum(losses[:20])
    assert experts.failures > 0


def test_the_end_of_the_portal_ends_the_loop_with_its_error() -> None:
    class Silent(LocalExperts):
        entered = threading.Event()

        async def forward(self, uid: Uid, inputs: Tensor, timeout: float) -> Tensor:
            self.entered.set()
            await trio.sleep_forever()
            return await super().forward(uid, inputs, timeout)

    experts = some_experts()
    experts.__class__ = Silent
    raised: list[PotluckError] = []

    def guest(portal: Portal) -> None:
        mixture = Mixture(experts, portal).double()
        with pytest.raises(Closed) as caught:
            list(AsyncTrainer(mixture, loss_of, in_flight=8).run(batches(50)))
        raised.append(caught.value)

    async def main() -> None:
        with trio.fail_after(PATIENCE_SECONDS):
            async with (
                trio.open_nursery() as threads,
                open_portal(Closed("It has closed.")) as portal,
            ):
                threads.start_soon(trio.to_thread.run_sync, guest, portal)
                await trio.to_thread.run_sync(Silent.entered.wait)

    trio.run(main)
    assert len(raised) == 1
    assert no_threads_are_left()
