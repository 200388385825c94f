"""A node that only relays has the screen of a backbone, without what only a run has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import trio

from auth.server.settings import ListenAddress
from lab.scenes import RELAYING, SIZES
from node.app.cli.output import Output
from node.app.relay_only import Relaying
from node.app.screen.canvas import Look
from node.app.screen.display import ScreenDisplay
from node.app.screen.panels import Scene
from node.app.screen.picture import drawn
from node.app.screen.summary import summary
from node.app.screen.terminal import Terminal
from node.core.status import NodeStatus
from tests.homes import home_in
from tests.screen.pseudo import Pseudo


def shown(scene: Scene, columns: int = 80, rows: int = 30) -> str:
    return "\n".join(line.plain for line in drawn(scene, columns, rows))


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_it_fills_every_size(size: tuple[int, int]) -> None:
    for scene in (RELAYING, replace(RELAYING, helps=True), replace(RELAYING, chosen="peers")):
        lines = drawn(scene, *size)
        assert len(lines) == size[1]
        assert max(line.cell_len for line in lines) <= size[0]
        assert lines[0].plain.strip().startswith("potluck · relaying")


def test_it_shows_its_health_its_circuits_and_who_asks() -> None:
    text = shown(RELAYING)
    for part in (
        "relaying for everybody. Others use it with --bootstrap ADDRESS.",
        "backbone  healthy · 3 links",
        "3 of 64",
        "12 of 128 places · 2 GB in 2026-11",
        "812 slots kept · 15 dialled back",
        "3 others · 2 direct, 1 relayed",
        "…DqWzXn01",
        "↑ 1.23 MB/s",
    ):
        assert part in text
    assert "checkpoint" not in text, "it keeps none"


def test_there_is_nothing_to_pause() -> None:
    assert "pause" not in shown(RELAYING)
    assert "potluck pause" not in shown(replace(RELAYING, helps=True))
    assert "pause" not in shown(replace(RELAYING, keys=False))
    assert "q  leave" in shown(RELAYING)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_what_it_relayed_stays_in_the_scrollback(size: tuple[int, int]) -> None:
    node = NodeStatus(relay=RELAYING.node.relay if RELAYING.node else None)
    lines = [line.plain for line in summary(replace(RELAYING, node=node), "21:05:12", *size)]
    assert lines[0].strip().startswith("potluck · left")
    assert max(map(len, lines)) <= size[0]
    if size[1] >= 12:
        assert "0 circuits · 0 B" in lines[1]


async def test_the_command_shows_a_screen_until_a_key_ends_it(
    pseudo: Pseudo, tmp_path: Path
) -> None:
    home = home_in(
        tmp_path,
        POTLUCK_NETWORK_LISTEN="/ip4/127.0.0.1/tcp/0",
        POTLUCK_RELAY_SERVE="true",
        POTLUCK_RELAY_FOR="everybody",
    )
    terminal = Terminal(pseudo.descriptor, Look(), pseudo.descriptor)
    display = ScreenDisplay(Output(), terminal, pseudo.descriptor)
    relaying = Relaying(home, ListenAddress("127.0.0.1", 0), display)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(relaying.run)
        await pseudo.until("potluck · relaying")
        await pseudo.until("backbone  healthy")
        pseudo.type(b"p")
        await pseudo.until("there is nothing to pause")
        nursery.cancel_scope.cancel()
    lines = pseudo.read()
    assert "relaying for everybody" in "\n".join(lines), "what was printed stays"
    assert any(line.startswith(" potluck · left at ") for line in lines)
    assert pseudo.echoes()


async def test_an_address_that_is_taken_is_said_at_the_end(pseudo: Pseudo, tmp_path: Path) -> None:
    home = home_in(tmp_path, POTLUCK_NETWORK_LISTEN="/ip4/127.0.0.1/tcp/0")
    display = ScreenDisplay(Output(), Terminal(pseudo.descriptor, Look()), pseudo.descriptor)
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener:
        port = listener.socket.getsockname()[1]
        assert await Relaying(home, ListenAddress("127.0.0.1", port), display).run() == 1
    text = "\n".join(pseudo.read())
    assert "potluck · failed" in text
    assert "Choose another one with --http" in text
