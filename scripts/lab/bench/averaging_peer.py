"""A peer that averages, in a process of its own: `python -m lab.bench.averaging_peer [fork]`.

It has a key, a port, a token, a directory and an averager as every node of a run has, and holds one
vector. Before each round its values are set to `factor * base`, where the base is random, the same
for all, and in memory that all processes of the swarm share. So the average of any set of peers is
known, and a result is compared with that of its members. The orders are in `AveragingPeer`
(orders.py has their format).

A trio clock has another origin in each process, so moments are given by the machine's monotonic
clock, which is the same for all of them.
"""

from __future__ import annotations

import cProfile
import gc
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import blake3
import torch
import trio
from torch import Tensor

from lab.bench.admission import RUN, admitted
from lab.bench.holdings import descriptors, tasks_by_name
from lab.bench.orders import run_or_fork
from node.core.directory import FAMILIES
from node.core.status import memory_in_use
from node.net import Libp2pSettings, open_libp2p_network
from protocols.access import TokenGuard
from protocols.dht import DhtSettings, open_dht
from protocols.identity import Identity
from protocols.moshpit.averager import Averager, open_averager
from protocols.moshpit.layout import Vector
from protocols.moshpit.outcome import Alone, Committed, Discarded, LeftOut, Outcome, RoundStatistics
from protocols.moshpit.request import RoundRequest
from protocols.moshpit.settings import AveragerSettings
from protocols.network import Network
from protocols.rpc import open_rpc
from protocols.tensors import CODECS, CodecName, decode_into, encode_into

if TYPE_CHECKING:
    from trio_typing import TaskStatus

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
JOIN_SECONDS = 60.0
BASE_SEED = 0
CHECKED_AT_ONCE = 1 << 18  # values: they stay in the processor's cache while they are compared
FLOAT32_ERROR = 1e-6  # relative, of a sum of a few values
RECENT_FAILURES = 4  # of a round, that are told: the first ones say why


