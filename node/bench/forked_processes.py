"""The bench's side of forking.py: processes that one other has forked, to be asked like any."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from node.bench.forking import SINGLE_THREADED
from node.bench.processes import START_SECONDS, BenchProcess

FORK_SECONDS = 60.0  # a millisecond; but a busy machine has let nobody run for ten seconds
GLANCE_SECONDS = 0.02  # between two looks at whether a process is still there


class ForkedProcess:
    """A process that is somebody else's child. Its stdin and stdout are one socket."""

    def __init__(self, talk: trio.SocketStream) -> None:
        self.stdin: trio.abc.SendStream | None = talk
        self.stdout: trio.abc.ReceiveStream | None = talk
        self.pid = 0
        self._gone = False

    @property
    def returncode(self) -> int | None:
        """0 once it has ended: how is known to its parent only."""
        if not self._gone and self.pid:
            try:
                os.kill(self.pid, 0)
            except ProcessLookupError:
                self._gone = True
        return 0 if self._gone else None

    async def wait(self) -> int:
        while self.returncode is None:  # noqa: ASYNC110 - nobody tells us
            await trio.sleep(GLANCE_SECONDS)
        return 0

    def send_signal(self, sig: signal.Signals) -> None:
        if self.returncode is None:
            os.kill(self.pid, sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class PeerForge:
    """One process that has imported everything, and forks. Made by `open_forge`."""

    def __init__(self, process: trio.Process, folder: Path) -> None:
        self._process = process
        self._folder = folder
        self._forked = 0
        self._asking = trio.Lock()

    @asynccontextmanager
    async def open_process(self, name: str) -> AsyncIterator[BenchProcess]:
        """A new one, once it has introduced itself, until the block is left."""
        self._forked += 1
        path = self._folder / str(self._forked)
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(path))
            listening.listen(1)
            with trio.fail_after(FORK_SECONDS):
                assert self._process.stdin is not None
                async with self._asking:  # peers of a churn are born at the same moment
                    await self._process.stdin.send_all(f"{path}\n".encode())
                listener = trio.SocketListener(trio.socket.from_stdlib_socket(listening))
                talk = await listener.accept()
        forked = ForkedProcess(talk)
        process = BenchProcess(name, forked)
        try:
            forked.pid = (await process.answer("fork", FORK_SECONDS))["process_id"]
            process.introduction = await process.answer("start", START_SECONDS)
            yield process
        finally:
            await process.end()


@asynccontextmanager
async def open_forge(words: Sequence[str]) -> AsyncIterator[PeerForge]:
    """`python WORDS… fork`; all that it has forked is killed when the block is left."""
    with tempfile.TemporaryDirectory(prefix="potluck-bench-") as folder:
        process = await trio.lowlevel.open_process(
            [sys.executable, *words, "fork"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **SINGLE_THREADED},
            start_new_session=True,
        )
        talk = BenchProcess("the forking process", process)
        try:
            await talk.answer("start", START_SECONDS)
            yield PeerForge(process, Path(folder))
        finally:
            await talk.end()
