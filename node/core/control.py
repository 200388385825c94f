"""The control socket of a running node, which only its owner can open.

`potluck status` uses it first. A part of the node that needs its own command registers it:

    async def pause(arguments: Mapping[str, Any], answer: Answering) -> None:
        ...
        await answer({"paused": True})

    node.core.control.add("pause", pause)

A handler may answer many times (`--watch` streams in this way). It is cancelled when the client
disconnects or the node ends. If it raises a PotluckError, the client gets it with its exit code.

The threat is another user of this machine. The folder of the socket is closed to them (0700), and
so is the socket (0600). On Linux each connection's user is checked as well (SO_PEERCRED).

A socket file survives `kill -9`. It is replaced without a check, which is safe because only a
process with the node's lock starts this server (running_lock.py). A stand-in in /tmp also survives,
perhaps of a home that is never used again; the next server that needs a stand-in removes it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import stat
import struct
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from auth.errors import AuthError
from models.errors import ModelsError
from node.core.control_frames import (
    LARGEST_ANSWER_BYTES,
    LARGEST_ASK_BYTES,
    LENGTH,
    STAND_INS,
    Ask,
    ControlAnswer,
    ControlFailed,
    Done,
    Reply,
    ask_in,
    bindable,
    frame,
    length_of,
    stand_in_prefix,
)
from node.core.failure import failure_of
from node.core.running_lock import make_private_folder
from node.core.wrong_use import nearest
from node.net import VERSION
from protocols.errors import MalformedMessage, PotluckError, ProtocolMisuse

if TYPE_CHECKING:
    from trio_typing import TaskStatus  # the stubs of trio that libp2p brings know it only there

# Each client is a person or a script of the same user; more are a script out of control.
MOST_CLIENTS = 32
# From connecting to a complete request, which the client sends in one write.
ASK_SECONDS = 5.0
SOCKET_MODE = 0o600
# A server makes its folder, binds and listens within a millisecond; this allows for a stopped
# machine.
BEGINNING_SECONDS = 60.0

_log = logging.getLogger("potluck.control")

Answering = Callable[[Any], Awaitable[None]]
ControlHandler = Callable[[Mapping[str, Any], Answering], Awaitable[None]]


class ControlServer:
    """Answers on one socket. Commands may be added before and while it serves."""

    def __init__(self, path: Path) -> None:
        self.path = bindable(path)
        self._handlers: dict[str, ControlHandler] = {}
        self._clients = 0

    def add(self, command: str, handler: ControlHandler) -> None:
        """Answer `command` with `handler`. Adding a command twice is a misuse."""
        if command in self._handlers:
            raise ProtocolMisuse(f"The control command {command} is there already.")
        self._handlers[command] = handler

    async def ask(self, command: str) -> Any:
        """The last answer of a command without arguments, for this process itself. It raises what a
        client would be told. PotluckError for a command that nothing answers yet."""
        handler = self._handlers.get(command)
        if handler is None:
            raise PotluckError(
                "The node still gets ready.",
                why=f"Nothing answers {command!r} yet.",
                advice="Try again in a moment.",
            )
        given: list[Any] = [None]

        async def answer(value: Any) -> None:
            given.append(value)

        try:
            await handler({}, answer)
        except Exception as error:
            told = _told(command, error)
            raise PotluckError(told.what, why=told.why, advice=told.advice) from error
        return given[-1]

    async def serve(self, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled, then remove the socket file. Started when clients can connect."""
        if not hasattr(socket, "AF_UNIX"):
            _log.warning("this platform has no local sockets, so `potluck status` cannot work")
            task_status.started()
            await trio.sleep_forever()
        if _is_stand_in(self.path):
            await trio.to_thread.run_sync(remove_abandoned, time.time())
        make_private_folder(self.path.parent)
        listening = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.ExitStack() as cleaning:
            cleaning.callback(listening.close)
            self.path.unlink(missing_ok=True)
            cleaning.callback(remove_socket, self.path)
            await listening.bind(os.fspath(self.path))
            self.path.chmod(SOCKET_MODE)
            listening.listen(MOST_CLIENTS)
            task_status.started()
            await trio.serve_listeners(self._meet, [trio.SocketListener(listening)])

    async def _meet(self, client: trio.SocketStream) -> None:
        """Serve one client, from its request to the end of our answers. Never raises."""
        self._clients += 1
        try:
            async with client:
                if self._clients <= MOST_CLIENTS and _is_ours(client):
                    await self._answer(client)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the client has left, and cannot be told
        except Exception:  # noqa: BLE001 - one client must not end the node
            _log.exception("a client of the control socket was not served to the end")
        finally:
            self._clients -= 1

    async def _answer(self, client: trio.SocketStream) -> None:
        try:
            with trio.fail_after(ASK_SECONDS):
                ask = await _receive_ask(client)
        except (PotluckError, trio.TooSlowError) as error:
            await _send(client, _failed(error))
            return
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_cancel_when_gone, client, nursery.cancel_scope)
            # here and not only in _meet: an error from a nursery is wrapped, and not caught there
            with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await _send(client, await self._handle(ask, client))
            nursery.cancel_scope.cancel()

    async def _handle(self, ask: Ask, client: trio.SocketStream) -> Reply:
        handler = self._handlers.get(ask.command)
        if handler is None:
            return self._unknown(ask.command)

        async def answer(value: Any) -> None:
            await _send(client, ControlAnswer(value))

        try:
            await handler(ask.arguments, answer)
        except trio.BrokenResourceError:
            raise
        except Exception as error:  # noqa: BLE001 - one command's bug must not end the node
            return _told(ask.command, error)
        return Done()

    def _unknown(self, command: str) -> ControlFailed:
        meant = nearest(command, self._handlers)
        return ControlFailed(
            f"The running node does not know the command {command[:80]!r}.",
            why=f"It is version {VERSION}; the command may be newer.",
            advice=f"Did you mean {meant}?" if meant else "Restart the node to update it.",
        )


