"""Which peers of a collaboration compute and which reduce: as good as trying every choice."""

from __future__ import annotations

import itertools
import random
import time

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from protocols.errors import PotluckError
from protocols.moshpit.plan import Members, best_shares, equal_shares, seconds_of
from protocols.moshpit.plan_strategy import (
    Computes,
    NobodyComputes,
    NobodyReduces,
    PlannedPeer,
    PlannedPeers,
    Strategy,
    best_strategy,
    limited_seconds,
    limited_shares,
    programmed_shares,
    shortest_limited_seconds,
)
from tests.moshpit.appendix_b import appendix_b
from tests.moshpit.collaborations import (
    collaboration_of,
    collaborations,
    limits_between,
    setup,
    some_contribute,
)

few = settings(max_examples=12, deadline=None)
many = settings(max_examples=60, deadline=None)
CLOSE = 1e-6  # relative: the solver's tolerances


def peer(
    name: str,
    speed: float,
    *,
    samples: float = 10.0,
    computes: Computes = Computes.AUTO,
    dial_out_only: bool = False,
) -> PlannedPeer:
    return PlannedPeer(name, samples, speed, speed, computes, dial_out_only)


def planned(collaboration: PlannedPeers) -> Strategy:
    """The plan, if there can be one."""
    try:
        return best_strategy(collaboration)
    except PotluckError:
        assume(False)
        raise


def members_of(collaboration: PlannedPeers, computes: tuple[bool, ...]) -> Members:
    peers = collaboration.peers
    return Members(
        [peer.up for peer in peers],
        [peer.down for peer in peers],
        computes,
        [not peer.dial_out_only for peer in peers],
    )


def best_of_all_choices(collaboration: PlannedPeers) -> float:
    """The most steps per second, by trying every c."""
    choices = [
        [True]
        if peer.computes is Computes.ALWAYS
        else [False]
        if peer.computes is Computes.NEVER or not peer.samples_per_s
        else [True, False]
        for peer in collaboration.peers
    ]
    most = 0.0
    for computes in itertools.product(*choices):
        if any(computes):
            members = members_of(collaboration, computes)
            seconds = shortest_limited_seconds(members, collaboration.limits)
            samples = sum(
                peer.samples_per_s
                for peer, one in zip(collaboration.peers, computes, strict=True)
                if one
            )
            steps = samples / collaboration.batch
            vector = collaboration.vector_bytes
            most = max(most, min(steps, 1 / (seconds * vector)) if seconds else steps)
    return most


@pytest.mark.parametrize(
    ("name", "all_reduce", "server"),
    [("A", 1.0, 4.0), ("B", 1.0, 8.0), ("C", 1.92, 4.6), ("D", 1.68, 1.14)],
)
def test_the_papers_setups(name: str, all_reduce: float, server: float) -> None:
    plan = best_strategy(collaboration_of(setup(name)))
    assert plan.allreduce_seconds / plan.round_seconds == pytest.approx(all_reduce, abs=0.005)
    assert plan.parameter_server_seconds / plan.round_seconds == pytest.approx(server, abs=0.005)
    assert plan.computes == tuple(setup(name).contributes)


@pytest.mark.slow
@many
@given(collaborations())
def test_no_other_choice_of_who_computes_makes_more_steps(collaboration: PlannedPeers) -> None:
    plan = planned(collaboration)
    assert plan.steps_per_second == pytest.approx(best_of_all_choices(collaboration), rel=CLOSE)


@pytest.mark.slow
@few
@given(collaborations(most=4), st.data())
def test_no_other_choice_makes_more_steps_with_pairwise_limits(
    collaboration: PlannedPeers, data: st.DataObject
) -> None:
    limits = data.draw(limits_between(len(collaboration.peers)))
    limited = PlannedPeers(
        collaboration.vector_bytes, collaboration.batch, collaboration.peers, limits
    )
    plan = planned(limited)
    assert plan.steps_per_second == pytest.approx(best_of_all_choices(limited), rel=CLOSE)


