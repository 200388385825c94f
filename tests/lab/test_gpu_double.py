"""The cases of the device double. It replaces functions of torch, which must know it before its
first gradients. So they have a process of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("gpu_double_cases.py")


@pytest.mark.slow
def test_the_double_of_a_gpu_does_what_a_gpu_would() -> None:
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES))
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
