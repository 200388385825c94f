"""`scripts/bench nat`: how two homes meet, for every pair of their routers' kinds.

A lab of network namespaces (lab/net/) has two backbones on its internet, and two homes for each
pair of kinds. In each home runs a whole node. Measured are the time from its start to its stated
mode, from the first link to a direct one, and the rate of a transfer; and `potluck ping` is run
from one home to the other. Everything is done `--times` times, with routers that have forgotten
what they knew.

A `mapped` home has a router that runs miniupnpd. Its node asks for a port itself, and the router
must have forgotten it when the node has left.

What is predicted: a home with a public address, or with a port that is mapped or forwarded, is
dialled. Other homes are met through a relay and then by a hole, if `nat.kinds.can_punch` says so.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import trio

from lab import Talk
from lab.bench.command import report
from lab.bench.machine import machine_facts
from lab.bench.pouring import CHUNK_BYTES
from lab.bench.processes import WHERE_WE_ARE, BenchFailed, BenchProcess, open_process_of
from lab.net import AddressFamilies, Machine, NetworkLab, RouterKind
from nat import kinds
from protocols.moshpit.plan import best_reducers, fractions_for, predicted_seconds

if TYPE_CHECKING:
    from node.app.cli.parser import Subparsers

PORT: Final = 4001  # of homes with a forwarded port, and of backbones
ROUND_TRIP_SECONDS: Final = 0.06
TRANSFER_CHUNKS: Final = 20_000_000 // CHUNK_BYTES + 1
DIRECT_SECONDS: Final = 10.0  # to wait for a direct link; the bar is 5
MOST_TO_MODE_SECONDS: Final = 30.0
MOST_TO_DIRECT_SECONDS: Final = 5.0
BACKBONES: Final = 2
AT_ONCE: Final = 3  # cells; more, and starting nodes wait for the processor
PING_SECONDS: Final = 40.0


@dataclass(frozen=True)
class HomeKind:
    """How a home is connected: its router, and which versions of IP it has.

    `seen` is the router as the node behind it should find it: for IPv4, if there is any.
    """

    router: RouterKind
    seen: kinds.Nat
    families: AddressFamilies = AddressFamilies.IPV4
    ipv6_open: bool = False

    @property
    def ipv6_seen(self) -> kinds.Nat:
        return kinds.Nat.NONE if self.ipv6_open else kinds.Nat.PORT_RESTRICTED


_STRICT: Final = RouterKind.PORT_RESTRICTED, kinds.Nat.PORT_RESTRICTED
_SYMMETRIC: Final = RouterKind.SYMMETRIC, kinds.Nat.SYMMETRIC
MATRIX: Final = {
    "none": HomeKind(RouterKind.NONE, kinds.Nat.NONE),
    "mapped": HomeKind(RouterKind.MAPPED, kinds.Nat.NONE),
    "cone": HomeKind(RouterKind.CONE, kinds.Nat.CONE),
    "port-restricted": HomeKind(*_STRICT),
    "symmetric": HomeKind(*_SYMMETRIC),
    "double": HomeKind(RouterKind.DOUBLE, kinds.Nat.PORT_RESTRICTED),
}
# Their routers translate no IPv6. They let nothing unsolicited in, or everything if they are open.
WITH_IPV6: Final = {
    "ipv6": HomeKind(*_STRICT, AddressFamilies.IPV6),
    "ipv6-open": HomeKind(
        RouterKind.PORT_RESTRICTED, kinds.Nat.NONE, AddressFamilies.IPV6, ipv6_open=True
    ),
    "dual": HomeKind(*_STRICT, AddressFamilies.BOTH),
    "dual-symmetric": HomeKind(*_SYMMETRIC, AddressFamilies.BOTH),
    "dual-open": HomeKind(*_SYMMETRIC, AddressFamilies.BOTH, ipv6_open=True),
}
KINDS: Final = {
    **MATRIX,
    "forwarded": HomeKind(RouterKind.FORWARDED, kinds.Nat.NONE),
    **WITH_IPV6,
}
_MODES: Final = {
    kinds.Nat.NONE: "direct",
    kinds.Nat.CONE: "punched",
    kinds.Nat.PORT_RESTRICTED: "punched",
    kinds.Nat.SYMMETRIC: "relayed",
}


def predicted_mode(kind: str) -> str:
    """The mode that a home of this kind should state."""
    home = KINDS[kind]
    return "mapped" if home.router is RouterKind.MAPPED else _MODES[home.seen]


def predicted(left: str, right: str) -> str:
    """How the link from left to right should end: direct, punched or relayed."""
    one, other = KINDS[left], KINDS[right]
    pairs = []
    if one.families.ipv4 and other.families.ipv4:
        pairs.append((one.seen, other.seen))
    if one.families.ipv6 and other.families.ipv6:
        pairs.append((one.ipv6_seen, other.ipv6_seen))
    if any(there is kinds.Nat.NONE for _, there in pairs):
        return "direct"
    return "punched" if any(kinds.can_punch(*pair) for pair in pairs) else "relayed"


@dataclass
class CellTrial:
    """What one try of one cell gave. `why` is empty if everything worked."""

    why: str = ""
    way: str = "none"
    modes: tuple[str, str] = ("", "")
    seconds_to_mode: float = 0.0
    seconds_to_direct: float | None = None
    mb_per_s: float = 0.0


@dataclass
class Cell:
    left: str
    right: str
    trials: list[CellTrial] = field(default_factory=list)

    @property
    def predicted(self) -> str:
        return predicted(self.left, self.right)

    def result(self) -> dict[str, Any]:
        works = [trial for trial in self.trials if not trial.why]
        direct = [one.seconds_to_direct for one in works if one.seconds_to_direct is not None]
        ways = sorted({trial.way for trial in works})
        return {
            "left": self.left,
            "right": self.right,
            "works": len(works),
            "times": len(self.trials),
            "mode": "/".join(ways) or "none",
            "predicted": self.predicted,
            "as_predicted": sum(_is_as(trial.way, self.predicted) for trial in self.trials),
            "modes_as_predicted": sum(
                trial.modes == (predicted_mode(self.left), predicted_mode(self.right))
                for trial in self.trials
            ),
            "seconds_to_mode": [round(trial.seconds_to_mode, 2) for trial in works],
            "seconds_to_direct": [round(seconds, 2) for seconds in direct],
            "MB_per_s": round(statistics.median([one.mb_per_s for one in works] or [0.0]), 2),
            "why": [trial.why for trial in self.trials if trial.why],
        }


def _is_as(way: str, said: str) -> bool:
    """A hole to a home that needs none is as good as a dial, and the other way round."""
    direct = ("direct", "punched")
    return way in direct if said in direct else way == said


def add_parser(kinds_of_bench: Subparsers) -> None:
    from node.app.cli.parser import positive_count

    parser = kinds_of_bench.add_parser(
        "nat",
        help="how homes behind routers of every kind meet",
        description="Build a lab of network namespaces (as root), with homes behind routers of "
        f"these kinds: {', '.join(KINDS)}. The last ones have IPv6, behind a firewall; the dual "
        "ones have IPv4 as well. For each pair: does `potluck ping` work, does a "
        "transfer of 20 MB, which way does it go, and is that the way that was predicted? A round "
        "trip on the lab's internet takes 60 ms. Exit code 1 if a bar is missed.",
        example="scripts/bench nat\nscripts/bench nat --kinds cone symmetric --times 1 --json",
    )
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=tuple(KINDS),
        default=tuple(MATRIX),
        metavar="KIND",
        help=f"only these kinds of homes ({', '.join(MATRIX)}); mapped needs miniupnpd",
    )
    parser.add_argument(
        "--times", type=positive_count, default=3, metavar="N", help="tries of each pair (3)"
    )
    parser.set_defaults(measure=run)
    _add_round_parser(kinds_of_bench)


def run(arguments: argparse.Namespace) -> int:
    async def measure(talk: Talk) -> dict[str, Any]:
        return await measure_nat(arguments.kinds, arguments.times, talk)

    return report(arguments, measure, table)


async def measure_nat(names: Sequence[str], times: int, talk: Talk) -> dict[str, Any]:
    cells = []
    for left in names:
        cells += await _row(left, names, times, talk)
    results = [cell.result() for cell in cells]
    to_mode = [seconds for cell in results for seconds in cell["seconds_to_mode"]]
    punched = [trial for cell in cells if cell.predicted == "punched" for trial in cell.trials]
    to_direct = [trial.seconds_to_direct for trial in punched]
    in_time = [one for one in to_direct if one is not None and one <= MOST_TO_DIRECT_SECONDS]
    return {
        "cells": results,
        "seconds_to_mode_p95": _p95(to_mode),
        "seconds_to_direct_p95": _p95([one for one in to_direct if one is not None]),
        "punched": len([one for one in to_direct if one is not None]),
        "punchable": len(punched),
        "met": all(
            cell["works"] == cell["times"] == cell["as_predicted"] == cell["modes_as_predicted"]
            for cell in results
        )
        and len(in_time) >= 0.95 * len(punched)
        and (_p95(to_mode) or 0.0) <= MOST_TO_MODE_SECONDS,
        "machine": machine_facts(),
    }


def _p95(values: Sequence[float]) -> float | None:
    if not values:
        return None
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))], 2)


async def _row(left: str, names: Sequence[str], times: int, talk: Talk) -> list[Cell]:
    """All pairs with this kind on the left, in a lab of their own."""
    cells = [Cell(left, right) for right in names]
    with (
        NetworkLab(round_trip_seconds=ROUND_TRIP_SECONDS) as lab,
        tempfile.TemporaryDirectory(prefix="potluck-bench-nat-") as folder,
    ):
        homes = [
            (_home(lab, f"a{number}", left), _home(lab, f"b{number}", cell.right))
            for number, cell in enumerate(cells)
        ]
        async with _backbones(lab, Path(folder)) as addresses:
            turns = trio.CapacityLimiter(AT_ONCE)
            async with trio.open_nursery() as nursery:

                async def try_cell(cell: Cell, pair: tuple[Machine, Machine]) -> None:
                    async with turns:
                        for number in range(times):
                            home = Path(folder, f"{cell.left}-{cell.right}-{number}")
                            cell.trials.append(await _try(pair, cell, addresses, home))
                    talk(_line(cell.result()))

                for cell, pair in zip(cells, homes, strict=True):
                    nursery.start_soon(try_cell, cell, pair)
    return cells


def _home(lab: NetworkLab, name: str, kind: str) -> Machine:
    home = KINDS[kind]
    return lab.home(
        name,
        home.router,
        families=home.families,
        ipv6_open=home.ipv6_open,
        forwarded_ports=(PORT,) if home.router is RouterKind.FORWARDED else (),
    )


@asynccontextmanager
async def _backbones(
    lab: NetworkLab, folder: Path, processes: list[BenchProcess] | None = None
) -> AsyncIterator[list[str]]:
    """The addresses of nodes that relay, on the lab's internet; their processes are added."""
    addresses: list[str] = []
    async with AsyncExitStack() as running:
        for number in range(BACKBONES):
            host = lab.host(f"relay{number}", families=AddressFamilies.BOTH)
            home = folder / host.name
            home.mkdir()
            (home / "potluck.toml").write_text(
                '[relay]\nserve = true\nlimits = "circuit-rate=none"\n'
            )
            backbone = await running.enter_async_context(
                open_nat_peer(host, host.name, home, PORT, addresses)
            )
            if processes is not None:
                processes.append(backbone)
            peer = backbone.introduction["peer"]
            addresses.append(f"/ip4/{host.address}/tcp/{PORT}/p2p/{peer}")
            addresses.append(f"/ip6/{host.ipv6_address}/tcp/{PORT}/p2p/{peer}")
        yield addresses


