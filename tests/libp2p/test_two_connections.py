"""When two connections to one peer come up: the living one is the link, and one remains."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial

import pytest
import trio

from lab.bench.link_proxy import LinkConditions, open_link_proxy
from nat import messages
from nat.addresses import port_of, tcp_address
from nat.messages import AutoNat, DialBack, DialBackResponse, DialStatus, ResponseStatus
from nat.reachability import DIAL_BACK, DIAL_REQUEST, DialBacks, DialVerdict
from node.net.libp2p import negotiation, traversal
from node.net.libp2p.addresses import Address
from node.net.libp2p.host import library_id
from node.net.libp2p.upgrading import upgrade
from node.net.network import Libp2pNetwork, open_libp2p_network
from node.net.transport.traffic import Traffic
from protocols.identity import Identity
from protocols.network import Stream
from tests.libp2p.nodes import LOOPBACK, echo, networks
from tests.waiting import PATIENCE_SECONDS, until

ECHO = "/potluck/echo/1.0.0"
IMPATIENT = replace(LOOPBACK, sign_of_life_seconds=0.3, surplus_idle_seconds=0.1)


def connections(of: Libp2pNetwork) -> int:
    return len(of._links.every_connection())


async def test_of_two_simultaneous_dials_the_same_one_remains_on_both_sides() -> None:
    async with networks(2, IMPATIENT) as (first, second):
        first.serve(ECHO, echo)
        second.serve(ECHO, echo)
        # The result of both calling `connect` at once, made certain.
        await first._dial(second.peer_id)
        await second._dial(first.peer_id)
        await until(lambda: connections(first) == 2, within_seconds=PATIENCE_SECONDS)
        with first.link_events() as events:
            for one in (first, second):
                await until(lambda one=one: connections(one) == 1, PATIENCE_SECONDS)  # type: ignore[misc]
            assert events.statistics().current_buffer_used == 0
        ours, theirs = first.link(second.peer_id), second.link(first.peer_id)
        assert ours is not None
        assert theirs is not None
        assert ours.inbound != theirs.inbound
        assert theirs.inbound == (first.peer_id < second.peer_id)
        stream = await first.open(second.peer_id, ECHO)
        await stream.send_all(b"sound")
        assert await stream.receive_some() == b"sound"


@pytest.mark.parametrize("asks", [0, 1], ids=["the_smaller_asks", "the_larger_asks"])
async def test_a_dial_back_by_the_server_that_is_linked_counts_whichever_connection_is_the_link(
    asks: int,
) -> None:
    """Ours dial back under another identity, js-libp2p does it under its own."""
    async with networks(2, LOOPBACK) as nodes:
        in_order = sorted(nodes, key=lambda network: network.peer_id)
        asker, server = in_order[asks], in_order[1 - asks]

        def both_live() -> bool:
            both = asker._links.connections_to(server.peer_id)
            return len(both) == 2 and all(one.alive for one in both)

        async def dial_back(stream: Stream) -> None:
            asked = await messages.read(stream, AutoNat)
            connection = await server._dial(asker.peer_id)
            await until(both_live, PATIENCE_SECONDS)
            async with await connection.open_muxed() as muxed:
                assert await negotiation.propose(muxed, DIAL_BACK.encode())
                await messages.send(muxed, DialBack(nonce=asked.request.nonce))
                await messages.read(muxed, DialBackResponse)
            answer = AutoNat()
            answer.response.status = ResponseStatus.OK
            answer.response.dial_status = DialStatus.OK
            await messages.send(stream, answer)

        server.serve(DIAL_REQUEST, dial_back)
        await asker._dial(server.peer_id)
        dial_backs = DialBacks(asker)
        dial_backs.serve()

        found = await dial_backs.ask(server.peer_id, asker.listened_addresses()[0])

        assert found is DialVerdict.PUBLIC


async def test_a_handshake_through_one_hole_ends_after_another_hole_was_the_first() -> None:
    """With IPv4 and IPv6 there may be two, and the other side may use the second one already."""
    late = trio.Event()
    async with networks(2) as (near, far), trio.open_nursery() as nursery:
        direct = far.listened_addresses()[0]

        async def pass_on_late(near_end: trio.SocketStream) -> None:
            await late.wait()
            far_end = await trio.open_tcp_stream("127.0.0.1", port_of(direct))
            async with far_end, trio.open_nursery() as both_ways:
                both_ways.start_soon(copy, near_end, far_end)
                both_ways.start_soon(copy, far_end, near_end)

        async def copy(source: trio.SocketStream, target: trio.SocketStream) -> None:
            async for data in source:
                await target.send_all(data)

        listeners = await nursery.start(partial(trio.serve_tcp, pass_on_late, 0, host="127.0.0.1"))
        detour = tcp_address("127.0.0.1", listeners[0].socket.getsockname()[1])

        await near.punch(far.peer_id, [detour, direct], initiates=True)
        assert connections(near) == 1
        late.set()
        await until(lambda: connections(near) == connections(far) == 2, PATIENCE_SECONDS)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("initiates", [True, False])
async def test_no_hole_is_punched_any_more_to_an_address_where_another_node_answers(
    initiates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = 0
    answered = trio.Event()
    connect_from = traversal.connect_from

    async def counted(address: Address, port: int) -> trio.SocketStream:
        nonlocal tried
        tried += 1
        return await connect_from(address, port)

    monkeypatch.setattr(traversal, "connect_from", counted)
    async with networks(3) as (near, wanted, other), trio.open_nursery() as nursery:

        async def answer(stream: trio.SocketStream) -> None:
            expected = None if initiates else library_id(near.peer_id)
            upgrader = other._swarm.upgrader
            with suppress(Exception):  # near has hung up
                await upgrade(upgrader, stream, Traffic(), initiator=not initiates, peer=expected)
            answered.set()

        listeners = await nursery.start(partial(trio.serve_tcp, answer, 0, host="127.0.0.1"))
        there = tcp_address("127.0.0.1", listeners[0].socket.getsockname()[1])
        nursery.start_soon(partial(near.punch, wanted.peer_id, [there], initiates=initiates))
        with trio.fail_after(PATIENCE_SECONDS):
            await answered.wait()
        await trio.sleep(10 * traversal.KNOCK_AGAIN_SECONDS)
        assert tried == 1
        nursery.cancel_scope.cancel()


@pytest.mark.slow
async def test_a_surplus_connection_is_not_closed_under_a_stream() -> None:
    # on busy cores a living connection may need longer to answer than these are patient
    settings = replace(IMPATIENT, sign_of_life_seconds=LOOPBACK.sign_of_life_seconds)
    async with networks(2, settings) as (first, second):
        smaller, larger = sorted((first, second), key=lambda network: network.peer_id)
        smaller.serve(ECHO, echo)
        doomed = await larger._dial(smaller.peer_id)  # the larger one's dial becomes surplus
        stream = await larger.open(smaller.peer_id, ECHO)
        await smaller._dial(larger.peer_id)
        await until(lambda: larger._links.best(smaller.peer_id) is not doomed, PATIENCE_SECONDS)
        for _ in range(5):
            await stream.send_all(b"still used")
            assert await stream.receive_some() == b"still used"
            await trio.sleep(2 * IMPATIENT.surplus_idle_seconds)
        await stream.aclose()
        with trio.fail_after(PATIENCE_SECONDS):
            await doomed.ended.wait()
        await until(lambda: connections(larger) == 1, within_seconds=PATIENCE_SECONDS)


@pytest.mark.slow
async def test_a_connection_that_is_full_is_not_taken_for_a_dead_one() -> None:
    """Its pong waits behind a second of bulk, and a newer connection is empty."""
    slow = LinkConditions(bytes_per_second=200_000.0)
    async with networks(2, IMPATIENT) as (near, far):
        far.serve(ECHO, echo)
        port = int(far.addresses()[0].split("/")[4])
        async with open_link_proxy(("127.0.0.1", port), slow) as proxy:
            near.learn_addresses(far.peer_id, [f"/ip4/127.0.0.1/tcp/{proxy.port}"])
            old = await near._dial(far.peer_id)
            stream = await near.open(far.peer_id, ECHO)
            size = 400_000

            async def send() -> None:
                await stream.send_all(bytes(size))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(send)
                received = len(await stream.receive_some())
                await far._dial(near.peer_id)
                while received < size:
                    received += len(await stream.receive_some())
            assert not old.ended.is_set()
            await stream.aclose()


async def test_a_peer_that_lost_power_and_came_back_is_met_over_its_new_connection() -> None:
    """The old connection is dead and nobody has said so; it is the one that the rule prefers."""
    seed = 0
    async with open_libp2p_network(Identity.from_seed(bytes(32)), IMPATIENT) as near:
        while (identity := Identity.from_seed(bytes([seed]) * 32)).peer_id <= near.peer_id:
            seed += 1
        async with open_libp2p_network(identity, IMPATIENT) as before:
            port = int(before.addresses()[0].split("/")[4])
            async with open_link_proxy(("127.0.0.1", port), LinkConditions()) as proxy:
                near.learn_addresses(before.peer_id, [f"/ip4/127.0.0.1/tcp/{proxy.port}"])
                await near.connect(before.peer_id)
                proxy.swallow()
                async with open_libp2p_network(identity, IMPATIENT) as after:
                    after.serve(ECHO, echo)
                    after.learn_addresses(near.peer_id, near.addresses())
                    await after.connect(near.peer_id)
                    await until(lambda: connections(near) == 2, PATIENCE_SECONDS)
                    with trio.fail_after(IMPATIENT.sign_of_life_seconds):
                        stream = await near.open(identity.peer_id, ECHO)
                        await stream.send_all(b"back")
                        assert await stream.receive_some() == b"back"
                    await until(lambda: connections(near) == 1, PATIENCE_SECONDS)
                    await stream.send_all(b"to stay")
                    assert await stream.receive_some() == b"to stay"
