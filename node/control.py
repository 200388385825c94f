"""A running node's ear: a local socket that only its owner can open.

`potluck status` is the first to use it. A room that wants a command of its own registers it:

    async def pause(arguments, answer):
        ...
        await answer({"paused": True})

    node.control.add("pause", pause)

A handler may answer many times (that is how `--watch` streams). It is cancelled when the client
goes away or the node ends; a PotluckError that it raises reaches the client with its exit code.

The threat is another user of this machine. The folder of the socket is closed to them (0700),
the socket too (0600), and on Linux each connection's user is checked besides (SO_PEERCRED).

Easy to get wrong: a socket file survives `kill -9`. It is replaced without asking, which is safe
only because whoever starts this server holds the node's lock (running_lock.py).
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from auth.errors import AuthError
from models.errors import ModelsError
from node.control_frames import (
    LARGEST_ANSWER_BYTES,
    LARGEST_ASK_BYTES,
    LENGTH,
    Answer,
    Ask,
    Done,
    Failed,
    Reply,
    ask_in,
    bindable,
    frame,
    length_of,
)
from node.failure import failure_of
from node.running_lock import make_private_folder
from node.version import VERSION
from node.wrong_use import nearest
from protocols.errors import MalformedMessage, PotluckError, ProtocolMisuse

if TYPE_CHECKING:
    from trio_typing import TaskStatus  # the stubs of trio that libp2p brings know it only there

# Each is a person or a script of the same user; more than this is a script gone wild.
MOST_CLIENTS = 32
# From connecting to a whole request. The client sends it in one write.
ASK_SECONDS = 5.0
SOCKET_MODE = 0o600

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
        """Answer `command` with `handler`. Adding one twice is a misuse."""
        if command in self._handlers:
            raise ProtocolMisuse(f"The control command {command} is there already.")
        self._handlers[command] = handler

    async def serve(self, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Answer until cancelled; then the socket file is gone. Started once it can be reached."""
        if not hasattr(socket, "AF_UNIX"):
            _log.warning("this platform has no local sockets: `potluck status` cannot ask us")
            task_status.started()
            await trio.sleep_forever()
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
        """One client, from its request to the end of our answers. Never raises."""
        self._clients += 1
        try:
            async with client:
                if self._clients <= MOST_CLIENTS and _is_ours(client):
                    await self._answer(client)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the client has left; nobody is there to be told
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
            # here and not only in _meet: what leaves a nursery is wrapped, and passes it by
            with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await _send(client, await self._handle(ask, client))
            nursery.cancel_scope.cancel()

    async def _handle(self, ask: Ask, client: trio.SocketStream) -> Reply:
        handler = self._handlers.get(ask.command)
        if handler is None:
            return self._unknown(ask.command)

        async def answer(value: Any) -> None:
            await _send(client, Answer(value))

        try:
            await handler(ask.arguments, answer)
        except trio.BrokenResourceError:
            raise
        except Exception as error:  # noqa: BLE001 - one command's bug must not end the node
            if not isinstance(error, PotluckError | AuthError | ModelsError):
                _log.exception("the control command %s failed", ask.command)
            return _failed(error)
        return Done()

    def _unknown(self, command: str) -> Failed:
        meant = nearest(command, self._handlers)
        return Failed(
            f"The running node does not know the command {command[:80]!r}.",
            why=f"It is version {VERSION}; the one that asked may be newer.",
            advice=f"Did you mean {meant}?"
            if meant
            else "Restart the node to bring it up to date.",
        )


def _is_ours(client: trio.SocketStream) -> bool:
    """Whether the process at the other end belongs to our user, or to root."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:  # not Linux: the modes of folder and socket are what there is
        return True
    credentials = client.socket.getsockopt(socket.SOL_SOCKET, option, struct.calcsize("iII"))
    _pid, user, _group = struct.unpack("iII", credentials)
    if user in (os.geteuid(), 0):
        return True
    _log.warning("user %d tried the control socket and was refused", user)
    return False


async def _cancel_when_gone(client: trio.SocketStream, scope: trio.CancelScope) -> None:
    """The client has nothing more to say; what comes now is the end of its connection."""
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
            raise MalformedMessage("The control request ends in its middle.")
        received += some
    return bytes(received)


async def _send(client: trio.SocketStream, reply: Reply) -> None:
    await client.send_all(frame(reply, LARGEST_ANSWER_BYTES))


def _failed(error: Exception) -> Failed:
    if isinstance(error, trio.TooSlowError):
        return Failed(f"No whole request came within {ASK_SECONDS:g} seconds.")
    failure = failure_of(error)
    return Failed(failure.what, failure.why, failure.advice, failure.exit_code)


def remove_socket(path: Path) -> None:
    """Of a server of this process, wherever it really is; for one that had no time for it, too."""
    path = bindable(path)
    path.unlink(missing_ok=True)
    if path.parent.parent == Path("/tmp"):  # the stand-in's folder was made for it alone
        with contextlib.suppress(OSError):
            path.parent.rmdir()
