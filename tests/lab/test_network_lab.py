"""The network lab: what its routers let pass, its delays and rates, and that nothing is left of it.

A test that something does not arrive sends something else after it, on the same way, and looks when
that has arrived.
"""

from __future__ import annotations

import ipaddress
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from socket import (
    AF_INET,
    AF_INET6,
    IPPROTO_TCP,
    SHUT_WR,
    SO_REUSEADDR,
    SOCK_DGRAM,
    SOCK_STREAM,
    SOL_SOCKET,
    AddressFamily,
    socket,
)
from threading import Thread

import pytest

from lab.bench.own_network import congestion_control
from lab.net import (
    AddressFamilies,
    Machine,
    NetworkCommandFailed,
    NetworkLab,
    NoOwnNetwork,
    RouterKind,
    missing_for_lab,
)
from lab.net.addresses import home_lease, machine_line, router_line
from lab.net.frame_switch import HEADER, is_about_neighbours
from lab.net.removal import owner_lives, prefix_for, prefix_of, remains
from lab.net.router import MAPPING_DAEMON
from protocols.errors import ProtocolMisuse
from tests.waiting import PATIENCE_SECONDS

PORT = 4001
SILENCE_SECONDS = 0.2  # within it a router that answers would have; on this wire it takes 0.2 ms

MISSING = missing_for_lab()


def needs_a_lab(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.slow(pytest.mark.skipif(bool(MISSING), reason=MISSING)(test))


Bind = Callable[..., socket]


# Without a laboratory


def test_its_addresses_count_as_public_and_those_of_homes_do_not() -> None:
    for line in (machine_line(7), router_line(254)):
        assert line.ipv4.ip.is_global
        assert line.ipv6.ip.is_global
    assert home_lease(home=3, number=7, host=2).ipv4.ip.is_private
    assert home_lease(home=3, number=7, host=2).ipv6.ip.is_global


def test_no_address_is_given_twice() -> None:
    lines = [machine_line(1), router_line(1), machine_line(2), router_line(2)]
    inside = [home_lease(home, home, host) for home in (1, 2) for host in (1, 2)]
    every = [lease.ipv6.ip for lease in (*lines[1::2], *inside)]
    assert len(set(every)) == len(every)
    assert len({line.ipv4.ip for line in lines}) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_the_names_tell_whether_their_owner_lives() -> None:
    prefix = prefix_for(os.getpid(), 12)
    assert prefix_of(f"{prefix}left.router") == prefix
    assert owner_lives(prefix)
    with subprocess.Popen(["sleep", "60"]) as process:
        other = prefix_for(process.pid, 1)
        assert owner_lives(other)
        process.kill()
    assert not owner_lives(other)
    assert not prefix_of("somebody-elses-namespace")


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NoOwnNetwork, match="needs root"), NetworkLab():
        raise AssertionError("it was built without root")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", {"ip": "ip", "tc": "tc", "nft": None}.get)
    with pytest.raises(NoOwnNetwork, match="needs nft: apt-get install nftables"), NetworkLab():
        raise AssertionError("it was built without nft")


def test_questions_about_neighbours_are_told_from_other_frames() -> None:
    def frame(kind: str, packet: bytes) -> bytes:
        return bytes(HEADER + 12) + bytes.fromhex(kind) + packet

    def ipv6(next_header: int, first: int) -> bytes:
        return bytes([0x60, 0, 0, 0, 0, 8, next_header, 255]) + bytes(32) + bytes([first, 0])

    assert is_about_neighbours(frame("0806", bytes(28)))
    assert is_about_neighbours(frame("86dd", ipv6(58, 135)))
    assert not is_about_neighbours(frame("86dd", ipv6(58, 128)))  # an echo
    assert not is_about_neighbours(frame("86dd", ipv6(17, 135)))
    assert not is_about_neighbours(frame("0800", bytes(20)))


# In one


