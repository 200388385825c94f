"""A node's status, for a person: a few lines about its membership and its training, and its links.

Rich draws it: it knows whether there is a terminal, how wide it is, and whether colours are wanted
(NO_COLOR). On a narrow terminal, and through a pipe, links are lists of lines instead of a table,
so that nothing is cut: a peer id without its end is of no use.

Strings from peers are data. They go through `printable` and into `Text`, never into rich's markup,
where a peer could write words that look like our own.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from node.app.cli.output import counted, hung, printable
from node.core.access.server_time import FAR_OFF_MS, distance
from node.core.caps.units import in_words
from node.core.caps.used import used_rows
from node.core.duration import span
from node.core.training_view import (
    BatchView,
    ContributionView,
    ExpertsView,
    TrafficView,
    TrainerPhase,
    TrainerView,
)
from node.training.words import since_words

if TYPE_CHECKING:
    from node.core.status import (
        ConnectivityStatus,
        DirectoryStatus,
        LinkStatus,
        MembershipStatus,
        NodeStatus,
        RelayStatus,
    )


def training_rows(view: TrainerView) -> Iterator[tuple[str, str]]:
    """Names and values, the most important first."""
    apart = ", " if view.phase is TrainerPhase.AVERAGING else " "
    yield "training", f"{view.run}, {view.phase}{apart}{since_words(view)}"
    if view.doing:
        yield "", view.doing
    if view.advice:
        yield "next", view.advice
    if view.experts is not None:
        yield "experts", experts_words(view.experts)
    if view.serves_only:
        yield "traffic", _traffic(view.traffic)
        yield from _last(view)
        return
    of_all = f" of {view.steps:,}" if view.steps else ""
    over = "" if view.seconds_left is None else f", over in {span(view.seconds_left)}"
    yield "step", f"{view.epoch:,}{of_all}{over}"
    if view.loss is not None:
        yield "loss", f"{view.loss:.4f} (the run's, over all samples of step {view.loss_step:,})"
    if view.batch.target:
        yield "batch", _batch(view.batch, computes=not view.keeps_only)
    if not view.keeps_only:
        yield "given", _given(view.contribution)
    if view.troubles is not None:
        yield "health", "; ".join(view.troubles) or "healthy: new volunteers can join here"
    if view.device:
        threads = "1 thread" if view.threads == 1 else f"{view.threads} threads"
        yield "device", f"{view.device}, {threads}, {view.micro_batch:,} samples at once"
    yield "traffic", _traffic(view.traffic)
    others = "1 other" if len(view.peers) == 1 else f"{len(view.peers)} others"
    yield "peers", f"{others} in the run (`potluck peers`)"
    if view.checkpoint:
        age = view.checkpoint_age_seconds
        ago = "" if age is None else f", {span(age)} ago"
        yield "saved", f"{view.checkpoint}{ago}"
    yield from _last(view)


def _last(view: TrainerView) -> Iterator[tuple[str, str]]:
    if view.last_event:
        clock = time.strftime("%H:%M:%S", time.localtime(view.last_event_at))
        yield "last", f"{clock} {view.last_event}"


def experts_words(experts: ExpertsView) -> str:
    """This peer's experts, then everybody's."""
    words = [f"{experts.live:,} of {experts.cells:,} cells live"]
    words.append(f"at {counted(experts.servers, 'server')}")
    everybody = " ".join(words) + " (`potluck experts list`)"
    if not experts.most:
        return everybody
    taken = f" ({experts.taken_over:,} taken over)" if experts.taken_over else ""
    here = [f"{experts.hosted:,} of at most {experts.most:,} here{taken}"]
    here.append(f"{experts.load_seconds:.1f} s of work waiting")
    rate = "" if experts.rows_per_second is None else f" ({experts.rows_per_second:,.1f} /s)"
    here.append(f"{counted(experts.rows, 'row')} computed{rate}")
    if experts.hosted:
        age = experts.oldest_copy_seconds
        here.append("not all saved yet" if age is None else f"all saved {span(age)} ago or later")
    return f"{', '.join(here)}; {everybody}"


def _batch(batch: BatchView, *, computes: bool) -> str:
    share = 100.0 * batch.samples / batch.target
    due = ""
    if batch.seconds_to_step is not None:
        due = f", full in {span(batch.seconds_to_step)}" if batch.seconds_to_step else ", full"
    mine = f"{batch.mine:,} of them from here, " if computes else ""
    return (
        f"{batch.samples:,.0f} of {batch.target:,} samples ({min(share, 100.0):.0f} %), "
        f"{mine}{batch.samples_per_second:,.1f} samples/s{due}"
    )


def _given(given: ContributionView) -> str:
    share = "" if given.share is None else f" ({100.0 * given.share:.0f} % of those steps)"
    rate = ""
    if given.samples_per_second is not None:
        rate = f", {given.samples_per_second:,.1f} samples/s"
    alone = ""
    if given.alone_steps:
        alone = f", {given.alone_samples:,} in {given.alone_steps:,} steps made alone"
    lost = f", {given.lost_samples:,} in none" if given.lost_samples else ""
    together = f"{given.samples:,} samples in {given.steps:,} steps with others{share}"
    return f"{together}{alone}{lost}{rate}"


def _traffic(traffic: TrafficView) -> str:
    return (
        f"{in_words(traffic.sent_bytes)} sent ({in_words(traffic.sent_bytes_per_second)}/s"
        f"{_limit(traffic.upload_limit)}), {in_words(traffic.received_bytes)} received "
        f"({in_words(traffic.received_bytes_per_second)}/s{_limit(traffic.download_limit)})"
    )


def _limit(limit: float | None) -> str:
    return "" if limit is None else f" of at most {in_words(limit)}/s"


OPEN_RUN = (
    "OPEN RUN: there is no auth server, and everybody with a key may take part. `potluck login "
    "INVITE` puts this node into a closed run."
)


def in_one_line(membership: MembershipStatus) -> str:
    """The name, the run, and the time until the pass expires."""
    if membership.open:
        return OPEN_RUN
    roles = ", ".join(membership.roles)
    return f"{membership.username} ({roles}) in {membership.run}, {token_words(membership)}"


def token_words(membership: MembershipStatus) -> str:
    """The state of the token."""

    left = membership.expires_in_seconds
    if membership.standing == "valid":
        renewed = (
            f"renewed in {duration(membership.renewed_in_seconds)}"
            if membership.renewed_in_seconds > 0
            else "being renewed"
        )
        return f"token valid for {duration(left)}, {renewed}"
    if membership.standing == "grace":
        more = duration(left + membership.grace_seconds)
        return f"token expired {duration(-left)} ago; accepted for another {more}"
    return f"token expired {duration(-left)} ago: outside the run until it is renewed"


def clock_words(membership: MembershipStatus) -> str:
    """The error of this machine's clock; empty if there is nothing to say."""
    offset = membership.clock_offset_ms
    if abs(offset) <= FAR_OFF_MS:
        return ""
    side = "behind" if offset > 0 else "ahead of"
    when = "" if membership.clock_measured else " (at the last measurement)"
    return f"this machine's is {distance(offset)} {side} the auth server's{when}"


