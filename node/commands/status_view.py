"""A node's status, for a person: a few lines and a table of links.

Rich does the drawing: it knows whether there is a terminal, how wide it is, and whether colours
are wanted (NO_COLOR). On a narrow terminal, and through a pipe, links are lists of lines instead
of a table, so that nothing has to be cut: a peer id with its end missing is of no use.

Easy to get wrong: strings from peers are data. They go through `printable` and into `Text`, never
into rich's markup, where a peer could write what looks like our own words.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from node.caps.used import used_rows
from node.commands.membership_view import clock_words, in_one_line
from node.commands.output import hung, printable
from node.commands.training_view import training_rows

if TYPE_CHECKING:  # commands that only borrow a duration from here are not to load the network
    from node.status import DirectoryStatus, LinkStatus, MembershipStatus, NodeStatus

# A peer id has 52 characters, an address about as many, and there are six short columns.
WIDTH_FOR_TABLE = 130


def show(status: dict[str, Any]) -> None:
    """Print one status."""
    console = _console()
    console.print(drawing(_typed(status), console), soft_wrap=True)


def watch(statuses: Iterable[dict[str, Any]]) -> None:
    """Show each status in the place of the one before; one below the other where that fails."""
    console = _console()
    if not console.is_terminal:
        for status in statuses:
            console.print(drawing(_typed(status), console), soft_wrap=True)
            console.print()
        return
    with Live(console=console, auto_refresh=False) as live:
        for status in statuses:
            live.update(drawing(_typed(status), console), refresh=True)


def _console() -> Console:
    return Console(highlight=False, markup=False, emoji=False)


def _typed(status: dict[str, Any]) -> NodeStatus:
    from node.status import NodeStatus

    return msgspec.convert(status, NodeStatus)


def drawing(status: NodeStatus, console: Console) -> RenderableType:
    """What is shown of a status on this console."""
    parts: list[RenderableType] = [_heading(status, console.width if console.is_terminal else None)]
    if not status.links:
        parts.append(Text("No links. Another node can ping one of the addresses above."))
    elif console.is_terminal and console.width >= WIDTH_FOR_TABLE:
        parts.append(_table(status.links))
    else:
        parts += [_lines(link) for link in status.links]
    return Group(*parts)


def _heading(status: NodeStatus, columns: int | None) -> Text:
    text = Text()
    uptime = duration(status.uptime_seconds)
    cannot_join = status.directory.cannot_join
    rows = [
        ("peer id", status.peer_id),
        ("node", f"potluck {status.version}, pid {status.pid}, up {uptime}"),
        *(("address", address) for address in status.addresses),
        ("run", in_one_line(status.membership)),
        *_warnings(status.membership),
        *([] if status.training is None else training_rows(status.training)),
        *_used(status),
        ("memory", amount(status.memory_bytes)),
        ("calls", _calls(status.rpc)),
        ("dht", _directory(status.directory)),
        *(("warning", f"cannot join at {at}: {why}") for at, why in cannot_join.items()),
        ("settings", status.config_file or "defaults, no file"),
        *(("warning", warning) for warning in status.warnings),
        ("links", str(len(status.links))),
    ]
    for name, value in rows:
        first = f"{name:<9}"
        text.append(first, style="yellow" if name == "warning" else "bold")
        text.append(hung(first, printable(value), columns)[len(first) :] + "\n")
    text.rstrip()
    return text


def _used(status: NodeStatus) -> list[tuple[str, str]]:
    """Of what its owner allows. A node that trains has said what its traffic is already."""
    rows = [] if status.caps is None else used_rows(status.caps)
    return [row for row in rows if row[0] != "traffic" or status.training is None]


def _warnings(membership: MembershipStatus) -> list[tuple[str, str]]:
    clock = clock_words(membership)
    said = [membership.trouble, f"the clock: {clock}" if clock else ""]
    return [("warning", words) for words in said if words]


def _calls(rpc: dict[str, int]) -> str:
    made, served = rpc.get("calls_made", 0), rpc.get("requests_served", 0)
    failed, in_flight = rpc.get("calls_failed", 0), rpc.get("calls_in_flight", 0)
    return f"{made} made ({failed} failed, {in_flight} in flight), {served} served"


def _directory(directory: DirectoryStatus) -> str:
    joined = {"alone": "alone in the swarm", "trying": "not joined yet", "": "unknown"}
    words = [
        joined.get(directory.joined, directory.joined),
        f"{directory.peers_known} nodes known",
        f"{directory.slots_stored} slots kept ({amount(directory.bytes_stored)})",
        f"{directory.slots_published} of its own",
    ]
    if directory.clock_offset_ms:
        words.append(f"this clock is off by {abs(directory.clock_offset_ms) / 1000:,.1f} s")
    return ", ".join(words)


def _table(links: Iterable[LinkStatus]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("peer", no_wrap=True)
    for name in ("way", "address"):
        table.add_column(name, overflow="fold")
    for name in ("rtt", "sent", "received", "streams", "up"):
        table.add_column(name, justify="right", no_wrap=True)
    for link in links:
        table.add_row(
            Text(printable(link.peer)),
            f"{link.reach} {link.direction}",
            Text(printable(link.address)),
            milliseconds(link.round_trip_ms),
            _flow(link.bytes_sent, link.send_bytes_per_second),
            _flow(link.bytes_received, link.receive_bytes_per_second),
            str(link.streams),
            duration(link.connected_seconds),
        )
    return table


def _lines(link: LinkStatus) -> Text:
    preposition = "from" if link.direction == "in" else "to"
    return Text(
        f"\n{printable(link.peer)}\n"
        f"  {link.reach}, {preposition} {printable(link.address)}, "
        f"since {duration(link.connected_seconds)}\n"
        f"  rtt {milliseconds(link.round_trip_ms)}, streams {link.streams}\n"
        f"  sent {_flow(link.bytes_sent, link.send_bytes_per_second)}, "
        f"received {_flow(link.bytes_received, link.receive_bytes_per_second)}"
    )


def _flow(count: int, rate: float | None) -> str:
    return amount(count) if rate is None else f"{amount(count)} (best {amount(rate)}/s)"


def amount(count: float | None) -> str:
    """Bytes for a person: 1.5 MiB."""
    if count is None:
        return "unknown"
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def milliseconds(value: float | None) -> str:
    """A round trip for a person."""
    return "not measured" if value is None else f"{value:.1f} ms"


def duration(seconds: float) -> str:
    """A time span for a person, in its two largest units: 3 d 4 h."""
    whole = int(seconds)
    sizes = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))
    parts = []
    for unit, size in sizes:
        count, whole = divmod(whole, size)
        if count:
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2]) or "0 s"
