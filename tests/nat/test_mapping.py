"""`PortMapper` with routers on loopback, in virtual time."""

# ruff: noqa: ARG001  a test has virtual time by having the clock among its arguments

from __future__ import annotations

import struct
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import trio
from trio.testing import MockClock

from nat.mapping import Mapping, MappingProtocol, PortMapper, Router
from nat.mapping.lease import LONGEST_DELAY_SECONDS
from nat.mapping.mapper import RELEASE_SECONDS, UNHEARD_RELEASE_SECONDS
from nat.mapping.upnp import HTTP_SECONDS, LARGEST_DOCUMENT_BYTES
from tests.nat.routers import (
    LOOPBACK,
    PUBLIC_HOST,
    Answering,
    PortControl,
    Serving,
    Table,
    UpnpRouter,
    both,
    free_udp_port,
    http_answer,
    nat_pmp_only,
    pcp_only,
    pcp_refuses,
    port_control,
    silence,
    upnp_router,
)

if TYPE_CHECKING:
    from trio_typing import TaskStatus  # the stubs of trio that libp2p brings know it only there

OUR_PORT = 4001

PCP, NAT_PMP, UPNP = MappingProtocol


@pytest.fixture
def clock() -> MockClock:
    """Time jumps when nothing has happened for that long, datagrams included."""
    return MockClock(autojump_threshold=0.05)


@dataclass
class Mapped:
    """A mapper at work, and what it tells."""

    mapper: PortMapper
    changes: trio.MemoryReceiveChannel[Mapping | None]
    announcement_port: int
    nursery: trio.Nursery
    ended: trio.Event

    async def next_change(self) -> Mapping | None:
        with trio.fail_after(4000):
            return await self.changes.receive()

    async def hears_nothing(self, seconds: float) -> bool:
        with trio.move_on_after(seconds) as silence:
            await self.changes.receive()
        return silence.cancelled_caught

    async def leave(self) -> float:
        """Cancel the mapper. Return how long it took to end."""
        began = trio.current_time()
        self.nursery.cancel_scope.cancel()
        await self.ended.wait()
        return trio.current_time() - began


@asynccontextmanager
async def mapped(
    router: Router | None = None,
    *,
    control: PortControl | None = None,
    upnp: UpnpRouter | None = None,
) -> AsyncIterator[Mapped]:
    tell, changes = trio.open_memory_channel[Mapping | None](100)
    place = router or Router(
        LOOPBACK,
        control.port if control else free_udp_port(),
        upnp.ssdp_port if upnp else free_udp_port(),
    )
    announcement_port = free_udp_port()

    async def find_router() -> Router | None:
        await trio.lowlevel.checkpoint()
        return place

    mapper = PortMapper(
        OUR_PORT, tell.send_nowait, find_router=find_router, announcement_port=announcement_port
    )
    ended = trio.Event()

    async def run(task_status: TaskStatus[trio.Nursery]) -> None:
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(mapper.run)
                task_status.started(nursery)
        finally:
            ended.set()

    async with trio.open_nursery() as outer:
        nursery = await outer.start(run)
        yield Mapped(mapper, changes, announcement_port, nursery, ended)
        outer.cancel_scope.cancel()


# -- PCP and NAT-PMP -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answering", "protocol"), [(pcp_only, PCP), (nat_pmp_only, NAT_PMP), (both, PCP)]
)
async def test_the_preferred_protocol_that_answers_maps_the_port_and_releases_it(
    clock: MockClock, answering: Answering, protocol: MappingProtocol
) -> None:
    table = Table()
    async with port_control(table, answering) as control, mapped(control=control) as node:
        mapping = await node.next_change()
        assert mapping == Mapping(protocol, PUBLIC_HOST, OUR_PORT, OUR_PORT, 1200)
        assert node.mapper.mapping == mapping
        assert node.mapper.trouble == ""
        assert table.mappings == {OUR_PORT: OUR_PORT}
        assert await node.leave() < 0.1
        assert table.mappings == {}


async def test_another_external_port_is_accepted(clock: MockClock) -> None:
    table = Table(taken={OUR_PORT, OUR_PORT + 1})
    async with port_control(table, both) as control, mapped(control=control) as node:
        mapping = await node.next_change()
        assert mapping is not None
        assert (mapping.external_port, mapping.internal_port) == (OUR_PORT + 2, OUR_PORT)


