"""A program that a forge makes for the tests is as one that is really started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


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
