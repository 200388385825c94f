"""Under whose name `potluck ping` goes out.

Two processes with one identity disturb each other, because a peer keeps one link to each identity
and closes the other. While a node runs here, pings go out under a new identity; otherwise under
the own one, because some nodes will only talk to whom they know.

This is apart from pinging.py so that what is refused is refused before the network is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from node.commands.output import Output
from node.configuration import Configuration
from node.control_client import a_node_answers
from node.key_file import load_identity
from node.wrong_use import WrongUse
from protocols.errors import Unreachable
from protocols.identity import Identity, PeerId

if TYPE_CHECKING:
    from node.access.membership import Membership


def choose_identity(
    configuration: Configuration, wanted: str | None, target: PeerId, output: Output
) -> Identity:
    """Who to ping as. Says so when it is not who one would expect."""
    if wanted == "new":
        return Identity.generate()
    own = load_identity(configuration.key_file)
    node_runs = a_node_answers(configuration.places.control_socket)
    if wanted == "own":
        if own is None:
            raise WrongUse(
                "This node has no key yet, so it cannot ping as itself.",
                advice="`potluck id` makes one; without --identity a new one is used.",
            )
        if node_runs:
            output.say("warning: a node runs here with this identity; its links may be cut off.")
        return own
    if own is None or node_runs:
        return Identity.generate()
    if own.peer_id == target:
        raise Unreachable(
            "That address is this node's own, and no node is running here.",
            advice="Start it with `potluck listen`, or ping another node.",
        )
    return own


def membership_of(configuration: Configuration, identity: Identity) -> Membership | None:
    """The membership with which to ping, if it is this machine's own identity that goes out."""
    if not configuration.places.pass_file.exists():
        return None
    own = load_identity(configuration.key_file)
    if own is None or own.peer_id != identity.peer_id:
        return None
    from node.access.membership import open_membership

    return open_membership(configuration, own)