@pytest.fixture
def lab() -> Iterator[NetworkLab]:
    with NetworkLab() as lab:
        yield lab


@pytest.fixture
def relay(lab: NetworkLab) -> Machine:
    return lab.host("relay", families=AddressFamilies.BOTH)


@pytest.fixture
def udp() -> Iterator[Bind]:
    """Makes sockets for datagrams, bound to a port of a machine."""
    with ExitStack() as stack:

        def bind(machine: Machine, port: int = PORT, family: AddressFamily = AF_INET) -> socket:
            made = stack.enter_context(machine.socket(family, SOCK_DGRAM))
            made.settimeout(PATIENCE_SECONDS)
            made.bind(("", port))
            return made

        yield bind


@pytest.fixture
def tcp() -> Iterator[Bind]:
    """Makes sockets for connections, bound to a port of a machine, or to any."""
    with ExitStack() as stack:

        def bind(machine: Machine, port: int = 0, family: AddressFamily = AF_INET) -> socket:
            made = stack.enter_context(machine.socket(family, SOCK_STREAM))
            made.settimeout(PATIENCE_SECONDS)
            made.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
            made.bind(("", port))
            return made

        yield bind


def seen_from(sender: socket, receiver: socket, at: str) -> tuple[str, int]:
    """Send a datagram; the address from which it comes."""
    sender.sendto(b"hello", (at, receiver.getsockname()[1]))
    data, origin = receiver.recvfrom(100)
    assert data == b"hello"
    return origin[0], origin[1]


def home_of(lab: NetworkLab, name: str, nat: RouterKind) -> Machine:
    return lab.home(name, nat, forwarded_ports=(PORT,) if nat is RouterKind.FORWARDED else ())


KEEPS_PORTS = (
    RouterKind.NONE,
    RouterKind.FORWARDED,
    RouterKind.CONE,
    RouterKind.PORT_RESTRICTED,
    RouterKind.DOUBLE,
)


@pytest.mark.parametrize("nat", [*KEEPS_PORTS, RouterKind.SYMMETRIC], ids=lambda nat: nat.value)
@pytest.mark.root
@needs_a_lab
def test_a_symmetric_router_alone_shows_each_destination_another_port(
    lab: NetworkLab, udp: Bind, nat: RouterKind
) -> None:
    inside = home_of(lab, "inside", nat)
    sender = udp(inside)
    seen = set()
    for number in range(3):
        host = lab.host(f"host{number}")
        seen.add(seen_from(sender, udp(host), host.address))
    if nat is RouterKind.SYMMETRIC:
        assert {address for address, _ in seen} == {inside.public_address}
        assert len(seen) > 1
    else:
        assert seen == {(inside.public_address, PORT)}
    assert ipaddress.ip_address(inside.public_address).is_global
    assert (inside.address == inside.public_address) == (nat is RouterKind.NONE)


LETS_IN = {
    RouterKind.NONE: {"same port", "same host", "stranger"},
    RouterKind.FORWARDED: {"same port", "same host", "stranger"},
    RouterKind.CONE: {"same port", "same host"},
    RouterKind.PORT_RESTRICTED: {"same port"},
    RouterKind.SYMMETRIC: {"same port"},
    RouterKind.DOUBLE: {"same port"},
}


@pytest.mark.parametrize("nat", LETS_IN, ids=lambda nat: nat.value)
@pytest.mark.root
@needs_a_lab
def test_each_kind_of_router_lets_in_what_it_should(
    lab: NetworkLab, relay: Machine, udp: Bind, nat: RouterKind
) -> None:
    stranger = lab.host("stranger")
    inside = udp(home_of(lab, "inside", nat))
    contacted, same_host, stranger_ = udp(relay), udp(relay, PORT + 1), udp(stranger)
    public = seen_from(inside, contacted, relay.address)
    stranger_.sendto(b"stranger", public)
    same_host.sendto(b"same host", public)
    stranger_.sendto(b"hello", (relay.address, PORT))  # after it, what it sent inside has arrived
    contacted.recv(100)
    contacted.sendto(b"same port", public)
    arrived = set()
    while "same port" not in arrived:
        arrived.add(inside.recv(100).decode())
    assert arrived == LETS_IN[nat]


