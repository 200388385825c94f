"""Gradients that travel as thin factors: the equations, and nothing of a sample is lost."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import trio
from torch import Tensor, nn

from protocols.accumulation.accumulator import Contribution
from protocols.accumulation.bridge import Bridge
from protocols.accumulation.ended import CollaborationEnded
from protocols.accumulation.events import CaughtUp
from protocols.accumulation.optimizer import CollaborativeOptimizer
from protocols.accumulation.parameters import Parameters
from protocols.accumulation.powersgd import (
    BLOCK_COLUMNS,
    DAMPING,
    FACTORS,
    LEAST_DAMPING,
    add_products,
    as_matrix,
    inferred,
    orthonormal,
    product,
    solved,
    values_sent,
)
from protocols.accumulation.state_manifest import StateRefused
from protocols.accumulation.steps import GradientSteps
from protocols.accumulation.training_state import TrainingState
from protocols.errors import ProtocolMisuse
from protocols.moshpit.layout import LARGEST_AVERAGED, LARGEST_CARRIED
from tests.accumulation.training_peers import (
    SETTINGS,
    Digests,
    dies_in_exchange,
    training_world,
    wait_for_company,
)
from tests.waiting import PATIENCE_SECONDS

RANK = 2
ROWS, COLUMNS = 12, 20
SGD = partial(torch.optim.SGD, lr=0.5)
CLOSE: dict[str, float] = {"rtol": 1e-5, "atol": 1e-5}  # operands have 21 bits


class Peer:
    """A matrix and a vector, in double precision unless said otherwise."""

    def __init__(self, *, dtype: torch.dtype = torch.float64, **options: Any) -> None:
        self.matrix = nn.Parameter(torch.zeros(ROWS, COLUMNS, dtype=dtype))
        self.vector = nn.Parameter(torch.zeros(ROWS, dtype=dtype))
        self.steps = GradientSteps(
            Parameters([("matrix", self.matrix), ("vector", self.vector)]),
            SGD,
            None,
            **{
                "delayed": False,
                "max_norm": None,
                "codec": "none",
                "scales_loss": False,
                "buffers": {},
                "powersgd_rank": RANK,
                **options,
            },
        )

    def add(self, gradient: Tensor, samples: int = 1, vector: float = 0.0) -> str | None:
        self.matrix.grad = gradient.clone().to(self.matrix.dtype)
        self.vector.grad = torch.full_like(self.vector, vector)
        return self.steps.add(samples, 1.0)

    def factors(self) -> tuple[Tensor, Tensor]:
        return halves(self.steps.extra()[FACTORS])

    def state(self, epoch: int = 1) -> TrainingState:
        return self.steps.look("run", epoch, bytes(16)).copy()


def halves(flat: Tensor) -> tuple[Tensor, Tensor]:
    """Two factors: [ROWS, RANK] and [COLUMNS, RANK]."""
    first, second = flat[: (ROWS + COLUMNS) * RANK].view(-1, RANK).split((ROWS, COLUMNS))
    return first, second


def gradient(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(ROWS, COLUMNS, generator=generator, dtype=torch.float64)


def weighted_mean(contributions: Sequence[Contribution]) -> Tensor:
    samples = sum(one.samples for one in contributions)
    return sum((one.values * one.samples for one in contributions), torch.tensor(0.0)) / samples


def make_step(peers: Sequence[Peer]) -> None:
    """A round of these, and the step of each."""
    taken = [one.steps.take() for one in peers]
    averaged = weighted_mean(taken)
    for one, contribution in zip(peers, taken, strict=True):
        one.steps.apply(averaged.clone())
        one.steps.done_with(contribution)


# -- the same bits on every machine


def test_columns_become_orthonormal_and_span_what_they_did() -> None:
    factor = gradient(0)[:, :5]
    found = orthonormal(factor, "w")
    torch.testing.assert_close(found.T @ found, torch.eye(5, dtype=torch.float64), **CLOSE)
    torch.testing.assert_close(found @ (found.T @ factor), factor, **CLOSE)
    torch.testing.assert_close(found[:, 0], factor[:, 0] / factor[:, 0].norm(), **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_column_that_depends_on_others_is_replaced_by_one_of_the_name(dtype: torch.dtype) -> None:
    factor = gradient(0)[:, :4].clone().to(dtype)
    factor[:, 2] = factor[:, 0] - 3.0 * factor[:, 1]
    factor[:, 3] = 0.0
    found = orthonormal(factor, "w")
    torch.testing.assert_close(found.T @ found, torch.eye(4, dtype=dtype), rtol=0.0, atol=1e-6)
    assert torch.equal(found, orthonormal(factor, "w"))
    other = orthonormal(factor, "v")
    assert torch.equal(found[:, :2], other[:, :2])
    assert not torch.equal(found[:, 2:], other[:, 2:])


def test_columns_of_several_blocks_are_orthonormal_too() -> None:
    rank = 2 * BLOCK_COLUMNS + 3
    factor = torch.randn(300, rank, generator=torch.Generator().manual_seed(0))
    factor[:, 20] = 2.0 * factor[:, 1]  # of an earlier block
    found = orthonormal(factor, "w").double()
    eye = torch.eye(rank, dtype=torch.float64)
    torch.testing.assert_close(found.T @ found, eye, rtol=0.0, atol=1e-6)
    torch.testing.assert_close(found @ (found.T @ factor.double()), factor.double(), **CLOSE)


@pytest.mark.parametrize("rank", [18, 20, 28])
def test_small_columns_are_orthonormal_though_the_others_of_their_block_are_large(
    rank: int,
) -> None:
    """Of a gradient of few samples, most columns are only rounding, and lie along those before.
    They stayed so: columns of P had 0.6 in common, and a step was that much too long."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(size, rank, generator=generator) for size in (300, 200))
    of_few, q = left @ right.T, torch.randn(200, 32, generator=generator)
    for _ in range(3):
        p = orthonormal(of_few @ q, "w/P")
        q = orthonormal(of_few.T @ p, "w/Q")
        for found in (p.double(), q.double()):
            eye = torch.eye(32, dtype=torch.float64)
            torch.testing.assert_close(found.T @ found, eye, rtol=0.0, atol=5e-5)


