"""`scripts/bench page`: what the run's page costs the peer that serves it, with many viewers.

A process serves the page of a run with a day of history and many peers, which goes on meanwhile
(page_server.py). The viewers are in this process, and read all that comes, as browsers do. At the
end, while they are there, the page is loaded once more: in Chromium if it is installed, which says
when it has painted for the first time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import trio

from lab import Talk
from lab.bench.command import report
from lab.bench.machine import machine_facts
from lab.bench.processes import BenchFailed, open_process
from lab.page.browser import Chromium, missing

if TYPE_CHECKING:
    from node.app.cli.parser import Subparsers

VIEWERS: Final = 200
SECONDS: Final = 300.0
PEERS: Final = 200
HOURS: Final = 24.0
ALONE_SECONDS: Final = 5.0  # before the first viewer: what the history alone costs
BETWEEN_TWO_SECONDS: Final = 0.02  # viewers: browsers do not come all at once
PATIENCE_SECONDS: Final = 30.0
MAKING_SECONDS: Final = 600.0  # the history of a day takes half a minute

MOST_CORES: Final = 0.1
MOST_PAINT_SECONDS: Final = 1.0
MOST_BYTES: Final = 150_000
MOST_GROWTH_BYTES: Final = 20e6

Used = Callable[[], Awaitable[dict[str, Any]]]

PAINTED: Final = "(performance.getEntriesByName('first-contentful-paint')[0] || {}).startTime"


def add_parser(kinds: Subparsers) -> None:
    from node.app.cli.parser import positive_count, positive_number

    parser = kinds.add_parser(
        "page",
        help="processor time and memory of the run's page with many viewers",
        description="Serve the page of a run with a day of history, let many viewers follow it, "
        "and load it once more beside them. Exit code 1 if the serving process takes over a tenth "
        "of a core or 20 MB more than before, if a viewer is lost, or if the page has over 150 kB "
        "or is painted after more than a second. The paint needs Chromium; without it, that is "
        "left out.",
        example="scripts/bench page\nscripts/bench page --viewers 20 --seconds 10 --json",
    )
    parser.add_argument(
        "--viewers", type=positive_count, default=VIEWERS, metavar="N", help=f"at once ({VIEWERS})"
    )
    parser.add_argument(
        "--seconds",
        type=positive_number,
        default=SECONDS,
        metavar="S",
        help=f"for which all of them follow ({SECONDS:g})",
    )
    parser.add_argument(
        "--peers", type=positive_count, default=PEERS, metavar="N", help=f"of the run ({PEERS})"
    )
    parser.add_argument(
        "--hours",
        type=positive_number,
        default=HOURS,
        metavar="H",
        help=f"of the run so far, with a step every 2.5 s ({HOURS:g})",
    )
    parser.set_defaults(measure=run)


def run(arguments: argparse.Namespace) -> int:
    async def measure(talk: Talk) -> dict[str, Any]:
        return await measure_page(
            arguments.viewers, arguments.seconds, arguments.peers, arguments.hours, talk
        )

    return report(arguments, measure, lines)


async def measure_page(
    viewers: int, seconds: float, peers: int, hours: float, talk: Talk
) -> dict[str, Any]:
    talk(f"a run of {peers} peers with {hours:g} h of history")
    async with open_process("the page", ["-m", "lab.bench.page_server"]) as server:
        made = await server.ask("serve", peers=peers, hours=hours, within=MAKING_SECONDS)
        talk(f"{viewers} viewers for {seconds:g} s")
        found = await followed(lambda: server.ask("used"), made["url"], viewers, seconds)
    result = {"peers": peers, "hours": hours, "points": made["points"], **found}
    return {**result, "met": is_met(result), "machine": machine_facts()}


async def followed(used: Used, url: str, viewers: int, seconds: float) -> dict[str, Any]:
    """What the page costs while so many viewers follow it, and how it is loaded beside them.
    `used`: what its process has used so far (page_server.py)."""
    begin = await used()
    await trio.sleep(min(ALONE_SECONDS, seconds))
    alone = await used()
    following = [PageViewer(url) for _ in range(viewers)]
    async with trio.open_nursery() as nursery:
        for one in following:
            nursery.start_soon(one.follow)
            await trio.sleep(BETWEEN_TWO_SECONDS)
        await _all_there(used, viewers)
        first = await used()
        await trio.sleep(seconds)
        last = await used()
        loaded = await _loaded(url)
        nursery.cancel_scope.cancel()
    return {
        "viewers": viewers,
        "seconds": round(last["at"] - first["at"], 1),
        "cores_alone": _cores(begin, alone),
        "cores": _cores(first, last),
        "memory_bytes": last["memory_bytes"],
        "growth_bytes": last["memory_bytes"] - alone["memory_bytes"],
        "lost_viewers": viewers - last["viewers"],
        **heard_by(following, first["at"], last["at"]),
        **loaded,
    }


def is_met(result: dict[str, Any]) -> bool:
    painted = result["painted_seconds"]
    return (
        result["cores"] < MOST_CORES
        and result["growth_bytes"] < MOST_GROWTH_BYTES
        and not result["lost_viewers"]
        and result["page_bytes"] < MOST_BYTES
        and result["page_bytes_compressed"] < MOST_BYTES
        and result["page_seconds"] < MOST_PAINT_SECONDS
        and (painted is None or painted < MOST_PAINT_SECONDS)
    )


class PageViewer:
    """One browser that follows the page. `heard`: when each state came; `bytes`: of all of them."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.heard: list[float] = []
        self.bytes = 0

    async def follow(self) -> None:
        """Until cancelled, or dropped."""
        with suppress(trio.BrokenResourceError):
            async with await _asked(self._url, "/events") as stream:
                async for piece in stream:
                    self.bytes += len(piece)
                    if b"\ndata: " in piece:
                        self.heard.append(time.monotonic())


