"""`PortMapper` with miniupnpd, the server that most home routers run, and real address translation.

    home ── lan ── router ── wan ── stranger

Each is a network namespace. The router masquerades, and drops what comes unasked. Addresses of the
internet are used on the far side, which nobody leaves: miniupnpd maps nothing for private ones.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import trio

from tests.waiting import PATIENCE_SECONDS, until

PROGRAMS = ("ip", "ss", "nft", "unshare", "nsenter", "miniupnpd")

MISSING = [name for name in PROGRAMS if shutil.which(name) is None]
CAN_RUN = sys.platform == "linux" and os.geteuid() == 0 and not MISSING

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(
        not CAN_RUN, reason=f"needs root on Linux, and {', '.join(MISSING) or 'nothing else'}"
    ),
]

OUR_PORT = 24001
HOME, ROUTER = "192.168.77.2", "192.168.77.1"
OUTSIDE, STRANGER = "9.8.7.6", "9.8.7.9"

RULES = """
table inet filter {
    chain forward {
        type filter hook forward priority 0; policy drop;
        ct state established,related accept
        iifname "lan" accept
        jump miniupnpd
    }
    chain miniupnpd { }
    chain prerouting {
        type nat hook prerouting priority -100; policy accept;
        jump prerouting_miniupnpd
    }
    chain postrouting {
        type nat hook postrouting priority 100; policy accept;
        jump postrouting_miniupnpd
        oifname "wan" masquerade
    }
    chain prerouting_miniupnpd { }
    chain postrouting_miniupnpd { }
}
"""

CONFIGURATION = """
ext_ifname=wan
listening_ip=lan
port=5000
enable_natpmp={natpmp}
enable_upnp={upnp}
secure_mode=yes
system_uptime=no
uuid=8588d306-8d48-4871-9295-177ab10b068b
upnp_table_name=filter
upnp_nat_table_name=filter
upnp_forward_chain=miniupnpd
upnp_nat_chain=prerouting_miniupnpd
upnp_nat_postrouting_chain=postrouting_miniupnpd
allow 1024-65535 192.168.77.0/24 1024-65535
deny 0-65535 0.0.0.0/0 0-65535
"""


class Namespace:
    """A network of its own, held by a process; it ends with that."""

    def __init__(self, holder: trio.Process) -> None:
        self.pid = holder.pid
        self.prefix = ("nsenter", f"--net=/proc/{holder.pid}/ns/net", "--")

    async def do(self, *command: str, feed: bytes = b"") -> str:
        done = await trio.run_process((*self.prefix, *command), stdin=feed, capture_stdout=True)
        return bytes(done.stdout).decode()


async def start(nursery: trio.Nursery, *command: str) -> trio.Process:
    """A process that is killed with the nursery. Its input and output are pipes."""
    run = partial(
        trio.run_process,
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        check=False,
        deliver_cancel=kill,
    )
    process: trio.Process = await nursery.start(run)
    return process


async def kill(process: trio.Process) -> None:
    process.kill()
    await trio.lowlevel.checkpoint()


async def first_line(process: trio.Process) -> str:
    assert process.stdout is not None
    data = b""
    while b"\n" not in data:
        more = await process.stdout.receive_some()
        assert more, "it ended without a line"
        data += more
    return data.decode()


async def namespace(nursery: trio.Nursery) -> Namespace:
    holder = await start(nursery, "unshare", "--net", "sh", "-c", "echo held; exec cat")
    await first_line(holder)
    made = Namespace(holder)
    await made.do("ip", "link", "set", "lo", "up")
    return made


async def cable(left: tuple[Namespace, str, str], right: tuple[Namespace, str, str]) -> None:
    (first, first_name, first_host), (second, second_name, second_host) = left, right
    await first.do(
        "ip", "link", "add", first_name, "type", "veth",
        "peer", "name", second_name, "netns", str(second.pid),
    )  # fmt: skip
    for one, name, host in ((first, first_name, first_host), (second, second_name, second_host)):
        await one.do("ip", "address", "add", f"{host}/24", "dev", name)
        await one.do("ip", "link", "set", name, "up")


@dataclass
class Lab:
    """The three networks, with miniupnpd at work in the router."""

    home: Namespace
    router: Namespace
    stranger: Namespace
    nursery: trio.Nursery
    folder: Path
    port: int  # of miniupnpd, to know when it listens
    server: trio.Process | None = None

    async def start_router(self) -> None:
        await self.router.do("nft", "-f", "-", feed=f"flush ruleset\n{RULES}".encode())
        files = ("-f", str(self.folder / "miniupnpd.conf"), "-P", str(self.folder / "pid"))
        command = (*self.router.prefix, "miniupnpd", "-d", *files)
        self.server = await start(self.nursery, *command)

        async def listens() -> bool:
            return bool(await self.router.do("ss", "-Hlun", f"sport = {self.port}"))

        await until(listens, PATIENCE_SECONDS)

    async def restart_router(self) -> None:
        assert self.server is not None
        self.server.kill()
        await self.server.wait()
        (self.folder / "pid").unlink()
        await self.start_router()


@asynccontextmanager
async def lab(folder: Path, *, natpmp: bool, upnp: bool) -> AsyncIterator[Lab]:
    words = {"natpmp": "yes" if natpmp else "no", "upnp": "yes" if upnp else "no"}
    (folder / "miniupnpd.conf").write_text(CONFIGURATION.format(**words))
    async with trio.open_nursery() as nursery:
        home, router, stranger = [await namespace(nursery) for _ in range(3)]
        await cable((router, "lan", ROUTER), (home, "eth0", HOME))
        await cable((router, "wan", OUTSIDE), (stranger, "eth0", STRANGER))
        await home.do("ip", "route", "add", "default", "via", ROUTER)
        await router.do("ip", "route", "add", "default", "via", STRANGER)
        await router.do("sysctl", "-qw", "net.ipv4.ip_forward=1")
        made = Lab(home, router, stranger, nursery, folder, 5351 if natpmp else 1900)
        await made.start_router()
        yield made
        nursery.cancel_scope.cancel()


async def start_node(at: Lab, nursery: trio.Nursery) -> trio.Process:
    """The machine at home. Each of its lines is a change."""
    command = (sys.executable, "-m", "tests.nat.home_machine", str(OUR_PORT))
    return await start(nursery, *at.home.prefix, *command)


async def leave(node: trio.Process) -> None:
    assert node.stdin is not None
    await node.stdin.aclose()
    assert await node.wait() == 0


async def is_mapped(at: Lab) -> bool:
    return HOME in await at.router.do("nft", "list", "ruleset")


DIAL = "import socket, sys; print(socket.create_connection(({!r}, {}), 2).recv(9).decode())"


async def dial(stranger: Namespace, host: str, port: int) -> str:
    """What the machine behind the router says to a stranger; empty if there is no way to it."""
    command = (*stranger.prefix, sys.executable, "-c", DIAL.format(host, port))
    done = await trio.run_process(
        command, capture_stdout=True, stderr=subprocess.DEVNULL, check=False
    )
    return bytes(done.stdout).decode().strip()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("natpmp", "upnp", "protocol"), [(True, True, "PCP"), (False, True, "UPnP")]
)
async def test_a_stranger_gets_to_a_mapped_port_and_no_longer_once_the_node_has_left(
    tmp_path: Path, natpmp: bool, upnp: bool, protocol: str
) -> None:
    with trio.fail_after(PATIENCE_SECONDS):
        async with (
            lab(tmp_path, natpmp=natpmp, upnp=upnp) as at,
            trio.open_nursery() as nursery,
        ):
            assert await dial(at.stranger, OUTSIDE, OUR_PORT) == ""
            node = await start_node(at, nursery)
            told = json.loads(await first_line(node))
            assert told == {"protocol": protocol, "at": [OUTSIDE, OUR_PORT], "is_public": True}
            assert await dial(at.stranger, OUTSIDE, OUR_PORT) == "here"
            await leave(node)
            assert not await is_mapped(at)
            assert await dial(at.stranger, OUTSIDE, OUR_PORT) == ""


@pytest.mark.soak  # ten seconds, because a router is not asked more often than that
async def test_a_router_that_restarts_has_the_mapping_again_ten_seconds_later(
    tmp_path: Path,
) -> None:
    with trio.fail_after(PATIENCE_SECONDS):
        async with lab(tmp_path, natpmp=True, upnp=True) as at, trio.open_nursery() as nursery:
            await trio.sleep(4)  # a router that is younger cannot be seen to begin anew
            node = await start_node(at, nursery)
            told = await first_line(node)
            await at.restart_router()
            assert not await is_mapped(at)
            assert await first_line(node) == "null\n"
            assert await first_line(node) == told
            assert await dial(at.stranger, OUTSIDE, OUR_PORT) == "here"
            await leave(node)


BY_NAT_PMP = f"""
import trio
from nat.mapping.nat_pmp import NatPmp
client = NatPmp({ROUTER!r}, 5351, {OUR_PORT})
async def main():
    await client.look()
    granted = (await client.map({OUR_PORT})).mapping
    assert (granted.external_host, granted.external_port) == ({OUTSIDE!r}, {OUR_PORT}), granted
    print("mapped", flush=True)
    input()
    await client.unmap()
trio.run(main)
"""


@pytest.mark.slow
async def test_nat_pmp_alone_maps_and_unmaps_at_a_router_that_prefers_pcp(tmp_path: Path) -> None:
    with trio.fail_after(PATIENCE_SECONDS):
        async with (
            lab(tmp_path, natpmp=True, upnp=False) as at,
            trio.open_nursery() as nursery,
        ):
            node = await start(nursery, *at.home.prefix, sys.executable, "-c", BY_NAT_PMP)
            await first_line(node)
            assert await is_mapped(at)
            assert node.stdin is not None
            await node.stdin.send_all(b"\n")
            assert await node.wait() == 0
            assert not await is_mapped(at)
