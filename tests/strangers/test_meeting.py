"""Strangers and we connect, know one another, and part, whoever dials."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest
import trio
from trio.abc import HalfCloseableStream

from protocols.errors import PotluckError, ProtocolNotServed, Unreachable
from protocols.identity import Identity, PeerId
from protocols.network import Reach
from tests.strangers.conversations import ECHO, echo, exchange
from tests.strangers.javascript_stranger import JavascriptStranger
from tests.strangers.sides import Link, Who, linked, our_node
from tests.strangers.stranger import Stranger, StrangerRefused
from tests.waiting import until

# A kill closes the socket, so the kernel tells us; this is for a busy machine.
NOTICED_SECONDS = 2.0


async def reach_becomes(link: Link, wanted: Reach) -> None:
    """Return when the link to the stranger is as wanted, or fail when it takes too long."""
    them = link.ours.other
    with trio.fail_after(NOTICED_SECONDS), link.network.link_events() as events:
        facts = link.network.link(them)
        if (facts.reach if facts else Reach.NONE) == wanted:
            return
        async for event in events:
            if event.peer == them and event.reach == wanted:
                return


async def test_both_sides_know_whom_they_met(stranger: Stranger, dialler: Who) -> None:
    async with linked(stranger, dialler) as link:
        await reach_becomes(link, Reach.DIRECT)
        facts = link.network.link(link.ours.other)

        assert facts is not None
        assert facts.inbound == (dialler == "they")
        assert link.network.peer_id in await stranger.connected()


async def test_we_ping_them(stranger: Stranger, dialler: Who) -> None:
    async with linked(stranger, dialler) as link:
        await reach_becomes(link, Reach.DIRECT)

        assert 0 < await link.network.ping(link.ours.other) < 5


async def test_they_ping_us(stranger: Stranger, dialler: Who) -> None:
    async with linked(stranger, dialler) as link:
        assert 0 <= await stranger.ping(link.network.peer_id) < 5


async def test_they_learn_our_agent_and_protocols_by_identify(
    javascript: JavascriptStranger, dialler: Who
) -> None:
    async with our_node() as network:
        network.serve(ECHO, echo)
        if dialler == "we":
            network.learn_addresses(PeerId(javascript.peer), [javascript.address])
            await network.connect(PeerId(javascript.peer))
        else:
            await javascript.connect(network.addresses()[0])

        agent, protocols = await javascript.identify(network.peer_id)

        assert agent.startswith("potluck/")
        assert ECHO in protocols
        assert "/ipfs/ping/1.0.0" in protocols
        await javascript.disconnect(network.peer_id)


async def test_a_protocol_they_do_not_serve_is_an_error_of_its_own(
    stranger: Stranger, dialler: Who
) -> None:
    async with linked(stranger, dialler) as link:
        with pytest.raises(ProtocolNotServed):
            await link.ours.open("/strangers/nowhere/1.0.0")

        async with link.theirs.serving(ECHO, echo):
            stream = await link.ours.open(ECHO)
            await exchange(stream, 1000)
            await stream.aclose()


async def test_a_protocol_we_do_not_serve_is_refused_in_their_words(
    stranger: Stranger, dialler: Who
) -> None:
    async with linked(stranger, dialler) as link:
        with pytest.raises(StrangerRefused, match="negotiate"):
            await link.theirs.open("/strangers/nowhere/1.0.0")

        async with link.ours.serving(ECHO, echo):
            stream = await link.theirs.open(ECHO)
            await exchange(stream, 1000)
            await stream.aclose()


async def test_another_peers_id_at_their_address_is_not_believed(stranger: Stranger) -> None:
    impostor = Identity.generate().peer_id
    where = stranger.address.rpartition("/p2p/")[0]
    async with our_node() as network:
        network.learn_addresses(impostor, [f"{where}/p2p/{impostor}"])

        with pytest.raises(Unreachable):
            await network.connect(impostor)

        assert network.links() == ()


async def test_they_do_not_believe_another_id_at_our_address(stranger: Stranger) -> None:
    async with our_node() as network:
        where = network.addresses()[0].rpartition("/p2p/")[0]

        with pytest.raises(StrangerRefused):
            await stranger.connect(f"{where}/p2p/{Identity.generate().peer_id}")


async def test_we_notice_that_they_hung_up(stranger: Stranger, dialler: Who) -> None:
    async with linked(stranger, dialler) as link:
        await reach_becomes(link, Reach.DIRECT)

        await stranger.disconnect(link.network.peer_id)

        await reach_becomes(link, Reach.NONE)


async def test_they_notice_that_we_hung_up(stranger: Stranger, dialler: Who) -> None:
    async with linked(stranger, dialler) as link:
        await reach_becomes(link, Reach.DIRECT)

        await link.network.disconnect(link.ours.other)

        async def gone() -> bool:
            return link.network.peer_id not in await stranger.connected()

        await until(gone, NOTICED_SECONDS)


async def test_we_meet_again_after_parting(stranger: Stranger, dialler: Who) -> None:
    async with linked(stranger, dialler) as link, link.theirs.serving(ECHO, echo):
        await reach_becomes(link, Reach.DIRECT)
        await link.network.disconnect(link.ours.other)
        await reach_becomes(link, Reach.NONE)

        link.network.learn_addresses(link.ours.other, [stranger.address])
        stream = await link.ours.open(ECHO)
        await exchange(stream, 100_000)
        await stream.aclose()


async def echo_until_broken(stream: HalfCloseableStream) -> None:
    with contextlib.suppress(trio.BrokenResourceError):
        await echo(stream)


async def test_a_stranger_that_is_killed_breaks_our_streams_at_once(
    mortal: Stranger,
) -> None:
    """F1, with a stranger in the place of the dead."""
    async with our_node() as network:
        network.learn_addresses(PeerId(mortal.peer), [mortal.address])
        async with mortal.serving(ECHO, echo_until_broken):
            stream = await network.open(PeerId(mortal.peer), ECHO)
            await exchange(stream, 10_000)

            os.kill(mortal.process_id, signal.SIGKILL)

            with trio.fail_after(NOTICED_SECONDS), pytest.raises(trio.BrokenResourceError):
                await stream.receive_some(1)
            with pytest.raises(PotluckError):
                await network.open(PeerId(mortal.peer), ECHO)
