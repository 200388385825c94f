"""A node: starts and ends everything that potluck runs on this machine.

    async with Node(configuration) as node:
        ...

Entering returns when the node listens, answers pings and can be asked for its status; it joins the
swarm in the background. Leaving (or cancelling) ends every task, closes every connection and
removes every file that only a running node has. All tasks run in its one nursery, and none outlives
it.

A node with an access pass in its home takes part in that run and no other: the guard checks
everything that it sends and receives, from the first message on. One without a pass is in an open
run, where everybody with a key may take part; `status().membership.open` tells the user.

The order matters. The lock comes before everything that a second node would disturb, the network
before everything that uses it, and the control socket last, so that it answers for a complete node.
The end is in the reverse order.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    suppress,
)
from datetime import datetime
from functools import partial
from types import TracebackType
from typing import Any

import trio

from nat.addresses import port_to_map, tcp_address
from nat.connectivity import Connectivity
from nat.mapping import PortMapper
from nat.relaying import Relay
from node.core.access.membership import Membership, open_membership
from node.core.access.questions import add_access_questions
from node.core.caps.settings import caps_of
from node.core.caps.used import CapsUsed
from node.core.configuration import Configuration
from node.core.control import Answering, ControlServer, remove_socket
from node.core.dht_questions import Asked, add_questions
from node.core.directory import open_directory, usable_endpoints
from node.core.key_file import load_or_create_identity
from node.core.machine_changes import MachineWatch
from node.core.peer_address import parse_peer_address
from node.core.private_file import remove_drafts
from node.core.relay_month import RelayMonth
from node.core.running_lock import hold_running_lock
from node.core.status import (
    MembershipStatus,
    NodeStatus,
    connectivity_status,
    directory_status,
    link_statuses,
    memory_in_use,
    relay_status,
)
from node.core.training_view import TrainerView
from node.net import VERSION, Clocks
from protocols.dht import Dht
from protocols.errors import PotluckError
from protocols.guard import Guard, OpenGuard
from protocols.identity import Identity, PeerId
from protocols.network import TraversableNetwork
from protocols.rpc import Rpc, open_rpc, ping, serve_ping

# `status --watch` may ask this often or less; more would be load without use.
FASTEST_WATCH_SECONDS = 0.1

SHOWING_SECONDS = 3.0  # for a peer to show its pass; it waits for the relay's answer meanwhile

OpenNetwork = Callable[[Identity, Configuration], AbstractAsyncContextManager[TraversableNetwork]]


@asynccontextmanager
async def open_real_network(
    identity: Identity, configuration: Configuration
) -> AsyncIterator[TraversableNetwork]:
    """py-libp2p's network with this configuration. (Imported here: it costs half a second.)"""
    from node.net import Libp2pSettings, open_libp2p_network

    caps = caps_of(configuration)
    settings = Libp2pSettings(
        listen_addresses=configuration.listen_addresses,
        announce_addresses=configuration.announce_addresses,
        dial_seconds=configuration.dial_seconds,
        inbound_connections=configuration.inbound_connections,
        inbound_connections_per_address=configuration.inbound_connections_per_address,
        agent_version=f"potluck/{VERSION}",
        upload_bytes_per_second=caps.upload_bytes_per_second,
        download_bytes_per_second=caps.download_bytes_per_second,
    )
    async with open_libp2p_network(identity, settings) as network:
        yield network


