"""The configuration of a node in a folder of a test."""

from __future__ import annotations

from pathlib import Path

from node.core.configuration import Configuration, read_configuration


def home_in(folder: Path, **variables: str) -> Configuration:
    """Read it with no other variables than these. It asks no router for a port: a test has none."""
    environment = {"POTLUCK_HOME": str(folder), "POTLUCK_NETWORK_MAP_PORT": "false"}
    return read_configuration(environment={**environment, **variables})
