"""A peer clips an averaged result, makes a step with it, and scales the next loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from protocols.accumulation.local_steps import MIXING, LocalSteps, OuterStep
from protocols.accumulation.options import check_options
from protocols.accumulation.parameters import Parameters
from protocols.accumulation.state_manifest import StateRefused
from protocols.accumulation.steps import (
    GROWTH_EPOCHS,
    INITIAL_SCALE,
    LARGEST_SCALE,
    SMALLEST_SCALE,
    GradientSteps,
    InnerStep,
    LossScale,
    Steps,
    clipping_factor,
    global_norm,
)
from protocols.errors import ProtocolMisuse
from protocols.moshpit.layout import Layout, PartCut, ResultCut, SentParts
from protocols.moshpit.settings import CHUNK_BYTES
from protocols.tensors import decode_into, encode_into
from tests.devices import DEVICES

SGD = partial(torch.optim.SGD, lr=1.0)
SCALED: dict[str, Any] = {"max_norm": None, "codec": "none", "scales_loss": True, "buffers": {}}


def two() -> tuple[nn.Parameter, nn.Parameter, Parameters]:
    first, second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    return first, second, Parameters([("first", first), ("second", second)])


def averaged(
    first: float,
    second: float,
    *used_and_overflowed: float,
    loss: tuple[float, float] = (0.0, 0.0),
) -> Tensor:
    *used, overflowed = used_and_overflowed
    return torch.tensor([first] * 3 + [second] * 2 + [*used, *loss, overflowed])


def gradient_steps(own: Parameters, *, delayed: bool = False) -> GradientSteps:
    """Plain SGD at a rate of one, with a loss that is scaled."""
    return GradientSteps(own, SGD, None, delayed=delayed, **SCALED)


def local_steps(own: Parameters) -> LocalSteps:
    return LocalSteps(own, SGD, None, **SCALED)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_the_factor_is_that_of_torch(device: str) -> None:
    gradient = torch.randn(1_000_003, generator=torch.Generator().manual_seed(1)).to(device)
    norm = global_norm(gradient)
    assert norm == pytest.approx(float(gradient.double().norm()), rel=1e-12)
    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient.clone()
    torch.nn.utils.clip_grad_norm_([parameter], 0.5)
    torch.testing.assert_close(gradient * clipping_factor(norm, 0.5), parameter.grad)
    assert clipping_factor(norm, 2 * norm) == 1.0


@pytest.mark.parametrize("device", [DEVICES[1]])
def test_a_step_on_a_gpu_is_that_on_the_processor(device: str) -> None:
    found = {}
    for where in ("cpu", device):
        one = nn.Parameter(torch.ones(50_000, device=where))
        inner = InnerStep(Parameters([("p", one)]), SGD, None, 0.5)
        given = torch.linspace(-1.0, 1.0, 50_000)
        outcome = inner.apply(torch.cat([given, torch.tensor([1.0, 0.0, 0.0, 0.0])]))
        found[where] = outcome.norm, one.detach().cpu()
    assert found[device][0] == pytest.approx(found["cpu"][0], rel=1e-12)
    torch.testing.assert_close(found[device][1], found["cpu"][1])


def test_the_factor_does_not_depend_on_the_order_of_the_sum() -> None:
    norm = 3.7
    factors = {clipping_factor(norm * (1 + step * 1e-16), 1.0) for step in range(-8, 9)}
    assert len(factors) == 1


def test_the_user_has_its_own_gradients_back_after_a_step() -> None:
    first, second, own = two()
    mine = torch.full((3,), 7.0)
    first.grad = mine
    inner = InnerStep(own, SGD, None, None)
    inner.apply(averaged(0.5, 0.25, 1.0, 1.0, 0.0))
    assert first.grad is mine
    assert second.grad is None
    assert first.tolist() == [0.5] * 3
    assert second.tolist() == [0.75] * 2


def test_an_optimizer_of_other_tensors_than_it_was_given_is_refused() -> None:
    _, _, own = two()
    stranger = nn.Parameter(torch.ones(7))
    with pytest.raises(ProtocolMisuse, match=r"has 1 tensors .* of shape \(7,\)"):
        InnerStep(own, lambda pairs: torch.optim.SGD([pairs[0][1], stranger], lr=1.0), None, None)


def test_a_parameter_that_nobody_used_is_left_alone_as_in_one_process() -> None:
    first, second, own = two()
    inner = InnerStep(own, partial(torch.optim.SGD, lr=1.0, weight_decay=0.5), None, None)
    inner.apply(averaged(0.0, 0.0, 0.25, 0.0, 0.0))
    assert first.tolist() == [0.5] * 3  # a gradient of zeros, and weight decay
    assert second.tolist() == [1.0] * 2  # no gradient: not even weight decay


def test_overflowed_samples_are_not_in_the_mean_of_a_step() -> None:
    first, _, own = two()
    inner = InnerStep(own, SGD, None, None)
    stepped = inner.apply(averaged(0.3, 0.3, 0.75, 0.75, 0.25))
    assert stepped.overflowed == 0.25
    torch.testing.assert_close(first.detach(), torch.full((3,), 1.0 - 0.4))


def test_if_most_of_the_batch_overflowed_the_epoch_ends_without_a_step() -> None:
    first, _, own = two()
    inner = InnerStep(
        own,
        SGD,
        lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        None,
    )
    inner.apply(averaged(9.0, 9.0, 0.25, 0.25, 0.75))
    assert first.tolist() == [1.0] * 3
    assert inner.optimizer.param_groups[0]["lr"] == 0.5  # the schedule counts the run's epochs


def test_the_scale_halves_when_the_batch_overflows_and_grows_when_it_long_did_not() -> None:
    scale = LossScale()
    assert scale.after(0.5) == LossScale(INITIAL_SCALE / 2, 0)
    assert scale.after(0.001) == LossScale(INITIAL_SCALE, 1)  # one bad batch of one peer
    for _ in range(GROWTH_EPOCHS):
        scale = scale.after(0.0)
    assert scale == LossScale(INITIAL_SCALE * 2, 0)
    assert LossScale(SMALLEST_SCALE).after(1.0).scale == SMALLEST_SCALE
    assert LossScale(LARGEST_SCALE, GROWTH_EPOCHS).after(0.0).scale == LARGEST_SCALE
    assert LossScale.from_extra(scale.as_extra()) == scale


@pytest.mark.parametrize(
    "extra",
    [{}, {"scale": "x", "epochs_without": 0}, {"scale": math.nan, "epochs_without": 0},
     {"scale": 0.0, "epochs_without": 0}, {"scale": 4.0, "epochs_without": -1}],
)  # fmt: skip
def test_an_impossible_scale_is_refused(extra: dict[str, object]) -> None:
    with pytest.raises(StateRefused, match="no loss scale"):
        LossScale.from_extra(extra)


def test_a_peer_whose_gradients_alone_overflow_holds_them_back_instead_of_the_scale() -> None:
    first, second, own = two()
    steps = gradient_steps(own)

    def compute(value: float) -> str | None:
        first.grad, second.grad = torch.full((3,), value), torch.full((2,), value)
        return steps.add(4)

    assert compute(math.inf) is None  # counted as overflowed: perhaps it is the scale
    steps.done_with(steps.take())
    steps.apply(averaged(0.1, 0.1, 0.75, 0.75, 0.25))  # but the others' did not
    assert compute(math.inf) == "first"
    assert compute(1.0) is None
    assert compute(math.inf) is None  # and so it is trusted again


def test_the_loss_of_a_step_is_that_of_the_samples_that_had_one() -> None:
    _, _, own = two()
    inner = InnerStep(own, SGD, None, None)
    stepped = inner.apply(averaged(0.5, 0.25, 1.0, 1.0, 0.0, loss=(1.5, 0.75)))
    assert stepped.loss == 2.0
    stepped = inner.apply(averaged(0.5, 0.25, 1.0, 1.0, 0.0))
    assert stepped.loss is None


@pytest.mark.parametrize("make", [gradient_steps, local_steps])
def test_the_losses_of_all_batches_are_averaged_by_samples(
    make: Callable[[Parameters], GradientSteps | LocalSteps],
) -> None:
    first, second, own = two()
    steps = make(own)

    def batch(samples: int, loss: float | None) -> None:
        first.grad, second.grad = torch.zeros(3), torch.zeros(2)
        assert steps.add(samples, loss) is None

    batch(8, 4.0)
    batch(24, 2.0)
    steps.put_back(steps.take())  # the round failed
    batch(32, 1.5)
    batch(8, None)
    batch(8, 1e40)  # no loss at all: it would be infinite in the mean of all
    assert steps.apply(steps.take().values).loss == 2.0
    batch(8, None)
    assert steps.apply(steps.take().values).loss is None


@pytest.mark.parametrize("local", [False, True])
def test_a_batch_that_overflows_at_the_smallest_scale_is_held_back_by_name(local: bool) -> None:
    """NaN counts as an overflow while a smaller scale could help."""
    first, second, own = two()
    steps: Steps = local_steps(own) if local else gradient_steps(own)
    for _ in range(20):
        first.grad, second.grad = torch.full((3,), math.nan), torch.ones(2)
        found = steps.add(4)
        if found is not None or local:
            continue
        steps.done_with(steps.take())
        steps.apply(averaged(0.0, 0.0, 0.0, 0.0, 1.0))
    assert found == "first"
    assert steps.scale.scale == SMALLEST_SCALE
    assert first.tolist() == [1.0] * 3


def test_a_batch_is_divided_by_the_scale_it_was_computed_with() -> None:
    """With delayed steps, the step that changes the scale is made during a batch."""
    first, second, own = two()
    steps = gradient_steps(own, delayed=True)
    factor = steps.loss_factor
    first.grad, second.grad = torch.full((3,), factor), torch.full((2,), factor)
    steps.apply(averaged(0.1, 0.1, 0.75, 0.75, 0.25))
    assert steps.scale.scale == factor / 2
    assert steps.add(4) is None
    assert steps.take().values[:5].tolist() == [1.0] * 5
    steps.take_over()
    assert steps.loss_factor == factor / 2


def test_the_outer_step_is_torchs_nesterov() -> None:
    start = torch.randn(50, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    outer = OuterStep(start.clone())
    reference = nn.Parameter(start.clone())
    sgd = torch.optim.SGD([reference], lr=0.7, momentum=0.9, nesterov=True)
    for seed in range(5):
        local = start + torch.randn(50, generator=torch.Generator().manual_seed(seed)).double()
        difference = outer.pseudo_gradient(local, torch.empty_like(local))
        reference.grad = reference.detach() - local
        outer.step(difference)
        sgd.step()
        torch.testing.assert_close(outer.start, reference.detach(), rtol=1e-13, atol=1e-13)


# What a coarse codec loses of pseudo-gradients. The model has 5 values: 3.0 is the largest of each
# block, so its scale is 3/7, and 0.1 is rounded away.

WHOLE = ResultCut((PartCut(1, 0, 7),), CHUNK_BYTES)
TO_ANOTHER, TO_ITSELF = SentParts(WHOLE, own=0), SentParts(WHOLE, own=1)


def one_with_a_coarse_codec(codec: str = "blockwise-int4") -> tuple[LocalSteps, Callable[[], None]]:
    """Local steps of one peer, and a batch of it, after which it has gone 3.0 and 0.1, 0.1, ..."""
    first, second, own = two()
    steps = LocalSteps(own, SGD, None, **(SCALED | {"codec": codec, "scales_loss": False}))

    def batch() -> None:
        first.grad, second.grad = torch.tensor([3.0, 0.1, 0.1]), torch.tensor([3.0, 0.1])
        assert steps.add(4) is None

    return steps, batch


def arrived(values: Tensor) -> Tensor:
    """What the others got of a contribution."""
    got = values.clone()
    for chunk in TO_ANOTHER.chunks(one_with_a_coarse_codec()[0].layouts[0]):
        encoded = bytearray(chunk.encoded_bytes)
        encode_into(values[chunk.start : chunk.stop], chunk.codec, encoded, name="values")
        decode_into(got[chunk.start : chunk.stop], chunk.codec, encoded, "float32")
    return got


def in_a_step(steps: LocalSteps, sent: SentParts | None) -> Tensor:
    """A round and its step. Returns what was brought to it."""
    contribution = steps.take()
    brought = contribution.values.clone()
    steps.apply(arrived(brought))
    steps.done_with(contribution, sent)
    return brought[:5]


def test_what_encoding_loses_is_added_up_until_it_arrives() -> None:
    steps, batch = one_with_a_coarse_codec()
    total = torch.zeros(5)
    for number in range(1, 21):
        batch()
        contribution = steps.take()
        total += arrived(contribution.values)[:5]
        owed = torch.tensor([3.0, 0.1, 0.1, 3.0, 0.1]) * number - total
        assert float(owed.abs().max()) <= 3.0 / 14 * 1.1, "never more than one rounding"
        steps.apply(arrived(contribution.values))
        steps.done_with(contribution, TO_ANOTHER)
    assert float(total[1]) > 1.7
    assert float(arrived(torch.tensor([3.0, 0.1, 0.1, 3.0, 0.1, 0.0, 0.0]))[1]) == 0.0


def test_the_part_that_a_peer_reduces_itself_loses_nothing() -> None:
    steps, batch = one_with_a_coarse_codec()
    batch()
    first = in_a_step(steps, TO_ITSELF)
    batch()
    torch.testing.assert_close(in_a_step(steps, TO_ITSELF), first)


def test_after_a_failed_round_what_was_lost_goes_into_the_next_one_once() -> None:
    steps, batch = one_with_a_coarse_codec()
    batch()
    in_a_step(steps, TO_ANOTHER)
    batch()
    failed = steps.take()
    brought = failed.values[:5].clone()
    steps.put_back(failed)
    torch.testing.assert_close(in_a_step(steps, TO_ANOTHER), brought)


def test_a_round_without_samples_changes_nothing_of_what_was_lost() -> None:
    steps, batch = one_with_a_coarse_codec()
    batch()
    in_a_step(steps, TO_ANOTHER)
    in_a_step(steps, TO_ANOTHER)  # with weight 0: nobody got its values
    batch()
    torch.testing.assert_close(in_a_step(steps, TO_ANOTHER)[1], torch.tensor(0.2))


def forgets_unknown(steps: LocalSteps) -> None:
    in_a_step(steps, None)


def forgets_restored(steps: LocalSteps) -> None:
    steps.restore(steps.look("run", 1, bytes(16)).copy())


@pytest.mark.parametrize("forget", [LocalSteps.drop, forgets_unknown, forgets_restored])
def test_what_was_lost_goes_with_the_local_steps(forget: Callable[[LocalSteps], None]) -> None:
    """When they are dropped, when nobody knows how they were sent, and when a state came."""
    steps, batch = one_with_a_coarse_codec()
    batch()
    first = in_a_step(steps, TO_ANOTHER)
    forget(steps)
    batch()
    torch.testing.assert_close(in_a_step(steps, TO_ANOTHER), first)


@pytest.mark.parametrize("codec", ["none", "float16"])
def test_other_codecs_lose_too_little_to_be_worth_a_copy_of_the_parameters(codec: str) -> None:
    steps, batch = one_with_a_coarse_codec(codec)
    batch()
    first = in_a_step(steps, TO_ANOTHER)
    batch()
    torch.testing.assert_close(in_a_step(steps, TO_ANOTHER), first)


# What a sparse codec sends. Two tensors have 10 and 5 values, of which one in four goes in a round.


class SparsePeer:
    """Local steps whose values travel as sparse-sign, all of them to another peer. With two
    fragments, each has one of the tensors."""

    def __init__(self, start: float = 1.0, *, fragments: int = 1) -> None:
        self.tensors = nn.Parameter(torch.full((10,), start)), nn.Parameter(torch.full((5,), start))
        named = zip(("first", "second"), self.tensors, strict=True)
        settings = SCALED | {"codec": "sparse-sign", "scales_loss": False}
        self.steps = LocalSteps(
            Parameters(named), SGD, None, fragments=fragments, delayed=fragments > 1, **settings
        )

    def batch(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        for one in self.tensors:
            one.grad = torch.randn(one.shape, generator=generator)
        assert self.steps.add(4) is None

    def ahead(self) -> Tensor:
        """How far its parameters are from the state's."""
        shared = torch.cat([one.detach().view(-1) for one in self.steps.shared.tensors])
        return shared - torch.cat([one.detach() for one in self.tensors])

    def arrived(self, values: Tensor) -> Tensor:
        got = values.clone()
        for chunk in self.sent(values).chunks(self.layout_of(values)):
            encoded = bytearray(chunk.encoded_bytes)
            encode_into(values[chunk.start : chunk.stop], chunk.codec, encoded, name="values")
            decode_into(got[chunk.start : chunk.stop], chunk.codec, encoded, "float32")
        return got

    def sent(self, values: Tensor, own: int = 0) -> SentParts:
        """How the values of a round went, all of them to the peer in place 1."""
        return SentParts(ResultCut((PartCut(1, 0, len(values)),), CHUNK_BYTES), own)

    def layout_of(self, values: Tensor) -> Layout:
        return next(one for one in self.steps.layouts if one.values == len(values))

    def step(self, *, alone: bool = False) -> tuple[Tensor, Tensor]:
        """A round and its step: what was brought to it, and what arrived."""
        contribution = self.steps.take()
        brought = contribution.values.clone()
        arrived = brought if alone else self.arrived(brought)
        sent = None if alone else self.sent(brought)
        self.steps.apply(arrived.clone())
        self.steps.done_with(contribution, sent)
        return brought[:-2], arrived[:-2]