@asynccontextmanager
async def open_nat_peer(
    machine: Machine, name: str, home: Path, port: int, bootstrap: Sequence[str]
) -> AsyncIterator[BenchProcess]:
    """A whole node on this machine that takes orders (nat_peer.py), until the block ends."""
    words = [sys.executable, "-m", "lab.bench.nat_peer", str(home), str(port), *bootstrap]
    async with open_process_of(name, machine.command(words)) as process:
        yield process


async def _try(
    pair: tuple[Machine, Machine], cell: Cell, addresses: Sequence[str], home: Path
) -> CellTrial:
    trial = CellTrial()
    for machine in pair:
        if machine.nat is not RouterKind.NONE:
            machine.router.forget()
    left, right = pair
    try:
        async with (
            open_nat_peer(left, left.name, home / "left", _port(cell.left), addresses) as here,
            open_nat_peer(right, right.name, home / "right", _port(cell.right), addresses) as there,
        ):
            ours, theirs = await here.ask("mode"), await there.ask("mode")
            trial.modes = (ours["mode"], theirs["mode"])
            trial.seconds_to_mode = max(ours["seconds"], theirs["seconds"])
            met = await here.ask(
                "meet",
                peer=theirs["peer"],
                addresses=theirs["addresses"],
                direct_within=0.5 if cell.predicted == "relayed" else DIRECT_SECONDS,
            )
            trial.seconds_to_direct = met["seconds_to_direct"]
            poured = await here.ask("pour", peer=theirs["peer"], chunks=TRANSFER_CHUNKS)
            trial.mb_per_s, trial.way = poured["MB_per_s"], poured["way"]
            await _ping(left, theirs["addresses"], home / "ping")
        for machine in pair:
            _check_released(machine)
    except BenchFailed as error:
        trial.why = str(error)
    return trial


