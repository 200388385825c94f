"""What stays on the terminal after the end of a session: how it ended, what can be done now, where
the run stood, what this peer gave, and the last warnings. Pure.

It is empty for a session without any contribution or failure. A node that only relays has given its
traffic. A second Ctrl-C ends everything in the middle of leaving; then only the summary shows what
the session gave.
"""

from __future__ import annotations

from typing import Final

import msgspec
from rich.text import Text

from node.app.screen.cells import count, fit, pad, time_span
from node.app.screen.layout import Lines
from node.app.screen.panels import (
    Scene,
    carried_words,
    chart,
    event_lines,
    events_with_names,
    given_words,
)
from node.app.screen.picture import placed, room_of, state_lines, title
from node.core.caps.units import in_words
from node.core.training_view import ENDED, TrainerPhase, TrainerView

WARNINGS_KEPT: Final = 3
LINES_OF_ONE: Final = 3
LINES_TO_BE_READ: Final = 12
"""For the last event and the advice: enough for all of it in usual cases."""

CHART_LINES: Final = 5
WIDEST_CHART: Final = 110  # columns
NAMED_FROM: Final = 56  # columns: from here on each line has its name before it
NAME_CELLS: Final = 9


def summary(scene: Scene, clock: str, width: int, height: int) -> list[Text]:
    """None wider than `width` cells, and at most `height` lines, except for the reason of the end,
    which is shown in full. `clock`: when it ended."""
    view = _as_ended(scene.view)
    warnings = events_with_names(scene, [one for one in scene.events if one.warns][-WARNINGS_KEPT:])
    given = view.contribution
    gave = bool(given.steps or given.alone_steps or given.lost_samples)
    failed = view.phase in (TrainerPhase.REFUSED, TrainerPhase.FAILED)
    was_there = view.phase is TrainerPhase.LEFT and (view.epoch or view.relays_only)
    if not (gave or failed or warnings or was_there):
        return []
    room = room_of(width)
    says, to_do = state_lines(view, room, LINES_TO_BE_READ, LINES_TO_BE_READ)
    since = (f"at {clock}, after {time_span(view.session_seconds)}", f"at {clock}")
    lines: Lines = [title(view, room, since), *says, *to_do]
    stays = len(lines)
    warned = [line for one in warnings for line in event_lines(one, room, LINES_OF_ONE)]
    if view.relays_only:
        lines += _relayed(scene, room)
    elif gave or view.epoch:
        step, *others = _figures(view, room)
        free = height - len(lines) - 1 - len(others) - len(warned)
        has_chart = len(view.losses) > 1 and free >= CHART_LINES
        curve = chart(view, min(room, WIDEST_CHART), CHART_LINES) if has_chart else []
        lines += [step, *curve, *others]
    most = max(height, stays)
    kept = lines[: max(most - len(warned), stays)]
    kept += warned[max(len(kept) + len(warned) - most, 0) :]
    return [placed(line, width) for line in kept]


def _figures(view: TrainerView, room: int) -> Lines:
    """The step with its loss, what this peer gave, and its traffic."""
    of_all = f" of {count(view.steps)}" if view.steps else ""
    loss = "" if view.loss is None else f"loss {count(view.loss, 4)}"
    found = [Text(fit((f"step {count(view.epoch)}{of_all}", loss), room, "  "))]
    if view.phase is not TrainerPhase.LEFT or not view.doing:  # else it has been said
        words = given_words(view)
        if words:
            found.append(_named("given", words, room, " · "))
    return [*found, *_traffic(view, room)]


def _relayed(scene: Scene, room: int) -> Lines:
    """What a node did that only relays."""
    relay = None if scene.node is None else scene.node.relay
    found = []
    if relay is not None:
        made = "1 circuit" if relay.circuits_made == 1 else f"{count(relay.circuits_made)} circuits"
        words = (made, in_words(relay.carried_bytes))
        found.append(_named("relayed", words, room, " · "))
    return [*found, *_traffic(scene.view, room)]


def _traffic(view: TrainerView, room: int) -> Lines:
    if not (view.traffic.sent_bytes or view.traffic.received_bytes):
        return []
    up, down = carried_words(view.traffic)
    return [_named("traffic", (up, f"{down} in all"), room, "   ")]


def _named(name: str, words: tuple[str, ...], room: int, between: str) -> Text:
    if room < NAMED_FROM:
        return Text(fit(words, room, between))
    return (
        Text().append(pad(name, NAME_CELLS), "dim").append(fit(words, room - NAME_CELLS, between))
    )


def _as_ended(view: TrainerView) -> TrainerView:
    view = msgspec.structs.replace(
        view, contribution=msgspec.structs.replace(view.contribution, samples_per_second=None)
    )
    if view.phase in ENDED:
        return view
    return msgspec.structs.replace(view, phase=TrainerPhase.LEFT, doing="", advice="")
