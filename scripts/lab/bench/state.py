"""`scripts/bench state`: how fast a newcomer gets a state, and what happens when its donors fail.

Every peer is a process with a node of a run with tokens, on loopback. Its parts:

    shaped    three donors behind links of a known rate (link_proxy.py); when half of the state is
              there, one is killed with SIGKILL and another inverts every byte that it sends. The
              verified bytes are compared with the capacity of the links: all three up to that
              moment, the third alone from there on
    speed     three sound donors, no limit; and one donor, with as many bytes as the reference's
              bench (40 MB)
    training  one donor that trains and serves at the pace of those who do: its steps a second
              while a peer fetches, as a share of those in an equally long time without. The two
              take turns, and each is as often the first of a pair; the median counts
    newcomers some newcomers at once in a run that makes its steps meanwhile

The clock of a fetch begins when it is asked for, and a donor copies its state when a peer asks.
So the first fetch takes longer, and is reported separately.

The newcomers' part: one peer trains alone, in steps of a known length. Then some newcomers come at
the same moment, each a process with a node of its own on loopback. One is in when it has made a
step with its own samples; its clock starts when its model is there and it looks at the run. Also
measured: how much longer the first peer's passes take while it serves them; which newcomers were
told that they are too slow, and when; and the bytes that each received before its model was where
the run is: its state, and the results that followed. The time that those bytes take by themselves
on this machine is measured in the same minute, because a bar in seconds means nothing on a machine
that needs as long for the bytes.

A pass is a short computation and a pause for the rest of its time, as on an accelerator. Otherwise
the peers would compete for this machine's cores, and a step would have no known length.

Once a newcomer is in, the run has more samples a second, so its steps become shorter. The last
newcomer has the hardest run to get into.
"""

from __future__ import annotations

import argparse
import math
import secrets
import signal
import statistics
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from auth.keys import SEED_BYTES
from lab import Talk
from lab.bench.command import report
from lab.bench.link_proxy import LinkConditions, open_link_proxy
from lab.bench.machine import machine_facts
from lab.bench.processes import BenchFailed, BenchProcess, introduce, open_process
from lab.bench.training_swarm import Training, TrainingProcess, open_training_swarm

if TYPE_CHECKING:
    from node.app.cli.parser import Subparsers


PASSES_PER_STEP = 4  # of the first peer alone
LAYERS, HEADS = 3, 4
BYTES_PER_PARAMETER = 12  # float32, and AdamW's two statistics
SETTLED_STEPS = 8  # before the newcomers come
SETTLE_SECONDS = 120.0
BAR_SECONDS = 10.0
BAR_OF_BYTES = 1.2  # times what the bytes take, where that is more
GLANCE_SECONDS = 0.2


# The defaults of the flags.
MEGABYTES = 100.0
MEGABITS = 40.0
ROUNDS = 5
NEWCOMERS = 2
STEP_SECONDS = 0.28
NEWCOMERS_MEGABYTES = 3.6


@dataclass(frozen=True)
class NewcomersEffort:
    """One row of the table: this many come at once. `seconds`: how long they have."""

    newcomers: int = NEWCOMERS
    step_seconds: float = STEP_SECONDS
    state_bytes: int = int(NEWCOMERS_MEGABYTES * 1e6)
    seconds: float = 70.0