PLACES = torch.tensor([*range(10), *range(5)]) % 4  # of the values in their tensors


def test_in_four_rounds_each_value_of_a_sparse_tensor_is_sent_once() -> None:
    peer = SparsePeer()
    for epoch in range(9):
        peer.batch(epoch)
        difference = peer.ahead()
        brought, _ = peer.step()
        assert torch.equal(brought, torch.where(epoch % 4 == PLACES, difference, 0.0))
        assert int(brought.count_nonzero()) == int((epoch % 4 == PLACES).sum())


@pytest.mark.parametrize("alone", [False, True])
def test_what_is_not_sent_stays_in_the_parameters_of_the_peer(alone: bool) -> None:
    """Also what was lost of the signs. A peer that makes the step alone has lost nothing."""
    peer = SparsePeer()
    for epoch in range(6):
        peer.batch(epoch)
        difference = peer.ahead()
        _, arrived = peer.step(alone=alone)
        torch.testing.assert_close(peer.ahead(), difference - arrived)
        if alone:
            assert float(peer.ahead()[epoch % 4 == PLACES].abs().max()) < 1e-5
    before = peer.steps.shared.tensors[0].clone()
    peer.steps.drop()
    assert torch.equal(peer.tensors[0], before)
    assert not bool(peer.ahead().any())


