"""Starts the bench's processes, sends them orders, and makes sure that they end.

A `BenchProcess` speaks JSON, a line each way. Leaving its block closes its stdin, which ends every
process of the bench; one that has not ended soon after is killed.

`PeerForge` asks a process of orders.py's `serve_forks` for forked processes, which take orders like
any other.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import trio

from lab.bench.orders import SINGLE_THREADED
from protocols.errors import PotluckError

START_SECONDS = 60.0  # importing libp2p on a machine that is busy with something else
ANSWER_SECONDS = 180.0  # most measurements take a tenth of it; past it something hangs
END_SECONDS = 3.0  # from the end of stdin to the end of the process, before it is killed
LAST_MOMENT_SECONDS = 1.0  # from closed pipes to a process that can be waited for
LONGEST_ANSWER_BYTES = 1 << 20

SCRIPTS = Path(__file__).parents[2]
WHERE_WE_ARE = {"PYTHONPATH": os.pathsep.join([str(SCRIPTS), str(SCRIPTS.parent)])}  # for children


class BenchFailed(PotluckError):
    """A process of the bench did not do what it was asked."""


@contextmanager
def failures_unwrapped() -> Iterator[None]:
    """A BenchFailed of a nursery's task comes out of the block by itself, not in a group."""
    try:
        yield
    except BaseExceptionGroup as group:
        _, others = group.split(BenchFailed)
        if others is not None:
            raise
        first: BaseException = group
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from None


class Running(Protocol):
    """The interface of a process: a trio.Process has it."""

    stdin: trio.abc.SendStream | None
    stdout: trio.abc.ReceiveStream | None

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    async def wait(self) -> int: ...

    def send_signal(self, sig: signal.Signals) -> None: ...

    def kill(self) -> None: ...


class BenchProcess:
    """One process. Made by `open_process`, or a `PeerFork`."""

    def __init__(self, name: str, process: Running) -> None:
        self.name = name
        self._process = process
        self._unread = bytearray()
        self.introduction: dict[str, Any] = {}

    @property
    def process_id(self) -> int:
        return self._process.pid

    async def has_ended(self) -> bool:
        """Whether it is dead, or so nearly that it is in a moment. One that is stopped is not."""
        with trio.move_on_after(LAST_MOMENT_SECONDS):
            await self._process.wait()
        return self._process.returncode is not None

    def send_signal(self, number: signal.Signals) -> None:
        """Kill, stop or continue it. One that has ended takes no notice."""
        self._process.send_signal(number)

    async def ask(
        self, do: str, *, within: float = ANSWER_SECONDS, **arguments: Any
    ) -> dict[str, Any]:
        """Have it run one command; its answer. BenchFailed if none comes in that time."""
        assert self._process.stdin is not None
        order = json.dumps({"do": do, **arguments}) + "\n"
        try:
            await self._process.stdin.send_all(order.encode())
        except trio.BrokenResourceError:
            raise self._ended(do) from None
        return await self.answer(do, within)

    async def answer(self, do: str, seconds: float) -> dict[str, Any]:
        """The next JSON line that it prints."""
        line = b""
        with trio.move_on_after(seconds) as patience:
            line = await self._line()
        if patience.cancelled_caught:
            raise BenchFailed(f"{self.name} did not finish `{do}` within {seconds:g} seconds.")
        if not line:
            raise self._ended(do)
        answer: dict[str, Any] = json.loads(line) or {}
        if "error" in answer:
            raise BenchFailed(f"{self.name} could not `{do}`.", why=str(answer["error"]))
        return answer

    async def _line(self) -> bytes:
        assert self._process.stdout is not None
        while (end := self._unread.find(b"\n")) < 0:
            try:
                data = await self._process.stdout.receive_some()
            except trio.BrokenResourceError:  # it was killed, and had not read its last order
                return b""
            if not data or len(self._unread) > LONGEST_ANSWER_BYTES:
                return b""
            self._unread += data
        line = bytes(self._unread[: end + 1])
        del self._unread[: end + 1]
        return line

    def _ended(self, do: str) -> BenchFailed:
        return BenchFailed(
            f"{self.name} ended while it should `{do}`.", why="Its own words are on stderr, above."
        )

    async def end(self) -> None:
        """Close its stdin and wait for its end; kill it if that takes long, or if it has not
        introduced itself: it still imports, and reads nothing."""
        with trio.CancelScope(shield=True):
            if not self.introduction:
                self._process.kill()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    await pipe.aclose()
            with trio.move_on_after(END_SECONDS):
                await self._process.wait()
            if self._process.returncode is None:
                self._process.kill()
                await self._process.wait()


