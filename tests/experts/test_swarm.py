"""A layer on a swarm: the mixture that it would be here, also while servers die or lie."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Collection
from statistics import mean

import pytest
import torch
import trio
from torch import Tensor, nn

from protocols.errors import Busy, HandlerFailed, Unreachable
from protocols.experts import (
    ANNOUNCE_SECONDS,
    DMoE,
    ExpertGrid,
    GridGate,
    Host,
    HostRecords,
    ImplausibleAnswer,
    Uid,
    UnknownExpert,
)
from protocols.experts.swarm import (
    BACKWARD_FACTOR,
    FIRST_REST_SECONDS,
    LATE_SECONDS,
    MOST_UNANSWERED,
    Callee,
    check_growth,
    without,
)
from protocols.guest import Portal
from protocols.identity import Identity
from protocols.tensors import NotFinite
from protocols.testing.world import SimulatedWorld, WorldSettings
from tests.dht.members import simulated
from tests.experts.liars import (
    Cutter,
    Liar,
    Mute,
    Unteachable,
    denying,
    filled,
    garbage,
    not_a_number,
    shorter_than_it_says,
    wider,
)
from tests.experts.swarms import (
    GRID,
    IN_FLIGHT,
    RATE,
    WIDTH,
    Server,
    Simulated,
    Swarm,
    Training,
    in_real_time,
    in_training_thread,
    mixture,
    on_loopback,
    open_training_portal,
    spread,
)
from tests.waiting import PATIENCE_SECONDS

SQUARE = ExpertGrid("ffn", (4, 4))
EXAMPLES, K = 20, 4
EXACT = 1e-5
GRACE_SECONDS = 1.5  # a call that is given up after less says nothing
ONE = GRID.at(0)


def gate_and_inputs() -> tuple[GridGate, Tensor]:
    torch.manual_seed(6)
    return GridGate(WIDTH, GRID), torch.randn(EXAMPLES, WIDTH, requires_grad=True)


def square(y: Tensor) -> Tensor:
    return (y - 0.3).square().sum()


def compare_with_the_mixture(
    layer: DMoE, x: Tensor, there: dict[Uid, nn.Module], absent: Collection[Uid] = ()
) -> None:
    """For a training thread: outputs, all gradients, and the step of each expert that answers."""
    here = copy.deepcopy(there)
    gradients_of = [x, *layer.gate.parameters()]
    parameters = [own for module in here.values() for own in module.parameters()]
    wanted = mixture(layer.gate, here, x, K, absent)
    wanted_gradients = torch.autograd.grad(square(wanted), gradients_of, retain_graph=True)
    torch.autograd.backward(square(wanted), inputs=parameters)
    torch.optim.SGD(parameters, lr=RATE).step()

    got = layer(x)
    gradients = torch.autograd.grad(square(got), gradients_of)

    assert_same([got, *gradients], [wanted, *wanted_gradients])
    answering = [uid for uid in here if uid not in absent]
    for uid in answering:
        assert_same([*there[uid].parameters()], [*here[uid].parameters()])


def assert_same(ones: list[Tensor], others: list[Tensor]) -> None:
    for one, other in zip(ones, others, strict=True):
        torch.testing.assert_close(one, other, rtol=EXACT, atol=EXACT)


# ---- exactness


@pytest.mark.slow
@pytest.mark.parametrize("dead", [0, 1], ids=["all live", "one server is dead"])
def test_the_layer_is_the_mixture_of_the_experts_that_answer(dead: int) -> None:
    """Forward, the gradients of input and gate, and one optimizer step of each expert."""

    async def main() -> None:
        servers = [Server(uids) for uids in spread(GRID, 4)]
        async with in_real_time(servers, GRID) as place, open_training_portal() as portal:
            swarm = place.swarm
            gate, x = gate_and_inputs()
            layer = DMoE(gate, swarm.experts, portal, k=K)
            with torch.no_grad():
                await in_training_thread(layer, x)  # so that it knows all hosts
            for server in servers[:dead]:
                place.crash(server)
            absent = {uid for server in servers[:dead] for uid in server.uids}
            await in_training_thread(compare_with_the_mixture, layer, x, swarm.modules(), absent)
            # from now on the search leaves out the dead, so that each example has k again
            living = {uid: own for uid, own in swarm.modules().items() if uid not in absent}
            await in_training_thread(compare_with_the_mixture, layer, x, living)

    trio.run(main)


@pytest.mark.slow
def test_the_layer_is_the_mixture_on_the_real_network() -> None:
    async def main() -> None:
        servers = [Server(uids) for uids in spread(GRID, 2)]
        with trio.fail_after(PATIENCE_SECONDS):
            async with on_loopback(servers, GRID) as swarm, open_training_portal() as portal:
                gate, x = gate_and_inputs()
                layer = DMoE(gate, swarm.experts, portal, k=K)
                await in_training_thread(compare_with_the_mixture, layer, x, swarm.modules())

    trio.run(main)


# ---- servers that die


def training_layer(swarm: Swarm, portal: Portal) -> DMoE:
    torch.manual_seed(7)
    gate = GridGate(WIDTH, SQUARE)
    return DMoE(gate, swarm.experts, portal, k=K, grace_seconds=GRACE_SECONDS)


@pytest.mark.slow
def test_when_half_of_the_servers_are_killed_training_goes_on() -> None:
    """Two of them without a goodbye. No error reaches the trainer's loop."""
    before, batches = 40, 160

    async def main() -> None:
        servers = [Server(uids) for uids in spread(SQUARE, 8)]
        async with in_real_time(servers, SQUARE) as place, open_training_portal() as portal:

            def kill_half() -> None:
                for number, server in enumerate(servers[:4]):
                    place.crash(server, silently=number < 2)

            layer = training_layer(place.swarm, portal)
            training = Training(layer, batches, {before: kill_half})
            await training.run()
        assert len(training.losses) + training.dropped == batches
        assert training.dropped <= IN_FLIGHT, "only what was under way is lost"
        recovery_seconds = training.times[before + 40] - training.times[before]
        keep_alive_seconds = WorldSettings().silence_seconds
        assert recovery_seconds < keep_alive_seconds, "nobody waits for the network to notice"
        assert mean(training.losses[-20:]) < mean(training.losses[before - 20 : before])

    trio.run(main)


