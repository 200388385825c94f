"""`potluck bench shaped`: rounds over links of limited rate, beside what the plan says of them.

One of the paper's setups is built of network namespaces (shaped_links.py), each peer a process
with a node that averages for real, with tokens and encrypted channels. It is measured with the
plan's shares, with equal shares, and with the best single reducer; each time in a lab of its own.

A plan counts the vector's bytes. On the wire there are also headers, acknowledgements and frames,
so before a lab averages, two of its peers send each other plain TCP both ways at once, and the
payload's part of the rate is what the prediction takes the links to carry ("efficiency"). What
potluck adds to TCP (its frames, signatures and agreement) is not taken out: it has to fit into
what the measurement may differ.

Easy to get wrong: the first round of a lab opens connections and fills caches. It is not counted.
"""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import trio

from auth.keys import SEED_BYTES
from node.bench.forked_processes import open_forge
from node.bench.machine import machine_facts
from node.bench.own_network import check_own_networks
from node.bench.processes import BenchFailed, BenchProcess
from node.bench.shaped_links import host_of, lay_cables
from node.bench.shaped_setups import MBPS_PER_GIGABIT, WAYS, Setup, ratios, setup_of

PEER = ("-m", "node.bench.shaped_peer")
BOOTSTRAP_PEERS = 3
POUR_SECONDS = 4.0
SETTLE_SECONDS = 3.0  # for what joining left to be done
WITHIN = 0.15  # how far a measurement may be from what was predicted
LARGEST_ERROR = 1e-5  # of a result, relative: float32 sums of 24

LONGEST_ROUNDS = 4.0  # times what was predicted: half of it is for the first attempt
SHORTEST_ROUND_SECONDS = 300.0
GATHERING_SECONDS = 60.0  # before a round, and as long again for its end

FAILURES_TOLD = 4  # of a round: the first say why

Talk = Callable[[str], None]


@dataclass(frozen=True)
class ShapedEffort:
    """Which setup, how long its rounds shall be, and how many are counted."""

    setup: str
    seconds: float
    rounds: int
    ways: tuple[str, ...] = WAYS
    mbps_per_gigabit: float = MBPS_PER_GIGABIT


@dataclass
class Measured:
    """The rounds of one way."""

    round_seconds: list[float] = field(default_factory=list)
    exchange_seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)  # of all peers together
    efficiency: float = 0.0
    failures: list[str] = field(default_factory=list)

    def add(self, answers: list[dict[str, Any]]) -> None:
        """Count a round, by what all its peers say of it."""
        self.round_seconds.append(_span(answers, "began", "ended"))
        self.exchange_seconds.append(_span(answers, "exchange_began", "exchange_ended"))
        self.cpu_seconds.append(sum(one["cpu_seconds"] for one in answers))


class Lab:
    """The peers of a setup on their cables. Made by `open_lab`."""

    def __init__(self, setup: Setup, peers: list[BenchProcess]) -> None:
        self._setup = setup
        self._peers = peers
        self._weights: list[float] = []
        self._mean_factor = 0.0
        self._round_seconds = SHORTEST_ROUND_SECONDS

    async def efficiency(self) -> float:
        """Which part of a link's rate is payload, when TCP goes both ways at once."""
        pair = self._peers[:2]
        found: list[float] = []

        async def pour(number: int) -> None:
            other = host_of(1 - number)
            poured = await pair[number].ask("pour", host=other, seconds=POUR_SECONDS)
            found.append(poured["bytes_per_second"] / self._setup.members.up[number])

        for process in pair:
            await process.ask("listen_for_pouring")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pour, 0)
            nursery.start_soon(pour, 1)
        return min(found)

    async def join(self, way: str, expected_seconds: float = 0.0) -> None:
        """Make nodes of them that plan a round in this way, which should take so long."""
        self._round_seconds = max(SHORTEST_ROUND_SECONDS, LONGEST_ROUNDS * expected_seconds)
        seed = secrets.token_bytes(SEED_BYTES).hex()
        addresses: list[str] = []
        declared = self._setup.declared(way)
        for number, (process, speeds) in enumerate(zip(self._peers, declared, strict=True)):
            joined = await process.ask(
                "join",
                auth_seed=seed,
                host=host_of(number),
                addresses=addresses[:BOOTSTRAP_PEERS],
                up=speeds.up,
                down=speeds.down,
                round_seconds=self._round_seconds,
            )
            addresses.append(joined["address"])
            await process.ask("hold", values=self._setup.values, factor=number + 1.0)
        self._weights = [one.weight for one in declared]
        factors = [number + 1.0 for number, weight in enumerate(self._weights) if weight]
        self._mean_factor = sum(factors) / len(factors)
        await trio.sleep(SETTLE_SECONDS)

    async def round(self, epoch: int) -> list[dict[str, Any]]:
        """One round of all of them: what each says."""
        answers: list[dict[str, Any]] = []

        async def average(process: BenchProcess, weight: float) -> None:
            answers.append(
                await process.ask(
                    "average",
                    within=self._round_seconds + 2 * GATHERING_SECONDS,
                    epoch=epoch,
                    expected=len(self._peers),
                    weight=weight,
                    mean_factor=self._mean_factor,
                )
            )

        async with trio.open_nursery() as nursery:
            for process, weight in zip(self._peers, self._weights, strict=True):
                nursery.start_soon(average, process, weight)
        return answers


