"""Monitors a backbone peer: `/metrics` for Prometheus, `/healthz` and `/readyz` for programs that
restart it or send others to it.

    record = BackboneRecord(checkpoint_seconds=300.0, clock=time.monotonic)
    session.follow(record.take)
    run = KeptRun(record, session.view, folder.trouble)
    health = BackboneHealth(node.status, node.network.traffic, run)
    await serve_backbone(address, health, listening)

`BackboneRecord` (pure) has what the peer has seen of its run, and its present troubles. The peer is
healthy if it would serve a volunteer who came now: it listens, it is connected to other peers, its
pass is valid, nothing pauses it, and the run's progress is being saved. It is ready if it listens,
has met the others, and its relay has room. Each answers 200, else 503 with the reasons. `/metrics`
reads every figure at the request and counts nothing itself; docs/operators.md lists them. No answer
holds a secret, but they show who computes how much, so it listens on this machine only, unless its
operator names another address.

A backbone without a run (`--relay-only`) has the same answers, without the run's part. With a run
it serves the run's page (node/app/page/), too.

Promises: bounded in connections, requests and bytes (auth/server/serving.py), and it ends with the
task that runs it. An answer waits for nothing of the run, or a health check would be slow just when
something is wrong: all of it is in memory, except for the run's folder. That is checked for each
answer, and a disk that does not answer within `DISK_SECONDS` is a trouble of its own.

A missing checkpoint is no trouble as long as nobody trains; only a step that is not on the disk yet
has to be saved. A metric label with values that a stranger chooses is a memory leak at the scraper.
So every label has fixed values, and peers are counted and never named.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from typing import TYPE_CHECKING

import trio
from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Route

from auth.server.answers import Answer, json_answer
from auth.server.rate_limits import AllowedRate, is_within
from auth.server.serving import HttpServer
from auth.server.settings import ListenAddress
from nat.connectivity import ReachMode
from nat.punching import PunchOutcome
from nat.reachability import OUTCOMES
from nat.relaying import Refusal
from node.app.page import MOST_VIEWERS, RunPage
from node.core.caps.units import in_words
from node.core.status import ConnectivityStatus, NodeStatus, RelayStatus
from node.core.training_view import TrainerView
from node.training.figures import RunFigures
from node.training.happenings import Began, Happening, RecordsSummed
from protocols.accumulation.events import (
    CaughtUp,
    CheckpointMissed,
    CheckpointSaved,
    StepTaken,
)
from protocols.errors import PotluckError
from protocols.network import TrafficFacts

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

LATE_SECONDS = 60.0
"""Allowed after a checkpoint was due; writing a gigabyte takes some seconds."""


class BackboneRecord:
    """Takes all events, in order."""

    def __init__(self, *, checkpoint_seconds: float, clock: Callable[[], float]) -> None:
        self._checkpoint_seconds, self._clock = checkpoint_seconds, clock
        self.trains = False
        self.epoch = 0
        self.figures = RunFigures()
        self.checkpoint_epoch: int | None = None
        self.checkpoint_at: float | None = None
        self.checkpoint_bytes = 0
        self.missed = ""
        self.folder_trouble = ""
        """The trouble with the run's folder; checked just before each answer."""
        self.credit: RecordsSummed | None = None
        self._unkept_since: float | None = None

    def take(self, happening: Happening) -> None:
        self.figures.take(happening)
        match happening:
            case Began(epoch=epoch):
                self.trains, self.epoch = True, epoch
            case StepTaken(epoch=epoch):
                self.epoch = epoch + 1
                self._is_not_kept()
            case CaughtUp(epoch=epoch):
                self.epoch = epoch
                self._is_not_kept()
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
        troubles = node_troubles(status)
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


def node_troubles(status: NodeStatus) -> dict[str, str]:
    """The troubles of a node with or without a run, by name."""
    troubles = {}
    if not status.addresses:
        troubles["listening"] = "nobody can dial this node: it has no address"
    if status.directory.joined == "trying" and status.directory.join_addresses:
        # peers of an earlier session may be gone for good: others join through this node
        failures = "; ".join(status.directory.cannot_join.values())
        troubles["joined"] = f"it has not met the others: {failures or 'no answer yet'}"
    member = status.membership
    if not member.open and member.standing == "over":
        troubles["pass"] = member.trouble or "its pass has expired"
    return troubles


