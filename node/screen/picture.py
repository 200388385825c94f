"""The picture of a training peer, for a terminal of any size. Pure.

    render(scene, width, height)      # lines of rich's Text, which fit

The order is that of the issue: run and state, step and loss, the swarm's batch, what I gave,
traffic, peers, what happened last. On a small terminal what matters least is left out first:
device, traffic, the list of peers. What the state is, and what can be done about it, stays.

Easy to get wrong: no text of a run, a person or an error may come into a line but through
`cells.clean`, and never as rich's markup, where a peer could write what looks like our own words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.text import Text

from node.screen.cells import clean, clip, fit, pad, time_span, wrap
from node.screen.company import peers_block
from node.screen.layout import Block, arrange
from node.screen.numbers import batch_block, device_block, given_block, loss_block, traffic_block
from node.screen.scene import Scene, SceneEvent
from node.trainer.view import Phase, TrainerView
from node.trainer.words import short

MARGIN_FROM: Final = 40
"""Columns: from here on one stays free at each side."""

WIDEST: Final = 140
"""Columns: a wider line is no easier to read."""

_STYLES: Final = {
    Phase.TRAINING: "bold green",
    Phase.AVERAGING: "bold cyan",
    Phase.PREPARING: "bold blue",
    Phase.CATCHING_UP: "bold blue",
    Phase.PAUSED: "bold yellow",
    Phase.LEAVING: "bold yellow",
    Phase.NETWORK_LOST: "bold red",
    Phase.REFUSED: "bold red",
}

_IN_SHORT: Final = {
    Phase.PAUSED: "potluck resume",
    Phase.NETWORK_LOST: "back by itself",
    Phase.REFUSED: "see below",
    Phase.LEAVING: "Ctrl-C: at once",
}
"""What to do, where there is no room for it in full."""

_STOPPING: Final = ("Ctrl-C leaves", "in another terminal: potluck status, peers, pause, leave")

TALL_FROM: Final = 30
"""Lines: from here on the curve of the loss may be five rows high."""

LINES_OF_DOING: Final = 3
LINES_OF_ADVICE: Final = 4
LINES_OF_NEWEST: Final = 3


def render(scene: Scene, width: int, height: int) -> list[Text]:
    """At most `height` lines, none wider than `width` cells."""
    margin = 1 if width >= MARGIN_FROM else 0
    room = max(1, min(width - 2 * margin, WIDEST))
    view = scene.view
    blocks = [
        Block(1, [[_title(view, room)]]),
        _state(view, room),
        loss_block(view, room, is_tall=height >= TALL_FROM),
        batch_block(view, room),
        given_block(view, room),
        traffic_block(view, room),
        device_block(view, room),
        peers_block(view, room),
        _events([one for one in scene.events if one.words != view.doing], room),
        _stopping(view, room),
    ]
    return [_placed(line, margin, width) for line in arrange(blocks, max(height, 0))]


def _placed(line: Text, margin: int, width: int) -> Text:
    line.rstrip()
    placed = Text(" " * margin if line.plain else "", no_wrap=True, end="").append_text(line)
    placed.truncate(max(width, 0))
    return placed


def _title(view: TrainerView, room: int) -> Text:
    """The run and the phase; on the right who this is."""
    phase = view.phase.value
    run = clip(clean(view.run) or "potluck", room - len(phase) - 3)
    left = f"{run} · " if run else ""
    duration = f" for {time_span(view.phase_seconds)}" if view.phase_seconds >= 1 else ""
    person, peer = clip(clean(view.person), room // 4), short(clean(view.peer))
    who = " ".join(one for one in (person, peer) if one)
    title = Text().append(left, "bold").append(clip(phase, room), _STYLES[view.phase])
    if title.cell_len + len(duration) <= room:
        title.append(duration)
    free = room - title.cell_len - Text(who).cell_len
    if who and free >= 2:
        title.append(" " * free).append(who, "dim")
    return title


def _state(view: TrainerView, room: int) -> Block:
    doing, advice = clean(view.doing), clean(view.advice)
    label = "next: " if room >= MARGIN_FROM else ""
    says = [Text(one) for one in wrap(doing, room, LINES_OF_DOING)]
    in_full = wrap(advice, room - len(label), LINES_OF_ADVICE)
    to_do = [
        Text().append(label if number == 0 else " " * len(label), "bold").append(one)
        for number, one in enumerate(in_full)
    ]
    in_short = _IN_SHORT.get(view.phase, "") if advice else ""
    if not in_short:
        full = [*says, *to_do]
        variants = [[Text(clip(doing, room))], full] if len(full) > 1 else [says]
        return Block(7 if not advice else 2, [one for one in variants if one])
    hint = Text(clip(in_short, room)) if len(in_full) > 1 else to_do[0]
    return Block(
        2,
        [[hint], [Text(clip(doing, room)), hint], [*says[:1], *to_do], [*says, *to_do]],
        grows_first=True,
    )


def _events(events: Sequence[SceneEvent], room: int) -> Block:
    """The newest in full, if it has room, and those before it in one line each."""
    if not events:
        return Block(8, [])
    clock_width = 9 if room >= MARGIN_FROM else 0

    def lines(event: SceneEvent, most: int) -> list[Text]:
        style = "yellow" if event.warns else ""
        texts = wrap(clean(event.words), room - clock_width, most)
        return [
            Text()
            .append(pad(clean(event.clock) if number == 0 else "", clock_width), "dim")
            .append(one, style)
            for number, one in enumerate(texts)
        ]

    variants = [lines(events[-1], most) for most in range(1, LINES_OF_NEWEST + 1)]
    newest = variants[-1]
    older = [line for event in events[:-1] for line in lines(event, 1)]
    variants += [[*older[-many:], *newest] for many in range(1, len(older) + 1)]
    return Block(8, [one for one in variants if one], apart=True)


def _stopping(view: TrainerView, room: int) -> Block:
    if view.phase in (Phase.LEAVING, Phase.REFUSED) or "Ctrl-C" in view.advice:
        return Block(6, [])
    return Block(6, [[Text(fit(_STOPPING, room), "dim")]], apart=True)