async def test_the_next_protocol_is_asked_if_the_preferred_one_refuses(clock: MockClock) -> None:
    async with port_control(Table(), pcp_refuses(2)) as control, mapped(control=control) as node:
        mapping = await node.next_change()
        assert mapping is not None
        assert mapping.protocol is NAT_PMP


async def test_a_mapping_is_renewed_and_not_told_again(clock: MockClock) -> None:
    table = Table(lifetime_seconds=600)
    async with port_control(table, pcp_only) as control, mapped(control=control) as node:
        await node.next_change()
        assert await node.hears_nothing(3000)
        renewals = [data for data in control.heard if data[0] == 2]
        assert len(renewals) == 1 + 9
        assert len({data[24:36] for data in renewals}) == 1, "one nonce"


@pytest.mark.slow
async def test_a_mapping_that_is_no_longer_renewed_is_lost_and_sought_again(
    clock: MockClock,
) -> None:
    async with port_control(Table(), pcp_only) as control, mapped(control=control) as node:
        await node.next_change()
        control.answering = silence
        assert await node.next_change() is None
        assert trio.current_time() == pytest.approx(1200, abs=1)
        control.answering = pcp_only
        assert await node.next_change() is not None


async def test_a_router_that_restarts_and_says_so_is_asked_at_once(clock: MockClock) -> None:
    table = Table()
    async with port_control(table, pcp_only) as control, mapped(control=control) as node:
        await node.next_change()
        await trio.sleep(100)
        table.mappings.clear()
        began = trio.current_time()
        table.epoch_seconds = lambda: trio.current_time() - began
        announcement = struct.pack("!BBBBII12x", 2, 128, 0, 0, 0, 1)
        await control.link.sendto(announcement, (LOOPBACK, node.announcement_port))
        assert await node.next_change() is None
        assert await node.next_change() is not None
        assert trio.current_time() - began < 1
        assert table.mappings == {OUR_PORT: OUR_PORT}


async def test_after_a_change_of_network_the_router_is_asked_at_once(clock: MockClock) -> None:
    table = Table()
    async with port_control(table, both) as control, mapped(control=control) as node:
        await node.next_change()
        await trio.sleep(100)
        table.external_host = "9.8.7.7"
        node.mapper.network_changed()
        assert await node.next_change() is None
        mapping = await node.next_change()
        assert mapping is not None
        assert mapping.external_host == "9.8.7.7"
        assert trio.current_time() < 102


@pytest.mark.parametrize("host", ["192.168.100.2", "100.64.0.9"])
async def test_a_router_behind_another_router_is_recognised(host: str) -> None:
    table = Table(external_host=host)
    async with port_control(table, both) as control, mapped(control=control) as node:
        mapping = await node.next_change()
        assert mapping is not None
        assert not mapping.is_public
        assert host in node.mapper.trouble
        assert "behind another router" in node.mapper.trouble


def lying(server: PortControl, data: bytes) -> list[bytes]:
    """Answers of wrong shapes and for other nodes, and none that is right."""
    if data[0] == 2:
        (right,) = pcp_only(server, data)
        wrong_nonce = right[:24] + bytes(12) + right[36:]
        return [wrong_nonce, right[:59], right + bytes(1100), data, b"", bytes(60), right[:24]]
    (right,) = nat_pmp_only(server, data)
    return [right[:-1], right + b"\0", data, b"\0", b"\1" + right[1:]]


@pytest.mark.slow
async def test_lies_are_ignored(clock: MockClock) -> None:
    async with port_control(Table(), lying) as control, mapped(control=control) as node:
        assert await node.hears_nothing(3000)
        assert node.mapper.mapping is None


async def test_an_answer_from_another_address_is_ignored(clock: MockClock) -> None:
    async with (
        port_control(Table(), silence) as stranger,
        port_control(Table(), both) as control,
        mapped(control=control) as node,
    ):
        control.speaks_from = stranger.link
        assert await node.hears_nothing(100)
        assert control.heard


async def test_a_grant_without_a_life_or_a_port_is_none(clock: MockClock) -> None:
    table = Table(lifetime_seconds=0)
    async with port_control(table, both) as control, mapped(control=control) as node:
        assert await node.hears_nothing(20)
        assert "without a port or a life" in node.mapper.trouble