@pytest.mark.parametrize("length", [300, 5_000])
def test_a_product_is_the_same_in_whatever_order_it_is_added_up(length: int) -> None:
    """An ordinary product of torch is not."""
    chance = torch.Generator().manual_seed(0)
    left, right = (torch.randn(size, length, generator=chance) for size in (40, 30))
    if length < 2048:  # longer sums are added up in pieces, one after the other
        order = torch.randperm(length, generator=chance)
        assert torch.equal(product(left, right), product(left[:, order], right[:, order]))
        assert not torch.equal(left @ right.T, left[:, order] @ right[:, order].T)
    exact = left.double() @ right.double().T
    torch.testing.assert_close(product(left, right), exact, rtol=1e-5, atol=1e-3)


def test_the_bits_do_not_depend_on_the_number_of_threads() -> None:
    """Neither on how the values lie in memory."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(size, 20, generator=generator) for size in (3_000, 500))
    results = []
    threads = torch.get_num_threads()
    try:
        for number, one in ((1, left), (3, left.T.contiguous().T)):
            torch.set_num_threads(number)
            out = torch.empty(3_000, 500)
            add_products([(one, right), (right.new_ones(3_000, 1), right[:, :1])], out)
            results.append((out, orthonormal(one, "w")))
    finally:
        torch.set_num_threads(threads)
    assert all(map(torch.equal, *results))
    wanted = left @ right.T + right[:, 0]
    torch.testing.assert_close(results[0][0], wanted, rtol=1e-4, atol=1e-4)


def test_the_first_factors_are_known_bits() -> None:
    """All versions have to begin with the same ones."""
    p, q = Peer(dtype=torch.float32).factors()
    assert [f"{float(one):.6f}" for one in (p[0, 0], p[11, 1], q[0, 0], q[19, 1])] == KNOWN


KNOWN = ["-0.213485", "-0.037876", "0.257912", "-0.087355"]


# -- which tensors


def test_vectors_and_small_matrices_travel_as_they_are() -> None:
    assert as_matrix((768, 3072), 8) == (768, 3072)
    assert as_matrix((64, 32, 3, 3), 8) == (64, 288)
    assert as_matrix((768,), 8) is None
    assert as_matrix((8, 8), 2) is not None  # 32 of 64 values
    assert as_matrix((8, 8), 3) is None
    assert as_matrix((0, 8), 1) is None
    assert values_sent((768, 3072), 8) == 8 * (768 + 3072)
    assert values_sent((768, 3072), 0) == 768 * 3072
    model = nn.Linear(3, 2)
    with pytest.raises(ProtocolMisuse, match="powersgd_rank=2 makes no tensor"):
        GradientSteps(
            Parameters(model.named_parameters()),
            SGD,
            None,
            delayed=False,
            max_norm=None,
            codec="none",
            scales_loss=False,
            buffers={},
            powersgd_rank=2,
        )


def test_a_round_averages_the_factors_and_the_rest_as_it_is() -> None:
    peer = Peer(dtype=torch.float32, codec="float16")
    (layout,) = peer.steps.layouts
    sizes = {one.name: one.values for one in layout.segments}
    assert sizes["matrix"] == RANK * (ROWS + COLUMNS)
    assert sizes["vector"] == ROWS
    assert [one.codec for one in layout.segments][:2] == ["float16", "float16"]
    peer.add(gradient(0), vector=3.0)
    assert peer.steps.take().values.numel() == layout.values


# -- the equations


def blocks(mean: Tensor, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A, B and C of a matrix: what its factors say of it."""
    y, z = mean @ q, mean.T @ p
    a = p.T @ y
    return a, z.T - (z.T @ q) @ q.T, y - p @ a


