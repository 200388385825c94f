"""Train in the foreground until told to leave, for `potluck join` and `potluck run start`.

    return train_in_foreground(configuration, part, output)

The first Ctrl-C (or SIGTERM, or `potluck leave`) leaves after the current round, the second at
once; either way everything is released within five seconds. Before training has begun there is no
round, and the first one is enough.

Events are shown on a screen, or as lines or objects (screen/display.py), so that a reader who
pauses does not stop the training. The error that ends a session (thrown out, a full disk) is shown
last.

The five seconds hold for `potluck leave`, too, where no signal sets the alarm. Nurseries raise
groups of errors, which `except PotluckError` does not catch.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Awaitable, Callable
from functools import partial

import trio

from node.app.cli.exit_codes import DONE, FAILED
from node.app.cli.interruption import (
    KEEPING_SECONDS,
    LEAVING_SECONDS,
    at_hard_exit,
    bound_the_end,
    run_until_signal,
)
from node.app.cli.line_queue import LineQueue
from node.app.cli.log_output import log_to_stderr
from node.app.cli.output import Output
from node.app.screen import display_for, happening_of, show_to_the_end
from node.core.configuration import Configuration
from node.core.descriptor_limit import raise_descriptor_limit
from node.core.failure import CommandFailure
from node.core.node import Node
from node.training.join import Participation, take_part
from node.training.session import TrainingSession
from protocols.errors import PotluckError

Before = Callable[[TrainingSession], Awaitable[None]]
Started = Callable[[Node, LineQueue], None]
Beside = Callable[[Node, TrainingSession, LineQueue], Awaitable[None]]


async def _nothing(_session: TrainingSession) -> None:
    """Nothing to do before the node runs."""


def _say_nothing(_node: Node, _lines: LineQueue) -> None:
    """Nothing to say when the node listens."""


async def nothing_beside(_node: Node, _session: TrainingSession, _lines: LineQueue) -> None:
    """Nothing to run beside the training."""


def train_in_foreground(
    configuration: Configuration,
    part: Participation,
    output: Output,
    *,
    before: Before = _nothing,
    started: Started = _say_nothing,
    beside: Beside = nothing_beside,
    again: str = "potluck join",
) -> int:
    """Returns the exit code: 0 also after SIGTERM and `potluck leave`, 130 after Ctrl-C.
    BrokenPipeError when the reader of the output has gone. `before` is done first, and shown like
    everything else; `started` is called when the node listens; `beside` runs as long as the node
    takes part, and ends it if it fails. `again`: the command that continues the run after this."""
    log_to_stderr(debug=output.debug)
    raise_descriptor_limit()
    sessions: list[TrainingSession] = []
    signals = 0
    keeps = part.checkpoints is not None
    patience = KEEPING_SECONDS if keeps else LEAVING_SECONDS

    async def main() -> int:
        session = TrainingSession(
            display.shown,
            begins=part.begins,
            keeps_only=part.keeps_only,
            serves_only=not part.trains,
            again=again,
        )
        session.run = part.run
        session.lets_write = display.draws
        sessions.append(session)
        session.entered()
        session.departure.watch(lambda: _bound_the_end(keeps, session.departure.error, patience))

        async def accompany(node: Node) -> None:
            display.meet(node)
            started(node, display.lines)
            await beside(node, session, display.lines)

        async def train() -> None:
            await before(session)
            await _train(configuration, part, session, accompany)

        def failed(failure: CommandFailure) -> None:
            if not signals:  # else it failed because it was told to end
                session.happened(happening_of(failure))

        return await show_to_the_end(display, train, failed, leave)

    def leave() -> bool:
        nonlocal signals
        signals += 1
        for session in sessions:
            session.departure.leave()
        return any(session.trains for session in sessions)

    with display_for(output) as display:
        return run_until_signal(main, terminated=DONE, leave=leave, patience_seconds=patience)


async def _train(
    configuration: Configuration,
    part: Participation,
    session: TrainingSession,
    accompany: Callable[[Node], Awaitable[None]],
) -> None:
    node = Node(configuration)
    keeps = part.checkpoints is not None
    with at_hard_exit(node.remove_run_files), at_hard_exit(partial(_tell_of_the_cut, keeps)):
        async with node, trio.open_nursery() as nursery:
            nursery.start_soon(accompany, node)
            await take_part(node, part, session)
            nursery.cancel_scope.cancel()


def _bound_the_end(keeps: bool, error: PotluckError | None, patience_seconds: float) -> None:
    """After a signal the alarm is set already; this is for `potluck leave` and forced leaving. It
    is a failure if a checkpoint may have been cut."""
    code = FAILED if keeps else DONE
    if threading.current_thread() is threading.main_thread():
        bound_the_end(code if error is None else error.exit_code, patience_seconds)


def _tell_of_the_cut(keeps: bool) -> None:
    """The process is ended by force. Nothing else may be written any more."""
    if keeps:
        os.write(
            sys.stderr.fileno(),
            b"potluck: leaving took too long, and was cut short. If a last checkpoint was being "
            b"written, it is missing. The ones before it are whole; the next start begins there.\n",
        )