@pytest.mark.slow
async def test_a_silent_router_is_asked_ever_less(clock: MockClock) -> None:
    async with port_control(Table(), silence) as control, mapped(control=control) as node:
        await trio.sleep(3600)  # seven searches, the delays between them growing
        assert "no protocol" in node.mapper.trouble
        before = len(control.heard)
        await trio.sleep(4 * LONGEST_DELAY_SECONDS)
        searches = (len(control.heard) - before) / 6  # three datagrams of PCP, three of NAT-PMP
        assert 3 <= searches <= 5
        assert await node.leave() == 0


async def test_without_a_router_nothing_happens_until_the_network_changes(clock: MockClock) -> None:
    found: list[Router | None] = [None]

    async def find_router() -> Router | None:
        await trio.lowlevel.checkpoint()
        return found[0]

    changes: list[Mapping | None] = []
    async with port_control(Table(), both) as control, trio.open_nursery() as nursery:
        mapper = PortMapper(
            OUR_PORT, changes.append, find_router=find_router, announcement_port=free_udp_port()
        )
        nursery.start_soon(mapper.run)
        await trio.sleep(25)
        assert mapper.trouble == "this machine has no router"
        found[0] = Router(LOOPBACK, control.port, free_udp_port())
        mapper.network_changed()
        await trio.sleep(1)
        assert [change is not None for change in changes] == [True]
        nursery.cancel_scope.cancel()


# -- leaving ---------------------------------------------------------------------------------


async def test_a_mapping_whose_grant_was_not_heard_is_released_too(clock: MockClock) -> None:
    table = Table()

    def mute(server: PortControl, data: bytes) -> list[bytes]:
        both(server, data)
        return []

    async with port_control(table, mute) as control, mapped(control=control) as node:
        await trio.sleep(0.1)
        assert table.mappings == {OUR_PORT: OUR_PORT}
        assert await node.leave() == pytest.approx(UNHEARD_RELEASE_SECONDS)
        assert table.mappings == {}


async def test_a_router_that_has_gone_holds_up_nobody(clock: MockClock) -> None:
    async with port_control(Table(), both) as control, mapped(control=control) as node:
        await node.next_change()
        control.answering = silence
        assert await node.leave() == pytest.approx(RELEASE_SECONDS)


async def test_an_error_of_the_caller_ends_the_mapper_and_releases_the_mapping(
    clock: MockClock,
) -> None:
    table = Table()

    def fail(_mapping: Mapping | None) -> None:
        raise RuntimeError("the caller's own")

    async with port_control(table, both) as control:

        async def find_router() -> Router:
            await trio.lowlevel.checkpoint()
            return Router(LOOPBACK, control.port, free_udp_port())

        mapper = PortMapper(
            OUR_PORT, fail, find_router=find_router, announcement_port=free_udp_port()
        )
        with pytest.RaisesGroup(RuntimeError):
            await mapper.run()
        assert table.mappings == {}


# -- UPnP ------------------------------------------------------------------------------------


async def test_upnp_maps_the_port_renews_it_and_releases_it(clock: MockClock) -> None:
    router, threads = UpnpRouter(Table()), set(threading.enumerate())
    async with upnp_router(router), mapped(upnp=router) as node:
        mapping = await node.next_change()
        assert mapping == Mapping(UPNP, PUBLIC_HOST, OUR_PORT, OUR_PORT, 1200)
        assert router.table.mappings == {OUR_PORT: OUR_PORT}
        await trio.sleep(1000)
        assert router.actions.count("AddPortMapping") == 2
        assert set(threading.enumerate()) <= threads
        await node.leave()
        assert router.table.mappings == {}
        assert router.connections == 0


async def test_nat_pmp_is_preferred_to_upnp(clock: MockClock) -> None:
    router = UpnpRouter(Table())
    async with upnp_router(router), port_control(Table(), nat_pmp_only) as control:
        async with mapped(control=control, upnp=router) as node:
            mapping = await node.next_change()
            assert mapping is not None
            assert mapping.protocol is NAT_PMP
        assert "AddPortMapping" not in router.actions


async def test_a_port_of_another_machine_is_left_alone_and_another_one_is_mapped(
    clock: MockClock,
) -> None:
    router = UpnpRouter(Table(taken={OUR_PORT}))
    async with upnp_router(router), mapped(upnp=router) as node:
        mapping = await node.next_change()
        assert mapping is not None
        assert mapping.external_port != OUR_PORT
        assert router.table.mappings == {mapping.external_port: OUR_PORT}
        await node.leave()
        assert router.table.mappings == {}
        assert router.actions.count("DeletePortMapping") == 1


