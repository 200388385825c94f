"""The client of the control socket of a node on this machine. Plain blocking code for commands.

    with ask(places.control_socket, "status", {"every_seconds": 1.0}) as answers:
        for answer in answers: ...

If no node runs there, it raises NoRunningNode (exit code 4), whatever an earlier one has left. A
failure in the node is raised here with its exit code. If the node dies in between, NodeWentAway is
raised.

Another user's process could be at the path in /tmp that stands in for a long one. So the owner of
the other end is checked here as well.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from node.core.control_frames import (
    LARGEST_ANSWER_BYTES,
    LARGEST_ASK_BYTES,
    LENGTH,
    Ask,
    ControlAnswer,
    ControlFailed,
    Done,
    bindable,
    frame,
    length_of,
    reply_in,
)
from protocols.errors import DeadlineExceeded, PotluckError, Refused, Unreachable

# The node answers a status within a millisecond; this allows for one that is stopped or swapping.
ANSWER_SECONDS = 10.0
LONGEST_SILENCE_SECONDS = 2_000_000.0  # the system counts milliseconds in 31 bits


class NoRunningNode(Unreachable):
    """No node runs in this home."""


class NodeWentAway(Unreachable):
    """The node ended while it was answering."""


class ControlFailure(PotluckError):
    """The node answered that the command failed."""

    def __init__(self, failed: ControlFailed) -> None:
        super().__init__(failed.what, why=failed.why, advice=failed.advice)
        self.exit_code = failed.exit_code


@contextlib.contextmanager
def ask(
    path: Path,
    command: str,
    arguments: Mapping[str, Any] | None = None,
    *,
    silence_seconds: float | None = ANSWER_SECONDS,
) -> Iterator[Iterator[Any]]:
    """Send one command to the node with its socket at `path`; iterate over its answers.

    At most `silence_seconds` may pass between two answers; None is no limit. Leaving the block ends
    the command.
    """
    with _connected(bindable(path), silence_seconds) as connection:
        try:
            connection.sendall(frame(Ask(command, dict(arguments or {})), LARGEST_ASK_BYTES))
        except OSError:
            raise _went_away() from None
        yield _answers(connection)


def ask_once(
    path: Path,
    command: str,
    arguments: Mapping[str, Any] | None = None,
    *,
    silence_seconds: float = ANSWER_SECONDS,
) -> Any:
    """The answer of a command with exactly one."""
    with ask(path, command, arguments, silence_seconds=silence_seconds) as answers:
        for answer in answers:
            return answer
    raise NodeWentAway(f"The node did not answer {command}.")


def a_node_answers(path: Path) -> bool:
    """Whether a node answers at this path."""
    try:
        with _connected(bindable(path), ANSWER_SECONDS):
            return True
    except NoRunningNode:
        return False


@contextlib.contextmanager
def _connected(path: Path, silence_seconds: float | None) -> Iterator[socket.socket]:
    if not hasattr(socket, "AF_UNIX"):
        raise PotluckError("A running node cannot be asked: this platform has no local sockets.")
    if silence_seconds is not None:
        silence_seconds = min(silence_seconds, LONGEST_SILENCE_SECONDS)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(silence_seconds)
        try:
            connection.connect(os.fspath(path))
        except TimeoutError:
            raise _silent(silence_seconds or 0.0) from None
        except OSError as error:
            raise _not_connected(path, error) from error
        _check_owner(connection)
        yield connection


def _not_connected(path: Path, error: OSError) -> PotluckError:
    if error.errno in (errno.ENOENT, errno.ECONNREFUSED, errno.ENOTDIR):
        return NoRunningNode(
            "No node is running here.",
            why=f"Nothing answers at {path}.",
            advice="`potluck join INVITE` starts one that trains, `potluck listen` one that does "
            "not. If it has a home of its own, name it: --home DIRECTORY.",
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return Refused(
            "The running node belongs to another user.",
            why=f"This user may not open {path}.",
            advice="Run the command as that user.",
        )
    return PotluckError(f"The running node cannot be asked: {error.strerror or error}.")


def _check_owner(connection: socket.socket) -> None:
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return
    credentials = connection.getsockopt(socket.SOL_SOCKET, option, struct.calcsize("iII"))
    _pid, user, _group = struct.unpack("iII", credentials)
    if user not in (os.geteuid(), 0) and os.geteuid() != 0:
        raise Refused(
            "A process of another user answers in the node's place.",
            why=f"Its user id is {user}.",
            advice="Do not trust its answers, and find out which process it is.",
        )


def _answers(connection: socket.socket) -> Iterator[Any]:
    while True:
        header = _receive_exactly(connection, LENGTH.size)
        reply = reply_in(_receive_exactly(connection, length_of(header, LARGEST_ANSWER_BYTES)))
        match reply:
            case ControlAnswer(value):
                yield value
            case ControlFailed():
                raise ControlFailure(reply)
            case Done():
                return


def _receive_exactly(connection: socket.socket, count: int) -> bytes:
    received = bytearray()
    while len(received) < count:
        try:
            some = connection.recv(min(count - len(received), 65_536))
        except TimeoutError:
            raise _silent(connection.gettimeout() or 0.0) from None
        except OSError:
            raise _went_away() from None
        if not some:
            raise _went_away()
        received += some
    return bytes(received)


def _silent(seconds: float) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"The node has not answered for {seconds:g} seconds.",
        why="It may be stopped (SIGSTOP), swapping, or very busy.",
        advice="Look at its process and its log.",
    )


def _went_away() -> NodeWentAway:
    return NodeWentAway(
        "The node ended while it was answering.",
        advice="`potluck status` shows whether it is back.",
    )
