"""A backbone peer's HTTP face: `/metrics` for Prometheus, `/healthz` for whatever restarts it.

    await serve_backbone(address, record, node.status, session.view, folder.trouble, listening)

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


class CannotServeHttp(PotluckError):
    """The port is somebody else's, or the address is not ours."""


async def serve_backbone(
    address: ListenAddress,
    record: BackboneRecord,
    status: Callable[[], NodeStatus],
    view: Callable[[], TrainerView],
    folder_trouble: Callable[[], str],
    listening: Callable[[str], None],
) -> None:
    """Serve until cancelled; `listening` is told the URL. CannotServeHttp if it cannot."""
    listeners = await _listeners(address)
    server = HttpServer(
        backbone_app(record, status, view, folder_trouble),
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


def backbone_app(
    record: BackboneRecord,
    status: Callable[[], NodeStatus],
    view: Callable[[], TrainerView],
    folder_trouble: Callable[[], str],
) -> Starlette:
    """What is answered. `folder_trouble` says what is wrong with the folder, and may block."""
    one_look = trio.CapacityLimiter(1)  # a disk that hangs holds one thread, however many ask

    async def look_at_the_folder() -> None:
        with trio.move_on_after(DISK_SECONDS) as waiting:
            record.folder_trouble = await trio.to_thread.run_sync(
                folder_trouble,
                abandon_on_cancel=True,  # type: ignore[call-arg] # the stubs are of an older trio
                limiter=one_look,
            )
        if waiting.cancelled_caught:
            record.folder_trouble = f"the disk has not answered for {DISK_SECONDS:.0f} seconds"

    async def healthz(_request: Request) -> Answer:
        await look_at_the_folder()
        troubles = record.troubles(status())
        body = {"healthy": not troubles, "troubles": troubles, "epoch": record.epoch}
        return json_answer(body, 503 if troubles else 200)

    made_at, made = float("-inf"), b""

    async def metrics(_request: Request) -> Answer:
        nonlocal made_at, made
        if trio.current_time() - made_at >= METRICS_SECONDS:
            await look_at_the_folder()
            made_at, made = trio.current_time(), metrics_text(status(), view(), record)
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