async def test_after_four_ports_of_other_machines_it_is_given_up_for_now(clock: MockClock) -> None:
    router = UpnpRouter(Table(taken=set(range(65536))))
    async with upnp_router(router), mapped(upnp=router) as node:
        await trio.sleep(20)
        assert router.actions.count("AddPortMapping") == 4
        assert "other machines have" in node.mapper.trouble
        await node.leave()
        assert "DeletePortMapping" not in router.actions


async def test_a_router_that_knows_no_leases_maps_for_ever_and_is_told_to_forget(
    clock: MockClock,
) -> None:
    router = UpnpRouter(Table(), leases=False)
    async with upnp_router(router), mapped(upnp=router) as node:
        assert await node.next_change() is not None
        await node.leave()
        assert router.table.mappings == {}


async def test_a_description_at_another_host_is_not_fetched(clock: MockClock) -> None:
    router = UpnpRouter(Table(), location_host="127.0.0.2")
    async with upnp_router(router), mapped(upnp=router) as node:
        await trio.sleep(20)
        assert "elsewhere" in node.mapper.trouble


async def test_a_router_without_an_address_is_no_use(clock: MockClock) -> None:
    router = UpnpRouter(Table(external_host="0.0.0.0"))
    async with upnp_router(router), mapped(upnp=router) as node:
        await trio.sleep(20)
        assert "no connection to the internet" in node.mapper.trouble
        assert "AddPortMapping" not in router.actions


async def trickle(_: UpnpRouter, stream: trio.SocketStream, _request: bytes) -> None:
    await stream.send_all(b"HTTP/1.1 200 OK\r\nContent-Length: 60000\r\n\r\n")
    while True:
        await stream.send_all(b"<")
        await trio.sleep(1)


async def flood(_: UpnpRouter, stream: trio.SocketStream, _request: bytes) -> None:
    await stream.send_all(http_answer(200, b"<" * (2 * LARGEST_DOCUMENT_BYTES)))


async def endless_header(_: UpnpRouter, stream: trio.SocketStream, _request: bytes) -> None:
    while True:
        await stream.send_all(b"HTTP/1.1 200 OK\r\nX: " + b"x" * 65536)


async def hang_up(_: UpnpRouter, stream: trio.SocketStream, _request: bytes) -> None:
    await stream.aclose()


async def nonsense(_: UpnpRouter, stream: trio.SocketStream, _request: bytes) -> None:
    await stream.send_all(b"\x16\x03\x01 this is no HTTP\r\n\r\n")


async def missing(_: UpnpRouter, stream: trio.SocketStream, _request: bytes) -> None:
    await stream.send_all(http_answer(404, b"<html>"))


async def no_xml(_: UpnpRouter, stream: trio.SocketStream, _request: bytes) -> None:
    await stream.send_all(http_answer(200, b"<root><device>"))


@pytest.mark.parametrize(
    ("serving", "trouble"),
    [
        (trickle, "in time"),
        (flood, "too large"),
        (endless_header, "HTTP"),
        (hang_up, "HTTP"),
        (nonsense, "HTTP"),
        (missing, "404"),
        (no_xml, "XML"),
    ],
)
async def test_a_router_that_misbehaves_in_http_costs_a_bounded_time(
    clock: MockClock, serving: Serving, trouble: str
) -> None:
    router = UpnpRouter(Table(), serving=serving)
    async with upnp_router(router), mapped(upnp=router) as node:
        await trio.sleep(HTTP_SECONDS + 1)
        assert trouble in node.mapper.trouble
        await trio.sleep(2)  # until the router's next byte finds nobody
        assert router.connections == 0
        assert await node.leave() == 0


async def test_leaving_in_the_middle_of_a_search_leaves_nothing_behind(clock: MockClock) -> None:
    router, threads = UpnpRouter(Table(), serving=trickle), set(threading.enumerate())
    async with upnp_router(router), mapped(upnp=router) as node:
        await trio.sleep(1)
        assert router.connections == 1
        assert await node.leave() == 0
        await trio.sleep(2)  # until the router's next byte finds nobody
        assert router.connections == 0
        assert set(threading.enumerate()) <= threads


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_a_port_that_is_none_is_refused(port: int) -> None:
    with pytest.raises(ValueError, match="no port"):
        PortMapper(port, lambda _: None)
