"""The picture of a training peer, for a terminal of any size, and the summary after its end. Pure.

    render(scene, width, height)              # lines of rich's Text, which fit
    summary(scene, clock, width, height)      # the same, after the end

A scene is the trainer's view and the last events. The order is: run and state, step and loss, the
swarm's batch, my part, traffic, peers, the last events. On a small terminal the least important
parts are left out first: device, traffic, the list of peers. The state and its advice always stay.

The summary is a last picture: the state, what can be done now, where the run stood, and the last
warnings. It is empty for a session without any contribution or failure.

Text of a run, a person or an error only enters a line through `cells.clean`, and never as rich's
markup, where a peer could write words that look like our own. Colours have to be readable on black
and on white, which words on a coloured ground are. A second Ctrl-C ends everything in the middle of
leaving; then only the summary shows what the session gave.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec
from rich.text import Text

from node.app.screen.cells import clean, clip, fit, pad, time_span, wrap
from node.app.screen.company import peers_block
from node.app.screen.layout import ScreenBlock, arrange
from node.app.screen.numbers import (
    batch_block,
    carried_block,
    device_block,
    experts_block,
    given_block,
    kept_block,
    loss_block,
    traffic_block,
)
from node.core.display_name import label, with_names
from node.core.training_view import ENDED, TrainerPhase, TrainerView, named
from node.training.words import since_words

EVENTS_KEPT: Final = 24
"""The newest matters most; earlier ones show how it came about, if there is room."""


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
    """One moment. `events`: the newest last."""

    view: TrainerView
    events: tuple[SceneEvent, ...] = ()


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
    TrainerPhase.TRAINING: _WELL,
    TrainerPhase.KEEPING: _WELL,
    TrainerPhase.SERVING: _WELL,
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
"""While the node gets ready, the three lines about its use are above and should stay visible."""


def render(scene: Scene, width: int, height: int) -> list[Text]:
    """At most `height` lines, none wider than `width` cells."""
    room, view = room_of(width), scene.view
    since = (since_words(view),) if view.phase_seconds >= 1 else ()
    blocks = [
        ScreenBlock(1, [[title(view, room, since)]]),
        _state(view, room, height),
        loss_block(view, room, most_rows=curve_rows(height)),
        batch_block(view, room),
        experts_block(view, room),
        kept_block(view, room) if view.keeps_only else given_block(view, room),
        traffic_block(view, room),
        device_block(view, room),
        peers_block(view, room),
        _events(_worth_saying(scene), room),
        _stopping(view, room),
    ]
    return [placed(line, width) for line in arrange(blocks, max(height, 0))]


def curve_rows(height: int) -> int:
    """The most rows of the chart on a terminal of this height."""
    return max(LEAST_CURVE_ROWS, (height - LINES_BESIDE_CURVE) // 2)


def room_of(width: int) -> int:
    """Columns that are written in."""
    return max(1, min(width - 2 * _margin(width), WIDEST))


def placed(line: Text, width: int) -> Text:
    """The line with the terminal's margin."""
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
    """The meaning of the state, and the advice for it."""
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


def _state(view: TrainerView, room: int, height: int) -> ScreenBlock:
    says, to_do = state_lines(view, room, LINES_OF_DOING, LINES_OF_ADVICE)
    full = [*says, *to_do]
    if view.phase in ENDED:
        return ScreenBlock(2, [full[:many] for many in range(1, len(full) + 1)], grows_first=True)
    says_in_short = Text(clip(clean(with_names(view.doing, named(view.peers))), room))
    if view.phase not in _IN_SHORT or not to_do:
        variants = [[says_in_short], full] if len(full) > 1 else [says]
        return ScreenBlock(2 if to_do else 7, [one for one in variants if one])
    in_short = RESUME if RESUME in view.advice else _IN_SHORT[view.phase]
    hint = Text(clip(in_short, room)) if len(to_do) > 1 else to_do[0]
    variants = [[hint], [says_in_short, hint], [says_in_short, *to_do], full]
    return ScreenBlock(
        2, variants[1:] if height >= WITH_REASON_FROM else variants, grows_first=True
    )


