"""`potluck demo`, played once for all tests that ask how it went: it takes most of a minute.

README.md shows it, and tests/processes/test_demo.py insists on everything that it claims. Both use
the fixture `the_demo` of tests/conftest.py, and whichever is first has it played.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEMO_SECONDS = 600.0  # alone on two cores it takes 40; a machine that is full of other tests, more
LINES_SHOWN = 20  # of what it told, where it did not go well


@dataclass(frozen=True)
class Played:
    """`folder` is the one in which it made its temporary one."""

    folder: Path
    exit_code: int
    events: list[dict[str, Any]]


def play(folder: Path) -> Played:
    """The whole of it, which keeps what it has written."""
    environment = {name: value for name, value in os.environ.items() if "POTLUCK" not in name}
    done = subprocess.run(
        [sys.executable, "-m", "node", "demo", "--json", "--keep"],
        env={**environment, "TMPDIR": str(folder)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEMO_SECONDS,
        check=False,
    )
    lines = done.stdout.splitlines()
    if done.returncode:  # pytest shows them
        print(*lines[-LINES_SHOWN:], done.stderr, sep="\n")
    return Played(folder, done.returncode, [json.loads(line) for line in lines])
