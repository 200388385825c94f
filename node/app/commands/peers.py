"""`potluck peers`: the other peers of the run, and how each is reached."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from node.app.cli.output import Output, as_json, columns_of, folded, hung, one_line
from node.core.caps.units import in_words

if TYPE_CHECKING:
    from node.app.cli.parser import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    subparsers.add_parser(
        "peers",
        help="show the other peers of the run, and how each is reached",
        description="Show the other peers of the run, as the node that trains in this home knows "
        "them: their state, how each is reached (direct, punched, relayed, or none: no link now), "
        "its samples for the next step and their rate, and the rates by which the last round was "
        "planned (its owner's limits, or measured), with its part of the averaging. Peers report "
        "all of this themselves; reports that do not count are marked. Exit code 4 if no node "
        "trains here.",
        example="potluck peers\npotluck peers --json",
    )


def run(arguments: argparse.Namespace) -> int:
    from node.app.trainer_client import ask_trainer
    from node.training.questions import VIEW

    view = ask_trainer(arguments, VIEW)
    if Output.of(arguments).json:
        print(as_json({"run": view["run"], "peers": view["peers"]}), flush=True)
        return 0
    _show(view)
    return 0


def _show(view: dict[str, Any]) -> None:
    """Lines and no table: a peer id with its end missing is of no use on a narrow terminal."""
    from node.core.display_name import cleaned
    from node.core.training_view import TrainerPhase

    columns = columns_of(sys.stdout)
    if not view["peers"]:
        early = view["phase"] == TrainerPhase.PREPARING
        words = f"not entered yet ({view['doing']})" if early else "nobody else is in it now"
        print(folded(one_line(f"{view['run']}: {words}."), columns))
    for peer in view["peers"]:
        said = f"“{cleaned(peer['said_name'])}”" if peer["said_name"] else ""
        who = ", ".join(one for one in (peer["name"], said, peer["peer"]) if one)
        print(folded(one_line(who), columns))
        print(hung("  ", one_line(", ".join(_facts(peer))), columns))


def _facts(peer: dict[str, Any]) -> Iterator[str]:
    from node.training.words import role_words

    does = role_words(peer["role"], keeps=peer["keeps"])
    if does:
        on = f" on {peer['device']}" if peer.get("device") else ""  # an older node says none
        yield f"{does} the checkpoints" if peer["keeps"] else f"{does}{on}"
    trip = "" if peer["round_trip_ms"] is None else f", {peer['round_trip_ms']:.1f} ms away"
    yield ("no link to it now" if peer["reach"] == "none" else peer["reach"]) + trip
    if peer["epoch"] is not None:
        rate = peer["samples_per_second"] or 0.0
        samples = f"{peer['samples']:,} samples of the next"
        yield f"at step {peer['epoch']:,} with {samples}, {rate:,.1f} samples/s"
    if peer["reduces"] is not None:
        yield _part(peer)
    if peer["ignored"]:
        yield f"does not count: {peer['ignored']}"


def _part(peer: dict[str, Any]) -> str:
    ways = (("up", peer["up_bytes_per_second"]), ("down", peer["down_bytes_per_second"]))
    rates = " and ".join(f"{in_words(rate)}/s {way}" for way, rate in ways if rate is not None)
    return f"averages {peer['reduces']:.0%} for all" + (f", planned with {rates}" if rates else "")