# ---- servers that lie

MOST_CALLS = IN_FLIGHT + 8  # those that are under way together; then after 1, 2, 4 … seconds


@pytest.mark.slow
def test_servers_that_lie_are_refused_named_and_avoided(caplog: pytest.LogCaptureFixture) -> None:
    """The loss does not notice them, although half of the experts are theirs."""
    caplog.set_level(logging.INFO, "potluck")
    batches = 100
    liars: dict[str, Liar | Cutter | Mute] = {
        "garbage": Liar(garbage),
        "not a number": Liar(not_a_number),
        "huge": Liar(filled(1e30)),
        "another shape": Liar(wider),
        "short": Liar(shorter_than_it_says),
        "denies": Liar(denying(UnknownExpert)),
        "cuts off": Cutter(),
        "mute": Mute(),
    }

    async def main() -> None:
        cells = spread(SQUARE, SQUARE.cells)
        theirs = {kind: Server(cells.pop(), liar) for kind, liar in liars.items()}
        servers = [Server([*cells.pop(), *cells.pop()]) for _ in range(4)]
        servers += theirs.values()
        async with in_real_time(servers, SQUARE) as place, open_training_portal() as portal:
            training = Training(training_layer(place.swarm, portal), batches)
            await training.run()
            peers = {kind: place.peer_of(server) for kind, server in theirs.items()}
        assert [kind for kind, peer in peers.items() if peer not in caplog.text] == []
        calls = {kind: liar.calls for kind, liar in liars.items()}
        assert all(1 <= own <= MOST_CALLS for own in calls.values()), calls
        assert len(training.losses) == batches
        assert max(training.losses) < 2 * training.losses[0]
        assert mean(training.losses[-20:]) < training.losses[0] / 4

    trio.run(main)