def fourth_block(mean: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """C X B, with X = A^T (A A^T + k I)^-1 and k = 0.3 |B| |C|."""
    a, b, c = blocks(mean, p, q)
    k = max(DAMPING * float(b.norm() * c.norm()), LEAST_DAMPING * float(a.norm()) ** 2)
    return c @ a.T @ torch.linalg.inv(a @ a.T + k * torch.eye(len(a), dtype=a.dtype)) @ b


def beyond_factors(matrix: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """(I - P P^T) M (I - Q Q^T)"""
    right = matrix - matrix @ q @ q.T
    return right - p @ (p.T @ right)


def test_all_step_with_what_the_factors_of_the_mean_gradient_say() -> None:
    """M~ = P Z^T + C Q^T + C X B, with Y = M Q and Z = M^T P of the mean gradient M."""
    peers = [Peer(), Peer()]
    (p, q), weights = peers[0].factors(), (3, 5)
    for number, (peer, samples) in enumerate(zip(peers, weights, strict=True)):
        peer.add(gradient(number), samples, vector=float(number))
    make_step(peers)
    mean = (3 * gradient(0) + 5 * gradient(1)) / 8
    y, z = mean @ q, mean.T @ p
    wanted = mean - beyond_factors(mean, p, q) + fourth_block(mean, p, q)
    for peer in peers:
        torch.testing.assert_close(peer.matrix.detach(), -0.5 * wanted, **CLOSE)
        assert torch.equal(peer.matrix, peers[0].matrix)
        torch.testing.assert_close(peer.vector.detach(), torch.full_like(peer.vector, -0.5 * 5 / 8))
        following = peer.factors()
        assert all(map(torch.equal, following, peers[0].factors()))
        for found, spanned in zip(following, (y, z), strict=True):
            torch.testing.assert_close(found @ (found.T @ spanned), spanned, **CLOSE)


def test_a_peer_sends_later_what_the_factors_left_out() -> None:
    """e <- (I - P P^T) M (I - Q Q^T) - C X B, by samples: 4 then count twice as much among 2 now.
    C X B is of the mean of both peers."""
    peers = [Peer(), Peer()]
    p, q = peers[0].factors()
    for number, peer in enumerate(peers):
        peer.add(gradient(number), samples=4, vector=1.0)
    make_step(peers)
    (next_p, next_q), new = peers[0].factors(), gradient(7)
    peers[0].add(new, samples=2, vector=1.0)
    found_y, found_z = halves(peers[0].steps.take().values)
    mean = (gradient(0) + gradient(1)) / 2
    rest = beyond_factors(gradient(0), p, q) - fourth_block(mean, p, q)
    torch.testing.assert_close(found_y, (new + 2.0 * rest) @ next_q, **CLOSE)
    torch.testing.assert_close(found_z, (new + 2.0 * rest).T @ next_p, **CLOSE)


@pytest.mark.parametrize("along", ["P", "Q"])
def test_what_factors_can_say_arrives_whole(along: str) -> None:
    """Columns along P, or rows along Q: the step is exact, and nothing is left for the next one."""
    peer = Peer()
    p, q = peer.factors()
    said = p @ gradient(0)[:RANK] if along == "P" else gradient(1)[:, :RANK] @ q.T
    peer.add(said)
    make_step([peer])
    torch.testing.assert_close(peer.matrix.detach(), -0.5 * said, **CLOSE)
    (p, q), new = peer.factors(), gradient(2)
    peer.add(new)
    y, z = halves(peer.steps.take().values)
    torch.testing.assert_close(y, new @ q, **CLOSE)
    torch.testing.assert_close(z, new.T @ p, **CLOSE)


@pytest.mark.slow
def test_the_fourth_block_leaves_less_of_gradients_that_lie_in_few_directions() -> None:
    """Each direction has half as much as the one before. Compared with what is left without it, in
    four runs of 40 steps."""
    halved = [torch.tensor([0.5**i for i in range(size)]) for size in (ROWS, COLUMNS)]
    shares = []
    for run in range(4):
        peer = Peer()
        left = left_without = 0.0
        brought, rest = (torch.zeros(ROWS, COLUMNS, dtype=torch.float64) for _ in range(2))
        p, q = peer.factors()
        for step in range(40):
            new = halved[0][:, None] * gradient(100 * run + step) * halved[1]
            whole = new + rest
            rest = beyond_factors(whole, p, q)
            p, q = torch.linalg.qr(whole @ q)[0], torch.linalg.qr(whole.T @ p)[0]
            left_without += float(rest.norm())
            brought += new
            peer.add(new)
            make_step([peer])
            left += float((brought + 2.0 * peer.matrix.detach()).norm())
        shares.append(left / left_without)
    assert sum(shares) / len(shares) < 0.85


@pytest.mark.parametrize("size", [1e-20, 1.0, 1e20])
def test_the_fourth_block_is_no_larger_than_the_two_beside_it(size: float) -> None:
    """Whatever a member sends: k keeps X small where A is."""
    a, b, c = (gradient(number)[:RANK] for number in range(3))
    for small in (0.0, 1e-12, 1.0, 1e12):
        found = inferred(size * small * a[:, :RANK], size * b, size * c)
        assert found is not None
        block = size * c.T @ found.T
        assert bool(block.isfinite().all())
        assert float(block.norm()) <= 1.6 * math.sqrt(float((size * b).norm() * (size * c).norm()))
    assert inferred(a[:, :RANK], 0.0 * b, c) is None or not inferred(a[:, :RANK], 0.0 * b, c).any()
    assert inferred(0.0 * a[:, :RANK], 0.0 * b, 0.0 * c) is None


def test_a_fourth_block_with_values_that_float32_cannot_hold_is_left_out() -> None:
    """C is then so small that float32 makes 0 of it, and 0 times infinity is kept for ever."""
    peer = Peer(dtype=torch.float32)
    p, q = torch.zeros(ROWS, RANK), torch.zeros(COLUMNS, RANK)
    p[0, 0] = p[1, 1] = q[0, 0] = q[1, 1] = 1.0
    p[2, 0] = 1e-40
    sends = peer.steps._powersgd
    assert sends is not None
    sends.restore(torch.cat([p, q]).view(-1))
    peer.add(gradient(0).float())
    peer.steps.take()
    averaged = torch.zeros(sends.layout.values)
    y, z = halves(averaged)
    y[0, 0], z[5, 0] = 2.0**-30, 1e30
    assert bool(sends.decoded(averaged).isfinite().all())
    assert bool(sends.done_with().values.isfinite().all())
    assert bool(sends._rest.isfinite().all())


@pytest.mark.parametrize("rank", [1, 2, 16, 40])
def test_equations_are_solved_by_gauss_and_jordan(rank: int) -> None:
    chance = torch.Generator().manual_seed(rank)
    left, right = (torch.randn(rank, rank, generator=chance, dtype=torch.float64) for _ in range(2))
    matrix = left @ left.T + 1e-6 * torch.eye(rank, dtype=torch.float64)
    before = matrix.clone()
    torch.testing.assert_close(matrix @ solved(matrix, right), right, rtol=1e-6, atol=1e-6)
    assert torch.equal(matrix, before)


@pytest.mark.parametrize("fails", [(), (0, 3, 4)])
def test_nothing_of_a_sample_is_lost(fails: tuple[int, ...]) -> None:
    """The steps with what two peers still keep are all gradients, in whatever batches they came,
    and whichever rounds have failed. All steps have 8 samples, as a target batch does."""
    peers, total = [Peer(), Peer()], torch.zeros(ROWS, COLUMNS, dtype=torch.float64)
    made = 0
    for step, first in enumerate((1, 4, 7, 2, 6, 3)):
        for number, (peer, samples) in enumerate(zip(peers, (first, 8 - first), strict=True)):
            if step - 1 in fails:
                continue  # the samples are those of the failed round
            new = gradient(2 * step + number)
            peer.add(new, samples)
            total += samples * new
        if step in fails:
            for peer in peers:
                peer.steps.put_back(peer.steps.take())
            continue
        make_step(peers)
        made += 1
    assert made >= 3
    rest = torch.zeros_like(total)
    for peer in peers:
        sends = peer.steps._powersgd
        assert sends is not None
        rest += sends._rest_samples * sends._rest[: ROWS * COLUMNS].view(ROWS, COLUMNS)
    in_steps = peers[0].matrix.detach() / -0.5 * 8
    torch.testing.assert_close(in_steps + rest, total, rtol=0.0, atol=1e-4)
    assert float(rest.norm()) > 1.0


def test_a_failed_round_is_repeated_with_the_same_values() -> None:
    peer = Peer(dtype=torch.float32)
    peer.add(gradient(0), samples=3)
    make_step([peer])
    peer.add(gradient(1), samples=2)
    taken = peer.steps.take()
    brought = taken.values.clone()
    peer.steps.put_back(taken)
    again = peer.steps.take()
    assert again.samples == 2
    assert torch.equal(again.values, brought)


def test_dropped_gradients_take_with_them_what_was_not_sent() -> None:
    """They were for another state: nothing of them is in a later round."""
    peer, new = Peer(), gradient(5)
    for is_in_round in (False, True):
        peer.add(gradient(0))
        make_step([peer])
        peer.add(gradient(1))
        if is_in_round:
            peer.steps.done_with(peer.steps.take())
        peer.steps.drop()
        (p, q), _ = peer.factors(), peer.add(new, samples=2)
        contribution = peer.steps.take()
        y, z = halves(contribution.values)
        torch.testing.assert_close(y, new @ q, **CLOSE)
        torch.testing.assert_close(z, new.T @ p, **CLOSE)
        peer.steps.done_with(contribution)
        peer.steps.drop()


@pytest.mark.parametrize("rank", [1, 2])
def test_the_average_is_not_changed_where_the_next_factors_are_made_of_it(rank: int) -> None:
    """With rank 1 in double precision, a column lies in memory as its factor does."""
    peer = Peer(powersgd_rank=rank)
    peer.add(gradient(0))
    averaged = peer.steps.take().values.clone()
    before = averaged.clone()
    y, z = before[: (ROWS + COLUMNS) * rank].view(-1, rank).split((ROWS, COLUMNS))
    peer.steps.apply(averaged)
    assert torch.equal(averaged, before)
    factors = peer.steps.extra()[FACTORS].view(-1, rank).split((ROWS, COLUMNS))
    for found, spanned in zip(factors, (y, z), strict=True):
        torch.testing.assert_close(found @ (found.T @ spanned), spanned, **CLOSE)


def test_a_peer_without_samples_keeps_what_it_has() -> None:
    peer, other = Peer(), Peer()
    peer.add(gradient(0), samples=2)
    other.add(gradient(1), samples=2)
    make_step([peer, other])
    other.add(gradient(2), samples=4)
    make_step([peer, other])
    p, _ = peer.factors()
    peer.add(torch.zeros(ROWS, COLUMNS), samples=2)
    _, z = halves(peer.steps.take().values)
    assert float(z.norm()) > 0.1  # of the first gradient
    assert torch.equal(p, other.factors()[0])


def test_delayed_steps_are_made_with_the_same_gradients() -> None:
    usual, delayed = Peer(), Peer(delayed=True)
    for number in range(3):
        for peer in (usual, delayed):
            peer.add(gradient(number))
        taken = delayed.steps.take()
        delayed.add(gradient(number + 1))  # of the next step, while this one is averaged
        delayed.steps.apply(taken.values.clone())
        delayed.steps.done_with(taken)
        delayed.steps.take_over()
        delayed.steps._accumulator.drop()
        make_step([usual])
        assert torch.equal(usual.matrix, delayed.matrix)


# -- values that cannot be sent


def test_a_gradient_that_is_not_finite_is_named_before_it_is_kept() -> None:
    peer, broken = Peer(dtype=torch.float32), gradient(0)
    broken[2, 3] = math.inf
    assert peer.add(broken) == "matrix"
    peer.add(gradient(1))
    make_step([peer])
    peer.add(gradient(2))
    assert bool(peer.steps.take().values.isfinite().all())


def test_factors_beyond_their_codec_are_cut_and_do_not_come_back() -> None:
    peer = Peer(dtype=torch.float32, codec="float16")
    largest = LARGEST_CARRIED["float16"]
    assert peer.add(torch.full((ROWS, COLUMNS), 0.9 * largest)) is None
    contribution = peer.steps.take()
    assert float(contribution.values.abs().max()) == largest
    peer.steps.apply(contribution.values.clone())
    peer.steps.done_with(contribution)
    _, q = peer.factors()
    peer.add(gradient(1))
    y, _ = halves(peer.steps.take().values)
    torch.testing.assert_close(y, (gradient(1).float() @ q), rtol=1e-5, atol=1e-5)


def test_factors_that_somebody_sends_and_nobody_could_multiply_leave_a_finite_step() -> None:
    """With `max_norm` a step is short, whatever a member sends: without factors it is, too."""
    peer = Peer(dtype=torch.float32, max_norm=1.0)
    p, q = peer.factors()
    peer.add(gradient(0))
    averaged = peer.steps.take().values.clone()
    y, z = halves(averaged)
    y.copy_((q[0].sign() * LARGEST_AVERAGED).expand_as(y))
    z.copy_((p[0].sign() * LARGEST_AVERAGED).expand_as(z))
    stepped = peer.steps.apply(averaged)
    assert stepped.norm is not None
    assert math.isfinite(stepped.norm)
    assert float(peer.matrix.detach().norm()) == pytest.approx(0.5)
    assert all(bool(one.isfinite().all()) for one in peer.factors())


# -- the state


def test_a_newcomer_has_the_factors_and_makes_the_same_steps() -> None:
    peer, newcomer = Peer(dtype=torch.float32), Peer(dtype=torch.float32)
    for number in range(2):
        peer.add(gradient(number))
        make_step([peer])
    newcomer.steps.restore(peer.state())
    assert newcomer.state().digest == peer.state().digest
    peer.add(gradient(2))
    contribution = peer.steps.take()
    for one in (peer, newcomer):
        one.steps.apply(contribution.values.clone())  # the newcomer follows by the result
    peer.steps.done_with(contribution)
    assert newcomer.state(2).digest == peer.state(2).digest


def test_a_fetched_state_ends_what_was_kept() -> None:
    peer, other = Peer(), Peer()
    for one in (peer, other):
        one.add(gradient(0))
        make_step([one])
    peer.steps.restore(other.state())
    _, q = peer.factors()
    peer.add(gradient(1))
    y, _ = halves(peer.steps.take().values)
    torch.testing.assert_close(y, gradient(1) @ q, **CLOSE)


def test_a_checkpoint_from_before_the_run_had_this_rank_begins_with_the_first_factors() -> None:
    whole, other_rank = Peer(powersgd_rank=0), Peer(powersgd_rank=1)
    for one in (whole, other_rank):
        one.add(gradient(0))
        make_step([one])
        peer, first = Peer(), Peer().factors()
        peer.add(gradient(1))
        make_step([peer])
        peer.steps.restore(one.state())
        assert all(map(torch.equal, peer.factors(), first))
        assert torch.equal(peer.matrix, one.matrix)
    whole.steps.restore(peer.state())  # and the other way


@pytest.mark.parametrize("wrong", [math.nan, 1.5])
def test_a_state_with_other_factors_is_refused(wrong: float) -> None:
    peer, broken = Peer(), Peer()
    peer.add(gradient(0))
    make_step([peer])
    broken.steps.extra()[FACTORS][3] = wrong
    before = peer.state().digest
    with pytest.raises(StateRefused, match="not orthonormal"):
        peer.steps.restore(broken.state())
    assert peer.state().digest == before


# -- whole runs

RUN = dataclasses.replace(SETTINGS, target_batch=24, grace_seconds=1.0, codec="float16")


def train(bridge: Bridge, peer: int, digests: Digests, last: int, **options: Any) -> list[Tensor]:
    """Train to this step, on a model of two layers that both have factors."""
    model = nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 10))
    chance = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for one in model.parameters():
            one.copy_(torch.randn(one.shape, generator=chance) / 3)
    optimizer = CollaborativeOptimizer(
        model.named_parameters(),
        partial(torch.optim.Adam, lr=0.01),
        bridge,
        powersgd_rank=RANK,
        max_norm=1.0,
        last_epoch=last,
        **options,
    )
    digests.watch(bridge, peer, optimizer)
    if not optimizer.epoch:
        wait_for_company(bridge, 2)
    number = 0
    while optimizer.epoch < last:
        inputs = torch.randn(8, 10, generator=chance.manual_seed(1000 * number + peer))
        optimizer.zero_grad()
        loss = (model(inputs) - inputs.flip(1)).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step(samples=8, loss=loss)
        number += 1
    optimizer.finish()
    return [one.detach().clone() for one in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("survivors", "delayed", "last"),
    [
        (2, False, 3),
        pytest.param(3, False, 12, marks=pytest.mark.soak),
        pytest.param(3, True, 12, marks=pytest.mark.soak),
    ],
)
def test_all_hold_the_same_bits_after_a_death_in_a_round_and_with_a_newcomer(
    survivors: int, delayed: bool, last: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One peer dies at its second message of the second exchange. The third survivor comes then."""
    digests, victim, newcomer = Digests(), 2, 3
    is_dead = threading.Event()

    def train_or_die(bridge: Bridge, peer: int) -> list[Tensor] | None:
        if peer == newcomer:
            assert is_dead.wait(PATIENCE_SECONDS)
        try:
            return train(bridge, peer, digests, last, delayed=delayed)
        except CollaborationEnded:
            assert peer == victim
            return None

    async def main() -> None:
        async with training_world() as world:
            peers = await world.peers(1 + survivors, RUN)
            dies_in_exchange(2, peers[victim], world, is_dead, monkeypatch)
            results = await world.train(peers, train_or_die)
            first, *others = [one for one in results if one is not None]
            assert 1 + len(others) == survivors
            for peer in peers[newcomer:]:
                assert any(isinstance(one, CaughtUp) for one in peer.bridge.events)
            for other in others:
                assert all(map(torch.equal, first, other))

    trio.run(main)
    assert is_dead.is_set()
    digests.check()
    assert max(digests.of) == last
