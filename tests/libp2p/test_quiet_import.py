"""Importing us leaves the logging of the process alone; importing the library does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPORT = """
import json, logging, sys, threading
before = logging.getLogger("libp2p")
handler = logging.NullHandler()
before.addHandler(handler)
{imports}
logger = logging.getLogger("libp2p")
print(json.dumps({{
    "kept_handler": handler in logger.handlers,
    "propagates": logger.propagate,
    "root_handlers": len(logging.getLogger().handlers),
    "threads": threading.active_count(),
}}))
"""
USE = """
import trio
from libp2p.network.connection import swarm_connection
swarm_connection.logging.debug("what the library says for each connection")
"""


def report(imports: str, tmp_path: Path, **environment: str) -> dict[str, object]:
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", REPORT.format(imports=imports)],
        env={**os.environ, "TMPDIR": str(tmp_path), **environment},
        capture_output=True,
        check=True,
    )
    answer: dict[str, object] = json.loads(process.stdout)
    return {**answer, "said": process.stderr.decode()}


@pytest.mark.slow
def test_importing_the_library_changes_the_logging_of_the_process(tmp_path: Path) -> None:
    """When this fails, the library has stopped doing so, and `quiet_import` may go."""
    loud = report(f"import libp2p\n{USE}", tmp_path, LIBP2P_DEBUG="DEBUG")
    assert not loud["kept_handler"]
    assert not loud["propagates"]
    assert loud["root_handlers"] == 1
    assert loud["threads"] == 2
    assert list(tmp_path.iterdir())


@pytest.mark.slow
def test_importing_us_leaves_it_alone_even_when_the_library_is_told_to_debug(
    tmp_path: Path,
) -> None:
    quiet = report(f"import node.net.network\n{USE}", tmp_path, LIBP2P_DEBUG="DEBUG")
    assert quiet == {
        "kept_handler": True,
        "propagates": True,
        "root_handlers": 0,
        "threads": 1,
        "said": "",
    }
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_when_the_library_was_imported_before_us_its_logger_speaks_to_the_application(
    tmp_path: Path,
) -> None:
    mended = report(f"import libp2p\nimport node.net.network\n{USE}", tmp_path)
    assert mended["propagates"]
    assert mended["root_handlers"] == 0
