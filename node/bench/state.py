"""`potluck bench state`: how fast a newcomer gets a state, and what happens when its donors fail.

Every peer is a process with a node of a run with tokens, on loopback. Its parts:

    shaped    three donors behind links of a known rate (link_proxy.py); when half of the state is
              there, one is killed with SIGKILL and another turns every byte that it sends. What
              is verified in the end, beside what the links could carry: all three up to that
              moment, the third alone from there on
    speed     three sound donors, no limit; and one donor, with as many bytes as the reference's
              bench (40 MB)
    training  one donor that trains and serves at the pace of those who do: its steps a second
              while somebody fetches, as a share of those in as long a while without. The two
              take turns, and each is as often the first of a pair; the median counts
    newcomers some newcomers at once in a run that makes its steps meanwhile (newcomers.py)

Easy to get wrong: the clock of a fetch begins when it is asked for, and a donor copies its state
when somebody asks. The first fetch pays for that and is told apart from the others.
"""

from __future__ import annotations

import secrets
import signal
import statistics
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import trio

from auth.keys import SEED_BYTES
from node.bench.link import LinkConditions
from node.bench.link_proxy import open_link_proxy
from node.bench.machine import machine_facts
from node.bench.newcomers import NewcomersEffort, measure_newcomers
from node.bench.processes import BenchFailed, BenchProcess, introduce, open_process

MIB = 1 << 20
DONORS = 3
ONE_DONOR_BYTES = 40_000_000  # 10M float32, the reference's
QUEUE_BYTES = 256 << 10  # before a link: a home router's
BAR_OF_LINKS = 0.9
BAR_OF_ALONE = 0.95
"""Of its steps alone a donor makes at least so many while it serves."""
SERVED_BYTES = 16_000_000  # a second at the pace that a peer that trains begins with
PAIRS = 12
PARTS = ("shaped", "speed", "training", "newcomers")
BURST_BYTES = 256 << 10
"""What a link catches up after its proxy had to wait for a processor: 50 ms of 40 Mb/s."""

Talk = Callable[[str], None]


@dataclass(frozen=True)
class StateEffort:
    """How much is fetched, over what, and how often; `pairs` of a donor that trains."""

    state_bytes: int = 100_000_000
    link_bytes_per_second: float = 5e6
    rounds: int = 5
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
        result["newcomers"] = await measure_newcomers(effort.newcomers, say)
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
    words = ["-m", "node.bench.state_peer", secrets.token_bytes(SEED_BYTES).hex()]
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
    """A port that leads to a donor over a link that brings so many bytes a second from it."""
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
