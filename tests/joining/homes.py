"""The home of a node that a test has made."""

from __future__ import annotations

from pathlib import Path


def files_below(home: Path) -> set[str]:
    """Every file, by its path there; sockets and pipes as well."""
    return {str(one.relative_to(home)) for one in home.rglob("*") if not one.is_dir()}
