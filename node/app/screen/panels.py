"""The panels of the screen: the loss, the batch, the peers, this machine, experts, what a backbone
does, and the events. Pure.

A panel that has nothing to say yet is left out, and so are unknown numbers. Text of a run, a peer
or an error only enters a line through `cells.clean` or `label`, and never as rich's markup.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from rich.cells import cell_len
from rich.text import Text

from node.app.screen.cells import clean, clip, count, fit, pad, time_span, wrap
from node.app.screen.charts import curve, labels, scale_of, shares
from node.app.screen.layout import Panel
from node.core.caps.units import in_words
from node.core.display_name import all_with_names, label, short
from node.core.sensors import GpuReading, Reading
from node.core.status import LinkStatus, NodeStatus
from node.core.training_view import RunPeerView, TrafficView, TrainerPhase, TrainerView
from node.training.words import role_words

MINE, OTHERS, FREE = "━", "═", "─"
"""Lines, so that two bars below one another do not run together."""

MINE_STYLE, OTHERS_STYLE = "green", "bright_blue"
"""Readable on black and on white, also on a console."""

CURVE_STYLE: Final = "cyan"
NAME_CELLS: Final = 10
BAR_FROM, BAR_MOST = 4, 96  # columns
LONGEST_TEXT: Final = 400  # characters
TEXT: Final = "it writes"  # the name of the panel with what the model writes
TEXT_LINES: Final = 6
READABLE: Final = 140
"""Columns: a wider line of words is no easier to read."""


@dataclass(frozen=True)
class SceneEvent:
    """One line of the events. `clock`: the time of day. `warns`: it came from the log. `kind`: only
    the newest of a kind is shown."""

    clock: str
    words: str
    warns: bool = False
    kind: str = ""


@dataclass(frozen=True)
class Scene:
    """One moment. `events`: the newest last. `node`: its status, for a peer that keeps the run.
    `processor`: how many of the `processors` this process keeps busy; `sensors`: the words of
    the drivers. `said`: the lines that were
    printed in this session, such as the invite. `keys`: whether keys can be read. `chosen`: the
    name of the panel that has the whole room, None for all of them, which are also shown while it
    has nothing to say; `helps`: the help has the room. `note`: what the last key did."""

    view: TrainerView
    events: tuple[SceneEvent, ...] = ()
    node: NodeStatus | None = None
    processor: float | None = None
    processors: int = 0
    sensors: Reading = field(default_factory=Reading)
    said: tuple[str, ...] = ()
    keys: bool = False
    chosen: str | None = None
    helps: bool = False
    note: str = ""


def panels_of(scene: Scene) -> list[Panel]:
    """Those that have something to say, in the order of the tab key."""
    view = scene.view
    found = [
        loss_panel(view),
        batch_panel(view),
        experts_panel(view),
        backbone_panel(view, scene.node),
        peers_panel(view),
        machine_panel(scene),
        text_panel(view),
        events_panel(scene),
    ]
    return [one for one in found if one is not None]


# -- the loss


def loss_panel(view: TrainerView) -> Panel | None:
    if not view.losses and view.loss is None:
        return None
    title = "" if view.loss is None else f"{count(view.loss, 4)} in step {count(view.loss_step)}"
    return Panel("loss", title, lambda *room: chart(view, *room), 4, 5, priority=3, grows=True)


def chart(view: TrainerView, width: int, height: int) -> list[Text]:
    """The run's loss over all steps that are known, with both axes."""
    at, scale = _steps_of(view), scale_of(view.losses)
    rows = height - 1
    if scale is None or rows < 1 or len(at) < 2:
        return [Text(clip("the curve begins with the second step", width), "dim")]
    names = labels(scale, rows)
    margin = max(len(one) for one in names)
    columns = width - margin - 2
    if columns < BAR_FROM:
        return []
    drawn = curve(view.losses, at, columns, rows, scale)
    lines = [
        Text().append(f"{name:>{margin}} │", "dim").append(row, CURVE_STYLE)
        for name, row in zip(names, drawn, strict=True)
    ]
    return [*lines, Text(" " * (margin + 2) + _steps_below(at, columns), "dim")]


def _steps_below(at: Sequence[int], columns: int) -> str:
    first, last = f"step {at[0]:,}", f"{at[-1]:,}"
    middle = f"{(at[0] + at[-1]) // 2:,}"
    free = columns - len(first) - len(last)
    if free < 1:
        return clip(last, columns)
    if free < len(middle) + 12:
        return first + " " * free + last
    before = columns // 2 - len(first) - len(middle) // 2
    return first + " " * before + middle + " " * (free - before - len(middle)) + last


