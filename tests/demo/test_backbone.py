"""A backbone peer says over HTTP how it is, and what is wrong with it."""

from __future__ import annotations

import json
import shutil
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from auth.server.settings import ListenAddress
from node.app.backbone import (
    LATE_SECONDS,
    MOST_CONNECTIONS,
    PREFIX,
    BackboneHealth,
    BackboneRecord,
    CannotServeHttp,
    KeptRun,
    metrics_text,
    serve_backbone,
)
from node.core.status import (
    ConnectivityStatus,
    DirectoryStatus,
    MembershipStatus,
    NodeStatus,
    RelayStatus,
)
from node.core.training_view import ExpertsView, GridView, RunPeerView, TrainerView
from node.run.folder import RunFolder
from node.training.happenings import Began, RecordsSummed
from protocols.accumulation.events import CheckpointMissed, CheckpointSaved
from protocols.network import TrafficFacts
from tests.demo.told import step_taken

LISTENS = NodeStatus(addresses=("/ip4/127.0.0.1/tcp/1",), directory=DirectoryStatus(joined="alone"))

RELAY = RelayStatus(
    3,
    2,
    1_200_000_000,
    7,
    {"month_bytes": 4},
    most_reservations=4,
    most_circuits=8,
    month="2026-11",
    month_bytes=2 * 10**9,
    month_limit=5 * 10**9,
)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def record(clock: Clock) -> BackboneRecord:
    made = BackboneRecord(checkpoint_seconds=300.0, clock=clock)
    made.take(Began("poem", 0))
    return made


def saved(epoch: int) -> CheckpointSaved:
    return CheckpointSaved(epoch, f"/checkpoints/{epoch}", 5_000_000, 0.1)


def test_nothing_is_wrong_as_long_as_nobody_trains(record: BackboneRecord, clock: Clock) -> None:
    clock.now += 100_000.0
    assert record.troubles(LISTENS) == {}


def test_it_is_not_healthy_before_it_has_entered_the_run(clock: Clock) -> None:
    fresh = BackboneRecord(checkpoint_seconds=300.0, clock=clock)
    assert set(fresh.troubles(NodeStatus())) == {"listening", "run"}


def test_it_is_not_healthy_without_the_others_or_a_pass(record: BackboneRecord) -> None:
    lost = NodeStatus(
        addresses=LISTENS.addresses,
        directory=DirectoryStatus(
            joined="trying", join_addresses=1, cannot_join={"/dns4/a": "refused"}
        ),
        membership=MembershipStatus(open=False, standing="over"),
    )
    troubles = record.troubles(lost)
    assert set(troubles) == {"joined", "pass"}
    assert "refused" in troubles["joined"]


def test_it_is_healthy_where_the_others_come_to_it_and_none_of_the_last_session_is_left(
    record: BackboneRecord,
) -> None:
    """It could serve every volunteer, and was called unhealthy for ever."""
    waiting = msgspec.structs.replace(LISTENS, directory=DirectoryStatus(joined="trying"))
    assert record.troubles(waiting) == {}


def test_a_paused_peer_reports_that_it_serves_nobody(record: BackboneRecord) -> None:
    words = ("paused by you", "the quota of 200 GB for 2026-11 is used up")
    paused = msgspec.structs.replace(LISTENS, training=TrainerView(closed=words))
    assert record.troubles(paused) == {"paused": "; ".join(words)}
    going_on = msgspec.structs.replace(LISTENS, training=TrainerView())
    assert record.troubles(going_on) == {}


def test_a_step_that_stays_in_no_checkpoint_is_a_trouble(
    record: BackboneRecord, clock: Clock
) -> None:
    record.take(step_taken(0))
    clock.now += 300.0 + LATE_SECONDS
    record.take(step_taken(1))
    assert record.troubles(LISTENS) == {}
    clock.now += 1.0
    assert set(record.troubles(LISTENS)) == {"checkpoints"}
    record.take(saved(2))
    clock.now += 10_000.0
    assert record.troubles(LISTENS) == {}


def test_a_full_disk_is_a_trouble_until_a_checkpoint_is_written(record: BackboneRecord) -> None:
    record.take(step_taken(0))
    record.take(CheckpointMissed(1, "no space left"))
    assert record.troubles(LISTENS) == {"checkpoints": "no space left"}
    record.take(saved(1))
    assert record.troubles(LISTENS) == {}


