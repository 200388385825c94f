"""`potluck whoami`: this node's identity, its run, and until when its pass is valid."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from node.app.cli.output import Output

if TYPE_CHECKING:
    from node.app.cli.parser import Subparsers
    from node.core.status import MembershipStatus


def add_parser(subparsers: Subparsers) -> None:
    from node.app.cli.configured import add_setting_flag

    parser = subparsers.add_parser(
        "whoami",
        help="show this node's run, name and roles, and how long its token is valid",
        description="Show this node's peer id, its run, its name and roles there, how long its "
        "token is valid and when it is renewed, how far this machine's clock differs from the auth "
        "server's, and the fingerprint of the auth key. It asks the running node or, if none is "
        "running, reads the pass on disk; it asks nobody else. An expired token is no failure of "
        "this command.",
        example="potluck whoami\npotluck whoami --json",
    )
    add_setting_flag(parser, "identity.key_file")


def run(arguments: argparse.Namespace) -> int:
    from node.app.cli.configured import configuration_for
    from node.core.control_client import NoRunningNode, ask_once

    output = Output.of(arguments)
    configuration = configuration_for(arguments)
    try:
        status = ask_once(configuration.places.control_socket, "status")
    except NoRunningNode:
        from node.core.access.membership import membership_on_disk

        peer_id, membership = membership_on_disk(configuration)
        running = False
    else:
        import msgspec

        from node.core.status import MembershipStatus

        peer_id = status.get("peer_id", "")
        membership = msgspec.convert(status.get("membership", {}), MembershipStatus)
        running = True
    _show(peer_id, membership, running, output)
    return 0


def _show(peer_id: str | None, membership: MembershipStatus, running: bool, output: Output) -> None:
    import msgspec

    from node.app.views.status_view import OPEN_RUN, clock_words, token_words

    value: dict[str, Any] = {
        "peer_id": peer_id,
        "node_is_running": running,
        **msgspec.to_builtins(membership),
    }
    rows = [("peer id", peer_id or "no key yet; `potluck id` or `potluck login` makes one")]
    if membership.open:
        rows.append(("run", OPEN_RUN))
    else:
        rows += [
            ("name", membership.username),
            ("roles", ", ".join(membership.roles)),
            ("run", membership.run),
            ("token", token_words(membership).removeprefix("token ")),
            ("server", membership.auth_url),
            ("auth key", membership.fingerprint),
            ("clock", clock_words(membership) or "right, as far as it was measured"),
            ("warning", membership.trouble),
        ]
    rows.append(("node", "running" if running else "not running"))
    output.data(value, "\n".join(f"{name:<9}{words}" for name, words in rows if words))
