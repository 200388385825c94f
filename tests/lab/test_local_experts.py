"""Experts in one process are as late and as unreliable as they are told to be, and learn."""

from __future__ import annotations

import copy

import pytest
import torch
import trio
import trio.testing
from torch import Tensor

from lab.bench.local_experts import LocalExperts
from models.experts import build_expert
from protocols.errors import DeadlineExceeded, Unreachable
from protocols.experts import ExpertGrid, Uid

GRID = ExpertGrid("ffn", (2, 2))
UID = GRID.at(1)
TIMEOUT = 1000.0


def some(
    *, examples_per_step: int = 1, delay_seconds: float = 0.0, failure_rate: float = 0.0
) -> LocalExperts:
    settings = {"name": "feed-forward", "width": 4, "inner": [8]}
    return LocalExperts(
        {
            GRID.at(number): build_expert(settings, seed=number).double()
            for number in range(GRID.cells)
        },
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        examples_per_step=examples_per_step,
        delay_seconds=delay_seconds,
        failure_rate=failure_rate,
    )


def rows(seed: int, count: int = 3) -> Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


async def together(experts: LocalExperts, *requests: tuple[Tensor, Tensor]) -> list[Tensor]:
    """All backward calls at once."""
    answers: dict[int, Tensor] = {}

    async def one(number: int, inputs: Tensor, grads: Tensor) -> None:
        answers[number] = await experts.backward(UID, inputs, grads, TIMEOUT)

    async with trio.open_nursery() as nursery:
        for number, request in enumerate(requests):
            nursery.start_soon(one, number, *request)
    return [answers[number] for number in range(len(requests))]


async def test_requests_that_wait_together_are_one_batch_and_one_step() -> None:
    apart, joined = some(), some()
    reference = copy.deepcopy(apart.modules[UID])
    x = torch.cat([rows(1), rows(2)]).requires_grad_()
    reference(x).backward(torch.cat([rows(3), rows(4)]))
    answers = await together(joined, (rows(1), rows(3)), (rows(2), rows(4)))
    assert joined.steps == 1
    torch.testing.assert_close(torch.cat(answers), x.grad)
    for new, old in zip(joined.modules[UID].parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(new, old - 0.1 * old.grad)
    await apart.backward(UID, rows(1), rows(3), TIMEOUT)
    await apart.backward(UID, rows(2), rows(4), TIMEOUT)
    assert apart.steps == 2


async def test_a_step_is_made_with_the_gradients_of_so_many_examples() -> None:
    experts, all_at_once = some(examples_per_step=6), some()
    before = copy.deepcopy(experts.modules[UID].state_dict())
    await experts.backward(UID, rows(1), rows(3), TIMEOUT)
    assert experts.steps == 0
    assert all(
        torch.equal(new, before[name]) for name, new in experts.modules[UID].state_dict().items()
    )
    await experts.backward(UID, rows(2), rows(4), TIMEOUT)
    assert experts.steps == 1
    await together(all_at_once, (rows(1), rows(3)), (rows(2), rows(4)))
    for name, value in experts.modules[UID].state_dict().items():
        torch.testing.assert_close(value, all_at_once.modules[UID].state_dict()[name])


async def test_forward_changes_nothing() -> None:
    experts = some()
    first = await experts.forward(UID, rows(1), TIMEOUT)
    assert torch.equal(await experts.forward(UID, rows(1), TIMEOUT), first)
    assert not first.requires_grad
    assert experts.steps == 0


async def test_calls_take_the_delay_on_average(autojump_clock: trio.testing.MockClock) -> None:  # noqa: ARG001
    experts, began = some(delay_seconds=2.0), trio.current_time()
    for _ in range(400):
        await experts.forward(UID, rows(1, 1), TIMEOUT)
    assert (trio.current_time() - began) / 400 == pytest.approx(2.0, rel=0.2)
    with pytest.raises(DeadlineExceeded):
        await some(delay_seconds=1e9).forward(UID, rows(1, 1), 0.5)


async def test_the_share_of_calls_fails_before_the_expert_has_them() -> None:
    experts, failed = some(failure_rate=0.25), 0
    for _ in range(400):
        try:
            await experts.backward(UID, rows(1, 1), rows(2, 1), TIMEOUT)
        except Unreachable:
            failed += 1
    assert failed == experts.failures == 400 - experts.steps
    assert failed / 400 == pytest.approx(0.25, rel=0.3)
    near = experts.nearby()
    for _ in range(50):
        await near.forward(UID, rows(1, 1), TIMEOUT)


async def test_the_search_finds_the_best_experts_the_best_first() -> None:
    scores = (torch.tensor([[0.0, 5.0]]), torch.tensor([[1.0, 3.0]]))
    assert await some().select(scores, 3) == [
        [Uid("ffn", (1, 1)), Uid("ffn", (1, 0)), Uid("ffn", (0, 1))]
    ]
    assert len((await some().select(scores, 9))[0]) == 4
