"""The server is killed while it writes: every answer is in the log, and the log is sound."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from auth.tokens import read_token
from tests.auth.store.stores import Server, running

ROOT = Path(__file__).resolve().parents[3]

# Prints a serial number only after the pass was answered, each in a write of its own.
CHILD = """
import sys
from pathlib import Path

import trio

from tests.auth.store.stores import ROOT, Clock, Node, Person, running

async def renew_for_ever(node, tell):
    await node.join(Person(f"friend{node.key.seed[-1]}"))
    while True:
        await node.renew()
        tell(node)

def tell(node):
    from auth.tokens import read_token
    print(read_token(node.token).serial, flush=True)

async def main(server):
    async with trio.open_nursery() as nursery:
        for number in range(1, 9):
            nursery.start_soon(renew_for_ever, Node(number, server), tell)

clock = Clock()
clock.forward(int(sys.argv[2]))
with running(Path(sys.argv[1]), clock) as server:
    for number in range(1, 9):
        server.moderation.allow(f"friend{number}", actor=ROOT)
    print("ready", flush=True)
    trio.run(main, server)
"""


def serials_until_killed(folder: Path, answers: int, forward_ms: int) -> list[int]:
    """The issues that a server reported; it is killed during the next ones."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(folder), str(forward_ms)], cwd=ROOT,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        said = [child.stdout.readline() for _ in range(answers)]
    finally:
        os.kill(child.pid, signal.SIGKILL)
        rest, _ = child.communicate()
    # what it had said already; a line that was cut off was not said
    said += [line for line in rest.splitlines(keepends=True) if line.endswith("\n")]
    return [int(line) for line in said]


def check(server: Server, said: list[int]) -> None:
    assert said
    in_log = {row.serial for row in server.moderation.audit(limit=5000).rows}
    known = {token.serial for token in server.moderation.tokens(limit=5000).tokens}
    assert set(said) <= in_log
    assert set(said) <= known
    verdict = server.moderation.verify()
    assert verdict.sound, verdict.what
    assert server.moderation.audit(act="tampered").rows == ()
    token = read_token(server.moderation.courier_token(b"k" * 32, actor="local:test"))
    assert token.serial > max(said)


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [4, pytest.param(40, marks=pytest.mark.soak)])
def test_no_pass_that_was_answered_is_missing_from_the_log(folder: Path, rounds: int) -> None:
    chance = random.Random(4)
    said: list[int] = []
    for turn in range(rounds):
        now = serials_until_killed(folder, chance.randrange(1, 60), turn)
        assert not said or min(now) > max(said), "a serial number was given out twice"
        said = now
        with running(folder) as server:
            check(server, said)
