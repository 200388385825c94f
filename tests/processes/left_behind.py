"""The traces that a command may have left behind, as the kernel shows them from outside.

    traces = Traces(home, temporary)
    traces.look()            # while it runs: what it listens on
    ...                      # it ends, however
    traces.insist_on_nothing()

Looked for: processes with this home in their environment, wherever in the tree they are by now;
sockets that were listened on; locks that are still held; files in the home beside those that are
kept; anything in its temporary folder, in shared memory, or where a socket with a long name stands.

Easy to get wrong: after `kill -9` files stay, of course. But the next start must not be disturbed
by them, and a start after a clean end must find none.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from node.core.control_frames import bindable
from node.core.places import find_places
from node.core.running_lock import hold_running_lock

KEPT: Final = re.compile(
    r"identity\.key|access\.pass|revocations|peers\.json|run\.invite"
    r"|runs/[\w.-]+\.(signed|position|losses)|runs/[\w.-]+\.fetching/state-being-fetched|traffic\.json"
    r"|runs/[\w.-]+\.experts/[\w.-]+\.safetensors"
    r"|credit/\w+/\w+-\d+\.page"
)
"""Files that may be in a volunteer's home when nothing runs: its identity, and where to go on."""

SHARED_MEMORY: Final = Path("/dev/shm")
_LISTENING: Final = "0A"  # a state in /proc/net/tcp


class Traces:
    """Of one command in a home of its own, with a temporary folder (TMPDIR) of its own."""

    def __init__(self, home: Path, temporary: Path) -> None:
        self._home, self._temporary = home, temporary
        self._places = find_places({}, home=str(home))
        self._listening: set[str] = set()
        self._shared = _names_in(SHARED_MEMORY)

    def look(self) -> None:
        """Note what it listens on now."""
        own = {inode for process in processes_of(self._home) for inode in _sockets_of(process)}
        self._listening |= own & _listening_sockets()

    def insist_on_nothing(self) -> None:
        """Nothing is there any more but what is kept."""
        assert files_beside_the_kept(self._home) == []
        assert _names_in(self._temporary) == set()
        socket = self._places.control_socket
        assert bindable(socket) == socket or not bindable(socket).parent.exists()
        assert {name for name in _names_in(SHARED_MEMORY) - self._shared if _is_ours(name)} == set()
        self.insist_on_no_process()

    def insist_on_no_process(self) -> None:
        """That alone, as after a kill, which leaves files. Another node may begin here."""
        assert processes_of(self._home) == []
        assert self._listening & _listening_sockets() == set()
        key_file = self._home / "identity.key"
        if key_file.exists():
            with hold_running_lock(self._places, key_file):
                pass  # else AlreadyRunning


def files_beside_the_kept(home: Path) -> list[str]:
    """Every file below it that is not kept, by its path there; sockets and pipes as well."""
    files = (str(one.relative_to(home)) for one in home.rglob("*") if not one.is_dir())
    return sorted(name for name in files if not KEPT.fullmatch(name))


def processes_of(home: Path) -> list[str]:
    """The ids of those that live and have this home, however they were started."""
    wanted, found = f"POTLUCK_HOME={home}".encode(), []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                environment = (process / "environ").read_bytes()
            except OSError:
                continue  # it has just ended, or is not ours
            if wanted in environment.split(b"\0"):
                found.append(process.name)
    return found


def _sockets_of(process: str) -> set[str]:
    """The inodes of the sockets that a process holds."""
    found = set()
    try:
        for descriptor in Path(f"/proc/{process}/fd").iterdir():
            target = os.readlink(descriptor)
            if target.startswith("socket:["):
                found.add(target[8:-1])
    except OSError:
        pass  # it has just ended
    return found


def _listening_sockets() -> set[str]:
    """The inodes of all TCP sockets of this machine that are listened on."""
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == _LISTENING:
                found.add(words[9])
    return found


def _names_in(folder: Path) -> set[str]:
    return {one.name for one in folder.iterdir()} if folder.is_dir() else set()


def _is_ours(name: str) -> bool:
    """Not of another process that lives, as other tests beside this one have."""
    owner = re.search(r"_(\d+)_", name)
    return owner is None or not Path(f"/proc/{owner[1]}").exists()