def test_a_round_that_a_peer_had_no_samples_for_takes_nothing_out_of_its_parameters() -> None:
    peer = SparsePeer()
    peer.batch()
    peer.step()
    difference = peer.ahead()
    peer.step()  # with weight 0: nobody got its values
    torch.testing.assert_close(peer.ahead(), difference)


def test_after_a_failed_round_the_same_values_are_sent() -> None:
    peer = SparsePeer()
    peer.batch()
    failed = peer.steps.take()
    brought = failed.values[:15].clone()
    peer.steps.put_back(failed)
    assert torch.equal(peer.step()[0], brought)


@pytest.mark.parametrize("fragments", [1, 2])
def test_whose_turn_it_is_comes_with_the_state(fragments: int) -> None:
    old, new = SparsePeer(fragments=fragments), SparsePeer(fragments=fragments)
    for epoch in range(6):
        old.batch(epoch)
        old.step()
    new.steps.restore(old.steps.look("run", 6, bytes(16)).copy())
    old.steps.drop()
    old.batch()
    new.batch()
    assert torch.equal(old.step()[0], new.step()[0])


# Two fragments, each of one tensor, while local steps go on beside the exchange.


@dataclass
class Beside:
    """A round of a fragment, and the batch that was computed beside it."""

    brought: Tensor
    lost: Tensor
    """Of what was brought; where nothing was brought, nothing."""
    before: Tensor
    """Its own at the end of the batch."""
    after: Tensor
    """Its own when the step was mixed in."""
    moved: Tensor
    """How far theta_start went."""
    start: Tensor
    """theta_start after the step."""


