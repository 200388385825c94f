"""The parameters of a run are exchanged in fragments, and all peers hold the same bits of them."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import trio
from torch import Tensor, nn

from protocols.accumulation.accumulator import LOSS_VALUES
from protocols.accumulation.bridge import Bridge
from protocols.accumulation.ended import CollaborationEnded
from protocols.accumulation.events import CaughtUp, StepTaken
from protocols.accumulation.fragments import fragments_of
from protocols.accumulation.local_steps import MIXING, LocalSteps
from protocols.accumulation.optimizer import CollaborativeOptimizer
from protocols.accumulation.parameters import Parameters
from protocols.errors import ProtocolMisuse
from protocols.moshpit.layout import PartCut, ResultCut, SentParts
from protocols.moshpit.settings import CHUNK_BYTES
from tests.accumulation.training_peers import (
    SETTINGS,
    Digests,
    dies_in_exchange,
    training_world,
    wait_for_company,
)
from tests.waiting import PATIENCE_SECONDS

BLOCKS = [(f"blocks.{n}.{name}", size) for n in range(5) for name, size in (("w", 50), ("b", 5))]
SIZES = [("embedding", 300), ("positions", 40), *BLOCKS, ("norm", 5)]


# -- which parameters are in which fragment


def test_layers_are_dealt_to_the_fragments_in_turn() -> None:
    first, second = fragments_of(BLOCKS, 2)
    assert {name.rpartition(".")[0] for name in first} == {"blocks.0", "blocks.2", "blocks.4"}
    assert {name.rpartition(".")[0] for name in second} == {"blocks.1", "blocks.3"}


def test_what_is_in_no_layer_goes_where_the_fewest_values_are() -> None:
    first, second = fragments_of(SIZES, 2)  # 165 and 110 of the layers
    assert [name for name in second if "." not in name] == ["embedding"]
    assert [name for name in first if "." not in name] == ["positions", "norm"]


@pytest.mark.parametrize("count", range(1, 9))
def test_each_parameter_is_in_one_fragment_and_keeps_its_place_among_the_others(count: int) -> None:
    fragments, names = fragments_of(SIZES, count), [name for name, _ in SIZES]
    assert sorted(name for one in fragments for name in one) == sorted(names)
    assert len(fragments) == count
    for one in fragments:
        assert one
        assert list(one) == sorted(one, key=names.index)


def test_more_fragments_than_the_model_has_parts_are_refused() -> None:
    with pytest.raises(ProtocolMisuse, match=r"fragments=9 .*: 8\."):
        fragments_of(SIZES, 9)


# -- the steps, beside the algorithm of the paper


def small_model(seed: int = 3) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for one in model.parameters():
            one.copy_(torch.randn(one.shape, generator=generator, dtype=torch.float64) / 3)
    return model


def loss_of(model: nn.Module, peer: int, number: int) -> Tensor:
    dtype = next(model.parameters()).dtype
    generator = torch.Generator().manual_seed(1000 * number + peer)
    inputs = torch.randn(8, 4, generator=generator, dtype=torch.float64).to(dtype)
    wanted = torch.randn(8, 3, generator=generator, dtype=torch.float64).to(dtype)
    error: Tensor = model(inputs) - wanted
    return error.square().mean()


SGD = partial(torch.optim.SGD, lr=0.1)


def local_steps(model: nn.Module, **options: Any) -> LocalSteps:
    return LocalSteps(
        Parameters(model.named_parameters()),
        SGD,
        None,
        **{"max_norm": None, "codec": "none", "scales_loss": False, "buffers": {}, **options},
    )


def batch(model: nn.Module, steps: LocalSteps, peer: int, number: int) -> None:
    model.zero_grad()
    loss = loss_of(model, peer, number)
    loss.backward()  # type: ignore[no-untyped-call]
    assert steps.add(8, float(loss.detach())) is None


def mean_of(values: Sequence[Tensor]) -> Tensor:
    return torch.stack([one.clone() for one in values]).mean(0)


def streaming_diloco(peers: int, steps: int, every: int, tau: int) -> tuple[list[Tensor], Tensor]:
    """Algorithm 2 of the Streaming DiLoCo paper, with a fragment for each of two layers: the own
    parameters of each peer, and the global ones."""
    models = [small_model() for _ in range(peers)]
    fragments = [["0.weight", "0.bias"], ["2.weight", "2.bias"]]
    start = {name: one.detach().clone() for name, one in models[0].named_parameters()}
    momentum = {name: torch.zeros_like(one) for name, one in start.items()}
    under_way: tuple[int, list[str], dict[str, Tensor]] | None = None
    for step in range(1, steps + 1):
        for peer, model in enumerate(models):
            model.zero_grad()
            loss_of(model, peer, step - 1).backward()  # type: ignore[no-untyped-call]
            SGD(model.parameters()).step()
        own = [dict(model.named_parameters()) for model in models]
        if under_way is not None and step == under_way[0] + tau:
            _, names, moved = under_way
            for name in names:
                momentum[name] = 0.9 * momentum[name] + moved[name]
                start[name] = start[name] - 0.7 * (moved[name] + 0.9 * momentum[name])
                for one in own:
                    one[name].data = 0.5 * one[name].data + 0.5 * start[name]
        if step % every == 0:
            names = fragments[step // every % 2 - 1]
            moved = {
                name: torch.stack([start[name] - one[name].detach() for one in own]).mean(0)
                for name in names
            }
            under_way = (step, names, moved)
    flat = [torch.cat([one.detach().flatten() for one in model.parameters()]) for model in models]
    return flat, torch.cat([start[name].flatten() for name, _ in models[0].named_parameters()])


@pytest.mark.parametrize("tau", [1, 2, 3])
def test_fragments_are_streaming_diloco(tau: int) -> None:
    """A step is made beside the local steps, and is mixed in at the end of the batch."""
    assert MIXING == 0.5
    every, last = 3, 21
    models = [small_model() for _ in range(2)]
    peers = [local_steps(model, fragments=2, delayed=True) for model in models]
    taken: list[Any] = []
    for number in range(1, last + 1):
        if taken and number == taken[0] + tau:
            averaged = mean_of([one.values for one in taken[1]])
            for steps, contribution in zip(peers, taken[1], strict=True):
                assert steps.apply(averaged.clone()).loss is not None
                steps.done_with(contribution)
        for peer, (model, steps) in enumerate(zip(models, peers, strict=True)):
            batch(model, steps, peer, number - 1)
        if number % every == 0 and number < last:
            taken = [number, [steps.take() for steps in peers]]
    wanted, start = streaming_diloco(2, last, every, tau)
    for model, steps, own in zip(models, peers, wanted, strict=True):
        found = torch.cat([one.detach().flatten() for one in model.parameters()])
        torch.testing.assert_close(found, own, rtol=1e-13, atol=1e-13)
        shared = dict(steps.shared.everything)
        state = torch.cat([shared[name].detach().flatten() for name, _ in model.named_parameters()])
        torch.testing.assert_close(state, start, rtol=1e-13, atol=1e-13)


def test_a_round_has_the_values_of_one_fragment_and_the_loss() -> None:
    model = small_model()
    steps = local_steps(model, fragments=2, delayed=True)
    sizes = [one.values for one in steps.layouts]
    assert sizes == [4 * 6 + 6 + LOSS_VALUES, 6 * 3 + 3 + LOSS_VALUES]
    for epoch in range(4):
        batch(model, steps, 0, epoch)
        contribution = steps.take()
        assert contribution.values.numel() == sizes[epoch % 2]
        steps.apply(contribution.values.clone())
        steps.done_with(contribution)


def test_a_state_says_which_fragment_is_next() -> None:
    model, other = small_model(), small_model(seed=4)
    steps, newcomer = (local_steps(one, fragments=2, delayed=True) for one in (model, other))
    batch(model, steps, 0, 0)
    contribution = steps.take()
    steps.apply(contribution.values.clone())
    newcomer.restore(steps.look("run", 1, bytes(16)).copy())
    batch(model, steps, 0, 1)
    values = steps.take().values.clone()
    assert newcomer.take().values.numel() == values.numel() != contribution.values.numel()
    for one in (steps, newcomer):
        one.apply(values.clone())
    theirs = dict(newcomer.shared.everything)
    assert all(torch.equal(one, theirs[name]) for name, one in steps.shared.everything)
    assert torch.equal(steps.extra()["outer_momentum"], newcomer.extra()["outer_momentum"])


def test_what_encoding_loses_comes_back_with_the_next_round_of_its_fragment() -> None:
    """Each batch goes 3.0 and 0.1, and four bits lose the 0.1. The average is 0, so that half of
    the way is given up at the end of the batch after a round."""
    first, second = (nn.Parameter(torch.zeros(2)) for _ in range(2))
    steps = LocalSteps(
        Parameters([("0", first), ("1", second)]),
        partial(torch.optim.SGD, lr=1.0),
        None,
        max_norm=None,
        codec="blockwise-int4",
        scales_loss=False,
        buffers={},
        fragments=2,
        delayed=True,
    )
    whole = ResultCut((PartCut(1, 0, 4),), CHUNK_BYTES)
    brought = []
    for _ in range(4):
        first.grad, second.grad = (torch.tensor([3.0, 0.1]) for _ in range(2))
        assert steps.add(4) is None
        contribution = steps.take()
        brought.append(contribution.values[:2].clone())
        steps.apply(torch.zeros(4))
        steps.done_with(contribution, SentParts(whole, own=0))
    torch.testing.assert_close(brought[0], torch.tensor([3.0, 0.1]))
    torch.testing.assert_close(brought[1], torch.tensor([6.0, 0.2]))
    torch.testing.assert_close(brought[2], torch.tensor([6.0 / 2 + 3.0, 0.2 / 2 + 0.1 + 0.1]))
    torch.testing.assert_close(brought[3], torch.tensor([9.0 / 2 + 3.0, 0.3 / 2 + 0.1 + 0.2]))


def test_given_up_steps_leave_the_model_when_the_training_thread_comes_by() -> None:
    """The thread of a round may give them up, but not touch the model."""
    model = small_model()
    steps = local_steps(model, fragments=2, delayed=True)
    batch(model, steps, 0, 0)
    moved = [one.detach().clone() for one in model.parameters()]
    steps.drop()
    assert all(map(torch.equal, model.parameters(), moved))
    steps.take_over()
    assert all(map(torch.equal, model.parameters(), small_model().parameters()))


# -- whole runs

RUN = dataclasses.replace(SETTINGS, target_batch=16)
FRAGMENTS: dict[str, Any] = {"local_steps": 4, "fragments": 2}  # a step has 32 samples


def optimizer_of(model: nn.Module, bridge: Bridge, **options: Any) -> CollaborativeOptimizer:
    return CollaborativeOptimizer(model.named_parameters(), SGD, bridge, **{**FRAGMENTS, **options})


def model_for(codec: str, seed: int = 3) -> nn.Module:
    """In double precision, if the codec is for it."""
    return small_model(seed) if codec == "none" else small_model(seed).float()


def make_batch(model: nn.Module, optimizer: CollaborativeOptimizer, peer: int, number: int) -> bool:
    optimizer.zero_grad()
    loss = loss_of(model, peer, number)
    loss.backward()  # type: ignore[no-untyped-call]
    time.sleep(0.02 * (1 + peer))  # the peer's speed, not something to wait for
    return optimizer.step(samples=8, loss=loss)


@pytest.mark.slow
@pytest.mark.parametrize(
    "codec", ["none", "blockwise-int4", pytest.param("sparse-sign", marks=pytest.mark.soak)]
)
def test_all_peers_hold_the_same_bits_after_each_exchange(codec: Any) -> None:
    digests, last = Digests(), 12

    def train(bridge: Bridge, peer: int) -> list[Tensor]:
        model = model_for(codec)
        optimizer = optimizer_of(model, bridge, last_epoch=last)
        digests.watch(bridge, peer, optimizer)
        wait_for_company(bridge, 2)
        number = 0
        while optimizer.epoch < last:
            make_batch(model, optimizer, peer, number)
            number += 1
        optimizer.finish()
        return [one.detach().clone() for one in model.parameters()]

    async def main() -> None:
        settings = dataclasses.replace(RUN, codec=codec)
        async with training_world() as world:
            first, *others = await world.train(await world.peers(3, settings), train)
            for other in others:  # the model has the state's parameters when the run is complete
                assert all(map(torch.equal, first, other))

    trio.run(main)
    digests.check()
    assert max(digests.of) == last
    assert sum(len(found) == 3 for found in digests.of.values()) >= last // 2


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["none", pytest.param("sparse-sign", marks=pytest.mark.soak)])
def test_a_helper_without_data_has_the_parameters_of_the_run_in_its_model(codec: Any) -> None:
    """It has no steps of its own to mix a fragment with."""
    digests, last, helper = Digests(), 6, 2

    def train(bridge: Bridge, peer: int) -> list[Tensor]:
        model = model_for(codec)
        optimizer = optimizer_of(model, bridge, last_epoch=last, auxiliary=peer == helper)
        digests.watch(bridge, peer, optimizer)
        wait_for_company(bridge, 2)
        number = 0
        while optimizer.epoch < last:
            if peer == helper:
                optimizer.assist(epochs=1)
                state = optimizer.capture().model_tensors()
                for name, one in model.named_parameters():
                    assert torch.equal(one, state[name])
            else:
                make_batch(model, optimizer, peer, number)
            number += 1
        optimizer.finish()
        return [one.detach().clone() for one in model.parameters()]

    async def main() -> None:
        settings = dataclasses.replace(RUN, codec=codec)
        async with training_world() as world:
            first, *others = await world.train(await world.peers(3, settings), train)
            for other in others:
                assert all(map(torch.equal, first, other))

    trio.run(main)
    digests.check()


@pytest.mark.slow
@pytest.mark.parametrize("codec", [pytest.param("none", marks=pytest.mark.soak), "sparse-sign"])
def test_a_death_in_an_exchange_and_a_newcomer_change_no_bits(
    codec: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One peer dies at its second message of the fifth exchange. Another one comes later, with
    other parameters. It gets the state, goes on with the fragment that is next, and helps."""
    digests, last = Digests(), 16
    victim, newcomer = 2, 3
    far, is_dead = threading.Event(), threading.Event()
    reached = [threading.Event() for _ in range(last + 1)]  # by the newcomer
    brought: list[int] = []

    def train(bridge: Bridge, peer: int) -> list[Tensor]:
        if peer == newcomer:
            assert far.wait(PATIENCE_SECONDS)
        model = model_for(codec, seed=9 if peer == newcomer else 3)
        optimizer = optimizer_of(model, bridge, last_epoch=last)
        digests.watch(bridge, peer, optimizer)
        if peer == newcomer:
            assert any(isinstance(one, CaughtUp) for one in bridge.events)
        else:
            wait_for_company(bridge, 2)
        number = 0
        while optimizer.epoch < last:
            if peer == newcomer:
                for one in reached[: optimizer.epoch + 1]:
                    one.set()
            elif optimizer.epoch >= 10:  # the run does not end before it has helped
                assert reached[optimizer.epoch].wait(PATIENCE_SECONDS)
            make_batch(model, optimizer, peer % 3, number)
            number += 1
            if is_dead.is_set() and optimizer.epoch >= 7:
                far.set()
        optimizer.finish()
        if peer == newcomer:
            for one in reached:
                one.set()
            steps = [one for one in bridge.events if isinstance(one, StepTaken)]
            brought.extend(one.own_samples for one in steps if len(one.members) == 3)
        return [one.detach().clone() for one in model.parameters()]

    def train_or_die(bridge: Bridge, peer: int) -> list[Tensor] | None:
        try:
            return train(bridge, peer)
        except CollaborationEnded:
            assert peer == victim
            return None

    async def main() -> None:
        async with training_world() as world:
            peers = await world.peers(4, dataclasses.replace(RUN, codec=codec))
            dies_in_exchange(5, peers[victim], world, is_dead, monkeypatch)
            results = await world.train(peers, train_or_die)
            assert results[victim] is None
            first, *others = [one for one in results if one is not None]
            for other in others:
                assert all(map(torch.equal, first, other))

    trio.run(main)
    digests.check()
    assert max(digests.of) == last
    assert sum(brought) > 0


def test_a_batch_after_local_steps_that_were_given_up_brings_what_it_learned() -> None:
    """Its own step was given up as well, and its samples counted all the same."""
    model = small_model()
    steps = local_steps(model, fragments=2, delayed=True)
    batch(model, steps, 0, 0)
    steps.drop()  # at the end of a round; the training thread has not taken over
    batch(model, steps, 0, 1)
    brought = steps.take()
    assert brought.samples > 0
    assert float(brought.values[:-2].abs().max()) > 0.0
