"""A backbone peer's HTTP face: `/metrics` for Prometheus, `/healthz` for whatever restarts it.

    health = Health(record, node.status, folder.trouble)
    await serve_backbone(address, health, session.view, listening)

`/healthz` answers 200 while a volunteer who came now would be served, and 503 with the reasons
else. Neither answer holds a secret, but both say who computes how much: it listens on this machine
only, unless its operator names another address.

Promises: bounded in connections, requests and bytes (auth/server/serving.py), and it ends with the
task that runs it.

An answer waits for nothing of the run, or a health check would be slow just when something is
wrong. All of it is in memory, but for the run's folder: that is looked at for each answer, and a
disk that does not answer within `DISK_SECONDS` is a trouble of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from ipaddress import ip_network

import trio
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Route

from auth.server.answers import Answer, json_answer
from auth.server.rate_limits import Rate
from auth.server.serving import HttpServer
from auth.server.settings import ListenAddress
from node.backbone_metrics import metrics_text
from node.backbone_record import BackboneRecord
from node.status import NodeStatus
from node.trainer.view import TrainerView
from protocols.errors import PotluckError

MOST_CONNECTIONS = 32  # a scraper, a health check, and a person with a browser
CONNECTIONS_A_MINUTE = 240  # of one address: one every second, from four programs
METRICS_SECONDS = 1.0  # for which figures are as good as new, however many ask
THIS_MACHINE = (ip_network("127.0.0.0/8"), ip_network("::1/128"))
"""Its programs share an address. One of them that holds every connection must not keep the health
check out: whoever is idle for longest makes way."""
BACKLOG = 32
DISK_SECONDS = 2.0  # a busy disk answers in less, and health checks wait for longer
WATCH_SECONDS = 2.0  # for the screen and `potluck status`


class CannotServeHttp(PotluckError):
    """The port is somebody else's, or the address is not ours."""


class Health:
    """What keeps a backbone peer from being of use. `folder_trouble` says what is wrong with the
    run's folder, and may block."""

    def __init__(
        self,
        record: BackboneRecord,
        status: Callable[[], NodeStatus],
        folder_trouble: Callable[[], str],
    ) -> None:
        self.record, self.status = record, status
        self._folder_trouble = folder_trouble
        self._one_look = trio.CapacityLimiter(1)
        """A disk that hangs holds one thread, however many ask."""

    async def troubles(self) -> dict[str, str]:
        """By their names; empty where a volunteer who came now would be served."""
        with trio.move_on_after(DISK_SECONDS) as waiting:
            self.record.folder_trouble = await trio.to_thread.run_sync(
                self._folder_trouble,
                abandon_on_cancel=True,  # type: ignore[call-arg] # the stubs are of an older trio
                limiter=self._one_look,
            )
        if waiting.cancelled_caught:
            self.record.folder_trouble = f"the disk has not answered for {DISK_SECONDS:g} seconds"
        return self.record.troubles(self.status())

    async def watch(self, tell: Callable[[tuple[str, ...]], None]) -> None:
        """Tell for ever, every `WATCH_SECONDS`, what is wrong."""
        while True:
            tell(tuple((await self.troubles()).values()))
            await trio.sleep(WATCH_SECONDS)


async def serve_backbone(
    address: ListenAddress,
    health: Health,
    view: Callable[[], TrainerView],
    listening: Callable[[str], None],
) -> None:
    """Serve until cancelled; `listening` is told the URL. CannotServeHttp if it cannot."""
    listeners = await _listeners(address)
    server = HttpServer(
        backbone_app(health, view),
        None,
        most_connections=MOST_CONNECTIONS,
        most_connections_per_address=MOST_CONNECTIONS,
        handshakes=Rate.per_minute(CONNECTIONS_A_MINUTE),
        proxies=THIS_MACHINE,
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(server.serve, listeners)
        host, port = listeners[0].socket.getsockname()[:2]
        listening(f"http://{ListenAddress(host, port)}")


def backbone_app(health: Health, view: Callable[[], TrainerView]) -> Starlette:
    """What is answered."""
    record = health.record

    async def healthz(_request: Request) -> Answer:
        troubles = await health.troubles()
        body = {"healthy": not troubles, "troubles": troubles, "epoch": record.epoch}
        return json_answer(body, 503 if troubles else 200)

    made_at, made = float("-inf"), b""

    async def metrics(_request: Request) -> Answer:
        nonlocal made_at, made
        if trio.current_time() - made_at >= METRICS_SECONDS:
            await health.troubles()
            made_at, made = trio.current_time(), metrics_text(health.status(), view(), record)
        return Answer(made, CONTENT_TYPE_LATEST)

    app = Starlette(routes=[Route("/healthz", healthz), Route("/metrics", metrics)])
    app.router.redirect_slashes = False
    return app


async def _listeners(address: ListenAddress) -> list[trio.SocketListener]:
    try:
        found = await trio.open_tcp_listeners(address.port, host=address.host, backlog=BACKLOG)
    except OSError as error:
        raise CannotServeHttp(
            f"/metrics and /healthz cannot be served at {address}: {error.strerror or error}.",
            why="Another program may use that port, or the address is not this machine's.",
            advice="Choose another one with --http HOST:PORT; a port of 0 is any that is free.",
        ) from None
    return list(found)
