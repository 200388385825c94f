"""Peers that are forked from one process which has imported everything: quick to start.

`python -m … fork` imports what a peer needs and then forks one each time it is told to: a line on
its stdin is the path of a socket, on which the child says its process id and which becomes its
standard input and output. So peers start in milliseconds instead of seconds, and share the memory
of the libraries until they write to it, as the peers of the reference's bench do, which are forked
from one process as well.

Promise: nobody is left. The processes are a group of their own; when stdin ends, which it does
also if the bench is killed, the group is killed, those in it that are stopped as well.

Easy to get wrong: only the thread that forks is there in the child. The one who forks must have
no others, so the libraries are told to make none (`SINGLE_THREADED`).
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Final, NoReturn

import trio

from node.bench.orders import Obedient, obey_with_nursery

SINGLE_THREADED: Final[Mapping[str, str]] = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


def run_or_fork(make: Callable[[trio.Nursery], Obedient]) -> None:
    """What a module of peers that hold tensors does: `python -m …` is one, which takes orders from
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
    print("{}", flush=True)
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
            talk.connect(path)
            os.dup2(talk.fileno(), sys.stdin.fileno())
            os.dup2(talk.fileno(), sys.stdout.fileno())
        print(json.dumps({"process_id": os.getpid()}), flush=True)
        run()
        code = 0
    except BaseException:  # noqa: BLE001 - whatever it was, it must not go on in the parent's loop
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(code)
