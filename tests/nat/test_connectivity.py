"""Nodes behind routers of every kind find out their mode and meet, in a simulated world."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest
import trio

from nat.connectivity import (
    LISTENING_CONTACT_SECONDS,
    LOOK_AGAIN_SECONDS,
    LOOK_AGAIN_UNKNOWN_SECONDS,
    Connectivity,
    ReachFacts,
    ReachMode,
    from_outside,
    mode_of,
)
from nat.kinds import Nat, can_punch
from nat.reachability import DIAL_SECONDS, DialVerdict, Judge
from nat.relay_limits import RelayLimits
from nat.relaying import Relay
from protocols.errors import Unreachable
from protocols.network import Reach, Sighting
from protocols.testing.link_model import LinkSettings
from protocols.testing.world import NodeSettings, SimulatedNetwork, SimulatedWorld
from tests.simulated.worlds import PROTOCOL, SETTINGS, echo, read_exactly, simulated

KINDS = (Nat.NONE, Nat.CONE, Nat.PORT_RESTRICTED, Nat.SYMMETRIC)
MODES = {
    Nat.NONE: ReachMode.DIRECT,
    Nat.CONE: ReachMode.PUNCHED,
    Nat.PORT_RESTRICTED: ReachMode.PUNCHED,
    Nat.SYMMETRIC: ReachMode.RELAYED,
}
STATED_SECONDS = 30.0
DIRECT_SECONDS = 5.0


@dataclass
class Home:
    """A node and its traversal."""

    network: SimulatedNetwork
    connectivity: Connectivity


class Town:
    """Backbones that relay and judge, and homes that join by them."""

    def __init__(self, world: SimulatedWorld, nursery: trio.Nursery) -> None:
        self.world = world
        self.nursery = nursery
        self.backbones: list[SimulatedNetwork] = []
        self.relays: list[Relay] = []
        self.judges: list[Judge] = []

    async def add_backbone(self, limits: RelayLimits | None = None) -> Relay:
        network = self.world.add_node(f"backbone-{len(self.backbones)}")
        relay = Relay(network, limits or RelayLimits())
        await self.nursery.start(relay.run)
        connectivity = Connectivity(network, lambda: [])
        await self.nursery.start(connectivity.run)
        self.backbones.append(network)
        self.relays.append(relay)
        self.judges.append(connectivity.judge)
        return relay

    async def add_home(
        self, name: str, nat: Nat, *, mapped: Callable[[], str | None] = lambda: None
    ) -> Home:
        network = self.world.add_node(name, NodeSettings(nat=nat))
        connectivity = Connectivity(
            network, lambda: [one.peer_id for one in self.backbones], mapped=mapped
        )
        for backbone in self.backbones:
            network.learn_addresses(backbone.peer_id, backbone.addresses())
            await network.connect(backbone.peer_id)
        await self.nursery.start(connectivity.run)
        network.serve(PROTOCOL, echo)
        return Home(network, connectivity)


@asynccontextmanager
async def town(world: SimulatedWorld, backbones: int = 2) -> AsyncIterator[Town]:
    async with trio.open_nursery() as nursery:
        made = Town(world, nursery)
        for _ in range(backbones):
            await made.add_backbone()
        yield made
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("backbones", [1, 2])
@pytest.mark.parametrize("nat", KINDS)
@simulated
async def test_a_node_finds_out_its_mode(world: SimulatedWorld, nat: Nat, backbones: int) -> None:
    async with town(world, backbones) as here:
        home = await here.add_home("home", nat)
        with trio.fail_after(STATED_SECONDS):
            await home.connectivity.stated.wait()
            assert home.connectivity.mode is MODES[nat]
            while home.connectivity.nat is not nat:  # how it filters is found out afterwards
                await home.connectivity.changed.wait()
        assert home.connectivity.mode is MODES[nat]
        assert home.connectivity.nat is nat


@pytest.mark.parametrize("left", KINDS)
@pytest.mark.parametrize("right", KINDS)
@simulated
async def test_every_pair_meets_and_is_direct_where_it_can_be(
    world: SimulatedWorld, left: Nat, right: Nat
) -> None:
    async with town(world) as here:
        one, other = await here.add_home("left", left), await here.add_home("right", right)
        await one.connectivity.stated.wait()
        await other.connectivity.stated.wait()
        one.network.learn_addresses(other.network.peer_id, other.network.addresses())
        with trio.fail_after(STATED_SECONDS):
            stream = await one.network.open(other.network.peer_id, PROTOCOL)
            await stream.send_all(b"hello")
            assert await read_exactly(stream, 5) == b"hello"
        await trio.sleep(DIRECT_SECONDS)
        link = one.network.link(other.network.peer_id)
        assert link is not None
        assert (link.reach is Reach.DIRECT) is can_punch(left, right)
        if Nat.NONE not in (left, right):
            assert link.punched is (link.reach is Reach.DIRECT)


@simulated
async def test_a_node_that_becomes_dialable_lets_its_places_at_relays_lapse(
    world: SimulatedWorld,
) -> None:
    async with town(world) as here:
        home = await here.add_home("home", Nat.PORT_RESTRICTED)
        await home.connectivity.stated.wait()
        assert [relay.counts().reservations for relay in here.relays] == [1, 1]
        home.network.settings = NodeSettings(nat=Nat.NONE)  # its owner has forwarded a port
        home.connectivity.network_changed()
        await trio.sleep(STATED_SECONDS)
        assert home.connectivity.mode is ReachMode.DIRECT
        assert not any("p2p-circuit" in one for one in home.network.addresses())
        assert len(home.connectivity.reservations.held) == 2, "others may still come by them"
        await trio.sleep(RelayLimits().reservation_seconds)
        assert [relay.counts().reservations for relay in here.relays] == [0, 0]
        home.network.settings = NodeSettings(nat=Nat.PORT_RESTRICTED)
        home.connectivity.network_changed()
        await trio.sleep(STATED_SECONDS)
        assert home.connectivity.mode is ReachMode.PUNCHED
        assert [relay.counts().reservations for relay in here.relays] == [1, 1]


@simulated
async def test_what_is_known_still_counts_if_a_look_tells_nothing(
    world: SimulatedWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with town(world) as here:
        home = await here.add_home("home", Nat.NONE)
        await home.connectivity.stated.wait()
        known = home.connectivity.addresses()
        assert known
        looks = 0

        async def no_sighting(*_arguments: object, **_named: object) -> Sighting:
            nonlocal looks
            looks += 1
            await trio.sleep(1.0)
            raise Unreachable("The line is full.")

        monkeypatch.setattr(home.network, "sighting", no_sighting)
        await trio.sleep(LOOK_AGAIN_SECONDS + 10.0)
        assert looks
        assert home.connectivity.addresses() == known
        assert home.connectivity.mode is ReachMode.DIRECT
        before = looks
        await trio.sleep(2 * LOOK_AGAIN_UNKNOWN_SECONDS)
        assert looks > before, "it looks again soon"


@simulated
async def test_a_first_look_that_tells_nothing_is_repeated_soon(
    world: SimulatedWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with town(world) as here:

        async def no_sighting(*_arguments: object, **_named: object) -> Sighting:
            await trio.sleep(1.0)
            raise Unreachable("The line is full.")

        with monkeypatch.context() as full:
            full.setattr(SimulatedNetwork, "sighting", no_sighting)
            home = await here.add_home("home", Nat.NONE)
            await home.connectivity.looked.wait()
        assert not home.connectivity.mode.is_dialable
        await trio.sleep(LOOK_AGAIN_UNKNOWN_SECONDS + STATED_SECONDS)
        assert home.connectivity.mode is ReachMode.DIRECT


@simulated
async def test_a_router_that_forwards_a_port_later_is_noticed_with_one_helper_alone(
    world: SimulatedWorld,
) -> None:
    """The helper was contacted from the listening port, so its dial would prove nothing yet."""
    async with town(world, backbones=1) as here:
        forwarded: list[str] = []
        home = await here.add_home(
            "home", Nat.PORT_RESTRICTED, mapped=lambda: forwarded[0] if forwarded else None
        )
        await home.connectivity.looked.wait()
        assert home.connectivity.mode is ReachMode.PUNCHED
        home.network.settings = NodeSettings(nat=Nat.NONE)
        forwarded.append(home.network.place)
        home.connectivity.mapping_changed()
        await trio.sleep(LISTENING_CONTACT_SECONDS + STATED_SECONDS)
        assert home.connectivity.mode is ReachMode.MAPPED


@simulated
async def test_two_that_ask_at_once_how_it_looks_from_outside_get_the_same_answer(
    world: SimulatedWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only one connection can go from a port to the same place: the second one failed."""
    async with town(world, backbones=1) as here:
        home = await here.add_home("home", Nat.PORT_RESTRICTED)
        await home.connectivity.looked.wait()
        home.connectivity.network_changed()
        usual, at_once = home.network.sighting, 0

        async def one_at_once(peer: str, *, port: int = 0, ipv4: bool = False) -> Sighting:
            nonlocal at_once
            if port and at_once:
                raise Unreachable("The address is in use.")
            at_once += bool(port)
            try:
                return await usual(peer, port=port, ipv4=ipv4)
            finally:
                at_once -= bool(port)

        monkeypatch.setattr(home.network, "sighting", one_at_once)
        seen = []

        async def ask() -> None:
            seen.append((await home.connectivity.outside()).addresses)

        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(ask)
        assert len(set(seen)) == 1
        assert seen[0]


