"""The real command line as a child process, in a home of its own that can be looked through.

Easy to get wrong: a signal in the first milliseconds meets Python itself and not yet us. Python
then dies of the signal, or says that it could not start; nothing was begun by then, and nothing
can be left. Those ends are told apart here from ours by their exit codes.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import trio

from node.core.key_file import load_or_create_identity
from tests.leaving import LEAVE_SECONDS, Leaving
from tests.processes.children import START_SECONDS, Child, PeerProcess, started

SIGNALS: Final = [signal.SIGINT, signal.SIGTERM]
_OUR_CODES: Final = {signal.SIGINT: {130}, signal.SIGTERM: {0, 143}, signal.SIGHUP: {129}}
# What Python itself says where the signal came before it had come to a line of ours.
_PYTHON_NEVER_STARTED: Final = ("Fatal Python error: init", "Could not import runpy module")


@asynccontextmanager
async def running_command(
    place: Path, *arguments: str, program: str = "node", **variables: str
) -> AsyncIterator[Child]:
    """`potluck`, or `scripts/bench`, with these arguments; its home is place/home, its standard
    error place/errors. `program`: another module in place of `potluck`."""
    home = place / "home"
    program = "lab" if arguments[0] == "bench" else program
    command = [sys.executable, "-m", program, *arguments]
    with (place / "errors").open("ab") as errors:
        async with started(
            command, {"POTLUCK_HOME": str(home)} | variables, errors_to=errors.fileno()
        ) as child:
            child.errors_file = place / "errors"
            yield child


@asynccontextmanager
async def running_listener(
    place: Path, *arguments: str, program: str = "node"
) -> AsyncIterator[PeerProcess]:
    """`potluck listen` on loopback, up and listening."""
    listen = ("listen", "--json", "--listen", "/ip4/127.0.0.1/tcp/0", *arguments)
    async with running_command(place, *listen, program=program) as child:
        with trio.fail_after(START_SECONDS):
            line = await child.read_line()
        if not line:
            raise RuntimeError((place / "errors").read_text())
        told = json.loads(line)
        yield child.as_peer(told["peer_id"], told["addresses"])


async def leaves_in_time(
    child: Child, number: signal.Signals, within_seconds: float = LEAVE_SECONDS
) -> float:
    """Send the signal; insist that the process is gone in time, with the right code and words.
    The seconds that it took."""
    leaving = Leaving(child.process_id)
    child.send_signal(number)
    with trio.fail_after(START_SECONDS):
        seconds = await trio.to_thread.run_sync(leaving.wait, abandon_on_cancel=True)
        code = await child.exit_code()
    assert seconds < within_seconds
    said = child.errors_file.read_text() if child.errors_file else ""
    if code in _OUR_CODES[number]:
        assert "Traceback" not in said
    else:
        never_started = any(each in said for each in _PYTHON_NEVER_STARTED)
        assert code == -number or never_started, f"exit code {code}: {said}"
    return seconds


def nothing_on_disk_but_a_key(place: Path) -> None:
    """Insist that the home holds a whole key, or none, and no other file but what was carried."""
    home = place / "home"
    files = {path.name: path for path in home.rglob("*") if not path.is_dir()}
    files.pop("traffic.json", None)  # what a quota counts, from the first byte
    assert list(files) in ([], ["identity.key"]), files
    for key_file in files.values():
        load_or_create_identity(key_file)  # refuses a key that is cut short
