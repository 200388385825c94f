"""The blocks with numbers: step and loss, the swarm's batch, my part, traffic, device. Pure.

Each has a name before it if the terminal is wide enough. Unknown numbers are left out, and so is a
block without any.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.text import Text

from node.app.screen.cells import clean, clip, count, fit, pad, time_span
from node.app.screen.charts import Scale, curve, scale_of, shares
from node.app.screen.layout import ScreenBlock
from node.core.caps.units import in_words
from node.core.training_view import TrafficView, TrainerPhase, TrainerView

NAMED_FROM: Final = 56
"""Columns: from here on each block has its name before it."""

NAME_CELLS: Final = 9
CURVE_FROM: Final = 4
"""Columns that a curve has at least."""

CURVE_ROWS: Final = (3, 5, 8, 12, 16, 20)
BAR_MOST: Final = 96
MINE, OTHERS, FREE = "█", "▓", "░"
MINE_STYLE, OTHERS_STYLE = "green", "bright_blue"
"""Readable on black and on white, also on a console."""


def named(name: str, text: Text, room: int) -> Text:
    """The text with its block's name before it, if there is room."""
    return (
        Text().append(pad(name, NAME_CELLS), "dim").append_text(text)
        if room >= NAMED_FROM
        else text
    )


def within(room: int) -> int:
    """Columns beside the name."""
    return room - NAME_CELLS if room >= NAMED_FROM else room


def loss_block(view: TrainerView, room: int, *, most_rows: int) -> ScreenBlock:
    """The step, and the run's loss in it: one line, or a chart of some rows below."""
    if not view.losses and view.loss is None and not view.epoch:
        return ScreenBlock(4, [])
    free, at = within(room), _steps_of(view)
    of_all = f" of {count(view.steps)}" if view.steps else ""
    loss = "" if view.loss is None else f"loss {count(view.loss, 4)}"
    if room < NAMED_FROM:
        line = Text(fit((f"step {count(view.epoch)}{of_all}", loss), free, "  "))
        return ScreenBlock(4, [[_with_curve(line, view, at, free)]])
    over = "" if view.seconds_left is None else f"over in {time_span(view.seconds_left)}"
    if loss:
        loss = f"the run's {loss}"
        if view.loss_step != view.epoch:  # the newest step made none, or was made without this peer
            loss += f" in step {count(view.loss_step)}"
    line = Text(fit((f"{count(view.epoch)}{of_all}", loss, over), free))
    variants = [[named("step", _with_curve(line.copy(), view, at, free), room)]]
    scale = scale_of(view.losses)
    for rows in CURVE_ROWS if len(view.losses) > 1 and scale is not None else ():
        if scale is None or rows > most_rows:
            break
        drawn = _chart(view, at, scale, free, rows)
        chart = [named("" if number else "loss", row, room) for number, row in enumerate(drawn)]
        variants.append([named("step", line, room), *chart])
    return ScreenBlock(4, variants, apart=True)


def _with_curve(line: Text, view: TrainerView, at: Sequence[int], free: int) -> Text:
    columns = free - line.cell_len - 2
    if columns >= CURVE_FROM and view.losses:
        line.append("  ").append(curve(view.losses, columns, at=at)[0], "cyan")
    return line


def _chart(
    view: TrainerView, at: Sequence[int], scale: Scale, columns: int, rows: int
) -> list[Text]:
    """The curve with its two axes: the loss at the ends of the scale, and the steps."""
    labels = [f"{scale.high:.4g}", *[""] * (rows - 2), f"{scale.low:.4g}"]
    margin = max(len(one) for one in labels)
    drawn = curve(view.losses, columns - margin - 2, rows, at=at, scale=scale)
    lines = [
        Text().append(f"{label:>{margin}} ", "dim").append("│", "dim").append(row, "cyan")
        for label, row in zip(labels, drawn, strict=True)
    ]
    first, last = f"step {at[0]:,}", f"{at[-1]:,}"
    width = max(len(row) for row in drawn)
    steps = f"{first}{last:>{max(width - len(first), len(last) + 3)}}"
    scaled = "logarithmic" if scale.by_factors else ""
    below = " " * (margin + 2) + fit((steps, scaled), columns - margin - 2, "   ")
    return [*lines, Text(below, "dim")]


