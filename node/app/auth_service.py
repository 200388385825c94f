"""A running auth server on this machine: its lock, its state, its HTTPS, its local socket.

    the lock         nobody else writes into this home's folder (auth_places.py)
    the state        SQLite and the signing keys (auth/server/store.py)
    the HTTP face    volunteers (auth/server/auth_server.py)
    the socket       moderators: `potluck auth …` on this machine (moderation.py)

All of it runs in one nursery and ends with it: first the HTTP face, which answers the requests in
flight, then the state.

A moderator's act waits for the disk, so it runs in a thread and volunteers are answered meanwhile.
It is not abandoned when the moderator presses Ctrl-C in its middle, because it happens anyway.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import trio

from auth.server.auth_server import AuthServer
from auth.server.moderation import Moderation
from auth.server.settings import read_settings
from auth.server.store import open_store
from node.app.auth_places import AuthPlaces, hold_auth_lock
from node.app.cli.listen_flag import listen_flag
from node.app.moderation import perform
from node.core.control import Answering, ControlServer
from node.net import VERSION
from protocols.errors import MalformedMessage

if TYPE_CHECKING:
    from trio_typing import TaskStatus

MOST_ACTS_AT_ONCE = 4  # each waits for the disk in a thread
ACT_COMMAND = "auth"
STATUS_COMMAND = "auth-status"


class ActAsked(msgspec.Struct):
    """A moderator's act as it comes over the socket."""

    act: str
    arguments: dict[str, Any]
    actor: str


class AuthService:
    """One auth server and the socket beside it. Its attributes are valid once it serves."""

    def __init__(
        self,
        places: AuthPlaces,
        *,
        listen: tuple[str, ...] = (),
        insecure_http: bool = False,
    ) -> None:
        """`listen` replaces the address in auth.toml. SettingsError if it cannot be right."""
        self.places = places
        self.settings = read_settings(places.settings_file)
        if listen:
            addresses = tuple(listen_flag("--listen", one) for one in listen)
            self.settings = replace(self.settings, listen=addresses)
        self._insecure_http = insecure_http
        self._acts = trio.CapacityLimiter(MOST_ACTS_AT_ONCE)

    async def serve(
        self, task_status: TaskStatus[dict[str, Any]] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Serve until cancelled. Started with the status, once volunteers can reach it."""
        grace_ms = self.settings.grace_seconds * 1000
        with (
            hold_auth_lock(self.places),
            open_store(self.places.folder, grace_ms=grace_ms, actor=f"server:{VERSION}") as store,
        ):
            server = AuthServer(
                self.settings, store, version=VERSION, insecure_http=self._insecure_http
            )
            control = ControlServer(self.places.socket)
            providers = [provider.id for provider in self.settings.providers]
            control.add(ACT_COMMAND, partial(self._act, Moderation(store, providers=providers)))
            control.add(STATUS_COMMAND, partial(self._tell_status, server))
            async with trio.open_nursery() as nursery:
                await nursery.start(server.serve)
                await nursery.start(control.serve)
                task_status.started(self._status(server))

    def _status(self, server: AuthServer) -> dict[str, Any]:
        return {**server.status(), "socket": str(self.places.socket), "pid": os.getpid()}

    async def _act(
        self, moderation: Moderation, asked: Mapping[str, Any], answer: Answering
    ) -> None:
        try:
            act = msgspec.convert(asked, ActAsked)
        except msgspec.ValidationError as error:
            raise MalformedMessage("That is no moderator's act.", why=str(error)) from None
        done = await trio.to_thread.run_sync(
            perform, moderation, act.act, act.arguments, act.actor, limiter=self._acts
        )
        await answer(done)

    async def _tell_status(
        self, server: AuthServer, _asked: Mapping[str, Any], answer: Answering
    ) -> None:
        await answer(self._status(server))
