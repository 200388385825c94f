"""`potluck login`: get into a run with an invite, once; the node renews by itself from then on.

The work is in login_flow.py. Here are the flags, and the reading of the invite and the code before
anybody is asked: from files or standard input, because every user of the machine can read a command
line.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from node.app.commands.output import Output

if TYPE_CHECKING:
    from node.app.commands.parser import Subparsers

# A person goes to another device, logs in there, and finds the second factor.
WAIT_SECONDS = 900.0


def add_parser(subparsers: Subparsers) -> None:
    from node.app.commands.configured import add_setting_flag
    from node.app.commands.parser import positive_seconds

    parser = subparsers.add_parser(
        "login",
        help="get into a run with an invite",
        description="Get an access pass for this node from the run's auth server. The invite "
        "says where that is and how to recognise it. Depending on the server you are shown a "
        "short code to type at an identity provider, or a page is opened in a browser, or an "
        "enrolment code from the moderators is enough; it may be inside the invite.\n\n"
        "Nothing is kept but the pass, readable by you alone. The running node renews it by "
        "itself from then on. It is safe to log in again at any time: while the pass is good "
        "nobody is asked for anything. Exit code 3: the server said no, and why; 4: it could not "
        "be asked.",
        example="potluck login invite.txt\npotluck login - < invite.txt\n"
        "potluck login potluck:… --code-file code.txt\n"
        "potluck login --again",
    )
    parser.add_argument(
        "invite",
        metavar="INVITE",
        nargs="?",
        help="the invite itself (potluck:…), a file with it, or - for standard input; left out, "
        "the server of the pass that is here",
    )
    parser.add_argument(
        "--code-file",
        metavar="FILE",
        help="an enrolment code is in this file (- for standard input); also POTLUCK_LOGIN_CODE",
    )
    parser.add_argument(
        "--provider",
        metavar="NAME",
        help="log in through this identity provider of the server, by default the first",
    )
    parser.add_argument(
        "--with",
        dest="kind",
        choices=("code", "device", "browser"),
        help="with an enrolment code, a short code typed on any device, or a browser on this "
        "one; by default the first of these that is possible",
    )
    parser.add_argument(
        "--again",
        action="store_true",
        help="log in anew even if the pass that is here is good; replaces the pass of another run",
    )
    parser.add_argument(
        "--timeout",
        type=positive_seconds,
        default=WAIT_SECONDS,
        metavar="SECONDS",
        help=f"how long to wait for you to log in ({WAIT_SECONDS:g})",
    )
    add_setting_flag(parser, "identity.key_file")


def run(arguments: argparse.Namespace) -> int:
    from node.app.commands.configured import configuration_for
    from node.app.commands.login_inputs import read_code, read_invite

    output = Output.of(arguments)
    configuration = configuration_for(arguments)
    if arguments.invite == "-" and arguments.code_file == "-":
        from node.core.wrong_use import WrongUse

        raise WrongUse("Invite and code cannot both come from standard input.")
    invite = None if arguments.invite is None else read_invite(arguments.invite)
    code = read_code(arguments.code_file)

    from node.app.commands.log_output import log_to_stderr
    from node.app.commands.login_flow import Wishes, log_in

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
