"""Peers of a simulated swarm that look for groups, for the matchmaking tests."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

import trio

from protocols.dht import Dht, DhtSettings, open_dht
from protocols.identity import PeerId
from protocols.moshpit.matchmaking import (
    GROUP,
    Group,
    Matchmaker,
    NoGroup,
    Offer,
    Search,
    group_key,
)
from protocols.moshpit.roster import check_roster, hash_order
from protocols.rpc import Rpc, open_rpc
from protocols.testing.world import (
    LinkSettings,
    NodeSettings,
    SimulatedNetwork,
    SimulatedWorld,
    WorldSettings,
    run_simulation,
)

KEY = group_key("poem", 7, 0, "all")
EPOCH = 7
LAYOUT = bytes(range(32))
LATENCY_SECONDS = 0.01
LONGEST_TEST_SECONDS = 600.0
SETTINGS = WorldSettings(link=LinkSettings(latency_seconds=LATENCY_SECONDS))
WITHOUT_LATENCY = WorldSettings(link=LinkSettings(latency_seconds=0.0))
BEHIND_NAT = NodeSettings(dialable=False)

Test = Callable[[SimulatedWorld], Awaitable[None]]


def simulated(test: Test) -> Callable[[], None]:
    """Turn `async def test(world)` into a test in a world of its own, in virtual time."""

    @functools.wraps(test)
    def run() -> None:
        play(test)

    run.__signature__ = inspect.Signature()  # type: ignore[attr-defined]
    del run.__wrapped__
    return run


def play(test: Test, *, seed: int = 0, settings: WorldSettings = SETTINGS) -> None:
    async def scenario(world: SimulatedWorld) -> None:
        with trio.fail_after(LONGEST_TEST_SECONDS):
            await test(world)

    run_simulation(scenario, seed=seed, settings=settings)


class Gatherer:
    """A node with a matchmaker. It runs until the world ends or it is killed."""

    def __init__(
        self,
        world: SimulatedWorld,
        network: SimulatedNetwork,
        joins: str,
        matchmaker: type[Matchmaker] = Matchmaker,
    ) -> None:
        self.world, self.network = world, network
        self._matchmaker_type = matchmaker
        self.ready = trio.Event()
        self._joins = joins
        self.rpc: Rpc
        self.dht: Dht
        self.matchmaker: Matchmaker
        world.start(network, self._run)

    @property
    def peer(self) -> PeerId:
        return self.network.peer_id

    async def _run(self, network: SimulatedNetwork) -> None:
        settings = DhtSettings(
            bootstrap=(self._joins,) if self._joins else (), client=not network.settings.dialable
        )
        async with (
            open_rpc(network) as self.rpc,
            open_dht(network, self.rpc, families=[GROUP], settings=settings) as self.dht,
        ):
            self.matchmaker = self._matchmaker_type(network, self.rpc, self.dht)
            self.ready.set()
            await trio.sleep_forever()

    def search(
        self,
        *,
        key: str = KEY,
        epoch: int = EPOCH,
        layout: bytes = LAYOUT,
        weight: float = 1.0,
        group_size: int = 64,
        expected: int | None = None,
        seconds: float = 10.0,
    ) -> Search:
        offer = Offer(weight, reduces=self.network.settings.dialable)
        return Search(key, epoch, layout, offer, group_size, expected, seconds)


async def gatherers(
    world: SimulatedWorld,
    count: int,
    *,
    behind_nat: Iterable[int] = (),
    settle: float = 12.0,
    matchmaker: type[Matchmaker] = Matchmaker,
) -> list[Gatherer]:
    """Start this many nodes, and let them meet; those behind NAT can only dial out."""
    hidden = set(behind_nat)
    cast: list[Gatherer] = []
    for number in range(count):
        network = world.add_node(f"peer-{number}", BEHIND_NAT if number in hidden else None)
        one = Gatherer(world, network, cast[0].network.address if cast else "", matchmaker)
        await one.ready.wait()
        await one.dht.joined()
        cast.append(one)
    await trio.sleep(settle)
    return cast


def in_order(cast: Iterable[Gatherer], key: str = KEY) -> list[Gatherer]:
    """The order of their hashes under this key: the first that can be dialled leads."""
    return sorted(cast, key=lambda one: hash_order(key, one.peer))


@dataclass
class Found:
    """How each search ended, and when."""

    groups: dict[PeerId, Group] = field(default_factory=dict)
    errors: dict[PeerId, NoGroup] = field(default_factory=dict)
    seconds: dict[PeerId, float] = field(default_factory=dict)
    news: trio.Event = field(default_factory=trio.Event)

    @property
    def ended(self) -> int:
        return len(self.groups) + len(self.errors)

    async def until(self, peers: Collection[PeerId]) -> None:
        """Wait until the searches of all these have ended."""
        while not set(peers) <= self.seconds.keys():
            await self.news.wait()

    @property
    def rosters(self) -> dict[bytes, Group]:
        return {group.round_id: group for group in self.groups.values()}

    @property
    def slowest(self) -> float:
        return max(self.seconds.values(), default=0.0)

    def check(self, key: str = KEY, epoch: int = EPOCH, layout: bytes = LAYOUT) -> None:
        """Check what must always hold: all members of a list have the same list, and no peer is a
        living member of two."""
        for peer, group in self.groups.items():
            roster = group.roster
            assert roster.members[group.me] == peer
            check_roster(roster, Search(key, epoch, layout, Offer(1.0)).terms)
            for member in roster.members:
                theirs = self.groups.get(member)
                if theirs is not None and theirs.round_id == group.round_id:
                    assert theirs.roster == roster


async def find(
    gatherer: Gatherer, search: Search, found: Found, delay: float = 0.0
) -> Group | NoGroup:
    await trio.sleep(delay)
    start = trio.current_time()
    outcome: Group | NoGroup
    try:
        outcome = found.groups[gatherer.peer] = await gatherer.matchmaker.find_group(search)
    except NoGroup as error:
        outcome = found.errors[gatherer.peer] = error
    found.seconds[gatherer.peer] = trio.current_time() - start
    found.news.set()
    found.news = trio.Event()
    return outcome


async def find_all(
    cast: Sequence[Gatherer],
    searches: Sequence[Search] | None = None,
    delays: Sequence[float] | None = None,
) -> Found:
    """Let all of them search at once, or after these delays."""
    found = Found()
    async with trio.open_nursery() as nursery:
        for number, one in enumerate(cast):
            search = searches[number] if searches else one.search()
            nursery.start_soon(find, one, search, found, delays[number] if delays else 0.0)
    found.check()
    return found
