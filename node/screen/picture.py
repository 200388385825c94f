"""The picture of a training peer, for a terminal of any size. Pure.

    render(scene, width, height)      # lines of rich's Text, which fit

The order is that of the issue: run and state, step and loss, the swarm's batch, what I gave,
traffic, peers, what happened last. On a small terminal what matters least is left out first:
device, traffic, the list of peers. What the state is, and what can be done about it, stays.

Easy to get wrong: no text of a run, a person or an error may come into a line but through
`cells.clean`, and never as rich's markup, where a peer could write what looks like our own words.
And colours have to be read on black and on white: words on a ground of their own are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from rich.text import Text

from node.display_name import label, with_names
from node.screen.cells import clean, clip, fit, pad, wrap
from node.screen.company import peers_block
from node.screen.layout import Block, arrange
from node.screen.numbers import (
    batch_block,
    device_block,
    given_block,
    kept_block,
    loss_block,
    traffic_block,
)
from node.screen.scene import Scene, SceneEvent
from node.trainer.view import ENDED, Phase, TrainerView, named
from node.trainer.words import since_words

MARGIN_FROM: Final = 40
"""Columns: from here on one stays free at each side."""

WIDEST: Final = 240
"""Columns: a wider chart shows no more."""

READABLE: Final = 140
"""Columns: a wider line of words is no easier to read."""

_WELL: Final = "black on green"
_BUSY: Final = "bright_white on blue"
_RESTS: Final = "black on yellow"
_WRONG: Final = "bright_white on red"
_STYLES: Final = {
    Phase.TRAINING: _WELL,
    Phase.KEEPING: _WELL,
    Phase.AVERAGING: "black on cyan",
    Phase.COMPLETE: _WELL,
    Phase.LEFT: _WELL,
    Phase.PREPARING: _BUSY,
    Phase.CATCHING_UP: _BUSY,
    Phase.FOLLOWING: _BUSY,
    Phase.PAUSED: _RESTS,
    Phase.LEAVING: _RESTS,
    Phase.NETWORK_LOST: _WRONG,
    Phase.REFUSED: _WRONG,
    Phase.FAILED: _WRONG,
}

_IN_SHORT: Final = {
    Phase.PAUSED: "back by itself",
    Phase.NETWORK_LOST: "back by itself",
    Phase.LEAVING: "Ctrl-C: at once",
}
"""What to do, where there is no room for it in full."""

RESUME: Final = "potluck resume"

_STOPPING: Final = ("Ctrl-C leaves", "in another terminal: potluck status, peers, pause, leave")

WITH_REASON_FROM: Final = 8
"""Lines: from here on the reason of a state matters more than the device, traffic and peers."""

LEAST_CURVE_ROWS: Final = 3
LINES_BESIDE_CURVE: Final = 20
"""Of the other blocks, in a run of a few peers."""

LINES_OF_DOING: Final = 3
LINES_OF_ADVICE: Final = 4
LINES_OF_NEWEST: Final = 3
EVENTS_AT_FIRST: Final = 3
"""While the node gets ready: the three lines of what it will use stand above, to be read."""


def render(scene: Scene, width: int, height: int) -> list[Text]:
    """At most `height` lines, none wider than `width` cells."""
    room, view = room_of(width), scene.view
    since = (since_words(view),) if view.phase_seconds >= 1 else ()
    blocks = [
        Block(1, [[title(view, room, since)]]),
        _state(view, room, height),
        loss_block(view, room, most_rows=curve_rows(height)),
        batch_block(view, room),
        kept_block(view, room) if view.keeps_only else given_block(view, room),
        traffic_block(view, room),
        device_block(view, room),
        peers_block(view, room),
        _events(_worth_saying(scene), room),
        _stopping(view, room),
    ]
    return [placed(line, width) for line in arrange(blocks, max(height, 0))]


def curve_rows(height: int) -> int:
    """That the chart may have on a terminal of so many lines."""
    return max(LEAST_CURVE_ROWS, (height - LINES_BESIDE_CURVE) // 2)


def room_of(width: int) -> int:
    """Columns that are written in."""
    return max(1, min(width - 2 * _margin(width), WIDEST))


def placed(line: Text, width: int) -> Text:
    """The line as it stands on the terminal."""
    line.rstrip()
    whole = Text(" " * _margin(width) if line.plain else "", no_wrap=True, end="")
    whole.append_text(line).truncate(max(width, 0))
    return whole


def title(view: TrainerView, room: int, since: Sequence[str]) -> Text:
    """The run and the phase, the first of `since` that has room, and on the right who this is."""
    phase = view.phase.value
    run = clip(clean(view.run) or "potluck", room - len(phase) - 4)
    line = Text().append(f"{run} ·" if run else "", "bold")
    ground = f" {phase} " if run else phase
    line.append(clip(ground, room - line.cell_len), _STYLES[view.phase])
    line.append(next((one for one in since if line.cell_len + len(one) <= room), ""))
    who = label(clean(view.peer), clean(view.person), view.name, room // 4)
    free = room - line.cell_len - Text(who).cell_len
    if who and free >= 2:
        line.append(" " * free).append(who, "dim")
    return line


def state_lines(
    view: TrainerView, room: int, most_doing: int, most_advice: int
) -> tuple[list[Text], list[Text]]:
    """What the state means, and what can be done about it."""
    label = "next: " if room >= MARGIN_FROM else ""
    room = min(room, READABLE)
    says = wrap(clean(with_names(view.doing, named(view.peers))), room, most_doing)
    to_do = wrap(clean(view.advice), room - len(label), most_advice)
    return [Text(one) for one in says], [
        Text().append(label if number == 0 else " " * len(label), "bold").append(one)
        for number, one in enumerate(to_do)
    ]


def event_lines(event: SceneEvent, room: int, most: int) -> list[Text]:
    """The time of day, and beside it the words, in at most so many lines."""
    clock_width = 9 if room >= MARGIN_FROM else 0
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


def _margin(width: int) -> int:
    return 1 if width >= MARGIN_FROM else 0


def _state(view: TrainerView, room: int, height: int) -> Block:
    says, to_do = state_lines(view, room, LINES_OF_DOING, LINES_OF_ADVICE)
    full = [*says, *to_do]
    if view.phase in ENDED:
        return Block(2, [full[:many] for many in range(1, len(full) + 1)], grows_first=True)
    says_in_short = Text(clip(clean(with_names(view.doing, named(view.peers))), room))
    if view.phase not in _IN_SHORT or not to_do:
        variants = [[says_in_short], full] if len(full) > 1 else [says]
        return Block(2 if to_do else 7, [one for one in variants if one])
    in_short = RESUME if RESUME in view.advice else _IN_SHORT[view.phase]
    hint = Text(clip(in_short, room)) if len(to_do) > 1 else to_do[0]
    variants = [[hint], [says_in_short, hint], [says_in_short, *to_do], full]
    return Block(2, variants[1:] if height >= WITH_REASON_FROM else variants, grows_first=True)


def events_with_names(scene: Scene) -> list[SceneEvent]:
    return [
        replace(one, words=with_names(one.words, named(scene.view.peers))) for one in scene.events
    ]


def _worth_saying(scene: Scene) -> list[SceneEvent]:
    view = scene.view
    said = [one for one in events_with_names(scene) if not _is_said_above(one, view)]
    is_ready = view.phase not in (Phase.PREPARING, Phase.CATCHING_UP)
    return said if is_ready else said[-EVENTS_AT_FIRST:]


def _is_said_above(event: SceneEvent, view: TrainerView) -> bool:
    """What the state is, in the words of what brought it about."""
    return event.words == view.doing or event.words.startswith(f"{view.phase.value}: ")


def _events(events: Sequence[SceneEvent], room: int) -> Block:
    """The newest in full, if it has room, and those before it in one line each."""
    if not events:
        return Block(8, [])
    variants = [event_lines(events[-1], room, most) for most in range(1, LINES_OF_NEWEST + 1)]
    newest = variants[-1]
    older = [line for event in events[:-1] for line in event_lines(event, room, 1)]
    variants += [[*older[-many:], *newest] for many in range(1, len(older) + 1)]
    return Block(8, [one for one in variants if one], apart=True)


def _stopping(view: TrainerView, room: int) -> Block:
    if view.phase in (Phase.LEAVING, *ENDED) or "Ctrl-C" in view.advice:
        return Block(6, [])
    return Block(6, [[Text(fit(_STOPPING, room), "dim")]], apart=True)
