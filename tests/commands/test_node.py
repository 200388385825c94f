"""The node as one piece: it starts whole or not at all, and ends without a trace."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from nat.connectivity import Connectivity, ReachMode
from nat.kinds import Nat
from node.core.configuration import Configuration
from node.core.control_client import ask_once
from node.core.node import Node, OpenNetwork
from node.core.running_lock import AlreadyRunning
from protocols.errors import Refused
from protocols.identity import Identity
from protocols.network import Network
from protocols.rpc import open_rpc
from protocols.rpc.ping import ping
from protocols.testing.world import NodeSettings, SimulatedNetwork, SimulatedWorld
from tests.commands.console import files_of_a_running_node
from tests.homes import home_in
from tests.waiting import PATIENCE_SECONDS


@pytest.fixture
async def world() -> AsyncIterator[SimulatedWorld]:
    async with SimulatedWorld(seed=1) as world:
        yield world


@pytest.fixture
def configuration(tmp_path: Path) -> Configuration:
    return home_in(tmp_path)


def network_in(world: SimulatedWorld, name: str = "node") -> OpenNetwork:
    """The network that a Node is given here: one of a simulated world."""

    @asynccontextmanager
    async def open_network(_: Identity, __: Configuration) -> AsyncIterator[Network]:
        yield world.add_node(name)

    return open_network


async def test_a_node_that_has_started_answers_pings_and_its_owner(
    world: SimulatedWorld, configuration: Configuration
) -> None:
    caller = world.add_node("caller")
    async with (
        Node(configuration, open_network=network_in(world)) as node,
        open_rpc(caller) as rpc,
    ):
        caller.learn_addresses(node.network.peer_id, node.network.addresses())
        await ping(rpc, node.network.peer_id, timeout=20)
        socket = configuration.places.control_socket
        status = await trio.to_thread.run_sync(ask_once, socket, "status")
        assert status["rpc"]["requests_served"] == 1
        assert [link["peer"] for link in status["links"]] == [caller.peer_id]


@pytest.mark.slow
async def test_a_node_whose_relays_are_gone_is_still_met_through_its_holes(
    world: SimulatedWorld, configuration: Configuration
) -> None:
    helper, peer = world.add_node("helper"), world.add_node("peer")
    address = helper.addresses()[0]
    values = {**configuration.values, "dht.bootstrap": (address,)}
    joining = dataclasses.replace(configuration, values=values)
    behind = NodeSettings(nat=Nat.PORT_RESTRICTED)

    @asynccontextmanager
    async def open_network(_: Identity, __: Configuration) -> AsyncIterator[Network]:
        yield world.add_node("node", behind)

    async with trio.open_nursery() as nursery, Node(joining, open_network=open_network) as node:
        await nursery.start(Connectivity(helper, tuple).run)  # it dials back, and relays nothing
        with trio.fail_after(PATIENCE_SECONDS):
            while node.connectivity.mode is not ReachMode.DIAL_OUT_ONLY:
                await node.connectivity.changed.wait()
        assert node.dials_out_only()
        network = node.network
        assert isinstance(network, SimulatedNetwork)
        network.link_to(peer, peer.address, punched=True)
        assert not node.dials_out_only()
        nursery.cancel_scope.cancel()


async def test_it_ends_without_a_trace(
    world: SimulatedWorld, configuration: Configuration, tmp_path: Path
) -> None:
    tasks_before = trio.lowlevel.current_statistics().tasks_living
    async with Node(configuration, open_network=network_in(world)):
        assert trio.lowlevel.current_statistics().tasks_living > tasks_before
    assert trio.lowlevel.current_statistics().tasks_living == tasks_before
    assert files_of_a_running_node(tmp_path) == []


async def test_the_same_home_can_be_used_again_after_it(
    world: SimulatedWorld, configuration: Configuration
) -> None:
    for name in ("first", "second"):
        async with Node(configuration, open_network=network_in(world, name)):
            pass


async def test_a_second_node_is_refused_and_the_first_goes_on(
    world: SimulatedWorld, configuration: Configuration
) -> None:
    async with Node(configuration, open_network=network_in(world)) as node:
        with pytest.raises(AlreadyRunning):
            async with Node(configuration, open_network=network_in(world, "second")):
                pass
        assert node.control.path.exists()
        assert configuration.places.lock_file.exists()


async def test_an_error_inside_ends_the_node_and_comes_out(
    world: SimulatedWorld, configuration: Configuration, tmp_path: Path
) -> None:
    with pytest.RaisesGroup(Refused, flatten_subgroups=True, allow_unwrapped=True):
        async with Node(configuration, open_network=network_in(world)):
            raise Refused("No.")
    assert files_of_a_running_node(tmp_path) == []


async def test_a_network_that_does_not_start_leaves_nothing(
    configuration: Configuration, tmp_path: Path
) -> None:
    @asynccontextmanager
    async def broken(_: Identity, __: Configuration) -> AsyncIterator[Network]:
        raise OSError("no such interface")
        yield

    with pytest.raises(OSError, match="no such interface"):
        async with Node(configuration, open_network=broken):
            pass
    assert files_of_a_running_node(tmp_path) == []


@pytest.mark.parametrize("checkpoints", range(12))
async def test_cancelling_at_any_moment_of_a_start_leaves_nothing(
    checkpoints: int, world: SimulatedWorld, configuration: Configuration, tmp_path: Path
) -> None:
    async def cancel_soon(scope: trio.CancelScope) -> None:
        for _ in range(checkpoints):
            await trio.lowlevel.checkpoint()
        scope.cancel()

    tasks_before = trio.lowlevel.current_statistics().tasks_living
    async with trio.open_nursery() as nursery:
        nursery.start_soon(cancel_soon, nursery.cancel_scope)
        async with Node(configuration, open_network=network_in(world)):
            await trio.sleep_forever()
    assert nursery.cancel_scope.cancel_called
    assert trio.lowlevel.current_statistics().tasks_living == tasks_before
    assert files_of_a_running_node(tmp_path) == []


async def test_files_that_a_killed_node_left_half_written_are_removed_by_the_next_one(
    world: SimulatedWorld, configuration: Configuration, tmp_path: Path
) -> None:
    nobody = (1 << 31) - 1  # no process has this id
    left = tmp_path / f".identity.key.{nobody}.0123abcd"
    theirs = tmp_path / f".access.pass.{os.getpid()}.0123abcd"  # of one who is writing now
    for draft in (left, theirs):
        draft.touch()
    async with Node(configuration, open_network=network_in(world)):
        assert theirs.exists()
        assert not left.exists()


async def test_files_of_another_node_are_not_removed_by_force(
    world: SimulatedWorld, configuration: Configuration
) -> None:
    async with Node(configuration, open_network=network_in(world)) as node:
        refused = Node(configuration, open_network=network_in(world, "second"))
        with pytest.raises(AlreadyRunning):
            async with refused:
                pass
        refused.remove_run_files()
        assert node.control.path.exists()
        node.remove_run_files()
        assert not node.control.path.exists()
        assert not configuration.places.lock_file.exists()