def events_with_names(scene: Scene) -> list[SceneEvent]:
    return [
        replace(one, words=with_names(one.words, named(scene.view.peers))) for one in scene.events
    ]


def _worth_saying(scene: Scene) -> list[SceneEvent]:
    view = scene.view
    said = [one for one in events_with_names(scene) if not _is_said_above(one, view)]
    is_ready = view.phase not in (TrainerPhase.PREPARING, TrainerPhase.CATCHING_UP)
    return said if is_ready else said[-EVENTS_AT_FIRST:]


def _is_said_above(event: SceneEvent, view: TrainerView) -> bool:
    """Whether the state's words already say the same."""
    return event.words == view.doing or event.words.startswith(f"{view.phase.value}: ")


def _events(events: Sequence[SceneEvent], room: int) -> ScreenBlock:
    """The newest in full, if it has room, and earlier ones in one line each."""
    if not events:
        return ScreenBlock(8, [])
    variants = [event_lines(events[-1], room, most) for most in range(1, LINES_OF_NEWEST + 1)]
    newest = variants[-1]
    older = [line for event in events[:-1] for line in event_lines(event, room, 1)]
    variants += [[*older[-many:], *newest] for many in range(1, len(older) + 1)]
    return ScreenBlock(8, [one for one in variants if one], apart=True)


def _stopping(view: TrainerView, room: int) -> ScreenBlock:
    if view.phase in (TrainerPhase.LEAVING, *ENDED) or "Ctrl-C" in view.advice:
        return ScreenBlock(6, [])
    return ScreenBlock(6, [[Text(fit(_STOPPING, room), "dim")]], apart=True)


WARNINGS_KEPT: Final = 3
LINES_OF_ONE: Final = 3
LINES_TO_BE_READ: Final = 12
"""For the last event and the advice: enough for all of it in usual cases."""

CURVE_FROM: Final = 16
"""Rows of a terminal that has room for a curve of several."""


def summary(scene: Scene, clock: str, width: int, height: int) -> list[Text]:
    """None wider than `width` cells, and at most `height` lines, except for the reason of the end,
    which is shown in full. `clock`: when it ended."""
    view = _as_ended(scene.view)
    warnings = [one for one in events_with_names(scene) if one.warns][-WARNINGS_KEPT:]
    given = view.contribution
    gave = bool(given.steps or given.alone_steps or given.lost_samples)
    failed = view.phase in (TrainerPhase.REFUSED, TrainerPhase.FAILED)
    if not (gave or failed or warnings or (view.phase is TrainerPhase.LEFT and view.epoch)):
        return []
    room = room_of(width)
    says, to_do = state_lines(view, room, LINES_TO_BE_READ, LINES_TO_BE_READ)
    state = [*says, *to_do]
    since = (f"at {clock}, after {time_span(view.session_seconds)}", f"at {clock}")
    blocks = [
        ScreenBlock(1, [[title(view, room, since)]]),
        ScreenBlock(2, [state] if state else []),
    ]
    if gave or view.epoch:
        loss = loss_block(view, room, most_rows=LEAST_CURVE_ROWS)
        blocks.append(
            loss if height >= CURVE_FROM else ScreenBlock(loss.priority, loss.variants[:1])
        )
        if view.phase is not TrainerPhase.LEFT or not view.doing:  # else it has been said
            blocks.append(given_block(view, room))
        blocks.append(carried_block(view, room))
    blocks.append(ScreenBlock(6, _variants(warnings, room), apart=True))
    return [placed(line, width) for line in arrange(blocks, max(height, 1 + len(state)))]


def _as_ended(view: TrainerView) -> TrainerView:
    view = msgspec.structs.replace(
        view, contribution=msgspec.structs.replace(view.contribution, samples_per_second=None)
    )
    if view.phase in ENDED:
        return view
    return msgspec.structs.replace(view, phase=TrainerPhase.LEFT, doing="", advice="")


def _variants(warnings: Sequence[SceneEvent], room: int) -> list[list[Text]]:
    """The newest ones, more of them where there is room."""
    lines = [event_lines(one, room, LINES_OF_ONE) for one in warnings]
    return [
        [line for one in lines[first:] for line in one] for first in reversed(range(len(lines)))
    ]
