"""A keeper of one `potluck` in a network of its own: `python -m lab.bench.caps_peer`.

It leaves the machine's network for an empty one, is given a cable by its caller, and starts the
ordered commands there, as a person would type them. Their output goes to files.

Promise: when the keeper's stdin ends, which happens also if the bench is killed, the processes that
it has started are told to leave, and killed if they do not at once. Their folder is removed next,
and a later write would leave files there.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import trio

from lab.bench.orders import obey
from lab.bench.own_network import configure_network, leave_for_own_network

LEAVE_SECONDS: Final = 6.0  # a Ctrl-C promises five
ABANDONED_SECONDS: Final = 1.0  # the bench itself promises to be gone within five


class CapsPeer:
    """The orders of this process: each public coroutine is one."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None

    async def leave(self) -> None:
        """Have an empty network."""
        leave_for_own_network()

    async def configure(self, commands: list[str]) -> None:
        """Run commands of iproute2 in it."""
        await configure_network(commands)

    async def begin(
        self, words: list[str], environment: dict[str, str], folder: str
    ) -> dict[str, Any]:
        """Start `potluck WORDS`; its output goes to `told` and `errors` in that folder."""
        command = [sys.executable, "-m", "node", *words]
        self._child = _started(command, {**os.environ, **environment}, Path(folder))
        return {"process_id": self._child.pid}

    async def end(self) -> dict[str, Any]:
        """Have it leave; its exit code."""
        return {"exit_code": self.end_child()}

    def end_child(self, seconds: float = LEAVE_SECONDS) -> int | None:
        child = self._child
        if child is None:
            return None
        if child.poll() is None:
            child.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                child.wait(seconds)
        if child.poll() is None:
            child.kill()
        return child.wait()


def _started(
    command: list[str], environment: dict[str, str], folder: Path
) -> subprocess.Popen[bytes]:
    """From this very thread: the network is this thread's."""
    with (folder / "told").open("ab") as told, (folder / "errors").open("ab") as errors:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=told, stderr=errors, env=environment
        )


def main() -> None:
    peer = CapsPeer()
    try:
        trio.run(obey, peer)
    finally:
        peer.end_child(ABANDONED_SECONDS)


if __name__ == "__main__":
    main()
