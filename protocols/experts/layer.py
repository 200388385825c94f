"""The mixture of experts as a layer of a model (Learning@home, sections 3.1 and 3.2).

    layer = DMoE(GridGate(width, grid), experts, portal, k=4)
    y = layer(x)                    # in a training thread; x and y: (examples, …, width)
    loss_of(y).backward()           # each expert that answered gets its gradient, and makes a step

`DMoE` is an ordinary `nn.Module`: its parameters are those of the gate. The experts are elsewhere,
and train themselves. `Experts` is all that the layer knows of them: the search for the best k, and
a call to one of them in either direction. Its functions run in trio's thread; the layer reaches
them through a portal (protocols/guest.py), and several threads may use one layer at the same time.

Forward: every example goes to its k best experts, one call for each expert with all examples that
are its. When every example has `quorum` answers, the rest have `grace_seconds` more. Calls that
failed or came too late are left out, and the softmax runs over the experts that answered (equation
3). `TooFewExperts` if an example has fewer answers than the quorum.

Backward: the gradient of an example's input is the sum over its experts that answered forward. An
expert that fails now adds nothing to it. The waiting ends as in the forward pass, and
`TooFewExperts` is raised only if no expert took its gradient. The gate gets its gradient through
the weights of equation 3.

Easy to get wrong:

- What lies along the first dimension are the examples, and each has its own experts. For one choice
  per token, call the layer with `x.flatten(0, -2)`.
- A backward pass changes the experts, also in a model that is only being examined. Examine it under
  `torch.no_grad()`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
import trio
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from protocols.errors import DeadlineExceeded, PotluckError, ProtocolMisuse, Unreachable
from protocols.experts.gating import ExpertChoice, GridGate, balance_loss, weights_of
from protocols.experts.grid import ExpertGrid, Uid
from protocols.guest import Portal

GRACE_SECONDS = 3.0
"""Latency costs staleness and not throughput, so the grace is long beside usual delays: an answer
that is not waited for is work of an expert that nobody uses."""

TIMEOUT_SECONDS = 30.0
"""A large batch over a home's uplink takes seconds; a queue at a busy expert some more."""

NAMED_FAILURES = 3  # in the text of an error
ADVICE = "Drop the batch. If it stays so, see which experts are alive."


class Experts(Protocol):
    """The experts of one grid, as a layer sees them. All functions run in trio's thread."""

    async def select(self, scores: Sequence[Tensor], k: int) -> list[list[Uid]]:
        """The live experts with the highest scores, at most k for each example, the best first.

        scores: (examples, M_i) for each dimension i of the grid, on the CPU.
        """
        ...

    async def forward(self, uid: Uid, inputs: Tensor, timeout: float) -> Tensor:
        """The expert's outputs: finite, and of the inputs' shape and dtype. Any other answer, and
        none within the timeout, is a PotluckError."""
        ...

    async def backward(self, uid: Uid, inputs: Tensor, grads: Tensor, timeout: float) -> Tensor:
        """Let the expert make its step. Returns the gradients of the inputs, with the same
        promises. `grads` are those of its outputs."""
        ...


class TooFewExperts(PotluckError):
    """An example has fewer answers than the quorum: its batch has no result."""

    exit_code = 4


