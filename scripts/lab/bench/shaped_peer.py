"""A peer on a link of its own: `python -m lab.bench.shaped_peer fork` makes them (orders.py).

It leaves the machine's network for an empty one, gets a cable into the lab's bridge, and then is a
node of a run with tokens, as in every bench. It holds `factor * base` and declares any speeds that
it is ordered to. One process, the hub, has only the bridge, and the far ends of all cables.

Only the network should be measured. So values are made before the round, results are checked after
it, and the garbage collector is off meanwhile.
"""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING, Any

import torch
import trio

from lab.bench.averaging_peer import open_averaging_node
from lab.bench.orders import run_or_fork
from lab.bench.own_network import InOwnNetwork, resent_segments
from protocols.moshpit.averager import Averager
from protocols.moshpit.layout import Vector
from protocols.moshpit.outcome import Committed
from protocols.moshpit.request import RoundRequest
from protocols.moshpit.settings import AveragerSettings
from protocols.network import Network

if TYPE_CHECKING:
    from trio_typing import TaskStatus

RUN = "shaped"
PORT = 4001  # in a network of one's own no port is taken
POUR_PORT = 4002
POUR_BYTES = 1 << 16
JOIN_SECONDS = 120.0
MATCHMAKING_SECONDS = 60.0
CHUNK_BYTES = 16 << 10  # parts are short here: results must come back while gradients still go out
BASE_SEED = 0


class ShapedPeer(InOwnNetwork):
    """The orders of this process: each public coroutine is one."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._factor = 0.0
        self._vector: Vector | None = None
        self._offset = time.perf_counter() - trio.current_time()  # of the two clocks

    async def listen_for_pouring(self) -> None:
        """Take whatever comes by plain TCP, from now on."""
        listeners = await trio.open_tcp_listeners(POUR_PORT, host="0.0.0.0")
        self._nursery.start_soon(trio.serve_listeners, _drain, listeners)

    async def pour(self, host: str, seconds: float) -> dict[str, Any]:
        """Send by plain TCP for so long: payload bytes per second, until all has arrived."""
        block, sent = bytes(POUR_BYTES), 0
        stream = await trio.open_tcp_stream(host, POUR_PORT)
        async with stream:
            began = time.perf_counter()
            while time.perf_counter() - began < seconds:
                await stream.send_all(block)
                sent += len(block)
            await stream.send_eof()
            await stream.receive_some(1)  # the other end closes when it has read all
            return {"bytes_per_second": sent / (time.perf_counter() - began)}

    async def join(
        self,
        auth_seed: str,
        host: str,
        addresses: list[str],
        up: float,
        down: float,
        round_seconds: float,
    ) -> dict[str, Any]:
        """Start a node that declares these speeds. Returns its id and addresses."""
        settings = AveragerSettings(
            run=RUN,
            matchmaking_seconds=MATCHMAKING_SECONDS,
            round_seconds=round_seconds,
            up_bytes_per_second=up,
            down_bytes_per_second=down,
            chunk_bytes=CHUNK_BYTES,
        )
        with trio.fail_after(JOIN_SECONDS):
            self._network, self._averager = await self._nursery.start(
                self._run_node, bytes.fromhex(auth_seed), host, tuple(addresses), settings
            )
        return {"peer": self._network.peer_id, "address": self._network.addresses()[0]}

    async def hold(self, values: int, factor: float) -> None:
        """Hold so many values: random ones that all peers have, times this factor."""
        base = torch.randn(values, generator=torch.Generator().manual_seed(BASE_SEED))
        self._base, self._factor = base, factor
        self._vector = Vector.of({"values": base.clone()}, "none")
        gc.collect()
        gc.freeze()

    async def average(
        self, epoch: int, expected: int, weight: float, mean_factor: float
    ) -> dict[str, Any]:
        """One round: how it ended, when its phases were, and how wrong its result is."""
        assert self._vector is not None
        torch.mul(self._base, self._factor, out=self._vector.values)
        cpu_began, resent_before = time.process_time(), resent_segments()
        began = time.perf_counter()
        outcome = await self._averager.average(
            RoundRequest(self._vector, weight=weight, epoch=epoch, expected=expected)
        )
        last = outcome.rounds[-1]
        told: dict[str, Any] = {
            "began": began,
            "ended": time.perf_counter(),
            "verdict": str(last.verdict.value),
            "attempts": last.attempts,
            "failures": [f"{one.peer}: {one.code}: {one.text}" for one in last.failures],
            "reason": last.reason,
            "cpu_seconds": time.process_time() - cpu_began,
            "resent_segments": resent_segments() - resent_before,
        }
        if isinstance(outcome, Committed):
            wrong = (outcome.result - self._base * mean_factor).abs().max()
            assert last.exchange_began is not None
            assert last.exchange_ended is not None
            told |= {
                "members": len(outcome.members),
                "digest": outcome.digest.hex(),
                "relative_error": float(wrong / (self._base * mean_factor).abs().max()),
                "exchange_began": last.exchange_began + self._offset,
                "exchange_ended": last.exchange_ended + self._offset,
            }
        return told

    async def _run_node(
        self,
        auth_seed: bytes,
        host: str,
        addresses: tuple[str, ...],
        settings: AveragerSettings,
        task_status: TaskStatus[tuple[Network, Averager]] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        listen = f"/ip4/{host}/tcp/{PORT}"
        async with open_averaging_node(listen, auth_seed, addresses, settings) as node:
            task_status.started(node)
            await trio.sleep_forever()


async def _drain(stream: trio.SocketStream) -> None:
    async with stream:
        while await stream.receive_some(POUR_BYTES):
            pass


if __name__ == "__main__":
    run_or_fork(ShapedPeer)
