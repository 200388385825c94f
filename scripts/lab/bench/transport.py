"""`scripts/bench transport`: the speed of the path from our rpc to a peer's rpc, on this machine.

Each measurement starts the processes that it needs, lets them warm up (one checked transfer, a few
calls), measures, and ends them, so no figure is affected by an earlier one. Figures are medians
over the repeats.

The processes share the machine's cores with all other programs. Compare only figures that were
taken in the same minutes, and look at the spread.

`FIGURES` has the names of the figures and their meanings. A figure's bar is the project's own goal
on loopback between two processes; bars that are ratios to another implementation are in
scripts/bench-against-hivemind.

`--auth` measures the cost of the guard, by which every message proves its sender. Two pairs of
processes run side by side, one of an open run and one with tokens, and take turns of a second or
so. So both see the same machine, whatever else it does, and the cost of the guard is the extra time
of a guarded turn over the open turn before it.

The difference of two medians over a whole run is smaller than the scatter of a busy machine. So it
is taken turn by turn, and the median of those is the figure.
"""

from __future__ import annotations

import argparse
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from auth.keys import SEED_BYTES
from lab import Talk
from lab.bench.command import report
from lab.bench.machine import machine_facts
from lab.bench.pouring import CHUNK_BYTES
from lab.bench.processes import BenchFailed, BenchProcess, introduce, open_peer, open_process
from node.core.wrong_use import WrongUse

if TYPE_CHECKING:
    from node.app.cli.parser import Subparsers


@dataclass(frozen=True)
class Figure:
    name: str
    what: str
    digits: int = 2


FIGURES: tuple[Figure, ...] = (
    Figure("unary_ms_p50", "one call after another, 20 bytes each way: median round trip", 3),
    Figure("unary_per_s_16", "calls per second with 16 in flight", 0),
    Figure("stream_MiB_s", "one bulk transfer one way, 1 MiB chunks", 0),
    Figure("cpu_s_per_GB", "CPU seconds per GB of that, both ends together", 2),
    Figure("both_ways_MiB_s", "both directions at once, the sum", 0),
    Figure("four_nodes_all_to_all_MiB_s", "four processes, each to all others at once, the sum", 0),
    Figure("plain_socket_MiB_s", "a plain TCP socket one way: this machine's limit", 0),
    Figure("slow_reader_rss_growth_MiB", "growth of memory while a reader has stopped reading", 1),
    Figure(
        "stream_fill_at_100ms_100mbit",
        "share of a 100 Mbit/s, 100 ms link that one transfer fills",
        3,
    ),
    Figure("join_s", "from a new node's start to its first answered call", 3),
    Figure("import_s", "a fresh interpreter imports a node", 3),
)

NAMES = tuple(figure.name for figure in FIGURES)

AUTH_FIGURES: tuple[Figure, ...] = (
    Figure("unary_ms_p50", "one call after another, each signed and verified both ways", 3),
    Figure("unary_per_s_16", "such calls per second with 16 in flight", 0),
    Figure("auth_overhead_ms", "what tokens and signatures add to a call", 3),
    Figure("auth_overhead_ms_per_transfer", "what they add to a whole transfer of one chunk", 3),
    Figure("stream_MiB_s", "one bulk transfer one way, its opening and closing signed", 0),
    Figure("open_unary_ms_p50", "the first figure in an open run, in turn with it", 3),
    Figure("open_unary_per_s_16", "the second figure in an open run", 0),
    Figure("open_stream_MiB_s", "the transfer in an open run", 0),
)

AUTH_NAMES = tuple(figure.name for figure in AUTH_FIGURES)


class FigureSamples:
    """The values of each figure, in the order they were measured."""

    def __init__(self, figures: Sequence[Figure] = FIGURES) -> None:
        self._figures = figures
        self._values: dict[str, list[float]] = {}

    def add(self, name: str, value: float) -> None:
        self._values.setdefault(name, []).append(value)

    def medians(self) -> dict[str, float]:
        """In the order of the figures, rounded to what a repeat can bear."""
        return {
            figure.name: _rounded(statistics.median(self._values[figure.name]), figure)
            for figure in self._figures
            if figure.name in self._values
        }

    def spread(self) -> dict[str, dict[str, Any]]:
        return {
            figure.name: _spread(self._values[figure.name], figure)
            for figure in self._figures
            if figure.name in self._values
        }


def _spread(values: Sequence[float], figure: Figure) -> dict[str, Any]:
    return {
        "min": _rounded(min(values), figure),
        "max": _rounded(max(values), figure),
        "runs": [_rounded(value, figure) for value in values],
    }


def _rounded(value: float, figure: Figure) -> float:
    return round(value, figure.digits) if figure.digits else float(round(value))


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
    effort: AuthEffort, only: Iterable[str], say: Talk = lambda _line: None
) -> dict[str, Any]:
    """The figures with tokens, and beside each what the same was in an open run."""
    wanted = set(only)
    machine, began = machine_facts(), time.monotonic()
    samples = FigureSamples(AUTH_FIGURES)
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


