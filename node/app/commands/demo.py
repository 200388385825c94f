"""`potluck demo`: a whole run on this machine, to see everything without setting anything up.

The demo is many processes and a folder. After Ctrl-C all of them are gone when the prompt is back:
first the processes, then their files.
"""

from __future__ import annotations

import argparse
import contextlib
from typing import TYPE_CHECKING

from node.app.cli.exit_codes import DONE, FAILED
from node.app.cli.output import Output

if TYPE_CHECKING:
    from node.app.cli.parser import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "demo",
        help="see a whole run on this machine, in about a minute",
        description="Show a whole run on this machine, with the commands that people type: an auth "
        "server with a fresh key, a backbone peer, and three volunteers in processes of their own, "
        "over real libp2p. They train a small GPT on the source code of Python's standard library; "
        "one of them is killed in the middle, and a fourth joins late and catches up. At the end "
        "it shows the loss, everybody's contribution, that all hold the same parameters, and a "
        "text by the model. It asks nothing, downloads nothing, and does not touch this machine's "
        "own potluck: everything happens in a temporary folder, which is removed at the end.\n\n"
        "It needs two processor cores, 3 GB of memory, and about a minute. Exit code 1 if a part "
        "of it failed. Ctrl-C ends all of it.\n\n"
        "With --experts it shows a run with a mixture of experts instead: four servers of experts "
        "and three trainers. Two servers and a trainer are killed, others take their experts over, "
        "and the training continues. It needs 5 GB and about two minutes.",
        example="potluck demo\npotluck demo --keep\npotluck demo --experts\n"
        "potluck demo --json | tail -n 1",
    )
    parser.add_argument(
        "--experts", action="store_true", help="show a run with a mixture of experts"
    )
    parser.add_argument(
        "--keep",
        action="store_true",
        help="keep the folder with the homes, logs, definition and checkpoints, and print its path",
    )


def run(arguments: argparse.Namespace) -> int:
    from node.app.cli.interruption import run_until_signal

    output = Output.of(arguments)
    keep, with_experts = arguments.keep, arguments.experts
    code = run_until_signal(lambda: _play(output, keep=keep, with_experts=with_experts))
    if code not in (DONE, FAILED):
        with contextlib.suppress(OSError):  # whoever reads it may have ended by the same signal
            output.say("stopped: all processes of the demo have ended")
    return code


async def _play(output: Output, *, keep: bool, with_experts: bool) -> int:
    from node.app.cli.interruption import at_hard_exit
    from node.app.demo import (
        Demo,
        ExpertsDemo,
        demo_folder,
        experts_page_of,
        page_of,
        remove,
    )

    with demo_folder(keep=keep) as folder:
        demo = (ExpertsDemo if with_experts else Demo)(folder, output.data)

        def clear() -> None:
            demo.kill_all()
            if not keep:
                remove(folder)

        with at_hard_exit(clear):
            try:
                summary = await demo.play()
            finally:
                if keep and not output.json:
                    output.say(f"everything is in {folder}")
    summary["folder"] = str(folder) if keep else None
    page = experts_page_of if with_experts else page_of
    output.data(summary, page(summary, keep=keep))
    return FAILED if summary["failures"] else DONE
