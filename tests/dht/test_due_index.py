"""Things come out in the order in which they are due, wherever they were before."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as some

from protocols.dht.due_index import DueIndex

steps = some.lists(
    some.one_of(
        some.tuples(some.just("set"), some.integers(0, 5), some.integers(0, 20)),
        some.tuples(some.just("discard"), some.integers(0, 5), some.just(0)),
        some.tuples(some.just("pop"), some.just(0), some.integers(0, 20)),
    ),
    max_size=60,
)


@given(steps)
def test_it_gives_what_a_sorted_list_would(steps: list[tuple[str, int, int]]) -> None:
    index: DueIndex[int] = DueIndex()
    naive: list[tuple[int, int]] = []  # (due, thing) in the order of setting
    for what, thing, due in steps:
        if what == "pop":
            ready = sorted((one for one in naive if one[0] <= due), key=lambda one: one[0])
            assert index.pop_due(due) == [one[1] for one in ready]
            naive = [one for one in naive if one[0] > due]
            continue
        naive = [one for one in naive if one[1] != thing]
        if what == "set":
            naive.append((due, thing))
            index.set(thing, due)
        else:
            index.discard(thing)
        assert len(index) == len(naive)
        assert index.next_due() == min((one[0] for one in naive), default=None)
        assert all(index.due_of(one) == moment for moment, one in naive)
        assert all((one in index) == any(one == known for _, known in naive) for one in range(6))


def test_moving_one_thing_for_ever_takes_no_more_memory() -> None:
    index: DueIndex[str] = DueIndex()
    index.set("other", 10**9)
    for due in range(10_000):
        index.set("moved", due)
        assert index.places <= 65
    assert index.pop_due(10**9) == ["moved", "other"]


def test_taking_most_things_out_lets_their_memory_go() -> None:
    index: DueIndex[int] = DueIndex()
    for thing in range(1000):
        index.set(thing, thing)
    for thing in range(990):
        index.discard(thing)
    assert index.places <= 65
    assert index.pop_due(10_000) == list(range(990, 1000))
