"""Leaving by signal: gently at first, and by force when something will not let go."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands.console import environment, stop
from tests.leaving import LEAVE_SECONDS

PROGRAM = """
import sys
from pathlib import Path
import trio
from node.app.cli.interruption import at_hard_exit, run_until_signal

left_behind = Path(sys.argv[1])

async def gentle():
    try:
        print("ready", flush=True)
        await trio.sleep_forever()
    finally:
        left_behind.unlink()

def broken():
    raise ValueError("a clean-up with a bug in it")

async def stubborn():
    with trio.CancelScope(shield=True), at_hard_exit(left_behind.unlink), at_hard_exit(broken):
        print("ready", flush=True)
        await trio.sleep_forever()

async def busy():
    import time
    with at_hard_exit(left_behind.unlink):
        print("ready", flush=True)
        while True:
            time.sleep(0.01)

async def failing_on_the_way_out():
    try:
        print("ready", flush=True)
        await trio.sleep_forever()
    finally:
        left_behind.unlink()
        raise RuntimeError("the clean-up failed")

left_behind.touch()
sys.exit(run_until_signal({gentle, stubborn, busy}[0]))
"""

KEEPING = """
import sys
from pathlib import Path
import trio
from node.app.cli.interruption import KEEPING_SECONDS, LEAVING_SECONDS, run_until_signal

checkpoint = Path(sys.argv[1])
told = []

async def keeping():
    print("ready", flush=True)
    while not told:
        await trio.sleep(0.05)
    await trio.sleep(LEAVING_SECONDS + 0.5)
    checkpoint.touch()
    return 0

def leave():
    told.append(True)
    return True

sys.exit(run_until_signal(keeping, leave=leave, patience_seconds=KEEPING_SECONDS))
"""

CUT = """
import sys
from functools import partial
import trio
from node.app.cli.interruption import at_hard_exit, run_until_signal
from node.app.foreground import _bound_the_end, _tell_of_the_cut

keeps = sys.argv[2] == "keeps"

async def writing():
    with trio.CancelScope(shield=True), at_hard_exit(partial(_tell_of_the_cut, keeps)):
        print("ready", flush=True)
        if sys.argv[1] == "leave":
            _bound_the_end(keeps, None, 0.2)
        await trio.sleep_forever()

sys.exit(run_until_signal(writing, patience_seconds=0.2))
"""

SIGNALS = """
from node.core.stopping_signals import stopping_signals
print([int(one) for one in stopping_signals()])
"""

AT_THE_EDGES = """
import signal, sys
import trio
from node.app.cli.interruption import run_until_signal

def stopped(number, frame):
    print("handed on", number)
    sys.exit(128 + number)

loop = trio.run

def run(*arguments, **options):
    {before}
    try:
        return loop(*arguments, **options)
    finally:
        {after}

async def main():
    await trio.sleep(0)
    {within}
    print("done")
    return 0

trio.run = run
signal.signal(signal.SIGTERM, stopped)
sys.exit(run_until_signal(main))
"""

STOP = "signal.raise_signal(signal.SIGTERM)"

WAYS = [
    "gentle",
    "stubborn",
    pytest.param("busy", marks=pytest.mark.slow),
    "failing_on_the_way_out",
]


def interrupt(way: str, left_behind: Path, number: signal.Signals) -> tuple[int, float, str]:
    program = PROGRAM.replace("{gentle, stubborn, busy}[0]", way)
    with subprocess.Popen(
        [sys.executable, "-c", program, str(left_behind)],
        env=environment(left_behind.parent),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        return stop(process, number)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_whatever_is_running_a_signal_ends_it_in_two_seconds_with_a_clean_disk(
    way: str, tmp_path: Path
) -> None:
    left_behind = tmp_path / "file"
    code, seconds, errors = interrupt(way, left_behind, signal.SIGINT)
    assert code == 130
    assert seconds < LEAVE_SECONDS
    assert errors == ""
    assert not left_behind.exists()


@pytest.mark.slow
@pytest.mark.parametrize("before", [(), (signal.SIGTERM,)], ids=["one", "two"])
def test_a_last_checkpoint_is_written_to_the_end_unless_a_second_signal_comes(
    before: tuple[signal.Signals, ...], tmp_path: Path
) -> None:
    """It was cut off after 4.4 s, in which few disks take a state of a gigabyte."""
    checkpoint = tmp_path / "checkpoint"
    with subprocess.Popen(
        [sys.executable, "-c", KEEPING, str(checkpoint)],
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        for one in before:
            process.send_signal(one)
        ended, _, errors = stop(process, signal.SIGINT)
    assert ended in (130, 143), "of two at once, either may be handled first"
    assert errors == ""
    assert checkpoint.exists() == (not before)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "keeps", "code"),
    [("signal", "keeps", 130), ("leave", "keeps", 1), ("signal", "", 130), ("leave", "", 0)],
)
def test_one_whose_last_checkpoint_is_cut_off_says_so(
    way: str, keeps: str, code: int, tmp_path: Path
) -> None:
    """After `potluck leave` it once ended with exit code 0 and without a word."""
    with subprocess.Popen(
        [sys.executable, "-c", CUT, way, keeps],
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        if way == "signal":
            process.send_signal(signal.SIGINT)
        _, said = process.communicate()
        assert process.returncode == code
    assert (b"If a last checkpoint was being written, it is missing." in said) == bool(keeps)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_other_signals_have_their_own_codes(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    assert interrupt("gentle", tmp_path / "file", number)[0] == code


def test_under_nohup_the_end_of_the_terminal_ends_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SIGNALS]
    with subprocess.Popen(
        ["nohup", *command], env=environment(tmp_path), stdout=subprocess.PIPE, cwd=tmp_path
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read() == b"[2, 15]\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("edges", "said"),
    [
        ({"before": STOP, "within": "await trio.sleep_forever()"}, ""),  # heard, and cancelled
        ({"after": STOP}, "done\nhanded on 15\n"),
        ({"within": f"{STOP}; await trio.sleep_forever()", "after": STOP}, ""),
    ],
)
def test_a_signal_while_the_loop_begins_or_ends_is_heard_and_raises_nothing_in_it(
    edges: dict[str, str], said: str, tmp_path: Path
) -> None:
    program = AT_THE_EDGES.format(**{"before": "pass", "within": "pass", "after": "pass"} | edges)
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (143, said, "")
