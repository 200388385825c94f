"""Which members reduce, by the routers that the members are behind."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nat.kinds import Nat, can_punch
from protocols.moshpit.plan import best_reducers

NONE, CONE, PORT, SYMMETRIC = Nat.NONE, Nat.CONE, Nat.PORT_RESTRICTED, Nat.SYMMETRIC


@pytest.mark.parametrize(
    ("routers", "able", "reducers"),
    [
        ([NONE, NONE, NONE], [True] * 3, [True] * 3),
        ([Nat.UNKNOWN, PORT, SYMMETRIC], [True] * 3, [True, False, False]),
        ([CONE, PORT, SYMMETRIC], [True] * 3, [True, False, False]),
        ([PORT, PORT, CONE], [True] * 3, [True] * 3),
        ([SYMMETRIC, SYMMETRIC], [True] * 2, [True] * 2),  # the relay carries it in any case
        ([SYMMETRIC, SYMMETRIC, PORT], [True] * 3, [True] * 3),
        ([NONE, CONE, CONE, SYMMETRIC, PORT, PORT], [True] * 5 + [False], [True] + [False] * 5),
        ([CONE, CONE, NONE], [True, True, False], [True, True, False]),
        ([250, NONE], [True] * 2, [True] * 2),  # a kind that a newer version knows
    ],
)
def test_those_reduce_that_the_fewest_reach_only_through_a_relay(
    routers: list[int], able: list[bool], reducers: list[bool]
) -> None:
    assert list(best_reducers(routers, able)) == reducers


@given(st.lists(st.tuples(st.sampled_from(list(Nat)), st.booleans()), min_size=1, max_size=12))
def test_no_part_goes_through_a_relay_if_somebody_is_met_directly_by_all(
    members: list[tuple[Nat, bool]],
) -> None:
    routers, able = [router for router, _ in members], [one for _, one in members]
    chosen = best_reducers(routers, able)
    assert any(chosen) is any(able)
    assert all(able[place] for place, one in enumerate(chosen) if one)
    meets_all = [
        all(can_punch(one, other) for j, other in enumerate(routers) if j != i)
        for i, one in enumerate(routers)
    ]
    if all(able) and any(meets_all):
        assert all(meets_all[place] for place, one in enumerate(chosen) if one)
