"""A node asks for the descriptors that its connections need, and lives with what it gets."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from node.core.caps.cores import kept_to_cores
from node.core.descriptor_limit import WANTED_DESCRIPTORS
from node.core.status import memory_in_use
from node.net.libp2p.own_addresses import InterfaceAddresses

resource = pytest.importorskip("resource")

RAISE_AND_TELL = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
from node.core.descriptor_limit import raise_descriptor_limit
raise_descriptor_limit()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def limits_after(soft: int, hard: int) -> tuple[int, int]:
    """In a process of its own, because a hard limit that was lowered cannot be raised again."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and hard > most:
        pytest.skip("this machine allows fewer descriptors than the test needs")
    told = subprocess.run(
        [sys.executable, "-c", RAISE_AND_TELL, str(soft), str(hard)],
        capture_output=True,
        text=True,
        check=True,
    )
    now_soft, now_hard = map(int, told.stdout.split())
    return now_soft, now_hard


def test_a_low_limit_is_raised_as_far_as_is_needed() -> None:
    assert limits_after(256, WANTED_DESCRIPTORS + 1) == (WANTED_DESCRIPTORS, WANTED_DESCRIPTORS + 1)


def test_no_more_is_asked_for_than_the_system_allows() -> None:
    assert limits_after(256, 512) == (512, 512)


def test_a_limit_that_is_high_is_left_alone() -> None:
    high = WANTED_DESCRIPTORS + 8
    assert limits_after(high, high) == (high, high)


@contextmanager
def without_descriptors() -> Iterator[None]:
    """Open files stay open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            os.open("/dev/null", os.O_RDONLY)
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_node_that_has_none_left_goes_on() -> None:
    """It reads its addresses every second or two; strangers may have taken the last descriptor."""
    interfaces = InterfaceAddresses()
    known = interfaces.of_family(4)
    interfaces._read_at = float("-inf")
    with without_descriptors():
        assert interfaces.of_family(4) == known
        assert memory_in_use() is None
        with kept_to_cores(1) as kept:
            kept.look()