class DMoE(nn.Module):
    """A layer whose experts are spread over many computers.

    - `k`: how many experts each example goes to.
    - `quorum`: how many of them must answer.
    - `grace_seconds`: how long the others are waited for when every example has its quorum.
    - `timeout_seconds`: the longest wait of one pass in one direction.
    - `balance`: the weight of `balance_loss`, whose gradient every backward pass adds to the
      gate's; 0.01 is a usual value. The layer's output does not contain it.
    """

    def __init__(
        self,
        gate: GridGate,
        experts: Experts,
        portal: Portal,
        *,
        k: int = 4,
        quorum: int = 1,
        grace_seconds: float = GRACE_SECONDS,
        timeout_seconds: float = TIMEOUT_SECONDS,
        balance: float = 0.0,
    ) -> None:
        super().__init__()
        if not 1 <= quorum <= k:
            raise ProtocolMisuse(
                f"A quorum of {quorum} of {k} experts is impossible.",
                advice="Let it be 1 to k.",
            )
        self.gate, self.k, self.balance = gate, k, balance
        self._calls = _ExpertCalls(experts, portal, quorum, grace_seconds, timeout_seconds)

    def forward(self, x: Tensor) -> Tensor:
        """x: (examples, …, width); the same shape and dtype back."""
        scores = self.gate(x)
        chosen = self._calls.select([own.detach().cpu() for own in scores], self.k)
        choice = ExpertChoice.of(chosen, self.gate.grid)
        # The touch makes autograd come back here also if x needs no gradient, as in the first layer
        # of a model: the experts need theirs.
        touch = torch.empty(0, requires_grad=True)
        dispatch = _Dispatch.of(choice, self.gate.grid)
        # On the CPU, because backward waits for the network there. autograd has one thread for each
        # GPU, in which all batches in flight would wait for one another; on the CPU each has its
        # own. In at least 32 bits: fewer, on the way only, are a codec's business.
        inputs = x.to("cpu", torch.promote_types(x.dtype, torch.float32))
        answers, answered = _through_experts(inputs, touch, dispatch, self._calls)
        answers, answered = answers.to(x.device), answered.to(x.device)
        if self.balance and torch.is_grad_enabled():
            scores = _with_gradient_of(scores, self.balance * balance_loss(scores, choice))
        weights = weights_of(choice.scores(scores), answered)  # equation 3
        with torch.autocast(x.device.type, enabled=False):
            # a batch of products of a row and a matrix: many times faster than a sum of products
            mixed = torch.bmm(weights.to(answers).unsqueeze(1), answers.flatten(2))
        return mixed.view_as(x).to(x.dtype)

    def extra_repr(self) -> str:
        return f"grid={self.gate.grid.name}, k={self.k}, quorum={self._calls.quorum}"