@pytest.mark.slow
@many
@given(collaborations(most=12))
def test_a_plan_is_never_worse_than_all_reduce(collaboration: PlannedPeers) -> None:
    plan = planned(collaboration)
    everybody = tuple(
        peer.computes is Computes.ALWAYS
        or (peer.computes is Computes.AUTO and peer.samples_per_s > 0)
        for peer in collaboration.peers
    )
    members = members_of(collaboration, everybody)
    seconds = seconds_of(equal_shares(members.reduces), members) * collaboration.vector_bytes
    assert plan.allreduce_seconds == pytest.approx(seconds)
    samples = sum(
        one.samples_per_s for one, c in zip(collaboration.peers, everybody, strict=True) if c
    )
    steps = samples / collaboration.batch
    assert plan.round_seconds <= plan.allreduce_seconds * (1 + 1e-9)
    assert plan.round_seconds <= plan.parameter_server_seconds * (1 + 1e-9)
    assert plan.steps_per_second >= (min(steps, 1 / seconds) if seconds else steps) * (1 - 1e-9)


@pytest.mark.slow
@many
@given(collaborations())
def test_facts_about_a_peer_are_kept(collaboration: PlannedPeers) -> None:
    plan = planned(collaboration)
    for one, computes, fraction in zip(
        collaboration.peers, plan.computes, plan.fractions, strict=True
    ):
        assert computes or one.computes is not Computes.ALWAYS
        assert not computes or one.computes is not Computes.NEVER
        assert not (computes and one.computes is Computes.AUTO and not one.samples_per_s)
        assert not (fraction and one.dial_out_only)


@pytest.mark.slow
@many
@given(collaborations(), st.randoms(use_true_random=False))
def test_the_order_of_the_file_does_not_matter(
    collaboration: PlannedPeers, chance: random.Random
) -> None:
    plan = planned(collaboration)
    order = list(range(len(collaboration.peers)))
    chance.shuffle(order)
    shuffled = PlannedPeers(
        collaboration.vector_bytes, collaboration.batch, [collaboration.peers[i] for i in order]
    )
    again = best_strategy(shuffled)
    assert again.computes == tuple(plan.computes[i] for i in order)
    assert again.fractions == tuple(plan.fractions[i] for i in order)
    assert again.round_seconds == plan.round_seconds


def test_peers_that_must_compute_do_so_however_slow_they_are() -> None:
    """The trap: the relaxed c takes a slow sender out of the round, for a hundredth of its work."""
    slow = peer("slow", 0.1, computes=Computes.ALWAYS)
    plan = best_strategy(PlannedPeers(1.0, 1e-3, [slow, peer("fast", 10.0), peer("other", 10.0)]))
    assert plan.computes == (True, True, True)
    assert plan.round_seconds == pytest.approx(10.0)


def test_a_peer_that_may_compute_is_left_out_if_it_would_hold_up_the_rest() -> None:
    """It still gets the result, and that needs less of its link than sending would."""
    slow = PlannedPeer("slow", 1.0, up=0.1, down=10.0, computes=Computes.AUTO)
    peers = [slow, peer("fast", 10.0), peer("other", 10.0)]
    assert best_strategy(PlannedPeers(1.0, 4.0, peers)).computes == (False, True, True)
    # With a batch for which computing is the bottleneck it is welcome.
    assert best_strategy(PlannedPeers(1.0, 1e4, peers)).computes == (True, True, True)


def test_no_peer_idles_if_that_gains_nothing() -> None:
    """The network is the limit in any case: of equally good plans, that with more samples wins."""
    peers = [peer("must", 1.0, computes=Computes.ALWAYS), *(peer(f"{i}", 9.0) for i in range(4))]
    assert all(best_strategy(PlannedPeers(1.0, 1e-3, peers)).computes)


def test_a_peer_without_a_gpu_only_reduces() -> None:
    peers = [*(peer(f"{i}", 1.0) for i in range(4)), peer("helper", 100.0, samples=0.0)]
    plan = best_strategy(PlannedPeers(1.0, 1.0, peers))
    assert plan.computes == (True,) * 4 + (False,)
    assert plan.fractions[4] > 0.5


def test_steps_are_as_many_as_the_slower_of_computing_and_averaging_allows() -> None:
    peers = [peer("one", 1.0), peer("two", 1.0)]  # a round of a vector of 1 takes 1 second
    assert best_strategy(PlannedPeers(1.0, 40.0, peers)).steps_per_second == 0.5
    assert best_strategy(PlannedPeers(1.0, 4.0, peers)).steps_per_second == 1.0


def test_one_peer_needs_no_round() -> None:
    plan = best_strategy(PlannedPeers(1.0, 5.0, [peer("alone", 1.0)]))
    assert (plan.fractions, plan.computes) == ((1.0,), (True,))
    assert (plan.round_seconds, plan.allreduce_seconds, plan.parameter_server_seconds) == (0, 0, 0)
    assert plan.steps_per_second == 2.0


