"""Servers that host experts by themselves, in a simulated world: the cast of test_hosting."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import trio
from torch import Tensor

from models.experts import build_expert
from protocols.access import end_refused
from protocols.experts import (
    EXPERTS,
    ExpertBackend,
    ExpertClient,
    ExpertDirectory,
    ExpertGrid,
    ExpertHost,
    ExpertSaved,
    ExpertTaken,
    HostEvent,
    HostRecords,
    HostSettings,
    Rows,
    SwarmExperts,
    Uid,
    open_expert_host,
)
from protocols.identity import PeerId
from protocols.network import Network
from protocols.testing.world import SimulatedWorld
from tests.dht.members import Member, joined, member, simulated
from tests.protocols.admitted import Admission, clock_of
from tests.waiting import until

GRID = ExpertGrid("ffn", (4, 4))
WIDTH = 8
RUN = "poem"
CHECKPOINT_SECONDS = 20.0

Event = TypeVar("Event", bound=HostEvent)


class Halving(torch.optim.lr_scheduler.StepLR):
    """A schedule that does not take everything, as those of runs do not."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if type(state["last_epoch"]) is not int or state["last_epoch"] < 0:
            raise ValueError(f"There is no epoch {state['last_epoch']}.")
        super().load_state_dict(state)


def make(uid: Uid) -> ExpertBackend:
    """An expert with Adam and a schedule; its values follow from its uid."""
    network = build_expert(
        {"name": "feed-forward", "width": WIDTH, "inner": [16]},
        seed=sum(cell * 10**place for place, cell in enumerate(uid.cells)),
    )
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    schedule = Halving(optimizer, step_size=3, gamma=0.5)
    return ExpertBackend(uid, network, Rows((WIDTH,)), optimizer, schedule=schedule)


def values(backend: ExpertBackend) -> dict[str, Tensor]:
    return {name: one.clone() for name, one in backend.network.state_dict().items()}


def are_equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def batch(number: int = 0) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))


@dataclass
class Server:
    """A server of experts. `crash` ends its process; `leave` ends it politely."""

    member: Member
    folder: Path
    settings: HostSettings
    events: list[HostEvent] = field(default_factory=list)
    started: trio.Event = field(default_factory=trio.Event)
    ended: trio.Event = field(default_factory=trio.Event)
    has_crashed: bool = False
    _stop: trio.Event = field(default_factory=trio.Event)
    _host: ExpertHost | None = None

    @property
    def host(self) -> ExpertHost:
        assert self._host is not None
        return self._host

    @property
    def peer(self) -> PeerId:
        return self.member.network.peer_id

    def uids(self) -> list[Uid]:
        return [one.uid for one in self.host.hosted()]

    def kept(self) -> list[Uid]:
        """The experts of others of which it has copies."""
        return sorted(self.host._keeper.kept())

    def backend(self, uid: Uid) -> ExpertBackend:
        return self.host.runtime.find(str(uid))

    def told(self, kind: type[Event]) -> list[Event]:
        return [event for event in self.events if isinstance(event, kind)]

    async def run(self, network: Network) -> None:
        directory = ExpertDirectory(network, self.member.dht, RUN)
        async with open_expert_host(
            self.member.rpc,
            directory,
            [GRID],
            make,
            self.folder,
            self.settings,
            self.events.append,
        ) as self._host:
            self.started.set()
            await self._stop.wait()
            await self.host.leave(2.0)
        self.ended.set()

    async def leave(self) -> None:
        self._stop.set()
        await self.ended.wait()

    def crash(self) -> None:
        self.has_crashed = True
        self.member.world.crash(self.member.network, silently=True)

    async def hosting(self, count: int, within_seconds: float = 60.0) -> None:
        await until(lambda: len(self.host.hosted()) == count, within_seconds)


