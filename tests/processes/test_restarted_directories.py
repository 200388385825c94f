"""The directory over restarts of real nodes: a backbone gets all its slots back.

Easy to get wrong: a killed node says nothing, so what it had on disk is looked at before it is
killed, and only that is asked for afterwards.
"""

from __future__ import annotations

import json
import signal
import sqlite3
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any, Final

import trio

from node.core.control_client import ask_once
from tests.processes.children import START_SECONDS, PeerProcess
from tests.processes.commands import running_command
from tests.waiting import PATIENCE_SECONDS, until

# Joining takes a tenth of a second; the machine may be busy with other tests.
LOOPBACK: Final = "/ip4/127.0.0.1/tcp/{port}"


class Place:
    """Where one node keeps its files, over all its lives; it has one port for all of them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.home = path / "home"
        self.port = 0
        self.home.mkdir(parents=True, mode=0o700)
        (self.home / "potluck.toml").write_text("[dht]\nsave_seconds = 0.1\n")

    @asynccontextmanager
    async def running(self, *flags: str) -> AsyncIterator[PeerProcess]:
        """One life of this node."""
        listen = LOOPBACK.format(port=self.port)
        command = ("listen", "--json", "--listen", listen, *flags)
        async with running_command(self.path, *command) as child:
            with trio.fail_after(START_SECONDS):
                line = await child.read_line()
            if not line:
                raise RuntimeError((self.path / "errors").read_text())
            told = json.loads(line)
            peer = child.as_peer(told["peer_id"], told["addresses"])
            self.port = peer.port
            yield peer

    async def ask(self, action: str, **question: Any) -> dict[str, Any]:
        """This node's answer to `potluck dht`."""
        socket = self.home / "run" / "control.sock"
        answer: dict[str, Any] = await trio.to_thread.run_sync(
            lambda: ask_once(socket, f"dht {action}", question)
        )
        return answer

    async def put(self, key: str, value: str) -> None:
        await self.ask("put", key=key, value=value, ttl=600.0)

    async def values(self, key: str) -> list[str]:
        return [slot["value"] for slot in (await self.ask("get", key=key))["slots"]]

    async def knows(self, count: int) -> None:
        """Wait until the node here knows so many others."""

        async def does() -> bool:
            return bool((await self.ask("stats"))["peers_in_table"] >= count)

        await until(does, PATIENCE_SECONDS)

    async def has_written_peers(self, count: int) -> None:
        """Wait until so many others are on the disk here."""

        def has() -> bool:
            file = self.home / "peers.json"
            return file.exists() and len(json.loads(file.read_bytes())["peers"]) >= count

        await until(has, PATIENCE_SECONDS)

    async def has_written_slot(self, key: str) -> None:
        def has() -> bool:
            with closing(sqlite3.connect(self.home / "dht.sqlite")) as database:
                return bool(
                    database.execute("SELECT 1 FROM slots WHERE key = ?", (key,)).fetchone()
                )

        await until(has, PATIENCE_SECONDS)


async def end(peer: PeerProcess, number: signal.Signals) -> None:
    peer.send_signal(number)
    with trio.fail_after(PATIENCE_SECONDS):
        await peer.exit_code()


async def test_a_backbone_that_was_killed_still_has_what_others_stored(tmp_path: Path) -> None:
    backbone, publisher = Place(tmp_path / "backbone"), Place(tmp_path / "publisher")
    async with backbone.running("--keep-slots") as first:
        async with publisher.running("--bootstrap", first.addresses[0]) as other:
            await publisher.knows(1)
            await publisher.put("note/kept", "by the backbone")
            await backbone.has_written_slot("note/kept")
            await end(other, signal.SIGKILL)
        await end(first, signal.SIGKILL)
    async with backbone.running("--keep-slots") as again:
        assert again.peer == first.peer

        async def is_back() -> bool:
            return await backbone.values("note/kept") == ["by the backbone"]

        await until(is_back, PATIENCE_SECONDS)


async def test_a_backbone_that_is_told_to_end_writes_what_it_has_first(tmp_path: Path) -> None:
    backbone = Place(tmp_path / "backbone")
    (backbone.home / "potluck.toml").write_text("[dht]\nsave_seconds = 3600\n")
    async with backbone.running("--keep-slots") as first:
        await backbone.put("note/late", "just before the end")
        await end(first, signal.SIGTERM)
    await backbone.has_written_slot("note/late")


async def test_without_keeping_slots_nothing_of_them_is_on_disk(tmp_path: Path) -> None:
    node = Place(tmp_path / "node")
    async with node.running() as first:
        await node.put("note/gone", "with the node")
        await end(first, signal.SIGTERM)
    async with node.running():
        assert await node.values("note/gone") == []
        assert not (node.home / "dht.sqlite").exists()


async def test_a_killed_node_finds_back_when_its_bootstrap_address_is_dead(tmp_path: Path) -> None:
    bootstrap, friend, node = (Place(tmp_path / name) for name in ("bootstrap", "friend", "node"))
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(bootstrap.running())
        at = ("--bootstrap", first.addresses[0])
        await stack.enter_async_context(friend.running(*at))
        await friend.knows(1)
        async with node.running(*at) as before:
            await node.knows(2)
            await node.has_written_peers(2)
            await end(before, signal.SIGKILL)
        await end(first, signal.SIGKILL)
        await friend.put("note/meanwhile", "we are still here")
        async with node.running(*at):
            await node.knows(1)
            assert await node.values("note/meanwhile") == ["we are still here"]
            stats = await node.ask("stats")
            assert stats["joined"] == "joined"
            (dead,) = stats["bootstrap"]
            assert "connection refused" in dead["failure"], "it says whose fault it is"


async def test_a_swarm_that_was_killed_whole_is_one_again_without_bootstrap(
    tmp_path: Path,
) -> None:
    places = [Place(tmp_path / str(number)) for number in range(4)]
    async with AsyncExitStack() as stack:
        lives = [await stack.enter_async_context(places[0].running("--keep-slots"))]
        at = ("--bootstrap", lives[0].addresses[0])
        for place in places[1:]:
            lives.append(await stack.enter_async_context(place.running(*at)))
        for place in places:
            await place.knows(3)
        for place in places[1:]:
            await place.has_written_peers(3)
        await places[3].put("note/before", "the end")
        await places[0].has_written_slot("note/before")
        for life in lives:
            life.send_signal(signal.SIGKILL)
        for life in lives:
            await life.exit_code()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(places[0].running("--keep-slots"))
        for place in places[1:]:
            await stack.enter_async_context(place.running())
        for place in places:
            await place.knows(3)

        async def everybody_finds_it() -> bool:
            return all([await place.values("note/before") == ["the end"] for place in places])

        await until(everybody_finds_it, PATIENCE_SECONDS)


async def test_a_damaged_memory_does_not_stop_a_start(tmp_path: Path) -> None:
    node = Place(tmp_path / "node")
    (node.home / "dht.sqlite").write_bytes(b"not a database" * 1000)
    (node.home / "peers.json").write_bytes(b'{"potluck_peers": 1, "peers": [{"peer": "')
    for file in ("dht.sqlite", "peers.json"):
        (node.home / file).chmod(0o600)
    async with node.running("--keep-slots"):
        await node.put("note/a", "b")
        assert await node.values("note/a") == ["b"]
    said = (node.path / "errors").read_text()
    assert "dht.sqlite.damaged" in said
    assert "Traceback" not in said
