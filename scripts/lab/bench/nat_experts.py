"""`scripts/bench nat-experts`: a volunteer behind a strict router serves a run's experts.

A closed run's auth server and backbone stand on the internet of a network lab (lab/net/). All of
the run's experts are served from one home behind a symmetric router, and one volunteer trains
behind another router. So each step of the trainer needs calls to the server: over the relay if its
own router is port-restricted, and over a punched link if it is a cone.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lab import Talk
from lab.bench.closed_run import Heard, VolunteerPlace, has, open_closed_run
from lab.bench.command import report
from lab.bench.machine import machine_facts
from lab.bench.nat import ROUND_TRIP_SECONDS
from lab.bench.nat_join import ANYWHERE
from lab.net import NetworkLab, RouterKind
from node.run.template import small_with_experts

if TYPE_CHECKING:
    from node.app.cli.parser import Subparsers

WAYS: Final = {"port-restricted": "relayed", "cone": "punched"}
"""By the trainer's router: how it meets a symmetric one."""
STEPS: Final = 5

SIZES: Final = (2, 2)
DEFINITION: Final = small_with_experts("bench", batch=32, sizes=SIZES)
CELLS: Final = str(2 * prod(SIZES))


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "nat-experts",
        help="serving experts from behind a symmetric router",
        description="Serve all experts of a run from a home behind a symmetric router, and train "
        "with them from behind other routers, in a lab of network namespaces (as root). Exit code "
        "1 if a link goes another way than predicted.",
        example="scripts/bench nat-experts\nscripts/bench nat-experts --router cone --json",
    )
    parser.add_argument(
        "--router",
        nargs="+",
        choices=tuple(WAYS),
        default=tuple(WAYS),
        metavar="KIND",
        help=f"the trainer's router: {', '.join(WAYS)}",
    )
    parser.set_defaults(measure=run)


def run(arguments: argparse.Namespace) -> int:
    return report(arguments, lambda talk: measure_nat_experts(list(arguments.router), talk), lines)


async def measure_nat_experts(routers: Sequence[str], talk: Talk) -> dict[str, Any]:
    trainers = [await _train_behind(router, talk) for router in routers]
    return {
        "trainers": trainers,
        "met": all(one["way"] == WAYS[one["router"]] for one in trainers),
        "machine": machine_facts(),
    }


async def _train_behind(router: str, talk: Talk) -> dict[str, Any]:
    with (
        NetworkLab(round_trip_seconds=ROUND_TRIP_SECONDS) as lab,
        tempfile.TemporaryDirectory(prefix="potluck-bench-") as folder,
    ):
        hub = lab.host("hub")
        there = VolunteerPlace(hub.address, tuple(hub.command([])))
        homes = {"server": RouterKind.SYMMETRIC, "trainer": RouterKind(router)}
        places = {
            name: VolunteerPlace(ANYWHERE, tuple(lab.home(name, kind).command([])))
            for name, kind in homes.items()
        }
        async with open_closed_run(Path(folder), DEFINITION, there) as run:
            server = run.join(
                "server",
                await run.code_for("server"),
                *("--experts", CELLS),
                command=("experts", "serve"),
                place=places["server"],
            )
            await run.until(lambda: has(server, "experts_taken"), "taking the experts", server)
            talk(f"the server has its experts after {_seconds(server, 'experts_taken'):.1f} s")
            code, place = await run.code_for("trainer"), places["trainer"]
            trainer = run.join("trainer", code, "--experts", "0", place=place)
            await run.until(lambda: len(_own_steps(trainer)) >= STEPS, "its steps", trainer, server)
            served = await run.ask("server", "status", place=places["server"])
            links = (await run.ask("trainer", "status", place=place))["links"]
    steps = _own_steps(trainer)
    (link,) = [one for one in links if one["peer"] == served["peer_id"]]
    first = steps[0] - trainer.began
    talk(f"{router}: {link['reach']}, {STEPS} steps, the first {first:.1f} s after joining")
    return {
        "router": router,
        "server_mode": served["connectivity"]["mode"],
        "way": link["reach"],
        "round_trip_ms": link["round_trip_ms"],
        "seconds_to_experts": round(_seconds(server, "experts_taken"), 2),
        "seconds_to_first_step": round(first, 2),
        "seconds_a_step": round((steps[-1] - steps[0]) / (len(steps) - 1), 2),
    }


def _own_steps(one: Heard) -> list[float]:
    return [at for at, event in one.all("step_taken") if event["own_samples"]]


def _seconds(one: Heard, kind: str) -> float:
    return one.all(kind)[0][0] - one.began


def lines(result: dict[str, Any]) -> str:
    return "\n".join(
        f"a server behind a symmetric router ({one['server_mode']}), a trainer behind a "
        f"{one['router']} one: {one['way']}, {one['round_trip_ms']:.0f} ms; first step "
        f"after {one['seconds_to_first_step']:g} s, "
        f"then every {one['seconds_a_step']:g} s"
        for one in result["trainers"]
    )