@dataclass(frozen=True, eq=False)
class _Dispatch:
    """Which examples of a batch go to which expert.

    - `uids`: the experts, each once.
    - `rows`: for each expert, the numbers of its examples.
    - `slots`: for each expert, where its answers go: example × places + place.
    """

    uids: tuple[Uid, ...]
    rows: tuple[Tensor, ...]
    slots: tuple[Tensor, ...]
    examples: int
    places: int

    @staticmethod
    def of(choice: ExpertChoice, grid: ExpertGrid) -> _Dispatch:
        examples, places = choice.present.shape
        slots = choice.present.flatten().nonzero().flatten()
        numbers, order = choice.numbers(grid).flatten()[slots].sort(stable=True)
        slots = slots[order]
        experts, counts = torch.unique_consecutive(numbers, return_counts=True)
        each = torch.split(slots, counts.tolist())
        return _Dispatch(
            tuple(map(grid.at, experts.tolist())),
            tuple(own // places for own in each),
            each,
            examples,
            places,
        )

    def only(self, numbers: Sequence[int]) -> _Dispatch:
        """Only these experts; the examples and the slots stay the same."""
        return _Dispatch(
            tuple(self.uids[number] for number in numbers),
            tuple(self.rows[number] for number in numbers),
            tuple(self.slots[number] for number in numbers),
            self.examples,
            self.places,
        )


class _ThroughExperts(torch.autograd.Function):
    """The inputs to the answers of the experts, and back."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, _touch: Tensor, dispatch: _Dispatch, calls: _ExpertCalls
    ) -> tuple[Tensor, Tensor]:
        """Returns the answers, (examples, places, …, width), with zeros where there are none, and
        which places have one, (examples, places)."""
        inputs = inputs.detach()
        found = calls.forward(dispatch, inputs)
        answers = inputs.new_zeros((dispatch.examples * dispatch.places, *inputs.shape[1:]))
        answered = torch.zeros(len(answers), dtype=torch.bool)
        for number, answer in found.items():
            answers.index_copy_(0, dispatch.slots[number], answer)
            answered[dispatch.slots[number]] = True
        ctx.save_for_backward(inputs)
        ctx.dispatch, ctx.calls = dispatch.only(sorted(found)), calls
        shape = (dispatch.examples, dispatch.places)
        answers, answered = answers.view(*shape, *inputs.shape[1:]), answered.view(shape)
        ctx.mark_non_differentiable(answered)
        return answers, answered

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grads: Tensor, _answered: Tensor) -> tuple[Tensor | None, ...]:
        (inputs,) = ctx.saved_tensors
        found = ctx.calls.backward(ctx.dispatch, inputs, grads)
        total = torch.zeros_like(inputs)
        for number in sorted(found):  # in one order: sums of floats depend on it
            total.index_add_(0, ctx.dispatch.rows[number], found[number])
        return total, None, None, None


_through_experts: Callable[..., tuple[Tensor, Tensor]] = _ThroughExperts.apply


class _WithGradient(torch.autograd.Function):
    """A tensor as it is, whose backward pass also adds the gradient of a loss."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, loss: Tensor) -> Tensor:  # noqa: ARG004
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grads: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG004
        return grads, grads.new_ones(())


def _with_gradient_of(scores: tuple[Tensor, ...], loss: Tensor) -> tuple[Tensor, ...]:
    """The scores, through the first of which the loss gets its gradient, once."""
    first: Tensor = _WithGradient.apply(scores[0], loss)  # type: ignore[no-untyped-call]
    return (first, *scores[1:])


# The calls: the training thread's side, the pure count, and trio's side


@dataclass(frozen=True)
class _ExpertCalls:
    """The way of a layer to its experts, from any thread. Copies of a model share it."""

    experts: Experts
    portal: Portal
    quorum: int
    grace_seconds: float
    timeout_seconds: float

    def __deepcopy__(self, _memo: dict[int, Any]) -> _ExpertCalls:
        return self

    def select(self, scores: Sequence[Tensor], k: int) -> list[list[Uid]]:
        timeout = self.timeout_seconds
        try:
            return self.portal.begin(self.experts.select, scores, k, timeout=timeout).wait()
        except (DeadlineExceeded, Unreachable) as error:
            raise TooFewExperts(
                "The search for experts found none.", why=error.what, advice=ADVICE
            ) from error

    def forward(self, dispatch: _Dispatch, inputs: Tensor) -> dict[int, Tensor]:
        """The answers, by the number of their expert: `quorum` for each example, or the error."""
        calls: list[_Call] = [
            partial(self.experts.forward, uid, inputs.index_select(0, rows))
            for uid, rows in zip(dispatch.uids, dispatch.rows, strict=True)
        ]
        tally = AnswerTally(dispatch.rows, dispatch.examples, self.quorum)
        direction = _Pass(calls, tally, self.grace_seconds, self.timeout_seconds, may_end=True)
        found = self.portal.begin(direction.run).wait()
        if not tally.is_met:
            raise TooFewExperts(
                f"{tally.lacking} of {dispatch.examples} examples have "
                f"{'no answer' if self.quorum == 1 else f'fewer than {self.quorum} answers'}.",
                why=_reasons(dispatch, direction.failures),
                advice=ADVICE,
            )
        return found

    def backward(self, dispatch: _Dispatch, inputs: Tensor, grads: Tensor) -> dict[int, Tensor]:
        """The gradients of the inputs, by the number of their expert: one, or the error."""
        grads = grads.flatten(0, 1)
        calls: list[_Call] = [
            partial(
                self.experts.backward,
                uid,
                inputs.index_select(0, rows),
                grads.index_select(0, slots),
            )
            for uid, rows, slots in zip(dispatch.uids, dispatch.rows, dispatch.slots, strict=True)
        ]
        tally = AnswerTally(dispatch.rows, dispatch.examples, self.quorum)
        direction = _Pass(calls, tally, self.grace_seconds, self.timeout_seconds, may_end=False)
        found = self.portal.begin(direction.run).wait()
        if not found and calls:
            raise TooFewExperts(
                "No expert took its gradient.",
                why=_reasons(dispatch, direction.failures),
                advice=ADVICE,
            )
        return found


class AnswerTally:
    """How many answers each example has, and how many it can still get. Pure.

    `rows` are the examples of each call; a call has each example at most once. It counts in numpy,
    whose small operations keep the interpreter: trio's thread would get it back late from many
    training threads.
    """

    def __init__(self, rows: Sequence[Tensor], examples: int, quorum: int) -> None:
        self._rows, self._quorum = [own.numpy() for own in rows], quorum
        self._answers = np.zeros(examples, dtype=np.int64)
        self._hopes = np.zeros(examples, dtype=np.int64)
        for own in self._rows:
            self._hopes[own] += 1

    def answered(self, call: int) -> None:
        self._answers[self._rows[call]] += 1

    def failed(self, call: int) -> None:
        self._hopes[self._rows[call]] -= 1

    @property
    def lacking(self) -> int:
        """How many examples have fewer answers than the quorum."""
        return int((self._answers < self._quorum).sum())

    @property
    def is_met(self) -> bool:
        """Every example has its quorum."""
        return not self.lacking

    @property
    def is_hopeless(self) -> bool:
        """Some example can no longer have its quorum."""
        return bool((self._hopes < self._quorum).any())

    @property
    def is_as_good_as_met(self) -> bool:
        """Every example has its quorum, or all that it can still have."""
        return bool((self._answers >= np.minimum(self._hopes, self._quorum)).all())


_Call = Callable[[float], Awaitable[Tensor]]  # with its timeout


class _Pass:
    """All calls of one pass, at once. `may_end`: stop when the quorum has become impossible."""

    def __init__(
        self,
        calls: Sequence[_Call],
        tally: AnswerTally,
        grace_seconds: float,
        timeout_seconds: float,
        *,
        may_end: bool,
    ) -> None:
        self.failures: dict[int, PotluckError] = {}
        self._calls, self._tally, self._may_end = calls, tally, may_end
        self._grace_seconds, self._timeout_seconds = grace_seconds, timeout_seconds
        self._found: dict[int, Tensor] = {}

    async def run(self) -> dict[int, Tensor]:
        """The answers by the number of the call. Cancels the calls that are not waited for."""
        with trio.move_on_after(self._timeout_seconds) as scope:
            async with trio.open_nursery() as nursery:
                self._look(scope)
                for number in range(len(self._calls)):
                    nursery.start_soon(self._call, number, scope)
        return self._found

    async def _call(self, number: int, scope: trio.CancelScope) -> None:
        try:
            answer = await self._calls[number](self._timeout_seconds)
        except PotluckError as error:
            self.failures[number] = error
            self._tally.failed(number)
        else:
            self._found[number] = answer
            self._tally.answered(number)
        self._look(scope)

    def _look(self, scope: trio.CancelScope) -> None:
        """Decide how long the others are waited for."""
        if self._may_end and self._tally.is_hopeless:
            scope.cancel()
        elif self._tally.is_as_good_as_met:
            scope.deadline = min(scope.deadline, trio.current_time() + self._grace_seconds)


def _reasons(dispatch: _Dispatch, failures: dict[int, PotluckError]) -> str:
    if not failures:
        return "No answer came in time." if dispatch.uids else "The search found no live expert."
    named = [f"{dispatch.uids[number]}: {error.what}" for number, error in failures.items()]
    more = len(named) - NAMED_FAILURES
    return " ".join(named[:NAMED_FAILURES]) + (f" And {more} more." if more > 0 else "")