async def measure_newcomers(effort: NewcomersEffort, say: Talk) -> dict[str, Any]:
    """When each was in, the cost for the peer that served them, and the refusals."""
    training = Training(
        target_batch=PASSES_PER_STEP,
        task={
            "batch": 1,
            "context": 8,
            "width": _width(effort.state_bytes),
            "layers": LAYERS,
            "heads": HEADS,
        },
        manner={"pass_seconds": effort.step_seconds / PASSES_PER_STEP, "digests_from": None},
    )
    async with open_training_swarm(training) as swarm:
        first = await swarm.start()
        await swarm.until_epoch(SETTLED_STEPS, SETTLE_SECONDS)
        alone = await _pass_seconds(first, SETTLED_STEPS * effort.step_seconds)
        newcomers = await swarm.join(effort.newcomers)
        before = await first.ask("cpu")
        async with trio.open_nursery() as nursery:
            for one in newcomers:
                nursery.start_soon(swarm.train, one, {})
        in_after: dict[int, float] = {}
        with trio.move_on_after(effort.seconds):
            while len(in_after) < len(newcomers):
                await trio.sleep(GLANCE_SECONDS)
                await swarm.ask_all("progress", newcomers)  # which writes down what happened
                for one in newcomers:
                    steps = [
                        line for line in swarm.lines(one, "StepTaken") if line["own_samples"] > 0
                    ]
                    if steps and one.number not in in_after:
                        entered = swarm.lines(one, "enters")[0]["at"]
                        in_after[one.number] = steps[0]["at"] - entered
                        say(f"{one.name} is in after {in_after[one.number]:.1f} s")
        after = before
        with trio.move_on_after(effort.seconds):  # they may all be in before it has made one pass
            while after["sheet"]["batches"] == before["sheet"]["batches"]:
                await trio.sleep(GLANCE_SECONDS)
                after = await first.ask("cpu")
        serving = _seconds_of_a_pass(before["sheet"], after["sheet"])
        told = {
            one.name: [round(line["at"] - swarm.lines(one, "enters")[0]["at"], 1) for line in lines]
            for one in newcomers
            if (lines := swarm.lines(one, "TooSlowToCatchUp"))
        }
        came = [
            sum(line["fetched_bytes"] for line in swarm.lines(one, "CaughtUp")[:1])
            or effort.state_bytes
            for one in newcomers
        ]
    return {
        "newcomers": effort.newcomers,
        "step_s": effort.step_seconds,
        "state_MB": round(effort.state_bytes / 1e6, 1),
        "in_after_s": sorted(round(seconds, 1) for seconds in in_after.values()),
        "never_in": len(newcomers) - len(in_after),
        "came_MB": [round(count / 1e6, 1) for count in came],
        "told_too_slow_s": told,
        "pass_ms_alone": round(1000 * alone, 1),
        "pass_ms_serving": round(1000 * serving, 1),
        "slowdown": round(serving / alone - 1.0, 3),
    }


def is_in_time(found: Mapping[str, Any]) -> bool:
    """Whether all were in by the bar, or in little more than their bytes need (`bytes_s`)."""
    bar = max(BAR_SECONDS, BAR_OF_BYTES * found["bytes_s"])
    return not found["never_in"] and max(found["in_after_s"]) <= bar


async def _pass_seconds(first: TrainingProcess, seconds: float) -> float:
    """Of a pass, over so long."""
    before = await first.ask("cpu")
    await trio.sleep(seconds)
    after = await first.ask("cpu")
    return _seconds_of_a_pass(before["sheet"], after["sheet"])


def _seconds_of_a_pass(before: dict[str, Any], after: dict[str, Any]) -> float:
    batches = after["batches"] - before["batches"]
    if not batches:
        raise BenchFailed("The first peer made no pass while it was measured.")
    return float((after["computing"] - before["computing"]) / batches)


def _width(state_bytes: int) -> int:
    """The width of the model whose state has about this many bytes, and the exact bytes."""
    parameters = state_bytes / BYTES_PER_PARAMETER
    squared, linear = 12 * LAYERS, 256 + 8
    width = (math.sqrt(linear**2 + 4 * squared * parameters) - linear) / (2 * squared)
    return max(HEADS, round(width / HEADS) * HEADS)


MIB = 1 << 20
DONORS = 3
ONE_DONOR_BYTES = 40_000_000  # 10M float32, the reference's
QUEUE_BYTES = 256 << 10  # before a link: a home router's
BAR_OF_LINKS = 0.9
BAR_OF_ALONE = 0.95
"""While it serves, a donor makes at least this share of its steps alone."""
SERVED_BYTES = 16_000_000  # a second at the pace that a peer that trains begins with
PAIRS = 12
PARTS = ("shaped", "speed", "training", "newcomers")
BURST_BYTES = 256 << 10
"""The bytes that a link catches up after its proxy waited for a core: 50 ms of 40 Mb/s."""


