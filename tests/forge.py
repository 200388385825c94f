"""Starts a Python program of ours as a fork of a process that has imported the libraries already.

Importing torch and libp2p takes two seconds of a core, and the tests start a thousand programs
that need them. After `take_over`, which tests/conftest.py calls, `subprocess.Popen` is the one of
this module. What it starts is a child like any other, with its own memory, signals, descriptors,
words and variables (as /proc shows them, too) and exit code, and a child of the process that asked
for it. It has only not started with `exec`: a forge, which is a Python process without threads that
waits for orders, has forked it. Everything that the program itself imports or does is still to
come. A program that starts others, as the demo and the laboratory do, has a forge of its own from
the beginning: another fork of the same.

What a fork cannot do is really started: a program at a terminal, one that is given descriptors or
variables that the interpreter reads as it starts, and all programs where TESTS_FORGE is "no"
(scripts/test --soak and --fast). It can enter a network namespace, as `nsenter` does, and keep to a
number of threads. A test of how a program starts, of how long that takes or of what it loads, has
the fixture `really_started`. All forked programs order their sets of strings in the same way: that
peers do not depend on it is seen where they are really started.

Easy to get wrong: a fork's parent is the forge, and only a parent can wait for a process. So the
forge forks twice, and the one between ends at once: the kernel gives its child to us, because we
are a "subreaper" for that moment. The child goes on when it sees that (die_with_parent is meant to
be the parent that asked).
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import pkgutil
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

SWITCH: Final = "TESTS_FORGE"
_SET_PARENT_DEATH_SIGNAL, _SET_SUBREAPER = 1, 36  # of prctl(2)
_C_LIBRARY: Final = ctypes.CDLL(None) if sys.platform == "linux" else None
_ROOT: Final = Path(__file__).parent.parent
_LARGEST_ORDER_BYTES: Final = 1 << 20
_ROOM_BYTES: Final = 1 << 13  # for the words, and for the variables, of a forked program
_NEW_NETWORK: Final = 0x40000000  # CLONE_NEWNET of setns(2)
_ADOPTION_SECONDS: Final = 0.0005  # between two looks at who the parent is

# The commands for which the libraries are imported. Others are there sooner by themselves.
_HEAVY: Final = {
    "backbone", "demo", "dht", "experts", "export", "join", "listen", "ping", "plan", "run", "up",
}  # fmt: skip

_OURS: Final = {"node", "lab", "tests"}

# What the interpreter or a library reads as it starts. A forge has it as we do.
_READ_AT_START: Final = (
    "PYTHON", "LD_", "MALLOC_", "GLIBC_", "LIBP2P_", "LANG", "TZ",
)  # fmt: skip


def die_with_parent() -> None:
    """Run in the child before its program: its parent's death becomes its own."""
    if _C_LIBRARY is not None:
        _C_LIBRARY.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


class Popen(subprocess.Popen[Any]):
    """As `subprocess.Popen`, but quicker for modules and files of ours."""

    def _execute_child(  # type: ignore[override]
        self,
        args: Any,
        executable: Any,
        preexec_fn: Callable[[], object] | None,
        close_fds: bool,
        pass_fds: Sequence[int],
        cwd: Any,
        env: Mapping[str, str] | None,
        startupinfo: Any,
        creationflags: int,
        shell: bool,
        *pipes_and_rest: Any,
    ) -> None:
        pipes, rest = pipes_and_rest[:6], pipes_and_rest[6:]
        _, gid, gids, uid, umask, new_session, group = rest
        ends = [pipes[0], pipes[3], pipes[5]]
        ends = [number if one == -1 else one for number, one in enumerate(ends)]
        environment = dict(os.environ if env is None else env)
        has_options = pass_fds or shell or executable or gid or gids or uid
        is_plain = close_fds and not has_options and umask == group == -1
        is_plain = is_plain and preexec_fn in (None, die_with_parent)
        forge, network, words = None, "", _words(args)
        if words[:1] == ["nsenter"] and words[2:3] == ["--"] and words[1].startswith("--net="):
            network, words = words[1].removeprefix("--net="), words[3:]
        if is_plain and _is_python(words) and can_be_forked(environment):
            forge = _the_forge()
        if forge is None or any(os.isatty(one) for one in ends):
            super()._execute_child(  # type: ignore[misc]
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo,
                creationflags, shell, *pipes, *rest,
            )  # fmt: skip
            return
        order = {
            "words": words,
            "network": network,
            "environment": environment,
            "folder": os.path.abspath(cwd or os.getcwd()),
            "dies_with_parent": preexec_fn is not None,
            "parent": os.getpid(),
            "new_session": new_session,
        }
        self.pid = forge.fork(order, ends)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def take_over() -> None:
    """From now on, whatever of this process starts a program starts it in this way."""
    if _C_LIBRARY is not None and os.environ.get(SWITCH) != "no":
        _usual.update(os.environ)
        subprocess.Popen = Popen  # type: ignore[misc]


