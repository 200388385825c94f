"""`scripts/bench KIND`: measure this machine.

`KINDS` names the module of each kind. Its `add_parser(kinds)` also names what runs it.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final

from lab import NOTHING_MEASURED, Talk
from node.app.cli.exit_codes import INTERRUPTED, TERMINATED
from node.app.cli.interruption import at_hard_exit, run_until_signal
from node.app.cli.output import Output
from node.app.cli.parser import CommandParser

KINDS: Final = {
    "transport": "transport",
    "dht": "dht",
    "auth-server": "auth_server",
    "revocation": "revocation",
    "averaging": "averaging",
    "survival": "survival",
    "shaped": "shaped",
    "interference": "interference",
    "state": "state",
    "newcomer": "newcomer",
    "caps": "caps",
    "join": "join",
    "nat": "nat",
    "nat-round": "nat",
    "nat-experts": "nat_experts",
    "nat-join": "nat_join",
    "nat-relays": "nat_relays",
    "relay": "relay",
    "page": "page",
    "lighthouse": "lighthouse",
    "outage": "outage",
    "experts": "experts",
    "training": "training",
    "training-churn": "training",
    "size": "size",
    "homes": "homes",
    "experts-search": "experts_search",
    "experts-digits": "experts_convergence",
    "experts-text": "experts_convergence",
    "codecs": "codec_convergence",
}


def parser(kinds: Iterable[str] = KINDS) -> CommandParser:
    """Of these kinds. Only their modules are loaded, for some load torch."""
    program = CommandParser(
        prog="scripts/bench",
        description="Measure what potluck can do on this machine.",
        example="scripts/bench transport --quick",
    )
    subparsers = program.add_subparsers(
        dest="kind", metavar="KIND", required=True, parser_class=CommandParser
    )
    for module in dict.fromkeys(KINDS[kind] for kind in kinds):
        importlib.import_module(f"lab.bench.{module}").add_parser(subparsers)
    return program


def run(arguments: argparse.Namespace) -> int:
    with at_hard_exit(_say_it_at_once):  # some processes of a bench take long to end
        code: int = arguments.measure(arguments)
    if code in (INTERRUPTED, TERMINATED):
        Output.of(arguments).say(NOTHING_MEASURED)
    return code


def report(
    arguments: argparse.Namespace,
    measure: Callable[[Talk], Awaitable[dict[str, Any]]],
    lines: Callable[[dict[str, Any]], str],
    is_met: Callable[[dict[str, Any]], bool] = lambda result: result.get("met", True),
) -> int:
    """Measure and print the result; the exit code is 1 if its bar is not met."""
    output = Output.of(arguments)

    async def whole() -> int:
        result = await measure(output.say)
        output.data(result, lines(result))
        return 0 if is_met(result) else 1

    return run_until_signal(whole)


def _say_it_at_once() -> None:
    """From a signal handler, which must not wait for a reader of a full pipe."""
    os.set_blocking(sys.stderr.fileno(), False)
    os.write(sys.stderr.fileno(), f"{NOTHING_MEASURED}\n".encode())
