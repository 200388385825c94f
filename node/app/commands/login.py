"""`potluck login`: log in to a closed run with an invite, once; later renewals need no command.

The work is in node/app/login_flow.py. Here are the flags, and the reading of the invite and the
code before anybody is asked: from files or standard input, because every user of the machine can
read a command line.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from node.app.cli.output import Output

if TYPE_CHECKING:
    from node.app.cli.parser import CommandParser, Subparsers

# A person goes to another device, logs in there, and finds the second factor.
WAIT_SECONDS = 900.0


def add_parser(subparsers: Subparsers) -> None:
    from node.app.cli.configured import add_setting_flag
    from node.app.cli.parser import positive_seconds

    parser = subparsers.add_parser(
        "login",
        help="log in to a closed run with an invite",
        description="Get an access pass for this node from the run's auth server. The invite "
        "contains the server's address and the fingerprint of its key. Depending on the server you "
        "type a short code at an identity provider, log in with a browser, or use an enrolment "
        "code from the moderators, which may be in the invite.\n\n"
        "It stores only the pass, which only you can read. The running node renews it by itself. "
        "It is safe to repeat: while others accept the pass, it is kept. Exit code 3: the server "
        "refused, and says why; 4: the server cannot be reached.",
        example="potluck login invite.txt\npotluck login - < invite.txt\n"
        "potluck login potluck:… --code-file code.txt\n"
        "potluck login --again",
    )
    parser.add_argument(
        "invite",
        metavar="INVITE",
        nargs="?",
        help="the invite (potluck:…), a file that contains it, or - for standard input; by default "
        "the server of the present pass",
    )
    add_code_file(parser)
    parser.add_argument(
        "--provider",
        metavar="NAME",
        help="the identity provider to log in at; by default the server's first",
    )
    parser.add_argument(
        "--with",
        dest="kind",
        choices=("code", "device", "browser"),
        help="an enrolment code, a short code for any device, or a browser on this one; by default "
        "the first that is possible",
    )
    parser.add_argument(
        "--again",
        action="store_true",
        help="log in even if the present pass is valid, and replace the pass of another run",
    )
    parser.add_argument(
        "--timeout",
        type=positive_seconds,
        default=WAIT_SECONDS,
        metavar="SECONDS",
        help=f"how long to wait for the login ({WAIT_SECONDS:g})",
    )
    add_setting_flag(parser, "identity.key_file")


def add_code_file(parser: CommandParser) -> None:
    parser.add_argument(
        "--code-file",
        metavar="FILE",
        help="read an enrolment code from this file (- for standard input); also "
        "POTLUCK_LOGIN_CODE",
    )


def run(arguments: argparse.Namespace) -> int:
    from node.app.cli.configured import configuration_for
    from node.app.login_inputs import read_code, read_invite

    output = Output.of(arguments)
    configuration = configuration_for(arguments)
    if arguments.invite == "-" and arguments.code_file == "-":
        from node.core.wrong_use import WrongUse

        raise WrongUse("The invite and the code cannot both come from standard input.")
    invite = None if arguments.invite is None else read_invite(arguments.invite)
    code = read_code(arguments.code_file)

    from node.app.cli.log_output import log_to_stderr
    from node.app.login_flow import Wishes, log_in

    log_to_stderr(debug=output.debug)
    wishes = Wishes(
        invite=invite,
        code=code,
        provider=arguments.provider,
        kind=arguments.kind,
        again=arguments.again,
        wait_seconds=arguments.timeout,
    )
    return log_in(configuration, wishes, output)
