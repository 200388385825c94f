"""`scripts/bench nat-join`: joining a run from behind a router, and the troubles of homes.

A closed run's auth server and backbone stand on the internet of a network lab (lab/net/), and
volunteers join from homes behind routers, with an invite, a code, and no other flag than the one
that limits threads. The clock starts before their process and stops when it reports that others
have made a step with its samples.

Then each volunteer has the troubles of homes: its router forgets its connections, gets another
address, the machine gets another address, or sleeps. Each time the clock stops at its next accepted
sample.
"""

from __future__ import annotations

import argparse
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import trio

from lab import Talk
from lab.bench.closed_run import (
    ClosedRun,
    Heard,
    Size,
    VolunteerPlace,
    open_closed_run,
)
from lab.bench.command import report
from lab.bench.machine import machine_facts
from lab.bench.nat import ROUND_TRIP_SECONDS
from lab.net import Machine, NetworkLab, RouterKind

if TYPE_CHECKING:
    from node.app.cli.parser import Subparsers

MOST_JOIN_SECONDS: Final = 60.0
MOST_TROUBLE_SECONDS: Final = 20.0
SLEEP_SECONDS: Final = 60.0
KINDS: Final = {"cone": RouterKind.CONE, "symmetric": RouterKind.SYMMETRIC}
SIZE: Final = Size(width=64, layers=2, batch=64)  # a step every second or two
ANYWHERE: Final = "0.0.0.0"

Trouble = Callable[[Machine, Heard], Awaitable[float]]
"""Causes it, and returns the moment from which the volunteer could go on."""


async def _router_forgets(home: Machine, _one: Heard) -> float:
    home.router.forget()
    return time.monotonic()


async def _router_has_another_address(home: Machine, _one: Heard) -> float:
    home.router.change_address()
    return time.monotonic()


async def _machine_has_another_address(home: Machine, _one: Heard) -> float:
    home.change_address()
    return time.monotonic()


async def _sleeps(home: Machine, one: Heard) -> float:
    """The process is stopped; meanwhile the router forgets, as after so long a silence."""
    one.child.send_signal(signal.SIGSTOP)
    await trio.sleep(SLEEP_SECONDS)
    home.router.forget()
    one.child.send_signal(signal.SIGCONT)
    return time.monotonic()


TROUBLES: Final[dict[str, Trouble]] = {
    "router_reboot": _router_forgets,
    "router_address": _router_has_another_address,
    "machine_address": _machine_has_another_address,
    "sleep": _sleeps,
}


def add_parser(kinds: Subparsers) -> None:
    parser = kinds.add_parser(
        "nat-join",
        help="joining a run from behind a router, and the troubles of homes",
        description="From `potluck join` behind a router to the first accepted sample, against an "
        "auth server and a backbone, in a lab of network namespaces (as root); then, for each "
        "volunteer, to the next accepted sample after its router or its machine had a trouble. "
        "Exit code 1 if joining takes over 60 s, or a trouble over 20 s.",
        example="scripts/bench nat-join\n"
        "scripts/bench nat-join --trouble sleep --router symmetric --times 3",
    )
    parser.add_argument(
        "--trouble",
        nargs="*",
        choices=tuple(TROUBLES),
        default=tuple(TROUBLES),
        metavar="TROUBLE",
        help=f"which troubles come: {', '.join(TROUBLES)}; none without a name",
    )
    parser.add_argument(
        "--router",
        nargs="+",
        choices=tuple(KINDS),
        default=tuple(KINDS),
        metavar="KIND",
        help=f"which volunteers have troubles, by their routers: {', '.join(KINDS)}",
    )
    parser.add_argument("--times", type=int, default=1, help="how often each trouble comes")
    parser.set_defaults(measure=run)


def run(arguments: argparse.Namespace) -> int:
    async def measure(talk: Talk) -> dict[str, Any]:
        troubles = list(arguments.trouble) * arguments.times
        return await measure_nat_join(troubles, arguments.router, talk)

    return report(arguments, measure, lines)


async def measure_nat_join(
    troubles: Sequence[str], routers: Sequence[str], talk: Talk
) -> dict[str, Any]:
    """`routers`: of the volunteers that have these troubles, one after the other."""
    joined: dict[str, float] = {}
    modes: dict[str, str] = {}
    recovered: dict[str, dict[str, list[float]]] = {}
    with (
        NetworkLab(round_trip_seconds=ROUND_TRIP_SECONDS) as lab,
        tempfile.TemporaryDirectory(prefix="potluck-bench-") as folder,
    ):
        hub = lab.host("hub")
        there = VolunteerPlace(hub.address, tuple(hub.command([])))
        async with open_closed_run(Path(folder), SIZE.definition(), there) as run:
            volunteers = {}
            for name, nat in KINDS.items():
                home = lab.home(name, nat)
                place = VolunteerPlace(ANYWHERE, tuple(home.command([])))
                one = run.join(name, await run.code_for(name), place=place)
                joined[name] = await _until_accepted(run, one, one.began, 0)
                status = await run.ask(name, "status", place=place)
                modes[name] = status["connectivity"]["mode"]
                talk(f"{name}: {modes[name]}, first sample after {joined[name]:.1f} s")
                volunteers[name] = home, one
            for name in routers:
                home, one = volunteers[name]
                took = recovered[name] = {trouble: [] for trouble in troubles}
                for trouble in troubles:
                    began = await TROUBLES[trouble](home, one)
                    seconds = await _until_accepted(run, one, began, len(one.events))
                    talk(f"{name}, {trouble}: training again after {seconds:.1f} s")
                    took[trouble].append(round(seconds, 2))
    longest = max(
        (seconds for took in recovered.values() for each in took.values() for seconds in each),
        default=0.0,
    )
    return {
        "seconds_to_first_sample": {name: round(at, 2) for name, at in joined.items()},
        "modes": modes,
        "seconds_after_trouble": recovered,
        "met": max(joined.values()) <= MOST_JOIN_SECONDS and longest <= MOST_TROUBLE_SECONDS,
        "machine": machine_facts(),
    }


async def _until_accepted(run: ClosedRun, one: Heard, began: float, after: int) -> float:
    """Seconds until the end of a round with its samples that began after that moment. (The result
    of another may have been in the machine already.)"""

    def found() -> float | None:
        for at, event in one.all("step_taken", after):
            is_in_it = event["own_samples"] and len(event["members"]) > 1
            if is_in_it and at - event["averaging_seconds"] >= began:
                return at
        return None

    await run.until(lambda: found() is not None, f"a step with {one.child.name}", one)
    at = found()
    assert at is not None
    return at - began


def lines(result: dict[str, Any]) -> str:
    told = [
        f"behind a {name} router: {result['modes'][name]}, first accepted sample after {at:g} s"
        for name, at in result["seconds_to_first_sample"].items()
    ]
    told += [
        f"behind a {name} router, {trouble.replace('_', ' ')}: the next one "
        f"{', '.join(f'{each:g}' for each in seconds)} s later"
        for name, took in result["seconds_after_trouble"].items()
        for trouble, seconds in took.items()
    ]
    return "\n".join(told)