@dataclass(frozen=True)
class StateEffort:
    """How much is fetched, over what, and how often; `pairs` of a donor that trains."""

    state_bytes: int = int(MEGABYTES * 1e6)
    link_bytes_per_second: float = MEGABITS * 1e6 / 8
    rounds: int = ROUNDS
    pairs: int = PAIRS
    parts: tuple[str, ...] = PARTS
    newcomers: NewcomersEffort = field(default_factory=NewcomersEffort)


async def measure_state(effort: StateEffort, say: Talk = lambda _line: None) -> dict[str, Any]:
    """The figures, and what they were measured on. BenchFailed if a state does not come whole."""
    machine, began = machine_facts(), time.monotonic()
    result: dict[str, Any] = {}
    if "shaped" in effort.parts:
        say("three donors behind links, one to be killed and one to lie")
        result["shaped"] = await measure_misfortune(effort)
    if "speed" in effort.parts:
        say("three donors without limits")
        result["three_donors"] = await _measure_speed(DONORS, effort.state_bytes, effort.rounds)
        say("one donor without limits")
        result["one_donor"] = await _measure_speed(1, ONE_DONOR_BYTES, effort.rounds)
    if "training" in effort.parts:
        say("one donor that trains")
        result["training_donor"] = await _measure_training(effort.pairs)
    if "newcomers" in effort.parts:
        say(f"{effort.newcomers.newcomers} newcomers at once")
        found = await measure_newcomers(effort.newcomers, say)
        say("the bytes that they took, with nothing beside")
        each = round(statistics.mean(found["came_MB"]) * 1e6)
        found["bytes_s"] = round(await _bytes_seconds(effort.newcomers.newcomers, each), 1)
        result["newcomers"] = found | {"met": is_in_time(found)}
    return result | {
        "met": _is_met(result),
        "settings": asdict(effort),
        "machine": machine,
        "seconds": round(time.monotonic() - began, 1),
    }


def _is_met(result: dict[str, Any]) -> bool:
    """Of the parts that were measured."""
    met = []
    if (shaped := result.get("shaped")) is not None:
        met += [shaped["verified"], shaped["liar_named"]]
        met.append(shaped["of_what_the_links_carry"] >= BAR_OF_LINKS)
    if (training := result.get("training_donor")) is not None:
        met.append(training["of_alone_p50"] >= BAR_OF_ALONE)
    if (newcomers := result.get("newcomers")) is not None:
        met.append(newcomers["met"])
    return all(met)


async def measure_misfortune(effort: StateEffort) -> dict[str, Any]:
    async with _open_swarm(
        DONORS, effort.state_bytes, link_bytes_per_second=effort.link_bytes_per_second
    ) as swarm:
        whole = await swarm.fetch()
        await swarm.begin_fetch()
        began = time.monotonic()
        await swarm.newcomer.ask("until_half")
        half = time.monotonic() - began
        swarm.donors[1].send_signal(signal.SIGKILL)
        await swarm.donors[2].ask("corrupt")
        misfortune = time.monotonic() - began
        fetched = await swarm.end_fetch()
    rate, size = effort.link_bytes_per_second, fetched["bytes"]
    carried = DONORS * (rate * misfortune + BURST_BYTES)
    carried_seconds = misfortune + max(0.0, size - carried) / rate
    liar = swarm.names[2]
    return {
        "completed": True,
        "verified": fetched["digest"] == swarm.digest,
        "liar": liar,
        "liar_named": liar in fetched["liars"],
        "liar_did": fetched["liars"].get(liar, ""),
        "killed_given_up": swarm.names[1] in fetched["given_up"],
        "given_up": fetched["given_up"],
        "fetch_s": round(fetched["seconds"], 3),
        "half_s": round(half, 3),
        "links_would_take_s": round(carried_seconds, 3),
        "of_what_the_links_carry": round(carried_seconds / fetched["seconds"], 4),
        "undisturbed_s": round(whole["seconds"], 3),
        "undisturbed_of_what_the_links_carry": round(size / (DONORS * rate) / whole["seconds"], 4),
    }