def _port(kind: str) -> int:
    return PORT if KINDS[kind].router is RouterKind.FORWARDED else 0


def _check_released(machine: Machine) -> None:
    """BenchFailed if the router still maps a port for a node that has left."""
    if machine.nat is RouterKind.MAPPED and (places := machine.router.mapped()):
        raise BenchFailed(f"The router of {machine.name} still maps {', '.join(places)}.")


async def _ping(machine: Machine, addresses: Sequence[str], home: Path) -> None:
    """`potluck ping` from this machine: one of the addresses has to answer."""
    version = "/ip4/" if machine.families.ipv4 else "/ip6/"
    usable = [one for one in addresses if one.startswith(version)]
    ordered = sorted(usable, key=lambda one: "/192.168." in one or "/127." in one)
    words = [sys.executable, "-m", "node", "--home", str(home), "ping", "--count", "1", "--json"]
    done = None
    with trio.move_on_after(PING_SECONDS):
        done = await trio.run_process(
            machine.command([*words, ordered[0]]),
            capture_stdout=True,
            capture_stderr=True,
            check=False,
            env={**os.environ, **WHERE_WE_ARE},
        )
    if done is None or done.returncode != 0:
        said = "no answer" if done is None else done.stderr.decode()[-300:]
        raise BenchFailed(f"`potluck ping` from {machine.name} failed.", why=said)
    last = json.loads(done.stdout.splitlines()[-1])
    if last.get("received") != 1:
        raise BenchFailed(f"`potluck ping` from {machine.name} got no answer.")


