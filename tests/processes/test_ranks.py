"""Two processes of one machine as one peer, with torch's own reduction between them."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

import pytest
import trio

from tests.ports import held_port
from tests.processes.children import Child, started
from tests.processes.test_scripts_that_train import (
    STEP,
    TRAINING_SECONDS,
    address_of,
    running_example,
)

pytestmark = pytest.mark.slow

ROOT: Final = Path(__file__).parents[2]
EXAMPLE: Final = ROOT / "docs" / "examples" / "train_ranks.py"
PEER: Final = Path(__file__).with_name("ranks_peer.py")
RANKS: Final = 2
LONGEST_EXAMPLE_LINES: Final = 50
SILENCE_SECONDS: Final = 8.0
LONGER_SECONDS: Final = 12.0
ENDING_SECONDS: Final = 60.0  # it takes one; a timeout of torch's comes after half an hour


@asynccontextmanager
async def machine(home: Path, script: Path, *words: str) -> AsyncIterator[list[Child]]:
    """All its ranks, as torchrun starts them."""
    async with AsyncExitStack() as stack:
        port = stack.enter_context(held_port())
        shared = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(RANKS),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "",
        }
        yield [
            await stack.enter_async_context(
                started(
                    [sys.executable, str(script), *words],
                    {**shared, "RANK": str(rank), "POTLUCK_HOME": str(home / str(rank))},
                    errors_to=subprocess.STDOUT,
                )
            )
            for rank in range(RANKS)
        ]


async def until_ready(ranks: list[Child]) -> None:
    """Every rank is about to enter the run."""
    with trio.fail_after(TRAINING_SECONDS):
        for child in ranks:
            while b'"ready"' not in (line := await child.read_line()):
                assert line, "it has ended"


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= LONGEST_EXAMPLE_LINES


async def test_all_ranks_and_another_peer_hold_the_same_bits(tmp_path: Path) -> None:
    """The other peer is a single process. Steps that it makes alone, before they meet, are its."""
    told: list[dict[int, str]] = [{} for _ in range(RANKS + 1)]
    enough = trio.Event()

    async def follow(number: int, child: Child) -> None:
        while line := (await child.read_line()).decode():
            if found := STEP.match(line):
                told[number][int(found[1])] = found[2]
                if len(set.intersection(*map(set, told))) >= 3:
                    enough.set()

    with trio.fail_after(TRAINING_SECONDS):
        async with running_example(tmp_path / "alone") as alone:
            address = await address_of(alone)
            async with machine(tmp_path, EXAMPLE, address) as ranks, trio.open_nursery() as nursery:
                for number, child in enumerate((*ranks, alone)):
                    nursery.start_soon(follow, number, child)
                await enough.wait()
                nursery.cancel_scope.cancel()
    for step in set.intersection(*map(set, told)):
        assert len({models[step] for models in told}) == 1, f"step {step}"


@pytest.mark.parametrize("how", ["go", "delayed", "local"])
async def test_samples_of_all_ranks_count_once_and_both_end_with_the_run(
    how: str, tmp_path: Path
) -> None:
    """And hold the same bits after each call. When the third step is taken over, passes beside it
    may have filled the batch of a fourth, which finish then takes over."""
    async with machine(tmp_path, PEER, "3", "60", how) as ranks:
        with trio.fail_after(TRAINING_SECONDS):
            told = [(await child.read_rest()).decode().splitlines() for child in ranks]
            assert [await child.exit_code() for child in ranks] == [0, 0], told
    first, second = ([json.loads(line) for line in lines if "{" in line] for lines in told)
    steps = [one for one in first if "step" in one or "held" in one]
    numbers = [one["step"] for one in steps[:-1]]
    assert numbers == [1, 2, 3] or (how == "delayed" and numbers == [1, 2, 3, 4])
    assert steps == [one for one in second if "step" in one or "held" in one]
    (counted,) = [one for one in first if "counted" in one]
    assert counted["counted"] == RANKS * 8 * counted["passes"]


async def test_batches_of_different_sizes_are_refused_on_every_rank(tmp_path: Path) -> None:
    async with machine(tmp_path, PEER, "1", "60", "uneven") as ranks:
        with trio.fail_after(TRAINING_SECONDS):
            told = [(await child.read_rest()).decode() for child in ranks]
            assert [await child.exit_code() for child in ranks] == [3, 3], told
    assert all("ProtocolMisuse: The ranks of this machine bring 8, 9" in one for one in told), told


@pytest.mark.parametrize(("victim", "seconds"), [(0, LONGER_SECONDS), (1, 1.0)])
async def test_ranks_wait_longer_than_their_timeout_and_end_with_the_one_that_dies(
    victim: int, seconds: float, tmp_path: Path
) -> None:
    """Rank 0 waits for somebody who has begun the run. Both wait alike whoever dies afterwards, so
    one of them waits long."""
    async with machine(tmp_path, PEER, "3", str(SILENCE_SECONDS), "wait") as ranks:
        await until_ready(ranks)
        await trio.sleep(seconds)
        assert [child.process.poll() for child in ranks] == [None, None]
        ranks[victim].send_signal(signal.SIGKILL)
        with trio.fail_after(ENDING_SECONDS):
            other = ranks[1 - victim]
            said = (await other.read_rest()).decode()
            assert await other.exit_code() == 3, said
    assert re.search(rf"RankLost: Another rank .* rank {1 - victim} ends, too", said), said
    assert "Traceback" not in said


async def test_a_rank_that_dies_in_training_ends_the_others_in_words(tmp_path: Path) -> None:
    async with machine(tmp_path, PEER, "1000000", "60", "go") as ranks:
        with trio.fail_after(TRAINING_SECONDS):
            while b'"step"' not in await ranks[0].read_line():
                pass
        ranks[1].send_signal(signal.SIGKILL)
        with trio.fail_after(ENDING_SECONDS):
            said = (await ranks[0].read_rest()).decode()
            assert await ranks[0].exit_code() == 3, said
    assert "RankLost: Another rank of this machine has ended" in said
