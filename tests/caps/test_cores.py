"""A process that is kept to some cores: which, all of its threads, and not for longer."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from node.caps.cores import cores_in, kept_to_cores, least_wanted


def test_those_are_taken_that_the_fewest_are_kept_to() -> None:
    kept = [frozenset({0}), frozenset({0, 1}), frozenset({2})]
    assert least_wanted({0, 1, 2, 3}, kept, 1) == {3}
    assert least_wanted({0, 1, 2, 3}, [*kept, frozenset({2})], 2) == {1, 3}
    assert len(least_wanted(range(8), [], 3)) == 3


def test_equal_ones_are_taken_by_chance() -> None:
    assert {tuple(least_wanted({0, 1}, [], 1)) for _ in range(64)} == {(0,), (1,)}


@pytest.mark.parametrize(("text", "cores"), [("0-3,7\n", {0, 1, 2, 3, 7}), ("5", {5})])
def test_what_the_kernel_says_is_read(text: str, cores: set[int]) -> None:
    assert cores_in(text) == cores


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux can")
def test_every_thread_is_kept_and_let_go_again() -> None:
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("one core is all there is")
    ask, asked, seen = threading.Event(), threading.Event(), []

    def live_through_it() -> None:
        ask.wait()
        seen.append(os.sched_getaffinity(0))
        asked.set()

    older = threading.Thread(target=live_through_it)
    older.start()
    with kept_to_cores(1):
        kept = os.sched_getaffinity(0)
        ask.set()
        asked.wait()
        younger = threading.Thread(target=live_through_it)
        younger.start()
        younger.join()
    older.join()
    assert len(kept) == 1
    assert seen == [kept, kept]
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize("threads", [None, 100_000])
def test_nobody_is_kept_who_may_have_all(threads: int | None) -> None:
    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("nobody can be kept here")
    before = os.sched_getaffinity(0)
    with kept_to_cores(threads):
        assert os.sched_getaffinity(0) == before
