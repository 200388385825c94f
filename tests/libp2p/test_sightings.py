"""From where a peer sees us come, over the version of IP that is asked for."""

from __future__ import annotations

import pytest

from nat.addresses import host_of
from node.net.network import Libp2pSettings, open_libp2p_network
from protocols.identity import Identity
from protocols.network import TraversableNetwork

BOTH = Libp2pSettings(("/ip4/127.0.0.1/tcp/0", "/ip6/::1/tcp/0"))
IPV6_ALONE = Libp2pSettings(("/ip6/::1/tcp/0",))


async def linked_over_ipv6(we: TraversableNetwork, they: TraversableNetwork) -> None:
    we.learn_addresses(they.peer_id, [one for one in they.addresses() if "/ip6/" in one])
    await we.connect(they.peer_id)
    link = we.link(they.peer_id)
    assert link is not None
    assert host_of(link.remote_address) == "::1"


@pytest.mark.parametrize(("ipv4", "seen"), [(False, "::1"), (True, "127.0.0.1")])
async def test_a_peer_that_is_linked_over_ipv6_sees_us_over_ipv4_if_we_want_that(
    ipv4: bool, seen: str
) -> None:
    async with (
        open_libp2p_network(Identity.generate(), BOTH) as we,
        open_libp2p_network(Identity.generate(), BOTH) as they,
    ):
        await linked_over_ipv6(we, they)
        we.learn_addresses(they.peer_id, they.addresses())
        assert host_of((await we.sighting(they.peer_id, ipv4=ipv4)).address) == seen


async def test_over_ipv6_alone_the_link_is_followed_whatever_is_wanted() -> None:
    async with (
        open_libp2p_network(Identity.generate(), IPV6_ALONE) as alone,
        open_libp2p_network(Identity.generate(), BOTH) as they,
        open_libp2p_network(Identity.generate(), BOTH) as we,
    ):
        await linked_over_ipv6(alone, they)
        alone.learn_addresses(they.peer_id, they.addresses())
        assert host_of((await alone.sighting(they.peer_id, ipv4=True)).address) == "::1"
        await linked_over_ipv6(we, alone)
        nobody = f"/ip4/127.0.0.1/tcp/1/p2p/{alone.peer_id}"
        we.learn_addresses(alone.peer_id, [nobody])
        assert host_of((await we.sighting(alone.peer_id, ipv4=True)).address) == "::1"
