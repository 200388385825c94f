"""`scripts/bench nat-relays`: relays die, are full, or lie, and all backbones go for two minutes.

Everything is real: `potluck backbone`, the auth server and `potluck join`, in a lab of network
namespaces (lab/net/), behind routers. Where a transfer has to go through a relay, its ends are
whole nodes that take orders (nat_peer.py), behind symmetric routers, which cannot meet directly.

    killed  the relay of a transfer is killed, then that of a round of averaging, then all relays,
            and then they are started again
    silent  the relay of a transfer loses all its packets
    full    the only relay has no place left; and for another node, one of two
    lies    a relay promises large circuits and cuts them after a megabyte (lying_relay.py)
    outage  all backbones of a run are killed for two minutes, while volunteers train

What a node says of itself is read several times a second from its control socket, as `potluck
status` does, with the moment (`WatchedHome`). All processes of the bench share one clock.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import trio

from lab import Talk
from lab.bench.closed_run import (
    ClosedRun,
    Heard,
    Size,
    VolunteerPlace,
    accepted,
    has,
    open_closed_run,
)
from lab.bench.command import report
from lab.bench.machine import machine_facts
from lab.bench.nat import PORT, ROUND_TRIP_SECONDS, open_nat_peer
from lab.bench.outage import differing_steps, longest_gap
from lab.bench.processes import BenchFailed, BenchProcess, open_process_of
from lab.net import Machine, NetworkLab, RouterKind
from nat.reservations import WANTED
from node.core.configuration import read_configuration
from node.core.control_client import ask_once
from node.core.wrong_use import WrongUse
from protocols.errors import PotluckError

if TYPE_CHECKING:
    from trio_typing import TaskStatus

    from node.app.cli.parser import Subparsers

MOST_PLACE_SECONDS: Final = 15.0  # from a trouble, or its end, to places elsewhere or to words
LOOK_SECONDS: Final = 0.25
WAIT_SECONDS: Final = 60.0  # for something that has a bar of MOST_PLACE_SECONDS
STATUS_SECONDS: Final = 5.0
RELAYS: Final = ("one", "two", "three")
CHUNKS: Final = 4  # of a transfer; a backbone carries one of them in a second
INTO_TRANSFER_SECONDS: Final = 4.5  # it begins three seconds after the link
VALUES: Final = 8_000_000  # of a round: eight seconds each way through such a relay
INTO_ROUND_SECONDS: Final = 6.0
LIAR_CHUNKS: Final = 3
ROUND_TRIES: Final = 6
CARRY_SECONDS: Final = 60.0
RELAY_BYTES_PER_SECOND: Final = 1e6
MOST_GROWTH_BYTES: Final = 64e6  # of a node, while a relay cuts its transfers again and again
OUTAGE_SECONDS: Final = 120.0
SETTLE_SECONDS: Final = 10.0
AFTER_SECONDS: Final = 15.0
SIZE: Final = Size(width=64, layers=2, batch=64)  # a step every second or two
VOLUNTEERS: Final = {
    "left": RouterKind.CONE,
    "right": RouterKind.CONE,
    "far": RouterKind.SYMMETRIC,
}
ANYWHERE: Final = "0.0.0.0"


# ---- watching nodes


@dataclass(frozen=True)
class Sight:
    """What a node said at one moment. By peer, `ways`: its links; `through`: their addresses."""

    at: float
    peer: str
    mode: str
    relays: frozenset[str]
    trouble: str
    ways: Mapping[str, str]
    through: Mapping[str, str]
    memory_bytes: int


@dataclass
class WatchedHome:
    """One node, in this home."""

    name: str
    home: Path
    seen: list[Sight] = field(default_factory=list)

    async def run(self) -> None:
        """Look at it until cancelled. A node that does not answer is not there."""
        path = read_configuration({}, environment={}, home=str(self.home)).places.control_socket
        while True:
            with suppress(PotluckError):
                self.seen.append(_moment_of(await trio.to_thread.run_sync(_status_at, path)))
            await trio.sleep(LOOK_SECONDS)

    async def until(self, holds: Callable[[Sight], bool], since: float) -> float | None:
        """How long after that moment this held for the first time; None if it did not in time."""
        found: list[float] = []
        with trio.move_on_after(WAIT_SECONDS):
            while not found:
                await trio.sleep(LOOK_SECONDS)
                found = [one.at - since for one in self.seen if one.at >= since and holds(one)]
        return found[0] if found else None

    def at(self, moment: float) -> Sight:
        """What it said last before this moment."""
        return [one for one in self.seen if one.at <= moment or one is self.seen[0]][-1]


def _status_at(path: Path) -> dict[str, Any]:
    status: dict[str, Any] = ask_once(path, "status", silence_seconds=STATUS_SECONDS)
    return status


def _moment_of(status: dict[str, Any]) -> Sight:
    told, links = status["connectivity"], status["links"]
    return Sight(
        time.monotonic(),
        status["peer_id"],
        told["mode"],
        frozenset(told["relays"]),
        told["trouble"],
        {link["peer"]: link["reach"] for link in links},
        {link["peer"]: link["address"] for link in links},
        status["memory_bytes"] or 0,
    )


def _is_placed(without: frozenset[str], at_least: int = WANTED) -> Callable[[Sight], bool]:
    return lambda moment: len(moment.relays - without) >= at_least


def _says(moment: Sight) -> bool:
    return not moment.relays and bool(moment.trouble)


def _in_time(*seconds: float | None) -> bool:
    return all(one is not None and one <= MOST_PLACE_SECONDS for one in seconds)


def _worst(*seconds: float | None) -> float | None:
    """The longest of these times; None if something never happened."""
    known = [one for one in seconds if one is not None]
    return round(max(known), 2) if len(known) == len(seconds) else None


# ---- relays and homes


@dataclass
class _Home(WatchedHome):
    """A home's node, which takes orders."""

    process: BenchProcess = field(kw_only=True)


