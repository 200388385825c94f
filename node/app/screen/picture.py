"""The whole screen of a training peer at one moment, for a terminal of any size. Pure.

    frame(scene, width, height, look)     # exactly `height` lines, none wider than `width` cells

At the top are the run with its state, how far it is, and what the state means; below are the
panels; at the bottom are the keys. A wide terminal has two columns of panels. On a small one the
least important panels are left out; the tab key shows each of them in the whole room. The state and
its advice always stay.

Colours have to be readable on black and on white, which words on a coloured ground are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from rich.cells import chop_cells
from rich.text import Text

from node.app.cli.output import folded
from node.app.screen.canvas import Look, Painted, paint
from node.app.screen.cells import LONGEST_PRINTED, clean, clip, count, fit, time_span, wrap
from node.app.screen.layout import Lines, Panel, beside, stacked
from node.app.screen.panels import (
    FREE,
    MINE,
    READABLE,
    TEXT,
    Scene,
    panels_of,
)
from node.core.display_name import label, with_names
from node.core.training_view import ENDED, TrainerPhase, TrainerView
from node.training.words import since_words

_WELL: Final = "black on green"
_BUSY: Final = "bright_white on blue"
_RESTS: Final = "black on yellow"
_WRONG: Final = "bright_white on red"
_STYLES: Final = {
    TrainerPhase.TRAINING: _WELL,
    TrainerPhase.KEEPING: _WELL,
    TrainerPhase.SERVING: _WELL,
    TrainerPhase.RELAYING: _WELL,
    TrainerPhase.AVERAGING: "black on cyan",
    TrainerPhase.COMPLETE: _WELL,
    TrainerPhase.LEFT: _WELL,
    TrainerPhase.PREPARING: _BUSY,
    TrainerPhase.CATCHING_UP: _BUSY,
    TrainerPhase.FOLLOWING: _BUSY,
    TrainerPhase.PAUSED: _RESTS,
    TrainerPhase.LEAVING: _RESTS,
    TrainerPhase.NETWORK_LOST: _WRONG,
    TrainerPhase.REFUSED: _WRONG,
    TrainerPhase.FAILED: _WRONG,
}

_IN_SHORT: Final = {
    TrainerPhase.PAUSED: "back by itself",
    TrainerPhase.NETWORK_LOST: "back by itself",
    TrainerPhase.LEAVING: "Ctrl-C: at once",
}
"""The advice, if there is no room for it in full."""

RESUME: Final = "potluck resume"

MARGIN_FROM: Final = 40
"""Columns: from here on one stays free at each side."""

TWO_COLUMNS_FROM: Final = 100
GAP: Final = 1  # columns between the two
FRAMED_FROM: Final = 24  # lines
TEXT_FROM: Final = 30  # lines: below, what the model writes has room only by itself (tab)
LEFT_SHARE: Final = 0.55  # of the columns: the curve and the batch
BELOW: Final = ("events",)  # over both columns
RIGHT: Final = ("backbone", "experts", "peers", "this machine")

STATE_SHARE: Final = 3  # one line of three may say what the state means
LINES_OF_DOING: Final = 12
LINES_OF_ADVICE: Final = 12

KEYS: Final = (
    ("p", "pause", "compute nothing, and stay in the run", "potluck pause"),
    ("r", "resume", "compute again", "potluck resume"),
    ("q", "leave", "leave after the current round; twice: at once", "potluck leave"),
    ("tab", "panels", "one panel after another in the whole room", "potluck status, peers, logs"),
    ("?", "help", "show this, or what was here before", "potluck join --help"),
)
"""Each key with its short name, what it does, and the command that does the same."""

KEYS_OF_RELAYS: Final = (
    ("q", "leave", "leave at once", "Ctrl-C"),
    ("tab", "panels", "one panel after another in the whole room", "potluck status"),
    ("?", "help", "show this, or what was here before", "potluck backbone --help"),
)
"""A node that only relays computes nothing that could be paused, and has no round to finish."""

_WITHOUT_KEYS: Final = ("Ctrl-C leaves", "in another terminal: potluck status, peers, pause, leave")
_WITHOUT_KEYS_OF_RELAYS: Final = ("Ctrl-C leaves", "in another terminal: potluck status, doctor")


def keys_of(view: TrainerView) -> tuple[tuple[str, str, str, str], ...]:
    return KEYS_OF_RELAYS if view.relays_only else KEYS


def frame(scene: Scene, width: int, height: int, look: Look) -> list[Painted]:
    return [paint(line, look) for line in drawn(scene, width, height)]


def drawn(scene: Scene, width: int, height: int) -> Lines:
    """Before it is painted."""
    room = room_of(width)
    head = _head(scene.view, room, height)[:height]
    foot = [_foot(scene, room)] if height > len(head) else []
    body = _body(scene, room, height - len(head) - len(foot))
    return [placed(one, width) for one in (*head, *body, *foot)]


def room_of(width: int) -> int:
    """Columns that are written in."""
    return max(1, width - 2 * _margin(width))


def placed(line: Text, width: int) -> Text:
    """The line with the terminal's margin."""
    line = line.copy()
    line.rstrip()
    whole = Text(" " * _margin(width) if line.plain else "", no_wrap=True, end="")
    whole.append_text(line).truncate(max(width, 0))
    return whole


