"""The endpoints for an operator's tools: alive, ready, metrics."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from auth.server.auth_server import AuthServer, CannotListen
from auth.server.settings import SettingsError, settings_in
from auth.server.store import create_store, open_store
from tests.auth.web.authority import DAY, Authority
from tests.auth.web.running import (
    ACTOR,
    RUN,
    RunningServer,
    Volunteer,
    auth_server,
    metric,
)


async def test_alive_and_ready_are_two_things(tmp_path: Path) -> None:
    async with auth_server(tmp_path, Authority(tmp_path)) as running:
        assert (await running.ask("GET", "/healthz")).json() == {"alive": True}
        ready = await running.ask("GET", "/readyz")
        assert (ready.status, ready.json()) == (200, {"ready": True, "troubles": {}})


async def test_a_certificate_that_has_expired_makes_it_unready_and_not_dead(
    tmp_path: Path,
) -> None:
    authority = Authority(tmp_path)
    async with auth_server(tmp_path, authority) as running:
        authority.issue(begins=DAY * -9, ends=DAY * -1)
        assert running.server.certificate is not None
        running.server.certificate.reload_if_changed()
        assert running.tls is not None
        running.tls.check_hostname = False
        running.tls.verify_mode = ssl.CERT_NONE
        ready = await running.ask("GET", "/readyz")
        assert ready.status == 503
        assert set(ready.json()["troubles"]) == {"certificate"}
        assert (await running.ask("GET", "/healthz")).status == 200


async def test_a_full_disk_is_an_outage_and_no_refusal_and_passes_by_itself(
    tmp_path: Path,
) -> None:
    async with auth_server(tmp_path) as running:
        volunteer = Volunteer(running)
        await volunteer.join(running.new_code())
        pages = _pages(running)
        running.store.writer.run(lambda t: t.connection.execute(f"PRAGMA max_page_count={pages}"))
        for _ in range(500):  # what is left of the last pages
            answer = await volunteer.renew()
            if answer.status != 200:
                break
        assert (answer.status, answer.json()["error"]) == (503, "store_failed")
        assert int(answer.headers["retry-after"]) > 0
        assert "signed" not in answer.json()
        ready = await running.ask("GET", "/readyz")
        assert (ready.status, set(ready.json()["troubles"])) == (503, {"database"})
        running.store.writer.run(lambda t: t.connection.execute("PRAGMA max_page_count=1000000"))
        await volunteer.renew()
        assert volunteer.refusal().code == "challenge", "it was used; another one is asked for"
        assert (await volunteer.join(running.new_code())).status == 200
        assert (await running.ask("GET", "/readyz")).status == 200


def _pages(running: RunningServer) -> int:
    [(pages,)] = running.store.writer.run(
        lambda t: t.connection.execute("PRAGMA page_count").fetchall()
    )
    return int(pages)


async def test_answers_are_counted_by_route_and_reason(tmp_path: Path) -> None:
    async with auth_server(tmp_path) as running:
        volunteer = Volunteer(running)
        await volunteer.join("AAAAA-AAAAA-AAAAA-AAAAA")
        await volunteer.join(running.new_code())
        await volunteer.renew()
        await running.ask("GET", "/nothing")
        text = (await running.ask("GET", "/metrics")).body.decode()
    requests = "potluck_auth_requests_total"
    assert metric(text, requests, route="login", status="200") == 1
    assert metric(text, requests, route="login", status="403") == 1
    assert metric(text, requests, route="other", status="404") == 1
    assert metric(text, "potluck_auth_passes_total", how="renew") == 1
    assert metric(text, "potluck_auth_refusals_total", reason="code-unknown") == 1
    assert metric(text, "potluck_auth_live_tokens") == 2
    assert metric(text, "potluck_auth_ready") == 1
    assert metric(text, "potluck_auth_connections") == 1


async def test_metrics_are_for_those_who_are_named(tmp_path: Path) -> None:
    async with auth_server(tmp_path, server_lines='metrics_from = ["192.0.2.0/24"]') as running:
        answer = await running.ask("GET", "/metrics")
        assert (answer.status, answer.json()["error"]) == (403, "not_for_you")


@pytest.mark.parametrize("name", ["x_forwarded_for", "forwarded", "via"])
async def test_behind_a_proxy_that_nobody_named_there_are_no_metrics(
    tmp_path: Path, name: str
) -> None:
    async with auth_server(tmp_path) as running:
        assert (await running.ask("GET", "/metrics", **{name: "1.1 x"})).status == 403
        assert (await running.ask("GET", "/metrics")).status == 200


async def test_paths_of_strangers_make_no_new_labels(tmp_path: Path) -> None:
    async with auth_server(tmp_path, requests_per_minute_per_address=100_000) as running:
        async with running.client() as client:
            for number in range(50):
                await client.ask("GET", f"/{number}")
                await client.ask("GET", f"/login/{number}")
        text = running.server.metrics.text().decode()
    lines = [line for line in text.splitlines() if line.startswith("potluck_auth_requests_total{")]
    assert len(lines) == 2


def settings(**lines: str) -> str:
    server = "\n".join(f"{name} = {value}" for name, value in lines.items())
    return f'run = "{RUN}"\npublic_url = "https://auth.example"\n[server]\n{server}'


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "192.0.2.1:0", "example.org:0"])
def test_plain_http_is_for_this_machine_alone(tmp_path: Path, address: str) -> None:
    create_store(tmp_path / "auth", RUN, actor=ACTOR)
    read = settings_in(settings(listen=f'["{address}"]').encode(), tmp_path / "auth.toml")
    with (
        open_store(tmp_path / "auth") as store,
        pytest.raises(SettingsError, match="Plain HTTP is not served") as caught,
    ):
        AuthServer(read, store, version="0", insecure_http=True)
    assert caught.value.exit_code == 2
    assert "127.0.0.1" in caught.value.advice


def test_without_a_certificate_and_without_saying_so_it_does_not_start(tmp_path: Path) -> None:
    create_store(tmp_path / "auth", RUN, actor=ACTOR)
    read = settings_in(settings().encode(), tmp_path / "auth.toml")
    with (
        open_store(tmp_path / "auth") as store,
        pytest.raises(SettingsError, match="no certificate"),
    ):
        AuthServer(read, store, version="0")


def test_settings_of_another_run_are_noticed(tmp_path: Path) -> None:
    create_store(tmp_path / "auth", "another", actor=ACTOR)
    read = settings_in(settings().encode(), tmp_path / "auth.toml")
    with open_store(tmp_path / "auth") as store, pytest.raises(SettingsError, match="another"):
        AuthServer(read, store, version="0", insecure_http=True)


async def test_a_port_that_is_taken_is_said(tmp_path: Path) -> None:
    async with auth_server(tmp_path) as running:
        lines = settings(listen=f'["127.0.0.1:{running.port}"]')
        read = settings_in(lines.encode(), tmp_path / "auth.toml")
        server = AuthServer(read, running.store, version="0", insecure_http=True)
        with pytest.raises(CannotListen, match="cannot listen at 127"):
            await server.serve()
