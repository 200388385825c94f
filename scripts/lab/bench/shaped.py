"""`scripts/bench shaped`: rounds over links of limited rate, beside what the plan says of them.

One of the paper's setups is built of network namespaces (cables.py), each peer a process
with a node that averages for real, with tokens and encrypted channels. It is measured with the
plan's shares, with equal shares, and with the best single reducer; each time in a lab of its own.

A plan counts the vector's bytes. On the wire there are also headers, acknowledgements and frames.
So before a lab averages, two of its peers send each other plain TCP both ways at once, and the
prediction uses the payload's part of the rate ("efficiency"). Potluck's own additions to TCP (its
frames, signatures and agreement) are not taken out; they have to fit into the allowed difference.

The first round of a lab opens connections and fills caches, so it is not counted.

The setups are those of the DeDLOC paper, scaled down, and each is averaged in three ways.

One Gb/s of the paper is `MBPS_PER_GIGABIT` here, or half of it, so that two cores can encrypt
everything that all links carry together. The length of the vector follows from the seconds that the
plan's round should take.

No message decides how a round is cut: every member plans from the speeds that all declare. To get a
given cut w, declare speeds whose best cut it is: upload_i(w) and download_i(w) themselves
(plan.py). With them all members would be busy for exactly one unit of time, and since each one's
time grows with its share, any other cut keeps somebody busy for longer.

Parts are multiples of CUT_VALUES values, which in a vector this short is a large piece of a small
share. So the prediction is for the round with the parts as they are cut.
"""

from __future__ import annotations

import argparse
import secrets
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from auth.keys import SEED_BYTES
from lab import Talk
from lab.bench.cables import host_of, lay_cables
from lab.bench.command import report
from lab.bench.machine import machine_facts
from lab.bench.own_network import check_own_networks
from lab.bench.processes import BenchFailed, BenchProcess, open_forge
from protocols.moshpit.layout import CUT_VALUES
from protocols.moshpit.plan import (
    Members,
    best_shares,
    equal_shares,
    predicted_seconds,
    seconds_of,
    shortest_seconds,
)

if TYPE_CHECKING:
    from node.app.cli.parser import Subparsers


MBPS_PER_GIGABIT = 48.0
"""Two cores encrypt for setups A, B and D what links carry that are about twenty times slower."""

BYTES_PER_MEGABIT = 125_000.0
BYTES_PER_VALUE = 4  # float32, as the paper's averaging times are

# Gb/s of those that compute, and of those that do not.
SETUPS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "A": ((1.0,) * 8, ()),
    "B": ((0.2,) * 16, ()),
    "C": ((1.0,) * 8 + (0.2,) * 16, ()),
    "D": ((0.2,) * 16, (2.5,)),
}
WAYS = ("plan", "allreduce", "parameter_server")


@dataclass(frozen=True)
class Declared:
    """The speeds that one peer declares in a round."""

    up: float  # bytes per second
    down: float
    weight: float


