"""Which peers a lookup asks, when it is done, and which peers it does not believe."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.dht import Contact
from protocols.dht.lookup import ALPHA, FAILURES_TO_DISCREDIT, QUESTIONS_PER_K, SLOW_AT_ONCE, Lookup
from protocols.dht.routing import RoutingTable
from tests.dht.swarm import Answerers, contact, nearest, place, scattered

TARGET = place("target")
OWN = place("own")


def near(number: int, *addresses: str) -> Contact:
    """The contact at this distance from the target."""
    return contact(TARGET ^ number, *addresses)


def ask_all(lookup: Lookup, swarm: Answerers) -> None:
    """Drive a lookup to its end, one answer after the other."""
    while not lookup.is_done:
        asked = lookup.next_queries()
        assert asked, "not done, nothing in flight, and nobody to ask"
        for one in asked:
            answer = swarm.ask(one, lookup.target, lookup.k)
            if answer is None:
                lookup.failed(one)
            else:
                lookup.answered(one, answer)


def routed(number: int) -> Answerers:
    """A swarm in which every peer has heard from all others, each in an order of its own."""
    contacts = scattered(number)
    swarm = Answerers({one.node_id: one for one in contacts})
    chance = random.Random(number)
    for one in contacts:
        table = RoutingTable(one.node_id)
        for other in chance.sample(contacts, number):
            table.heard_from(other, 0)
        swarm.knows[one.node_id] = list(table)
    return swarm


def test_three_are_asked_at_once_the_closest_first() -> None:
    lookup = Lookup(TARGET, OWN, [near(number) for number in range(50, 1, -1)])
    assert lookup.next_queries() == [near(2), near(3), near(4)]
    assert lookup.next_queries() == []
    lookup.answered(near(3), [near(1)])
    assert lookup.next_queries() == [near(1)]
    assert ALPHA == 3


def test_it_ends_when_the_k_closest_have_answered_and_not_before() -> None:
    lookup = Lookup(TARGET, OWN, [near(number) for number in range(1, 10)], k=4)
    for answering in ((1, 2), (3,)):
        lookup.next_queries()
        for number in answering:
            lookup.answered(near(number), [])
            assert not lookup.is_done
    lookup.next_queries()
    lookup.answered(near(4), [])
    assert lookup.is_done
    assert lookup.closest_answered() == [near(1), near(2), near(3), near(4)]
    assert lookup.asked_count < 9


def test_nobody_to_ask_is_the_end() -> None:
    lookup = Lookup(TARGET, OWN, [])
    assert lookup.next_queries() == []
    assert lookup.is_done
    assert lookup.closest_answered() == []


def test_the_closest_peer_is_asked_even_if_it_is_named_last() -> None:
    lookup = Lookup(TARGET, OWN, [near(9)], k=1)
    lookup.next_queries()
    lookup.answered(near(9), [near(1)])
    assert not lookup.is_done
    assert lookup.next_queries() == [near(1)]


def test_it_never_asks_itself_nor_anybody_twice() -> None:
    swarm = Answerers.all_of([*scattered(100), contact(OWN)])
    lookup = Lookup(TARGET, OWN, scattered(3))
    asked: list[Contact] = []
    while not lookup.is_done:
        for one in lookup.next_queries():
            asked.append(one)
            lookup.answered(one, swarm.ask(one, TARGET, 20) or [])
    assert contact(OWN) not in asked
    assert len(asked) == len(set(asked)) == lookup.asked_count


@pytest.mark.slow
def test_it_finds_the_closest_of_a_swarm_in_few_hops() -> None:
    swarm = routed(400)
    for number in range(40):
        target = place(f"target {number}")
        start = next(iter(swarm.knows.values()))
        lookup = Lookup(target, OWN, nearest(start, target, 20))
        ask_all(lookup, swarm)
        found = lookup.closest_answered()
        assert found == nearest(swarm.alive.values(), target, 20)
        assert lookup.hops_to(found[0]) <= 4  # log2(400) / 2 = 4.3
        assert lookup.asked_count <= 40


def test_hops_count_those_that_were_asked_one_after_the_other() -> None:
    lookup = Lookup(TARGET, OWN, [near(9)])
    lookup.next_queries()
    lookup.answered(near(9), [near(5)])
    lookup.next_queries()
    lookup.answered(near(5), [near(1), near(9)])
    assert [lookup.hops_to(near(number)) for number in (9, 5, 1)] == [1, 2, 3]


@given(dead=st.sets(st.integers(0, 59), max_size=40))
@settings(max_examples=60, deadline=None)
def test_it_finds_the_closest_living_peers_whichever_others_are_dead(dead: set[int]) -> None:
    contacts = scattered(60)
    swarm = Answerers.all_of(contacts)
    for number in dead:
        del swarm.alive[contacts[number].node_id]
    lookup = Lookup(TARGET, OWN, contacts[:30], k=5)
    ask_all(lookup, swarm)
    named = set(contacts[:30])
    if not dead.issuperset(range(30)):  # else nobody of those is there to name others
        named.update(nearest(contacts, TARGET, 5))
    living = [one for one in named if one.node_id in swarm.alive]
    assert lookup.closest_answered() == nearest(living, TARGET, 5)


def test_with_everybody_dead_it_ends() -> None:
    lookup = Lookup(TARGET, OWN, scattered(30))
    ask_all(lookup, Answerers({}))
    assert lookup.closest_answered() == []
    assert lookup.failed_count == 30


def test_a_slow_peer_does_not_keep_others_from_being_asked() -> None:
    lookup = Lookup(TARGET, OWN, [near(number) for number in range(1, 10)], k=3)
    for one in lookup.next_queries():
        lookup.slow(one)
    assert lookup.next_queries() == [near(4), near(5), near(6)]


def test_a_slow_peer_is_not_waited_for_when_k_others_have_answered() -> None:
    lookup = Lookup(TARGET, OWN, [near(number) for number in range(1, 10)], k=2)
    lookup.next_queries()
    lookup.slow(near(1))
    assert lookup.next_queries() == [near(3)]
    lookup.answered(near(2), [])
    assert not lookup.is_done
    lookup.answered(near(3), [])
    assert lookup.is_done


def test_the_answer_of_a_slow_peer_is_taken() -> None:
    lookup = Lookup(TARGET, OWN, [near(1), near(2)], k=2)
    lookup.next_queries()
    lookup.slow(near(1))
    lookup.answered(near(2), [])
    assert not lookup.is_done
    lookup.answered(near(1), [near(3)])
    assert lookup.is_done
    assert lookup.closest_answered() == [near(1), near(2)]


def test_the_answer_of_a_peer_that_was_given_up_is_taken() -> None:
    lookup = Lookup(TARGET, OWN, [near(1), near(2)], k=2)
    lookup.next_queries()
    lookup.failed(near(1))
    lookup.answered(near(1), [])
    lookup.answered(near(2), [])
    assert lookup.closest_answered() == [near(1), near(2)]
    assert lookup.failed_count == 0


def test_when_everybody_is_slow_the_swarm_is_not_flooded() -> None:
    lookup = Lookup(TARGET, OWN, scattered(500))
    for _ in range(500):
        for one in lookup.next_queries():
            lookup.slow(one)
    assert lookup.asked_count <= SLOW_AT_ONCE + ALPHA
    assert not lookup.is_done


def test_an_answer_that_nobody_asked_for_is_not_taken() -> None:
    lookup = Lookup(TARGET, OWN, [near(5), near(6), near(7), near(8)])
    lookup.next_queries()
    lookup.answered(near(1), [near(2)])
    lookup.answered(near(8), [near(2)])
    lookup.failed(near(8))
    lookup.slow(near(8))
    assert lookup.closest_answered() == []
    lookup.answered(near(5), [])
    assert lookup.next_queries() == [near(8)]


def test_an_answer_counts_once() -> None:
    lookup = Lookup(TARGET, OWN, [near(5)])
    lookup.next_queries()
    lookup.answered(near(5), [])
    lookup.answered(near(5), [near(1)])
    lookup.failed(near(5))
    assert lookup.is_done
    assert lookup.closest_answered() == [near(5)]


def test_no_more_than_k_of_one_answer_are_looked_at() -> None:
    lookup = Lookup(TARGET, OWN, [near(500)], k=4)
    lookup.next_queries()
    lookup.answered(near(500), (near(number) for number in range(100, 0, -1)))
    lookup.alpha = 100
    assert set(lookup.next_queries()) == {near(number) for number in (100, 99, 98, 97)}


def test_a_peer_that_names_many_nonexistent_ones_is_no_longer_believed() -> None:
    honest, liar = near(1000), near(1001)
    lookup = Lookup(TARGET, OWN, [honest, liar])
    lookup.next_queries()
    lookup.answered(liar, [near(number) for number in range(1, 21)])
    lookup.answered(honest, [near(number) for number in range(30, 50)])
    invented = 0
    while not lookup.is_done:
        for one in lookup.next_queries():
            if one.node_id ^ TARGET < 30:
                invented += 1
                lookup.failed(one)
            else:
                lookup.answered(one, [])
    assert invented <= FAILURES_TO_DISCREDIT + ALPHA - 1
    assert lookup.closest_answered() == [near(number) for number in range(30, 50)]


def test_a_contact_that_others_name_too_is_believed() -> None:
    honest, liar = near(1000), near(1001)
    lookup = Lookup(TARGET, OWN, [honest, liar], k=8)
    lookup.next_queries()
    lookup.answered(liar, [near(number) for number in (1, 2, 3, 4, 5, 6, 7, 8)])
    lookup.answered(honest, [near(8)])
    while not lookup.is_done:
        for one in lookup.next_queries():
            if one == near(8):
                lookup.answered(one, [])
            else:
                lookup.failed(one)
    assert lookup.closest_answered() == [near(8), honest, liar]


def test_contacts_that_only_liars_named_are_asked_when_there_is_nobody_else() -> None:
    liar = near(1000)
    lookup = Lookup(TARGET, OWN, [liar])
    lookup.next_queries()
    lookup.answered(liar, [near(number) for number in range(1, 21)])
    while not lookup.is_done:
        for one in lookup.next_queries():
            if one == near(20):
                lookup.answered(one, [])
            else:
                lookup.failed(one)
    assert lookup.closest_answered() == [near(20), liar]


def test_a_real_peer_cannot_be_hidden_behind_a_wrong_address() -> None:
    real, liar, honest = near(1, "real"), near(100), near(101)
    lookup = Lookup(TARGET, OWN, [liar, honest])
    lookup.next_queries()
    lookup.answered(liar, [near(1, "invented")])
    (asked,) = lookup.next_queries()
    lookup.failed(asked)
    lookup.answered(honest, [real])
    (asked,) = lookup.next_queries()
    assert asked.addresses == ("real", "invented")
    lookup.answered(asked, [])
    assert lookup.closest_answered()[0].node_id == real.node_id


def test_the_addresses_of_our_own_table_stay_first_however_many_others_are_named() -> None:
    ours, liar = near(50, "proven"), near(10)
    lookup = Lookup(TARGET, OWN, [ours, liar], alpha=1)
    (asked,) = lookup.next_queries()
    lookup.answered(asked, [near(50, *(f"invented {number}" for number in range(8)))])
    (asked,) = lookup.next_queries()
    assert asked.addresses[0] == "proven"


def test_an_address_that_came_while_the_wrong_one_was_tried_is_tried_next() -> None:
    real, liar, honest = near(1, "real"), near(100), near(101)
    lookup = Lookup(TARGET, OWN, [liar, honest])
    lookup.next_queries()
    lookup.answered(liar, [near(1, "invented")])
    (asked,) = lookup.next_queries()
    lookup.answered(honest, [real])
    lookup.failed(asked)
    assert [one.node_id for one in lookup.next_queries()] == [real.node_id]


def test_a_peer_that_fails_is_not_tried_for_ever_because_it_gets_new_addresses() -> None:
    asked = 0
    lookup = Lookup(TARGET, OWN, [near(1000 + number) for number in range(60)], k=60)
    while not lookup.is_done:
        for one in lookup.next_queries():
            if one.node_id == near(1).node_id:
                asked += 1
                lookup.failed(one)
            else:
                lookup.answered(one, [near(1, f"address {lookup.asked_count}")])
    assert asked == 3


def inventor(count: int = 20) -> Callable[[int], list[Contact]]:
    """Answers with contacts that do not exist, each time others, ever closer to the target."""
    made = 10_000

    def invent(_: int) -> list[Contact]:
        nonlocal made
        made -= count
        return [near(made + one) for one in range(count)]

    return invent


@pytest.mark.slow
def test_a_world_of_liars_costs_a_bounded_number_of_questions() -> None:
    invent = inventor()
    lookup = Lookup(TARGET, OWN, [near(20_000)])
    while not lookup.is_done:
        for one in lookup.next_queries():
            lookup.answered(one, invent(0))
    assert lookup.asked_count <= QUESTIONS_PER_K * lookup.k


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_with_a_fifth_lying_the_honest_ones_nearest_to_the_target_are_found(seed: int) -> None:
    swarm = routed(200)
    chance = random.Random(seed)
    everybody = list(swarm.alive.values())
    liars = {one.node_id for one in chance.sample(everybody, 40)}
    liars_near = nearest((one for one in everybody if one.node_id in liars), TARGET, 10)
    invent = inventor(10)
    start = next(iter(swarm.knows.values()))
    lookup = Lookup(TARGET, OWN, nearest(start, TARGET, 20))
    while not lookup.is_done:
        for one in lookup.next_queries():
            if one.node_id not in swarm.alive:
                lookup.failed(one)
            elif one.node_id in liars:
                lookup.answered(one, [*invent(0), *liars_near])
            else:
                lookup.answered(one, swarm.ask(one, TARGET, 20) or [])
    honest = [one for one in nearest(everybody, TARGET, 20) if one.node_id not in liars]
    assert set(honest[:10]) <= set(lookup.closest_answered())


class RandomWorld:
    """Answers, silence and lateness at random, against which the rules must hold."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.contacts = scattered(80)
        self.open: list[Contact] = []

    def step(self, lookup: Lookup) -> None:
        self.open += lookup.next_queries()
        if not self.open:
            return
        one = self.chance.choice(self.open)
        fate = self.chance.random()
        if fate < 0.2:
            lookup.slow(one)
            return
        self.open.remove(one)
        if fate < 0.4:
            lookup.failed(one)
        else:
            lookup.answered(one, self.chance.sample(self.contacts, 25))


