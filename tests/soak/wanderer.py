"""A peer that never rests: it calls, transfers, gives up and hangs up at random, for ever.

`python -m tests.soak.wanderer --chance 7`. Lines of JSON come in: `{"know": {peer: [addresses]}}`
replaces whom it knows, `{"rest": true}` makes it stop acting and hang up everything. It prints a
line when it listens, and then twice a second how much it did and what it holds.

Errors of our own hierarchy are expected: other peers die in the middle of a call. Any other error
ends the process, and the test sees that.

Easy to get wrong: a peer whose every call fails looks as busy as a healthy one. So what succeeded
is counted apart from what was tried.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import msgspec
import trio

from node.net.transport import YamuxSettings
from protocols.errors import HandlerFailed, PotluckError
from protocols.identity import Identity, PeerId
from protocols.rpc import Empty
from tests.processes.methods import BREAK, CHUNK_BYTES, ECHO, LINGER, SINK, Content, Duration
from tests.processes.peer import SEED_VARIABLE, TestPeer, chunk_of, open_test_peer

TASKS: Final = 4  # things that it does at once
CALL_SECONDS: Final = 5.0
REPORT_SECONDS: Final = 0.5
MOST_CHUNKS: Final = 8

# Stopped peers are part of this life too, and a test should not wait 13 s for each
YAMUX: Final = YamuxSettings(keep_alive_seconds=0.5, keep_alive_deadline_seconds=1.5)


@dataclass
class Deeds:
    """Counts of its attempts, and of those that succeeded."""

    tried: int = 0
    succeeded: int = 0


@dataclass
class Wanderer:
    peer: TestPeer
    chance: random.Random
    known: dict[PeerId, tuple[str, ...]] = field(default_factory=dict)
    deeds: Deeds = field(default_factory=Deeds)

    async def live(self) -> None:
        """One of its tasks: one deed after another."""
        actions: list[Callable[[PeerId], Awaitable[None]]] = [
            self._call,
            self._call,
            self._call,
            self._break,
            self._upload,
            self._download,
            self._give_up_a_call,
            self._give_up_an_upload,
            self._hang_up,
        ]
        while True:
            await trio.sleep(self.chance.expovariate(50))
            others = [other for other in self.known if other != self.peer.network.peer_id]
            if not others:
                continue
            other = self.chance.choice(others)
            action = self.chance.choice(actions)
            self.deeds.tried += 1
            try:
                await action(other)
            except PotluckError:
                continue
            self.deeds.succeeded += 1

    async def _call(self, other: PeerId) -> None:
        sent = Content(self.chance.randbytes(self.chance.randrange(10_000)))
        answer = await self.peer.rpc.call(other, ECHO, sent, timeout=CALL_SECONDS)
        assert answer == sent

    async def _break(self, other: PeerId) -> None:
        try:
            await self.peer.rpc.call(other, BREAK, Empty(), timeout=CALL_SECONDS)
        except HandlerFailed:
            return

    async def _upload(self, other: PeerId) -> None:
        await self.peer.upload(other, self.chance.randrange(MOST_CHUNKS))

    async def _download(self, other: PeerId) -> None:
        await self.peer.download(other, self.chance.randrange(MOST_CHUNKS))

    async def _give_up_a_call(self, other: PeerId) -> None:
        with trio.move_on_after(self.chance.uniform(0, 0.02)):
            await self.peer.rpc.call(other, LINGER, Duration(60), timeout=CALL_SECONDS)

    async def _give_up_an_upload(self, other: PeerId) -> None:
        with trio.move_on_after(self.chance.uniform(0, 0.05)):
            async with self.peer.rpc.open_bulk(
                other, SINK, Empty(), timeout=CALL_SECONDS
            ) as upload:
                while True:
                    await upload.send_chunk(chunk_of(upload.bytes_sent // CHUNK_BYTES))

    async def _hang_up(self, other: PeerId) -> None:
        if self.chance.random() < 0.2:
            await self.peer.network.disconnect(other)

    def obey(self, order: dict[str, Any], life: trio.CancelScope) -> None:
        if "know" in order:
            self.known = {PeerId(peer): tuple(where) for peer, where in order["know"].items()}
            for other, addresses in self.known.items():
                self.peer.network.learn_addresses(other, addresses)
        if "rest" in order:
            life.cancel()


async def _report(wanderer: Wanderer) -> None:
    while True:
        line = asdict(wanderer.deeds) | msgspec.structs.asdict(wanderer.peer.census())
        print(json.dumps(line), flush=True)
        await trio.sleep(REPORT_SECONDS)


async def _live_until_told_to_rest(wanderer: Wanderer, life: trio.CancelScope) -> None:
    with life:
        async with trio.open_nursery() as nursery:
            for _ in range(TASKS):
                nursery.start_soon(wanderer.live)
    for link in wanderer.peer.network.links():
        await wanderer.peer.network.disconnect(link.peer)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--chance", type=int, required=True, help="seed of its random deeds")
    parser.add_argument("--port", type=int, default=0)
    arguments = parser.parse_args()
    logging.basicConfig(level=os.environ.get("POTLUCK_TEST_LOG", "CRITICAL"))
    identity = Identity.from_seed(bytes.fromhex(os.environ[SEED_VARIABLE]))
    async with (
        open_test_peer(identity, port=arguments.port, yamux=YAMUX) as peer,
        trio.open_nursery() as nursery,
    ):
        wanderer = Wanderer(peer, random.Random(arguments.chance))
        addresses = peer.network.addresses()
        print(json.dumps({"peer": peer.network.peer_id, "addresses": addresses}), flush=True)
        life = trio.CancelScope()
        nursery.start_soon(_live_until_told_to_rest, wanderer, life)
        nursery.start_soon(_report, wanderer)
        standard_input = trio.lowlevel.FdStream(os.dup(0))
        held = bytearray()
        while more := await standard_input.receive_some():
            held += more
            *lines, rest = held.split(b"\n")
            held[:] = rest
            for line in lines:
                wanderer.obey(json.loads(line), life)
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main)
