"""A peer that breaks the protocol is avoided for longer each time, and forgiven in the end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as some

from protocols.identity import PeerId
from protocols.rpc.peers import FORGIVEN_AFTER_SECONDS, LONGEST_DELAY_SECONDS, MOST_PEERS, Penalties

ALICE, BOB = PeerId("alice"), PeerId("bob")


def test_nobody_is_avoided_at_first() -> None:
    assert Penalties().avoided_for(ALICE, now=0.0) == 0.0


def test_each_strike_doubles_the_time_up_to_ten_minutes() -> None:
    penalties = Penalties()
    delays = []
    for strike in range(12):
        assert penalties.strike(ALICE, now=0.0) == strike + 1
        delays.append(penalties.avoided_for(ALICE, now=0.0))
    assert delays == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 600.0, 600.0]


def test_the_time_runs_out() -> None:
    penalties = Penalties()
    penalties.strike(ALICE, now=10.0)
    assert penalties.avoided_for(ALICE, now=10.75) == 0.25
    assert penalties.avoided_for(ALICE, now=11.0) == 0.0
    assert penalties.avoided(now=10.5) == {ALICE: 0.5}
    assert penalties.avoided(now=11.0) == {}


def test_strikes_count_on_after_the_time_has_run_out() -> None:
    penalties = Penalties()
    penalties.strike(ALICE, now=0.0)
    assert penalties.strike(ALICE, now=100.0) == 2


def test_one_peer_is_not_punished_for_another() -> None:
    penalties = Penalties()
    penalties.strike(ALICE, now=0.0)
    assert penalties.avoided_for(BOB, now=0.0) == 0.0


def test_after_an_hour_without_a_strike_all_is_forgotten() -> None:
    penalties = Penalties()
    for _ in range(5):
        penalties.strike(ALICE, now=0.0)
    assert penalties.strike(ALICE, now=FORGIVEN_AFTER_SECONDS) == 1
    assert penalties.avoided_for(ALICE, now=2 * FORGIVEN_AFTER_SECONDS) == 0.0
    assert len(penalties) == 0


def test_a_flood_of_identities_does_not_grow_the_table_beyond_its_limit() -> None:
    penalties = Penalties()
    for number in range(MOST_PEERS + 100):
        penalties.strike(PeerId(f"peer {number}"), now=0.0)
    assert len(penalties) == MOST_PEERS
    assert penalties.avoided_for(PeerId("peer 99"), now=0.0) == 0.0
    assert penalties.avoided_for(PeerId("peer 100"), now=0.0) == 1.0


@given(some.lists(some.tuples(some.booleans(), some.floats(0.0, 10_000.0)), max_size=300))
def test_no_history_leads_to_more_than_the_longest_delay(
    steps: list[tuple[bool, float]],
) -> None:
    penalties, now = Penalties(), 0.0
    for strike, seconds in steps:
        now += seconds
        if strike:
            penalties.strike(ALICE, now)
        assert 0.0 <= penalties.avoided_for(ALICE, now) <= LONGEST_DELAY_SECONDS
