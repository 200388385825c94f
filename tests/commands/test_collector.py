"""The garbage collector does not look through the libraries while a command starts and ends."""

from __future__ import annotations

import subprocess
import sys

import pytest

COMMAND = """
import argparse
import gc
usual = gc.get_threshold()
from node.app.main import main
looks = []
def run(_arguments):
    import node.app.foreground, node.training.trainer
    from node.app.cli.interruption import run_until_signal
    async def loop():
        print(looks.count(2), gc.get_freeze_count() > 100_000, gc.get_threshold() == usual)
        return 0
    return run_until_signal(loop)
def calculate(_arguments):
    import torch
    return 0
gc.callbacks.append(lambda phase, about: phase == "start" and looks.append(about["generation"]))
assert main([], lambda _words: (RUN, argparse.Namespace())) == 0
print(looks.count(2), gc.get_freeze_count() > 100_000, gc.get_threshold() == usual)
"""


def printed_by(run: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", COMMAND.replace("RUN", run)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout.splitlines()


@pytest.mark.slow
def test_the_libraries_of_a_node_are_not_looked_through_and_collecting_is_as_usual() -> None:
    assert printed_by("run") == ["0 True True"] * 2


@pytest.mark.slow
def test_neither_are_those_of_a_command_that_only_calculates() -> None:
    assert printed_by("calculate") == ["0 True True"]
