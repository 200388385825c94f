"""Requests to the node that trains in this home, for pause, resume, leave, peers and logs.

A node may run here and not train (`potluck listen`), or not yet. It does not know these requests;
then the owner is told that it does not train, and not that a command is unknown.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from node.app.cli.configured import configuration_for
from node.core.control_client import ANSWER_SECONDS, ControlFailure, NoRunningNode, ask, ask_once
from protocols.errors import PotluckError, Unreachable


class NothingTrains(Unreachable):
    """No node runs in this home, or one that does not train."""


@contextmanager
def asking(
    arguments: argparse.Namespace,
    question: str,
    details: Mapping[str, Any] | None = None,
    *,
    silence_seconds: float | None = ANSWER_SECONDS,
) -> Iterator[Iterator[Any]]:
    """The answers of the node that trains here; with None, waits for them without a timeout."""
    socket = configuration_for(arguments).places.control_socket
    try:
        with ask(socket, question, details, silence_seconds=silence_seconds) as answers:
            yield answers
    except NoRunningNode as error:
        raise NothingTrains(
            "No node is running here.",
            why=error.why,
            advice="`potluck join INVITE` trains in a run. If it has a home of its own, name it: "
            "--home DIRECTORY.",
        ) from None
    except ControlFailure as error:
        if "does not know the command" not in error.what:
            raise
        raise _not_yet(socket) or NothingTrains(
            "The node that runs here does not train.",
            why="It was not started by `potluck join` or `potluck run start`, or by an older "
            "version of them.",
            advice="`potluck status` shows its state.",
        ) from None


def _not_yet(socket: Path) -> NothingTrains | None:
    """The error for a node that is about to train; None if it is not."""
    from node.training.questions import VIEW

    try:
        view = ask_once(socket, VIEW)
    except PotluckError:
        return None
    return NothingTrains(
        f"The node that runs here has not entered {view['run']} yet.",
        why=f"It is {view['phase']}: {view['doing']}.",
        advice="Ask again when it trains; `potluck status` shows how far it is.",
    )


def ask_trainer(
    arguments: argparse.Namespace, question: str, details: Mapping[str, Any] | None = None
) -> Any:
    """The answer to a request that has exactly one."""
    with asking(arguments, question, details) as answers:
        return next(answers)