def _words(arguments: Any) -> list[str]:
    is_list = isinstance(arguments, Sequence) and not isinstance(arguments, str | bytes)
    return [str(one) for one in arguments] if is_list else []


def _is_python(words: Sequence[str]) -> bool:
    """Whether it is this interpreter with a module or a script of ours."""
    if len(words) < 2:
        return False
    if Path(words[0]) == Path(sys.executable).with_name("potluck"):
        return not _HEAVY.isdisjoint(words[1:2])
    if words[0] != sys.executable:
        return False
    if words[1:3] == ["-m", "node"]:
        return not _HEAVY.isdisjoint(words[3:4])
    if words[1:2] == ["-m"]:
        return words[2].partition(".")[0] in _OURS
    return not words[1].startswith("-")


class _Forge:
    """One process that forks, and the socket on which it is asked to."""

    def __init__(self, talk: socket.socket, wait: Callable[[], object]) -> None:
        self._talk, self._wait = talk, wait
        atexit.register(self._end)

    @staticmethod
    def start() -> _Forge:
        ours, its = _sockets()
        with its:
            process = really_started(
                [sys.executable, "-m", "tests.forge", str(its.fileno()), "-" * _ROOM_BYTES],
                env={**_usual, "TESTS_FORGE_ROOM": "-" * _ROOM_BYTES},
                cwd=_ROOT,
                pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL,
            )
        return _Forge(ours, process.wait)

    def _end(self) -> None:
        self._talk.close()  # it ends when it hears that
        self._wait()

    def fork(self, order: Mapping[str, Any], descriptors: Sequence[int]) -> int:
        with _asking:
            words = json.dumps(order).encode()
            assert len(words) <= _LARGEST_ORDER_BYTES
            _adopt_orphans(True)
            try:
                socket.send_fds(self._talk, [words], list(descriptors))
                answer = self._talk.recv(64)
            finally:
                _adopt_orphans(False)
        if not answer:
            raise RuntimeError("the forge is gone; what it printed is above")
        return int(answer)


def _adopt_orphans(ours: bool) -> None:
    assert _C_LIBRARY is not None
    _C_LIBRARY.prctl(_SET_SUBREAPER, int(ours))


def _sockets() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


really_started = subprocess.Popen
_usual: dict[str, str] = {}  # the variables with which a forge is started
_forges: list[_Forge] = []  # the one, once it is needed
_starting = threading.Lock()
_asking = threading.Lock()  # only one may have this process adopt a child


def _the_forge() -> _Forge:
    with _starting:
        if not _forges:
            _forges.append(_Forge.start())
        return _forges[0]


def can_be_forked(environment: Mapping[str, str]) -> bool:
    """Whether all that a program with such variables reads as it starts is as usual."""
    read, usual = _read_at_start(environment), _read_at_start(_usual)
    same_modules = read.get("PYTHONPATH") == usual.get("PYTHONPATH")
    return same_modules and all(usual.get(name) == value for name, value in read.items())


def _read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    """Without those that are empty, which mean the same as none."""
    return {
        name: value
        for name, value in environment.items()
        if value and name.startswith(_READ_AT_START)
    }


# What follows runs in the forge, and in what it forks.


def _import_libraries() -> None:
    import node.app

    for module in pkgutil.walk_packages(node.app.__path__, "node.app."):
        importlib.import_module(module.name)