def _steps_of(view: TrainerView) -> Sequence[int]:
    if len(view.losses_at) == len(view.losses):
        return view.losses_at
    return range(view.epoch - len(view.losses) + 1, view.epoch + 1)  # an older node says none


# -- the batch


def batch_panel(view: TrainerView) -> Panel | None:
    """How full the common batch is and this peer's part of it, how fast everybody is, and what this
    peer gave. Unknown without a link; a complete run fills no batch."""
    batch = view.batch
    unknown = batch.target < 1
    if view.phase in (TrainerPhase.NETWORK_LOST, TrainerPhase.COMPLETE) or unknown:
        given = given_words(view)
        if not given or unknown:
            return None
        return Panel("given", "", lambda width, _: [Text(fit(given, width))], 1, 1, priority=4)
    percent = f"{min(max(100.0 * batch.samples / batch.target, 0.0), 100.0):.0f} %"
    due = _due(batch.seconds_to_step)
    title = fit((percent, f"next step {due}" if batch.seconds_to_step else due), READABLE)
    most = 2 if view.keeps_only else 3
    return Panel("batch", title, lambda *room: _batch(view, *room), 1, most, priority=2)


def _batch(view: TrainerView, width: int, _height: int) -> list[Text]:
    batch = view.batch
    mine, rate = min(float(batch.mine), batch.samples), batch.samples_per_second
    own = 0.0 if view.keeps_only else view.contribution.samples_per_second or 0.0
    of_all = f"{count(batch.samples)} of {count(batch.target)}"
    fast = f"{count(own, 1)} of {count(rate, 1)} /s"
    if view.keeps_only:
        fast = f"{count(rate, 1)} /s"
    widest = max(len(of_all), len(fast))
    full = bar("samples", (mine, batch.samples - mine), batch.target, of_all, width, widest)
    speed = bar("speed", (own, rate - own), max(rate, own), fast, width, widest)
    if view.keeps_only:
        return [full, speed]
    return [full, speed, line("given", fit(given_words(view), width - NAME_CELLS))]


def given_words(view: TrainerView) -> tuple[str, ...]:
    """My accepted samples, and their part of everybody's; empty if this peer gives none."""
    given = view.contribution
    if view.keeps_only or view.serves_only:
        return ()
    share = "" if given.share is None else f"{100.0 * given.share:.0f} % of them"
    steps = "1 step" if given.steps == 1 else f"{count(given.steps)} steps"
    made = "1 step" if given.alone_steps == 1 else f"{count(given.alone_steps)} steps"
    accepted = f"{count(given.samples)} accepted samples in {steps}" if given.steps else ""
    alone = f"{count(given.alone_samples)} samples alone in {made}" if given.alone_steps else ""
    nothing = "" if accepted or alone else "no samples are accepted yet: that comes with a step"
    lost = f"{count(given.lost_samples)} in none" if given.lost_samples else ""
    return (nothing, accepted, share, alone, lost)


# -- what the model writes


def text_panel(view: TrainerView) -> Panel | None:
    written = view.writes
    if not written.strip():
        return None
    return Panel(TEXT, "", lambda *room: _text(written, *room), 1, TEXT_LINES, priority=8)


