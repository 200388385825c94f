"""The plan of a run by cohorts: each cohort, then the heads, then the handing down."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from protocols.errors import PotluckError
from protocols.identity import PeerId
from protocols.moshpit.cohorts import cohort_of, in_order
from protocols.moshpit.plan_strategy import (
    Computes,
    NobodyComputes,
    NobodyReduces,
    PlannedPeer,
    PlannedPeers,
    Strategy,
    best_strategy,
    dealt,
)

VECTOR = 2e6  # bytes: so large that a member hands it on to two others


def peer(number: int, up: float = 1.0, down: float = math.inf) -> PlannedPeer:
    """Speeds in vectors per second."""
    return PlannedPeer(f"p{number:02}", 10.0, up * VECTOR, down * VECTOR, Computes.ALWAYS)


def planned(
    peers: Sequence[PlannedPeer],
    cohorts: Sequence[Sequence[int]],
    limits: dict[tuple[int, int], float] | None = None,
) -> Strategy:
    return best_strategy(PlannedPeers(VECTOR, 1.0, peers, limits or {}, cohorts=cohorts))


def test_a_step_takes_the_slowest_cohort_then_the_heads_then_the_slowest_handing_down() -> None:
    plan = planned([peer(i) for i in range(9)], [range(4), range(4, 6), range(6, 9)])
    # n equal peers exchange in 2 (n - 1) / n, and a head sends a vector to each of two members. The
    # first of them sends each of the three parts to the third member as soon as it has it.
    rounds = [one.round_seconds for one in plan.cohorts]
    assert rounds == pytest.approx([6 / 4, 2 / 2, 4 / 3])
    assert plan.heads_seconds == pytest.approx(4 / 3)
    assert [one.handing_down_seconds for one in plan.cohorts] == pytest.approx([7 / 3, 1.0, 2.0])
    assert plan.round_seconds == pytest.approx(6 / 4 + 4 / 3 + 7 / 3)
    assert plan.fractions == pytest.approx((1 / 4,) * 4 + (1 / 2,) * 2 + (1 / 3,) * 3)
    uplink, downlink = plan.link_seconds[0]
    assert uplink == pytest.approx(6 / 4 + 4 / 3 + 2.0)  # its head
    assert downlink == 0.0
    assert plan.link_seconds[1][0] == pytest.approx(6 / 4 + 1.0)
    assert plan.link_seconds[2][0] == pytest.approx(6 / 4)  # a member without anybody below it


def test_a_large_cohort_hands_down_from_member_to_member() -> None:
    plan = planned([peer(i) for i in range(10)], [range(8), range(8, 10)])
    # the head sends two copies in two parts, the next two members two each, and one sends another
    assert plan.cohorts[0].handing_down_seconds == pytest.approx(2.0 + 2 / 2 + 1 / 2)
    rounds = [14 / 8 + copies for copies in (2 + 1, 2, 2, 1, 0)]  # two heads need 1 second
    assert [up for up, _ in plan.link_seconds[:5]] == pytest.approx(rounds)


def test_the_more_parts_a_result_has_the_less_a_further_level_costs() -> None:
    def handing_down(heads: int) -> float:
        cohorts = [range(8), *([8 + i] for i in range(heads - 1))]
        plan = planned([peer(i) for i in range(7 + heads)], cohorts)
        return plan.cohorts[0].handing_down_seconds

    assert handing_down(2) == pytest.approx(3.5)
    assert handing_down(10) == pytest.approx(2.0 + 2 / 10 + 1 / 10)


def test_the_fastest_link_of_a_cohort_is_its_heads_and_the_slowest_hands_nothing_down() -> None:
    peers = [peer(i) for i in range(7)]
    slow = [replace(one, up=VECTOR / 5) if i == 0 else one for i, one in enumerate(peers)]
    plan = planned(slow, [range(5), [5, 6]])
    assert plan.cohorts[0].members == (1, 2, 3, 4, 0)
    assert plan.cohorts[0].handing_down_seconds == pytest.approx(2.0 + 2 / 2)
    assert plan.heads_seconds == pytest.approx(1.0)


def test_a_slow_uplink_delays_those_below_it_and_a_slow_downlink_its_owner() -> None:
    peers = [peer(i) for i in range(7)]
    assert planned(peers, [range(5), [5, 6]]).cohorts[0].handing_down_seconds == pytest.approx(3.0)
    slow = [replace(one, up=VECTOR * (0.8 if i == 1 else 1.2)) for i, one in enumerate(peers)]
    handing_down = planned(slow, [range(5), [5, 6]]).cohorts[0].handing_down_seconds
    assert handing_down == pytest.approx(0.5 * 2.0 / 1.2 + 2.0 / 0.8)  # from the first part on
    slow = [replace(one, down=VECTOR / 9) if i == 4 else one for i, one in enumerate(peers)]
    handing_down = planned(slow, [range(5), [5, 6]]).cohorts[0].handing_down_seconds
    assert handing_down == pytest.approx(1.0 + 9.0)
    limits = {(1, 4): VECTOR / 7}
    limited = planned(peers, [range(5), [5, 6]], limits)
    assert limited.cohorts[0].handing_down_seconds == pytest.approx(1.0 + 7.0)


def test_a_peer_that_nobody_can_dial_is_no_head_and_hands_nothing_on() -> None:
    peers = [replace(peer(i), dial_out_only=i in (0, 1)) for i in range(6)]
    plan = planned(peers, [range(6)])
    assert plan.cohorts[0].members == (2, 3, 4, 5, 0, 1)
    assert plan.fractions[:2] == (0.0, 0.0)
    round_seconds = plan.cohorts[0].round_seconds
    assert plan.link_seconds[0][0] <= round_seconds


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"computes": Computes.NEVER}, NobodyComputes),
        ({"samples_per_s": 0.0}, NobodyComputes),
        ({"dial_out_only": True}, NobodyReduces),
    ],
)
def test_a_cohort_that_cannot_average_is_explained(
    change: dict[str, object], error: type[PotluckError]
) -> None:
    peers = [replace(peer(i), **change) if i > 3 else peer(i) for i in range(6)]  # type: ignore[arg-type]
    assert best_strategy(PlannedPeers(VECTOR, 1.0, peers)).round_seconds > 0
    with pytest.raises(error, match="cohort") as raised:
        planned(peers, [range(4), (4, 5)])
    assert "p04" in raised.value.why
    assert raised.value.advice


def test_peers_are_dealt_as_a_run_deals_them() -> None:
    names = [f"peer {i}" for i in range(100)]
    assert dealt(names[:63], 64, "poem") == ()
    cohorts = dealt(names, 64, "poem")
    assert sorted(i for one in cohorts for i in one) == list(range(100))
    assert len(cohorts) == 4
    for one in cohorts:
        members = [PeerId(names[i]) for i in one]
        assert len({cohort_of("poem", member, 4) for member in members}) == 1
        assert members == in_order("poem", members)
    assert len(dealt(names, 16, "poem")) == 16


def test_the_order_of_the_file_does_not_matter() -> None:
    chance = random.Random(3)
    peers = [
        PlannedPeer(
            f"p{i}",
            chance.uniform(1.0, 20.0),
            chance.uniform(1e5, 1e6),
            chance.uniform(1e5, 1e6),
            chance.choice([Computes.AUTO, Computes.ALWAYS]),
            dial_out_only=i % 7 == 6,
        )
        for i in range(40)
    ]
    plan = planned(peers, dealt([one.name for one in peers], 16, "poem"))
    shuffled = chance.sample(peers, len(peers))
    again = planned(shuffled, dealt([one.name for one in shuffled], 16, "poem"))
    assert again.round_seconds == plan.round_seconds
    places = [peers.index(one) for one in shuffled]
    assert again.fractions == tuple(plan.fractions[i] for i in places)
    assert again.computes == tuple(plan.computes[i] for i in places)


@pytest.mark.parametrize("batch", [1.0, 100.0, 10_000.0])
def test_no_more_steps_are_made_if_all_compute_that_may(batch: float) -> None:
    chance = random.Random(1)
    peers = [
        replace(
            peer(i, up=chance.choice([0.02, 1.0, 5.0]), down=chance.choice([0.1, 5.0])),
            computes=Computes.AUTO,
        )
        for i in range(24)
    ]
    cohorts = dealt([one.name for one in peers], 8, "poem")
    plan = best_strategy(PlannedPeers(VECTOR, batch, peers, cohorts=cohorts))
    everybody = [replace(one, computes=Computes.ALWAYS) for one in peers]
    all_compute = best_strategy(PlannedPeers(VECTOR, batch, everybody, cohorts=cohorts))
    assert plan.steps_per_second >= all_compute.steps_per_second * (1 - 1e-9)