# ---- one call, in virtual time


def scores_for(*uids: Uid) -> list[Tensor]:
    """One example that prefers these experts."""
    scores = [torch.zeros(1, size) for size in GRID.sizes]
    for uid in uids:
        for own, cell in zip(scores, uid.cells, strict=True):
            own[0, cell] += 1.0
    return scores


async def found(swarm: Swarm) -> list[Uid]:
    (chosen,) = await swarm.experts.select(scores_for(ONE), GRID.cells)
    return chosen


def rows(count: int = 3) -> Tensor:
    return torch.ones(count, WIDTH)


@simulated
async def test_of_two_hosts_the_faster_is_called_and_backward_goes_where_forward_went(
    world: SimulatedWorld,
) -> None:
    slow, fast = Server([ONE], load=5.0), Server([ONE])
    swarm = (await Simulated.start(world, [slow, fast])).swarm
    assert await found(swarm) == [ONE]
    await swarm.experts.forward(ONE, rows(), timeout=10.0)
    fast.load, slow.load = 50.0, 0.0
    await trio.sleep(2 * ANNOUNCE_SECONDS)
    assert await found(swarm) == [ONE]
    await swarm.experts.backward(ONE, rows(), rows(), timeout=10.0)
    await swarm.experts.forward(ONE, rows(2), timeout=10.0)
    statistics = [server.backends[0].statistics for server in (fast, slow)]
    assert [(one.forward_rows, one.backward_rows) for one in statistics] == [(3, 3), (2, 0)]
    assert list(swarm.records.take_rows().values()) == [3], "a forward pass alone teaches nothing"


@simulated
async def test_an_expert_that_nobody_hosts_is_unreachable(world: SimulatedWorld) -> None:
    swarm = (await Simulated.start(world, [Server([ONE])])).swarm
    with pytest.raises(Unreachable, match="No host"):
        await swarm.experts.forward(GRID.at(1), rows(), timeout=10.0)


@simulated
async def test_a_tensor_of_our_own_that_cannot_be_sent_is_no_failure_of_the_server(
    world: SimulatedWorld,
) -> None:
    swarm = (await Simulated.start(world, [Server([ONE])])).swarm
    assert await found(swarm) == [ONE]
    with pytest.raises(NotFinite):
        await swarm.experts.forward(ONE, rows() * math.nan, timeout=10.0)
    assert await found(swarm) == [ONE]
    assert not swarm.records.resting(trio.current_time())


@simulated
async def test_a_dead_server_is_left_out_of_the_next_search(world: SimulatedWorld) -> None:
    servers = [Server([ONE]), Server([GRID.at(1)])]
    place = await Simulated.start(world, servers)
    swarm = place.swarm
    assert await found(swarm) == [ONE, GRID.at(1)]
    place.crash(servers[0])
    with pytest.raises(Unreachable):
        await swarm.experts.forward(ONE, rows(), timeout=10.0)
    assert await found(swarm) == [GRID.at(1)]
    began = trio.current_time()
    with pytest.raises(Unreachable, match="left alone"):
        await swarm.experts.forward(ONE, rows(), timeout=10.0)
    assert trio.current_time() == began, "it is not dialled again"
    await trio.sleep(FIRST_REST_SECONDS)
    assert await found(swarm) == [GRID.at(1)], "it has to announce itself first"


