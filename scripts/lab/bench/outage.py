"""`scripts/bench outage`: a volunteer's network goes, its machine sleeps, its address changes.

Three volunteers train in a closed run, each in a network of its own (`Cables`). One of them
is hit by one trouble after another (`TROUBLES`), for some seconds each:

    stopped     its process is stopped, as when a lid is closed
    pulled      its interface is down
    swallowed   its interface is up, but all packets are lost
    moved       it has another address from now on

It has to come back by itself. The bench measures the time from the end of the trouble until others
have made a step with its samples (`back_seconds`), its messages meanwhile, and the effect on the
others: the longest time without a step of theirs, and whether all peers report the same history for
each epoch, which is a digest over all steps (`differing_steps`).

A returning peer has to wait for the end of a step. So the time of a step of this run is printed
beside it.

`Cables` can be pulled, made to swallow, and plugged in elsewhere.

    hub (organiser, auth server)  10.78.0.1  ══ bridge ══╦═ cable ═ eth0 of ann   10.78.1.1
                                                         ╚═ cable ═ eth0 of cleo  10.78.1.2

    async with open_cables(("ann", "cleo")) as cables:
        run.join("cleo", code, place=cables.place_of("cleo"))
        await cables.pull("cleo")               # its interface is down, as in a plane
        await cables.swallow("cleo")            # it looks up, and nothing arrives anywhere
        await cables.plug("cleo")               # as it was
        await cables.move("cleo")               # another address, as in another house

Each network belongs to a process that only holds it, and ends with its stdin; the network, its
cable and all changes are gone with that. No interface of this machine is touched.

The kernel notices a cable that is pulled, and then refuses to send. One that swallows is noticed
only by a peer that waits for an answer.
"""

from __future__ import annotations

import argparse
import re
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import trio

from lab import Talk
from lab.bench.closed_run import ClosedRun, Heard, Size, VolunteerPlace, accepted, open_closed_run
from lab.bench.command import report
from lab.bench.machine import machine_facts
from lab.bench.own_network import NoOwnNetwork, check_own_networks
from lab.bench.processes import BenchFailed
from node.core.wrong_use import WrongUse

if TYPE_CHECKING:
    from node.app.cli.parser import Subparsers


HUB: Final = "10.78.0.1"
PREFIX: Final = 16
HOLD: Final = ("unshare", "--net", "sh", "-c", "echo held; exec cat")
COMMAND_SECONDS: Final = 30.0


class Cables:
    """Made by `open_cables`. Invariant: `_hosts` has the address that each network has now."""

    def __init__(self, hub: int, holders: dict[str, int]) -> None:
        self._hub, self._holders = hub, holders
        self._hosts = {name: f"10.78.1.{number + 1}" for number, name in enumerate(holders)}
        self._moves = 0

    @property
    def hub(self) -> VolunteerPlace:
        return VolunteerPlace(HUB, _into(self._hub))

    def place_of(self, name: str) -> VolunteerPlace:
        """It listens on all its addresses, because they may change."""
        return VolunteerPlace("0.0.0.0", _into(self._holders[name]))

    async def lay(self) -> None:
        for command in (
            "link set lo up",
            "link add bridge0 type bridge",
            "link set bridge0 up",
            f"addr add {HUB}/{PREFIX} dev bridge0",
        ):
            await _ip(self._hub, command)
        for name, holder in self._holders.items():
            port = self._port(name)
            await _ip(self._hub, f"link add {port} type veth peer name eth0 netns {holder}")
            await _ip(self._hub, f"link set {port} master bridge0 up")
            await _ip(holder, "link set lo up")
            await _ip(holder, f"addr add {self._hosts[name]}/{PREFIX} dev eth0")
            await _ip(holder, "link set eth0 up")

    async def pull(self, name: str) -> None:
        await _ip(self._holders[name], "link set eth0 down")

    async def swallow(self, name: str) -> None:
        await _ip(self._hub, f"link set {self._port(name)} nomaster")

    async def plug(self, name: str) -> None:
        """In again, after either."""
        await _ip(self._hub, f"link set {self._port(name)} master bridge0")
        await _ip(self._holders[name], "link set eth0 up")

    async def move(self, name: str) -> None:
        """Another address, and the one before is gone."""
        holder, before = self._holders[name], self._hosts[name]
        self._moves += 1
        self._hosts[name] = f"10.78.2.{self._moves}"
        await _ip(holder, f"addr del {before}/{PREFIX} dev eth0")
        await _ip(holder, f"addr add {self._hosts[name]}/{PREFIX} dev eth0")

    def _port(self, name: str) -> str:
        return f"port{list(self._holders).index(name)}"


@asynccontextmanager
async def open_cables(names: Sequence[str]) -> AsyncIterator[Cables]:
    """A network for the hub and one for each name, until the block ends. NoOwnNetwork where this
    machine or this user cannot have them."""
    check_own_networks()
    holders: list[trio.Process] = []
    try:
        for _ in range(len(names) + 1):
            holders.append(await _held())
        hub, *others = (one.pid for one in holders)
        cables = Cables(hub, dict(zip(names, others, strict=True)))
        await cables.lay()
        yield cables
    finally:
        with trio.CancelScope(shield=True):
            for one in holders:
                one.kill()
                await one.wait()