@pytest.mark.parametrize(
    ("peers", "error"),
    [
        ([peer("a", 1.0, computes=Computes.NEVER)], NobodyComputes),
        ([peer("a", 1.0, samples=0.0)], NobodyComputes),
        ([peer("a", 1.0, samples=0.0, computes=Computes.ALWAYS)], NobodyComputes),
        ([peer("a", 1.0, dial_out_only=True), peer("b", 1.0, dial_out_only=True)], NobodyReduces),
    ],
)
def test_an_impossible_plan_is_explained(
    peers: list[PlannedPeer], error: type[PotluckError]
) -> None:
    with pytest.raises(error) as raised:
        best_strategy(PlannedPeers(1.0, 1.0, peers))
    assert raised.value.exit_code == 2
    assert raised.value.why
    assert raised.value.advice


@pytest.mark.slow
@few
@given(some_contribute(), st.data())
def test_limits_are_kept_and_appendix_b_leads_to_nothing_faster(
    members: Members, data: st.DataObject
) -> None:
    limits = data.draw(limits_between(len(members.up)))
    shares = limited_shares(members, limits)
    ours = limited_seconds(shares, members, limits)
    rates = appendix_b(members, limits)
    theirs = rates.fractions()
    assert ours * rates.fastest > 1 - CLOSE
    assert theirs is None or limited_seconds(theirs, members, limits) > ours * (1 - CLOSE)
    assert ours >= seconds_of(best_shares(members), members) * (1 - CLOSE)
    assert limited_seconds(programmed_shares(members, limits), members, limits) == pytest.approx(
        ours, rel=CLOSE
    )


@pytest.mark.slow
def test_a_thin_link_keeps_large_parts_off_both_its_ends() -> None:
    members = Members([10.0] * 4, [10.0] * 4, [True] * 4, [True] * 4)
    shares = limited_shares(members, {(0, 1): 1.0})
    # With x for each end and y for the others: 2x = T, x + y = 1/2, 1 + 2y = 10 T.
    assert shares == pytest.approx((1 / 11, 1 / 11, 9 / 22, 9 / 22), rel=CLOSE)
    assert limited_seconds(shares, members, {(0, 1): 1.0}) == pytest.approx(2 / 11, rel=CLOSE)


def test_a_limit_that_the_ends_keep_anyway_changes_nothing() -> None:
    members = setup("D")
    limits = {(0, 1): members.up[0], (3, 16): members.up[3] * 2}
    assert limited_shares(members, limits) == best_shares(members)


def many_peers(n: int, *, seed: int = 5) -> list[PlannedPeer]:
    chance = random.Random(seed)
    return [
        PlannedPeer(
            f"peer {i}",
            chance.choice([0.0, 10.0, 40.0]),
            up=chance.choice([20.0, 100.0, 500.0]) * chance.uniform(0.9, 1.1),
            down=chance.choice([100.0, 500.0]) * chance.uniform(0.9, 1.1),
            computes=Computes.AUTO,
        )
        for i in range(n)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("n", "bar_ms"), [(24, 20.0), (64, 50.0), (500, 200.0)])
def test_hundreds_of_peers_are_planned_in_milliseconds(n: int, bar_ms: float) -> None:
    assert _fastest_ms(PlannedPeers(10.0, 32_768.0, many_peers(n))) < bar_ms


@pytest.mark.slow
def test_pairwise_limits_take_some_milliseconds_more() -> None:
    """With the solver loaded already, as it is in a node that plans twice a minute."""
    chance = random.Random(6)
    pairs = [(i, j) for i in range(24) for j in range(24) if i != j]
    limits = {pair: chance.uniform(0.2, 10.0) for pair in chance.sample(pairs, 100)}
    limited = PlannedPeers(10.0, 32_768.0, many_peers(24), limits)
    assert shortest_limited_seconds(members_of(limited, (True,) * 24), limits) > 0
    assert _fastest_ms(limited) < 50.0


def _fastest_ms(collaboration: PlannedPeers) -> float:
    """The fastest of twenty, in CPU time of this thread. It waits for nothing, and what other
    threads of the process compute does not count. A busy neighbour on the same core, which shares
    its caches, makes a plan take half as long again."""
    times = []
    for _ in range(20):
        began = time.thread_time()
        best_strategy(collaboration)
        times.append((time.thread_time() - began) * 1000)
    return min(times)