def _steps_of(view: TrainerView) -> Sequence[int]:
    if len(view.losses_at) == len(view.losses):
        return view.losses_at
    return range(view.epoch - len(view.losses) + 1, view.epoch + 1)  # an older node says none


def batch_block(view: TrainerView, room: int) -> ScreenBlock:
    """How full the common batch is, this peer's part of it, and when the step is due. Unknown
    without a link, and empty for a complete run."""
    batch, free = view.batch, within(room)
    if batch.target < 1 or view.phase in (TrainerPhase.NETWORK_LOST, TrainerPhase.COMPLETE):
        return ScreenBlock(3, [])
    apart = view.loss is None and not view.losses and not view.epoch  # the first of the numbers
    percent = f"{min(max(100.0 * batch.samples / batch.target, 0.0), 100.0):.0f} %"
    due = _due(batch.seconds_to_step)
    full = f"{count(batch.samples)} of {count(batch.target)} samples"
    wide = room >= NAMED_FROM
    behind = fit((percent, full) if wide else (percent, due), free, "  ")
    columns = min(free - len(behind) - 1, BAR_MOST)
    line = Text(no_wrap=True)
    if columns >= CURVE_FROM:
        mine = min(float(batch.mine), batch.samples)
        cells = shares((mine, batch.samples - mine), batch.target, columns)
        line.append(MINE * cells[0], MINE_STYLE).append(OTHERS * cells[1], OTHERS_STYLE)
        line.append(FREE * (columns - sum(cells)), "dim").append(" ")
    line.append(behind)
    if not wide:
        return ScreenBlock(3, [[line]], apart=apart)
    details = (
        f"next step {due}" if batch.seconds_to_step else due or "next step: not known yet",
        "" if view.keeps_only else f"{MINE} {count(batch.mine)} from here",
        f"{count(batch.samples_per_second, 1)} samples/s together",
    )
    legend = Text(fit(details, free))
    legend.highlight_words([MINE], MINE_STYLE)
    first = named("batch", line, room)
    return ScreenBlock(3, [[first], [first, named("", legend, room)]], apart=apart)


def given_block(view: TrainerView, room: int) -> ScreenBlock:
    """My accepted samples, and their part of everybody's."""
    given = view.contribution
    if not (
        given.samples or given.steps or given.alone_steps or given.lost_samples or view.batch.target
    ):
        return ScreenBlock(5, [])
    steps = "1 step" if given.steps == 1 else f"{count(given.steps)} steps"
    share = "" if given.share is None else f"{100.0 * given.share:.0f} %"
    if room < NAMED_FROM:
        short = (f"given {count(given.samples)}", share, steps)
        if not given.steps and given.alone_steps:
            short = (f"alone {count(given.alone_samples)}", f"{count(given.alone_steps)} steps", "")
        return ScreenBlock(5, [[Text(fit(short, room))]])
    rate = given.samples_per_second
    accepted = f"{count(given.samples)} accepted samples in {steps}" if given.steps else ""
    made = "1 step" if given.alone_steps == 1 else f"{count(given.alone_steps)} steps"
    alone = f"{count(given.alone_samples)} samples alone in {made}" if given.alone_steps else ""
    nothing = "" if accepted or alone else "no samples are accepted yet: that comes with a step"
    parts = (
        nothing,
        accepted,
        share and f"{share} of them",
        alone,
        f"{count(rate, 1)} samples/s" if rate else "",
        f"{count(given.lost_samples)} in none" if given.lost_samples else "",
    )
    return ScreenBlock(5, [[named("given", Text(fit(parts, within(room))), room)]])


