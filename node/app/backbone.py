"""Monitors a backbone peer: `/metrics` for Prometheus, `/healthz` for whatever restarts it.

    record = BackboneRecord(checkpoint_seconds=300.0, clock=time.monotonic)
    session.follow(record.take)
    health = BackboneHealth(record, node.core.status, folder.trouble)
    await serve_backbone(address, health, session.view, listening)

`BackboneRecord` (pure) has what the peer has seen of its run, and its present troubles. The peer is
healthy if it would serve a volunteer who came now: it listens, it is connected to other peers, its
pass is valid, nothing pauses it, and the run's progress is being saved. `/healthz` then answers
200, else 503 with the reasons. `/metrics` reads every figure at the request and counts nothing
itself; docs/backbone.md lists them. Neither answer holds a secret, but both show who computes how
much, so it listens on this machine only, unless its operator names another address.

Promises: bounded in connections, requests and bytes (auth/server/serving.py), and it ends with the
task that runs it. An answer waits for nothing of the run, or a health check would be slow just when
something is wrong: all of it is in memory, except for the run's folder. That is checked for each
answer, and a disk that does not answer within `DISK_SECONDS` is a trouble of its own.

A missing checkpoint is no trouble as long as nobody trains; only a step that is not on the disk yet
has to be saved. A metric label with values that a stranger chooses is a memory leak at the scraper.
So peers are counted by role and reach, which have fixed values, and never named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from ipaddress import ip_network

import trio
from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Route

from auth.server.answers import Answer, json_answer
from auth.server.rate_limits import AllowedRate
from auth.server.serving import HttpServer
from auth.server.settings import ListenAddress
from node.core.status import NodeStatus
from node.core.training_view import TrainerView
from node.training.happenings import Began, Happening, RecordsSummed
from protocols.accumulation.events import (
    CaughtUp,
    CheckpointMissed,
    CheckpointSaved,
    RoundFailed,
    StepTaken,
)
from protocols.errors import PotluckError

LATE_SECONDS = 60.0
"""Allowed after a checkpoint was due; writing a gigabyte takes some seconds."""


class BackboneRecord:
    """Takes all events, in order."""

    def __init__(self, *, checkpoint_seconds: float, clock: Callable[[], float]) -> None:
        self._checkpoint_seconds, self._clock = checkpoint_seconds, clock
        self.trains = False
        self.epoch = 0
        self.steps = 0
        self.samples = 0.0
        self.failed_rounds = 0
        self.checkpoint_epoch: int | None = None
        self.checkpoint_at: float | None = None
        self.checkpoint_bytes = 0
        self.missed = ""
        self.folder_trouble = ""
        """The trouble with the run's folder; checked just before each answer."""
        self.credit: RecordsSummed | None = None
        self._unkept_since: float | None = None

    def take(self, happening: Happening) -> None:
        match happening:
            case Began(epoch=epoch):
                self.trains, self.epoch = True, epoch
            case StepTaken(epoch=epoch, samples=samples):
                self.epoch = epoch + 1
                self.steps += 1
                self.samples += samples
                self._is_not_kept()
            case CaughtUp(epoch=epoch):
                self.epoch = epoch
                self._is_not_kept()
            case RoundFailed():
                self.failed_rounds += 1
            case CheckpointSaved(epoch=epoch):
                self.checkpoint_epoch, self.checkpoint_at = epoch, self._clock()
                self.checkpoint_bytes, self.missed = happening.bytes, ""
                self._unkept_since = None if epoch >= self.epoch else self._clock()
            case CheckpointMissed(reason=reason):
                self.missed = reason
            case RecordsSummed():
                self.credit = happening
            case _:
                pass

    def checkpoint_age_seconds(self) -> float | None:
        """None before the first one of this session."""
        return None if self.checkpoint_at is None else self._clock() - self.checkpoint_at

    def unkept_seconds(self) -> float:
        """For how long there has been a step that is in no checkpoint."""
        return 0.0 if self._unkept_since is None else self._clock() - self._unkept_since

    def troubles(self, status: NodeStatus) -> dict[str, str]:
        """The troubles that keep this peer from being of use, by name; empty if there are none."""
        troubles = {}
        if not status.addresses:
            troubles["listening"] = "nobody can dial this node: it has no address"
        if status.directory.joined == "trying":
            failures = "; ".join(status.directory.cannot_join.values())
            troubles["joined"] = f"it has not met the others: {failures or 'no answer yet'}"
        member = status.membership
        if not member.open and member.standing == "over":
            troubles["pass"] = member.trouble or "its pass has expired"
        if not self.trains:
            troubles["run"] = "it has not entered the run yet"
        if status.training is not None and status.training.closed:
            troubles["paused"] = "; ".join(status.training.closed)
        if self.folder_trouble:
            troubles["folder"] = self.folder_trouble
        if self.missed:
            troubles["checkpoints"] = self.missed
        elif self.unkept_seconds() > self._checkpoint_seconds + LATE_SECONDS:
            troubles["checkpoints"] = f"none for {self.unkept_seconds():.0f} seconds, despite steps"
        return troubles

    def _is_not_kept(self) -> None:
        if self._unkept_since is None:
            self._unkept_since = self._clock()


PREFIX = "potluck_backbone_"
ROLES = ("trains", "auxiliary", "keeps", "unknown")
REACHES = ("direct", "relayed", "none")