class Cast:
    """The nodes of one test."""

    def __init__(
        self, world: SimulatedWorld, folder: Path, admission: Admission | None = None
    ) -> None:
        self.world, self.folder, self.admission = world, folder, admission
        self.servers: list[Server] = []
        self._members: list[Member] = []

    async def node(self, name: str) -> Member:
        dead = [server.member for server in self.servers if server.has_crashed]
        living = [one for one in self._members if one not in dead]
        admission = self.admission
        one = member(
            self.world,
            name,
            living[:3],
            families=[EXPERTS],
            guard=None
            if admission is None
            else lambda network: admission.admit(network, network.name),
        )
        await joined(one)
        self._members.append(one)
        return one

    async def server(
        self,
        most_experts: int,
        uids: Sequence[Uid] = (),
        name: str = "",
    ) -> Server:
        """A new server that has begun to look for experts."""
        name = name or f"server-{len(self.servers)}"
        settings = HostSettings(most_experts, tuple(uids), CHECKPOINT_SECONDS)
        return await self.start(Server(await self.node(name), self.folder / name, settings))

    async def restart(self, dead: Server) -> Server:
        """The same node again, with the files of its folder."""
        again = dead.member.restart()
        await joined(again)
        return await self.start(Server(again, dead.folder, dead.settings))

    async def start(self, server: Server) -> Server:
        self.world.start(server.member.network, server.run)
        await server.started.wait()
        self.servers.append(server)
        return server

    async def trainer(self, name: str = "trainer") -> Trainer:
        return Trainer(await self.node(name))

    async def revoke(self, name: str) -> None:
        """This person may not take part any more, and everybody has heard of it."""
        admission = self.admission
        assert admission is not None
        signed = admission.authority.revoke(name, at_ms=clock_of(self._members[0].network)())
        for one in self._members:
            access = admission.of(one.network)
            access.revocations.accept(signed, access.keyring)
        for one in self._members:
            if one.network.name != name:
                for peer in await end_refused(one.rpc, admission.of(one.network)):
                    await one.network.disconnect(peer)


class Trainer:
    def __init__(self, member: Member) -> None:
        self.rpc, self.peer = member.rpc, member.network.peer_id
        self.client = ExpertClient(member.rpc)
        self.directory = ExpertDirectory(member.network, member.dht, RUN)
        self.experts = SwarmExperts(self.directory, self.client, GRID, HostRecords())

    async def train(self, server: Server, uid: Uid, steps: int = 1) -> None:
        for number in range(steps):
            x = batch(number)
            await self.client.backward(server.peer, uid, x, x, timeout=5.0)

    async def train_all(self, server: Server, steps: int = 1) -> None:
        for uid in server.uids():
            await self.train(server, uid, steps)

    async def live(self) -> dict[Uid, set[PeerId]]:
        """All hosts of all experts."""
        found = await self.directory.live(GRID)
        return {uid: {host.peer for host in hosts} for uid, hosts in found.items()}

    async def finds_all(self) -> bool:
        return len(await self.live()) == GRID.cells


Play = Callable[["Cast"], Awaitable[None]]


def staged(play: Play) -> Callable[[], None]:
    """Turn `async def test(cast)` into a test in virtual time, with a folder of its own."""
    return staged_with(lambda: None)(play)


def staged_with(admission: Callable[[], Admission | None]) -> Callable[[Play], Callable[[], None]]:
    """The same in a closed run."""

    def stage(play: Play) -> Callable[[], None]:
        @functools.wraps(play)
        async def test(world: SimulatedWorld) -> None:
            with tempfile.TemporaryDirectory() as folder:
                await play(Cast(world, Path(folder), admission()))

        return simulated(test)

    return stage


async def saved(server: Server, *, times: int = 1) -> None:
    """Wait until each of its experts was saved so often from now on, and a keeper has it."""
    before = len(server.told(ExpertSaved))
    wanted = before + times * len(server.uids())
    await until(lambda: len(server.told(ExpertSaved)) >= wanted, 10 * CHECKPOINT_SECONDS)


def origins(server: Server) -> dict[Uid, tuple[str, int]]:
    return {event.uid: (event.origin, event.steps) for event in server.told(ExpertTaken)}