class Node:
    """One running node. Use it once, as an async context manager."""

    network: TraversableNetwork
    rpc: Rpc
    dht: Dht
    control: ControlServer
    machine: MachineWatch
    connectivity: Connectivity
    mapper: PortMapper | None = None
    """None if the router is not asked to forward a port."""

    relay: Relay | None
    """None if this node does not relay."""

    relay_month: RelayMonth | None = None

    membership: Membership | None
    """None in an open run."""
    training: Callable[[], TrainerView] | None
    """The state of its training, while it trains."""

    caps: Callable[[], CapsUsed] | None
    """How much it uses of each cap, while it trains."""

    def __init__(
        self,
        configuration: Configuration,
        *,
        open_network: OpenNetwork = open_real_network,
        clocks: Clocks | None = None,
    ) -> None:
        self.configuration = configuration
        self._open_network = open_network
        self._clocks = clocks
        self._running: AsyncExitStack | None = None
        self._holds_lock = False
        self.training = None
        self.caps = None

    async def __aenter__(self) -> Node:
        async with AsyncExitStack() as starting:
            await self._start(starting)
            self._running = starting.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        if self._running is None:
            raise RuntimeError("this node is not running")
        return await self._running.__aexit__(kind, error, traceback)

    async def _start(self, starting: AsyncExitStack) -> None:
        places, key_file = self.configuration.places, self.configuration.key_file
        identity = load_or_create_identity(key_file)
        starting.callback(self._forget_lock)
        starting.enter_context(hold_running_lock(places, key_file))
        self._holds_lock = True
        for folder in {places.data_folder, places.runs_folder, key_file.parent}:
            remove_drafts(folder)  # of an earlier process that was killed
        self.membership = open_membership(self.configuration, identity, clocks=self._clocks)
        self.network = await starting.enter_async_context(
            self._open_network(identity, self.configuration)
        )
        member = self.membership
        guard = None if member is None else member.guard(self.network)
        self.rpc = await starting.enter_async_context(open_rpc(self.network, guard))
        serve_ping(self.rpc)
        self.dht = await starting.enter_async_context(
            open_directory(self.network, self.rpc, self.configuration, member)
        )
        self._started_at = self.network.wall_time()
        self._started_clock = trio.current_time()
        nursery = await starting.enter_async_context(trio.open_nursery())
        starting.callback(nursery.cancel_scope.cancel)
        self.control = ControlServer(places.control_socket)
        self.control.add("status", self._answer_status)
        add_questions(self.control, Asked(self.dht, self.network))
        add_access_questions(self.control, member, self.dht)
        self.machine = MachineWatch(self.network, self.dht)
        nursery.start_soon(self.machine.run)
        await self._start_traversal(nursery, guard)
        if member is not None:
            nursery.start_soon(member.run, self.network, self.rpc, self.dht)
        await nursery.start(self.control.serve)

    async def _start_traversal(self, nursery: trio.Nursery, guard: Guard | None) -> None:
        """Find out how others reach this node, and relay for others if the owner wants that."""
        endpoints = () if self.membership is None else usable_endpoints(self.membership.endpoints)
        addresses = (*self.configuration.bootstrap_addresses, *endpoints)
        bootstrap = [parse_peer_address(address).peer for address in addresses]
        own = self.network.peer_id
        self.connectivity = Connectivity(
            self.network, lambda: [peer for peer in bootstrap if peer != own], mapped=self._mapped
        )
        self.machine.follow(lambda _: self._network_changed())
        await nursery.start(self.connectivity.run)
        port = port_to_map(self.network.listened_addresses())
        self.mapper = None
        if self.configuration.maps_ports and port is not None:
            self.mapper = PortMapper(port, lambda _: self.connectivity.mapping_changed())
            nursery.start_soon(self.mapper.run)
        self.relay = None
        await self._start_relay(nursery, guard or OpenGuard())

    async def _start_relay(self, nursery: trio.Nursery, guard: Guard) -> None:
        limits = self.configuration.relay_limits
        if limits is None:
            return
        month = RelayMonth(
            self.configuration.places.relayed_file,
            lambda: datetime.fromtimestamp(self.network.wall_time()),
        )
        await nursery.start(month.run)
        self.relay_month = month
        self.relay = Relay(
            self.network,
            limits,
            admits=partial(self._is_member, guard)
            if self.configuration.relays_for_members
            else None,
            month_left=(lambda: limits.month_bytes - month.used_bytes)
            if limits.month_bytes
            else None,
            spend=month.spend,
        )
        await nursery.start(self.relay.run)

    async def _is_member(self, guard: Guard, peer: PeerId) -> bool:
        """Whether a peer may use the relay. One that has shown no pass is called: it shows its pass
        with its answer. After a restart of this node, volunteers ask for places before anything
        else."""
        if not guard.knows(peer):
            with trio.move_on_after(SHOWING_SECONDS), suppress(PotluckError):
                await ping(self.rpc, peer, timeout=SHOWING_SECONDS)
        return guard.knows(peer)

    def dials_out_only(self) -> bool:
        """Whether no others can connect to this node, as its owner says or as was found out.

        A node without a relay still has the links that were punched while there was one.
        """
        if self.configuration.is_client:
            return True
        is_punched = any(link.punched for link in self.network.links())
        return not (self.connectivity.mode.is_reachable or is_punched)

    def _mapped(self) -> str | None:
        """The address at which the router forwards connections to us."""
        mapping = None if self.mapper is None else self.mapper.mapping
        if mapping is None or not mapping.is_public:
            return None
        return tcp_address(mapping.external_host, mapping.external_port)

    def _network_changed(self) -> None:
        self.connectivity.network_changed()
        if self.mapper is not None:
            self.mapper.network_changed()

    def _forget_lock(self) -> None:
        self._holds_lock = False

    def remove_run_files(self) -> None:
        """Remove the files that only a running node has. For a process that must exit by force.

        Otherwise leaving the node does it. Without the lock the files belong to another node.
        """
        if self._holds_lock:
            remove_socket(self.configuration.places.control_socket)
            self.configuration.places.lock_file.unlink(missing_ok=True)

    @property
    def uptime_seconds(self) -> float:
        return trio.current_time() - self._started_clock

    def status(self) -> NodeStatus:
        """The current state of this node."""
        now = trio.current_time()
        configuration = self.configuration
        return NodeStatus(
            peer_id=self.network.peer_id,
            version=VERSION,
            pid=os.getpid(),
            started_at=round(self._started_at, 3),
            uptime_seconds=round(self.uptime_seconds, 3),
            addresses=self.network.addresses(),
            links=link_statuses(self.network.links(), now),
            rpc=dataclasses.asdict(self.rpc.statistics()),
            directory=directory_status(self.dht),
            membership=MembershipStatus() if self.membership is None else self.membership.status(),
            connectivity=connectivity_status(self.connectivity),
            relay=None
            if self.relay is None or self.relay_month is None
            else relay_status(self.relay, self.relay_month),
            memory_bytes=memory_in_use(),
            config_file=str(configuration.config_file) if configuration.config_file else None,
            key_file=str(configuration.key_file),
            warnings=configuration.warnings,
            training=None if self.training is None else self.training(),
            caps=None if self.caps is None else self.caps(),
        )

    async def _answer_status(self, arguments: Mapping[str, Any], answer: Answering) -> None:
        """Answer once or, with `every_seconds`, repeatedly until the client leaves."""
        await answer(self.status())
        every = arguments.get("every_seconds")
        while isinstance(every, int | float):
            await trio.sleep(max(float(every), FASTEST_WATCH_SECONDS))
            await answer(self.status())