@given(seed=st.integers(0, 1 << 32), k=st.integers(1, 8), alpha=st.integers(1, 5))
@settings(max_examples=150, deadline=None)
def test_whatever_comes_in_whatever_order_it_ends(seed: int, k: int, alpha: int) -> None:
    world = RandomWorld(random.Random(seed))
    lookup = Lookup(TARGET, OWN, world.contacts[:3], k, alpha)
    for _ in range(5000):
        if lookup.is_done:
            break
        world.step(lookup)
        assert len(world.open) <= alpha + SLOW_AT_ONCE
    assert lookup.is_done
    found = lookup.closest_answered()
    assert len(found) <= k
    assert found == nearest(found, TARGET, k)
    assert lookup.asked_count <= QUESTIONS_PER_K * k


def test_it_waits_for_slow_ones_only_once_somebody_answered_and_nobody_else_is_left() -> None:
    lookup = Lookup(TARGET, OWN, [near(1), near(2), near(3)], k=3, alpha=2)
    first, second = lookup.next_queries()
    assert not lookup.waits_for_slow_only, "nobody is slow"
    lookup.slow(first)
    assert not lookup.waits_for_slow_only, "nobody has answered, and one is in flight"
    lookup.answered(second, [])
    assert not lookup.waits_for_slow_only, "one has not been asked"
    (third,) = lookup.next_queries()
    assert not lookup.waits_for_slow_only, "it is in flight"
    lookup.answered(third, [])
    assert lookup.waits_for_slow_only
    assert not lookup.is_done
    lookup.answered(first, [])
    assert not lookup.waits_for_slow_only
    assert lookup.is_done


def test_it_does_not_end_while_all_are_slow_and_nobody_has_answered() -> None:
    lookup = Lookup(TARGET, OWN, [near(1)], k=3)
    for one in lookup.next_queries():
        lookup.slow(one)
    assert not lookup.waits_for_slow_only
    assert not lookup.is_done