def relay_trouble(relay: RelayStatus) -> str:
    """Why the relay has no room for another peer; empty if it has."""
    if relay.month_left == 0:
        assert relay.month_limit is not None
        return f"the relay's {in_words(relay.month_limit)} for {relay.month} are used up"
    if relay.reservations >= relay.most_reservations:
        return f"all {relay.most_reservations:,} reservations of the relay are taken"
    if relay.circuits >= relay.most_circuits:
        return f"all {relay.most_circuits:,} circuits of the relay are taken"
    return ""


@dataclass(frozen=True)
class KeptRun:
    """The run that a backbone keeps. `folder_trouble` gives that of the run's folder, and may
    block."""

    record: BackboneRecord
    view: Callable[[], TrainerView]
    folder_trouble: Callable[[], str]


PREFIX = "potluck_backbone_"
ROLES = ("trains", "auxiliary", "keeps", "unknown")
REACHES = ("direct", "punched", "relayed", "none")


def metrics_text(
    status: NodeStatus, traffic: TrafficFacts, view: TrainerView, record: BackboneRecord | None
) -> bytes:
    """All of it, in Prometheus's text format. `record`: None without a run."""
    registry = CollectorRegistry(auto_describe=False)
    troubles = node_troubles(status) if record is None else record.troubles(status)
    families = [_gauge("healthy", "1 while /healthz says so.", not troubles)]
    if record is not None:
        families += _run_families(view, record)
    families += _node_families(status, traffic)
    registry.register(_Given(families))
    return generate_latest(registry)


