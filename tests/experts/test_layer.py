"""A layer of experts elsewhere is the mixture that it would be here, over the experts that answer.

Threads and trio really run, in real time: a training thread is what the layer is for. The experts
are in this process (lab/bench/local_experts.py), so that the mixture can be computed here too.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch
import trio
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lab.bench.local_experts import LocalExperts
from lab.guest_thread import in_guest_thread
from models.experts import build_expert
from protocols.errors import PotluckError, ProtocolMisuse, Unreachable
from protocols.experts import (
    DMoE,
    ExpertChoice,
    ExpertGrid,
    GridGate,
    TooFewExperts,
    Uid,
    balance_loss,
)
from protocols.experts.layer import AnswerTally
from protocols.guest import Portal, open_portal
from tests.waiting import PATIENCE_SECONDS

Result = TypeVar("Result")

GRID = ExpertGrid("ffn", (3, 4))
WIDTH, EXAMPLES, K = 8, 20, 4
RATE = 0.1  # of the experts' own optimizers


class Closed(PotluckError):
    """The error that the owner of these portals chose."""


def visit(guest: Callable[[Portal], Result]) -> Result:
    """Call this function in a thread while a portal is open, and return its result."""

    async def main() -> Result:
        with trio.fail_after(PATIENCE_SECONDS):
            return await in_guest_thread(guest, Closed("It has closed."))

    return trio.run(main)


def an_expert(width: int, seed: int) -> nn.Module:
    settings = {"name": "feed-forward", "width": width, "inner": [16, 16]}
    return build_expert(settings, seed=seed).double()


class Experts(LocalExperts):
    """All twelve of the grid. Those that are named fail, in one direction."""

    def __init__(
        self, *, fail_forward: Collection[str] = (), fail_backward: Collection[str] = ()
    ) -> None:
        uids = [GRID.at(number) for number in range(GRID.cells)]
        modules = {uid: an_expert(WIDTH, seed) for seed, uid in enumerate(uids)}
        super().__init__(modules, lambda parameters: torch.optim.SGD(parameters, lr=RATE))
        self.fail_forward = set(map(GRID.uid, fail_forward))
        self.fail_backward = set(map(GRID.uid, fail_backward))

    async def forward(self, uid: Uid, inputs: Tensor, timeout: float) -> Tensor:
        if uid in self.fail_forward:
            raise Unreachable(f"{uid} is away.")
        return await super().forward(uid, inputs, timeout)

    async def backward(self, uid: Uid, inputs: Tensor, grads: Tensor, timeout: float) -> Tensor:
        if uid in self.fail_backward:
            raise Unreachable(f"{uid} is away.")
        return await super().backward(uid, inputs, grads, timeout)


def gate_and_inputs() -> tuple[GridGate, Tensor]:
    torch.manual_seed(6)
    gate = GridGate(WIDTH, GRID).double()
    return gate, torch.randn(EXAMPLES, WIDTH, dtype=torch.float64, requires_grad=True)


def square(y: Tensor) -> Tensor:
    return (y - 0.3).square().sum()


def mixture(
    gate: GridGate, modules: Mapping[Uid, nn.Module], experts: Experts, x: Tensor
) -> Tensor:
    """Equation 3 in one process, one example after the other, as one would write it down."""
    first, second = gate(x)
    outputs = []
    for row in range(len(x)):
        total = first[row][:, None] + second[row][None, :]
        best = [GRID.at(int(number)) for number in total.flatten().topk(K).indices]
        answering = [uid for uid in best if uid not in experts.fail_forward]
        weights = torch.softmax(torch.stack([total[uid.cells] for uid in answering]), dim=0)
        mixed = 0.0
        for weight, uid in zip(weights, answering, strict=True):
            # without a gradient to x where the expert fails in backward
            own = x[row].detach() if uid in experts.fail_backward else x[row]
            mixed = mixed + weight * modules[uid](own)
        outputs.append(mixed)
    return torch.stack(outputs)


FAILURES = {
    "none": Experts(),
    "some forward": Experts(fail_forward=["ffn.0.1", "ffn.2.2", "ffn.2.3"]),
    "some backward": Experts(fail_backward=["ffn.0.1", "ffn.2.2", "ffn.1.1"]),
    "both": Experts(fail_forward=["ffn.0.1", "ffn.1.0"], fail_backward=["ffn.2.2", "ffn.0.0"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("experts", FAILURES.values(), ids=FAILURES)
def test_the_layer_is_the_mixture_of_the_experts_that_answer(experts: Experts) -> None:
    """Output, gradients of the input and of the gate, and the step of every expert."""
    experts = copy.deepcopy(experts)
    gate, x = gate_and_inputs()
    before, here = copy.deepcopy(experts.modules), copy.deepcopy(experts.modules)
    wanted = mixture(gate, here, experts, x)
    wanted_x, *wanted_gate = torch.autograd.grad(
        square(wanted), [x, *gate.parameters()], retain_graph=True
    )
    square(wanted).backward()

    def guest(portal: Portal) -> Tensor:
        layer = DMoE(gate, experts, portal, k=K)
        gate.zero_grad()
        x.grad = None
        y = layer(x)
        square(y).backward()
        return y.detach()

    torch.testing.assert_close(visit(guest), wanted, rtol=0.0, atol=1e-12)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, wanted_x, rtol=0.0, atol=1e-11)
    for parameter, gradient in zip(gate.parameters(), wanted_gate, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0.0, atol=1e-11)
    stepped = 0
    for uid, module in experts.modules.items():
        is_away = uid in experts.fail_forward | experts.fail_backward
        for new, old, local in zip(
            module.parameters(),
            before[uid].parameters(),
            here[uid].parameters(),
            strict=True,
        ):
            if is_away or local.grad is None:  # nothing came to it
                assert torch.equal(new, old)
            else:
                stepped += 1
                torch.testing.assert_close(new, old - RATE * local.grad)
    assert stepped


def test_in_single_precision_it_is_equal_to_five_digits() -> None:
    experts = Experts()
    gate, x = gate_and_inputs()
    gate.float()
    x = x.detach().float().requires_grad_()
    for module in experts.modules.values():
        module.float()
    wanted = mixture(gate, experts.modules, experts, x)
    (wanted_x,) = torch.autograd.grad(square(wanted), x)

    def guest(portal: Portal) -> Tensor:
        y: Tensor = DMoE(gate, experts, portal, k=K)(x)
        square(y).backward()
        return y.detach()

    torch.testing.assert_close(visit(guest), wanted, rtol=0.0, atol=1e-5)
    torch.testing.assert_close(x.grad, wanted_x, rtol=0.0, atol=1e-5)


def test_an_example_may_be_a_sequence() -> None:
    experts = Experts()
    gate, _ = gate_and_inputs()
    x = torch.randn(EXAMPLES, 3, WIDTH, dtype=torch.float64)
    first, second = gate(x)

    def guest(portal: Portal) -> Tensor:
        y: Tensor = DMoE(gate, experts, portal, k=1)(x)
        return y

    with torch.no_grad():
        y = visit(guest)
        for row in range(EXAMPLES):
            uid = Uid("ffn", (int(first[row].argmax()), int(second[row].argmax())))
            torch.testing.assert_close(y[row], experts.modules[uid](x[row]))


def test_half_precision_is_computed_in_single_and_comes_back_as_it_was() -> None:
    experts = Experts()
    for module in experts.modules.values():
        module.float()
    gate = GridGate(WIDTH, GRID).bfloat16()
    x = torch.randn(EXAMPLES, WIDTH, dtype=torch.bfloat16, requires_grad=True)

    def guest(portal: Portal) -> None:
        y = DMoE(gate, experts, portal, k=K)(x)
        assert y.dtype is torch.bfloat16
        y.float().square().sum().backward()

    visit(guest)
    assert x.grad is not None
    assert x.grad.dtype is torch.bfloat16


def test_experts_learn_also_below_an_input_that_needs_no_gradient() -> None:
    experts = Experts()
    gate, x = gate_and_inputs()
    before = copy.deepcopy(experts.modules)

    def guest(portal: Portal) -> None:
        DMoE(gate, experts, portal, k=K)(x.detach()).sum().backward()

    visit(guest)
    changed = [
        not torch.equal(new, old)
        for uid in before
        for new, old in zip(
            experts.modules[uid].parameters(), before[uid].parameters(), strict=True
        )
    ]
    assert any(changed)


def test_without_gradients_no_expert_is_changed() -> None:
    experts = Experts()
    gate, x = gate_and_inputs()

    def guest(portal: Portal) -> Tensor:
        with torch.no_grad():
            y: Tensor = DMoE(gate, experts, portal, k=K, balance=1.0)(x)
        return y

    assert not visit(guest).requires_grad


def test_the_balance_loss_adds_its_gradient_to_the_gate_and_nothing_to_the_output() -> None:
    gate, x = gate_and_inputs()

    def with_balance(balance: float) -> tuple[Tensor, Tensor]:
        gate.zero_grad()

        def guest(portal: Portal) -> Tensor:
            y: Tensor = DMoE(gate, Experts(), portal, k=K, balance=balance)(x)
            square(y).backward()
            return y.detach()

        y = visit(guest)
        assert gate.projection.weight.grad is not None
        return y, gate.projection.weight.grad.clone()

    plain, plain_gradient = with_balance(0.0)
    balanced, balanced_gradient = with_balance(0.5)
    assert torch.equal(plain, balanced)
    scores = gate(x)
    total = (scores[0][:, :, None] + scores[1][:, None, :]).flatten(1)
    best = total.topk(K, dim=1).indices.tolist()
    choice = ExpertChoice.of([[GRID.at(number) for number in own] for own in best], GRID)
    (own,) = torch.autograd.grad(0.5 * balance_loss(scores, choice), gate.projection.weight)
    assert own.abs().max() > 1e-3
    torch.testing.assert_close(balanced_gradient - plain_gradient, own)


# Too few


def refused(layer: DMoE, x: Tensor) -> TooFewExperts:
    with pytest.raises(TooFewExperts) as caught:
        layer(x)
    return caught.value


def test_a_batch_with_an_example_without_answers_has_no_result_and_says_why() -> None:
    gate, x = gate_and_inputs()
    all_of_them = [str(GRID.at(number)) for number in range(GRID.cells)]

    def guest(portal: Portal) -> None:
        refusal = refused(DMoE(gate, Experts(fail_forward=all_of_them), portal), x)
        assert "20 of 20 examples" in refusal.what
        assert "is away." in refusal.why
        assert "more." in refusal.why
        assert refusal.advice

    visit(guest)


def test_the_quorum_is_counted_for_each_example() -> None:
    """With one expert away, the examples that chose it have three answers, and the others four."""
    gate, x = gate_and_inputs()
    experts = Experts(fail_forward=["ffn.0.1"])
    first, second = gate(x)
    total = (first[:, :, None] + second[:, None, :]).flatten(1)
    concerned = int((total.topk(K, dim=1).indices == 1).any(dim=1).sum())
    assert 0 < concerned < EXAMPLES

    def guest(portal: Portal) -> None:
        DMoE(gate, experts, portal, k=K, quorum=K - 1)(x)
        # the answers that are under way when it is hopeless are not waited for
        refusal = refused(DMoE(gate, experts, portal, k=K, quorum=K), x)
        assert "fewer than 4 answers" in refusal.what

    visit(guest)


def test_without_live_experts_the_error_says_that_none_was_found() -> None:
    class Nobody(Experts):
        async def select(self, scores: Sequence[Tensor], k: int) -> list[list[Uid]]:  # noqa: ARG002
            return [[] for _ in range(len(scores[0]))]

    gate, x = gate_and_inputs()
    refusal = visit(lambda portal: refused(DMoE(gate, Nobody(), portal), x))
    assert refusal.why == "The search found no live expert."


def test_a_search_that_does_not_end_in_time_has_found_nothing() -> None:
    class Lost(Experts):
        async def select(self, scores: Sequence[Tensor], k: int) -> list[list[Uid]]:
            await trio.sleep_forever()
            return await super().select(scores, k)

    gate, x = gate_and_inputs()

    def guest(portal: Portal) -> TooFewExperts:
        return refused(DMoE(gate, Lost(), portal, timeout_seconds=0.05), x)

    assert "within 0.05 s" in visit(guest).why


def test_if_no_expert_takes_its_gradient_the_batch_has_none() -> None:
    gate, x = gate_and_inputs()
    all_of_them = [str(GRID.at(number)) for number in range(GRID.cells)]

    def guest(portal: Portal) -> None:
        y = DMoE(gate, Experts(fail_backward=all_of_them), portal)(x)
        with pytest.raises(TooFewExperts, match="No expert took its gradient"):
            y.sum().backward()

    visit(guest)


def test_an_impossible_quorum_is_refused_when_the_layer_is_made() -> None:
    gate, _ = gate_and_inputs()

    def guest(portal: Portal) -> None:
        with pytest.raises(ProtocolMisuse, match="quorum of 5 of 4"):
            DMoE(gate, Experts(), portal, k=4, quorum=5)

    visit(guest)


# Waiting


class Stuck(Experts):
    """Some experts do not answer until they are cancelled, or until an event."""

    def __init__(self, *stuck: str, until: trio.Event | None = None) -> None:
        super().__init__()
        self.stuck = set(map(GRID.uid, stuck))
        self.until = until
        self.cancelled: set[Uid] = set()
        self.entered = threading.Event()

    async def forward(self, uid: Uid, inputs: Tensor, timeout: float) -> Tensor:
        await self._wait(uid)
        return await super().forward(uid, inputs, timeout)

    async def _wait(self, uid: Uid) -> None:
        if uid not in self.stuck:
            return
        self.entered.set()
        try:
            await (trio.Event() if self.until is None else self.until).wait()
        except trio.Cancelled:
            self.cancelled.add(uid)
            raise


class StuckBackward(Stuck):
    async def forward(self, uid: Uid, inputs: Tensor, timeout: float) -> Tensor:
        return await LocalExperts.forward(self, uid, inputs, timeout)

    async def backward(self, uid: Uid, inputs: Tensor, grads: Tensor, timeout: float) -> Tensor:
        await self._wait(uid)
        return await super().backward(uid, inputs, grads, timeout)


def test_when_every_example_has_its_quorum_the_rest_have_the_grace_time_and_are_cancelled() -> None:
    gate, x = gate_and_inputs()
    experts = Stuck("ffn.0.1", "ffn.2.2")

    def guest(portal: Portal) -> Tensor:
        layer = DMoE(gate, experts, portal, k=K, grace_seconds=0.0, timeout_seconds=1e6)
        y: Tensor = layer(x)
        return y.detach()

    as_if_away = Experts(fail_forward=["ffn.0.1", "ffn.2.2"])
    wanted = mixture(gate, experts.modules, as_if_away, x)
    torch.testing.assert_close(visit(guest), wanted, rtol=0.0, atol=1e-12)
    assert experts.cancelled == experts.stuck


def test_what_comes_within_the_grace_time_counts() -> None:
    """The last answer comes when the others have been there for a while."""
    gate, x = gate_and_inputs()
    late = trio.Event()
    experts = Stuck("ffn.0.1", until=late)

    def guest(portal: Portal) -> Tensor:
        layer = DMoE(gate, experts, portal, k=K, grace_seconds=1e6, timeout_seconds=1e6)

        def release() -> None:
            assert experts.entered.wait(PATIENCE_SECONDS)
            portal.post(late.set)

        with ThreadPoolExecutor(1) as pool:
            released = pool.submit(release)
            y: Tensor = layer(x)
            released.result()
        return y.detach()

    wanted = mixture(gate, experts.modules, Experts(), x)
    torch.testing.assert_close(visit(guest), wanted, rtol=0.0, atol=1e-12)


def test_backward_also_ends_with_the_grace_time() -> None:
    gate, x = gate_and_inputs()
    experts = StuckBackward("ffn.0.1", "ffn.2.2")
    wanted = mixture(gate, experts.modules, Experts(fail_backward=["ffn.0.1", "ffn.2.2"]), x)
    (wanted_x,) = torch.autograd.grad(square(wanted), x)

    def guest(portal: Portal) -> None:
        layer = DMoE(gate, experts, portal, k=K, grace_seconds=0.0, timeout_seconds=1e6)
        # every example has a gradient at the latest when all experts but two have answered
        square(layer(x)).backward()

    visit(guest)
    assert experts.cancelled == experts.stuck
    assert x.grad is not None
    torch.testing.assert_close(x.grad, wanted_x, rtol=0.0, atol=1e-11)


def test_after_the_timeout_there_is_an_error() -> None:
    gate, x = gate_and_inputs()
    all_of_them = [str(GRID.at(number)) for number in range(GRID.cells)]

    def guest(portal: Portal) -> TooFewExperts:
        return refused(DMoE(gate, Stuck(*all_of_them), portal, k=K, timeout_seconds=0.05), x)

    assert visit(guest).why == "No answer came in time."


def test_nobody_waits_for_others_when_the_quorum_has_become_impossible() -> None:
    gate, x = gate_and_inputs()
    experts = Stuck(*(str(GRID.at(number)) for number in range(1, GRID.cells)))
    experts.fail_forward = {GRID.at(0)}
    with torch.no_grad():
        gate.projection.bias[0] += 10.0  # everybody wants 0.*
        gate.projection.bias[3] += 10.0  # and *.0

    def guest(portal: Portal) -> TooFewExperts:
        layer = DMoE(gate, experts, portal, k=2, quorum=2, timeout_seconds=1e6)
        return refused(layer, x)

    assert "ffn.0.0 is away" in visit(guest).why


# The end of the node, and threads


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_end_of_the_portal_wakes_a_thread_that_waits_for_experts(direction: str) -> None:
    gate, x = gate_and_inputs()
    kind = Stuck if direction == "forward" else StuckBackward
    experts = kind("ffn.0.1", "ffn.2.2")
    errors: list[PotluckError] = []

    def guest(portal: Portal) -> None:
        layer = DMoE(gate, experts, portal, k=K, grace_seconds=1e6, timeout_seconds=1e6)
        with pytest.raises(Closed) as caught:
            layer(x).sum().backward()
        errors.append(caught.value)
        with pytest.raises(Closed):  # and later calls at once
            layer(x)

    async def main() -> None:
        with trio.fail_after(PATIENCE_SECONDS):
            async with (
                trio.open_nursery() as threads,
                open_portal(Closed("It has closed.")) as portal,
            ):
                threads.start_soon(trio.to_thread.run_sync, guest, portal)
                await trio.to_thread.run_sync(experts.entered.wait)

    trio.run(main)
    assert len(errors) == 1


@pytest.mark.slow
def test_several_threads_use_one_layer_at_the_same_time() -> None:
    gate, _ = gate_and_inputs()
    experts = Experts()
    inputs = [torch.randn(EXAMPLES, WIDTH, dtype=torch.float64) for _ in range(12)]

    def guest(portal: Portal) -> list[Tensor]:
        layer = DMoE(gate, experts, portal, k=K)

        def one(x: Tensor) -> Tensor:
            y: Tensor = layer(x)
            return y.detach()

        with ThreadPoolExecutor(6) as pool:
            return list(pool.map(one, inputs))

    for x, y in zip(inputs, visit(guest), strict=True):
        wanted = mixture(gate, experts.modules, experts, x)
        torch.testing.assert_close(y, wanted, rtol=0.0, atol=1e-12)


def test_a_layer_is_a_plain_module() -> None:
    """Its parameters are the gate's, and copies of a model share the way to the experts."""
    gate, x = gate_and_inputs()

    def guest(portal: Portal) -> None:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), DMoE(gate, Experts(), portal)).double()
        assert set(model.state_dict()) == {
            "0.weight",
            "0.bias",
            "1.gate.projection.weight",
            "1.gate.projection.bias",
        }
        twin = copy.deepcopy(model)
        assert torch.equal(twin(x), model(x))
        assert "grid=ffn, k=4, quorum=1" in repr(model)

    visit(guest)