def _line(cell: dict[str, Any]) -> str:
    direct = ", ".join(f"{seconds:g}" for seconds in cell["seconds_to_direct"])
    return (
        f"{cell['left']:>15}  {cell['right']:<15}  {cell['works']}/{cell['times']}  "
        f"{cell['mode']:<16}  {cell['predicted']:<8}  {cell['MB_per_s']:>6.1f}  {direct}"
        + "".join(f"\n    {why}" for why in cell["why"])
    )


def table(result: dict[str, Any]) -> str:
    """The matrix, for people."""
    head = f"{'from':>15}  {'to':<15}  work  {'way':<16}  {'foreseen':<8}  {'MB/s':>6}  s to direct"
    lines = [head, *map(_line, result["cells"])]
    lines.append(
        f"stated mode after {result['seconds_to_mode_p95']} s (p95); direct after "
        f"{result['seconds_to_direct_p95']} s (p95); {result['punched']} of "
        f"{result['punchable']} holes punched"
    )
    return "\n".join(lines)


# Rounds of averaging between homes: the same lab, the planner's view of it, and what it took.


VALUES: Final = 10_000_000
HOME_MBPS: Final = 40.0  # up and down; two cores encrypt for six such homes
PAYLOAD_SHARE: Final = 1448 / (1514 + 66 / 2)
"""The share of a line's rate that is left for values, as tbf counts frames, if both directions are
full: each also carries an acknowledgement for every second frame of the other. (The routers counted
1,068 bytes for 1,000 of values in both directions.)"""
TOLERANCE: Final = 0.2
MOST_RELAYED_SHARE: Final = 0.05
ROUNDS: Final = 6
WARM_ROUNDS_FROM: Final = 1  # the first one also meets everybody

