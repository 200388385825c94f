"""`potluck id`: this node's peer id. Makes the key if there is none yet."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from node.app.cli.output import Output

if TYPE_CHECKING:
    from node.app.cli.parser import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    from node.app.cli.configured import add_setting_flag

    parser = subparsers.add_parser(
        "id",
        help="print this node's peer id",
        description="Print the peer id of this node. If it has no key yet, make one. The key file "
        "is the node's identity: keep a copy of it somewhere safe.",
        example="potluck id\npotluck id --json",
    )
    add_setting_flag(parser, "identity.key_file")


def run(arguments: argparse.Namespace) -> int:
    from node.app.cli.configured import configuration_for
    from node.core.key_file import load_identity, load_or_create_identity

    output = Output.of(arguments)
    key_file = configuration_for(arguments).key_file
    identity = load_identity(key_file)
    created = identity is None
    if identity is None:
        identity = load_or_create_identity(key_file)
        output.say(f"Made a new key: {key_file}")
    output.data(
        {
            "peer_id": identity.peer_id,
            "public_key": identity.public_key.hex(),
            "key_file": str(key_file),
            "created": created,
        },
        identity.peer_id,
    )
    return 0
