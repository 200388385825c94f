"""The default gateway of this machine in IPv4: the router of a home network.

Linux has it in a file. On macOS and Windows the platform's own command is asked, and its output
read by what does not depend on the language. None if there is no gateway: no network, or a default
route into a tunnel (VPN), behind which no router maps ports.
"""

from __future__ import annotations

import ipaddress
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import trio

_LINUX_ROUTES: Final = Path("/proc/net/route")
_ROUTE_IS_UP: Final = 0x1
_ROUTE_HAS_GATEWAY: Final = 0x2

# The command takes some milliseconds; one that hangs must not hold up the search for long.
COMMAND_SECONDS: Final = 3.0

_MACOS_COMMAND: Final = ("/sbin/route", "-n", "get", "-inet", "default")
_MACOS_GATEWAY: Final = re.compile(r"^\s*gateway:\s*([\d.]+)\s*$", re.MULTILINE)
_WINDOWS_COMMAND: Final = ("route", "print", "-4", "0.0.0.0")
# destination, mask, gateway, interface, metric
_WINDOWS_ROUTE: Final = re.compile(
    r"^\s*0\.0\.0\.0\s+0\.0\.0\.0\s+([\d.]+)\s+[\d.]+\s+(\d+)\s*$", re.MULTILINE
)


async def default_gateway() -> str | None:
    """The IPv4 address of the default gateway, or None."""
    platform: str = sys.platform  # or else mypy takes the rest for unreachable
    if platform == "linux":
        try:
            return gateway_of_linux(_LINUX_ROUTES.read_text())
        except OSError:
            return None
    if platform == "darwin":
        return gateway_of_macos(await _output(_MACOS_COMMAND))
    if platform == "win32":
        return gateway_of_windows(await _output(_WINDOWS_COMMAND))
    return None


def gateway_of_linux(routes: str) -> str | None:
    """The gateway of the default route with the lowest metric, from /proc/net/route."""
    found: list[tuple[int, str]] = []
    for line in routes.splitlines()[1:]:
        fields = line.split()
        try:
            _, destination, gateway, flags, _, _, metric, mask = fields[:8]
            is_default = int(destination, 16) == 0 == int(mask, 16)
            wanted = _ROUTE_IS_UP | _ROUTE_HAS_GATEWAY
            if is_default and int(flags, 16) & wanted == wanted:
                # the kernel prints the four bytes as a number of this machine's byte order
                packed = int(gateway, 16).to_bytes(4, sys.byteorder)
                found.append((int(metric), str(ipaddress.IPv4Address(packed))))
        except (ValueError, OverflowError):
            continue
    return min(found)[1] if found else None


def gateway_of_macos(output: str) -> str | None:
    """The gateway that `route get` names."""
    match = _MACOS_GATEWAY.search(output)
    return _valid(match[1]) if match else None


def gateway_of_windows(output: str) -> str | None:
    """The gateway of the default route with the lowest metric, from `route print`."""
    routes = [(int(metric), host) for host, metric in _WINDOWS_ROUTE.findall(output)]
    return _valid(min(routes)[1]) if routes else None


def _valid(host: str) -> str | None:
    try:
        return str(ipaddress.IPv4Address(host))
    except ValueError:
        return None


async def _output(command: tuple[str, ...]) -> str:
    """What a command prints; nothing if it fails, is missing or takes too long."""
    try:
        with trio.fail_after(COMMAND_SECONDS):
            done = await trio.run_process(
                command, capture_stdout=True, stderr=subprocess.DEVNULL, check=False
            )
    except (OSError, trio.TooSlowError):
        return ""
    return bytes(done.stdout).decode("utf-8", "replace")
