"""Gradients as products of thin matrices: PowerSGD (Vogels et al. 2019), with one exchange a step.

    sends = PowerSGD(parameters, layout, rank=8)   # layout: of whole contributions
    contribution = sends.shortened(whole)          # Y_i = M_i Q, Z_i = M_i^T P: a round averages it
    whole = sends.decoded(averaged)                # the same bits at all peers
    whole = sends.done_with()                      # it is in a step; or sends.put_back()

The gradient M of a weight, n x m, is projected on both sides. P (n x r) and Q (m x r) have
orthonormal columns, and all peers have the same ones. Y and Z are linear in M, so the ordinary
average of the peers' Y_i and Z_i is that of the mean gradient, and one round is enough:

    M_i    <- g_i + e_i                                     what is left from before, and new
    Y, Z    = M Q, M^T P                                    averaged over the peers
    A, B, C = P^T Y, Z^T - (Z^T Q) Q^T, Y - P A
    X       = A^T (A A^T + k I)^-1,  k = 0.3 |B| |C|
    M~      = P Z^T + C Q^T + C X B                         what all step with
    e_i    <- (I - P P^T) M_i (I - Q Q^T) - C X B           with the averaged A, B and C
    P, Q   <- orth(Y), orth(Z)                              for the next step

So P and Q follow a power iteration that goes on from step to step (the warm start). In the bases
that begin with P and Q, M has the blocks A and B above C and D. D is what no factor says; if M were
of rank r, it would be C A^-1 B (Nystroem), and C X B is that, damped where A says little beside B
and C. The original algorithm exchanges twice in each step, so that Z is of orth(Y). That leaves 22
to 37 % less for later (rank 16, gradients of the default model), and C X B about half as much less.

A peer keeps what the factors do not say of its own gradient, less the D that all stepped with, and
not its distance to the mean: the sum over the peers is the same. It is kept by samples: with n
samples then and n' now, e_i counts n / n' times as much. So nothing of a sample is lost, it is only
late. Vectors and small matrices travel as they are.

In this file: `as_matrix`, which weights have factors; `product` and `orthonormal`, whose bits are
the same on every machine; `PowerSGD`, what one peer keeps.

Promises: the decoded gradient and `factors` (P and Q) have the same bits at all peers. They are
made from averaged bits by sums in an order that is written here, and by products of matrices in
which nothing is rounded, so that their order does not matter. The factors are part of the state, so
a newcomer has them. What a peer keeps for itself (e_i) is no part of it: it is lost when the peer
ends, fetches a state, or drops its gradients.

Easy to get wrong: an ordinary matrix product of torch adds up in another order on each machine, and
with each number of threads. It is for a peer's own values only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Final

import torch
from blake3 import blake3
from torch import Tensor

from protocols.accumulation.accumulator import Contribution
from protocols.accumulation.parameters import Parameters
from protocols.accumulation.state_manifest import StateRefused
from protocols.errors import ProtocolMisuse
from protocols.moshpit.layout import LARGEST_CARRIED, Layout, Segment
from protocols.tensors import within

LARGEST_RANK: Final = 1024

AT_MOST: Final = 0.5
"""A matrix has factors if both together have at most this share of its values. Otherwise it is sent
as it is: it would be little shorter, and exact."""

LARGEST_FACTOR: Final = 1e30  # products of these, and their sums, are finite in float32

LARGEST_ORTHONORMAL: Final = 1.001  # with rounding

DAMPING: Final = 0.3  # k / (|B| |C|): measured on gradients of the default model, of ranks 4 to 16
LEAST_DAMPING: Final = 1e-9  # k / |A|^2: then the inverse is exact enough in float64

FEW: Final = 1e-4
"""If less is left of a column, in squares, after the columns before it were taken out, that is done
again: the first time, it was rounded by the measure of all of it."""

LITTLE: Final = 1e-10
"""If less is left of a column, in squares, after the columns before it were taken out, that is only
rounding. Then another column is taken."""

EXACT_BITS: Final = 21
EXACT_TERMS: Final = 1 << 11
SMALLEST_ROW: Final = 2.0**-450  # so that products stay far above what float64 rounds to zero
BLOCK_COLUMNS: Final = 16  # products of matrices take out the blocks before; within one, by hand

VALUES_AT_ONCE: Final = 1 << 19
"""Values of a product that are made at a time: 4 MiB in float64, which stays in a cache."""

FACTORS: Final = "powersgd"
"""The name of P and Q in a state."""

_FIRST = b"potluck powersgd 1\0"


def as_matrix(shape: Sequence[int], rank: int) -> tuple[int, int] | None:
    """Rows and columns of a weight that is sent as factors; None if it is sent as it is."""
    if len(shape) < 2 or not rank:
        return None
    rows, columns = shape[0], math.prod(shape[1:])
    is_shorter = 0 < rank * (rows + columns) <= AT_MOST * rows * columns
    return (rows, columns) if is_shorter else None


def values_sent(shape: Sequence[int], rank: int) -> int:
    """How many values a round averages of a weight; without a rank (0), all of them."""
    matrix = as_matrix(shape, rank)
    return math.prod(shape) if matrix is None else rank * sum(matrix)


def check_rank(shapes: Sequence[Sequence[int]], rank: int) -> None:
    """ProtocolMisuse if none of a model's weights, of these shapes, is sent as factors."""
    if not any(as_matrix(shape, rank) for shape in shapes):
        raise ProtocolMisuse(
            f"powersgd_rank={rank} makes no tensor of this model shorter.",
            why="A matrix of n x m values is sent as (n + m) x rank values if these are at most "
            "half as many.",
            advice="Take a smaller rank, or leave powersgd_rank out.",
        )