def _text(written: str, width: int, height: int) -> list[Text]:
    """The text in its own lines, without empty ones."""
    width = min(width, READABLE)
    found: list[Text] = []
    for row in written[:LONGEST_TEXT].split("\n"):
        indent = " " * min(len(row) - len(row.lstrip(" ")), width // 4)
        lines = wrap(clean(row), width - len(indent), height)
        found += [Text(clip(indent + one, width)) for one in lines]
    return found[:height]


# -- peers


def peers_panel(view: TrainerView) -> Panel | None:
    if not view.peers:
        return None
    ways = Counter(_way(one) for one in view.peers)
    noun = "other" if len(view.peers) == 1 else "others"
    reached = ", ".join(f"{ways[way]:,} {way}" for way in (*_REACHED, UNREACHED) if ways[way])
    title = f"{len(view.peers):,} {noun} · {reached}"
    many = len(view.peers)
    return Panel("peers", title, lambda *room: _peers(view, *room), 1, many, priority=6, grows=True)


LAST: Final = "\U0010ffff"  # sorts behind every name
ROLE_MOST: Final = 16
RATE_CELLS: Final = 8  # of the bar beside a peer
_REACHED: Final = ("direct", "punched", "relayed")
UNREACHED: Final = "not reached"


def _peers(view: TrainerView, width: int, height: int) -> list[Text]:
    peers = sorted(view.peers, key=_order)
    shown = peers[: height if len(peers) <= height else max(height - 1, 1)]
    lines = _rows(shown, width)
    hidden = len(peers) - len(shown)
    if hidden and height > 1:
        lines.append(Text(clip(f"and {hidden:,} more: potluck peers", width), "dim"))
    return lines


def _order(peer: RunPeerView) -> tuple[bool, bool, str, str]:
    """A fixed order, so that the list does not jump; reachable peers come first."""
    return (
        peer.reach not in _REACHED,
        bool(peer.ignored),
        peer.name or peer.said_name or LAST,
        peer.peer,
    )


def _way(peer: RunPeerView) -> str:
    return peer.reach if peer.reach in _REACHED else UNREACHED


def _rows(peers: Sequence[RunPeerView], width: int) -> list[Text]:
    """One line for each, in columns; columns without full room are left out."""
    fastest = max((one.samples_per_second or 0.0 for one in peers), default=0.0)
    table = [
        (
            label(clean(one.peer), clean(one.name), one.said_name),
            _way(one),
            "" if one.samples_per_second is None else f"{count(one.samples_per_second, 1)} /s",
            _rate_bar(one.samples_per_second or 0.0, fastest),
            "" if one.round_trip_ms is None else f"{count(one.round_trip_ms)} ms",
            "" if one.samples is None else f"{count(one.samples)} in batch",
            clip(role_words(clean(one.role), keeps=one.keeps), ROLE_MOST),
        )
        for one in peers
    ]
    widths = [max((cell_len(row[column]) for row in table), default=0) for column in range(7)]
    rows = []
    for peer, cells in zip(peers, table, strict=True):
        row = Text()
        for column, cell in enumerate(cells):
            between = "  " if row.plain else ""
            if not widths[column]:
                continue
            if row.plain and row.cell_len + len(between) + widths[column] > width:
                break
            is_number = column in (2, 4, 5)
            placed = cell.rjust(widths[column]) if is_number else pad(cell, widths[column])
            style = "dim" if peer.reach not in _REACHED else OTHERS_STYLE if column == 3 else ""
            row.append(between).append(placed, style)
        row.truncate(width)
        if peer.ignored and row.cell_len + 14 <= width:
            ignored = f"  ignored: {clean(peer.ignored)}"
            row.append(clip(ignored, width - row.cell_len), "bold")
        rows.append(row)
    return rows


def _rate_bar(rate: float, fastest: float) -> str:
    cells = shares((rate,), fastest, RATE_CELLS)[0]
    return "" if fastest <= 0 else pad(OTHERS * cells, RATE_CELLS)


# -- this machine


def machine_panel(scene: Scene) -> Panel | None:
    lines = _machine(scene)
    if not lines:
        return None
    device = clean(scene.view.device)
    return Panel(
        "this machine",
        device,
        lambda *room: _machine(scene, *room),
        1,
        len(lines),
        priority=7,
    )


def _machine(scene: Scene, width: int = READABLE, _height: int = 0) -> list[Text]:
    view, room = scene.view, width - NAME_CELLS
    found, traffic = [], view.traffic
    has_traffic = traffic.sent_bytes or traffic.received_bytes
    if has_traffic:
        up, down = limits(traffic)
        now = (
            f"↑ {in_words(traffic.sent_bytes_per_second)}/s{up}",
            f"↓ {in_words(traffic.received_bytes_per_second)}/s{down}",
        )
        found.append(line("traffic", fit(now, room, "   ")))
    if scene.processor is not None and scene.processors:
        busy = f"{count(scene.processor, 1)} of {count(scene.processors)} busy"
        words = _with_sensors(busy, scene.sensors.degrees, scene.sensors.watts)
        used = (scene.processor,)
        found.append(bar("processor", used, scene.processors, words, width, len(words)))
    for number, one in enumerate(scene.sensors.gpus):
        found += _gpu("GPU" if len(scene.sensors.gpus) == 1 else f"GPU {number}", one, width)
    memory = "" if view.memory_bytes is None else in_words(view.memory_bytes)
    gpu = "" if view.device_memory_bytes is None else in_words(view.device_memory_bytes)
    if memory or gpu:
        found.append(line("memory", fit((memory, gpu and f"{gpu} of the GPU's"), room)))
    if view.micro_batch:
        threads = "1 thread" if view.threads == 1 else f"{count(view.threads)} threads"
        at_once = f"{count(view.micro_batch)} samples at once"
        found.append(line("computes", fit((threads, at_once), room)))
    if has_traffic:
        found.append(line("in all", fit(carried_words(traffic), room, "   ")))
    if view.checkpoint and not view.keeps_only:
        found.append(line("saved", clip(clean(view.checkpoint), room)))
    return found


def _gpu(name: str, gpu: GpuReading, width: int) -> list[Text]:
    """How busy it is, and its memory with that of other programs, as far as its driver tells."""
    found = []
    busy = "" if gpu.busy is None else f"{100 * gpu.busy:.0f} %"
    words = _with_sensors(busy, gpu.degrees, gpu.watts)
    if gpu.busy is not None:
        found.append(bar(name, (gpu.busy,), 1.0, words, width, len(words)))
    elif words:
        found.append(line(name, clip(words, width - NAME_CELLS)))
    if gpu.memory_bytes is not None and gpu.all_memory_bytes:
        held = f"{in_words(gpu.memory_bytes)} of {in_words(gpu.all_memory_bytes)}"
        used, there = (gpu.memory_bytes,), gpu.all_memory_bytes
        found.append(bar("" if found else name, used, there, held, width, len(held)))
    return found


def _with_sensors(words: str, degrees: float | None, watts: float | None) -> str:
    """The words with the temperature and the power, if they are known."""
    warm = "" if degrees is None else f"{degrees:.0f}°C"
    return fit((words, warm, "" if watts is None else f"{watts:.0f} W"), READABLE)


def carried_words(traffic: TrafficView) -> tuple[str, str]:
    """The traffic of the whole session."""
    return f"↑ {in_words(traffic.sent_bytes)}", f"↓ {in_words(traffic.received_bytes)}"


def limits(traffic: TrafficView) -> tuple[str, str]:
    up, down = (
        "" if limit is None else f" of {in_words(limit)}/s"
        for limit in (traffic.upload_limit, traffic.download_limit)
    )
    return up, down


# -- experts


def experts_panel(view: TrainerView) -> Panel | None:
    """The experts here, and a bar of the cells that are live, in a run that has some."""
    experts = view.experts
    if experts is None:
        return None
    servers = "1 server" if experts.servers == 1 else f"{count(experts.servers)} servers"

    def lines(width: int, _height: int) -> list[Text]:
        mine = min(experts.hosted, experts.live)
        live = f"{count(experts.live)} of {count(experts.cells)} live"
        found = [bar("cells", (mine, experts.live - mine), experts.cells, live, width, len(live))]
        if not experts.most:
            return found
        rate = experts.rows_per_second
        here = (
            f"{MINE} {count(experts.hosted)} here",
            f"{count(rate, 1)} rows/s" if rate is not None else "",
            f"{experts.load_seconds:.1f} s waiting",
            f"{count(experts.taken_over)} taken over" if experts.taken_over else "",
        )
        own = line("served", fit(here, width - NAME_CELLS))
        own.highlight_words([MINE], MINE_STYLE)
        return [*found, own]

    return Panel("experts", f"at {servers}", lines, 1, 2 if experts.most else 1, priority=4)


# -- a backbone

MOST_ASKING: Final = 6


def backbone_panel(view: TrainerView, node: NodeStatus | None) -> Panel | None:
    """What a peer does that keeps a run or only relays: its health, checkpoints, circuits, and who
    asks."""
    if not view.keeps_only:
        return None
    troubles = view.troubles
    health = "" if troubles is None else "ailing" if troubles else "healthy"
    many = 0 if node is None else len(node.links)
    title = fit((health, "1 link" if many == 1 else f"{many:,} links" if many else ""), READABLE)
    lines = _backbone(view, node, READABLE)
    return Panel(
        "backbone",
        title,
        lambda width, _: _backbone(view, node, width),
        1,
        len(lines),
        priority=1 if troubles else 4,
    )


def _backbone(view: TrainerView, node: NodeStatus | None, width: int) -> list[Text]:
    room, age = width - NAME_CELLS, view.checkpoint_age_seconds
    found = []
    if view.troubles is not None:
        well = "others can join here" if view.relays_only else "new volunteers can join here"
        words = clean("; ".join(view.troubles)) or well
        found.append(line("health", clip(words, room), "bold" if view.troubles else ""))
    if not view.relays_only:
        kept = "none written since the start: the next one follows the volunteers' steps"
        if age is not None:
            kept = f"step {count(view.checkpoint_step)}, written {time_span(age)} ago"
        found.append(line("kept", clip(kept, room)))
    if node is None:
        return found
    if node.relay is not None:
        relay = node.relay
        month = f"{in_words(relay.month_bytes)} in {clean(relay.month)}" if relay.month else ""
        places = f"{count(relay.reservations)} of {count(relay.most_reservations)} places"
        made = f"{count(relay.circuits)} of {count(relay.most_circuits)}"
        found.append(
            bar("circuits", (relay.circuits,), relay.most_circuits, made, width, len(made))
        )
        found.append(line("relay", fit((places, month), room)))
    asked = sum(node.connectivity.dial_backs.values())
    stored = node.directory.slots_stored
    slots = "1 slot kept" if stored == 1 else f"{count(stored)} slots kept"
    found.append(line("asked", fit((slots, f"{count(asked)} dialled back" if asked else ""), room)))
    asking = sorted(node.links, key=lambda one: -one.bytes_sent)[:MOST_ASKING]
    names = {one.peer: one for one in view.peers}
    for number, link in enumerate(asking):
        found.append(line("" if number else "sent to", _asking(link, names.get(link.peer), room)))
    return found


def _asking(link: LinkStatus, peer: RunPeerView | None, room: int) -> str:
    name = short(clean(link.peer))
    if peer is not None:
        name = label(clean(peer.peer), clean(peer.name), peer.said_name)
    amount = f"{in_words(link.bytes_sent):>7}"
    return fit((f"{amount}  {name}", clean(link.reach)), room)


# -- events


def events_panel(scene: Scene) -> Panel | None:
    if not scene.events:
        return None
    return Panel(
        "events",
        "",
        lambda *room: _events(scene, *room),
        1,
        min(len(scene.events), 2),
        priority=5,
        grows=True,
    )


def events_with_names(scene: Scene, events: Sequence[SceneEvent]) -> list[SceneEvent]:
    texts = all_with_names([one.words for one in events], scene.view.peers)
    return [replace(one, words=words) for one, words in zip(events, texts, strict=True)]


LINES_OF_ONE: Final = 3


def _events(scene: Scene, width: int, height: int) -> list[Text]:
    """The newest ones, the last of them in full."""
    events = events_with_names(scene, scene.events[-height:])
    lines = event_lines(events[-1], width, min(LINES_OF_ONE, height))
    for event in reversed(events[:-1]):
        if len(lines) >= height:
            break
        lines = [*event_lines(event, width, 1), *lines]
    return lines


CLOCK_CELLS: Final = 9
CLOCK_FROM: Final = 40  # columns


def event_lines(event: SceneEvent, room: int, most: int) -> list[Text]:
    """The time of day, and beside it the words, in at most so many lines."""
    clock_width = CLOCK_CELLS if room >= CLOCK_FROM - 2 else 0
    room = min(room, READABLE)
    texts = [Text(one) for one in wrap(clean(event.words), room - clock_width, most)]
    if texts and event.warns:
        texts[0].stylize("bold", 0, texts[0].plain.find(":") + 1)
    return [
        Text()
        .append(pad(clean(event.clock) if number == 0 else "", clock_width), "dim")
        .append_text(one)
        for number, one in enumerate(texts)
    ]


# -- lines


def line(name: str, words: str, style: str = "") -> Text:
    """Words with their name before them."""
    return Text().append(pad(name, NAME_CELLS), "dim").append(words, style)


def bar(
    name: str, parts: Sequence[float], whole: float, words: str, width: int, words_cells: int
) -> Text:
    """A bar with this peer's part first, and the words behind it, right-justified to so many
    cells."""
    columns = min(width - NAME_CELLS - words_cells - 1, BAR_MOST)
    if columns < BAR_FROM:
        return line(name, clip(words, width - NAME_CELLS))
    cells = [*shares(parts, whole, columns), 0]
    return (
        Text()
        .append(pad(name, NAME_CELLS), "dim")
        .append(MINE * cells[0], MINE_STYLE)
        .append(OTHERS * cells[1], OTHERS_STYLE)
        .append(FREE * (columns - sum(cells)), "dim")
        .append(f" {words:>{words_cells}}")
    )


def _due(seconds: float | None) -> str:
    if seconds is None:
        return ""
    if seconds == 0:
        return "step due"
    return "in a moment" if 0 < seconds < 1 else f"in {time_span(seconds)}"
