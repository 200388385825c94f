"""The figures of a backbone peer, for Prometheus. Pure.

    metrics_text(node.status(), session.view(), record)

Every figure is read when it is asked for; nothing is counted here. docs/backbone.md lists them.

Easy to get wrong: a label whose values a stranger chooses is a memory leak at whoever scrapes. So
peers are counted by role and reach, which are words of ours, and never named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from node.backbone_record import BackboneRecord
from node.status import NodeStatus
from node.trainer.view import TrainerView

PREFIX = "potluck_backbone_"
ROLES = ("trains", "auxiliary", "keeps", "unknown")
REACHES = ("direct", "relayed", "none")


def metrics_text(status: NodeStatus, view: TrainerView, record: BackboneRecord) -> bytes:
    """All of it, in Prometheus's text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Given(_families(status, view, record)))
    return generate_latest(registry)


class _Given(Collector):
    """A collector that has been told everything."""

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
        "samples_per_second", "What all peers compute together.", view.batch.samples_per_second
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
    """What the records of all came to when they were added up last. Gauges: a record that is found
    later may also take something back."""
    found = record.credit
    if found is None:
        return
    yield _gauge("credited_steps", "Steps of the run that were added up.", found.steps)
    yield _gauge("credited_samples", "Samples of everybody that others accepted.", found.samples)
    yield _gauge("credited_averaged_bytes", "What all averaged for others.", found.averaged_bytes)
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