@pytest.mark.parametrize(
    "nat",
    [RouterKind.CONE, RouterKind.PORT_RESTRICTED, RouterKind.SYMMETRIC, RouterKind.DOUBLE],
    ids=lambda nat: nat.value,
)
@pytest.mark.root
@needs_a_lab
def test_a_router_answers_no_stranger_who_connects(
    lab: NetworkLab, relay: Machine, tcp: Bind, nat: RouterKind
) -> None:
    inside = home_of(lab, "inside", nat)
    listener = tcp(inside, PORT)
    listener.listen()
    stranger = tcp(relay)
    stranger.settimeout(SILENCE_SECONDS)
    with pytest.raises(TimeoutError):
        stranger.connect((inside.public_address, PORT))


@pytest.mark.root
@needs_a_lab
def test_a_forwarded_port_is_open_to_all_but_the_home_itself(
    lab: NetworkLab, relay: Machine, tcp: Bind
) -> None:
    inside = home_of(lab, "inside", RouterKind.FORWARDED)
    listener = tcp(inside, PORT)
    listener.listen()
    tcp(relay).connect((inside.public_address, PORT))
    with listener.accept()[0] as accepted:
        assert accepted.getpeername()[0] == relay.address
    for machine in (inside, lab.housemate("mate", inside)):
        hairpin = tcp(machine)
        hairpin.settimeout(SILENCE_SECONDS)
        with pytest.raises(TimeoutError):
            hairpin.connect((inside.public_address, PORT))
    neighbour = tcp(lab.housemate("other_mate", inside))
    neighbour.connect((inside.address, PORT))
    listener.accept()[0].close()