async def _take_turns(plain: _Pair, guarded: _Pair, samples: FigureSamples) -> None:
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


MIB = 1 << 20
CALLERS = 16
FAR_ONE_WAY_MS = 50.0
FAR_MBIT = 100.0
SLOW_READER_CHUNKS = 256
WARM_UP_CHUNKS = 32
WARM_UP_SECONDS = 0.3
NODES_ALL_TO_ALL = 4
IMPORT_OF_A_NODE = "import node.core.node, node.net.network, protocols.rpc.rpc, protocols.rpc.ping"


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


@dataclass
class Bench:
    """One run: how much effort, whom to tell, and what was found."""

    effort: Effort
    say: Talk
    samples: FigureSamples
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
    bench = Bench(effort, say, FigureSamples(), {})
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
        words = ["-m", "lab.bench.link_proxy", "--target", f"127.0.0.1:{port}"]
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
                words = ["-m", "lab.bench.fresh_node", home, peer, address]
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
    """All transferred bytes, divided by the time from the first start to the last end."""
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


# Flags and output


def add_parser(kinds: Subparsers) -> None:
    from node.app.cli.parser import positive_count

    width = max(len(name) for name in (*NAMES, *AUTH_NAMES))
    figures = "\n".join(f"  {figure.name:{width}}  {figure.what}" for figure in FIGURES)
    with_auth = "\n".join(f"  {figure.name:{width}}  {figure.what}" for figure in AUTH_FIGURES)
    parser = kinds.add_parser(
        "transport",
        help="calls and transfers between processes on this machine",
        description="Start nodes in processes of their own on this machine and measure "
        f"calls and transfers between them, over the whole path of a real node.\n\n{figures}\n\n"
        f"With --auth, each message is signed and verified as in a run with an auth server:\n\n"
        f"{with_auth}\n\n"
        "Figures are medians. --json has their spread, and the machine.",
        example="scripts/bench transport --quick\n"
        "scripts/bench transport --auth --json\n"
        "scripts/bench transport --json --only stream_MiB_s --only cpu_s_per_GB",
    )
    parser.set_defaults(measure=run)
    parser.add_argument(
        "--only",
        action="append",
        choices=tuple(dict.fromkeys((*NAMES, *AUTH_NAMES))),
        metavar="FIGURE",
        help="measure this figure only; may be given several times",
    )
    parser.add_argument(
        "--auth", action="store_true", help="measure with tokens, in turn with an open run"
    )
    parser.add_argument(
        "--repeat",
        type=positive_count,
        metavar="N",
        help="how many repetitions (3, or 1 with --quick)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="measure less: half a minute, rough figures"
    )


def run(arguments: argparse.Namespace) -> int:
    figures = AUTH_FIGURES if arguments.auth else FIGURES
    names = tuple(figure.name for figure in figures)
    only = tuple(arguments.only or names)
    for name in only:
        if name not in names:
            raise WrongUse(
                f"{name} is not measured {'with' if arguments.auth else 'without'} --auth.",
                advice=f"Take one of {', '.join(names)}.",
            )

    async def measure(say: Talk) -> dict[str, Any]:
        measure_now = _measure_auth if arguments.auth else _measure_plain
        return await measure_now(arguments, only, lambda line: say(f"measuring {line}"))

    return report(arguments, measure, partial(_table, figures=figures))


async def _measure_plain(
    arguments: argparse.Namespace, only: tuple[str, ...], say: Talk
) -> dict[str, Any]:
    repeats = arguments.repeat
    effort = Effort.quick(repeats or 1) if arguments.quick else Effort(repeats or Effort.repeats)
    return await measure_transport(effort, only, say)


async def _measure_auth(
    arguments: argparse.Namespace, only: tuple[str, ...], say: Talk
) -> dict[str, Any]:
    repeats = arguments.repeat
    quick = AuthEffort.quick(repeats or 1)
    effort = quick if arguments.quick else AuthEffort(repeats or AuthEffort.repeats)
    return await measure_auth(effort, only, say)


def _table(result: dict[str, Any], figures: tuple[Figure, ...]) -> str:
    rows: list[tuple[str, ...]] = [("figure", "median", "least", "most", "")]
    for figure in figures:
        if figure.name in result:
            spread = result["spread"][figure.name]
            values = (result[figure.name], spread["min"], spread["max"])
            rows.append(
                (figure.name, *(f"{value:,.{figure.digits}f}" for value in values), figure.what)
            )
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [
        f"{row[0]:{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}  "
        f"{row[3]:>{widths[3]}}  {row[4]}".rstrip()
        for row in rows
    ]
    machine = result["machine"]
    lines.append("")
    lines.append(
        f"{machine['processor']}, {machine['cores_usable']} cores, {machine['memory_GiB']} GiB, "
        f"Python {machine['python']}, {result['seconds']} s"
    )
    return "\n".join(lines)
