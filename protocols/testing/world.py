"""A whole network in memory, under a virtual clock and a seed.

    def test_two_nodes_talk() -> None:
        async def scenario(world: SimulatedWorld) -> None:
            alice, bob = world.add_node("alice"), world.add_node("bob")
            world.introduce(alice, bob)
            ...

        run_simulation(scenario, seed=7)

`run_simulation` gives virtual time, which passes only when every task is blocked, and an order of
tasks that depends only on the seed. The same seed gives the same run; compare `world.trace_hash()`
to check. A world also works inside any trio run (`async with SimulatedWorld(seed=7) as world`),
with trio's own order of tasks.

A simulated node must take time, randomness and connections from its `Network`. Otherwise the seed
does not decide everything.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TypeVar, TypeVarTuple, Unpack

import trio
from trio.testing import MockClock

from protocols.blocking import do_at_once
from protocols.errors import ProtocolMisuse
from protocols.identity import Identity
from protocols.network import Reach
from protocols.testing.link import Link, LinkLife
from protocols.testing.link_model import LinkSettings
from protocols.testing.settings import NodeSettings, WorldSettings
from protocols.testing.simulated_node import SimulatedNetwork
from protocols.testing.timeline import Timeline, deterministic_scheduling
from protocols.testing.trace import NOBODY, Trace, TraceKind

__all__ = [
    "LinkSettings",
    "NodeSettings",
    "SimulatedNetwork",
    "SimulatedWorld",
    "WorldSettings",
    "run_simulation",
]

Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")

READING_SECONDS = 0.001  # for a peer to read a dead node's last bytes before the end

_PLACE = re.compile(r"/ip4/10\.(\d{1,3})\.(\d{1,3})\.(\d{1,3})/tcp/4001(?:/p2p/\w+)?")


def run_simulation(
    scenario: Callable[[SimulatedWorld, Unpack[Arguments]], Awaitable[Result]],
    *arguments: *Arguments,
    seed: int = 0,
    settings: WorldSettings | None = None,
    tick_seconds: float = 0.0,
    run: Callable[[Callable[[], Awaitable[Result]], MockClock], Result] | None = None,
) -> Result:
    """Run `scenario(world, *arguments)` in a new world of this seed.

    Time is exact unless `tick_seconds` makes it move in steps: a run of very many nodes is several
    times faster in steps of a millisecond. `run` replaces the plain `trio.run` under the clock, for
    example to end a command at a signal.
    """
    world = SimulatedWorld(seed=seed, settings=settings)
    clock = MockClock(autojump_threshold=0)
    world.timeline.drive(clock, tick_seconds)

    async def main() -> Result:
        do_at_once()
        async with world:
            return await scenario(world, *arguments)

    with deterministic_scheduling(seed):
        return trio.run(main, clock=clock) if run is None else run(main, clock)


class SimulatedWorld:
    """The nodes of a simulation, the paths between them, and the injected faults."""

    def __init__(self, *, seed: int = 0, settings: WorldSettings | None = None) -> None:
        self.seed = seed
        self.settings = settings or WorldSettings()
        self.chance = random.Random(f"{seed} wires")
        self.timeline = Timeline()
        self.trace = Trace()
        self._nodes: dict[str, SimulatedNetwork] = {}
        self._by_index: list[SimulatedNetwork] = []
        self._paths: dict[tuple[int, int], LinkSettings] = {}
        self._links: dict[int, Link] = {}
        self._link_numbers = 0
        self._cuts: list[Cut] = []
        self._link_life = LinkLife(self.timeline, self.chance, self.settings.silence_seconds)
        self._open = AsyncExitStack()
        self._nursery: trio.Nursery | None = None
        self._origin = 0.0

    async def __aenter__(self) -> SimulatedWorld:
        self._origin = trio.current_time()
        self._nursery = await self._open.enter_async_context(trio.open_nursery())
        if not self.timeline.is_driven:
            self._nursery.start_soon(self.timeline.run)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        for node in self._by_index:
            node.end(politely=False)
        self.nursery.cancel_scope.cancel()
        try:
            return await self._open.__aexit__(kind, error, traceback)
        except BaseExceptionGroup as group:
            if error is not None and group.exceptions == (error,):
                return None  # the scenario's own error, without an exception group
            raise

    @property
    def nursery(self) -> trio.Nursery:
        if self._nursery is None:
            raise ProtocolMisuse("A SimulatedWorld must be entered before it is used.")
        return self._nursery

    # -- nodes -----------------------------------------------------------------------------

    def add_node(
        self, name: str | None = None, settings: NodeSettings | None = None
    ) -> SimulatedNetwork:
        """Add a node that is reachable at its address from now on. Seed and name give its key."""
        index = len(self._by_index)
        name = name if name is not None else f"node-{index}"
        if name in self._nodes:
            raise ProtocolMisuse(f"There is a node {name} in this world already.")
        node = SimulatedNetwork(
            self, index, name, self.identity_of(name), settings or NodeSettings()
        )
        self._nodes[name] = node
        self._by_index.append(node)
        self.record(TraceKind.NODE_ADDED, node)
        return node

    def add_stranger(self, machine: SimulatedNetwork) -> SimulatedNetwork:
        """A second identity on the machine of this node, which listens nowhere."""
        name = f"stranger-{len(self._by_index)}"
        stranger = self.add_node(name, replace(machine.settings, dialable=False))
        stranger.machine = machine.machine
        return stranger

    def identity_of(self, name: str) -> Identity:
        """The key of the node of this name in this world."""
        return Identity.from_seed(
            hashlib.sha256(f"simulated node {self.seed} {name}".encode()).digest()
        )

    def introduce(self, *nodes: SimulatedNetwork) -> None:
        """Tell each of these nodes the addresses of the others."""
        for node in nodes:
            for other in nodes:
                if other is not node:
                    node.learn_addresses(other.peer_id, other.addresses())

    def start(
        self,
        node: SimulatedNetwork,
        program: Callable[[SimulatedNetwork], Awaitable[object]],
    ) -> None:
        """Run `program(node)` as the node's process: a crash of the node cancels it."""

        async def process() -> None:
            with node.running():
                await program(node)

        self.nursery.start_soon(process)

    # -- faults of nodes -------------------------------------------------------------------

    def crash(
        self, node: SimulatedNetwork, *, silently: bool = False, heard_out: bool = False
    ) -> None:
        """End a node at once, without a goodbye from it, and cancel all that it runs.

        As with SIGKILL its machine closes the connections, so peers notice one latency later. Data
        that it sent at the last instant is lost; with `heard_out`, peers read it before the end.
        `silently` is a power cut: nothing answers any more, and peers notice only by their
        keep-alive.
        """
        self.record(TraceKind.NODE_CRASHED, node)
        node.silent = silently
        if not silently:
            node.stopped_at = None  # a stopped process dies too, and its machine tells
            for end in node.link_ends():
                end.say_goodbye(
                    "the node was killed", after_seconds=READING_SECONDS if heard_out else 0.0
                )
        node.end(politely=False)
        self._check_links()

    def restart(self, node: SimulatedNetwork) -> SimulatedNetwork:
        """Start the node again with the same key and place, and without its memory."""
        if not node.closed or self._by_index[node.index] is not node:
            raise ProtocolMisuse(f"{node.name} has not ended, or was restarted already.")
        again = SimulatedNetwork(self, node.index, node.name, node.identity, node.settings)
        self._nodes[node.name] = self._by_index[node.index] = again
        self.record(TraceKind.NODE_RESTARTED, again)
        return again

    def stop(self, node: SimulatedNetwork) -> None:
        """Stop a node as SIGSTOP does: it reads nothing and sends nothing.

        Its machine still accepts bytes for it, up to the windows of its streams. Unlike in a real
        process, its own timers still run here, but what they send stays unsent. So it sees the
        calls of that time fail, where a real process sees one long gap. To let it notice the gap,
        run a `MachineWatch` on its `time_seen`.
        """
        if node.stopped_at is None:
            node.stopped_at = trio.current_time()
            self.record(TraceKind.NODE_STOPPED, node)
            self._check_links()

    def resume(self, node: SimulatedNetwork) -> None:
        """Let a stopped node go on: held messages arrive, and what it sent goes out."""
        if node.stopped_at is not None:
            node.stopped_at = None
            self.record(TraceKind.NODE_CONTINUED, node)
            self._check_links()

    def at_message(self, node: SimulatedNetwork, number: int, what: Callable[[], None]) -> None:
        """Call `what` when the node is about to send this message, the next being number 1.

        A message is what goes onto the wire at once: a segment of data, an opening, an end. If
        `what` crashes or stops the node, the message is not sent (or not before the node goes on).
        A test that tries every number in turn ends the node at every moment that others can tell
        apart.
        """
        if number < 1:
            raise ProtocolMisuse("The next message of a node has the number 1.")
        node.call_at_message(node.messages_sent + number, what)

    def throttle(
        self,
        node: SimulatedNetwork,
        *,
        upload_bytes_per_second: float | None = None,
        download_bytes_per_second: float | None = None,
    ) -> None:
        """Change the rates of a node's home connection from now on; None: no limit."""
        node.upload.bytes_per_second = upload_bytes_per_second
        node.download.bytes_per_second = download_bytes_per_second

    def set_clock_skew(self, node: SimulatedNetwork, seconds: float) -> None:
        """Let a node's clock jump to this far ahead of a correct one."""
        node.clock_skew_seconds = seconds

    # -- faults of paths -------------------------------------------------------------------

    def cut(
        self, sources: Iterable[SimulatedNetwork], targets: Iterable[SimulatedNetwork]
    ) -> tuple[Cut, ...]:
        """From now on nothing gets from `sources` to `targets`; the other direction stays open."""
        return self._add_cuts((Cut(_indices(sources), _indices(targets)),))

    def partition(self, *groups: Iterable[SimulatedNetwork]) -> tuple[Cut, ...]:
        """Separate each of these groups from the others, both ways, until `heal`."""
        return self._add_cuts(cuts_between([_indices(group) for group in groups]))

    def heal(self, cuts: Iterable[Cut] | None = None) -> None:
        """Remove these cuts, or all of them. Messages that they held arrive."""
        gone = tuple(self._cuts if cuts is None else cuts)
        self._cuts = [cut for cut in self._cuts if cut not in gone]
        self.trace.record(self.now(), TraceKind.HEALED, NOBODY)
        self._check_links()

    def _add_cuts(self, cuts: tuple[Cut, ...]) -> tuple[Cut, ...]:
        self._cuts.extend(cuts)
        self.trace.record(self.now(), TraceKind.PARTITIONED, NOBODY)
        self._check_links()
        return cuts

    def _check_links(self) -> None:
        links = tuple(self._links.values())
        self._link_life.check(links)
        for link in links:
            for end in link.ends:
                end.release_held()

    def break_link(self, first: SimulatedNetwork, second: SimulatedNetwork) -> None:
        """Lose the connection between two nodes, if there is one, for no reason."""
        for node, other in ((first, second), (second, first)):
            end = node.link_end(other.peer_id)
            if end is not None:
                end.break_now("the connection was lost")

    # -- places and paths ------------------------------------------------------------------

    def place_of(self, index: int) -> str:
        return f"/ip4/10.{index >> 16 & 255}.{index >> 8 & 255}.{index & 255}/tcp/4001"

    def node_at(self, address: str) -> SimulatedNetwork | None:
        """The node at an address, if any."""
        match = _PLACE.fullmatch(address)
        if match is None:
            return None
        high, middle, low = (int(part) for part in match.groups())
        index = high << 16 | middle << 8 | low
        return self._by_index[index] if index < len(self._by_index) else None

    def path(self, source: SimulatedNetwork, target: SimulatedNetwork) -> LinkSettings:
        """The properties of the path from one node to another."""
        return self._paths.get((source.index, target.index), self.settings.link)

    def set_path(
        self, first: SimulatedNetwork, second: SimulatedNetwork, settings: LinkSettings
    ) -> None:
        """Set the path between two nodes, both ways, for links that come up from now on."""
        self.set_path_one_way(first, second, settings)
        self.set_path_one_way(second, first, settings)

    def set_path_one_way(
        self, source: SimulatedNetwork, target: SimulatedNetwork, settings: LinkSettings
    ) -> None:
        self._paths[source.index, target.index] = settings

    def punch(
        self, first: SimulatedNetwork, second: SimulatedNetwork, settings: LinkSettings
    ) -> None:
        """Open a direct path of these settings between two nodes with a relayed link.

        A direct link appears beside the relayed one, whose streams go on for a while.
        """
        self.set_path(first, second, settings)
        end = first.link_end(second.peer_id)
        if end is not None and end.reach is Reach.RELAYED:
            first.link_to(second, second.address)

    def round_trip_seconds(self, first: SimulatedNetwork, second: SimulatedNetwork) -> float:
        """One round trip, with the jitter of this moment."""
        there = self.path(first, second).delay(self.chance)
        return there + self.path(second, first).delay(self.chance)

    def machine_is_up(self, node: SimulatedNetwork) -> bool:
        """Whether anything answers at this node's place, even if only to refuse."""
        return not self._by_index[node.index].silent

    def is_cut(self, source: SimulatedNetwork, target: SimulatedNetwork) -> bool:
        """Whether nothing gets from `source` to `target` now."""
        if not self._cuts:
            return False
        return any(cut.blocks(source.index, target.index) for cut in self._cuts)

    # -- links -----------------------------------------------------------------------------

    def next_link_number(self) -> int:
        self._link_numbers += 1
        return self._link_numbers

    def remember_link(self, link: Link) -> None:
        self._links[link.number] = link
        self._link_life.add(link)
        near, far = link.ends
        self.record(TraceKind.CONNECTED, near.node, far.node)

    def forget_link(self, link: Link) -> None:
        self._links.pop(link.number, None)

    # -- time and the trace ----------------------------------------------------------------

    def now(self) -> float:
        """Seconds since the start of this world."""
        return self.timeline.now() - self._origin

    def honest_time(self) -> float:
        """The time of a correct clock, in seconds since 1970."""
        return self.settings.started_at + self.now()

    def record(
        self,
        kind: TraceKind,
        source: SimulatedNetwork,
        target: SimulatedNetwork | None = None,
        size: int = 0,
    ) -> None:
        """Add one event to the trace."""
        index = NOBODY if target is None else target.index
        self.trace.record(self.now(), kind, source.index, index, size)

    def trace_hash(self) -> str:
        """The hash over every event so far; equal for two runs of one seed."""
        return self.trace.hexdigest()


def _indices(nodes: Iterable[SimulatedNetwork]) -> frozenset[int]:
    return frozenset(node.index for node in nodes)


# The cut paths: the pure part of partitions.
#
# A cut is one-way: nothing that one of `sources` sends gets to one of `targets`. A symmetric
# partition is two cuts. Cuts may overlap; a path is open if no cut covers it.


@dataclass(frozen=True, eq=False)
class Cut:
    """Nothing gets from `sources` to `targets`; both are sets of node numbers.

    Two cuts with the same sets are separate: healing one leaves the other.
    """

    sources: frozenset[int]
    targets: frozenset[int]

    def blocks(self, source: int, target: int) -> bool:
        return source in self.sources and target in self.targets


def cuts_between(groups: Iterable[Iterable[int]]) -> tuple[Cut, ...]:
    """The cuts that separate each of these groups from all the others, both ways."""
    sets = [frozenset(group) for group in groups]
    return tuple(
        Cut(group, frozenset().union(*(other for other in sets if other is not group)))
        for group in sets
    )
