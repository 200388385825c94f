"""Orders to a process of the bench on standard input, and its answers on standard output.

An order is one JSON object a line: `{"do": "unary", …}` calls the coroutine `unary` of the
process's object; its result, or `{"error": …}`, is printed as one line. The process ends when its
stdin does. That is also how Ctrl-C reaches it: a process of the bench has a session of its own, so
the terminal's signal comes to the bench alone, which then closes the pipes.

Reading stdin in a thread cannot be cancelled, so a process that fails would hang until somebody
closed its stdin. Instead the pipe is read asynchronously, like a socket.

Peers are forked from one process that has imported everything. `python -m … fork` imports what a
peer needs and then forks one for each line on its stdin. The line is the path of a socket, on which
the child sends its process id and which becomes its standard input and output. So peers start in
milliseconds instead of seconds, and share the memory of the libraries until they write to it, like
the peers of the reference's bench, which are forked from one process as well.

Promise: no process is left behind. The processes are a group of their own; when stdin ends, which
happens also if the bench is killed, the group is killed, including stopped processes.

In a child only the thread that forked exists. So the forking process must have no others, and the
libraries are told to make none (`SINGLE_THREADED`).
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Final, NoReturn

import trio

from protocols.errors import PotluckError


async def obey_with_nursery(make: Callable[[trio.Nursery], object]) -> None:
    """The main function of a process whose object needs a nursery; only errors are logged."""
    logging.getLogger().setLevel(logging.ERROR)
    async with trio.open_nursery() as nursery:
        await obey(make(nursery))
        nursery.cancel_scope.cancel()


async def obey(obedient: object, introduction: Mapping[str, Any] | None = None) -> None:
    """Do what stdin says, line by line, until it ends; also in the middle of doing something.

    Each public coroutine of the object is an order. The introduction is printed before any order.
    """
    lines_in, lines = trio.open_memory_channel[str](0)
    async with trio.open_nursery() as nursery:

        async def read() -> None:
            async for line in lines_of_stdin():
                await lines_in.send(line)
            nursery.cancel_scope.cancel()

        nursery.start_soon(read)
        answer(introduction or {})
        async for line in lines:
            order = json.loads(line)
            command: Callable[..., Awaitable[Any]] = getattr(obedient, order.pop("do"))
            try:
                answer(await command(**order))
            except* PotluckError as errors:  # some commands have nurseries of their own
                answer({"error": "; ".join(str(error) for error in errors.exceptions)})


def answer(value: object) -> None:
    """Print one line. A bench that has gone reads no more: the end of stdin then ends us."""
    line = json.dumps(value) + "\n"
    with (
        contextlib.suppress(BrokenPipeError),
        # print would keep in its buffer what it cannot write, and complain of it at the very end
        open(sys.stdout.fileno(), "wb", closefd=False) as out,
    ):
        out.write(line.encode())


async def lines_of_stdin() -> AsyncIterator[str]:
    """Each line without its end, until the other end of the pipe is closed, or is broken.

    A socket is broken when the bench is gone without having read the last answer.
    """
    held = b""
    async with trio.lowlevel.FdStream(os.dup(sys.stdin.fileno())) as stdin:
        with contextlib.suppress(trio.BrokenResourceError):
            async for data in stdin:
                *lines, held = (held + data).split(b"\n")
                for line in lines:
                    yield line.decode()


SINGLE_THREADED: Final[Mapping[str, str]] = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


def run_or_fork(make: Callable[[trio.Nursery], object]) -> None:
    """The main function of peers that hold tensors: `python -m …` is one, which takes orders from
    its stdin, and `python -m … fork` makes one whenever it is told to."""
    import torch

    def run() -> None:
        torch.set_num_threads(1)  # as the reference does: the peers share the machine's cores
        trio.run(obey_with_nursery, make)

    if sys.argv[1:] == ["fork"]:
        serve_forks(run)
    run()


def serve_forks(run: Callable[[], None]) -> NoReturn:
    """Fork whenever stdin says so; each child does `run` and ends."""
    gc.collect()
    gc.freeze()  # a collection in a child would write to every object, and unshare its memory
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the dead need not be waited for
    answer({"process_id": os.getpid()})
    for line in sys.stdin:
        if os.fork() == 0:
            _be_a_peer(line.strip(), run)
    os.killpg(0, signal.SIGKILL)
    raise SystemExit  # not reached: we are one of the group


def _be_a_peer(path: str, run: Callable[[], None]) -> NoReturn:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    code = 1
    try:
        with socket.socket(socket.AF_UNIX) as talk:
            try:
                talk.connect(path)
            except (ConnectionRefusedError, FileNotFoundError):  # the bench has gone meanwhile
                os._exit(code)
            os.dup2(talk.fileno(), sys.stdin.fileno())
            os.dup2(talk.fileno(), sys.stdout.fileno())
        answer({"process_id": os.getpid()})
        run()
        code = 0
    except BaseException:  # noqa: BLE001 - whatever it was, it must not go on in the parent's loop
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(code)