def test_the_figures_are_the_runs_and_name_nobody(record: BackboneRecord, clock: Clock) -> None:
    record.take(step_taken(6))
    record.take(saved(7))
    clock.now += 12.0
    peers = (
        RunPeerView(peer="12D3KooWann", role="trains", reach="direct"),
        RunPeerView(peer="12D3KooWeve", role='evil"} 1\n', reach="none"),
    )
    record.take(RecordsSummed(7, 672, 10**6, 2, 1, 3, 9))
    text = metrics_text(LISTENS, TrafficFacts(), TrainerView(peers=peers), record).decode()
    assert "potluck_backbone_epoch 7.0" in text
    assert "potluck_backbone_steps_total 1.0" in text
    assert "potluck_backbone_samples_total 96.0" in text
    assert "potluck_backbone_checkpoint_age_seconds 12.0" in text
    assert 'potluck_backbone_peers{reach="direct",role="trains"} 1.0' in text
    assert 'potluck_backbone_peers{reach="none",role="unknown"} 1.0' in text
    assert "potluck_backbone_credited_samples 672.0" in text
    assert "potluck_backbone_credited_helpers 1.0" in text
    assert "12D3" not in text
    assert "evil" not in text


def test_every_figure_can_be_read_by_prometheus_and_is_described(record: BackboneRecord) -> None:
    record.take(step_taken(6))
    record.take(saved(7))
    record.take(RecordsSummed(7, 672, 10**6, 2, 1, 3, 9))
    status = msgspec.structs.replace(LISTENS, memory_bytes=5, relay=RELAY)
    text = metrics_text(status, TrafficFacts(), TrainerView(), record).decode()
    described = (Path(__file__).parents[2] / "docs" / "operators.md").read_text(encoding="utf-8")
    for family in text_string_to_metric_families(text):
        assert family.type in ("gauge", "counter")
        assert family.documentation.endswith(".")
        for sample in family.samples:
            assert sample.name.startswith(PREFIX)
            assert f"`{sample.name.removeprefix(PREFIX)}`" in described, sample.name
            assert set(sample.labels) <= {"role", "reach", "mode", "outcome", "reason"}
    assert len(text.splitlines()) < 200, "one peer more must be no line more"


async def test_healthz_and_metrics_answer_over_http(record: BackboneRecord) -> None:
    status = LISTENS
    async with trio.open_nursery() as nursery:
        url = await serving(nursery, record, lambda: status)
        code, body = await got(f"{url}/healthz")
        assert (code, json.loads(body)["healthy"]) == (200, True)
        code, body = await got(f"{url}/metrics")
        assert code == 200
        assert b"potluck_backbone_healthy 1.0" in body
        status = NodeStatus()
        code, body = await got(f"{url}/healthz")
        assert code == 503
        assert "listening" in json.loads(body)["troubles"]
        assert (await got(f"{url}/anything"))[0] == 404
        assert (await got(f"{url}/metrics", b"something"))[0] == 405
        assert (await got(f"{url}/healthz", b"something"))[0] == 405
        nursery.cancel_scope.cancel()


def test_the_relays_figures_have_fixed_labels_and_the_months_rest() -> None:
    connectivity = ConnectivityStatus(
        mode="direct", dial_backs={"ok": 2}, punches={"punched": 1, "failed": 3}
    )
    status = msgspec.structs.replace(LISTENS, relay=RELAY, connectivity=connectivity)
    text = metrics_text(status, TrafficFacts(5, 6), TrainerView(), None).decode()
    for line in (
        "relay_reservations 3.0",
        "relay_circuits 2.0",
        "relay_circuits_made_total 7.0",
        "relay_bytes_total 1.2e+09",
        "relay_month_left_bytes 3e+09",
        'relay_refusals_total{reason="month_bytes"} 4.0',
        'relay_refusals_total{reason="not_admitted"} 0.0',
        'dial_backs_total{outcome="ok"} 2.0',
        'punches_total{outcome="failed"} 3.0',
        'mode{mode="direct"} 1.0',
        'mode{mode="dial-out only"} 0.0',
        "sent_bytes_total 5.0",
        "ready 1.0",
    ):
        assert f"{PREFIX}{line}\n" in text, line
    assert f"{PREFIX}epoch" not in text, "there is no run"


