"""`potluck experts`: serve experts of a run's mixture, and show who serves which.

Serving is `potluck join` without the training (join.py, node/training/serving.py). The list comes
from the run's directory (experts_list.py).
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from node.app.cli.parser import Subparsers
    from node.training.join import ServingWish

TIMEOUT_SECONDS = 30.0  # to join, and to read the directory


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "experts",
        help="serve experts of a run's mixture, or show who serves which",
        description="In a run with a mixture of experts, most of the model is in experts, which "
        "volunteers serve; whoever trains calls the best of them for each sample. `potluck join` "
        "serves and trains. These commands serve without training, and show the experts of a run. "
        "docs/experts.md explains both sides.",
        example="potluck experts serve potluck-run:…\npotluck experts list",
    )
    actions = parser.add_actions("action")
    _add_serve(actions)
    _add_list(actions)


def _add_serve(actions: Subparsers) -> None:
    from node.app.commands.join import add_invite_flags

    serve = actions.add_parser(
        "serve",
        help="serve experts, without training, until you stop it",
        description="Serve experts of a run: compute their part of everybody's batches, and train "
        "them with the gradients that come back. This peer takes experts that nobody serves: "
        "first those whose server is gone, from their newest copies, then new ones. It keeps "
        "copies of its experts on its disk and at other servers, so it may be stopped at any "
        "time: others take over, and the next start continues.\n\n"
        "Everything else is as for `potluck join`: the invite, the limits on this machine's use, "
        "the screen, pause, resume, leave, status and logs. While it is paused, others serve its "
        "experts. It is safe to repeat: without an INVITE it continues in the last run.\n\n"
        "Exit code 3: not allowed, or too large for this machine; 130: Ctrl-C.",
        example="potluck experts serve potluck-run:…\n"
        "potluck experts serve --experts 8 --max-memory 4GB\n"
        "potluck experts serve --grid ffn0:0-3.* --grid ffn1:0-3.*",
    )
    of_training = ("limits.compile", "limits.offload", "tracking.track")
    add_invite_flags(serve, without=of_training)
    which = serve.add_mutually_exclusive_group()
    add_most_experts(which)
    which.add_argument(
        "--grid",
        metavar="NAME:CELLS",
        action="append",
        default=[],
        help="serve exactly these cells of a grid: an index, a range or * for each dimension, as "
        "in ffn0:0-3.*; may be given several times",
    )
    which.add_argument(
        "--uids",
        metavar="UID,…",
        action="append",
        default=[],
        help="serve exactly these experts, as in ffn0.3.1,ffn0.3.2; may be given several times",
    )


def add_most_experts(parser: Any) -> None:
    parser.add_argument(
        "--experts",
        type=count_or_zero,
        metavar="N",
        help="serve at most this many experts, and keep as many copies for others (by default as "
        "many as fit into the memory, and at most a quarter of the run's cells)",
    )


def count_or_zero(text: str) -> int:
    """An argparse type: a whole number, which may be zero."""
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def _add_list(actions: Subparsers) -> None:
    from node.app.cli.configured import add_setting_flag
    from node.app.cli.parser import add_timeout
    from node.app.commands.join import add_invite

    listing = actions.add_parser(
        "list",
        help="show who serves which experts of a run",
        description="Show the grids of a run's experts: how many cells have a live expert, a "
        "picture of each grid, and the servers with their number of experts, their load (the "
        "seconds of work that wait there) and since when they have served the same experts. The "
        "node that takes part in the run in this home is asked; if there is none, the command "
        "joins the run for a moment. Servers report their load and age themselves.\n\n"
        "Exit code 1 if the run has no experts, 4 if nobody of the run answers.",
        example="potluck experts list\npotluck experts list potluck-run:… --json",
    )
    add_invite(listing)
    add_setting_flag(listing, "dht.bootstrap")
    add_timeout(listing, TIMEOUT_SECONDS)


def run(arguments: argparse.Namespace) -> int:
    if arguments.action == "list":
        from node.app.commands.experts_list import show_list

        return show_list(arguments)
    from node.app.commands.join import join
    from node.core.wrong_use import WrongUse

    wish = serving_wish(arguments)
    if wish.most == 0:
        raise WrongUse(
            "A server has to serve at least one expert.",
            why="--experts is 0.",
            advice="`potluck join --experts 0` trains without serving.",
        )
    return join(arguments, "potluck experts serve", serving=wish, trains=False)


def serving_wish(arguments: argparse.Namespace) -> ServingWish:
    """The experts that the owner wants to serve. WrongUse for words that cannot be any."""
    from node.core.wrong_use import WrongUse
    from node.training.join import ServingWish
    from protocols.experts import WrongUid, parse_block, parse_uid

    try:
        blocks = [parse_block(text) for text in getattr(arguments, "grid", ())]
        words = [word for text in getattr(arguments, "uids", ()) for word in text.split(",")]
        uids = [parse_uid(word.strip()) for word in words]
    except WrongUid as error:
        raise WrongUse(error.what, why=error.why, advice=error.advice) from None
    return ServingWish(arguments.experts, tuple(blocks), tuple(dict.fromkeys(uids)))
