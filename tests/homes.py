"""The configuration of a node in a folder of a test."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from node.core.configuration import Configuration, read_configuration


def home_in(folder: Path, **variables: str) -> Configuration:
    """Read it with no other variables than these. It asks no router for a port: a test has none."""
    environment = {"POTLUCK_HOME": str(folder), "POTLUCK_NETWORK_MAP_PORT": "false"}
    return read_configuration(environment={**environment, **variables})


@contextmanager
def full_disk() -> Iterator[None]:
    """No file can be written: the limit on its size stops the writing as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
