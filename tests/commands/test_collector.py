"""The garbage collector does not look through the libraries while a command starts and ends."""

from __future__ import annotations

import subprocess
import sys

import pytest

COMMAND = """
import argparse
import gc
import sys
usual = gc.get_threshold()
from node.app.main import main
from node.app.cli.interruption import run_until_signal
looks = []
def tell():
    print(looks.count(2), gc.get_freeze_count() > 100_000, gc.get_threshold() == usual)
async def loop():
    tell()
    return 0
def run(_arguments):
    import node.app.foreground
    return run_until_signal(loop)
def log_in_and_run(_arguments):
    run_until_signal(loop)
    return run(_arguments)
def calculate(_arguments):
    import torch
    return 0
def simulate(_arguments):
    from lab.simulate.rare_collections import COLLECT_AFTER, rare_collections
    with rare_collections():
        run_until_signal(loop)
        print(gc.get_threshold() == COLLECT_AFTER)
    return 0
gc.callbacks.append(lambda phase, about: phase == "start" and looks.append(about["generation"]))
assert main(parse=lambda _words: (RUN, argparse.Namespace())) == 0
tell()
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
def test_nor_are_those_that_a_command_imports_after_its_first_loop() -> None:
    assert printed_by("log_in_and_run") == ["0 False True", *["0 True True"] * 2]


@pytest.mark.slow
def test_neither_are_those_of_a_command_that_only_calculates() -> None:
    assert printed_by("calculate") == ["0 True True"]


def test_a_simulation_keeps_its_own_setting() -> None:
    assert printed_by("simulate") == ["0 False False", "True", "0 False True"]
