"""The doctor on the network: names, IPv6, MTU, ports and peers. Nothing leaves this machine."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from node.app.doctor import FindingLevel
from node.app.doctor.network import (
    Ipv6Facts,
    Reached,
    check_ipv6,
    check_mtu,
    check_names,
    check_peers,
    check_ports,
    default_interface,
    judge_ipv6,
    judge_lookup_error,
    judge_mtu,
    judge_peers,
)
from node.app.doctor.surroundings import Surroundings
from node.core.status import NodeStatus
from tests.doctor.homes import PEER, configuration_of, only, surroundings_of
from tests.ports import LOOPBACK, held_port

# -- names


async def test_a_name_that_resolves_is_fine(tmp_path: Path) -> None:
    bootstrap = (f"/dns4/localhost/tcp/4001/p2p/{PEER}",)
    (finding,) = await check_names(surroundings_of(tmp_path, dht__bootstrap=bootstrap))
    assert finding.level is FindingLevel.OK
    assert "localhost is " in finding.says


async def test_a_name_that_does_not_resolve_is_an_error(tmp_path: Path) -> None:
    """This one has no form in the DNS, so that nobody is asked."""
    name = "ü" * 62
    bootstrap = (f"/dns4/{name}/tcp/4001/p2p/{PEER}",)
    finding = only(
        await check_names(surroundings_of(tmp_path, dht__bootstrap=bootstrap)), FindingLevel.ERROR
    )
    assert name in finding.says


async def test_numbers_need_no_names(tmp_path: Path) -> None:
    bootstrap = (f"/ip4/127.0.0.1/tcp/4001/p2p/{PEER}",)
    (finding,) = await check_names(surroundings_of(tmp_path, dht__bootstrap=bootstrap))
    assert finding.level is FindingLevel.OK


def test_a_resolver_that_does_not_answer_is_not_the_fault_of_the_name() -> None:
    away = judge_lookup_error("a.example", socket.gaierror(socket.EAI_AGAIN, "try again"))
    gone = judge_lookup_error("a.example", socket.gaierror(socket.EAI_NONAME, "unknown"))
    assert "DNS server" in away.advice
    assert "name" in gone.advice


# -- IPv6 and the MTU


@pytest.mark.parametrize(
    ("facts", "level"),
    [
        (Ipv6Facts((), has_route=False), FindingLevel.NOTE),
        (Ipv6Facts(("2001:db8::1",), has_route=False), FindingLevel.WARNING),
        (Ipv6Facts(("2001:db8::1",), has_route=True), FindingLevel.OK),
    ],
)
def test_an_address_without_a_route_is_what_is_wrong_with_ipv6(
    facts: Ipv6Facts, level: FindingLevel
) -> None:
    assert judge_ipv6(facts).level is level


@pytest.mark.parametrize(
    ("mtu", "level"),
    [
        (576, FindingLevel.WARNING),
        (1279, FindingLevel.WARNING),
        (1280, FindingLevel.NOTE),
        (1500, FindingLevel.OK),
    ],
)
def test_an_mtu_below_that_of_ipv6_is_a_warning(mtu: int, level: FindingLevel) -> None:
    assert judge_mtu(mtu, "of eth0").level is level


def test_the_interface_of_the_default_route_is_found() -> None:
    text = (
        "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n"
        "eth0 0002000A 00000000 0001 0 0 0 00FFFFFF 0 0 0\n"
        "wlan0 00000000 0102000A 0003 0 0 0 00000000 0 0 0\n"
    )
    assert default_interface(text) == "wlan0"
    assert default_interface("Iface Destination\n") == ""


async def test_this_machine_is_measured_without_an_error(tmp_path: Path) -> None:
    surroundings = surroundings_of(tmp_path)
    for check in (check_ipv6, check_mtu):
        (finding,) = await check(surroundings)
        assert finding.says


# -- ports


LISTENER = """\
import socket, sys
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
sys.stdin.read()
"""


@contextmanager
def another_program() -> Iterator[tuple[int, int]]:
    """A program that listens: its port, and its process."""
    with subprocess.Popen(
        [sys.executable, "-c", LISTENER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as program:
        assert program.stdout is not None
        yield int(program.stdout.readline()), program.pid
        program.communicate()


async def test_a_port_that_another_program_has_is_an_error_that_names_it(tmp_path: Path) -> None:
    with another_program() as (port, process):
        listen = (f"/ip4/{LOOPBACK}/tcp/{port}",)
        found = await check_ports(surroundings_of(tmp_path, network__listen=listen))
    finding = only(found, FindingLevel.ERROR)
    assert listen[0] in finding.says
    if sys.platform == "linux":
        assert f"(pid {process})" in finding.says


async def test_a_free_port_and_that_of_the_running_node_are_fine(tmp_path: Path) -> None:
    with socket.create_server((LOOPBACK, 0)) as server, held_port() as free:
        own = f"/ip4/{LOOPBACK}/tcp/{server.getsockname()[1]}"
        listen = (own, f"/ip4/{LOOPBACK}/tcp/{free}")
        configuration = configuration_of(tmp_path, network__listen=listen)
        node = NodeStatus(addresses=(f"{own}/p2p/{PEER}",))
        found = await check_ports(Surroundings(configuration, node))
    assert [one.level for one in found] == [FindingLevel.OK, FindingLevel.OK]
    assert "running node" in found[0].says


# -- peers


def address_at(port: int) -> str:
    return f"/ip4/{LOOPBACK}/tcp/{port}/p2p/{PEER}"


async def test_a_peer_that_accepts_connections_is_fine_and_another_is_a_warning(
    tmp_path: Path,
) -> None:
    with socket.create_server((LOOPBACK, 0)) as server, held_port() as closed:
        bootstrap = (address_at(server.getsockname()[1]), address_at(closed))
        found = await check_peers(surroundings_of(tmp_path, dht__bootstrap=bootstrap))
    assert " ms." in only(found, FindingLevel.OK).says
    assert "connection refused" in only(found, FindingLevel.WARNING).says


async def test_it_is_an_error_if_no_peer_answers(tmp_path: Path) -> None:
    with held_port() as closed:
        bootstrap = (address_at(closed),)
        found = await check_peers(surroundings_of(tmp_path, dht__bootstrap=bootstrap))
    assert "No node listens there" in only(found, FindingLevel.ERROR).advice


async def test_of_a_peer_behind_a_relay_the_relay_is_asked(tmp_path: Path) -> None:
    with socket.create_server((LOOPBACK, 0)) as server:
        place = f"/ip4/{LOOPBACK}/tcp/{server.getsockname()[1]}"
        bootstrap = (f"{place}/p2p/{PEER}/p2p-circuit/p2p/{PEER}",)
        found = await check_peers(surroundings_of(tmp_path, dht__bootstrap=bootstrap))
    assert place in only(found, FindingLevel.OK).says


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ECONNREFUSED, "No node listens there"),
        (errno.ENETUNREACH, "no route"),
        (errno.ETIMEDOUT, "firewalls"),
        (errno.EPERM, "firewall"),
    ],
)
def test_each_reason_has_its_own_advice(number: int, words: str) -> None:
    failed = Reached("/ip4/192.0.2.1/tcp/1", error=OSError(number, os.strerror(number)))
    (finding,) = judge_peers([failed])
    assert words in finding.advice


def test_a_way_with_small_packets_is_a_warning() -> None:
    found = list(judge_peers([Reached("/ip4/192.0.2.1/tcp/1", 3.0, mtu=576)]))
    assert only(found, FindingLevel.WARNING).topic == "mtu"