# Kinds of the members' routers; "dial-out" is one that nobody may connect to.
PARTIES: Final = {
    "public": ("none", "cone", "cone", "symmetric", "double", "dial-out"),
    "homes": ("cone", "cone", "port-restricted", "port-restricted", "symmetric"),
}


def _add_round_parser(kinds_of_bench: Subparsers) -> None:
    parser = kinds_of_bench.add_parser(
        "nat-round",
        help="a round of averaging between homes behind routers",
        description="Average ten million values between homes behind routers of several kinds, "
        "with and without a public member, in a lab of network namespaces (as root). Every home "
        f"has {HOME_MBPS:g} Mb/s up and down, and a round trip takes 60 ms. Exit code 1 if the "
        "results differ, more than 5 % of the bytes went through a relay, or the median of "
        f"{ROUNDS - WARM_ROUNDS_FROM} rounds after the first takes over 20 % longer than planned.",
        example="scripts/bench nat-round\nscripts/bench nat-round --party homes --json",
    )
    parser.add_argument(
        "--party",
        nargs="+",
        choices=tuple(PARTIES),
        default=tuple(PARTIES),
        metavar="PARTY",
        help=f"who takes part: {', '.join(PARTIES)}",
    )
    parser.set_defaults(measure=run_rounds)


def run_rounds(arguments: argparse.Namespace) -> int:
    async def measure(talk: Talk) -> dict[str, Any]:
        parties = [await _party(name, talk) for name in arguments.party]
        return {
            "parties": parties,
            "met": all(party["met"] for party in parties),
            "machine": machine_facts(),
        }

    return report(arguments, measure, _round_lines)


def planned_seconds(names: Sequence[str], rate: float) -> float:
    """What the plan says of a round of these members, with links of so many bytes a second."""
    able = [name != "dial-out" for name in names]
    homes = [KINDS.get(name, KINDS["port-restricted"]) for name in names]
    speeds, all_of_them = [rate] * len(names), [True] * len(names)
    shares = fractions_for(
        speeds, speeds, all_of_them, best_reducers([home.seen for home in homes], able)
    )
    return predicted_seconds(shares, speeds, speeds, all_of_them, 2.0 * VALUES)


