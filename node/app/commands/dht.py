"""`potluck dht`: read and write the directory, through the running node or as a client of its own.

With `--bootstrap` the command joins the swarm by itself, as a client that no other node remembers
(node/app/swarm_client.py); without, it asks the node that runs in this home
(node/core/dht_questions.py). The answer is a few lines for a person, or JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from node.app.cli.output import Output

if TYPE_CHECKING:
    from pathlib import Path

    from node.app.cli.parser import CommandParser, Subparsers
    from node.core.configuration import Configuration


# A lookup may meet dead nodes, each of which costs a dial's timeout; three in a row is rare.
TIMEOUT_SECONDS = 30.0
TTL_SECONDS = 3600.0


def add_parser(subparsers: Subparsers) -> None:
    from node.app.cli.parser import positive_seconds

    parser = subparsers.add_parser(
        "dht",
        help="read and write the swarm's directory",
        description="The directory holds slots: under each key, every publisher owns one, which is "
        "signed and expires. These commands ask the node that runs in this home. With --bootstrap "
        "they join the swarm for a moment as a client.",
        example='potluck dht put note/hello "good morning"\npotluck dht get note/hello',
    )
    actions = parser.add_actions("action")
    get = actions.add_parser(
        "get",
        help="read the slots under a key",
        description="Read the newest slot of every publisher under a key. Exit code 0 also if "
        "there is none.",
        example="potluck dht get note/hello\n"
        "potluck dht get note/hello --json --bootstrap /ip4/192.0.2.7/tcp/4001/p2p/12D3KooW…",
    )
    get.add_argument("key", metavar="KEY", help="family/name, such as note/hello")
    get.add_argument(
        "--first",
        action="store_true",
        help="stop at the first nodes that have something: faster, but perhaps not the newest",
    )
    put = actions.add_parser(
        "put",
        help="write this node's slot under a key",
        description="Write this node's own slot under a key, in place of its earlier one. It "
        "expires after --ttl seconds. For a trial use a key that begins with note/, whose value is "
        "text; values of other families are JSON.",
        example='potluck dht put note/hello "good morning"\n'
        "potluck dht put note/hello again --ttl 60 --bootstrap "
        "/ip4/192.0.2.7/tcp/4001/p2p/12D3KooW…",
    )
    put.add_argument("key", metavar="KEY", help="family/name, such as note/hello")
    put.add_argument("value", metavar="VALUE", help="the value to write")
    put.add_argument(
        "--ttl",
        type=positive_seconds,
        default=TTL_SECONDS,
        metavar="SECONDS",
        help=f"how long it stays ({TTL_SECONDS:g})",
    )
    stats = actions.add_parser(
        "stats",
        help="show figures of the directory",
        description="Show how many nodes this one knows, how much it keeps for others, and how "
        "often it asked and answered.",
        example="potluck dht stats\npotluck dht stats --json",
    )
    for action in (get, put, stats):
        _add_flags(action)


def _add_flags(parser: CommandParser) -> None:
    from node.app.cli.configured import add_setting_flag
    from node.app.cli.parser import add_timeout

    add_setting_flag(parser, "dht.bootstrap")
    add_timeout(parser, TIMEOUT_SECONDS)


def run(arguments: argparse.Namespace) -> int:
    from node.app.cli.configured import configuration_for

    output = Output.of(arguments)
    configuration = configuration_for(arguments)
    question = _question(arguments)
    if configuration.origins["dht.bootstrap"].source == "flag" and not _is_guarded_node_there(
        configuration, output
    ):
        return _ask_swarm(configuration, arguments.action, question, arguments.timeout, output)

    socket = configuration.places.control_socket
    answer = _ask_node(socket, arguments.action, question, arguments.timeout)
    _show(arguments.action, answer, output)
    return 0


def _is_guarded_node_there(configuration: Configuration, output: Output) -> bool:
    """Whether a node runs here with the access pass that a client of its own would need."""
    from node.core.control_client import a_node_answers

    places = configuration.places
    if not places.pass_file.exists() or not a_node_answers(places.control_socket):
        return False
    output.say("The node that runs here is asked, because it holds the access pass.")
    return True


def _ask_swarm(
    configuration: Configuration,
    action: str,
    question: dict[str, Any],
    seconds: float,
    output: Output,
) -> int:
    """Join, ask, print the answer, leave. Returns the exit code."""
    import msgspec
    import trio

    from node.app.cli.interruption import run_until_signal
    from node.app.cli.log_output import log_to_stderr
    from node.app.swarm_client import open_client
    from node.core.dht_questions import Asked, answer

    log_to_stderr(debug=output.debug)

    async def main() -> int:
        deadline = trio.current_time() + seconds
        async with open_client(configuration, seconds) as client:
            left = deadline - trio.current_time()
            asked = Asked(client.dht, client.network)
            found = await answer(asked, action, {**question, "timeout_seconds": left})
        _show(action, msgspec.to_builtins(found), output)
        return 0

    return run_until_signal(main)


def _ask_node(
    socket: Path, action: str, question: dict[str, Any], seconds: float
) -> dict[str, Any]:
    from node.core.control_client import ANSWER_SECONDS, NoRunningNode, ask_once

    try:
        answer: dict[str, Any] = ask_once(
            socket,
            f"dht {action}",
            {**question, "timeout_seconds": seconds},
            silence_seconds=seconds + ANSWER_SECONDS,
        )
    except NoRunningNode as error:
        advice = f"{error.advice} Or ask a node of the swarm: --bootstrap ADDRESS."
        raise NoRunningNode(error.what, why=error.why, advice=advice) from None
    return answer


def _question(arguments: argparse.Namespace) -> dict[str, Any]:
    """The request. WrongUse for an impossible key, before anything is sent."""
    if arguments.action != "stats":
        _check_key(arguments.key)
    match arguments.action:
        case "get":
            return {"key": arguments.key, "first": arguments.first}
        case "put":
            return {"key": arguments.key, "value": arguments.value, "ttl": arguments.ttl}
        case _:
            return {}


def _check_key(key: str) -> None:
    from node.core.wrong_use import WrongUse
    from protocols.dht import SlotRefused, check_key

    try:
        check_key(key)
    except SlotRefused as refused:
        raise WrongUse(refused.what, why=refused.why, advice=refused.advice) from None


def _show(action: str, answer: Mapping[str, Any], output: Output) -> None:
    """Print the answer to `potluck dht ACTION`."""
    text = {"get": _found, "put": _stored, "stats": _statistics}[action](answer)
    output.data(answer, text)


def _found(answer: Mapping[str, Any]) -> str:
    slots = answer["slots"]
    if not slots and not answer["peers_known"]:
        return (
            f"This node knows no other node to ask for {answer['key']}, and keeps nothing under it "
            "itself. `potluck dht stats` shows which nodes it has tried to reach."
        )
    if not slots:
        return f"Nothing is stored under {answer['key']}."
    lines = []
    for slot in slots:
        value = slot["value"]
        lines.append(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        lines.append(f"  by {slot['publisher']}, {_life(slot['expires_in_seconds'])}")
    return "\n".join(lines)


def _stored(answer: Mapping[str, Any]) -> str:
    count = answer["replicas"]
    return (
        f"Stored under {answer['key']} at {count} {'node' if count == 1 else 'nodes'}, "
        f"{_life(answer['expires_in_seconds'])}, as {answer['publisher']}."
    )


def _life(seconds: float) -> str:
    from node.app.views.status_view import duration

    return f"for another {duration(seconds)}"


def _statistics(answer: Mapping[str, Any]) -> str:
    width = max(len(name) for name in answer)
    return "\n".join(f"{name.replace('_', ' '):{width}}  {answer[name]}" for name in answer)