# ---- the same bits on every machine


def product(left: Tensor, right: Tensor) -> Tensor:
    """left right^T in float64, of operands that are rounded first (`rounded`).

    left: [rows, any]; right: [columns, any]; result: [rows, columns]
    """
    left, right = rounded(left), rounded(right)
    total = left[:, :EXACT_TERMS] @ right[:, :EXACT_TERMS].T
    for start in range(EXACT_TERMS, left.shape[1], EXACT_TERMS):
        here = slice(start, start + EXACT_TERMS)
        total += left[:, here] @ right[:, here].T
    return total


def add_products(pairs: Sequence[tuple[Tensor, Tensor]], out: Tensor) -> None:
    """out = the sum of left right^T over these pairs: as `product`, with fewer than EXACT_TERMS
    columns of each, and rounded once to the type of `out`."""
    exact = [(rounded(left), rounded(right).T) for left, right in pairs]
    rows = max(1, VALUES_AT_ONCE // out.shape[1])
    for start in range(0, len(out), rows):
        here = slice(start, start + rows)
        out[here] = reduce(torch.add, [left[here] @ right for left, right in exact])


def rounded(values: Tensor) -> Tensor:
    """In float64, each row rounded to multiples of 2^-21 of the power of two that is above all of
    it. Then a product of two has at most 42 bits, and a sum of 2^11 such products, of one row with
    another, at most 53. Float64 has as many, so in whatever order a machine adds them up, nothing
    is rounded.

    values: [any, any]

    Easy to get wrong: rows are columns of a factor, and a small one must not be rounded by a large
    one's measure. It would lose its parts along the columns before, and keep them.
    """
    wide = values.to(torch.float64)
    largest = wide.abs().amax(dim=1, keepdim=True).clamp_(min=SMALLEST_ROW)
    unit = largest / torch.frexp(largest).mantissa * 2.0**-EXACT_BITS  # a power of two, exactly
    return (wide / unit).round_().mul_(unit)


def orthonormal(factor: Tensor, name: str) -> Tensor:
    """Orthonormal columns that span what the factor's do, or more. `name`: of the factor.

    factor: [length, rank], finite

    Gram-Schmidt in float64, block by block. A column that depends on those before it, as all do of
    a gradient of zeros, is replaced by one that only depends on the name.
    """
    columns = columns_of(factor)
    sizes = sum_by_halves(columns * columns).tolist()
    for start in range(0, len(columns), BLOCK_COLUMNS):
        block = columns[start : start + BLOCK_COLUMNS]
        take_out(block, columns[:start], times=2)  # the second one: what rounding has left
        for place, column in enumerate(block, start):
            one, before, square = columns[place : place + 1], columns[:place], _square(column)
            if LITTLE * sizes[place] < square <= FEW * sizes[place]:
                take_out(one, before, times=2)  # rounding has left as much of the others as that
                square = _square(column)
            if not LITTLE * sizes[place] < square < math.inf:
                column.copy_(_some_column(name, place, len(column)))
                take_out(one, before, times=2)
                square = _square(column)
            column.mul_(1.0 / math.sqrt(square))
            others = block[place - start + 1 :]
            others.sub_(sum_by_halves(others * column)[:, None] * column)
    return columns.T.to(factor.dtype).contiguous()


def columns_of(factor: Tensor) -> Tensor:
    """The columns of a factor as rows in float64, in memory of their own.

    factor: [length, rank]; result: [rank, length]
    """
    own = torch.contiguous_format
    return factor.T.to(torch.float64, copy=True, memory_format=own)


def take_out(columns: Tensor, units: Tensor, times: int = 1) -> None:
    """Subtract from each column its parts along these, which are orthonormal: y - P (P^T y).

    columns: [any, length]; units: [any, length]; both in float64
    """
    for _ in range(times if len(units) else 0):
        columns.sub_(product(product(columns, units), units.T))


def inferred(a: Tensor, b: Tensor, c: Tensor) -> Tensor | None:
    """(X B)^T, so that C X B stands for the block that no factor says; None if it would be nothing.

    a: [rank, rank]; b: [rank, columns]; c: [rank, rows], the columns of C; result: [columns, rank]
    """
    size = math.sqrt(_square_of_all(b) * _square_of_all(c))
    k = max(DAMPING * size, LEAST_DAMPING * _square_of_all(a))
    if not 0.0 < k < math.inf:
        return None
    damped = product(a, a)
    damped.diagonal().add_(k)
    return product(b.T, solved(damped, a).T)


def solved(matrix: Tensor, right: Tensor) -> Tensor:
    """matrix^-1 right, by Gauss and Jordan. The pivots are on the diagonal.

    matrix: [rank, rank], symmetric and positive definite; right: [rank, any]; both in float64
    """
    both = torch.cat([matrix, right], dim=1)
    for place, row in enumerate(both):
        row.mul_(1.0 / float(row[place]))
        factors = both[:, place].clone()
        factors[place] = 0.0
        both.sub_(factors[:, None] * row)
    return both[:, len(matrix) :]


def _square_of_all(values: Tensor) -> float:
    return float(sum_by_halves(sum_by_halves(values * values)))


def _square(column: Tensor) -> float:
    return float(sum_by_halves(column * column))


def sum_by_halves(values: Tensor) -> Tensor:
    """The sum over the last dimension, in an order that does not depend on the machine: the second
    half is added to the first, until one is left. Changes the values."""
    length = values.shape[-1]
    while length > 1:
        half = (length + 1) // 2
        values[..., : length - half].add_(values[..., half:length])
        length = half
    return values[..., 0]


def _some_column(name: str, place: int, length: int) -> Tensor:
    """Numbers from -1 to 1 that only depend on this: the digest of the name, as whole numbers."""
    digest = blake3(_FIRST + place.to_bytes(4, "big") + name.encode()).digest(2 * length)
    whole = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(torch.float64)
    return (whole[0::2] * 256.0 + whole[1::2]) / 32768.0 - 1.0


# ---- what one peer keeps


@dataclass(frozen=True)
class _Part:
    """One tensor: its place in the whole vector and in the one that is sent; if it is sent as
    factors, their place among all of them, and its rows and columns."""

    name: str
    whole: slice
    sent: slice
    factors: slice
    shape: tuple[int, int] | None
    largest: float

    def pair(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Two factors that lie one after the other: [rows, rank] and [columns, rank]."""
        assert self.shape is not None
        both, (rows, _) = flat.view(sum(self.shape), -1), self.shape
        return both[:rows], both[rows:]

    def first_factors(self, rank: int, dtype: torch.dtype) -> Tensor:
        """Those before the first step."""
        assert self.shape is not None
        zeros = torch.zeros(sum(self.shape) * rank, dtype=dtype)
        return self.orthonormal(zeros)

    def orthonormal(self, flat: Tensor) -> Tensor:
        """P and Q from Y and Z."""
        y, z = self.pair(flat)
        names = (f"{self.name}/P", f"{self.name}/Q")
        return torch.cat([orthonormal(y, names[0]), orthonormal(z, names[1])]).view(-1)


@dataclass(frozen=True, eq=False)
class _UnderWay:
    """What is in a round: all of it, what was sent of it, and with which factors. `is_within`:
    whether these could be sent as they are."""

    whole: Contribution
    sent: Tensor
    factors: Tensor
    is_within: bool


@dataclass(frozen=True, eq=False)
class _Inferred:
    """C and (X B)^T of one matrix in the last step."""

    c: Tensor
    xb: Tensor


class PowerSGD:
    """Shortens one peer's contributions, and decodes the averages.

    It keeps two buffers of the parameters' size: what was not sent yet, and the decoded average.

    Invariant: `_rest` is what `_rest_samples` samples have not sent yet, in their mean, and 0 for
    all that is sent as it is; with 0 samples its contents mean nothing.
    """

    def __init__(self, parameters: Parameters, layout: Layout, rank: int) -> None:
        """`layout`: of whole contributions. What follows the parameters is sent as it is."""
        self._rank = rank
        self._parts = _parts(parameters, layout, rank)
        check_rank([one.shape for one in parameters.tensors], rank)
        self.layout = Layout(
            tuple(
                Segment(one.name, one.sent.stop - one.sent.start, segment.codec)
                for one, segment in zip(self._parts, layout.segments, strict=True)
            )
        )
        self.factors = self._first_factors(parameters.dtype)
        tail_values = layout.values - parameters.values
        self._decoded, self._rest = (parameters.buffer(tail_values, on_host=True) for _ in range(2))
        self._rest_samples = 0
        self._under_way: _UnderWay | None = None
        self._inferred: dict[str, _Inferred] = {}

    @torch.no_grad()
    def shortened(self, whole: Contribution) -> Contribution:
        """What is sent of a contribution, with what was not sent before. It stays here until it is
        `put_back` or `done_with`."""
        values = whole.values
        if whole.samples and self._rest_samples:
            values.add_(self._rest, alpha=self._rest_samples / whole.samples)
            self._rest_samples = 0
        sent, is_within = torch.empty(self.layout.values, dtype=values.dtype), True
        for part in self._parts:
            if part.shape is None:
                sent[part.sent].copy_(values[part.whole])
                continue
            gradient, of_part = values[part.whole].view(part.shape), sent[part.sent]
            (p, q), (y, z) = part.pair(self.factors[part.factors]), part.pair(of_part)
            torch.mm(gradient, q, out=y)
            torch.mm(gradient.T, p, out=z)
            if not within(of_part, part.largest):
                is_within = False
                of_part.nan_to_num_(0.0).clamp_(-part.largest, part.largest)
        self._under_way = _UnderWay(whole, sent, self.factors, is_within)
        return Contribution(sent, whole.samples)

    def put_back(self) -> Contribution:
        """The whole contribution under way, because the round made no step. What was not sent
        before is in it."""
        return self._taken().whole

    @torch.no_grad()
    def decoded(self, averaged: Tensor) -> Tensor:
        """The averaged gradients with their tail, to step with: P Z^T + C Q^T + C X B. The factors
        are then those of the next step. The memory is that of the last ones."""
        whole, following = self._decoded, []
        self._inferred.clear()
        for part in self._parts:
            if part.shape is None:
                whole[part.whole].copy_(averaged[part.sent])
                continue
            # a member may have sent any factors that are finite, and then products may not be
            of_part = averaged[part.sent].clamp_(-part.largest, part.largest)
            (p, q), (y, z) = part.pair(self.factors[part.factors]), part.pair(of_part)
            a, c, b = product(columns_of(p), columns_of(y)), columns_of(y), columns_of(z)
            take_out(c, columns_of(p))
            take_out(b, columns_of(q))
            right = q.to(torch.float64)
            xb = inferred(a, b, c)
            if xb is not None and within(xb.view(-1), LARGEST_FACTOR):
                right = right + xb
                self._inferred[part.name] = _Inferred(c.T.to(p.dtype), xb.to(p.dtype))
            add_products([(p, z), (c.T, right)], out=whole[part.whole].view(part.shape))
            following.append(part.orthonormal(of_part))
        self.factors = torch.cat(following)
        return whole

    @torch.no_grad()
    def done_with(self) -> Contribution:
        """What was under way is in a step: keep what was not sent of it. Returns memory that is
        free. If it is dropped, `forget` has to follow."""
        one = self._taken()
        if not one.whole.samples:
            return one.whole
        self._rest, free = one.whole.values, self._rest
        for part in self._parts:
            rest = self._rest[part.whole]
            if part.shape is None:
                rest.zero_()
                continue
            (p, q), (y, z) = part.pair(one.factors[part.factors]), part.pair(one.sent[part.sent])
            rest.view(part.shape).addmm_(p, z.T, alpha=-1.0)
            rest.view(part.shape).addmm_(y - p @ (p.T @ y), q.T, alpha=-1.0)
            if (block := self._inferred.pop(part.name, None)) is not None:
                rest.view(part.shape).addmm_(block.c, block.xb.T, alpha=-1.0)
        # Factors that were cut to what their codec carries come from a gradient that is far too
        # large. It is in no sum that others get, and does not come back.
        self._rest_samples = one.whole.samples if one.is_within else 0
        return Contribution(free, one.whole.samples)

    def forget(self) -> None:
        """Drop what was not sent yet."""
        self._rest_samples = 0

    def restore(self, factors: Tensor) -> None:
        """Go on from the factors of a fetched state. What was not sent yet is of another one."""
        self.factors = factors.clone()
        self.forget()

    def extra(self) -> dict[str, Any]:
        return {FACTORS: self.factors}

    def from_extra(self, extra: dict[str, Any]) -> Tensor:
        """The factors of a state. A checkpoint may be from before the run had this rank: then those
        before the first step. StateRefused for anything that `extra` never returns."""
        factors = extra.get(FACTORS)
        if not isinstance(factors, Tensor) or factors.shape != self.factors.shape:
            return self._first_factors(self.factors.dtype)
        if factors.dtype is not self.factors.dtype or not within(factors, LARGEST_ORTHONORMAL):
            raise StateRefused("The state has factors of gradients that are not orthonormal.")
        return factors

    def _first_factors(self, dtype: torch.dtype) -> Tensor:
        shortened = [one for one in self._parts if one.shape is not None]
        return torch.cat([one.first_factors(self._rank, dtype) for one in shortened])

    def _taken(self) -> _UnderWay:
        one, self._under_way = self._under_way, None
        assert one is not None
        return one


def _parts(parameters: Parameters, layout: Layout, rank: int) -> list[_Part]:
    shapes, found = [one.shape for one in parameters.tensors], []
    whole = sent = factors = 0
    for number, segment in enumerate(layout.segments):
        shape = as_matrix(shapes[number], rank) if number < len(shapes) else None
        values = segment.values if shape is None else rank * sum(shape)
        both = 0 if shape is None else values
        found.append(
            _Part(
                segment.name,
                slice(whole, whole + segment.values),
                slice(sent, sent + values),
                slice(factors, factors + both),
                shape,
                min(LARGEST_CARRIED[segment.codec], LARGEST_FACTOR),
            )
        )
        whole, sent, factors = whole + segment.values, sent + values, factors + both
    return found