# A peer id has 52 characters, an address about as many, and there are six short columns.
WIDTH_FOR_TABLE = 130


def show(status: dict[str, Any]) -> None:
    """Print one status."""
    console = _console()
    console.print(drawing(_typed(status), console), soft_wrap=True)


def watch(statuses: Iterable[dict[str, Any]]) -> None:
    """Show each status in place of the previous one; below it if that fails."""
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
    from node.core.status import NodeStatus

    return msgspec.convert(status, NodeStatus)


def drawing(status: NodeStatus, console: Console) -> RenderableType:
    """The status, drawn for this console."""
    parts: list[RenderableType] = [_heading(status, console.width if console.is_terminal else None)]
    if not status.links:
        parts.append(Text("No links. Other nodes can ping the addresses above."))
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
        *_reached(status.connectivity),
        *([] if status.relay is None else [("relays", relay_words(status.relay))]),
        ("run", in_one_line(status.membership)),
        *_warnings(status.membership),
        *([] if status.training is None else training_rows(status.training)),
        *_used(status),
        ("memory", _memory(status)),
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


def _memory(status: NodeStatus) -> str:
    """The machine's, and a GPU's if one computes."""
    device = None if status.training is None else status.training.device_memory_bytes
    machines = amount(status.memory_bytes)
    return machines if device is None else f"{machines}, and {amount(device)} of the GPU's"


def _reached(connectivity: ConnectivityStatus) -> Iterator[tuple[str, str]]:
    """How others reach this node, and what helpers said of its addresses."""
    if not connectivity.mode:  # an older node does not tell
        return
    router = f" (router: {connectivity.router})" if connectivity.router not in _NO_ROUTER else ""
    through = f", through {', '.join(connectivity.relays)}" if connectivity.relays else ""
    yield "reached", f"{connectivity.mode}{router}{through}"
    for one in connectivity.addresses:
        mapped = ", forwarded by the router" if one.mapped else ""
        yield "", f"{one.address}: {_VERDICTS.get(one.verdict, one.verdict)}{mapped}"
    if connectivity.trouble:
        yield "warning", f"no relay: {connectivity.trouble}"


_NO_ROUTER = ("", "none", "not known")
_VERDICTS = {
    "public": "others can dial it",
    "private": "others cannot dial it",
    "unknown": "not known yet whether others can dial it",
}


def relay_words(relay: RelayStatus) -> str:
    """What the node relays for others."""
    words = [
        f"for others: {counted(relay.reservations, 'reservation')}",
        counted(relay.circuits, "circuit"),
        in_words(relay.carried_bytes),
    ]
    if relay.month_limit is not None:
        share = f"{in_words(relay.month_bytes)} of {in_words(relay.month_limit)}"
        words.append(f"{share} in {relay.month}")
    refused = sum(relay.refusals.values())
    if refused:
        reasons = ", ".join(f"{name} {count:,}" for name, count in sorted(relay.refusals.items()))
        words.append(f"{refused:,} refused ({reasons})")
    return ", ".join(words)


def _used(status: NodeStatus) -> list[tuple[str, str]]:
    """The use of the owner's caps. A node that trains shows its traffic elsewhere."""
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
        f"{counted(directory.peers_known, 'node')} known",
        f"{counted(directory.slots_stored, 'slot')} kept ({amount(directory.bytes_stored)})",
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