class _Given(Collector):
    """A collector of metrics that are all made beforehand."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> list[Metric]:
        return self._families

    def describe(self) -> list[Metric]:
        return self._families


def _run_families(view: TrainerView, record: BackboneRecord) -> Iterator[Metric]:
    figures = record.figures
    yield _gauge("epoch", "The run's step that this peer is at.", record.epoch)
    yield _counter(
        "steps", "Steps of the run that this peer was in, in this session.", figures.steps
    )
    yield _counter("samples", "Samples of everybody in those steps.", figures.samples)
    yield _counter("failed_rounds", "Rounds that had to be tried again.", figures.failed_rounds)
    if figures.loss is not None:
        yield _gauge("loss", "The run's loss in its newest step.", figures.loss)
    if figures.learning_rate is not None:
        yield _gauge("learning_rate", "The learning rate of that step.", figures.learning_rate)
    yield _peers(view)
    yield _gauge("batch_samples", "Samples of the batch that is being filled.", view.batch.samples)
    yield _gauge("batch_target_samples", "Samples of a full batch.", view.batch.target)
    yield _gauge(
        "samples_per_second", "Samples per second of all peers.", view.batch.samples_per_second
    )
    yield from _credit(record)
    yield from _experts(view)
    age = record.checkpoint_age_seconds()
    if age is not None and record.checkpoint_epoch is not None:
        yield _gauge("checkpoint_age_seconds", "Since the newest checkpoint was written.", age)
        yield _gauge("checkpoint_epoch", "The step in it.", record.checkpoint_epoch)
        yield _gauge("checkpoint_bytes", "Its size.", record.checkpoint_bytes)
    yield _gauge(
        "unkept_seconds", "Since there is a step in no checkpoint.", record.unkept_seconds()
    )


def _experts(view: TrainerView) -> Iterator[Metric]:
    """Of a run with experts. The names of its grids are in its definition."""
    if view.experts is None:
        return
    live = GaugeMetricFamily(f"{PREFIX}experts_live", "Experts with a server.", labels=("grid",))
    cells = GaugeMetricFamily(f"{PREFIX}experts_cells", "Cells of the grid.", labels=("grid",))
    for grid in view.experts.grids:
        live.add_metric((grid.name,), float(grid.live))
        cells.add_metric((grid.name,), float(grid.cells))
    yield live
    yield cells
    yield _gauge("experts_servers", "Peers that serve experts.", view.experts.servers)


def _node_families(status: NodeStatus, traffic: TrafficFacts) -> Iterator[Metric]:
    yield _gauge("ready", "1 while /readyz says so.", not _not_ready(status))
    yield _counter("sent_bytes", "Sent in this session.", traffic.sent_bytes)
    yield _counter("received_bytes", "Received in this session.", traffic.received_bytes)
    yield _gauge("links", "Open links to other peers.", len(status.links))
    yield _gauge("directory_peers", "Peers that the directory knows.", status.directory.peers_known)
    yield _gauge("directory_slots", "Slots stored for others.", status.directory.slots_stored)
    yield _gauge("directory_bytes", "Bytes stored for others.", status.directory.bytes_stored)
    if status.memory_bytes is not None:
        yield _gauge("memory_bytes", "Memory of this process.", status.memory_bytes)
    yield _gauge("started_time_seconds", "When this node started, since 1970.", status.started_at)
    yield from _reached(status.connectivity)
    if status.relay is not None:
        yield from _relayed(status.relay)


def _reached(connectivity: ConnectivityStatus) -> Iterator[Metric]:
    mode = GaugeMetricFamily(f"{PREFIX}mode", "1 for the mode of this node.", labels=("mode",))
    for one in ReachMode:
        mode.add_metric((one.value,), float(one.value == connectivity.mode))
    yield mode
    yield _outcomes(
        "dial_backs",
        "Addresses of others that this node was asked to dial.",
        "outcome",
        OUTCOMES,
        connectivity.dial_backs,
    )
    yield _outcomes(
        "punches",
        "Attempts to make a relayed link direct.",
        "outcome",
        (one.value for one in PunchOutcome),
        connectivity.punches,
    )


def _relayed(relay: RelayStatus) -> Iterator[Metric]:
    yield _gauge("relay_reservations", "Peers with a place at the relay.", relay.reservations)
    yield _gauge("relay_reservations_limit", "The most of them.", relay.most_reservations)
    yield _gauge("relay_circuits", "Pairs of peers that talk through the relay.", relay.circuits)
    yield _gauge("relay_circuits_limit", "The most of them.", relay.most_circuits)
    yield _counter("relay_circuits_made", "Circuits made in this session.", relay.circuits_made)
    yield _counter("relay_bytes", "Relayed in this session.", relay.carried_bytes)
    yield _gauge("relay_month_bytes", "Relayed in this calendar month.", relay.month_bytes)
    if relay.month_left is not None:
        yield _gauge("relay_month_left_bytes", "What the month's limit leaves.", relay.month_left)
    yield _outcomes(
        "relay_refusals",
        "What the relay refused.",
        "reason",
        (one.value for one in Refusal),
        relay.refusals,
    )


def _outcomes(
    name: str, what: str, label: str, values: Iterable[str], counts: Mapping[str, int]
) -> Metric:
    family = CounterMetricFamily(f"{PREFIX}{name}", what, labels=(label,))
    for value in values:
        family.add_metric((value,), float(counts.get(value, 0)))
    return family


def _not_ready(status: NodeStatus) -> dict[str, str]:
    troubles = node_troubles(status)
    full = "" if status.relay is None else relay_trouble(status.relay)
    return troubles | ({"relay": full} if full else {})


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
    """The troubles of a backbone peer. `traffic` gives the node's totals; `run` is None without a
    run."""

    def __init__(
        self,
        status: Callable[[], NodeStatus],
        traffic: Callable[[], TrafficFacts],
        run: KeptRun | None = None,
    ) -> None:
        self.status, self.run = status, run
        self._traffic = traffic
        self._one_look = trio.CapacityLimiter(1)
        """A disk that hangs holds one thread, however many ask."""

    async def troubles(self) -> dict[str, str]:
        """By name; empty if a volunteer who came now would be served."""
        if self.run is None:
            return node_troubles(self.status())
        record = self.run.record
        with trio.move_on_after(DISK_SECONDS) as waiting:
            record.folder_trouble = await trio.to_thread.run_sync(
                self.run.folder_trouble,
                abandon_on_cancel=True,  # type: ignore[call-arg] # the stubs are of an older trio
                limiter=self._one_look,
            )
        if waiting.cancelled_caught:
            record.folder_trouble = f"the disk has not answered for {DISK_SECONDS:g} seconds"
        return record.troubles(self.status())

    def not_ready(self) -> dict[str, str]:
        """By name; empty if it listens, has met the others, and its relay has room."""
        return _not_ready(self.status())

    async def figures(self) -> bytes:
        """For Prometheus."""
        await self.troubles()
        run = self.run
        return metrics_text(
            self.status(),
            self._traffic(),
            TrainerView() if run is None else run.view(),
            None if run is None else run.record,
        )

    async def watch(self, tell: Callable[[tuple[str, ...]], None]) -> None:
        """Report the troubles every `WATCH_SECONDS`, forever."""
        while True:
            tell(tuple((await self.troubles()).values()))
            await trio.sleep(WATCH_SECONDS)


async def serve_backbone(
    address: ListenAddress,
    health: BackboneHealth,
    listening: Callable[[str], None],
    page: RunPage | None = None,
) -> None:
    """Serve until cancelled; `listening` is told the URL. CannotServeHttp if it cannot. `page`: the
    run's page, which is run elsewhere; None without a run."""
    listeners = await _listeners(address)
    app: ASGIApp = backbone_app(health, page)
    if all(is_within(one.socket.getsockname()[0], THIS_MACHINE) for one in listeners):
        app = ForThisMachine(app)
    server = HttpServer(
        app,
        None,
        most_connections=MOST_CONNECTIONS + (0 if page is None else MOST_VIEWERS),
        most_connections_per_address=MOST_CONNECTIONS,
        handshakes=AllowedRate.per_minute(CONNECTIONS_A_MINUTE),
        proxies=THIS_MACHINE,
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(server.serve, listeners)
        host, port = listeners[0].socket.getsockname()[:2]
        listening(f"http://{ListenAddress(host, port)}")


def backbone_app(health: BackboneHealth, page: RunPage | None = None) -> Starlette:
    """The routes of the three answers, and of the page."""

    async def healthz(_request: Request) -> Answer:
        troubles = await health.troubles()
        epoch = {} if health.run is None else {"epoch": health.run.record.epoch}
        body = {"healthy": not troubles, "troubles": troubles, **epoch}
        return json_answer(body, 503 if troubles else 200)

    async def readyz(_request: Request) -> Answer:
        troubles = health.not_ready()
        return json_answer({"ready": not troubles, "troubles": troubles}, 503 if troubles else 200)

    made_at, made = float("-inf"), b""

    async def metrics(_request: Request) -> Answer:
        nonlocal made_at, made
        if trio.current_time() - made_at >= METRICS_SECONDS:
            figures = await health.figures()
            made_at, made = trio.current_time(), figures
        return Answer(made, CONTENT_TYPE_LATEST)

    routes = (("/healthz", healthz), ("/readyz", readyz), ("/metrics", metrics))
    own = [Route(path, answer) for path, answer in routes]
    app = Starlette(routes=own if page is None else [*own, *page.routes()])
    app.router.redirect_slashes = False
    return app


_HOST = re.compile(r"(\[(?P<bracketed>[^\]]+)\]|(?P<plain>[^:\[]+))(:[0-9]*)?")


class ForThisMachine:
    """The application of a server that only this machine reaches, for requests that name it so.

    A web page from elsewhere may have a name that leads to 127.0.0.1 (DNS rebinding). The browser
    of somebody here then takes this server for that page's own, and lets it read all answers. But
    it says the name in `Host`. A proxy that passes on what the world asks says an address.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        hosts = [value for name, value in scope.get("headers", ()) if name == b"host"]
        if scope["type"] != "http" or (
            len(hosts) == 1 and is_no_domain(hosts[0].decode("latin-1"))
        ):
            await self._app(scope, receive, send)
            return
        words = (
            "This server is for its own machine, and answers to its address or to localhost only. "
            "Behind a proxy, leave out the line that sets Host.\n"
        )
        await Answer(words.encode(), "text/plain", 421)(scope, receive, send)


def is_no_domain(host: str) -> bool:
    """Whether the value of a `Host` header is an address or localhost, with any port."""
    found = _HOST.fullmatch(host)
    if found is None:
        return False
    name = found["bracketed"] or found["plain"]
    if name.lower() == "localhost":
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


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