def experts_block(view: TrainerView, room: int) -> ScreenBlock:
    """The experts here, and a bar of the cells that are live, in a run that has some."""
    experts, free = view.experts, within(room)
    if experts is None:
        return ScreenBlock(5, [])
    wide = room >= NAMED_FROM
    live = f"{count(experts.live)} of {count(experts.cells)} {'live' if wide else 'experts'}"
    servers = "1 server" if experts.servers == 1 else f"{count(experts.servers)} servers"
    behind = f"{live} at {servers}" if wide else live
    line = Text(no_wrap=True)
    columns = min(free - len(behind) - 1, BAR_MOST)
    if columns >= CURVE_FROM and experts.cells:
        mine = min(experts.hosted, experts.live)
        cells = shares((mine, experts.live - mine), experts.cells, columns)
        line.append(MINE * cells[0], MINE_STYLE).append(OTHERS * cells[1], OTHERS_STYLE)
        line.append(FREE * (columns - sum(cells)), "dim").append(" ")
    bar = named("experts", line.append(clip(behind, free)), room)
    if not experts.most:
        return ScreenBlock(5, [[bar]], apart=True)
    rate = experts.rows_per_second
    here = fit(
        (
            f"{MINE} {count(experts.hosted)} here" if wide else f"{count(experts.hosted)} here",
            f"{count(rate, 1)} rows/s" if rate is not None else "",
            f"{experts.load_seconds:.1f} s waiting",
            f"{count(experts.taken_over)} taken over" if experts.taken_over else "",
        ),
        free,
    )
    own = Text(here)
    own.highlight_words([MINE], MINE_STYLE)
    line_of_own = named("" if wide else "experts", own, room)
    return ScreenBlock(5, [[bar], [bar, line_of_own]], apart=True)


def kept_block(view: TrainerView, room: int) -> ScreenBlock:
    """For a peer that brings no samples: the checkpoint on its disk, and its troubles."""
    free, age = within(room), view.checkpoint_age_seconds
    if age is None:
        kept = "no checkpoint is written yet: the first follows the volunteers' steps"
    else:
        kept = f"step {count(view.checkpoint_step)}, written {time_span(age)} ago"
    lines = [named("kept", Text(clip(kept, free)), room)]
    if view.troubles is None:
        return ScreenBlock(5, [lines])
    health = Text("healthy: new volunteers can join here")
    if view.troubles:
        health = Text(clip(clean("; ".join(view.troubles)), free), "bold")
    return ScreenBlock(5, [lines, [*lines, named("health", health, room)]])


def traffic_block(view: TrainerView, room: int) -> ScreenBlock:
    traffic = view.traffic
    if not (traffic.sent_bytes or traffic.received_bytes):
        return ScreenBlock(10, [])
    rates = (
        f"↑ {in_words(traffic.sent_bytes_per_second)}/s",
        f"↓ {in_words(traffic.received_bytes_per_second)}/s",
    )
    if room < NAMED_FROM:
        return ScreenBlock(10, [[Text(fit(rates, room, "  "))]])
    up, down = _limits(traffic)
    line = fit(
        (
            f"{rates[0]}{up}, {in_words(traffic.sent_bytes)} in all",
            f"{rates[1]}{down}, {in_words(traffic.received_bytes)} in all",
        ),
        within(room),
        "   ",
    )
    return ScreenBlock(10, [[named("traffic", Text(line), room)]])


def carried_block(view: TrainerView, room: int) -> ScreenBlock:
    """The traffic of the whole session."""
    traffic = view.traffic
    if not (traffic.sent_bytes or traffic.received_bytes):
        return ScreenBlock(10, [])
    sums = (f"↑ {in_words(traffic.sent_bytes)}", f"↓ {in_words(traffic.received_bytes)} in all")
    return ScreenBlock(10, [[named("traffic", Text(fit(sums, within(room), "   ")), room)]])


def device_block(view: TrainerView, room: int) -> ScreenBlock:
    if not view.device:
        return ScreenBlock(11, [])
    threads = "1 thread" if view.threads == 1 else f"{count(view.threads)} threads"
    memory = "" if view.memory_bytes is None else f"{in_words(view.memory_bytes)} of memory"
    device = view.device_memory_bytes
    gpus = "" if device is None else f"{in_words(device)} of the GPU's"
    samples = f"{count(view.micro_batch)} samples at once"
    parts = (clean(view.device), threads, samples, memory, gpus)
    lines = [named("device", Text(fit(parts, within(room))), room)]
    if not view.checkpoint or room < NAMED_FROM:
        return ScreenBlock(11, [lines])
    saved = named("saved", Text(clip(clean(view.checkpoint), within(room))), room)
    return ScreenBlock(11, [lines, [*lines, saved]])


def _due(seconds: float | None) -> str:
    if seconds is None:
        return ""
    if seconds == 0:
        return "step due"
    return "in a moment" if 0 < seconds < 1 else f"in {time_span(seconds)}"


def _limits(traffic: TrafficView) -> tuple[str, str]:
    up, down = (
        "" if limit is None else f" of {in_words(limit)}/s"
        for limit in (traffic.upload_limit, traffic.download_limit)
    )
    return up, down