class AveragingPeer:
    """The orders of this process: each public coroutine is one."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._base = torch.empty(0)
        self._vector: Vector | None = None
        self._factor = 0.0
        self._tolerated = 0.0
        self._result: Tensor | None = None
        self._profile: cProfile.Profile | None = None
        self._offset = time.perf_counter() - trio.current_time()  # of the two clocks

    async def join(self, auth_seed: str, addresses: list[str]) -> dict[str, Any]:
        """Start a node with a token that joins through these. Returns its id and addresses."""
        with trio.fail_after(JOIN_SECONDS):
            self._network, self._averager = await self._nursery.start(
                self._run_node, bytes.fromhex(auth_seed), tuple(addresses)
            )
        return {"peer": self._network.peer_id, "address": self._network.addresses()[0]}

    async def hold(
        self, base_file: str, values: int, codec: CodecName, factor: float, *, make: bool = False
    ) -> None:
        """Hold so many values, `factor` times the base; the first peer makes the base."""
        self._base = torch.from_file(base_file, shared=True, size=values, dtype=torch.float32)
        if make:
            torch.randn(values, generator=torch.Generator().manual_seed(BASE_SEED), out=self._base)
        self._factor = factor
        self._vector = Vector.of({"values": self._base}, codec)
        self._tolerated = tolerated_error(self._base[:CHECKED_AT_ONCE], codec)
        await self.arm()

    async def arm(self) -> dict[str, Any]:
        """Set the values again, as they were before any round; CPU seconds used so far."""
        assert self._vector is not None
        self._result = None
        torch.mul(self._base, self._factor, out=self._vector.values)
        return await self.cpu()

    async def cpu(self) -> dict[str, Any]:
        """User and system seconds of all threads of this process so far."""
        return {"seconds": time.process_time()}

    async def average(self, epoch: int, expected: int, factors: dict[str, float]) -> dict[str, Any]:
        """One round. Returns when it began and ended here, how it ended, and its error."""
        assert self._vector is not None
        if self._profile is not None:
            self._profile.enable()
        began = time.perf_counter()
        outcome = await self._averager.average(
            RoundRequest(self._vector, weight=1.0, epoch=epoch, expected=expected)
        )
        ended = time.perf_counter()
        if self._profile is not None:
            self._profile.disable()
        phases = _phases_of(outcome.rounds[-1], self._offset) if outcome.rounds else {}
        told = {"began": began, "ended": ended, **_told(outcome), "phases": phases}
        if isinstance(outcome, Committed):
            self._result = outcome.result
            told |= self._check(outcome, factors)
        return told

    async def digest(self) -> dict[str, Any]:
        """A digest of every bit of the last result that is still there."""
        if self._result is None:
            return {"digest": None}
        digest = blake3.blake3(self._result.numpy().data.cast("B")).hexdigest()
        return {"digest": digest}

    async def totals(self) -> dict[str, Any]:
        """The resources that this process holds now."""
        gc.collect()
        return {
            "memory_bytes": memory_in_use() or 0,
            "tasks": trio.lowlevel.current_statistics().tasks_living,
            "tasks_by_name": tasks_by_name(),
            "descriptors": descriptors(),
            "links": len(self._network.links()),
        }

    async def profile(self, file: str = "") -> None:
        """From now on profile the rounds; with a file, write down what was found."""
        if file:
            assert self._profile is not None
            self._profile.dump_stats(file)
            self._profile = None
        else:
            self._profile = cProfile.Profile()

    def _check(self, outcome: Committed, factors: Mapping[str, float]) -> dict[str, Any]:
        began = time.thread_time()
        counted = [factors[member] for member in outcome.members]
        error = relative_error(outcome.result, self._base, sum(counted) / len(counted))
        return {
            "relative_error": error,
            "tolerated_error": self._tolerated,
            "check_cpu_seconds": time.thread_time() - began,
        }

    async def _run_node(
        self,
        auth_seed: bytes,
        addresses: tuple[str, ...],
        task_status: TaskStatus[tuple[Network, Averager]] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        settings = AveragerSettings(run=RUN)
        async with open_averaging_node(LOOPBACK, auth_seed, addresses, settings) as node:
            task_status.started(node)
            await trio.sleep_forever()


@asynccontextmanager
async def open_averaging_node(
    listen: str, auth_seed: bytes, addresses: Sequence[str], settings: AveragerSettings
) -> AsyncIterator[tuple[Network, Averager]]:
    """A node with a token, that has joined through these addresses."""
    identity = Identity.generate()
    async with (
        open_libp2p_network(identity, Libp2pSettings(listen_addresses=(listen,))) as network,
        open_rpc(network, TokenGuard(admitted(identity, auth_seed), network.random)) as rpc,
        open_dht(
            network, rpc, families=FAMILIES, settings=DhtSettings(bootstrap=tuple(addresses))
        ) as dht,
        open_averager(network, rpc, dht, settings) as averager,
    ):
        await dht.joined()
        yield network, averager


def tolerated_error(values: Tensor, codec: CodecName) -> float:
    """The largest relative error of an average of such values. The codec rounds twice, at the
    senders and at the reducer; the additions round in float32."""
    chosen = CODECS[codec]
    encoded = bytearray(chosen.encoded_bytes(len(values)))
    encode_into(values, codec, encoded, name="values")
    arrived = torch.empty_like(values)
    decode_into(arrived, codec, encoded, "float32")
    return FLOAT32_ERROR + 2.0 * relative_error(arrived, values, 1.0)


def relative_error(result: Tensor, base: Tensor, factor: float) -> float:
    """|result - factor * base| / |factor * base|, both by their root mean squares."""
    wrong = right = 0.0
    for start in range(0, len(base), CHECKED_AT_ONCE):
        expected = base[start : start + CHECKED_AT_ONCE] * factor
        right += float(expected.square().sum())
        wrong += float((result[start : start + CHECKED_AT_ONCE] - expected).square_().sum())
    return float((wrong / right) ** 0.5)


def _told(outcome: Outcome) -> dict[str, Any]:
    """How a round ended, as JSON."""
    match outcome:
        case Committed():
            return {
                "verdict": "committed",
                "members": list(outcome.members),
                "agreed_digest": outcome.digest.hex(),
            }
        case LeftOut():
            return {
                "verdict": "left out",
                "members": list(outcome.members),
                "agreed_digest": outcome.digest.hex(),
            }
        case Discarded():
            return {
                "verdict": "in doubt" if outcome.in_doubt else "discarded",
                "reason": outcome.reason,
            }
        case Alone():
            return {"verdict": "alone"}


def _phases_of(last: RoundStatistics, offset: float) -> dict[str, Any]:
    return {
        "leader": last.leader,
        "exchange_began": _moment(last.exchange_began, offset),
        "exchange_ended": _moment(last.exchange_ended, offset),
        "matchmaking_seconds": last.matchmaking_seconds,
        "exchange_seconds": last.exchange_seconds,
        "agreement_seconds": last.agreement_seconds,
        "attempts": last.attempts,
        "bytes_sent": last.bytes_sent,
        "excluded": {one.peer: one.reason for one in last.excluded},
        "failures": [
            f"{one.peer}: {one.code}: {one.text}" for one in last.failures[:RECENT_FAILURES]
        ],
        "reason": last.reason,
    }


def _moment(trio_time: float | None, offset: float) -> float | None:
    return None if trio_time is None else trio_time + offset


if __name__ == "__main__":
    run_or_fork(AveragingPeer)