@pytest.mark.parametrize(
    ("full", "words"),
    [
        ({"reservations": 4}, "all 4 reservations"),
        ({"circuits": 8}, "all 8 circuits"),
        ({"month_bytes": 6 * 10**9}, "5 GB for 2026-11 are used up"),
    ],
)
async def test_a_full_relay_is_healthy_and_not_ready(full: dict[str, int], words: str) -> None:
    relay = RELAY
    async with trio.open_nursery() as nursery:
        url = await serving(nursery, None, lambda: msgspec.structs.replace(LISTENS, relay=relay))
        assert await got(f"{url}/readyz") == (200, b'{"ready":true,"troubles":{}}')
        relay = msgspec.structs.replace(RELAY, **full)
        code, body = await got(f"{url}/readyz")
        assert code == 503
        assert words in json.loads(body)["troubles"]["relay"]
        assert await got(f"{url}/healthz") == (200, b'{"healthy":true,"troubles":{}}')
        nursery.cancel_scope.cancel()


async def test_a_client_that_holds_all_connections_does_not_keep_a_health_check_out(
    record: BackboneRecord,
) -> None:
    async with trio.open_nursery() as nursery:
        url = await serving(nursery, record, lambda: LISTENS)
        port = int(url.rsplit(":", 1)[1])
        idle = [await trio.open_tcp_stream("127.0.0.1", port) for _ in range(MOST_CONNECTIONS)]
        for one in idle:
            await one.send_all(b"GET /healthz HTTP/1.1\r\nHost: ")  # and no more of it
        assert (await got(f"{url}/healthz"))[0] == 200
        for one in idle:
            await one.aclose()
        nursery.cancel_scope.cancel()


async def test_a_taken_port_is_told_with_what_to_do(record: BackboneRecord) -> None:
    (taken,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    address = ListenAddress("127.0.0.1", taken.socket.getsockname()[1])
    health = BackboneHealth(lambda: LISTENS, TrafficFacts, KeptRun(record, TrainerView, str))
    with pytest.raises(CannotServeHttp, match="cannot be served"):
        await serve_backbone(address, health, lambda _url: None)
    await taken.aclose()


async def test_a_removed_folder_is_a_trouble_at_once(
    record: BackboneRecord, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path / "poem")
    folder.path.mkdir()
    folder.definition_file.touch()
    folder.signed_file.touch()
    async with trio.open_nursery() as nursery:
        url = await serving(nursery, record, lambda: LISTENS, folder.trouble)
        assert (await got(f"{url}/healthz"))[0] == 200
        shutil.rmtree(folder.path)
        code, body = await got(f"{url}/healthz")
        assert code == 503
        assert "run.toml is gone" in json.loads(body)["troubles"]["folder"]
        nursery.cancel_scope.cancel()


async def test_a_disk_that_does_not_answer_is_a_trouble(
    record: BackboneRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.app.backbone.DISK_SECONDS", 0.01)
    answers = threading.Event()

    def hanging() -> str:
        answers.wait()
        return ""

    async with trio.open_nursery() as nursery:
        url = await serving(nursery, record, lambda: LISTENS, hanging)
        for _ in range(2):  # the second finds the one thread held, and waits no longer
            code, body = await got(f"{url}/healthz")
            assert code == 503
            assert "has not answered" in json.loads(body)["troubles"]["folder"]
        answers.set()
        nursery.cancel_scope.cancel()


async def serving(
    nursery: trio.Nursery,
    record: BackboneRecord | None,
    status: Callable[[], NodeStatus],
    folder_trouble: Callable[[], str] = str,
) -> str:
    urls: list[str] = []
    told = trio.Event()

    def listening(url: str) -> None:
        urls.append(url)
        told.set()

    run = None if record is None else KeptRun(record, TrainerView, folder_trouble)
    health = BackboneHealth(status, TrafficFacts, run)
    nursery.start_soon(serve_backbone, ListenAddress("127.0.0.1", 0), health, listening)
    await told.wait()
    return urls[0]


async def got(url: str, posted: bytes | None = None) -> tuple[int, bytes]:
    def get() -> tuple[int, bytes]:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(url, data=posted, timeout=30.0) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    return await trio.to_thread.run_sync(get)


def test_the_experts_of_a_run_are_counted_by_grid() -> None:
    experts = ExpertsView(
        grids=(GridView(name="ffn0", cells=6, live=3), GridView(name="ffn1", cells=6)), servers=2
    )
    record = BackboneRecord(checkpoint_seconds=60.0, clock=lambda: 0.0)
    text = metrics_text(LISTENS, TrafficFacts(), TrainerView(experts=experts), record).decode()
    assert 'potluck_backbone_experts_live{grid="ffn0"} 3.0' in text
    assert 'potluck_backbone_experts_cells{grid="ffn1"} 6.0' in text
    assert "potluck_backbone_experts_servers 2.0" in text
