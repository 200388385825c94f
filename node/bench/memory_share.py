"""What a process costs this machine in memory: its own pages, and its share of those it shares.

The proportional set size (PSS) of several processes can be added up; their resident sizes cannot,
since every one of them counts the library code that they have in common.
"""

from __future__ import annotations

from pathlib import Path


def proportional_bytes(process_id: int) -> int | None:
    """The PSS of a process, or None where the system does not say (only Linux does)."""
    try:
        facts = Path(f"/proc/{process_id}/smaps_rollup").read_text(encoding="ascii")
    except OSError:
        return None
    for line in facts.splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return None