async def _measure_speed(donors: int, state_bytes: int, rounds: int) -> dict[str, Any]:
    async with _open_swarm(donors, state_bytes) as swarm:
        first = await swarm.fetch()
        before = await swarm.cpu_seconds()
        fetches = [await swarm.fetch() for _ in range(rounds)]
        cpu = (await swarm.cpu_seconds() - before) / rounds
    speeds = [one["bytes"] / MIB / one["seconds"] for one in fetches]
    return {
        "MiB_per_s_p50": round(statistics.median(speeds), 1),
        "fetch_s_p50": round(statistics.median(one["seconds"] for one in fetches), 4),
        "first_fetch_s": round(first["seconds"], 4),
        "cpu_s": round(cpu, 3),
        "digest_s": round(max(swarm.digest_seconds), 4),
        "spread": {"min": round(min(speeds), 1), "max": round(max(speeds), 1)},
    }


async def _bytes_seconds(newcomers: int, each_bytes: int) -> float:
    """How many seconds one process needs, which does nothing else, to send this much to each of
    the newcomers. One after another: none waits for a place, and two processes have all cores."""
    async with _open_swarm(1, each_bytes) as swarm:
        await swarm.fetch()  # the donor has its copy from here on
        fetches = [await swarm.fetch() for _ in range(newcomers)]
    return float(sum(one["seconds"] for one in fetches))


async def _measure_training(pairs: int) -> dict[str, Any]:
    async with _open_swarm(1, SERVED_BYTES, as_one_who_trains=True) as swarm:
        (donor,) = swarm.donors
        await donor.ask("train", threads=1, width=128, layers=2, batch=8)
        fetched = await swarm.fetch()

        async def steps_serving() -> float:
            began = time.monotonic()
            await swarm.fetch()
            return await rate(began)

        async def steps_alone() -> float:
            began = time.monotonic()
            await trio.sleep(fetched["seconds"])
            return await rate(began)

        async def rate(began: float) -> float:
            told = await donor.ask("rate", began=began, ended=time.monotonic())
            return float(told["steps_per_second"])

        rates = []
        for number in range(pairs):
            if number % 2:
                alone, serving = await steps_alone(), await steps_serving()
            else:
                serving, alone = await steps_serving(), await steps_alone()
            rates.append((serving, alone))
    of_alone = [serving / alone for serving, alone in rates]
    return {
        "of_alone_p50": round(statistics.median(of_alone), 4),
        "bar_of_alone": BAR_OF_ALONE,
        "steps_per_s_alone": round(statistics.median(alone for _, alone in rates), 1),
        "steps_per_s_serving": round(statistics.median(serving for serving, _ in rates), 1),
        "served_MB_per_s": round(fetched["bytes"] / fetched["seconds"] / 1e6, 2),
        "spread": {"min": round(min(of_alone), 4), "max": round(max(of_alone), 4)},
    }


class _Swarm:
    """Donors, and a newcomer that knows them."""

    def __init__(self, newcomer: BenchProcess) -> None:
        self.newcomer = newcomer
        self.donors: list[BenchProcess] = []
        self.names: list[str] = []
        self.digest = ""
        self.digest_seconds: list[float] = []

    async def fetch(self) -> dict[str, Any]:
        await self.begin_fetch()
        return await self.end_fetch()

    async def begin_fetch(self) -> None:
        await self.newcomer.ask("forget")
        await self.newcomer.ask("begin_fetch", sources=self.names, digest=self.digest)

    async def end_fetch(self) -> dict[str, Any]:
        fetched = await self.newcomer.ask("fetched")
        if fetched["digest"] != self.digest:
            raise BenchFailed("The newcomer holds another state than its donors.")
        return fetched

    async def cpu_seconds(self) -> float:
        answers = [await one.ask("cpu") for one in (self.newcomer, *self.donors)]
        return float(sum(answer["seconds"] for answer in answers))