def _is_ours(client: trio.SocketStream) -> bool:
    """Whether the process at the other end belongs to our user, or to root."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:  # not Linux: the modes of folder and socket must be enough
        return True
    credentials = client.socket.getsockopt(socket.SOL_SOCKET, option, struct.calcsize("iII"))
    _pid, user, _group = struct.unpack("iII", credentials)
    if user in (os.geteuid(), 0):
        return True
    _log.warning("user %d tried the control socket and was refused", user)
    return False


async def _cancel_when_gone(client: trio.SocketStream, scope: trio.CancelScope) -> None:
    """The client sends nothing more, so the next event is the end of its connection."""
    with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
        await client.receive_some(1)
    scope.cancel()


async def _receive_ask(client: trio.SocketStream) -> Ask:
    length = length_of(await _receive_exactly(client, LENGTH.size), LARGEST_ASK_BYTES)
    return ask_in(await _receive_exactly(client, length))


async def _receive_exactly(client: trio.SocketStream, count: int) -> bytes:
    received = bytearray()
    while len(received) < count:
        some = await client.receive_some(count - len(received))
        if not some:
            raise MalformedMessage("The control request is incomplete.")
        received += some
    return bytes(received)


async def _send(client: trio.SocketStream, reply: Reply) -> None:
    await client.send_all(frame(reply, LARGEST_ANSWER_BYTES))


def _told(command: str, error: Exception) -> ControlFailed:
    """What the client is told of an error of a handler. A bug is also logged."""
    if not isinstance(error, PotluckError | AuthError | ModelsError):
        _log.exception("the control command %s failed", command)
    return _failed(error)


def _failed(error: Exception) -> ControlFailed:
    if isinstance(error, trio.TooSlowError):
        return ControlFailed(f"No whole request came within {ASK_SECONDS:g} seconds.")
    failure = failure_of(error)
    what, why, advice = map(_writable, (failure.what, failure.why, failure.advice))
    return ControlFailed(what, why, advice, failure.exit_code)


def _writable(text: str) -> str:
    """`text` without lone surrogates, which a path that is no UTF-8 has and JSON cannot."""
    return text.encode(errors="replace").decode()


def remove_socket(path: Path) -> None:
    """Remove the socket of this process's server, wherever it is, even if the server could not."""
    path = bindable(path)
    path.unlink(missing_ok=True)
    if _is_stand_in(path):  # its folder was made only for it
        with contextlib.suppress(OSError):
            path.parent.rmdir()


def _is_stand_in(path: Path) -> bool:
    return path.parent.parent == STAND_INS


def remove_abandoned(now: float) -> None:
    """Remove stand-ins of this user's killed servers, where no process answers."""
    for folder in STAND_INS.glob(f"{stand_in_prefix()}*"):
        with contextlib.suppress(OSError):
            status = folder.lstat()
            is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
            is_old = now - status.st_mtime > BEGINNING_SECONDS
            if is_ours and is_old and not _is_answered(folder / "control.sock"):
                (folder / "control.sock").unlink(missing_ok=True)
                folder.rmdir()


def _is_answered(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.setblocking(False)  # a stopped server's queue may be full
        try:
            connection.connect(os.fspath(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except OSError:
            return True
    return True
