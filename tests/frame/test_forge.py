"""A program that a forge makes for the tests is as one that is really started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lab.bench.orders import SINGLE_THREADED
from lab.bench.processes import WHERE_WE_ARE
from tests import forge
from tests.commands.console import environment
from tests.processes.children import started

PEER = (sys.executable, "-m", "tests.processes.peer")


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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forge, "_usual", dict(os.environ))
    assert forge.can_be_forked(environment(tmp_path))
    assert forge.can_be_forked({**os.environ, **SINGLE_THREADED, **WHERE_WE_ARE})
    assert not forge.can_be_forked({**os.environ, "PYTHONPATH": str(tmp_path)})
    assert not forge.can_be_forked({"PATH": os.environ["PATH"]})


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_the_kernel_shows_the_words_and_variables_that_it_was_given() -> None:
    async with started([*PEER, "--port", "0"], {"POTLUCK_TEST_SEED": "5e" * 32}) as child:
        await child.read_line()
        shown = Path("/proc", str(child.process_id))
        assert b"POTLUCK_TEST_SEED=" + b"5e" * 32 in (shown / "environ").read_bytes().split(b"\0")
        words = (shown / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        assert words == [one.encode() for one in (*PEER, "--port", "0")]


@pytest.mark.skipif(subprocess.Popen is forge.really_started, reason="all are really started")
def test_a_program_of_ours_is_a_fork_of_a_forge(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import sys\nprint(*sys.orig_argv)\n")
    told = subprocess.run([sys.executable, program], capture_output=True, text=True, check=True)
    assert "-m tests.forge" in told.stdout
