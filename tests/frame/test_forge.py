"""A program that a forge makes for the tests is as one that is really started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from lab.bench.orders import SINGLE_THREADED
from lab.bench.processes import WHERE_WE_ARE
from tests.commands.console import environment
from tests.forge import threads_of


def test_a_program_has_the_temporary_folder_that_it_is_told(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import tempfile\nprint(tempfile.gettempdir())\n")
    told = subprocess.run(
        [sys.executable, program],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert told.stdout.strip() == str(tmp_path)


def test_commands_of_tests_and_processes_of_the_laboratory_are_not_really_started(
    tmp_path: Path,
) -> None:
    assert threads_of(environment(tmp_path)) == os.environ.get("OMP_NUM_THREADS", "")
    assert threads_of({**os.environ, **SINGLE_THREADED, **WHERE_WE_ARE}) == "1"
    assert threads_of({**os.environ, "PYTHONPATH": str(tmp_path)}) is None