def _next_program(talk: socket.socket) -> tuple[dict[str, Any], list[int], int]:
    """The order of a child, its descriptors and its first parent."""
    while True:
        words, descriptors, _, _ = socket.recv_fds(talk, _LARGEST_ORDER_BYTES, 3)
        if not words:
            os._exit(0)  # its owner is gone
        reads, writes = os.pipe()
        between = os.fork()
        if not between:
            between = os.getpid()
            child = os.fork()
            if not child:
                os.close(reads)
                os.close(writes)
                return json.loads(words), descriptors, between
            os.write(writes, str(child).encode())
            os._exit(0)
        os.waitpid(between, 0)  # its child is another's now
        os.close(writes)
        try:
            talk.send(os.read(reads, 64))
        except BrokenPipeError:
            os._exit(0)
        for one in (reads, *descriptors):
            os.close(one)


def _serve(talk: socket.socket) -> list[str]:
    """Fork whenever that is asked for. It comes back in the child, with its words."""
    order, descriptors, between = _next_program(talk)
    talk.close()
    _become(order, descriptors, between)
    words: list[str] = order["words"]
    if "lab" not in words[2:3] and "demo" not in words[1:4]:
        return words
    ours, its = _sockets()
    own_forge = os.fork()  # of a program that has not begun yet
    if not own_forge:
        ours.close()
        os.setpgid(0, 0)  # what is sent to the program's group is not meant for it
        os.chdir("/")
        _show(["forge"], [])  # nobody looks for the program here
        with open(os.devnull, "r+b") as nothing:
            for number in range(3):
                os.dup2(nothing.fileno(), number)
        return _serve(its)
    its.close()
    _forges.append(_Forge(ours, lambda: os.waitpid(own_forge, 0)))
    take_over()
    return words


def _become(order: dict[str, Any], descriptors: list[int], between: int) -> None:
    while os.getppid() == between:
        time.sleep(_ADOPTION_SECONDS)
    if order["dies_with_parent"]:
        die_with_parent()
    if os.getppid() != order["parent"]:
        os._exit(1)  # it was killed meanwhile
    for number, one in enumerate(descriptors):
        os.dup2(one, number)
    os.closerange(3, max(descriptors) + 1)  # the forge itself has no others
    if order["new_session"]:
        os.setsid()
    else:
        os.setpgid(0, os.getpgid(order["parent"]))
    if order["network"]:
        _enter(order["network"])
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    _show(order["words"], [f"{name}={value}" for name, value in os.environ.items()])
    if "OMP_NUM_THREADS" in os.environ:
        sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    tempfile.tempdir = None  # a library has asked for the forge's, and this one may have another
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        errors = "backslashreplace" if name == "stderr" else "strict"
        stream = open(  # noqa: SIM115 - as the interpreter opens them; ours are of other files
            number, "w" if number else "r", encoding="utf-8", errors=errors, closefd=False,
            buffering=1 if name == "stderr" else -1,
        )  # fmt: skip
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _show(words: Sequence[str], variables: Sequence[str]) -> None:
    """Have the kernel show these as the words and variables of this process."""
    numbers = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    for lines, first in ((words, 45), (variables, 47)):  # arg_start, env_start, each with its end
        start, end = map(int, numbers[first : first + 2])
        text = os.fsencode("".join(f"{line}\0" for line in lines))
        ctypes.memmove(start, text[: end - start].ljust(end - start, b"\0"), end - start)


def _enter(network: str) -> None:
    assert _C_LIBRARY is not None
    with open(network, "rb") as namespace:
        if _C_LIBRARY.setns(namespace.fileno(), _NEW_NETWORK) != 0:
            raise OSError(f"the network {network} cannot be entered")


def _run_program(words: list[str]) -> None:
    """As the interpreter does it with these words."""
    if words[1:2] == ["-m"]:
        sys.path[0] = os.getcwd()
        sys.argv[:] = words[2:]
        if not hasattr(sys.modules.get(words[2]), "__path__"):
            sys.modules.pop(words[2], None)  # it is run anew, as __main__
        runpy.run_module(words[2], run_name="__main__", alter_sys=True)
    else:
        file = words[0] if words[0] != sys.executable else words[1]
        sys.path[0] = str(Path(file).resolve().parent)
        sys.argv[:] = words[words.index(file) :]
        runpy.run_path(file, run_name="__main__")


if __name__ == "__main__":
    _import_libraries()
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=int(sys.argv[1])) as talk:
        words = _serve(talk)
    _run_program(words)
