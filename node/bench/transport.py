"""`potluck bench transport`: what the path from our rpc to a peer's rpc carries, on this machine.

Each measurement starts the processes that it needs, lets them warm up (one checked transfer, a
few calls), measures, and ends them; so no figure carries what another one left behind. Figures
are medians over the repeats.

Easy to get wrong: the processes share the machine's cores with whatever else runs. Compare only
figures that were taken in the same minutes, and look at the spread.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import trio

from node.bench.figures import NAMES, Samples
from node.bench.machine import machine_facts
from node.bench.pouring import CHUNK_BYTES
from node.bench.processes import BenchFailed, BenchProcess, introduce, open_peer, open_process

MIB = 1 << 20
CALLERS = 16
FAR_ONE_WAY_MS = 50.0
FAR_MBIT = 100.0
SLOW_READER_CHUNKS = 256
WARM_UP_CHUNKS = 32
WARM_UP_SECONDS = 0.3
NODES_ALL_TO_ALL = 4
IMPORT_OF_A_NODE = "import node.node, node.libp2p_network, protocols.rpc, protocols.ping"


@dataclass(frozen=True)
class Effort:
    """How much is measured in each repeat; enough that starting up does not show."""

    repeats: int = 3
    call_seconds: float = 3.0
    stream_chunks: int = 512
    all_to_all_chunks: int = 64
    far_chunks: int = 120  # ten seconds of a 100 Mbit/s link
    starts: int = 5  # join and import: cheap, and they scatter

    @staticmethod
    def quick(repeats: int = 1) -> Effort:
        """Enough to see that it works and roughly where it stands."""
        return Effort(repeats, 0.5, 128, 16, 60, 2)


Talk = Callable[[str], None]


@dataclass
class Bench:
    """One run: how much effort, whom to tell, and what was found."""

    effort: Effort
    say: Talk
    samples: Samples
    details: dict[str, list[Any]]

    def add(self, name: str, value: float) -> None:
        self.samples.add(name, value)

    def note(self, name: str, detail: Any) -> None:
        self.details.setdefault(name, []).append(detail)


async def measure_transport(
    effort: Effort, only: Iterable[str] = NAMES, say: Talk = lambda _line: None
) -> dict[str, Any]:
    """The figures that are wanted, their spread, and what they were measured on."""
    wanted = set(only)
    bench = Bench(effort, say, Samples(), {})
    before = machine_facts()
    began = time.monotonic()
    for _ in range(effort.repeats):
        for names, measure in MEASUREMENTS:
            if wanted & set(names):
                say(", ".join(name for name in names if name in wanted))
                await measure(bench)
    medians = bench.samples.medians()
    return {
        **{name: medians[name] for name in medians if name in wanted},
        "spread": {k: v for k, v in bench.samples.spread().items() if k in wanted},
        "details": bench.details,
        "settings": {**vars(effort), "chunk_bytes": CHUNK_BYTES},
        "machine": before,
        "seconds": round(time.monotonic() - began, 1),
    }


@asynccontextmanager
async def _warm_pair() -> AsyncIterator[tuple[BenchProcess, BenchProcess, str]]:
    """Two connected peers that have called each other and moved some checked bytes."""
    async with open_peer("the sending peer") as sender, open_peer("the receiving peer") as receiver:
        peer = await introduce(sender, receiver)
        await sender.ask("unary", peer=peer, seconds=WARM_UP_SECONDS)
        await sender.ask("pour", peers=[peer], chunks=WARM_UP_CHUNKS, check=True)
        yield sender, receiver, peer


async def _measure_calls(bench: Bench) -> None:
    seconds = bench.effort.call_seconds
    async with _warm_pair() as (caller, _, peer):
        one = await caller.ask("unary", peer=peer, seconds=seconds)
        bench.add("unary_ms_p50", one["ms_p50"])
        many = await caller.ask("in_flight", peer=peer, seconds=seconds, callers=CALLERS)
        bench.add("unary_per_s_16", many["per_s"])


async def _measure_stream(bench: Bench) -> None:
    async with _warm_pair() as (sender, receiver, peer):
        before = await _cpu_seconds(sender, receiver)
        poured = await sender.ask("pour", peers=[peer], chunks=bench.effort.stream_chunks)
        spent = await _cpu_seconds(sender, receiver) - before
    bench.add("stream_MiB_s", _mib_per_second([poured]))
    bench.add("cpu_s_per_GB", spent / (poured["bytes"] / 1e9))


async def _cpu_seconds(*processes: BenchProcess) -> float:
    return sum([float((await process.ask("cpu"))["seconds"]) for process in processes])


async def _measure_both_ways(bench: Bench) -> None:
    async with _warm_pair() as (one, other, peer):
        back = await introduce(other, one)
        chunks = bench.effort.stream_chunks // 2
        poured = await _all_at_once(
            partial(one.ask, "pour", peers=[peer], chunks=chunks),
            partial(other.ask, "pour", peers=[back], chunks=chunks),
        )
    bench.add("both_ways_MiB_s", _mib_per_second(poured))


async def _measure_all_to_all(bench: Bench) -> None:
    async with AsyncExitStack() as stack:
        names = [f"peer {number + 1}" for number in range(NODES_ALL_TO_ALL)]
        peers = [await stack.enter_async_context(open_peer(name)) for name in names]
        targets: list[list[str]] = []
        for peer in peers:
            others = [other for other in peers if other is not peer]
            targets.append([await introduce(peer, other) for other in others])
        for peer, others_of_it in zip(peers, targets, strict=True):
            await peer.ask("pour", peers=others_of_it, chunks=4, check=True)
        chunks = bench.effort.all_to_all_chunks
        poured = await _all_at_once(
            *(
                partial(peer.ask, "pour", peers=others_of_it, chunks=chunks)
                for peer, others_of_it in zip(peers, targets, strict=True)
            )
        )
    bench.add("four_nodes_all_to_all_MiB_s", _mib_per_second(poured))


async def _measure_plain_socket(bench: Bench) -> None:
    async with open_peer("the sending process") as sender, open_peer("the receiving") as receiver:
        port = receiver.introduction["plain_port"]
        for chunks in (WARM_UP_CHUNKS, bench.effort.stream_chunks):
            received, sent = await _all_at_once(
                partial(receiver.ask, "plain_receive"),
                partial(sender.ask, "plain_send", port=port, chunks=chunks),
            )
            port = received["plain_port"]
        moved = {"began": sent["began"], "ended": received["ended"], "bytes": received["bytes"]}
    bench.add("plain_socket_MiB_s", _mib_per_second([moved]))


async def _measure_slow_reader(bench: Bench) -> None:
    async with open_peer("the sending peer") as sender, open_peer("the stopping peer") as reader:
        peer = await introduce(sender, reader)
        await sender.ask("pour", peers=[peer], chunks=1)
        for process in (sender, reader):
            await process.ask("watch_memory")
        stuck = await sender.ask("pour_until_stuck", peer=peer, chunks=SLOW_READER_CHUNKS)
        if stuck["chunks"] == SLOW_READER_CHUNKS:
            raise BenchFailed("A reader that had stopped was sent everything all the same.")
        grown = [(await process.ask("memory_growth"))["bytes"] for process in (sender, reader)]
    bench.add("slow_reader_rss_growth_MiB", max(grown) / MIB)
    bench.note(
        "slow_reader",
        {
            "sender_growth_MiB": round(grown[0] / MIB, 1),
            "reader_growth_MiB": round(grown[1] / MIB, 1),
            "chunks_sent_before_it_stuck": stuck["chunks"],
        },
    )


async def _measure_far_stream(bench: Bench) -> None:
    async with open_peer("the sending peer") as sender, open_peer("the far peer") as receiver:
        port = receiver.introduction["addresses"][0].split("/tcp/")[1].split("/")[0]
        words = ["-m", "node.bench.link_proxy", "--target", f"127.0.0.1:{port}"]
        words += ["--delay-ms", str(FAR_ONE_WAY_MS), "--mbit", str(FAR_MBIT)]
        async with open_process("the link proxy", words) as proxy:
            peer = await introduce(sender, receiver, port=proxy.introduction["port"])
            poured = await sender.ask("pour", peers=[peer], chunks=bench.effort.far_chunks)
    seconds = poured["ended"] - poured["began"]
    bench.add("stream_fill_at_100ms_100mbit", poured["bytes"] * 8 / (FAR_MBIT * 1e6) / seconds)


async def _measure_join(bench: Bench) -> None:
    async with open_peer("the peer that is there") as there:
        peer, address = there.introduction["peer"], there.introduction["addresses"][0]
        for _ in range(bench.effort.starts):
            with tempfile.TemporaryDirectory(prefix="potluck-bench-") as home:
                words = ["-m", "node.bench.joining", home, peer, address]
                async with open_process("the joining node", words) as joined:
                    bench.add("join_s", joined.introduction["seconds"])


async def _measure_import(bench: Bench) -> None:
    for _ in range(bench.effort.starts):
        began = time.perf_counter()
        await trio.run_process([sys.executable, "-c", IMPORT_OF_A_NODE], stdin=subprocess.DEVNULL)
        bench.add("import_s", time.perf_counter() - began)


async def _all_at_once(*asks: Callable[[], Awaitable[dict[str, Any]]]) -> list[dict[str, Any]]:
    answers: list[dict[str, Any]] = [{} for _ in asks]

    async def keep(index: int, ask: Callable[[], Awaitable[dict[str, Any]]]) -> None:
        answers[index] = await ask()

    async with trio.open_nursery() as nursery:
        for index, ask in enumerate(asks):
            nursery.start_soon(keep, index, ask)
    return answers


def _mib_per_second(poured: list[dict[str, Any]]) -> float:
    """All that was moved, by the time from the first begin to the last end."""
    seconds = max(one["ended"] for one in poured) - min(one["began"] for one in poured)
    return float(sum(one["bytes"] for one in poured) / MIB / seconds)


MEASUREMENTS: tuple[tuple[tuple[str, ...], Callable[[Bench], Awaitable[None]]], ...] = (
    (("unary_ms_p50", "unary_per_s_16"), _measure_calls),
    (("stream_MiB_s", "cpu_s_per_GB"), _measure_stream),
    (("both_ways_MiB_s",), _measure_both_ways),
    (("four_nodes_all_to_all_MiB_s",), _measure_all_to_all),
    (("plain_socket_MiB_s",), _measure_plain_socket),
    (("slow_reader_rss_growth_MiB",), _measure_slow_reader),
    (("stream_fill_at_100ms_100mbit",), _measure_far_stream),
    (("join_s",), _measure_join),
    (("import_s",), _measure_import),
)