def beside(peer: SparsePeer, epoch: int, to: str = "another") -> Beside:
    """A batch, then a round of the epoch's fragment, whose average is a quarter of what this peer
    brought, and a second batch beside it."""
    own = peer.tensors[epoch % 2].detach()
    shared = list(peer.steps.shared.tensors)[epoch % 2].detach()
    peer.batch(2 * epoch)
    at_start, start_before = own.clone(), shared.clone()
    contribution = peer.steps.take()
    brought = contribution.values.clone()
    arrived = peer.arrived(brought) if to == "another" else brought
    sent = {"another": peer.sent(brought), "itself": peer.sent(brought, own=1), "nobody": None}[to]
    for one in peer.tensors:
        one.grad = torch.full_like(one, 0.25)
    before = own - 0.25
    peer.steps.apply(arrived / 4)
    peer.steps.done_with(contribution, sent)
    assert torch.equal(own, at_start), "the thread of a round changed the model"
    assert peer.steps.add(4) is None  # mixes it in, at the end of the batch
    values = slice(own.numel())
    return Beside(
        brought[values],
        (brought - arrived)[values],
        before,
        own.clone(),
        shared - start_before,
        shared.clone(),
    )


@pytest.mark.parametrize("fragments", [1, 2])
def test_each_fragment_has_its_own_turns(fragments: int) -> None:
    """Each visit of a fragment sends the next places, whatever the number of fragments is."""
    peer = SparsePeer(fragments=fragments)
    for epoch in range(9 * fragments):
        peer.batch(epoch)
        contribution = peer.steps.take()
        one = peer.tensors[epoch % fragments] if fragments > 1 else torch.cat(peer.tensors)
        places = PLACES[: one.numel()]
        values = contribution.values[: one.numel()]
        assert torch.equal(values != 0.0, places == epoch // fragments % 4)
        peer.steps.apply(torch.zeros_like(contribution.values))
        peer.steps.done_with(contribution, None)


@pytest.mark.parametrize("to", ["another", "itself", "nobody"])
def test_only_what_was_exchanged_is_mixed_in(to: str) -> None:
    """As in Streaming DiLoCo, of own values without what encoding has lost. All others move along
    with the run's, so that what is not sent yet is as far from them as before."""
    peer = SparsePeer(fragments=2)
    for epoch in range(10):
        found = beside(peer, epoch, to)
        due = PLACES[: found.after.numel()] == epoch // 2 % 4
        mixed = MIXING * (found.before + found.lost) + (1 - MIXING) * found.start - found.lost
        followed = found.before + found.moved
        torch.testing.assert_close(found.after, torch.where(due, mixed, followed))
        if len(found.lost) == 10:  # of the other, one value is due at a time
            assert bool(found.lost.any()) is (to == "another")


def test_a_peer_without_samples_keeps_all_that_it_has_not_sent() -> None:
    """And goes where the others go: what it did not follow would pull them back later."""
    peer = SparsePeer(fragments=2)
    peer.batch()
    peer.steps.take()  # from now on it has no samples
    difference = peer.ahead()
    for epoch in range(16):
        contribution = peer.steps.take()
        assert not contribution.samples
        values = contribution.values.clone()
        peer.steps.apply(torch.full_like(values, 0.01))
        peer.steps.done_with(contribution, peer.sent(values))
        peer.steps.take_over()
        torch.testing.assert_close(peer.ahead(), difference)
        assert epoch % 2 or float(peer.steps.shared.tensors[0].detach().max()) < 1.0


def test_after_a_failed_round_beside_local_steps_everything_is_sent() -> None:
    peer = SparsePeer(fragments=2)
    peer.batch(0)
    peer.steps.put_back(peer.steps.take())
    peer.batch(1)
    difference = peer.ahead()[:10]
    contribution = peer.steps.take()
    assert torch.equal(contribution.values[:10], torch.where(PLACES[:10] == 0, difference, 0.0))
    assert contribution.samples == 8


def test_given_up_fragments_leave_nothing_in_the_parameters() -> None:
    peer = SparsePeer(fragments=2)
    for epoch in range(3):
        beside(peer, epoch)
    contribution = peer.steps.take()
    peer.steps.done_with(contribution)  # as a round that was in vain ends
    peer.steps.drop()
    peer.steps.take_over()
    assert not bool(peer.ahead().any())


def options(**changed: object) -> dict[str, object]:
    usual: dict[str, object] = {
        "delayed": False,
        "local_steps": 1,
        "fragments": 1,
        "max_norm": None,
        "average_parameters_every": 0,
        "last_epoch": 0,
        "precision": "float32",
        "auxiliary": False,
        "codec": "none",
        "powersgd_rank": 0,
        "approximate": False,
    }
    return {**usual, **changed}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"delayed": True, "local_steps": 10}, "delayed=True and local_steps > 1"),
        ({"average_parameters_every": 5, "local_steps": 10}, "average_parameters_every and local"),
        ({"delayed": True, "auxiliary": True}, "auxiliary=True and delayed=True"),
        ({"local_steps": 0}, "local_steps=0"),
        ({"fragments": 0}, "fragments=0"),
        ({"fragments": 4}, "fragments=4 does not go without local_steps > 1"),
        (
            {"fragments": 4, "local_steps": 10},
            "local_steps=10 cannot be divided .* local_steps to 12",
        ),
        ({"max_norm": -1.0}, "max_norm=-1.0"),
        ({"precision": "fp8"}, 'precision="fp8"'),
        ({"average_parameters_every": -1}, "average_parameters_every=-1"),
        ({"last_epoch": -1}, "last_epoch=-1"),
        ({"codec": "sparse-sign"}, "sparse-sign goes with local_steps > 1"),
        ({"codec": {"weight": "sparse-sign"}}, "sparse-sign goes with local_steps > 1"),
        ({"powersgd_rank": -1}, "powersgd_rank=-1 is no rank"),
        ({"powersgd_rank": 1025}, "powersgd_rank=1025 is no rank; it is 1 to 1,024"),
        (
            {"powersgd_rank": 8, "local_steps": 10},
            "powersgd_rank=8 and local_steps=10 do not go together",
        ),
        (
            {"powersgd_rank": 8, "approximate": True},
            "powersgd_rank=8 and approximate=True do not go together",
        ),
    ],
)
def test_options_that_contradict_each_other_are_refused_by_name(
    wrong: dict[str, object], words: str
) -> None:
    with pytest.raises(ProtocolMisuse, match=words):
        check_options(**options(**wrong))  # type: ignore[arg-type]