@simulated
async def test_bootstrap_peers_are_asked_for_help_before_volunteers_that_are_linked(
    world: SimulatedWorld,
) -> None:
    async with town(world, backbones=2) as here:
        home = await here.add_home("home", Nat.PORT_RESTRICTED)
        for number in range(3):
            volunteer = world.add_node(f"volunteer-{number}")
            home.network.learn_addresses(volunteer.peer_id, volunteer.addresses())
            await home.network.connect(volunteer.peer_id)
        first, second = (one.peer_id for one in here.backbones)
        await home.network.disconnect(first)
        assert home.connectivity.helpers()[:2] == (second, first)
        assert len(home.connectivity.helpers()) == 5


def full_line(usual: LinkSettings) -> LinkSettings:
    """On which every dial of a helper is given up."""
    latency = 0.6 * DIAL_SECONDS / SETTINGS.connect_round_trips
    return replace(usual, latency_seconds=latency)


def make_paths(here: Town, home: Home, path: LinkSettings) -> None:
    here.world.settings = replace(here.world.settings, link=path)
    for backbone in here.backbones:
        for one, other in ((home.network, backbone), (backbone, home.network)):
            end = one.link_end(other.peer_id)
            assert end is not None
            end.path = path


@simulated
async def test_a_first_look_on_a_full_line_counts_until_the_line_is_free(
    world: SimulatedWorld,
) -> None:
    async with town(world) as here:
        usual = world.settings.link
        world.settings = replace(world.settings, link=full_line(usual))
        home = await here.add_home("home", Nat.NONE)
        await home.connectivity.looked.wait()
        found = {one.verdict for one in home.connectivity.addresses()}
        assert found == {DialVerdict.PRIVATE}, "it is all that is known"
        assert home.connectivity.mode is ReachMode.PUNCHED, "it has places at relays"
        make_paths(here, home, usual)
        await trio.sleep(LOOK_AGAIN_UNKNOWN_SECONDS + STATED_SECONDS)
        assert home.connectivity.mode is ReachMode.DIRECT