# The count


@st.composite
def calls(draw: st.DrawFn) -> tuple[int, list[list[int]], list[bool]]:
    examples = draw(st.integers(1, 5))
    rows = draw(
        st.lists(
            st.lists(st.integers(0, examples - 1), unique=True, min_size=1), min_size=1, max_size=6
        )
    )
    return examples, rows, draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))


@given(calls(), st.integers(1, 3))
def test_the_tally_is_what_counting_anew_gives(
    drawn: tuple[int, list[list[int]], list[bool]], quorum: int
) -> None:
    examples, rows, outcomes = drawn
    tally = AnswerTally([torch.tensor(own) for own in rows], examples, quorum)
    for done in range(len(rows) + 1):
        answers = [
            sum(row in own for own, good in zip(rows[:done], outcomes, strict=False) if good)
            for row in range(examples)
        ]
        pending = [sum(row in own for own in rows[done:]) for row in range(examples)]
        most = [have + more for have, more in zip(answers, pending, strict=True)]
        assert tally.lacking == sum(have < quorum for have in answers)
        assert tally.is_met == all(have >= quorum for have in answers)
        assert tally.is_hopeless == any(total < quorum for total in most)
        assert tally.is_as_good_as_met == all(
            have >= min(quorum, total) for have, total in zip(answers, most, strict=True)
        )
        if done < len(rows):
            (tally.answered if outcomes[done] else tally.failed)(done)