async def _party(party: str, talk: Talk) -> dict[str, Any]:
    names = PARTIES[party]
    rate = HOME_MBPS * 1e6 / 8 * PAYLOAD_SHARE
    planned = planned_seconds(names, rate)
    with (
        NetworkLab(round_trip_seconds=ROUND_TRIP_SECONDS) as lab,
        tempfile.TemporaryDirectory(prefix="potluck-bench-nat-") as folder,
    ):
        homes = [
            lab.home(
                f"m{number}",
                KINDS.get(name, KINDS["port-restricted"]).router,
                upload_bits_per_second=HOME_MBPS * 1e6,
                download_bits_per_second=HOME_MBPS * 1e6,
            )
            for number, name in enumerate(names)
        ]
        async with AsyncExitStack() as running:
            backbones: list[BenchProcess] = []
            addresses = await running.enter_async_context(_backbones(lab, Path(folder), backbones))
            members = []
            for home in homes:
                peer = open_nat_peer(home, home.name, Path(folder, home.name), 0, addresses)
                members.append(await running.enter_async_context(peer))
            rounds = await _rounds(names, members, rate, talk)
            sent, carried = await _carried(members, backbones)
    warm = [one["exchange_seconds"] for one in rounds[WARM_ROUNDS_FROM:]]
    seconds = statistics.median(warm)
    same, missed = all(one["same"] for one in rounds), sum(one["missed"] for one in rounds)
    relayed = carried / sent if sent else 0.0
    return {
        "party": party,
        "members": list(names),
        "planned_seconds": round(planned, 2),
        "exchange_seconds": round(seconds, 2),
        "exchange_seconds_each": [round(one, 2) for one in warm],
        "first_round_seconds": round(rounds[0]["seconds"], 2),
        "of_planned": round(seconds / planned, 3),
        "bit_identical": same,
        "missed": missed,
        "sent_bytes": sent,
        "relayed_bytes": carried,
        "relayed_share": round(relayed, 4),
        "why": [one["why"] for one in rounds if one["why"]],
        "met": same
        and not missed
        and relayed <= MOST_RELAYED_SHARE
        and seconds <= planned * (1 + TOLERANCE),
    }


async def _rounds(
    names: Sequence[str], members: Sequence[BenchProcess], rate: float, talk: Talk
) -> list[dict[str, Any]]:
    for number, (name, member) in enumerate(zip(names, members, strict=True)):
        told = await member.ask("mode")
        router = (await member.ask("router"))["router"]
        talk(f"{member.name} ({name}) is {told['mode']}, its router {router}")
        await member.ask(
            "hold",
            run="nat",
            values=VALUES,
            seed=number,
            up=rate,
            down=rate,
            dials_out_only=name == "dial-out",
        )
    rounds = []
    for epoch in range(ROUNDS):
        told_by: list[dict[str, Any]] = []

        async def average(member: BenchProcess, epoch: int, told_by: list[dict[str, Any]]) -> None:
            told_by.append(await member.ask("average", epoch=epoch, expected=len(members)))

        async with trio.open_nursery() as nursery:
            for member in members:
                nursery.start_soon(average, member, epoch, told_by)
        digests = [one["digest"] for one in told_by if "digest" in one]
        rounds.append(
            {
                "same": len(set(digests)) == 1,
                "missed": len(members) - len(digests),
                "seconds": max(one["seconds"] for one in told_by),
                "exchange_seconds": max(one.get("exchange_seconds", 0.0) for one in told_by),
                "why": "; ".join(one["why"] for one in told_by if one.get("why")),
            }
        )
        talk(f"round {epoch}: {rounds[-1]}")
    return rounds


async def _carried(
    members: Sequence[BenchProcess], backbones: Sequence[BenchProcess]
) -> tuple[int, int]:
    """The bytes that the members sent in all, and those that went through a relay."""
    sent = [(await member.ask("traffic"))["sent"] for member in members]
    carried = [(await backbone.ask("traffic"))["carried"] for backbone in backbones]
    return sum(sent), sum(carried)


def _round_lines(result: dict[str, Any]) -> str:
    return "\n".join(
        f"{', '.join(party['members'])}:\n"
        f"    {party['exchange_seconds']} s a round, {party['planned_seconds']} s planned "
        f"({party['of_planned']:.0%}); the first, with meeting, {party['first_round_seconds']} s\n"
        f"    {'the same bits everywhere' if party['bit_identical'] else 'RESULTS DIFFER'}; "
        + (f"{party['missed']} TIMES A MEMBER WAS MISSING; " if party["missed"] else "")
        + f"{party['relayed_share']:.2%} of {party['sent_bytes'] / 1e6:.0f} MB through relays"
        + "".join(f"\n    {why}" for why in party["why"])
        for party in result["parties"]
    )