@asynccontextmanager
async def _open_swarm(
    donors: int,
    state_bytes: int,
    *,
    link_bytes_per_second: float | None = None,
    as_one_who_trains: bool = False,
) -> AsyncIterator[_Swarm]:
    words = ["-m", "lab.bench.state_peer", secrets.token_bytes(SEED_BYTES).hex()]
    async with AsyncExitStack() as stack:
        swarm = _Swarm(await stack.enter_async_context(open_process("the newcomer", words)))
        await swarm.newcomer.ask("hold", state_bytes=state_bytes, serve=False)
        for number in range(donors):
            donor = await stack.enter_async_context(open_process(f"donor {number + 1}", words))
            held = await donor.ask(
                "hold", state_bytes=state_bytes, serve=True, as_one_who_trains=as_one_who_trains
            )
            if swarm.digest not in ("", held["digest"]):
                raise BenchFailed("Two donors hold different states.")
            swarm.digest = held["digest"]
            swarm.digest_seconds.append(held["digest_s"])
            port = None
            if link_bytes_per_second is not None:
                port = await _shaped_port(stack, donor, link_bytes_per_second)
            swarm.names.append(await introduce(swarm.newcomer, donor, port=port))
            swarm.donors.append(donor)
        yield swarm


async def _shaped_port(stack: AsyncExitStack, donor: BenchProcess, bytes_per_second: float) -> int:
    """A port to a donor, over a link that carries this many bytes a second from it."""
    port = int(donor.introduction["addresses"][0].split("/tcp/")[1].split("/")[0])
    proxy = await stack.enter_async_context(
        open_link_proxy(
            ("127.0.0.1", port),
            LinkConditions(),
            LinkConditions(
                bytes_per_second=bytes_per_second,
                burst_bytes=BURST_BYTES,
                queue_bytes=QUEUE_BYTES,
            ),
        )
    )
    return proxy.port


def add_parser(kinds: Subparsers) -> None:
    from node.app.cli.parser import add_flag, positive_count, positive_number

    parser = kinds.add_parser(
        "state",
        help="fetching a state from peers, of which one dies and one lies",
        description="Have a newcomer fetch a state from three real peers on this machine, behind "
        "links of a known rate. Half-way one of them is killed and another begins to send "
        "corrupted data. Then the same from three peers, and from one, without limits; then from "
        "one that trains at the same time, and serves at the pace of such peers. Last, several "
        "newcomers come at once to a run that goes on making steps.\n\n"
        "  of_what_the_links_carry  the time that the links would need, as a share of the time\n"
        "                           that it took\n"
        "  liar_named               whether the peer that sent corrupted data was found and named\n"
        "  training_donor           steps per second of a donor that trains, as a share of\n"
        "                           those without serving\n"
        "  three_donors, one_donor  MiB per second without limits, CPU seconds of all, and the\n"
        "                           time to compute the digest of a state\n"
        "  newcomers                how long it took until each had a part in a step, which were\n"
        "                           told that they are too slow, and how much longer the passes\n"
        "                           of the serving peer took; and bytes_s, the time in which one\n"
        "                           process sends the same bytes while nothing else runs\n\n"
        "The exit code is 1 if the state is not verified, if the liar is not named, if less than "
        f"{BAR_OF_LINKS:g} of the links' rate was used, if a donor that trains makes less than "
        f"{BAR_OF_ALONE:g} of its steps, or if a newcomer is not in after {BAR_SECONDS:g} s (or "
        f"{BAR_OF_BYTES:g} times bytes_s, if that is more).",
        example="scripts/bench state --json\n"
        "scripts/bench state --megabytes 20 --rounds 1\n"
        "scripts/bench state --only training\n"
        "scripts/bench state --only newcomers --newcomers 5 --step-seconds 0.5",
    )
    parser.set_defaults(measure=run)
    link = "the rate of each donor's link, in Mb/s"
    rounds = "how many fetches without limits are measured, after one that is not"
    add_flag(parser, "--megabytes", positive_number, MEGABYTES, "how large the state is, in MB")
    add_flag(parser, "--megabits", positive_number, MEGABITS, link)
    add_flag(parser, "--rounds", positive_count, ROUNDS, rounds)
    pairs = "how many pairs of windows: a donor that trains also serves, then only trains"
    add_flag(parser, "--pairs", positive_count, PAIRS, pairs)
    add_flag(parser, "--newcomers", positive_count, NEWCOMERS, "how many newcomers come at once")
    seconds = "how long a step of the run takes before they come"
    add_flag(parser, "--step-seconds", positive_number, STEP_SECONDS, seconds)
    size = "how large the state is that they fetch, in MB"
    add_flag(parser, "--newcomers-megabytes", positive_number, NEWCOMERS_MEGABYTES, size)
    parser.add_argument(
        "--only",
        action="append",
        choices=PARTS,
        help="measure this part only; may be given several times (all four)",
    )