@dataclass(frozen=True)
class Setup:
    """One setup in the lab. `members` has the real speeds of its links, in bytes per second."""

    name: str
    members: Members
    values: int

    @property
    def peers(self) -> int:
        return len(self.members.up)

    @property
    def vector_bytes(self) -> int:
        return self.values * BYTES_PER_VALUE

    def mbps(self, peer: int) -> float:
        return self.members.up[peer] / BYTES_PER_MEGABIT

    def fractions(self, way: str) -> tuple[float, ...]:
        """The share that each member reduces."""
        if way == "plan":
            return best_shares(self.members)
        if way == "allreduce":
            return equal_shares(self.members.reduces)
        single = [tuple(float(i == j) for j in range(self.peers)) for i in range(self.peers)]
        return min(single, key=lambda fractions: seconds_of(fractions, self.members))

    def declared(self, way: str) -> list[Declared]:
        """The speeds that peers declare so that the round is cut in this way. Nobody declares more
        than its link carries, or the others would find it late."""
        n, m = self.peers, sum(self.members.contributes)
        shares = list(zip(self.fractions(way), self.members.contributes, strict=True))
        up = [c * (1 - w) + (n - 1) * w for w, c in shares]
        down = [(m - c) * w + (1 - w) for w, c in shares]
        carried = [
            *zip(self.members.up, up, strict=True),
            *zip(self.members.down, down, strict=True),
        ]
        unit = min(real / wanted for real, wanted in carried if wanted)
        return [
            Declared(unit * sends, unit * takes, float(c))
            for sends, takes, (_, c) in zip(up, down, shares, strict=True)
        ]

    def predicted_seconds(self, way: str, efficiency: float) -> float:
        """How long it takes if so much of the links' rate is left for the vector's bytes."""
        return predicted_seconds(
            self.cut_fractions(way),
            [up * efficiency for up in self.members.up],
            [down * efficiency for down in self.members.down],
            self.members.contributes,
            self.vector_bytes,
        )

    def cut_fractions(self, way: str) -> list[float]:
        """The same as `fractions`, in whole blocks: at least what each reducer gets."""
        fractions = self.fractions(way)
        largest = fractions.index(max(fractions))
        blocks = [round(one * self.values / CUT_VALUES) for one in fractions]
        blocks[largest] += self.values // CUT_VALUES - sum(blocks)
        return [one * CUT_VALUES / self.values for one in blocks]


def setup_of(name: str, seconds: float, mbps_per_gigabit: float = MBPS_PER_GIGABIT) -> Setup:
    """The setup in which the plan's round takes so many seconds over links of that scale."""
    computing, helping = SETUPS[name]
    speeds = [
        gigabits * mbps_per_gigabit * BYTES_PER_MEGABIT for gigabits in (*computing, *helping)
    ]
    contributes = [True] * len(computing) + [False] * len(helping)
    members = Members(speeds, speeds, contributes, [True] * len(speeds))
    vector_bytes = seconds / shortest_seconds(members)
    each = len(speeds) * CUT_VALUES  # so that equal shares are whole blocks
    return Setup(name, members, each * max(1, round(vector_bytes / BYTES_PER_VALUE / each)))


def ratios(seconds: Sequence[float]) -> tuple[float, float]:
    """All-reduce / ours and parameter server / ours, of the seconds in the order of WAYS."""
    ours, all_reduce, server = seconds
    return all_reduce / ours, server / ours


PEER = ("-m", "lab.bench.shaped_peer")
BOOTSTRAP_PEERS = 3
POUR_SECONDS = 4.0
SETTLE_SECONDS = 3.0  # for the work that joining left behind
WITHIN = 0.15  # how far a measurement may be from the prediction
LARGEST_ERROR = 1e-5  # of a result, relative: float32 sums of 24

LONGEST_ROUNDS = 4.0  # times the predicted time: half of it is for the first attempt
SHORTEST_ROUND_SECONDS = 300.0
GATHERING_SECONDS = 60.0  # before a round, and as long again for its end

FAILURES_TOLD = 4  # of a round: the first say why


@dataclass(frozen=True)
class ShapedEffort:
    """Which setup, how long its rounds shall be, and how many are counted."""

    setup: str
    seconds: float
    rounds: int
    ways: tuple[str, ...] = WAYS
    mbps_per_gigabit: float = MBPS_PER_GIGABIT


@dataclass
class MeasuredWay:
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


async def _measure(setup: Setup, way: str, effort: ShapedEffort, say: Talk) -> MeasuredWay:
    measured = MeasuredWay()
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


def figures_of(setup: Setup, way: str, measured: MeasuredWay, efficiency: float) -> dict[str, Any]:
    """The result of a way whose rounds were counted."""
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


# Flags and output


