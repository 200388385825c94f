"""The blocks with numbers: step and loss, the swarm's batch, what I gave, traffic, device. Pure.

Each has a name before it where the terminal is wide enough. What is not known yet is left out, and
a block of which nothing is known is none.
"""

from __future__ import annotations

from typing import Final

from rich.text import Text

from node.caps.units import in_words
from node.screen.cells import clean, clip, count, fit, pad, time_span
from node.screen.charts import curve, shares
from node.screen.layout import Block
from node.trainer.view import Phase, TrafficView, TrainerView

NAMED_FROM: Final = 56
"""Columns: from here on each block has its name before it."""

NAME_CELLS: Final = 9
CURVE_FROM: Final = 4
"""Columns that a curve has at least."""

CURVE_ROWS: Final = 3
CURVE_ROWS_IF_TALL: Final = 5
BAR_MOST: Final = 48
FIGURES_CELLS: Final = 22
MINE, OTHERS, FREE = "█", "▓", "░"
MINE_STYLE, OTHERS_STYLE = "green", "bright_blue"
"""Seen on black and on white, also as a console shows them."""


def named(name: str, text: Text, room: int) -> Text:
    """The text with its block's name before it, where that has room."""
    return (
        Text().append(pad(name, NAME_CELLS), "dim").append_text(text)
        if room >= NAMED_FROM
        else text
    )


def within(room: int) -> int:
    """Columns beside the name."""
    return room - NAME_CELLS if room >= NAMED_FROM else room


def loss_block(view: TrainerView, room: int, *, is_tall: bool) -> Block:
    """One line, or a curve of some rows with the figures beside it."""
    if not view.losses and view.loss is None and not view.epoch:
        return Block(4, [])
    step, free = f"step {count(view.epoch)}", within(room)
    loss = "" if view.loss is None else f"loss {count(view.loss, 4)}"
    figures = fit((step, loss), free, "  ")
    line = Text(figures)
    columns = free - line.cell_len - 2
    if columns >= CURVE_FROM and view.losses:
        line.append("  ").append(curve(view.losses, columns)[0], "cyan")
    if room < NAMED_FROM:
        return Block(4, [[line]])
    began = "" if len(view.losses) < 2 else f"from {count(view.losses[0], 4)}"
    line = Text(fit((count(view.epoch), loss), free, "   "))
    line.append("  ").append(curve(view.losses, free - line.cell_len - 2)[0], "cyan")
    variants = [[named("step", line, room)]]
    beside = (("step", count(view.epoch)), ("loss", count(view.loss, 4)), ("", began))
    heights = (CURVE_ROWS, CURVE_ROWS_IF_TALL) if is_tall else (CURVE_ROWS,)
    for rows in heights if len(view.losses) > 1 else ():
        drawn = curve(view.losses, free - FIGURES_CELLS, rows)
        names = [*beside, *[("", "")] * (rows - len(beside))]
        variants.append(
            [
                named(name, Text(pad(figure, FIGURES_CELLS)).append(row, "cyan"), room)
                for (name, figure), row in zip(names, drawn, strict=True)
            ]
        )
    return Block(4, variants, apart=True)


def batch_block(view: TrainerView, room: int) -> Block:
    """How full the batch is that all fill together, whose it is, and when the step is due. Without
    a link nobody knows, and a complete run has none."""
    batch, free = view.batch, within(room)
    if batch.target < 1 or view.phase in (Phase.NETWORK_LOST, Phase.COMPLETE):
        return Block(3, [])
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
        return Block(3, [[line]], apart=apart)
    details = (
        f"next step {due}" if batch.seconds_to_step else due or "next step: nobody can tell yet",
        f"{MINE} {count(batch.mine)} from here",
        f"{count(batch.samples_per_second, 1)} samples/s together",
    )
    legend = Text(fit(details, free))
    legend.highlight_words([MINE], MINE_STYLE)
    first = named("batch", line, room)
    return Block(3, [[first], [first, named("", legend, room)]], apart=apart)


def given_block(view: TrainerView, room: int) -> Block:
    """My accepted samples, and what part of everybody's they are."""
    given = view.contribution
    if not (given.samples or given.steps or given.lost_samples or view.batch.target):
        return Block(5, [])
    steps = "1 step" if given.steps == 1 else f"{count(given.steps)} steps"
    share = "" if given.share is None else f"{100.0 * given.share:.0f} %"
    if room < NAMED_FROM:
        return Block(5, [[Text(fit((f"given {count(given.samples)}", share, steps), room))]])
    rate = given.samples_per_second
    accepted = f"{count(given.samples)} accepted samples in {steps}"
    parts = (
        accepted if given.steps else "no samples are accepted yet: that comes with a step",
        share and f"{share} of them",
        f"{count(rate, 1)} samples/s" if rate else "",
        f"{count(given.lost_samples)} in none" if given.lost_samples else "",
    )
    return Block(5, [[named("given", Text(fit(parts, within(room))), room)]])


def traffic_block(view: TrainerView, room: int) -> Block:
    traffic = view.traffic
    if not (traffic.sent_bytes or traffic.received_bytes):
        return Block(10, [])
    rates = (
        f"↑ {in_words(traffic.sent_bytes_per_second)}/s",
        f"↓ {in_words(traffic.received_bytes_per_second)}/s",
    )
    if room < NAMED_FROM:
        return Block(10, [[Text(fit(rates, room, "  "))]])
    up, down = _limits(traffic)
    line = fit(
        (
            f"{rates[0]}{up}, {in_words(traffic.sent_bytes)} in all",
            f"{rates[1]}{down}, {in_words(traffic.received_bytes)} in all",
        ),
        within(room),
        "   ",
    )
    return Block(10, [[named("traffic", Text(line), room)]])


def carried_block(view: TrainerView, room: int) -> Block:
    """The traffic of all the session."""
    traffic = view.traffic
    if not (traffic.sent_bytes or traffic.received_bytes):
        return Block(10, [])
    sums = (f"↑ {in_words(traffic.sent_bytes)}", f"↓ {in_words(traffic.received_bytes)} in all")
    return Block(10, [[named("traffic", Text(fit(sums, within(room), "   ")), room)]])


def device_block(view: TrainerView, room: int) -> Block:
    if not view.device:
        return Block(11, [])
    threads = "1 thread" if view.threads == 1 else f"{count(view.threads)} threads"
    memory = "" if view.memory_bytes is None else f"{in_words(view.memory_bytes)} of memory"
    parts = (clean(view.device), threads, f"{count(view.micro_batch)} samples at once", memory)
    lines = [named("device", Text(fit(parts, within(room))), room)]
    if not view.checkpoint or room < NAMED_FROM:
        return Block(11, [lines])
    saved = named("saved", Text(clip(clean(view.checkpoint), within(room))), room)
    return Block(11, [lines, [*lines, saved]])


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
