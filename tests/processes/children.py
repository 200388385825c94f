"""Child processes that tests start, watch, stop and kill, and that cannot outlive them.

`running_peer` starts a peer of tests/processes/peer.py; `started` starts anything. The memory and
file descriptors of a process are read from /proc, so they do not depend on its own account.

Easy to get wrong: a test that is killed runs no clean-up of its own. So each child asks the
kernel to be killed when its parent dies (where that exists), besides watching its standard input.
And the kernel means the parent *thread*: a child that is started from a worker thread, as trio
does it, is killed when that thread has been idle for ten seconds. Children are started here from
the main thread, which costs it some milliseconds each.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import termios
from array import array
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import trio

from protocols.identity import Identity, PeerId
from tests.forge import die_with_parent
from tests.waiting import PATIENCE_SECONDS

START_SECONDS: Final = PATIENCE_SECONDS


@dataclass
class Child:
    """A process that a test started, with its standard input and output as pipes."""

    process: subprocess.Popen[bytes]
    standard_input: trio.lowlevel.FdStream
    standard_output: trio.lowlevel.FdStream
    errors_file: Path | None = None
    _held: bytearray = field(default_factory=bytearray)

    @property
    def process_id(self) -> int:
        return self.process.pid

    def send_signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def exit_code(self) -> int:
        """Wait for it to end; the signal that ended it, as a negative number, or its own code."""
        return await trio.to_thread.run_sync(self.process.wait, abandon_on_cancel=True)

    def as_peer(self, peer: str, addresses: Sequence[str]) -> PeerProcess:
        """The same process, now that it has said who it is."""
        return PeerProcess(
            self.process,
            self.standard_input,
            self.standard_output,
            self.errors_file,
            self._held,
            peer=PeerId(peer),
            addresses=tuple(addresses),
        )

    def memory_bytes(self) -> int:
        """Its resident memory, as the kernel counts it."""
        for line in Path(f"/proc/{self.process_id}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        raise RuntimeError("the process is gone")

    def unread_output_bytes(self) -> int:
        """How much of what it has printed waits in the pipe to be read."""
        waiting = array("i", [0])
        fcntl.ioctl(self.standard_output.fileno(), termios.FIONREAD, waiting)
        return waiting[0]

    def file_descriptor_count(self) -> int:
        return len(os.listdir(f"/proc/{self.process_id}/fd"))

    async def read_line(self) -> bytes:
        """The next line of its standard output with something in it; b"" when it has closed that.
        (What it logs may have an empty line, which is no end.)"""
        line = b""
        while not line:
            while b"\n" not in self._held:
                more = await self.standard_output.receive_some(65_536)
                if not more:
                    return b""
                self._held += more
            line, _, rest = bytes(self._held).partition(b"\n")
            self._held[:] = rest
        return line

    async def read_rest(self) -> bytes:
        """The rest of its output, until it closes its standard output."""
        async for more in self.standard_output:
            self._held += more
        rest = bytes(self._held)
        self._held.clear()
        return rest


@asynccontextmanager
async def started(
    arguments: Sequence[str | Path],
    environment: Mapping[str, str] | None = None,
    *,
    errors_to: int | None = None,
) -> AsyncIterator[Child]:
    """Run a command as a child that is killed, if it still runs, when the block is left."""
    process = subprocess.Popen(  # noqa: ASYNC220 - not in a thread, see above
        [str(argument) for argument in arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors_to,
        env={**os.environ, **(environment or {})},
        preexec_fn=die_with_parent,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        standard_input = trio.lowlevel.FdStream(os.dup(process.stdin.fileno()))
        standard_output = trio.lowlevel.FdStream(os.dup(process.stdout.fileno()))
    try:
        yield Child(process, standard_input, standard_output)
    finally:
        process.kill()  # reaches a stopped process as well, and one that has ended not at all
        process.wait()  # after a kill this is a matter of microseconds
        with trio.CancelScope(shield=True):
            await standard_input.aclose()
            await standard_output.aclose()


@dataclass
class PeerProcess(Child):
    """A peer of tests/processes/peer.py in a process of its own."""

    peer: PeerId = field(kw_only=True)
    addresses: tuple[str, ...] = field(kw_only=True)

    @property
    def port(self) -> int:
        """Where it listens: every peer here has one TCP address on loopback."""
        return int(self.addresses[0].split("/tcp/")[1].split("/")[0])


@asynccontextmanager
async def running_peer(
    *flags: str, identity: Identity | None = None, port: int = 0
) -> AsyncIterator[PeerProcess]:
    """A peer that serves the methods of tests/processes/methods.py on loopback."""
    identity = identity or Identity.generate()
    command = [sys.executable, "-m", "tests.processes.peer", "--port", str(port), *flags]
    async with started(command, {"POTLUCK_TEST_SEED": identity.seed.hex()}) as child:
        with trio.fail_after(START_SECONDS):
            line = await child.read_line()
        if not line:
            raise RuntimeError("the peer ended before it listened; its error is printed above")
        told = json.loads(line)
        assert told["peer"] == identity.peer_id
        yield child.as_peer(identity.peer_id, told["addresses"])
