"""HTTP beside a peer of a run: the page with its history, and `potluck page`, which finds it."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import trio

from auth.server.settings import ListenAddress
from lab.page.scenes import DEFINITION
from node.app.cli.catalogue import parse
from node.app.cli.line_queue import LineQueue
from node.app.cli.output import Output
from node.app.commands.page import for_a_browser, has_a_desktop
from node.app.main import main
from node.app.run_http import RunHttp
from node.core.configuration import Configuration
from node.core.node import Node
from node.run.definition import read_definition
from node.training.session import TrainingSession
from protocols.errors import Unreachable
from protocols.testing.world import SimulatedWorld
from tests.commands.test_node import network_in
from tests.demo.told import step_taken
from tests.homes import home_in
from tests.test_architecture import loaded_by
from tests.trainer.recorded import Recorded
from tests.waiting import PATIENCE_SECONDS


@asynccontextmanager
async def peer_with_page(
    configuration: Configuration,
) -> AsyncIterator[tuple[Node, TrainingSession, str]]:
    """A node that serves the page of a run, and the page's URL."""
    told: list[str] = []
    lines = LineQueue(Output.of(Namespace(json=True)), lambda _, text: told.append(text))
    session = TrainingSession(Recorded())
    session.entered()
    session.run = "poem"
    http = RunHttp(
        ListenAddress("127.0.0.1", 0),
        "poem",
        "organiser",
        definition=read_definition(DEFINITION.encode()),
    )
    async with (
        SimulatedWorld(seed=1) as world,
        Node(configuration, open_network=network_in(world)) as node,
        trio.open_nursery() as nursery,
    ):
        session.peer = node.network.peer_id
        nursery.start_soon(lines.run)
        nursery.start_soon(http.serve, node, session, lines)
        with trio.fail_after(PATIENCE_SECONDS):
            while not told:  # noqa: ASYNC110 - the printing tells nobody
                await trio.sleep(0.02)
        try:
            yield node, session, json.loads(told[0])["url"]
        finally:
            await lines.finish(1.0)
            nursery.cancel_scope.cancel()


async def page_at(url: str) -> Any:
    async with httpx2.AsyncClient(timeout=PATIENCE_SECONDS) as client:
        return (await client.get(f"{url}/page.json")).json()


async def test_the_history_is_there_right_after_a_restart(tmp_path: Path) -> None:
    configuration = home_in(tmp_path)
    async with peer_with_page(configuration) as (_, session, url):
        for epoch in range(30):
            session.happened(step_taken(epoch))
        assert len((await page_at(url))["points"]) == 30
    async with peer_with_page(configuration) as (_, session, url):
        found = await page_at(url)
        assert [one[0] for one in found["points"]] == list(range(1, 31))
        assert found["run"]["step"] == 30
        session.happened(step_taken(30))
    async with peer_with_page(configuration) as (_, _, url):
        assert len((await page_at(url))["points"]) == 31


async def test_metrics_and_health_are_beside_the_page(tmp_path: Path) -> None:
    async with (
        peer_with_page(home_in(tmp_path)) as (_, session, url),
        httpx2.AsyncClient(timeout=PATIENCE_SECONDS) as client,
    ):
        session.happened(step_taken(0))
        assert "potluck_backbone_epoch 1.0" in (await client.get(f"{url}/metrics")).text
        assert (await client.get(f"{url}/healthz")).status_code in (200, 503)
        assert (await client.get(f"{url}/")).text.startswith("<!doctype html>")


async def test_page_finds_the_page_of_the_node_in_this_home(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configuration = home_in(tmp_path)
    home = str(configuration.places.data_folder)
    async with peer_with_page(configuration) as (_, _, url):
        command, arguments = parse(["page", "--print", "--home", home])
        assert await trio.to_thread.run_sync(command, arguments) == 0
        assert capsys.readouterr().out == f"{url}/\n"


async def test_page_says_at_a_relay_without_a_run_why_there_is_none(tmp_path: Path) -> None:
    configuration = home_in(tmp_path)
    async with (
        SimulatedWorld(seed=1) as world,
        Node(configuration, open_network=network_in(world)),
    ):
        home = str(configuration.places.data_folder)
        command, arguments = parse(["page", "--print", "--home", home])
        with pytest.raises(Unreachable) as told:
            await trio.to_thread.run_sync(command, arguments)
    assert "is in no run (`potluck backbone --relay-only`)" in str(told.value)


def test_without_a_node_page_says_how_to_have_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["page", "--print", "--home", str(tmp_path)]) == 4
    assert "potluck backbone" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://0.0.0.0:8481/", "http://127.0.0.1:8481/"),
        ("http://[::]:8481/", "http://[::1]:8481/"),
        ("http://192.0.2.7:8481/", "http://192.0.2.7:8481/"),
    ],
)
def test_a_browser_is_sent_to_an_address_that_it_can_open(url: str, expected: str) -> None:
    assert for_a_browser(url) == expected


def test_no_browser_is_opened_where_there_is_no_window() -> None:
    assert not has_a_desktop("linux", {})
    assert has_a_desktop("linux", {"WAYLAND_DISPLAY": "wayland-0"})
    assert has_a_desktop("darwin", {})


def test_a_backbone_without_a_run_loads_nothing_of_the_training() -> None:
    """httpx2 would come with the node and its session, which the page of a run needs."""
    assert not {"torch", "scipy", "httpx2"} & loaded_by("import node.app.backbone")
