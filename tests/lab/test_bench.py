"""`scripts/bench transport`: figures that can be trusted, and processes that end."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import trio

from lab.bench.pouring import BLOCK_CHUNKS, CHUNK_BYTES, make_block
from lab.bench.processes import BenchFailed, introduce, open_peer, open_process
from lab.bench.transport import (
    AUTH_NAMES,
    FIGURES,
    MEASUREMENTS,
    NAMES,
    AuthEffort,
    Effort,
    FigureSamples,
    measure_auth,
    measure_transport,
)
from tests.waiting import PATIENCE_SECONDS

SLOW_READER = "slow_reader_rss_growth_MiB"
SLOW_READER_MIB = 32


def test_every_figure_is_measured_by_exactly_one_measurement() -> None:
    measured = [name for names, _ in MEASUREMENTS for name in names]
    assert sorted(measured) == sorted(NAMES)


def test_a_figure_is_the_median_of_its_repeats_with_their_spread() -> None:
    samples = FigureSamples()
    for value in (3.0, 1.2344, 2.0):
        samples.add("unary_ms_p50", value)
    assert samples.medians() == {"unary_ms_p50": 2.0}
    assert samples.spread() == {
        "unary_ms_p50": {"min": 1.234, "max": 3.0, "runs": [3.0, 1.234, 2.0]}
    }


def test_both_ends_make_the_same_block_of_different_chunks() -> None:
    block = make_block()
    assert block == make_block()
    assert {len(chunk) for chunk in block} == {CHUNK_BYTES}
    assert len(set(block)) == BLOCK_CHUNKS


@pytest.mark.slow
def test_a_figure_that_does_not_exist_is_wrong_use() -> None:
    done = bench("--only", "unary_ms_p5O")
    assert done.returncode == 2
    assert "unary_ms_p50" in done.stdout, "the nearest name is offered"


def bench(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lab", "bench", "transport", "--json", *words]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )


SOME_FIGURES = ("unary_ms_p50", "unary_per_s_16", SLOW_READER)


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(SOME_FIGURES, id="short", marks=pytest.mark.slow),
        pytest.param(NAMES, id="long", marks=pytest.mark.soak),
    ],
)
def test_a_quick_run_prints_its_figures_their_spread_and_the_machine(
    names: tuple[str, ...],
) -> None:
    done = bench("--quick", *(word for name in names for word in ("--only", name)))
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert {name for name in NAMES if name in result} == set(names)
    assert set(result["spread"]) == set(names)
    assert all(result[name] > 0 for name in names if name != SLOW_READER)
    # a bar of the project, kept here because it does not depend on the machine's speed
    assert result[SLOW_READER] < SLOW_READER_MIB
    assert result["machine"]["cores"] == os.cpu_count()


@pytest.mark.slow
async def test_with_tokens_it_measures_what_they_cost_beside_an_open_run() -> None:
    effort = AuthEffort(repeats=1, turns=1, turn_seconds=0.1, small_transfers=10, stream_chunks=16)
    with trio.fail_after(PATIENCE_SECONDS):
        result = await measure_auth(effort, AUTH_NAMES)
    assert set(AUTH_NAMES) <= set(result)
    assert set(result["spread"]) == set(AUTH_NAMES)
    assert result["unary_ms_p50"] > result["auth_overhead_ms"]
    assert result["machine"]["cores"] == os.cpu_count()


@pytest.mark.slow
def test_a_figure_is_asked_for_with_the_kind_of_run_that_has_it() -> None:
    for words in (("--auth", "--only", "join_s"), ("--only", "auth_overhead_ms")):
        done = bench(*words)
        assert done.returncode == 2
        assert "unary_ms_p50" in done.stdout, "those that there are, are named"


@pytest.mark.slow
async def test_only_what_is_asked_for_is_measured() -> None:
    said: list[str] = []
    result = await measure_transport(Effort.quick(2), ["import_s"], said.append)
    assert [name for name in NAMES if name in result] == ["import_s"]
    assert len(result["spread"]["import_s"]["runs"]) == 4, "two starts in each of two repeats"
    assert said == ["import_s", "import_s"]


@pytest.mark.slow
async def test_a_transfer_is_checked_byte_by_byte_when_asked() -> None:
    with trio.fail_after(PATIENCE_SECONDS):
        async with open_peer("one") as one, open_peer("other") as other:
            peer = await introduce(one, other)
            poured = await one.ask("pour", peers=[peer], chunks=BLOCK_CHUNKS + 1, check=True)
            assert poured["bytes"] == (BLOCK_CHUNKS + 1) * CHUNK_BYTES
            assert poured["ended"] > poured["began"]


@pytest.mark.slow
async def test_a_peer_says_why_it_could_not_and_goes_on() -> None:
    with trio.fail_after(PATIENCE_SECONDS):
        async with open_peer("one") as one:
            nobody = one.introduction["peer"][:-4] + "abcd"
            with pytest.raises(BenchFailed, match="one could not `pour`"):
                await one.ask("pour", peers=[nobody], chunks=1)
            assert (await one.ask("cpu"))["seconds"] > 0


async def test_a_process_that_dies_early_is_an_error_and_not_a_wait() -> None:
    with trio.fail_after(PATIENCE_SECONDS), pytest.raises(BenchFailed, match="ended while"):
        async with open_process("it", ["-c", "raise SystemExit(3)"]):
            pass


@pytest.mark.slow  # it is given its time to end first
async def test_a_process_that_does_not_end_is_killed() -> None:
    script = "import signal, time; print('{}', flush=True); time.sleep(600)"
    with trio.fail_after(PATIENCE_SECONDS):
        async with open_process("it", ["-c", script]) as process:
            number = process.process_id
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)


TWO_PEERS = """
import trio
from lab.bench.processes import open_peer

async def main():
    async with open_peer("one"), open_peer("other"):
        print("open", flush=True)
        await trio.sleep_forever()

trio.run(main)
"""


@pytest.mark.slow
def test_when_the_bench_is_killed_its_processes_end() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", TWO_PEERS], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"open\n"
        process.kill()
        # the peers hold the other end of stderr: it ends when the last of them has ended
        process.communicate(timeout=PATIENCE_SECONDS)


@pytest.mark.slow
def test_every_figure_is_explained_in_the_help() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lab", "bench", "transport", "--help"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert all(figure.name in done.stdout and figure.what in done.stdout for figure in FIGURES)