class _Street:
    """Relays on the internet of a lab, and homes behind symmetric routers, until the end."""

    def __init__(self, lab: NetworkLab, folder: Path, nursery: trio.Nursery) -> None:
        self._lab = lab
        self._folder = folder
        self._nursery = nursery
        self._hosts: dict[str, Machine] = {}
        self._relays: dict[str, BenchProcess] = {}
        self.peers: dict[str, str] = {}
        """The peer id of each relay, by its name."""

    def address(self, relay: str) -> str:
        return f"/ip4/{self._hosts[relay].address}/tcp/{PORT}/p2p/{self.peers[relay]}"

    def name_of(self, peer: str) -> str:
        return next((name for name, one in self.peers.items() if one == peer), "")

    async def start_relays(self, *names: str, limits: str = "") -> None:
        """Start these, or start them again: they have the same keys and ports."""
        async with trio.open_nursery() as starting:
            for name in names:
                words = ["-m", "node", "--home", str(self._folder / name), "backbone"]
                words += ["--relay-only", "--json", "--http", "127.0.0.1:0"]
                words += ["--listen", f"/ip4/0.0.0.0/tcp/{PORT}"]
                words += ["--relay-limits", limits] if limits else []
                starting.start_soon(self._started, name, words)

    async def start_liar(self, name: str) -> None:
        await self._started(name, ["-m", "lab.bench.lying_relay", str(PORT)])

    def kill(self, *names: str) -> float:
        for name in names:
            self._relays[name].send_signal(signal.SIGKILL)
        return time.monotonic()

    @contextmanager
    def killed(self, name: str) -> Iterator[None]:
        """It is dead from here on."""
        self.kill(name)
        yield

    @contextmanager
    def cut_off(self, name: str) -> Iterator[None]:
        """All its packets are lost, in silence, during the block."""
        with self._hosts[name].blackout():
            yield

    async def start_homes(self, relays: Sequence[str], *names: str) -> list[_Home]:
        """Nodes that join at these relays, once they have said how they are reached."""
        homes: dict[str, _Home] = {}

        async def start(name: str) -> None:
            homes[name] = await self._nursery.start(self._run_home, name, relays)

        async with trio.open_nursery() as starting:
            for name in names:
                starting.start_soon(start, name)
        return [homes[name] for name in names]

    async def _started(self, name: str, words: Sequence[str]) -> None:
        if name not in self._hosts:
            self._hosts[name] = self._lab.host(name)
        process = await self._nursery.start(self._run, name, words)
        self._relays[name] = process
        self.peers[name] = process.introduction["peer_id"]

    async def _run_home(
        self,
        name: str,
        relays: Sequence[str],
        task_status: TaskStatus[_Home] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        machine, folder = self._lab.home(name, RouterKind.SYMMETRIC), self._folder / name
        bootstrap = [self.address(relay) for relay in relays]
        async with open_nat_peer(machine, name, folder, 0, bootstrap) as process:
            home = _Home(name, folder, process=process)
            self._nursery.start_soon(home.run)
            await process.ask("mode")
            await home.until(lambda _: True, 0.0)
            task_status.started(home)
            await trio.sleep_forever()

    async def _run(
        self,
        name: str,
        words: Sequence[str],
        task_status: TaskStatus[BenchProcess] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        command = self._hosts[name].command([sys.executable, *words])
        async with open_process_of(name, command) as process:
            task_status.started(process)
            try:
                await trio.sleep_forever()
            finally:
                process.send_signal(signal.SIGKILL)


@asynccontextmanager
async def _open_street() -> AsyncIterator[_Street]:
    with (
        NetworkLab(round_trip_seconds=ROUND_TRIP_SECONDS) as lab,
        tempfile.TemporaryDirectory(prefix="potluck-bench-") as folder,
    ):
        async with trio.open_nursery() as nursery:
            yield _Street(lab, Path(folder), nursery)
            nursery.cancel_scope.cancel()


async def _meet(street: _Street, near: _Home, far: _Home, via: str = "") -> str:
    """Link two homes through a relay; the other's peer id. `via`: first by this one."""
    told = await far.process.ask("mode")
    last = street.peers.get(via, "")
    addresses = sorted(told["addresses"], key=lambda one: bool(last) and last in one)
    met = await near.process.ask("meet", peer=told["peer"], addresses=addresses, direct_within=0.5)
    if met["way"] != "relayed":
        raise BenchFailed(f"Two homes behind symmetric routers are linked as {met['way']}.")
    peer: str = told["peer"]
    return peer


def _relay_between(street: _Street, home: WatchedHome, peer: str, at: float) -> str:
    """The name of the relay through which this peer was linked at that moment."""
    address = home.at(at).through.get(peer, "")
    return street.name_of(address.partition("/p2p-circuit")[0].rpartition("/p2p/")[2])


# ---- the troubles


async def _relay_of_a_transfer_goes(
    street: _Street,
    near: _Home,
    far: _Home,
    trouble: Callable[[str], AbstractContextManager[None]],
) -> dict[str, Any]:
    """A transfer through a relay, which has a trouble in the middle of it."""
    peer = await _meet(street, near, far)
    tries: list[dict[str, Any]] = []
    carried = trio.Event()

    async def carry() -> None:
        told = await near.process.ask("carry", peer=peer, chunks=CHUNKS, seconds=CARRY_SECONDS)
        tries.extend(told["tries"])
        carried.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(carry)
        await trio.sleep(INTO_TRANSFER_SECONDS)
        first = _relay_between(street, near, peer, time.monotonic())
        with trouble(first):
            at = time.monotonic()
            gone = frozenset({street.peers[first]})
            places = [await one.until(_is_placed(gone), at) for one in (near, far)]
            await carried.wait()
    arrived = not tries[-1]["why"]
    last = _relay_between(street, near, peer, tries[-1]["ended"] or time.monotonic())
    return {
        "places_elsewhere_seconds": _worst(*places),
        "transfer_tries": len(tries),
        "transfer_failed_after_seconds": round(tries[0]["ended"] - at, 2),
        "transfer_why": tries[0]["why"],
        "transfer_arrived_seconds": round(tries[-1]["ended"] - at, 2) if arrived else None,
        "first_relay": first,
        "last_relay": last,
        "met": _in_time(*places) and arrived and last != first,
    }


async def _killed(talk: Talk, *, is_short: bool) -> dict[str, Any]:
    async with _open_street() as street:
        await street.start_relays(*RELAYS)
        near, far = await street.start_homes(RELAYS, "near", "far")
        figures = await _relay_of_a_transfer_goes(street, near, far, street.killed)
        talk(f"killed: {figures}")
        is_met = figures["met"]
        if not is_short:
            await street.start_relays(figures["first_relay"])
            figures["round"] = await _relay_of_a_round_goes(street, near, far)
            talk(f"killed in a round: {figures['round']}")
            is_met = is_met and figures["round"]["met"]
        at = street.kill(*RELAYS)
        says = [await one.until(_says, at) for one in (near, far)]
        figures["says_seconds"] = _worst(*says)
        figures["says"] = near.seen[-1].trouble
        talk(f"all killed: {figures['says']}")
        await street.start_relays(*RELAYS)
        at = time.monotonic()
        back = [await one.until(_is_placed(frozenset()), at) for one in (near, far)]
        figures["returned_seconds"] = _worst(*back)
        talk(f"started again: places after {figures['returned_seconds']} s")
    figures["met"] = is_met and _in_time(*says, *back)
    return figures


async def _relay_of_a_round_goes(street: _Street, near: _Home, far: _Home) -> dict[str, Any]:
    """Two homes average through a relay, which is killed while they exchange values."""
    members = [near.process, far.process]
    peer = await _meet(street, near, far)
    for number, member in enumerate(members):
        rate = RELAY_BYTES_PER_SECOND
        await member.ask(
            "hold",
            run="relays",
            values=VALUES,
            seed=number,
            up=rate,
            down=rate,
            dials_out_only=False,
        )
    killed_at = 0.0
    first = ""

    async def kill_soon() -> None:
        nonlocal killed_at, first
        await trio.sleep(INTO_ROUND_SECONDS)
        first = _relay_between(street, near, peer, time.monotonic())
        killed_at = street.kill(first)

    outcomes: list[str] = []
    digests: set[str] = set()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(kill_soon)
        for _ in range(ROUND_TRIES):
            told = await _averaged(members)
            outcomes += [f"{one['ended']} of {one.get('members', 0)}" for one in told]
            digests = {one.get("digest", "") for one in told}
            if killed_at and all(one.get("members") == len(members) for one in told):
                break
    done = "" not in digests and len(digests) == 1
    last = _relay_between(street, near, peer, time.monotonic())
    return {
        "outcomes": outcomes,
        "committed_seconds": round(time.monotonic() - killed_at, 2) if done else None,
        "same_result": done,
        "first_relay": first,
        "last_relay": last,
        "met": done and last != first,
    }


async def _averaged(members: Sequence[BenchProcess]) -> list[dict[str, Any]]:
    """One round of all of them, and how it ended for each."""
    told: list[dict[str, Any]] = []

    async def average(member: BenchProcess) -> None:
        told.append(await member.ask("average", epoch=0, expected=len(members)))

    async with trio.open_nursery() as nursery:
        for member in members:
            nursery.start_soon(average, member)
    return told


async def _silent(talk: Talk) -> dict[str, Any]:
    async with _open_street() as street:
        await street.start_relays(*RELAYS)
        near, far = await street.start_homes(RELAYS, "near", "far")
        figures = await _relay_of_a_transfer_goes(street, near, far, street.cut_off)
    talk(f"silent: {figures}")
    return figures


async def _full(talk: Talk) -> dict[str, Any]:
    async with _open_street() as street:
        await street.start_relays("full", limits="reservations=1")
        await street.start_relays("free")
        await street.start_homes(["full"], "lucky")
        (late,) = await street.start_homes(["full"], "late")
        (other,) = await street.start_homes(["full", "free"], "other")
        says = await late.until(_says, late.seen[0].at)
        says_what = late.seen[-1].trouble
        elsewhere = await other.until(_is_placed(frozenset(), at_least=1), other.seen[0].at)
        is_free = other.seen[-1].relays == {street.peers["free"]}
    figures = {
        "says_seconds": _worst(says),
        "says": says_what,
        "elsewhere_seconds": _worst(elsewhere),
        "met": _in_time(says, elsewhere) and is_free and "no place left" in says_what,
    }
    talk(f"full: {figures}")
    return figures


async def _lies(talk: Talk) -> dict[str, Any]:
    async with _open_street() as street:
        await street.start_liar("liar")
        await street.start_relays("honest")
        near, far = homes = await street.start_homes(["liar", "honest"], "near", "far")
        for one in homes:
            await one.until(_is_placed(frozenset()), one.seen[0].at)
        peer = await _meet(street, near, far, via="liar")
        await near.until(lambda moment: peer in moment.ways, 0.0)
        began = time.monotonic()
        before = [one.at(began).memory_bytes for one in homes]
        first = _relay_between(street, near, peer, began)
        told = await near.process.ask("carry", peer=peer, chunks=LIAR_CHUNKS, seconds=CARRY_SECONDS)
        last = _relay_between(street, near, peer, time.monotonic())
        most = [max(moment.memory_bytes for moment in one.seen) for one in homes]
    growth = max(after - was for after, was in zip(most, before, strict=True))
    tries = told["tries"]
    arrived = not tries[-1]["why"]
    figures = {
        "first_relay": first,
        "last_relay": last,
        "transfer_tries": len(tries),
        "transfer_why": tries[0]["why"],
        "transfer_arrived_seconds": round(tries[-1]["ended"] - began, 2) if arrived else None,
        "memory_growth_bytes": growth,
        "met": arrived and first == "liar" and growth <= MOST_GROWTH_BYTES,
    }
    talk(f"lies: {figures}")
    return figures


# ---- a run whose backbones go


async def _outage(talk: Talk, *, seconds: float) -> dict[str, Any]:
    with (
        NetworkLab(round_trip_seconds=ROUND_TRIP_SECONDS) as lab,
        tempfile.TemporaryDirectory(prefix="potluck-bench-") as folder,
    ):
        places = [_place(lab.host(name)) for name in ("hub", "second")]
        homes = {name: lab.home(name, nat) for name, nat in VOLUNTEERS.items()}
        async with (
            open_closed_run(Path(folder), SIZE.definition(), places[0]) as run,
            trio.open_nursery() as nursery,
        ):
            backbones = [run.organiser, await run.add_backbone("second", places[1])]
            talk("two backbones keep the run")
            volunteers = []
            for name, home in homes.items():
                place = VolunteerPlace(ANYWHERE, tuple(home.command([])))
                volunteers.append(run.join(name, await run.code_for(name), place=place))
            watched = [WatchedHome(name, Path(folder, name)) for name in homes]
            for one in volunteers:
                await _accepted(run, one, 0)
            for each in watched:
                nursery.start_soon(each.run)
            figures = await _backbones_go(run, backbones, volunteers, watched, seconds, talk)
            nursery.cancel_scope.cancel()
    return figures


def _place(host: Machine) -> VolunteerPlace:
    return VolunteerPlace(host.address, tuple(host.command([])))


async def _backbones_go(
    run: ClosedRun,
    backbones: Sequence[Heard],
    volunteers: Sequence[Heard],
    watched: Sequence[WatchedHome],
    seconds: float,
    talk: Talk,
) -> dict[str, Any]:
    since = time.monotonic()
    placed = [await one.until(_is_placed(frozenset()), since) for one in watched]
    names = {one.seen[-1].peer: one.name for one in watched}
    left, right, *_ = names
    for home, peer in ((watched[0], right), (watched[1], left)):
        await home.until(_is_punched_to(peer), since)
    began = time.monotonic()
    await trio.sleep(SETTLE_SECONDS)
    gone = time.monotonic()
    before = {one.name: _ways_to(names, one.at(gone)) for one in watched}
    for one in backbones:
        one.child.kill()
    talk(f"both backbones are killed; links: {before}")
    says = [await one.until(_says, gone) for one in watched]
    says_what = watched[0].seen[-1].trouble
    await trio.sleep(max(0.0, gone + seconds - time.monotonic()))
    asked = time.monotonic()
    during = {one.name: _ways_to(names, one.at(asked)) for one in watched}
    again = [run.start_again(one) for one in backbones]
    for one in again:
        await _started_again(run, one)
    returned = max(one.all("started")[0][0] for one in again)
    talk(f"both are back after {returned - asked:.1f} s; links meanwhile: {during}")
    placed_again = [await one.until(_is_placed(frozenset()), returned) for one in watched]
    counts = [len(one.events) for one in volunteers]
    for one, count in zip(volunteers, counts, strict=True):
        await _accepted(run, one, count)
    await trio.sleep(AFTER_SECONDS)
    ended = time.monotonic()
    steps = {
        "before": _steps(volunteers, began, gone),
        "during": _steps(volunteers, gone, asked),
        "after": _steps(volunteers, returned, ended),
    }
    direct = [
        during[name].get(other) == way
        for name, ways in before.items()
        for other, way in ways.items()
        if way in ("direct", "punched")
    ]
    kept = bool(direct) and all(direct)
    differing = differing_steps([*volunteers, *backbones, *again])
    return {
        "seconds": seconds,
        "placed_at_first_seconds": _worst(*placed),
        "says_seconds": _worst(*says),
        "says": says_what,
        "links_before": before,
        "links_during": during,
        "direct_links_kept": kept,
        "steps_a_minute": steps,
        "longest_without_step_seconds": {
            one.child.name: round(longest_gap(one, gone, asked), 1) for one in volunteers
        },
        "returned_after_seconds": round(returned - asked, 2),
        "places_back_seconds": _worst(*placed_again),
        "differing_steps": differing,
        "met": _in_time(*says, *placed_again)
        and kept
        and not differing
        and all(one.child.exit_code is None for one in (*volunteers, *again))
        and all(rate > 0 for rates in steps.values() for rate in rates.values()),
    }


async def _accepted(run: ClosedRun, one: Heard, after: int) -> None:
    await run.until(lambda: accepted(one, after) is not None, f"a step with {one.child.name}", one)


async def _started_again(run: ClosedRun, one: Heard) -> None:
    await run.until(lambda: has(one, "started"), f"the return of {one.child.name}", one)


def _is_punched_to(peer: str) -> Callable[[Sight], bool]:
    return lambda moment: moment.ways.get(peer) == "punched"


def _ways_to(names: Mapping[str, str], moment: Sight) -> dict[str, str]:
    """The ways from one volunteer to the others, by their names."""
    return {names[peer]: way for peer, way in moment.ways.items() if peer in names}


def _steps(volunteers: Sequence[Heard], since: float, until: float) -> dict[str, float]:
    """The steps a minute that each volunteer made together with others."""
    return {
        one.child.name: round(
            sum(
                since <= at < until and len(event["members"]) > 1
                for at, event in one.all("step_taken")
            )
            / (until - since)
            * 60,
            1,
        )
        for one in volunteers
    }


# ---- flags and output


TROUBLES: Final = ("killed", "silent", "full", "lies", "outage")


def add_parser(kinds: Subparsers) -> None:
    parser = kinds.add_parser(
        "nat-relays",
        help="relays die, are full, or lie, and all backbones of a run go for two minutes",
        description="Real backbones, and nodes behind routers, in a lab of network namespaces (as "
        "root):\n\n"
        "  killed  the relay of a transfer is killed, then that of a round of averaging, then all "
        "relays, and they are started again\n"
        "  silent  the relay of a transfer loses all its packets\n"
        "  full    a relay has no place left\n"
        "  lies    a relay promises large circuits and cuts them after a megabyte\n"
        "  outage  all backbones of a run are killed for two minutes, while volunteers behind two "
        "cone routers and a symmetric one train\n\n"
        "Exit code 1 if a node has no place elsewhere after 15 s and does not say why, a transfer "
        "does not arrive, a direct link ends, the run makes no steps, or steps differ.",
        example="scripts/bench nat-relays\nscripts/bench nat-relays killed lies --json",
    )
    parser.add_argument(
        "troubles",
        metavar="TROUBLE",
        nargs="*",
        help=f"only these: {', '.join(TROUBLES)}",
    )
    parser.set_defaults(measure=run)


def run(arguments: argparse.Namespace) -> int:
    troubles = arguments.troubles or TROUBLES
    for one in troubles:
        if one not in TROUBLES:
            raise WrongUse(
                f"{one!r} is no trouble.", why=f"It has to be one of {', '.join(TROUBLES)}."
            )

    async def measure(talk: Talk) -> dict[str, Any]:
        return await measure_nat_relays(troubles, talk)

    return report(arguments, measure, lines)


async def measure_nat_relays(
    troubles: Sequence[str], talk: Talk, *, is_short: bool = False
) -> dict[str, Any]:
    """`is_short`: without a round of averaging."""
    measures: dict[str, Callable[[], Awaitable[dict[str, Any]]]] = {
        "killed": lambda: _killed(talk, is_short=is_short),
        "silent": lambda: _silent(talk),
        "full": lambda: _full(talk),
        "lies": lambda: _lies(talk),
        "outage": lambda: _outage(talk, seconds=OUTAGE_SECONDS),
    }
    figures = {trouble: await measures[trouble]() for trouble in troubles}
    return {
        "troubles": figures,
        "bar_seconds": MOST_PLACE_SECONDS,
        "met": all(one["met"] for one in figures.values()),
        "machine": machine_facts(),
    }


def lines(result: dict[str, Any]) -> str:
    """Each trouble with its figures, for people."""
    told = []
    for trouble, figures in result["troubles"].items():
        told.append(f"{trouble}: {'as it must be' if figures['met'] else 'NOT as it must be'}")
        told += [
            f"    {name.replace('_', ' '):<32}{value}"
            for name, value in figures.items()
            if name != "met"
        ]
    return "\n".join(told)
