"""Volunteers who say what their machines may be used for, in a run of real processes.

That caps hold while a node trains is measured from outside: `scripts/bench caps`.
"""

from __future__ import annotations

import json
import signal
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final

import pytest
import trio

from tests.processes.training_runs import potluck, started_run
from tests.waiting import PATIENCE_SECONDS

CAPS: Final = (
    *("--upload-limit", "300kB/s", "--download-limit", "8Mbit/s", "--threads", "1"),
    *("--max-memory", "16GB", "--quota", "1GB/month", "--device", "cpu"),
)


def an_hour_that_is_not_now() -> str:
    begins = datetime.now() + timedelta(hours=6)
    return f"{begins:%H:%M}-{begins + timedelta(hours=1):%H:%M}"


async def ask(home: Path, *words: str) -> Any:
    done = await trio.to_thread.run_sync(lambda: potluck(home, *words, "--json"))
    assert done.returncode == 0, (done.stdout, done.stderr)
    return json.loads(done.stdout)


@pytest.mark.slow
async def test_volunteers_keep_to_what_their_owners_allow(tmp_path: Path) -> None:
    schedule = an_hour_that_is_not_now()
    outside = f"outside of the schedule ({schedule}): continues at"
    with trio.fail_after(3 * PATIENCE_SECONDS):
        async with started_run(tmp_path) as run:
            async with (
                run.joining("small", "--max-memory", "256MB") as small,
                run.joining("night", "--schedule", schedule, *CAPS) as night,
            ):
                paused = await night.until("paused")
                assert outside in json.dumps(paused)
                caps = (await ask(night.home, "status"))["caps"]
                assert caps["paused_by"] == ["schedule"]
                assert (caps["upload_limit"], caps["download_limit"]) == (3e5, 1e6)
                assert (caps["memory_limit"], caps["month_limit"]) == (16 * 10**9, 10**9)
                answer = await ask(night.home, "pause")
                assert (answer["words"], answer["not_kept"]) == ("paused by you", "")
                night.child.send_signal(signal.SIGKILL)
                await night.child.exit_code()
                assert await small.child.exit_code() == 3
            assert "limits.max_memory (--max-memory) sets this limit" in json.dumps(small.told)
            async with run.joining("night", "--schedule", schedule, invite="") as again:
                paused = await again.until("paused")
                assert paused["reasons"][0].endswith("; a restart does not end it")
                resumed = await ask(again.home, "resume")
                assert resumed["was_paused"]
                assert [words.startswith(outside) for words in resumed["still_closed"]] == [True]
                again.child.send_signal(signal.SIGTERM)
                assert await again.child.exit_code() == 0
            told = (await ask(run.organiser.home, "peers"))["peers"]
            assert told == []  # it has never been among those who are waited for
    # What joining took counts, though nothing was ever trained
    used = json.loads((again.home / "traffic.json").read_bytes())["now"]
    assert min(used["sent_bytes"], used["received_bytes"]) > 1000
