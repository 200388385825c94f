"""`potluck bench transport --auth`: what it costs that every message proves who sent it.

Two pairs of processes stand side by side, one of an open run and one with tokens, and take turns
of a second or so. So both see the same machine, whatever else it does, and what one turn of the
guarded pair takes more than the open one's before it is what the guard costs.

Easy to get wrong: the difference of two medians over a whole run is smaller than the scatter of a
busy machine. It is taken turn by turn, and the median of those is the figure.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from auth.keys import SEED_BYTES
from node.bench.figures import AUTH_FIGURES, Samples
from node.bench.machine import machine_facts
from node.bench.processes import BenchProcess, introduce, open_peer

WARM_UP_SECONDS = 0.3
CALLERS = 16
MIB = 1 << 20


@dataclass(frozen=True)
class AuthEffort:
    """How many turns of each pair there are in each repeat, and what is done in one."""

    repeats: int = 3
    turns: int = 6
    turn_seconds: float = 0.5  # of calls one at a time, and again of many at once
    small_transfers: int = 100  # of one chunk each
    stream_chunks: int = 256

    @staticmethod
    def quick(repeats: int = 1) -> AuthEffort:
        return AuthEffort(repeats, 2, 0.25, 20, 64)


@dataclass(frozen=True)
class _Pair:
    """One peer that asks, and whom."""

    asking: BenchProcess
    peer: str
    effort: AuthEffort

    async def one_at_a_time(self) -> float:
        seconds = self.effort.turn_seconds
        answer = await self.asking.ask("unary", peer=self.peer, seconds=seconds)
        return float(answer["ms_p50"])

    async def many_at_once(self) -> float:
        answer = await self.asking.ask(
            "in_flight", peer=self.peer, seconds=self.effort.turn_seconds, callers=CALLERS
        )
        return float(answer["per_s"])

    async def small_transfers(self) -> float:
        """Milliseconds for a whole transfer of one chunk."""
        answer = await self.asking.ask(
            "pour_small", peer=self.peer, transfers=self.effort.small_transfers
        )
        return float(answer["ms_p50"])

    async def stream(self) -> float:
        poured = await self.asking.ask("pour", peers=[self.peer], chunks=self.effort.stream_chunks)
        return float(poured["bytes"] / MIB / (poured["ended"] - poured["began"]))


async def measure_auth(
    effort: AuthEffort, only: Iterable[str], say: Callable[[str], None] = lambda _line: None
) -> dict[str, Any]:
    """The figures with tokens, and beside each what the same was in an open run."""
    wanted = set(only)
    machine, began = machine_facts(), time.monotonic()
    samples = Samples(AUTH_FIGURES)
    for repeat in range(effort.repeats):
        say(f"open and guarded pairs in turn, {repeat + 1} of {effort.repeats}")
        async with (
            _pair(effort, b"") as plain,
            _pair(effort, secrets.token_bytes(SEED_BYTES)) as guarded,
        ):
            for _ in range(effort.turns):
                await _take_turns(plain, guarded, samples)
    medians = samples.medians()
    return {
        **{name: medians[name] for name in medians if name in wanted},
        "spread": {name: spread for name, spread in samples.spread().items() if name in wanted},
        "settings": {**vars(effort), "callers": CALLERS},
        "machine": machine,
        "seconds": round(time.monotonic() - began, 1),
    }


async def _take_turns(plain: _Pair, guarded: _Pair, samples: Samples) -> None:
    open_ms, guarded_ms = await plain.one_at_a_time(), await guarded.one_at_a_time()
    samples.add("unary_ms_p50", guarded_ms)
    samples.add("open_unary_ms_p50", open_ms)
    samples.add("auth_overhead_ms", guarded_ms - open_ms)
    samples.add("open_unary_per_s_16", await plain.many_at_once())
    samples.add("unary_per_s_16", await guarded.many_at_once())
    open_ms, guarded_ms = await plain.small_transfers(), await guarded.small_transfers()
    samples.add("auth_overhead_ms_per_transfer", guarded_ms - open_ms)
    samples.add("open_stream_MiB_s", await plain.stream())
    samples.add("stream_MiB_s", await guarded.stream())


@asynccontextmanager
async def _pair(effort: AuthEffort, auth_seed: bytes) -> AsyncIterator[_Pair]:
    """Two connected peers that have warmed up; with tokens if there is a seed to sign them."""
    async with (
        open_peer("the asking peer", auth_seed) as asking,
        open_peer("the answering peer", auth_seed) as answering,
    ):
        peer = await introduce(asking, answering)
        await asking.ask("unary", peer=peer, seconds=WARM_UP_SECONDS)
        await asking.ask("pour", peers=[peer], chunks=8, check=True)
        yield _Pair(asking, peer, effort)
