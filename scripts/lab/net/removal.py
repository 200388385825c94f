"""Removes laboratories: processes, namespaces and files, by the prefix of their names.

Each laboratory has a watchman, which is this file as a program in a process of its own:

    python removal.py PREFIX OWNER_PID

It waits until the owner writes to its pipe, or dies however it dies, and removes the laboratory.
The owner's death is also seen by a pidfd: a child that the owner forked may hold the pipe open.
If the watchman was killed too, the next laboratory on this machine removes what is left.

The prefix names the owner: its process id, and the moment of its start, because the machine uses
process ids again.

All that has an interface, a queue or a rule in the laboratory is in its namespaces, and goes with
them. A namespace goes with its name and its last process.

The file imports nothing of ours, so that the watchman starts in hundredths of a second.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PREFIX = "potluck-lab"
_OWNER = re.compile(rf"{PREFIX}-(?P<pid>\d+)-(?P<started>\d+)-\d+-")

NAMESPACES = Path("/run/netns")  # where iproute2 has them
PATIENCE_SECONDS = 10.0  # for processes that do not die: they hang in the kernel
LOOK_SECONDS = 0.005


def prefix_for(owner: int, count: int) -> str:
    """What all names in the laboratory with this count begin with, of the process `owner`."""
    return f"{PREFIX}-{owner}-{started(owner)}-{count}-"


def prefix_of(name: str) -> str:
    """The prefix of the laboratory that the name belongs to, or "" if to none."""
    found = _OWNER.match(name)
    return found.group() if found else ""


def owner_lives(prefix: str) -> bool:
    """Whether the process that made that laboratory still exists."""
    found = _OWNER.match(prefix)
    return found is not None and started(int(found["pid"])) == int(found["started"])


def started(pid: int) -> int:
    """When a process began, in clock ticks of this machine; 0 if it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    # the second field is the name of the program, in parentheses, and may contain anything
    state, *fields = text[text.rindex(")") + 2 :].split()
    return 0 if state in "ZX" else int(fields[18])


def lab_folder(prefix: str) -> Path:
    """Where a laboratory may have files."""
    return Path(tempfile.gettempdir()) / prefix.rstrip("-")


def remove_lab(prefix: str) -> None:
    """End the processes of that laboratory and remove all that it consists of.

    Somebody else may remove the same at the same time.
    """
    names = _namespaces(prefix)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (pids := list(processes_in(names))) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(LOOK_SECONDS)
    for name in names:
        # it fails if it is gone already
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
    shutil.rmtree(lab_folder(prefix), ignore_errors=True)


def remove_orphans() -> None:
    """Remove the laboratories whose owners are dead."""
    found = [*NAMESPACES.glob(f"{PREFIX}-*"), *Path(tempfile.gettempdir()).glob(f"{PREFIX}-*")]
    for prefix in {prefix_of(f"{one.name}-") for one in found}:
        if prefix and not owner_lives(prefix):
            remove_lab(prefix)


def remains(prefix: str) -> list[str]:
    """What still has a name that begins so."""
    folder = lab_folder(prefix)
    return [*_namespaces(prefix), *([str(folder)] if folder.exists() else [])]


def processes_in(names: list[str]) -> Iterator[int]:
    """The processes that live in one of these namespaces."""
    inodes = set()
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            inodes.add(os.stat(NAMESPACES / name).st_ino)
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                if os.stat(process / "ns" / "net").st_ino in inodes:
                    yield int(process.name)
            except OSError:
                continue  # it has ended meanwhile


def _namespaces(prefix: str) -> list[str]:
    return [one.name for one in NAMESPACES.glob(f"{prefix}*")]


def main() -> None:
    prefix, owner = sys.argv[1], int(sys.argv[2])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are meant for the owner
    watched: list[int] = [sys.stdin.fileno()]
    with contextlib.suppress(ProcessLookupError):
        watched.append(os.pidfd_open(owner))
        if owner_lives(prefix):
            select.select(watched, [], [])
    remove_lab(prefix)


if __name__ == "__main__":
    main()