def metrics_text(status: NodeStatus, view: TrainerView, record: BackboneRecord) -> bytes:
    """All of it, in Prometheus's text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Given(_families(status, view, record)))
    return generate_latest(registry)


class _Given(Collector):
    """A collector of metrics that are all made beforehand."""

    def __init__(self, families: Iterator[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> list[Metric]:
        return self._families

    def describe(self) -> list[Metric]:
        return self._families


def _families(status: NodeStatus, view: TrainerView, record: BackboneRecord) -> Iterator[Metric]:
    yield _gauge("healthy", "1 while /healthz says so.", not record.troubles(status))
    yield _gauge("epoch", "The run's step that this peer is at.", record.epoch)
    yield _counter(
        "steps", "Steps of the run that this peer was in, in this session.", record.steps
    )
    yield _counter("samples", "Samples of everybody in those steps.", record.samples)
    yield _counter("failed_rounds", "Rounds that had to be tried again.", record.failed_rounds)
    yield _peers(view)
    yield _gauge("batch_samples", "Samples of the batch that is being filled.", view.batch.samples)
    yield _gauge("batch_target_samples", "Samples of a full batch.", view.batch.target)
    yield _gauge(
        "samples_per_second", "Samples per second of all peers.", view.batch.samples_per_second
    )
    yield from _credit(record)
    yield _counter("sent_bytes", "Sent in this session.", view.traffic.sent_bytes)
    yield _counter("received_bytes", "Received in this session.", view.traffic.received_bytes)
    yield _gauge("links", "Open links to other peers.", len(status.links))
    yield _gauge("directory_peers", "Peers that the directory knows.", status.directory.peers_known)
    yield _gauge("directory_slots", "Slots stored for others.", status.directory.slots_stored)
    yield _gauge("directory_bytes", "Bytes stored for others.", status.directory.bytes_stored)
    age = record.checkpoint_age_seconds()
    if age is not None and record.checkpoint_epoch is not None:
        yield _gauge("checkpoint_age_seconds", "Since the newest checkpoint was written.", age)
        yield _gauge("checkpoint_epoch", "The step in it.", record.checkpoint_epoch)
        yield _gauge("checkpoint_bytes", "Its size.", record.checkpoint_bytes)
    yield _gauge(
        "unkept_seconds", "Since there is a step in no checkpoint.", record.unkept_seconds()
    )
    if status.memory_bytes is not None:
        yield _gauge("memory_bytes", "Memory of this process.", status.memory_bytes)
    yield _gauge("started_time_seconds", "When this node started, since 1970.", status.started_at)


def _credit(record: BackboneRecord) -> Iterator[Metric]:
    """The sums of all records when they were last added up. Gauges, because a record that is found
    later may also take something back."""
    found = record.credit
    if found is None:
        return
    yield _gauge("credited_steps", "Steps of the run that were added up.", found.steps)
    yield _gauge("credited_samples", "Samples of everybody that others accepted.", found.samples)
    yield _gauge("credited_averaged_bytes", "Bytes averaged for others.", found.averaged_bytes)
    yield _gauge("credited_people", "Persons who brought samples.", found.people)
    yield _gauge("credited_helpers", "Persons who helped without samples.", found.helpers)
    yield _gauge("record_writers", "Peers whose signed records are kept here.", found.writers)
    yield _gauge("record_pages", "Pages of those records.", found.pages)


def _peers(view: TrainerView) -> Metric:
    counted = Counter(
        (
            "keeps" if peer.keeps else peer.role if peer.role in ROLES else "unknown",
            peer.reach if peer.reach in REACHES else "none",
        )
        for peer in view.peers
    )
    family = GaugeMetricFamily(
        f"{PREFIX}peers", "Other peers of the run.", labels=("role", "reach")
    )
    for role in ROLES:
        for reach in REACHES:
            family.add_metric((role, reach), counted[role, reach])
    return family


def _gauge(name: str, what: str, value: float) -> Metric:
    return GaugeMetricFamily(f"{PREFIX}{name}", what, value=float(value))


def _counter(name: str, what: str, value: float) -> Metric:
    return CounterMetricFamily(f"{PREFIX}{name}", what, value=float(value))


MOST_CONNECTIONS = 32  # a scraper, a health check, and a person with a browser
CONNECTIONS_A_MINUTE = 240  # from one address: one every second, from four programs
METRICS_SECONDS = 1.0  # figures are reused for this long, however many ask
THIS_MACHINE = (ip_network("127.0.0.0/8"), ip_network("::1/128"))
"""Programs on this machine share an address. One of them that holds every connection must not keep
out the health check, so the connection that is idle for longest is closed."""
BACKLOG = 32
DISK_SECONDS = 2.0  # a busy disk answers in less, and health checks wait for longer
WATCH_SECONDS = 2.0  # for the screen and `potluck status`


class CannotServeHttp(PotluckError):
    """The port is in use, or the address is not this machine's."""


class BackboneHealth:
    """The troubles of a backbone peer. `folder_trouble` gives that of the run's folder, and may
    block."""

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
        """By name; empty if a volunteer who came now would be served."""
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
        """Report the troubles every `WATCH_SECONDS`, forever."""
        while True:
            tell(tuple((await self.troubles()).values()))
            await trio.sleep(WATCH_SECONDS)


async def serve_backbone(
    address: ListenAddress,
    health: BackboneHealth,
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
        handshakes=AllowedRate.per_minute(CONNECTIONS_A_MINUTE),
        proxies=THIS_MACHINE,
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(server.serve, listeners)
        host, port = listeners[0].socket.getsockname()[:2]
        listening(f"http://{ListenAddress(host, port)}")


def backbone_app(health: BackboneHealth, view: Callable[[], TrainerView]) -> Starlette:
    """The routes of both answers."""
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