@simulated
async def test_a_busy_server_is_left_out_for_a_second(world: SimulatedWorld) -> None:
    swarm = (await Simulated.start(world, [Server([ONE], Liar(denying(Busy)))])).swarm
    assert await found(swarm) == [ONE]
    with pytest.raises(Busy):
        await swarm.experts.forward(ONE, rows(), timeout=10.0)
    assert await found(swarm) == []
    await trio.sleep(FIRST_REST_SECONDS)
    assert await found(swarm) == [ONE]


@simulated
async def test_a_mute_server_is_tried_again_by_one_call_at_a_time(world: SimulatedWorld) -> None:
    mute = Mute()
    swarm = (await Simulated.start(world, [Server([ONE], mute)])).swarm
    assert await found(swarm) == [ONE]

    async def give_up_after(seconds: float) -> None:
        with trio.move_on_after(seconds):
            await swarm.experts.forward(ONE, rows(), timeout=100.0)

    await give_up_after(LATE_SECONDS / 2)
    assert await found(swarm) == [ONE], "so short a wait says nothing"
    await give_up_after(LATE_SECONDS)
    assert await found(swarm) == []
    await trio.sleep(FIRST_REST_SECONDS)
    assert await found(swarm) == [], "it has to announce itself first"
    await trio.sleep(2 * ANNOUNCE_SECONDS)
    assert await found(swarm) == [ONE]
    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(raises_unreachable, swarm, LATE_SECONDS)
    assert mute.calls == 3


async def raises_unreachable(swarm: Swarm, give_up_seconds: float) -> None:
    with trio.move_on_after(give_up_seconds), pytest.raises(Unreachable):
        await swarm.experts.forward(ONE, rows(), timeout=100.0)


@simulated
async def test_when_one_call_is_given_up_those_that_wait_longer_there_end(
    world: SimulatedWorld,
) -> None:
    swarm = (await Simulated.start(world, [Server([ONE], Mute())])).swarm
    assert await found(swarm) == [ONE]
    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(raises_unreachable, swarm, math.inf)
        await trio.sleep(LATE_SECONDS)
        with trio.move_on_after(LATE_SECONDS):
            await swarm.experts.forward(ONE, rows(), timeout=100.0)
    assert trio.current_time() == pytest.approx(began + 2 * LATE_SECONDS)


@simulated
async def test_a_server_that_never_takes_gradients_is_left_alone_for_longer_and_longer(
    world: SimulatedWorld,
) -> None:
    unteachable = Unteachable(mute=False)
    swarm = (await Simulated.start(world, [Server([ONE], unteachable)])).swarm
    began = trio.current_time()
    while trio.current_time() < began + 120.0:
        if await found(swarm):
            await swarm.experts.forward(ONE, rows(), timeout=10.0)
            with pytest.raises(HandlerFailed):
                await swarm.experts.backward(ONE, rows(), rows(), timeout=10.0)
        await trio.sleep(FIRST_REST_SECONDS / 2)
    assert 6 <= unteachable.calls <= 8, "after 1, 2, 4 … 60 seconds"