@simulated
async def test_a_dial_that_fails_because_the_line_is_full_does_not_count(
    world: SimulatedWorld,
) -> None:
    async with town(world) as here:
        home = await here.add_home("home", Nat.NONE)
        await home.connectivity.stated.wait()
        usual = world.settings.link
        make_paths(here, home, full_line(usual))
        await trio.sleep(LOOK_AGAIN_SECONDS + STATED_SECONDS)
        assert any(judge.outcomes["dial_error"] for judge in here.judges), "it was dialled"
        assert home.connectivity.mode is ReachMode.DIRECT
        make_paths(here, home, usual)
        home.network.settings = NodeSettings(nat=Nat.PORT_RESTRICTED)
        await trio.sleep(LOOK_AGAIN_UNKNOWN_SECONDS + STATED_SECONDS)
        assert home.connectivity.mode is ReachMode.PUNCHED, "it looks again soon"


def test_a_helper_in_the_own_network_does_not_say_how_the_internet_sees_a_node() -> None:
    inside, outside = (Sighting(1, f"/ip4/{host}/tcp/1") for host in ("192.168.1.7", "8.8.4.4"))
    assert from_outside([inside, outside]) == [outside]
    assert from_outside([inside]) == [inside], "a run may be at one home"


def test_no_hole_is_punched_to_a_node_that_listens_nowhere() -> None:
    facts = ReachFacts(nat=Nat.CONE, reservations=2, nobody=False)
    assert mode_of(facts) is ReachMode.PUNCHED
    assert mode_of(replace(facts, listens=False)) is ReachMode.RELAYED
