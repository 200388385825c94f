"""A process that is kept to some cores: which, all of its threads, and not for longer."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from node.core.caps.cores import cores_in, kept_to_cores, least_wanted, wanted


def test_the_cores_with_the_fewest_processes_are_chosen() -> None:
    kept = [frozenset({0}), frozenset({0, 1}), frozenset({2})]
    assert least_wanted({0, 1, 2, 3}, kept, 1) == {3}
    assert least_wanted({0, 1, 2, 3}, [*kept, frozenset({2})], 2) == {1, 3}
    assert len(least_wanted(range(8), [], 3)) == 3


def test_how_often_cores_are_wanted_is_counted() -> None:
    kept = [frozenset({0}), frozenset({0, 1})]
    assert [wanted({core}, kept) for core in (0, 1, 2)] == [2, 1, 0]
    assert wanted({0, 1}, kept) == 3


KEPT_TO_THE_SAME = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
print(flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux can")
def test_a_process_that_finds_another_on_its_core_moves() -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core is all there is")
    with kept_to_cores(1) as kept:
        assert kept.cores is not None
        before = kept.cores
        (core,) = before
        # Several, since other programs of this machine may be kept to a core as well
        others = [
            subprocess.Popen(
                [sys.executable, "-c", KEPT_TO_THE_SAME, str(core)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for _ in range(3)
        ]
        try:
            for one in others:
                assert one.stdout is not None
                one.stdout.readline()
            kept.look()
            assert kept.cores != before
            assert os.sched_getaffinity(0) == kept.cores
        finally:
            for one in others:
                one.communicate()


def test_equal_ones_are_taken_by_chance() -> None:
    assert {tuple(least_wanted({0, 1}, [], 1)) for _ in range(64)} == {(0,), (1,)}


@pytest.mark.parametrize(("text", "cores"), [("0-3,7\n", {0, 1, 2, 3, 7}), ("5", {5})])
def test_the_kernels_list_of_cores_is_read(text: str, cores: set[int]) -> None:
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
def test_a_process_that_may_use_all_cores_is_not_pinned(threads: int | None) -> None:
    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("nobody can be kept here")
    before = os.sched_getaffinity(0)
    with kept_to_cores(threads):
        assert os.sched_getaffinity(0) == before
