"""Cables of limited rate lead from the peers' networks into one bridge, in the hub's network.

             eth0 of peer i ════ cable ════ port i of the hub
    tbf at both ends: what leaves the peer is its upload, what leaves the hub its download

Everything is set up by the processes that it belongs to, in networks of their own, and is gone with
them (own_network.py).

Easy to get wrong: TCP keeps as much under way on these links as on fast ones. With 15 connections
on one link that is a second of it and more, in which they drop each other's packets from its queue,
and small messages wait behind large ones. So windows, and the data that a connection may have
waiting in the kernel, are scaled down like the links, and the queue holds everything that all of
them have under way. Frames are long, because two cores' work is per frame; on a link of less than
a few Mb/s take `SLOW_MTU`, or each holds up small messages for a tenth of a second. The benches
measure how peers share their links, not how TCP recovers.
"""

from __future__ import annotations

from collections.abc import Sequence

from lab.bench.processes import BenchProcess

NET = "10.77.0.0/16"
MTU = 9_000
SLOW_MTU = 1_500
BURST_FRAMES = 2  # what is sent above the rate after a pause
WINDOW_BYTES_PER_MBPS = 683  # 32 KiB at 48 Mb/s for a Gb/s
UNSENT_BYTES_PER_MBPS = 341
SMALLEST_WINDOW_FRAMES = 3  # fewer, and acknowledgements are waited for
QUEUE_BYTES = 4 << 20  # the windows of 30 connections, with room


def host_of(peer: int) -> str:
    """The address of a peer in the lab."""
    return f"10.77.{peer // 250}.{peer % 250 + 1}"


def hub_commands() -> list[str]:
    return ["ip link set lo up", "ip link add bridge0 type bridge", "ip link set bridge0 up"]


def port_commands(peer: int, process_id: int, mbps: float, mtu: int = MTU) -> list[str]:
    """At the hub: a cable to the network of that process, and its download."""
    port = f"port{peer}"
    return [
        f"ip link add {port} mtu {mtu} type veth peer name eth0 mtu {mtu} netns {process_id}",
        f"ip link set {port} gso_max_segs 1 master bridge0 up",
        *_limits(port, mbps, mtu),
    ]


def peer_commands(peer: int, mbps: float, mtu: int = MTU) -> list[str]:
    """At the peer: its end of the cable, and its upload."""
    return [
        "ip link set lo up",
        f"ip addr add {host_of(peer)}/{NET.split('/')[1]} dev eth0",
        "ip link set eth0 gso_max_segs 1 up",
        *_limits("eth0", mbps, mtu),
    ]


def _limits(device: str, mbps: float, mtu: int) -> list[str]:
    return [
        f"tc qdisc add dev {device} root tbf rate {round(mbps * 1e6)}bit "
        f"burst {BURST_FRAMES * mtu} limit {QUEUE_BYTES}",
    ]


async def lay_cables(
    hub: BenchProcess,
    peers: Sequence[BenchProcess],
    mbps: Sequence[float],
    mbps_per_gigabit: float,
) -> None:
    """Put each process into a network of its own, and connect them all."""
    await make_hub(hub, mbps_per_gigabit)
    for number, (process, rate) in enumerate(zip(peers, mbps, strict=True)):
        await lay_cable(hub, process, number, (rate, rate), mbps_per_gigabit)


async def make_hub(hub: BenchProcess, mbps_per_gigabit: float) -> None:
    """Put this process into a network of its own, into which cables may be laid."""
    await hub.ask("leave_network", **_windows(mbps_per_gigabit))
    await hub.ask("configure", commands=hub_commands())


async def lay_cable(
    hub: BenchProcess,
    peer: BenchProcess,
    number: int,
    mbps: tuple[float, float],
    mbps_per_gigabit: float,
    mtu: int = MTU,
) -> None:
    """Put this process into a network of its own, and connect it as `host_of(number)`. `mbps`: its
    upload and its download."""
    up, down = mbps
    await peer.ask("leave_network", **_windows(mbps_per_gigabit, mtu))
    await hub.ask("configure", commands=port_commands(number, peer.process_id, down, mtu))
    await peer.ask("configure", commands=peer_commands(number, up, mtu))


def _windows(mbps_per_gigabit: float, mtu: int = MTU) -> dict[str, int]:
    smallest = SMALLEST_WINDOW_FRAMES * mtu
    return {
        "window": max(smallest, round(WINDOW_BYTES_PER_MBPS * mbps_per_gigabit)),
        "unsent": round(UNSENT_BYTES_PER_MBPS * mbps_per_gigabit),
    }