def open_at_once(tcp: Bind, left: Machine, right: Machine, seconds: float) -> tuple[socket, socket]:
    """Connect both to each other, from a port that is known to the other."""
    ends = tcp(left, PORT), tcp(right, PORT)
    errors: list[BaseException] = []

    def connect(end: socket, to: Machine) -> None:
        try:
            end.connect((to.public_address, PORT))
        except OSError as error:
            errors.append(error)

    threads = []
    for end, to in zip(ends, (right, left), strict=True):
        end.settimeout(seconds)
        threads.append(Thread(target=connect, args=(end, to)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return ends


@pytest.mark.slow
@pytest.mark.parametrize(
    "nat", [RouterKind.PORT_RESTRICTED, RouterKind.CONE, RouterKind.DOUBLE], ids=lambda n: n.value
)
@pytest.mark.root
@needs_a_lab
def test_two_homes_that_keep_ports_can_open_a_connection_at_once(
    lab: NetworkLab, tcp: Bind, nat: RouterKind
) -> None:
    left, right = lab.home("left", nat), lab.home("right", RouterKind.PORT_RESTRICTED)
    here, there = open_at_once(tcp, left, right, PATIENCE_SECONDS)
    here.sendall(b"through both")
    assert there.recv(100) == b"through both"


@pytest.mark.slow
@pytest.mark.root
@needs_a_lab
def test_behind_a_symmetric_router_they_cannot(lab: NetworkLab, tcp: Bind) -> None:
    left, right = (
        lab.home("left", RouterKind.SYMMETRIC),
        lab.home("right", RouterKind.PORT_RESTRICTED),
    )
    with pytest.raises(TimeoutError):
        open_at_once(tcp, left, right, SILENCE_SECONDS)


@pytest.mark.parametrize(
    "nat", [RouterKind.CONE, RouterKind.PORT_RESTRICTED], ids=lambda nat: nat.value
)
@pytest.mark.root
@needs_a_lab
def test_a_router_that_was_rebooted_has_forgotten_all(
    lab: NetworkLab, relay: Machine, udp: Bind, tcp: Bind, nat: RouterKind
) -> None:
    inside = lab.home("inside", nat)
    sender, other, contacted = udp(inside), udp(inside, PORT + 1), udp(relay)
    public = seen_from(sender, contacted, relay.address)
    listener = tcp(relay, PORT)
    listener.listen()
    connection = tcp(inside)
    connection.connect((relay.address, PORT))
    with listener.accept()[0] as accepted:
        inside.router.forget()
        contacted.sendto(b"too late", public)
        connection.sendall(b"too late")
        contacted.sendto(b"in time", seen_from(other, contacted, relay.address))
        assert other.recv(100) == b"in time"
        for one in (sender, accepted):
            one.setblocking(False)
            with pytest.raises(BlockingIOError):
                one.recv(100)


@pytest.mark.root
@needs_a_lab
def test_a_provider_can_change_the_public_address(
    lab: NetworkLab, relay: Machine, udp: Bind
) -> None:
    inside = lab.home("inside", RouterKind.PORT_RESTRICTED, families=AddressFamilies.BOTH)
    before, ipv6_before = inside.public_address, inside.ipv6_address
    sender, contacted = udp(inside), udp(relay)
    seen_from(sender, contacted, relay.address)
    inside.router.change_address()
    after = seen_from(sender, contacted, relay.address)
    assert after == (inside.public_address, PORT) != (before, PORT)
    assert inside.ipv6_address != ipv6_before
    origin = seen_from(
        udp(inside, PORT + 1, AF_INET6), udp(relay, PORT + 1, AF_INET6), relay.ipv6_address
    )
    assert origin[0] == inside.ipv6_address


@pytest.mark.root
@needs_a_lab
def test_nobody_is_let_in_at_a_new_address_for_what_was_sent_from_the_old_one(
    lab: NetworkLab, relay: Machine, udp: Bind
) -> None:
    inside = lab.home("inside", RouterKind.CONE)
    sender, other, contacted = udp(inside), udp(inside, PORT + 1), udp(relay)
    seen_from(sender, contacted, relay.address)
    inside.router.change_address()
    contacted.sendto(b"too early", (inside.public_address, PORT))
    contacted.sendto(b"in time", seen_from(other, contacted, relay.address))
    assert other.recv(100) == b"in time"
    sender.setblocking(False)
    with pytest.raises(BlockingIOError):
        sender.recv(100)


@pytest.mark.slow
@pytest.mark.root
@needs_a_lab
def test_a_carrier_can_change_the_address_of_a_home_behind_it(
    lab: NetworkLab, relay: Machine, udp: Bind
) -> None:
    inside = lab.home("inside", RouterKind.DOUBLE)
    before = inside.public_address
    inside.router.change_address()
    assert inside.public_address != before
    assert seen_from(udp(inside), udp(relay), relay.address) == (inside.public_address, PORT)


@pytest.mark.slow
@pytest.mark.root
@needs_a_lab
def test_a_machine_can_change_its_address_and_its_home(
    lab: NetworkLab, relay: Machine, udp: Bind
) -> None:
    left, right = lab.home("left", RouterKind.PORT_RESTRICTED), lab.home("right", RouterKind.CONE)
    contacted = udp(relay)
    cafe = lab.host("cafe")
    addresses = [left.address]
    for change in (
        left.change_address,
        lambda: left.move_to(right),
        lambda: left.move_to(cafe),
        left.change_address,
    ):
        change()
        addresses.append(left.address)
        origin = seen_from(udp(left, PORT + len(addresses)), contacted, relay.address)
        assert origin[0] == left.public_address
    assert len(set(addresses)) == len(addresses)
    assert left.nat is RouterKind.NONE
    with pytest.raises(ProtocolMisuse, match="no router"):
        left.router.forget()


@pytest.mark.slow  # the kernel tells of a new link after a second
@pytest.mark.parametrize(
    "nat", [RouterKind.NONE, RouterKind.PORT_RESTRICTED], ids=lambda nat: nat.value
)
@pytest.mark.root
@needs_a_lab
def test_a_pulled_cable_is_seen_and_a_blackout_is_not(
    lab: NetworkLab, relay: Machine, udp: Bind, nat: RouterKind
) -> None:
    inside = lab.home("inside", nat)
    sender, contacted = udp(inside), udp(relay)
    seen_from(sender, contacted, relay.address)
    contacted.settimeout(SILENCE_SECONDS)
    with inside.blackout():
        assert has_a_link(inside)
        with pytest.raises(TimeoutError):
            seen_from(sender, contacted, relay.address)
    seen_from(sender, contacted, relay.address)
    inside.unplug()
    assert not has_a_link(inside)
    with pytest.raises(TimeoutError):
        seen_from(sender, contacted, relay.address)
    inside.plug_in()
    contacted.settimeout(PATIENCE_SECONDS)
    assert has_a_link(inside)
    seen_from(sender, contacted, relay.address)


def has_a_link(machine: Machine) -> bool:
    return "LOWER_UP" in machine.run(["ip", "link", "show", "eth0"]).stdout


@pytest.mark.slow
@pytest.mark.root
@needs_a_lab
def test_a_provider_can_be_down(lab: NetworkLab, relay: Machine, udp: Bind) -> None:
    inside = lab.home("inside", RouterKind.PORT_RESTRICTED)
    sender, contacted = udp(inside), udp(relay)
    inside.router.unplug()
    contacted.settimeout(SILENCE_SECONDS)
    with pytest.raises(TimeoutError):
        seen_from(sender, contacted, relay.address)
    assert has_a_link(inside)
    inside.router.plug_in()
    contacted.settimeout(PATIENCE_SECONDS)
    seen_from(sender, contacted, relay.address)


@pytest.mark.slow
@pytest.mark.root
@needs_a_lab
def test_a_home_may_have_ipv6_only_and_a_firewall(
    lab: NetworkLab, relay: Machine, tcp: Bind
) -> None:
    inside = lab.home("inside", RouterKind.PORT_RESTRICTED, families=AddressFamilies.IPV6)
    other = lab.home("other", RouterKind.PORT_RESTRICTED, families=AddressFamilies.BOTH)
    listener = tcp(relay, PORT, AF_INET6)
    listener.listen()
    tcp(inside, family=AF_INET6).connect((relay.ipv6_address, PORT))
    with listener.accept()[0] as accepted:
        assert accepted.getpeername()[0] == inside.address == inside.public_address
    with pytest.raises(OSError, match="unreachable"):
        tcp(inside).connect((relay.address, PORT))
    closed = tcp(inside, PORT, AF_INET6)
    closed.listen()
    for stranger in (relay, other):
        connecting = tcp(stranger, family=AF_INET6)
        connecting.settimeout(SILENCE_SECONDS)
        with pytest.raises(TimeoutError):
            connecting.connect((inside.ipv6_address, PORT))


@pytest.mark.root
@needs_a_lab
def test_a_home_may_lose_all_datagrams(
    lab: NetworkLab, relay: Machine, udp: Bind, tcp: Bind
) -> None:
    inside = lab.home("inside", RouterKind.CONE, udp_blocked=True)
    contacted, listener = udp(relay), tcp(relay, PORT)
    listener.listen()
    udp(inside).sendto(b"hello", (relay.address, PORT))
    tcp(inside).connect((relay.address, PORT))
    listener.accept()[0].close()
    contacted.setblocking(False)
    with pytest.raises(BlockingIOError):
        contacted.recv(100)


NAT_PMP_PORT = 5351


@pytest.mark.root
@needs_a_lab
@pytest.mark.skipif(shutil.which(MAPPING_DAEMON) is None, reason=f"needs {MAPPING_DAEMON}")
def test_a_machine_can_ask_a_router_for_a_port(
    lab: NetworkLab, relay: Machine, udp: Bind, tcp: Bind
) -> None:
    inside = lab.home("inside", RouterKind.MAPPED)
    gateway = f"{inside.address.rpartition('.')[0]}.1"
    listener, asking = tcp(inside, PORT), udp(inside)
    listener.listen()

    def is_reachable() -> bool:
        with relay.socket() as stranger:
            stranger.settimeout(SILENCE_SECONDS)
            with suppress(TimeoutError):
                stranger.connect((inside.public_address, PORT))
                listener.accept()[0].close()
                return True
            return False

    assert not is_reachable()
    wanted = bytes([0, 2, 0, 0, *PORT.to_bytes(2), *PORT.to_bytes(2), *(3600).to_bytes(4)])
    asking.sendto(wanted, (gateway, NAT_PMP_PORT))  # RFC 6886
    answer = asking.recv(100)
    assert answer[:4] == bytes([0, 130, 0, 0])
    assert answer[8:12] == PORT.to_bytes(2) * 2
    assert is_reachable()
    inside.router.forget()
    assert not is_reachable()


# How far and how fast


@pytest.mark.root
@needs_a_lab
def test_a_round_trip_takes_the_given_time(tcp: Bind) -> None:
    round_trip = 0.06
    with NetworkLab(round_trip_seconds=round_trip) as lab:
        relay, inside = lab.host("relay"), lab.home("inside", RouterKind.PORT_RESTRICTED)
        listener = tcp(relay, PORT)
        listener.listen()
        taken = []
        for _ in range(5):
            with inside.socket() as connecting:
                began = time.perf_counter()
                connecting.connect((relay.address, PORT))
                taken.append(time.perf_counter() - began)
        assert round_trip <= min(taken) <= round_trip + 0.02


@pytest.mark.root
@needs_a_lab
@pytest.mark.parametrize("families", [AddressFamilies.IPV4, AddressFamilies.IPV6])
def test_both_ends_have_the_congestion_control_of_linux_homes(families: AddressFamilies) -> None:
    from socket import TCP_CONGESTION  # only Linux has it

    with NetworkLab() as lab:
        relay = lab.host("relay", families=families)
        inside = lab.home("inside", RouterKind.CONE, families=families)
        family = AF_INET if families.ipv4 else AF_INET6
        listener, connecting = relay.socket(family), inside.socket(family)
        listener.bind(("", PORT))
        listener.listen()
        connecting.connect((relay.address, PORT))
        with listener.accept()[0] as accepted:
            for end in (connecting, accepted):
                chosen = end.getsockopt(IPPROTO_TCP, TCP_CONGESTION, 16).rstrip(b"\0").decode()
                assert chosen == congestion_control()


def rate_between(
    tcp: Bind, sender: Machine, receiver: Machine, seconds: float, port: int = PORT
) -> float:
    """Bits per second of one connection that the sender opens."""
    listener = tcp(receiver, port)
    listener.listen()
    connection = tcp(sender)
    connection.connect((receiver.public_address, port))
    received: list[tuple[float, int]] = []

    def read() -> None:
        with listener.accept()[0] as accepted:
            while data := accepted.recv(1 << 20):
                received.append((time.perf_counter(), len(data)))

    reading = Thread(target=read)
    reading.start()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        connection.sendall(bytes(1 << 14))
    connection.shutdown(SHUT_WR)
    reading.join()
    middle = [one for one in received if one[0] > end - seconds / 2]  # it starts slowly
    return 8 * sum(size for _, size in middle[1:]) / (middle[-1][0] - middle[0][0])


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["up", "down"])
@pytest.mark.root
@needs_a_lab
def test_a_line_has_its_rates(tcp: Bind, direction: str) -> None:
    ports = range(PORT, PORT + 3)  # a busy machine holds one connection up, hardly all three
    with NetworkLab(round_trip_seconds=0.02) as lab:
        relay = lab.host("relay")
        inside = lab.home(
            "inside",
            RouterKind.FORWARDED,
            forwarded_ports=tuple(ports),
            upload_bits_per_second=10e6,
            download_bits_per_second=40e6,
        )
        ends = (inside, relay) if direction == "up" else (relay, inside)
        rates = [rate_between(tcp, *ends, 1.5, port) for port in ports]
        assert max(rates) == pytest.approx(10e6 if direction == "up" else 40e6, rel=0.15)


@pytest.mark.slow
@pytest.mark.root
@needs_a_lab
def test_it_carries_more_than_its_programs_need(tcp: Bind) -> None:
    with NetworkLab(round_trip_seconds=0.06) as lab:
        relay, inside = lab.host("relay"), lab.home("inside", RouterKind.PORT_RESTRICTED)
        assert rate_between(tcp, inside, relay, 3.0) > 8 * 20e6


# What is left of it


@pytest.mark.root
@needs_a_lab
def test_nothing_is_left_after_it() -> None:
    with NetworkLab() as lab:
        sleeping = lab.home("inside", RouterKind.CONE).popen(["sleep", "600"])
        assert len(remains(lab.prefix)) == 4  # internet, machine, router, folder
    assert sleeping.returncode == -signal.SIGKILL
    assert remains(lab.prefix) == []


@pytest.mark.root
@needs_a_lab
def test_nothing_is_left_after_an_exception() -> None:
    with pytest.raises(NetworkCommandFailed, match="no such words"), NetworkLab() as lab:
        lab.host("host").run(["sh", "-c", "echo no such words >&2; exit 3"])
    assert remains(lab.prefix) == []


OWNER = """
import sys
from lab.net import RouterKind, NetworkLab
with NetworkLab() as lab:
    started = lab.home("inside", RouterKind.CONE).popen(["sleep", "600"])
    print(lab.prefix, started.pid, lab._watchman.pid, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def owner() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


def introduction(owner: subprocess.Popen[str]) -> tuple[str, int, int]:
    assert owner.stdout is not None
    prefix, started, watchman = owner.stdout.readline().split()
    assert remains(prefix)
    return prefix, int(started), int(watchman)


def wait_until_gone(prefix: str, process_id: int) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while remains(prefix) or Path(f"/proc/{process_id}/root").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.root
@needs_a_lab
def test_nothing_is_left_when_its_owner_was_killed(owner: subprocess.Popen[str]) -> None:
    prefix, started, _ = introduction(owner)
    owner.kill()
    wait_until_gone(prefix, started)


@pytest.mark.slow
@pytest.mark.root
@needs_a_lab
def test_the_next_one_removes_what_an_owner_and_its_watchman_left(
    owner: subprocess.Popen[str],
) -> None:
    prefix, started, watchman = introduction(owner)
    os.kill(watchman, signal.SIGKILL)
    owner.kill()
    owner.wait()
    assert remains(prefix)
    with NetworkLab():
        wait_until_gone(prefix, started)


@pytest.mark.root
@needs_a_lab
def test_misuse_is_told(lab: NetworkLab) -> None:
    lab.host("host")
    wrongs: list[Callable[[], object]] = [
        lambda: lab.host("host"),
        lambda: lab.host("../host"),
        lambda: lab.home("home", RouterKind.FORWARDED),
        lambda: lab.home("home", RouterKind.CONE, forwarded_ports=(PORT,)),
        lambda: lab.home("home", RouterKind.NONE, udp_blocked=True),
        lambda: lab.home("home", RouterKind.DOUBLE, families=AddressFamilies.BOTH),
    ]
    for wrong in wrongs:
        with pytest.raises(ProtocolMisuse):
            wrong()
