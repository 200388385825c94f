"""Packets that come and go must not be given back to the kernel and asked for again."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

COUNT_PAGE_FAULTS = """
import resource
from node.net.transport.plugin import keep_freed_memory_at_hand
if {is_told}:
    keep_freed_memory_at_hand()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(100):
    packets = [b"x" * 65_519 for _ in range(64)]
    del packets
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(is_told: bool) -> int:
    program = COUNT_PAGE_FAULTS.format(is_told=is_told)
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return int(run.stdout)


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a hint for glibc alone")
def test_packets_that_come_and_go_cost_hardly_any_page_faults() -> None:
    assert page_faults(is_told=True) * 5 < page_faults(is_told=False)