SETUPS_IN_WORDS = {
    "A": "8 peers at 1 Gb/s",
    "B": "16 at 0.2 Gb/s",
    "C": "the peers of A and B together",
    "D": "B and one peer at 2.5 Gb/s that does not compute",
}
SECONDS = 15.0  # of the plan's round: its first and last moments are not all links' time
ROUNDS = 3


def add_parser(kinds: Subparsers) -> None:
    from node.app.cli.parser import add_flag, positive_count, positive_number, positive_seconds

    setups = "\n".join(f"  {name}  {what}" for name, what in SETUPS_IN_WORDS.items())
    parser = kinds.add_parser(
        "shaped",
        help="rounds over links of limited rate, beside what the plan says (root, Linux)",
        description="Build a setup of the DeDLOC paper of network namespaces, with links about "
        "twenty times slower than in the paper (tbf, both directions), and have real peers average "
        "over them: with the shares of the plan, with equal shares, and with the best single "
        "reducer. "
        f"Each figure is shown beside the prediction of the plan.\n\n{setups}\n\n"
        "The prediction assumes that links carry as much as plain TCP does, which is measured "
        "first. This needs root, Linux and iproute2, and leaves nothing behind, however it ends. A "
        "single reducer takes up to eight times as long as the plan's round. The exit code is 1 if "
        "a way is more than 15 % off its prediction.",
        example="sudo scripts/bench shaped --setup A --json\n"
        "sudo scripts/bench shaped --setup D --way plan --rounds 1\n"
        "sudo scripts/bench shaped --setup C --scale 24 --seconds 30",
    )
    parser.set_defaults(measure=run)
    parser.add_argument(
        "--setup", choices=tuple(SETUPS_IN_WORDS), required=True, help="which setup"
    )
    parser.add_argument(
        "--way",
        action="append",
        choices=WAYS,
        help="measure this way only; may be given several times (all three)",
    )
    rounds = "how many rounds are measured, after one that is not"
    length = "how long the plan's round takes; the length of the vector follows from it"
    scale = (
        "how many Mb/s stand for 1 Gb/s of the paper; if the processors are the limit, as for "
        "setup C on two cores, halve it and double --seconds"
    )
    add_flag(parser, "--rounds", positive_count, ROUNDS, rounds)
    add_flag(parser, "--seconds", positive_seconds, SECONDS, length, metavar="SECONDS")
    add_flag(parser, "--scale", positive_number, MBPS_PER_GIGABIT, scale, metavar="MBPS")


def run(arguments: argparse.Namespace) -> int:
    from lab.bench.own_network import check_own_networks

    check_own_networks()

    effort = ShapedEffort(
        setup=arguments.setup,
        seconds=arguments.seconds,
        rounds=arguments.rounds,
        mbps_per_gigabit=arguments.scale,
        ways=tuple(dict.fromkeys(arguments.way or WAYS)),
    )

    return report(
        arguments,
        partial(measure_shaped, effort),
        _lines,
        lambda result: result["within_15_percent"] and not result["failures"],
    )


def _lines(result: dict[str, Any]) -> str:
    lines = [f"{'':18}{'predicted':>10}{'measured':>10}{'off by':>9}{'CPU':>9}"]
    for way, figures in result["ways"].items():
        lines.append(
            f"{way:18}{figures['predicted_seconds']:>8.2f} s{figures['exchange_seconds_p50']:>8.2f}"
            f" s{figures['deviation'] * 100:>+7.1f} %{figures['cpu_seconds_p50']:>7.1f} s"
        )
    for what, found in result["ratios"].items():
        lines.append(
            f"{what}: all-reduce / plan {found['allreduce']:.2f}, "
            f"parameter server / plan {found['parameter_server']:.2f}"
        )
    lines += [f"not counted: {failure}" for failure in result["failures"]]
    lines.append(
        f"{result['peers']} peers, {result['vector_bytes'] / 1e6:.1f} MB, "
        f"{result['efficiency'] * 100:.1f} % of a link's rate is payload, {result['seconds']} s"
    )
    return "\n".join(lines)
