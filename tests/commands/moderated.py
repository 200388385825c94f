"""An auth server for the tests of the moderators' commands: made, and running where asked for."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.commands.console import Completed, RunningCommand, potluck, potluck_here, running

RUN = "ours"


def auth(home: Path, *words: str) -> Completed:
    """One moderator's command, to its end; what is typed at the same time, from several threads,
    is processes."""
    is_alone = threading.current_thread() is threading.main_thread()
    return (potluck_here if is_alone else potluck)("auth", *words, home=home)


def done(home: Path, *words: str) -> str:
    """The output of a command that succeeds."""
    completed = auth(home, *words)
    assert completed.returncode == 0, f"{words}: {completed.stdout}{completed.stderr}"
    return completed.stdout


def answer(home: Path, *words: str) -> dict[str, Any]:
    """The JSON answer of a command that succeeds."""
    value: dict[str, Any] = json.loads(done(home, *words, "--json"))
    return value


def made(home: Path, *flags: str, port: int = 0) -> Path:
    """A home with an auth server in it that is not running."""
    done(home, "init", "--run", RUN, "--public-url", f"http://127.0.0.1:{port or 8480}", *flags)
    return home


@contextlib.contextmanager
def serving(home: Path, *flags: str) -> Iterator[tuple[RunningCommand, dict[str, Any]]]:
    """The server of this home, running inside the block; and what it said when it served."""
    words = ("auth", "serve", "--insecure-http", "--json", *flags)
    if "--listen" not in flags:
        words += ("--listen", "127.0.0.1:0")
    with running(*words, home=home) as server:
        yield server, server.next_object()