def _margin(width: int) -> int:
    return 1 if width >= MARGIN_FROM else 0


# -- the head


def _head(view: TrainerView, room: int, height: int) -> Lines:
    since = (since_words(view),) if view.phase_seconds >= 1 else ()
    most = height - 1 if view.phase in ENDED else max(1, height // STATE_SHARE)
    lines = [title(view, room, since), *_state(view, room, most)]
    progress = _progress(view, room)
    if progress is not None and height > 1 + len(lines):
        lines.append(progress)
    return lines


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


def _progress(view: TrainerView, room: int) -> Text | None:
    """The step of all steps, and the time to the end."""
    if not view.epoch:
        return None
    step = f"step {count(view.epoch)}"
    if not view.steps:
        return Text(clip(step, room))
    share = min(view.epoch / view.steps, 1.0)
    over = "" if view.seconds_left is None else f"over in {time_span(view.seconds_left)}"
    before = f"{step} of {count(view.steps)} "
    behind = f" {fit((f'{int(100 * share)} %', over), room)}"
    columns = room - len(before) - len(behind)
    if columns < 8:
        return Text(fit((before.strip(), over), room))
    done = int(columns * share)
    return (
        Text(before)
        .append(MINE * done, "cyan")
        .append(FREE * (columns - done), "dim")
        .append(behind)
    )


def _state(view: TrainerView, room: int, most: int) -> Lines:
    """What the state means, and what to do; the advice stays longest."""
    says, to_do = state_lines(view, room, LINES_OF_DOING, LINES_OF_ADVICE)
    full = [*says, *to_do]
    if len(full) <= most:
        return full
    if view.phase in ENDED:
        return full[:most]
    says_in_short = Text(clip(clean(with_names(view.doing, view.peers)), room))
    if not to_do:
        return [says_in_short]
    if len(to_do) < most:
        return [says_in_short, *to_do]
    advice = RESUME if RESUME in view.advice else _IN_SHORT.get(view.phase, to_do[0].plain)
    hint = Text(clip(advice, room)) if len(to_do) > 1 else to_do[0]
    return [says_in_short, hint] if most > 1 else [hint]


def state_lines(
    view: TrainerView, room: int, most_doing: int, most_advice: int
) -> tuple[Lines, Lines]:
    """The meaning of the state, and the advice for it."""
    label = "next: " if room >= MARGIN_FROM - 2 else ""
    room = min(room, READABLE)
    says = wrap(clean(with_names(view.doing, view.peers)), room, most_doing)
    to_do = wrap(clean(view.advice), room - len(label), most_advice)
    return [Text(one) for one in says], [
        Text().append(label if number == 0 else " " * len(label), "bold").append(one)
        for number, one in enumerate(to_do)
    ]


# -- the panels


def _body(scene: Scene, width: int, height: int) -> Lines:
    """Exactly `height` lines."""
    scene = _worth_saying(scene)
    panels, framed = panels_of(scene), height >= FRAMED_FROM
    if scene.helps:
        return stacked([_help(scene.view)], width, height, framed=framed)
    for one in (*panels, *_said(scene.said)):
        if one.name == scene.chosen:
            return stacked([one], width, height, framed=framed)
    if height < TEXT_FROM:
        panels = [one for one in panels if one.name != TEXT]
    if width < TWO_COLUMNS_FROM:
        return stacked(panels, width, height, framed=framed)
    right = [one for one in panels if one.name in RIGHT]
    below = [one for one in panels if one.name in BELOW]
    left = [one for one in panels if one not in right and one not in below]
    low = min(height // 4, 2 + len(scene.events)) if below else 0
    if not left or not right:
        high = stacked([*left, *right], width, height - low, framed=framed)
    else:
        left_width = int(width * LEFT_SHARE)
        high = beside(
            stacked(left, left_width, height - low, framed=framed),
            stacked(right, width - left_width - GAP, height - low, framed=framed),
            left_width,
            GAP,
        )
    return high + stacked(below, width, low, framed=framed)


def choices(scene: Scene) -> list[str]:
    """The names of the panels that the tab key goes through."""
    return [one.name for one in (*panels_of(_worth_saying(scene)), *_said(scene.said))]


def _said(said: Sequence[str]) -> list[Panel]:
    """The lines that were printed in this session, such as the invite: the newest of them."""
    if not said:
        return []

    def lines(width: int, height: int) -> Lines:
        rows = [row for text in said for row in text.split("\n")]
        found = [Text(one) for row in rows for one in _in_full(row, width)]
        return found[-height:]

    return [Panel("printed", "also in the scrollback", lines, 1, 1, 1, grows=True)]


def _in_full(text: str, width: int) -> list[str]:
    """All of it in lines of this width, broken between words, or anywhere in an invite."""
    indent = text[: len(text) - len(text.lstrip(" "))]
    folds = folded(indent + clean(text, LONGEST_PRINTED), width).split("\n")
    return [part for one in folds for part in chop_cells(one, max(width, 2)) or [""]]


def _help(view: TrainerView) -> Panel:
    def lines(width: int, _height: int) -> Lines:
        found = []
        for key, _, does, command in keys_of(view):
            row = Text().append(f" {key:<5}", "bold").append(does)
            room = width - row.cell_len - 2
            if len(command) <= room:
                row.append(f"  {command:>{room}}", "dim")
            found.append(row)
        also = "Ctrl-C leaves as q does; Ctrl-Z stops, and `fg` goes on; escape closes this."
        return [*found, Text(), *(Text(one) for one in wrap(also, width, 3))]

    return Panel("help", "keys, and the commands that do the same", lines, 1, 9, 1, grows=True)


def _worth_saying(scene: Scene) -> Scene:
    """Without events that the state's words already say."""
    view = scene.view
    said = view.doing, with_names(view.doing, view.peers)
    phase = f"{view.phase.value}: "
    events = [one for one in scene.events if one.words not in said]
    return replace(scene, events=tuple(e for e in events if not e.words.startswith(phase)))


# -- the foot


def _foot(scene: Scene, room: int) -> Text:
    """The last key's effect, or the keys."""
    if scene.note:
        return Text(clip(clean(scene.note), room), "bold")
    if scene.view.phase in (TrainerPhase.LEAVING, *ENDED) or not scene.keys:
        is_over = scene.view.phase in (TrainerPhase.LEAVING, *ENDED)
        words = _WITHOUT_KEYS_OF_RELAYS if scene.view.relays_only else _WITHOUT_KEYS
        return Text("" if is_over else fit(words, room), "dim")
    line = Text()
    for key, name, _, _ in keys_of(scene.view):
        if line.cell_len + len(key) + len(name) + 4 > room:
            break
        line.append(f" {key} ", "reverse").append(f" {name}  ")
    return line