@asynccontextmanager
async def open_process(
    name: str, words: Sequence[str], environment: Mapping[str, str] | None = None
) -> AsyncIterator[BenchProcess]:
    """`python WORDS…`, once it has introduced itself, until the block is left."""
    async with open_process_of(name, [sys.executable, *words], environment) as process:
        yield process


@asynccontextmanager
async def open_process_of(
    name: str, command: Sequence[str], environment: Mapping[str, str] | None = None
) -> AsyncIterator[BenchProcess]:
    """The same for any command that ends up as one of ours, in another network for instance."""
    process = BenchProcess(
        name,
        await trio.lowlevel.open_process(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**(os.environ if environment is None else environment), **WHERE_WE_ARE},
            start_new_session=True,  # a terminal's Ctrl-C is for the bench (see orders.py)
        ),
    )
    try:
        process.introduction = await process.answer("start", START_SECONDS)
        yield process
    finally:
        await process.end()


@asynccontextmanager
async def open_peer(name: str, auth_seed: bytes = b"") -> AsyncIterator[BenchProcess]:
    """A node of the bench (peer.py); with a token if there is a key to sign it."""
    words = [auth_seed.hex()] if auth_seed else []
    async with open_process(name, ["-m", "lab.bench.peer", *words]) as process:
        yield process


async def introduce(process: BenchProcess, other: BenchProcess, *, port: int | None = None) -> str:
    """Connect one peer to another, through a proxy's port if given; the other's peer id."""
    addresses = other.introduction["addresses"]
    if port is not None:
        own_port = addresses[0].split("/tcp/")[1].split("/")[0]
        addresses = [addresses[0].replace(f"/tcp/{own_port}/", f"/tcp/{port}/")]
    peer: str = other.introduction["peer"]
    await process.ask("learn", peer=peer, addresses=addresses)
    return peer


FORK_SECONDS = 60.0  # usually a millisecond; but a busy machine may run no process for ten seconds
GLANCE_SECONDS = 0.02  # between two looks at whether a process is still there


class ForkedProcess:
    """A process that is the child of another. Its stdin and stdout are one socket."""

    def __init__(self, talk: trio.SocketStream) -> None:
        self.stdin: trio.abc.SendStream | None = talk
        self.stdout: trio.abc.ReceiveStream | None = talk
        self.pid = 0
        self._gone = False

    @property
    def returncode(self) -> int | None:
        """0 once it has ended: how is known to its parent only. One that never said its process id
        counts as ended: it cannot be sent a signal, and leaves when its socket closes."""
        if not self.pid:
            return 0
        if not self._gone:
            try:
                os.kill(self.pid, 0)
            except ProcessLookupError:
                self._gone = True
        return 0 if self._gone else None

    async def wait(self) -> int:
        while self.returncode is None:  # noqa: ASYNC110 - there is no event for it
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
            env={**os.environ, **SINGLE_THREADED, **WHERE_WE_ARE},
            start_new_session=True,
        )
        talk = BenchProcess("the forking process", process)
        try:
            talk.introduction = await talk.answer("start", START_SECONDS)
            yield PeerForge(process, Path(folder))
        finally:
            await talk.end()