async def _held() -> trio.Process:
    process = await trio.lowlevel.open_process(
        HOLD, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    with trio.move_on_after(COMMAND_SECONDS):
        if await process.stdout.receive_some():
            return process
    process.kill()
    raise NoOwnNetwork(
        "A network of its own cannot be had.",
        why="`unshare --net` failed.",
        advice="Run it as root on the machine itself, or in a container with CAP_SYS_ADMIN.",
    )


def _into(holder: int) -> tuple[str, ...]:
    return ("nsenter", f"--net=/proc/{holder}/ns/net", "--")


async def _ip(holder: int, command: str) -> None:
    """One command of iproute2 in that network."""
    with trio.fail_after(COMMAND_SECONDS):
        done = await trio.run_process(
            [*_into(holder), "ip", *command.split()], capture_stderr=True, check=False
        )
    if done.returncode:
        raise BenchFailed(
            f"`ip {command}` failed.", why=done.stderr.decode(errors="replace").strip()
        )


OTHERS: Final = ("ann", "ben")
VICTIM: Final = "cleo"
BAR_SECONDS: Final = 30.0  # half of the minute in which a volunteer is to contribute
BETWEEN_SECONDS: Final = 4.0  # of ordinary training, before the next trouble
TOLD: Final = (
    "network_lost",
    "network_back",
    "fell_behind",
    "caught_up",
    "round_failed",
    "gradients_dropped",
    "fetching_failed",
    "left",
)

TROUBLES: Final = ("stopped", "pulled", "swallowed", "moved")


@dataclass(frozen=True)
class NetworkTrouble:
    kind: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.kind}:{self.seconds:g}"


def trouble(text: str) -> NetworkTrouble:
    """`pulled:60`; WrongUse if it is none."""
    found = re.fullmatch(r"([a-z]+):([0-9]{1,5}(?:\.[0-9]+)?)", text)
    if found is None or found[1] not in TROUBLES:
        raise WrongUse(
            f"{text!r} is no trouble.",
            why=f"It has to be one of {', '.join(TROUBLES)}, a colon, and seconds.",
            advice="Such as pulled:60.",
        )
    return NetworkTrouble(found[1], float(found[2]))


@dataclass(frozen=True)
class OutageEffort:
    troubles: Sequence[NetworkTrouble]
    size: Size = field(default_factory=lambda: Size(width=64, layers=2, batch=512))


@dataclass(frozen=True)
class _Lab:
    run: ClosedRun
    cables: Cables
    others: list[Heard]
    victim: Heard


async def measure_outage(effort: OutageEffort, say: Talk = lambda _line: None) -> dict[str, Any]:
    """The figures. BenchFailed if a volunteer does not come back at all."""
    began, machine = time.monotonic(), machine_facts()
    told = []
    with tempfile.TemporaryDirectory(prefix="potluck-bench-") as folder:
        async with (
            open_cables((*OTHERS, VICTIM)) as cables,
            open_closed_run(Path(folder), effort.size.definition(), cables.hub) as run,
        ):
            say(f"{len(OTHERS) + 1} volunteers join")
            everybody = [await _joined(run, cables, name) for name in (*OTHERS, VICTIM)]
            lab = _Lab(run, cables, everybody[:-1], everybody[-1])
            for one in effort.troubles:
                say(f"{VICTIM} is {one.kind} for {one.seconds:g} s")
                told.append(await _hit(lab, one))
    return {
        "troubles": told,
        "met": all(one["met"] for one in told),
        "bar_seconds": BAR_SECONDS,
        "machine": machine,
        "bench_seconds": round(time.monotonic() - began, 1),
    }


async def _joined(run: ClosedRun, cables: Cables, name: str) -> Heard:
    code = await run.code_for(name)
    one = run.join(name, code, place=cables.place_of(name))
    if name == OTHERS[0]:  # the first of all: there is no other peer to accept its samples
        await run.until(lambda: bool(one.all("step_taken")), f"the first step of {name}", one)
    else:
        await run.until(lambda: accepted(one) is not None, f"the first samples of {name}", one)
    return one