def run(arguments: argparse.Namespace) -> int:
    effort = StateEffort(
        state_bytes=round(arguments.megabytes * 1e6),
        link_bytes_per_second=arguments.megabits * 1e6 / 8,
        rounds=arguments.rounds,
        pairs=arguments.pairs,
        parts=tuple(dict.fromkeys(arguments.only or PARTS)),
        newcomers=NewcomersEffort(
            arguments.newcomers,
            arguments.step_seconds,
            round(arguments.newcomers_megabytes * 1e6),
        ),
    )

    return report(arguments, partial(measure_state, effort), _lines)


def _lines(result: dict[str, Any]) -> str:
    lines = []
    if (shaped := result.get("shaped")) is not None:
        lines += [
            f"one killed, one lying: {shaped['fetch_s']:.2f} s, "
            f"{shaped['of_what_the_links_carry'] * 100:.1f} % of what the links carry, "
            f"{'verified' if shaped['verified'] else 'NOT VERIFIED'}",
            f"undisturbed: {shaped['undisturbed_s']:.2f} s, "
            f"{shaped['undisturbed_of_what_the_links_carry'] * 100:.1f} % of what the links carry",
            f"the liar: {shaped['liar']}: {shaped['liar_did'] or 'NOT NAMED'}",
        ]
    if (training := result.get("training_donor")) is not None:
        lines.append(
            f"a donor that trains: {training['of_alone_p50'] * 100:.1f} % of its steps alone "
            f"({training['spread']['min'] * 100:.1f} to {training['spread']['max'] * 100:.1f}), "
            f"serving {training['served_MB_per_s']:.1f} MB/s"
        )
    for name in ("three_donors", "one_donor"):
        if (figures := result.get(name)) is not None:
            lines.append(
                f"{name.replace('_', ' ')} without limits: {figures['MiB_per_s_p50']:.1f} MiB/s "
                f"({figures['spread']['min']:.1f} to {figures['spread']['max']:.1f}), "
                f"{figures['cpu_s']:.2f} CPU s, the first {figures['first_fetch_s']:.2f} s, "
                f"digest {figures['digest_s'] * 1000:.0f} ms"
            )
    if (newcomers := result.get("newcomers")) is not None:
        seconds = ", ".join(f"{one:.1f}" for one in newcomers["in_after_s"]) or "never"
        lines.append(
            f"{newcomers['newcomers']} newcomers at once: in after {seconds} s, "
            f"{newcomers['never_in']} not in, {len(newcomers['told_too_slow_s'])} told too slow, "
            f"passes of the peer that served {newcomers['slowdown'] * 100:+.1f} %; "
            f"the bytes alone {newcomers['bytes_s']:.1f} s"
        )
    machine = result["machine"]
    lines.append(f"{machine['processor']}, {machine['cores_usable']} cores, {result['seconds']} s")
    lines.append("all as it must be" if result["met"] else "NOT as it must be")
    return "\n".join(lines)