@simulated
async def test_answers_forward_do_not_hide_that_gradients_are_never_answered(
    world: SimulatedWorld,
) -> None:
    """Batches in flight ask for answers all the time."""
    other, unteachable = GRID.at(1), Unteachable(mute=True)
    swarm = (await Simulated.start(world, [Server([ONE, other], unteachable)])).swarm
    for rest in (1.0, 2.0, 4.0):
        assert await found(swarm) == [ONE, other]
        await swarm.experts.forward(ONE, rows(), timeout=10.0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(backward_given_up, swarm, LATE_SECONDS)
            await trio.sleep(LATE_SECONDS / 2)
            await swarm.experts.forward(ONE, rows(), timeout=10.0)
            await swarm.experts.forward(other, rows(), timeout=10.0)
        assert await found(swarm) == []
        await trio.sleep(rest - 0.1)
        assert await found(swarm) == []
        await trio.sleep(0.1)


SLOW_SECONDS = 1.5


@simulated
async def test_a_server_that_is_slow_may_take_some_times_as_long_backward(
    world: SimulatedWorld,
) -> None:
    swarm = await slow_swarm(world)
    await answered_forward_only(swarm, 0.9 * BACKWARD_FACTOR * SLOW_SECONDS)
    assert await found(swarm) == [ONE]
    await answered_forward_only(swarm, 1.2 * BACKWARD_FACTOR * SLOW_SECONDS)
    assert await found(swarm) == []


@simulated
async def test_if_it_never_answers_backward_it_is_not_merely_slow(world: SimulatedWorld) -> None:
    swarm = await slow_swarm(world)
    for _ in range(MOST_UNANSWERED):
        assert await found(swarm) == [ONE]
        await answered_forward_only(swarm, 0.9 * BACKWARD_FACTOR * SLOW_SECONDS)
    assert await found(swarm) == []


async def slow_swarm(world: SimulatedWorld) -> Swarm:
    server = Server([ONE], Unteachable(mute=True, seconds=SLOW_SECONDS))
    swarm = (await Simulated.start(world, [server])).swarm
    assert await found(swarm) == [ONE]
    await swarm.experts.forward(ONE, rows(), timeout=10.0)
    return swarm


async def answered_forward_only(swarm: Swarm, seconds: float) -> None:
    """A backward pass is given up after these seconds."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(backward_given_up, swarm, seconds)
        await trio.sleep(LATE_SECONDS)
        await swarm.experts.forward(ONE, rows(), timeout=10.0)


async def backward_given_up(swarm: Swarm, seconds: float) -> None:
    with trio.move_on_after(seconds):
        await swarm.experts.backward(ONE, rows(), rows(), timeout=100.0)


# ---- the records, which are pure

PEER, OTHER = Identity.generate().peer_id, Identity.generate().peer_id
HOST, EXPERT = Callee(PEER), Callee(PEER, ONE)


def test_a_server_rests_twice_as_long_after_each_failure_up_to_a_minute() -> None:
    records, now = HostRecords(), 100.0
    for rest in (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0):
        records.failed(HOST, now, now)
        assert HOST in records.resting(now + rest - 0.01)
        now += rest
        assert not records.resting(now)
    records.answered(PEER, ONE, now, now)
    assert records.failed(HOST, now, now) == 1, "an answer clears it"


def test_an_answer_forward_ends_a_rest_and_only_gradients_end_a_row_of_failures() -> None:
    records, now = HostRecords(), 100.0
    for count in (1, 2, 3):
        assert records.failed(EXPERT, now, now, backward=True) == count
        now += 100.0
        records.answered(PEER, ONE, now, now)
        assert [records.takes_call(PEER, ONE, now) for _ in range(3)] == [True] * 3
        now += 1.0
    assert records.failed(EXPERT, now, now) == 1, "what fails forward is counted by itself"
    records.answered(PEER, ONE, now, now, backward=True)
    assert records.failed(EXPERT, now + 1.0, now + 1.0, backward=True) == 1


def test_after_a_lost_gradient_an_answer_forward_that_was_under_way_ends_no_rest() -> None:
    records = HostRecords()
    records.failed(HOST, 9.0, 10.0, backward=True)
    records.answered(PEER, ONE, 9.9, 10.1)
    assert HOST in records.resting(10.5)
    records.answered(PEER, ONE, 9.9, 10.6, backward=True)
    assert not records.resting(10.6)


def test_calls_that_fail_together_are_one_failure() -> None:
    records = HostRecords()
    counts = [records.failed(HOST, began, 10.0) for began in (1.0, 2.0, 9.9)]
    assert counts == [1, 0, 0]
    assert not records.resting(11.0)


def test_after_its_rest_one_call_tries_a_server_out() -> None:
    records = HostRecords()
    records.failed(HOST, 1.0, 10.0)
    assert not records.takes_call(PEER, ONE, 10.5)
    assert records.takes_call(OTHER, ONE, 10.5)
    assert [records.takes_call(PEER, ONE, 11.0) for _ in range(3)] == [True, False, False]
    assert records.resting(11.5), "searches leave it out until that call has ended"
    records.answered(PEER, ONE, 11.0, 11.6)
    assert [records.takes_call(PEER, ONE, 11.6) for _ in range(3)] == [True] * 3


def test_a_failure_of_an_expert_leaves_its_server_alone_in_nothing_else() -> None:
    records = HostRecords()
    records.failed(EXPERT, 1.0, 10.0)
    assert not records.takes_call(PEER, ONE, 10.5)
    assert records.takes_call(PEER, GRID.at(1), 10.5)
    records.answered(PEER, GRID.at(1), 10.5, 10.6)
    assert records.resting(10.7) == {EXPERT}, "only its own answer clears it"


def test_a_server_that_answers_others_is_slow_and_not_silent() -> None:
    records = HostRecords()
    records.answered(PEER, GRID.at(1), 4.0, 5.0)
    assert not records.is_silent(HOST, since=4.0)
    assert records.is_silent(HOST, since=5.0)
    assert records.is_silent(EXPERT, since=4.0)


def test_a_server_that_answers_only_forward_is_silent_backward() -> None:
    records = HostRecords()
    records.answered(PEER, ONE, 4.0, 5.0)
    assert [records.is_silent(one, 4.0, backward=True) for one in (HOST, EXPERT)] == [True, True]
    records.answered(PEER, GRID.at(1), 4.0, 5.0, backward=True)
    assert [records.is_silent(one, 4.0, backward=True) for one in (HOST, EXPERT)] == [False, True]


def test_load_and_the_median_of_the_latency_are_what_a_call_is_expected_to_take() -> None:
    records = HostRecords()
    for seconds in (1.0, 9.0, 2.0):
        records.answered(PEER, ONE, 0.0, seconds)
    assert records.expected_seconds(Host(PEER, load=0.5)) == 2.5
    assert records.expected_seconds(Host(OTHER, load=0.5)) == 0.5


def test_rows_of_each_server_are_counted_until_they_are_taken() -> None:
    records = HostRecords()
    for peer, count in ((PEER, 3), (OTHER, 5), (PEER, 4)):
        records.trained(peer, count)
    assert records.take_rows() == {PEER: 7, OTHER: 5}
    assert records.take_rows() == {}


def test_searches_see_what_does_not_rest() -> None:
    both, root = (Host(PEER), Host(OTHER)), GRID.root
    below = {root: {0: both, 1: both[:1]}, ONE.parent: {0: both, 1: both, 2: both[:1]}}
    assert without(below, frozenset([HOST])) == {
        root: {0: both[1:]},
        ONE.parent: {0: both[1:], 1: both[1:]},
    }
    assert without(below, frozenset([EXPERT])) == {
        root: below[root],
        ONE.parent: {0: both[1:], 1: both, 2: both[:1]},
    }


@pytest.mark.parametrize(
    ("answer", "given", "least"),
    [(1e5, 1.0, 1.0), (-1e5, 1.0, 1.0), (1e5, 0.0, 1.0), (1e-9, 0.0, 0.0), (1.0, 1e-6, 0.0)],
)
def test_an_answer_that_is_far_larger_than_what_was_given_is_implausible(
    answer: float, given: float, least: float
) -> None:
    with pytest.raises(ImplausibleAnswer, match=str(EXPERT)):
        check_growth(rows() * answer, rows() * given, least, EXPERT)


@pytest.mark.parametrize(
    ("answer", "given", "least"),
    [(1e3, 1.0, 1.0), (1e3, 0.0, 1.0), (0.0, 0.0, 0.0), (1e-3, 1e-6, 0.0), (1e9, 1e6, 1.0)],
)
def test_other_answers_are_plausible(answer: float, given: float, least: float) -> None:
    check_growth(rows() * answer, rows() * given, least, EXPERT)