@asynccontextmanager
async def open_lab(setup: Setup, mbps_per_gigabit: float) -> AsyncIterator[Lab]:
    """The setup's peers on their cables, until the block ends; then nothing of it is left."""
    check_own_networks()
    async with AsyncExitStack() as stack:
        forge = await stack.enter_async_context(open_forge(PEER))
        hub = await stack.enter_async_context(forge.open_process("the hub"))
        peers = [
            await stack.enter_async_context(forge.open_process(f"peer {number + 1}"))
            for number in range(setup.peers)
        ]
        mbps = [setup.mbps(number) for number in range(setup.peers)]
        await lay_cables(hub, peers, mbps, mbps_per_gigabit)
        yield Lab(setup, peers)


async def measure_shaped(effort: ShapedEffort, say: Talk = lambda _line: None) -> dict[str, Any]:
    """The figures of one setup. BenchFailed if no round of a way was committed."""
    check_own_networks()
    machine, began = machine_facts(), time.monotonic()
    setup = setup_of(effort.setup, effort.seconds, effort.mbps_per_gigabit)
    measured = {way: await _measure(setup, way, effort, say) for way in effort.ways}
    efficiency = statistics.median(one.efficiency for one in measured.values())
    ways = {way: figures_of(setup, way, measured[way], efficiency) for way in effort.ways}
    return {
        "setup": effort.setup,
        "mbps_per_gigabit": effort.mbps_per_gigabit,
        "peers": setup.peers,
        "values": setup.values,
        "vector_bytes": setup.vector_bytes,
        "efficiency": round(efficiency, 4),
        "ways": ways,
        "ratios": _ratios(ways),
        "within_15_percent": all(abs(one["deviation"]) <= WITHIN for one in ways.values()),
        "failures": [failure for one in measured.values() for failure in one.failures],
        "seconds": round(time.monotonic() - began, 1),
        "machine": machine,
    }


async def _measure(setup: Setup, way: str, effort: ShapedEffort, say: Talk) -> Measured:
    measured = Measured()
    say(f"{setup.name}, {way}: starting {setup.peers} peers")
    async with open_lab(setup, effort.mbps_per_gigabit) as lab:
        measured.efficiency = await lab.efficiency()
        expected = setup.predicted_seconds(way, measured.efficiency)
        await lab.join(way, expected)
        for number in range(effort.rounds + 1):
            say(
                f"{setup.name}, {way}: round {number} of {effort.rounds}, of about {expected:.1f} s"
            )
            answers = await lab.round(number)
            failure = _what_is_wrong(answers, sum(setup.members.contributes))
            if failure:
                measured.failures.append(f"{way}, round {number}: {failure}")
            elif number:
                measured.add(answers)
    if not measured.round_seconds:
        raise BenchFailed(
            f"No round of setup {setup.name} with {way} was counted.",
            why="; ".join(measured.failures) or "None was asked for.",
            advice="Take longer rounds (--seconds), or look at what else this machine does.",
        )
    return measured


def _what_is_wrong(answers: list[dict[str, Any]], contributors: int) -> str:
    """Why a round does not count, if it does not."""
    uncommitted = [one for one in answers if "digest" not in one]
    if uncommitted or any(one["attempts"] != 1 for one in answers):
        reasons = {one["reason"] or one["verdict"] for one in uncommitted}
        told = {text for one in answers for text in one["failures"]}
        return "; ".join([*sorted(reasons), *sorted(told)[:FAILURES_TOLD]])
    if len({one["digest"] for one in answers}) != 1:
        return "the peers hold different results"
    if not all(one["relative_error"] <= LARGEST_ERROR for one in answers):
        return "the result is not the average"
    if any(one["members"] < contributors for one in answers):
        return "not everybody was in it"
    return ""


def _span(answers: list[dict[str, Any]], first: str, last: str) -> float:
    return float(max(one[last] for one in answers) - min(one[first] for one in answers))


def figures_of(setup: Setup, way: str, measured: Measured, efficiency: float) -> dict[str, Any]:
    """What is told of a way whose rounds were counted."""
    predicted = setup.predicted_seconds(way, efficiency)
    exchange = statistics.median(measured.exchange_seconds)
    return {
        "predicted_seconds": round(predicted, 3),
        "exchange_seconds_p50": round(exchange, 3),
        "round_seconds_p50": round(statistics.median(measured.round_seconds), 3),
        "exchange_seconds": [round(one, 3) for one in measured.exchange_seconds],
        "cpu_seconds_p50": round(statistics.median(measured.cpu_seconds), 2),
        "deviation": round(exchange / predicted - 1.0, 4),
        "fractions": setup.cut_fractions(way),
    }


def _ratios(ways: dict[str, dict[str, Any]]) -> dict[str, Any]:
    if set(ways) != set(WAYS):
        return {}
    told = {}
    for what, key in (("predicted", "predicted_seconds"), ("measured", "exchange_seconds_p50")):
        all_reduce, server = ratios([ways[way][key] for way in WAYS])
        told[what] = {
            "allreduce": round(all_reduce, 3),
            "parameter_server": round(server, 3),
        }
    return told
