"""Nodes of a simulated network that are members of a run, with an auth server over real HTTPS."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from node.core.access.auth_client import GrantedPass, OfferedProvider, open_auth_client
from node.core.access.pass_file import KeptPass, keep_pass
from node.core.access.server_time import ServerTime
from node.core.configuration import Configuration
from node.core.key_file import FIRST_LINE
from node.core.node import Node, OpenNetwork
from node.net.clocks import Clocks, machine_clocks
from protocols.identity import Identity
from protocols.network import Network
from protocols.testing.world import SimulatedWorld
from tests.access.https_servers import ScriptedServer
from tests.access.impostor import Impostor
from tests.homes import home_in
from tests.waiting import PATIENCE_SECONDS, until

CODE = OfferedProvider("code", "code")


def clocks_off(seconds: float) -> Clocks:
    """This machine's clocks, the wall clock wrong by so much."""
    true = machine_clocks()
    return Clocks(lambda: true.wall() + seconds, true.elapsed)


def network_in(world: SimulatedWorld, name: str) -> OpenNetwork:
    """A network of the world, whose node of that name has the key that `log_in` wrote."""

    @asynccontextmanager
    async def open_network(identity: Identity, _: Configuration) -> AsyncIterator[Network]:
        network = world.add_node(name)
        assert network.peer_id == identity.peer_id
        try:
            yield network
        finally:
            network.end(politely=True)

    return open_network


async def log_in(
    home: Path,
    identity: Identity,
    impostor: Impostor,
    server: ScriptedServer,
    clocks: Clocks | None = None,
) -> Configuration:
    """A home with this key and a pass, as `potluck login` leaves it."""
    configuration = home_in(home)
    write_key(configuration.key_file, identity)
    time = ServerTime(clocks or machine_clocks())
    assert server.certificate is not None
    kept = KeptPass(
        run=impostor.run,
        access_pass=b"",
        fingerprint=impostor.fingerprint,
        auth_url=server.url,
        pin=server.certificate.sha256,
    )
    async with open_auth_client(
        identity,
        url=server.url,
        run=kept.run,
        fingerprint=kept.fingerprint,
        pin=kept.pin,
        time=time,
    ) as client:
        await client.meet()
        granted = await client.log_in(CODE, "ABCD")
    assert isinstance(granted, GrantedPass)
    keep_pass(
        configuration.places.pass_file,
        KeptPass(
            run=kept.run,
            access_pass=granted.signed,
            fingerprint=kept.fingerprint,
            auth_url=kept.auth_url,
            pin=kept.pin,
            clock_offset_ms=time.offset_ms,
        ),
    )
    return configuration


def write_key(path: Path, identity: Identity) -> None:
    """Keep the key there, as `potluck id` would."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{FIRST_LINE}\n{identity.seed.hex()}\n")
    path.chmod(0o600)


@asynccontextmanager
async def running_node(
    world: SimulatedWorld,
    name: str,
    configuration: Configuration,
    clocks: Clocks | None = None,
) -> AsyncIterator[Node]:
    async with Node(configuration, open_network=network_in(world, name), clocks=clocks) as node:
        yield node


def introduce(*nodes: Node) -> None:
    """Each knows where the others are."""
    for one in nodes:
        for other in nodes:
            if one is not other:
                one.network.learn_addresses(other.network.peer_id, other.network.addresses())


async def until_renewed(node: Node) -> None:
    """Return when the node has another token than now."""
    assert node.membership is not None
    before = node.membership.token.serial
    member = node.membership
    await until(lambda: member.token.serial != before, PATIENCE_SECONDS)