def heard_by(viewers: Sequence[PageViewer], begin: float, end: float) -> dict[str, Any]:
    """How many bytes all got in a second, and the longest time that one got no state."""
    gaps = [
        later - earlier
        for one in viewers
        for times in [[begin, *(at for at in one.heard if begin <= at <= end), end]]
        for earlier, later in pairwise(times)
    ]
    return {
        "MB_per_s": round(sum(one.bytes for one in viewers) / max(end - begin, 1e-9) / 1e6, 2),
        "longest_silence_s": round(max(gaps), 2),
    }


async def _all_there(used: Used, viewers: int) -> None:
    with trio.move_on_after(PATIENCE_SECONDS):
        while (await used())["viewers"] < viewers:  # noqa: ASYNC110 - another process
            await trio.sleep(0.1)
        return
    raise BenchFailed(
        f"Not all of the {viewers} viewers were served.",
        why="A page takes 256 viewers at once, and a process so many files as its limit says.",
        advice="Take fewer viewers (--viewers), or raise the limit (ulimit -n).",
    )


async def _loaded(url: str) -> dict[str, Any]:
    """The page, asked for once more: plain, compressed, and in a browser."""
    plain, _ = await _page(url, "identity")
    compressed, seconds = await _page(url, "gzip")
    cold, painted = None, None
    if not missing():
        cold, painted = await trio.to_thread.run_sync(_painted, url)
    return {
        "page_bytes": plain,
        "page_bytes_compressed": compressed,
        "page_seconds": round(seconds, 3),
        "painted_seconds": painted,
        "painted_seconds_cold": cold,
    }


async def _page(url: str, encoding: str) -> tuple[int, float]:
    """Its bytes with the head, and how long they took."""
    began = trio.current_time()
    size = 0
    with trio.fail_after(PATIENCE_SECONDS):
        async with await _asked(url, "/", f"Accept-Encoding: {encoding}\r\n") as stream:
            async for piece in stream:
                size += len(piece)
    return size, trio.current_time() - began


async def _asked(url: str, path: str, head: str = "") -> trio.SocketStream:
    place = urlsplit(url)
    stream = await trio.open_tcp_stream(place.hostname or "", place.port or 80)
    lines = f"GET {path} HTTP/1.1\r\nHost: {place.netloc}\r\nConnection: close\r\n{head}\r\n"
    await stream.send_all(lines.encode())
    return stream


def _painted(url: str) -> tuple[float, float]:
    """Seconds from the navigation to the first content that Chromium shows: as the first page after
    its start, and as a person's browser does, which runs already."""
    found = []
    with Chromium.started() as browser:
        for _ in range(2):
            tab = browser.tab()
            tab.open(f"{url}/")
            tab.wait_for(f"({PAINTED}) > 0")
            found.append(round(tab.evaluate(PAINTED) / 1000, 3))
            tab.close()
    return found[0], found[1]


def _cores(before: dict[str, Any], after: dict[str, Any]) -> float:
    used: float = after["cpu_seconds"] - before["cpu_seconds"]
    seconds: float = after["at"] - before["at"]
    return round(used / seconds, 4)


def lines(result: dict[str, Any]) -> str:
    """For people."""
    painted = result["painted_seconds"]
    return (
        f"{result['viewers']} viewers for {result['seconds']:g} s: {result['cores']:g} cores "
        f"({result['cores_alone']:g} without any), {result['growth_bytes'] / 1e6:.1f} MB more "
        f"than before, {result['lost_viewers']} lost\n"
        f"{result['MB_per_s']:g} MB/s to all of them; none was without news for longer than "
        f"{result['longest_silence_s']:g} s\n"
        f"the page: {result['page_bytes'] / 1e3:.0f} kB, compressed "
        f"{result['page_bytes_compressed'] / 1e3:.0f} kB, in {result['page_seconds']:g} s; "
        + (
            "Chromium is not installed"
            if painted is None
            else f"painted after {painted:g} s ({result['painted_seconds_cold']:g} s as the first "
            "page of a browser)"
        )
    )