async def _hit(lab: _Lab, one: NetworkTrouble) -> dict[str, Any]:
    victim, others = lab.victim, lab.others
    everybody = [*others, victim]
    await trio.sleep(BETWEEN_SECONDS)
    before = len(victim.events)
    seen = [len(other.events) for other in others]
    began = time.monotonic()
    await _begin(lab, one)
    await trio.sleep(one.seconds)
    await _end(lab, one)
    ended = time.monotonic()

    def is_back() -> bool:
        return any(
            at > ended and event["own_samples"] and len(event["members"]) > 1
            for at, event in victim.all("step_taken", before)
        )

    await lab.run.until(is_back, f"the end of {one}", *everybody)
    back = time.monotonic()
    gaps = [longest_gap(other, began, back) for other in others]
    failed = sum(
        len(other.all("round_failed", start)) for other, start in zip(others, seen, strict=True)
    )
    since = [
        replace(each, events=each.events[start:])
        for each, start in zip(everybody, [*seen, before], strict=True)
    ]
    figures: dict[str, Any] = {
        "trouble": str(one),
        "back_seconds": round(back - ended, 2),
        "told": [
            _line(at - began, event) for at, event in victim.events[before:] if _matters(event)
        ],
        "others_longest_without_step_seconds": round(max(gaps), 2),
        "others_step_seconds": round(
            statistics.median(_step_seconds(other) for other in others), 2
        ),
        "others_rounds_failed": failed,
        "differing_steps": differing_steps(since),
    }
    figures["met"] = not figures["differing_steps"] and figures["back_seconds"] <= BAR_SECONDS
    return figures


async def _begin(lab: _Lab, one: NetworkTrouble) -> None:
    match one.kind:
        case "stopped":
            lab.victim.child.send_signal(signal.SIGSTOP)
        case "pulled":
            await lab.cables.pull(VICTIM)
        case "swallowed":
            await lab.cables.swallow(VICTIM)
        case _:
            await lab.cables.move(VICTIM)


async def _end(lab: _Lab, one: NetworkTrouble) -> None:
    if one.kind == "stopped":
        lab.victim.child.send_signal(signal.SIGCONT)
    else:
        await lab.cables.plug(VICTIM)


def differing_steps(everybody: Iterable[Heard]) -> list[dict[str, Any]]:
    """The epochs for which peers report different histories: the peers of each history, with the
    number of members of their groups."""
    told: dict[int, dict[str, list[str]]] = {}
    for one in everybody:
        for _, event in one.all("step_taken"):
            of_epoch = told.setdefault(int(event["epoch"]), {})
            who = f"{one.child.name} of {max(1, len(event['members']))}"
            of_epoch.setdefault(event["history"], []).append(who)
    return [
        {"epoch": epoch, "told": list(of_epoch.values())}
        for epoch, of_epoch in sorted(told.items())
        if len(of_epoch) > 1
    ]


def _matters(event: dict[str, Any]) -> bool:
    return event.get("event") in TOLD


def _line(seconds: float, event: dict[str, Any]) -> str:
    words = event.get("reason") or event.get("seconds") or ""
    return f"{seconds:.1f} s: {event['event']} {words}".strip()


def longest_gap(one: Heard, since: float, until: float) -> float:
    moments = [at for at, _ in one.all("step_taken") if since <= at <= until]
    return max(later - earlier for earlier, later in pairwise([since, *moments, until]))


def _step_seconds(one: Heard) -> float:
    moments = [at for at, _ in one.all("step_taken")]
    between = [later - earlier for earlier, later in pairwise(moments)]
    return statistics.median(between) if between else 0.0


# Flags and output


USUAL = ("stopped:5", "stopped:40", "pulled:3", "pulled:60", "swallowed:60", "moved:0")


def add_parser(kinds: Subparsers) -> None:
    parser = kinds.add_parser(
        "outage",
        help="a volunteer's network goes, its machine sleeps, its address changes",
        description="Start a closed run on this machine, with three volunteers in network "
        "namespaces of their own (as root, on Linux), and give one of them one trouble after "
        "another:\n\n"
        "  stopped    its process is stopped, as when a lid is closed\n"
        "  pulled     its interface is down\n"
        "  swallowed  its interface is up, but all packets are lost\n"
        "  moved      it has another address from now on\n\n"
        "It has to come back by itself. The result says how long after each trouble's end the "
        "others made a step with its samples, how long the others made no step, and whether all "
        f"made the same steps. Without TROUBLE: {', '.join(USUAL)}. The exit code is 1 if it takes "
        "more than 30 s to be back, or if steps differ.",
        example="scripts/bench outage\nscripts/bench outage pulled:600 --json\n"
        "scripts/bench outage stopped:120 moved:0",
    )
    parser.set_defaults(measure=run)
    parser.add_argument(
        "troubles",
        metavar="TROUBLE",
        nargs="*",
        help="a trouble, a colon, and its length in seconds: pulled:60",
    )


def run(arguments: argparse.Namespace) -> int:
    effort = OutageEffort(tuple(trouble(one) for one in arguments.troubles or USUAL))

    return report(arguments, partial(measure_outage, effort), _lines)


def _lines(result: dict[str, Any]) -> str:
    lines = []
    for one in result["troubles"]:
        differs = (
            f"; NOT THE SAME STEPS: {one['differing_steps']}" if one["differing_steps"] else ""
        )
        lines.append(
            f"{one['trouble']:15}back after {one['back_seconds']:.1f} s; the others were at most "
            f"{one['others_longest_without_step_seconds']:.1f} s without a step (usually "
            f"{one['others_step_seconds']:.1f} s){differs}"
        )
        lines += [f"    {told}" for told in one["told"]]
    lines.append("all as it must be" if result["met"] else "NOT as it must be")
    return "\n".join(lines)
