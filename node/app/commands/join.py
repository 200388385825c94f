"""`potluck join`: the one command of a volunteer, from an invite to training and leaving.

The work is in node/training/join/. Here are the flags, and the checks before anything is done: the
invite, the key, that no other node runs here, and whether a person has to log in.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Container
from typing import TYPE_CHECKING

from node.app.cli.output import Output

if TYPE_CHECKING:
    from auth.server.settings import ListenAddress
    from node.app.cli.parser import CommandParser, Subparsers
    from node.core.configuration import Configuration
    from node.run.invite import RunInvite
    from node.training.join import ServingWish

CODE_IN_SIGHT = (
    "warning: This invite contains a code, and every user of this machine can read a command line. "
    "Give such an invite as a file (--invite-file), or in POTLUCK_INVITE."
)
STILL_ACCEPTED = (
    "The others accept the expired one a while longer: this node joins with it, and keeps asking."
)
LOGIN_SECONDS = 900.0  # a person goes to another device, and finds the second factor


def add_parser(subparsers: Subparsers) -> None:
    from node.app.commands.experts import add_most_experts
    from node.app.commands.run_start import add_http

    parser = subparsers.add_parser(
        "join",
        help="train in a run until you stop it",
        description="Take part in a run: make a key for this node and log in if necessary, fetch "
        "the run's definition and verify its signature, say in three lines what will be used, "
        "measure this machine for a few seconds, catch up with the others, and train. No code that "
        "came over the network is run. It is safe to repeat: without an INVITE it continues in the "
        "last run. In a run with a mixture of experts it also serves some experts (docs/experts.md)"
        ".\n\n"
        "A terminal of any size shows the run, the loss, the batch that all peers fill together, "
        "your contribution, the peers, this machine and the last events; the summary stays when "
        "you leave. Keys: p pauses, r resumes, q leaves, tab shows one part in the whole terminal, "
        "? helps. NO_COLOR turns colours off.\n\n"
        "Ctrl-C leaves after the current round, a second Ctrl-C at once; both within five seconds. "
        "From another terminal use potluck status, peers, pause, resume, leave and logs.\n\n"
        "An invite with an enrolment code is a secret: give it as a file or in POTLUCK_INVITE, "
        "because every user of the machine can read a command line. Exit code 3: not allowed, or "
        "too large for this machine; 130: Ctrl-C.",
        example="potluck join potluck-run:…\n"
        "potluck join --invite-file alice.invite --upload-limit 2MB/s\n"
        "POTLUCK_INVITE=potluck-run:… potluck join --plain\n"
        "potluck join --schedule 22:00-07:00 --max-memory 4GB",
    )
    add_invite_flags(parser)
    add_http(parser)
    add_most_experts(parser)


def add_invite_flags(parser: CommandParser, *, without: Container[str] = ()) -> None:
    """The flags of a volunteer's peer, without these settings."""
    from node.app.commands.login import add_code_file
    from node.app.commands.run import add_peer_flags

    add_invite(parser)
    add_code_file(parser)
    add_peer_flags(parser, "dht.client", without=without)


def add_invite(parser: CommandParser) -> None:
    parser.add_argument(
        "invite",
        metavar="INVITE",
        nargs="*",
        help="the invite (potluck-run:…), a file that contains it, or the name of the last run; by "
        "default POTLUCK_INVITE, or the last run",
    )
    parser.add_argument(
        "--invite-file",
        metavar="FILE",
        help="read the invite from this file (- for standard input)",
    )


def run(arguments: argparse.Namespace) -> int:
    from node.app.cli.listen_flag import listen_flag
    from node.training.join import ServingWish

    http = None if arguments.http is None else listen_flag("--http", arguments.http)
    serving = ServingWish(arguments.experts)
    return join(arguments, "potluck join", serving=serving, trains=True, http=http)


def typed_invite(arguments: argparse.Namespace) -> str | None:
    """Several words are one invite: it was copied in several lines, or something broke it."""
    return " ".join(arguments.invite) if arguments.invite else None


def join(
    arguments: argparse.Namespace,
    command: str,
    *,
    serving: ServingWish,
    trains: bool,
    http: ListenAddress | None = None,
) -> int:
    """Take part with a volunteer's peer. `command`: the typed words, to continue with later.
    `http`: the address of the run's page, for this peer's owner."""
    from node.app.cli.configured import configuration_for
    from node.app.login_inputs import read_code
    from node.core.caps.settings import caps_of
    from node.core.disk_trouble import kept_in
    from node.core.named_text import STANDARD_INPUT
    from node.core.running_lock import hold_running_lock
    from node.core.stopping_signals import undisturbed
    from node.core.wrong_use import WrongUse
    from node.net import check_listening
    from node.run.trusted import trusted_modules
    from node.training.join import (
        Need,
        check_any_fits,
        check_home,
        check_still_good,
        keep_invite,
        other_run_before,
        own_identity,
        pass_needed,
        read_invited,
        shows_a_code,
    )
    from node.training.trackers import check_trackers

    output = Output.of(arguments)
    configuration = configuration_for(arguments)
    trackers = configuration.trackers if trains else ()
    check_trackers(trackers)
    trusted = trusted_modules(arguments.trust_module)
    places = configuration.places
    if arguments.invite_file == arguments.code_file == STANDARD_INPUT:
        raise WrongUse(
            "The invite and the code cannot both come from standard input.",
            advice="Put one of them into a file, or into POTLUCK_INVITE or POTLUCK_LOGIN_CODE.",
        )
    typed = typed_invite(arguments)
    invite = read_invited(places, typed, arguments.invite_file, os.environ)
    code = read_code(arguments.code_file)
    check_still_good(places, invite, int(1000 * time.time()))
    check_any_fits(caps_of(configuration), invite.run)
    with undisturbed():
        check_home(configuration)
        own_identity(configuration)
        with kept_in(places.run_folder), hold_running_lock(places, configuration.key_file):
            pass  # before somebody is asked to log in who could not join afterwards
        check_listening(configuration.listen_addresses)  # also before a code is spent in vain
    need = pass_needed(configuration, invite, code)
    if need is not Need.NOTHING and shows_a_code(typed, invite):
        output.say(CODE_IN_SIGHT)
    if need in (Need.PERSON, Need.RENEWAL):
        exit_code = _log_in(
            configuration, invite, code, output, expired_will_do=need is Need.RENEWAL
        )
        if exit_code:
            return exit_code
        need = Need.NOTHING

    from node.app.foreground import Beside, nothing_beside, train_in_foreground
    from node.training.happenings import LOGGING_IN, STARTING, Notice, Preparing
    from node.training.join import Participation, enrol_with_code
    from node.training.session import TrainingSession

    async def get_in(session: TrainingSession) -> None:
        if need is Need.CODE:
            session.happened(Preparing(LOGGING_IN))
            await enrol_with_code(configuration, invite, code)
        before = other_run_before(places, invite)
        keep_invite(places, invite)
        if before:
            words = f"This home was in the run {before}; now it is in {invite.run}."
            session.happened(Notice(words))
        session.happened(Preparing(STARTING))

    part = Participation(
        invite.run,
        invite.organiser,
        trusted=trusted,
        serving=serving,
        trains=trains,
        trackers=trackers,
    )
    beside: Beside = nothing_beside
    if http is not None:
        from node.app.run_http import RunHttp

        beside = RunHttp(http, invite.run, invite.organiser).serve
    return train_in_foreground(
        with_places(configuration, invite),
        part,
        output,
        before=get_in,
        beside=beside,
        again=command,
    )


def _log_in(
    configuration: Configuration,
    invite: RunInvite,
    code: str,
    output: Output,
    *,
    expired_will_do: bool,
) -> int:
    """A person logs in, as with `potluck login`, or the pass is renewed.

    `expired_will_do`: the node may take part with the pass that it has while the server is away.
    """
    from node.app.cli.exit_codes import DONE
    from node.app.cli.log_output import log_to_stderr
    from node.app.login_flow import Wishes, log_in
    from node.training.join import access_of
    from protocols.errors import Unreachable

    log_to_stderr(debug=output.debug)
    wishes = Wishes(
        invite=access_of(invite, code),
        code=code,
        provider=None,
        kind=None,
        again=False,
        wait_seconds=LOGIN_SECONDS,
    )
    try:
        return log_in(configuration, wishes, output)
    except Unreachable as outage:
        if not expired_will_do:
            raise
        output.say(f"warning: {outage.what} {outage.why} {STILL_ACCEPTED}")
        return DONE


def with_places(configuration: Configuration, invite: RunInvite) -> Configuration:
    """The same configuration, joining at the invite's addresses beside its own."""
    import dataclasses

    own = configuration.bootstrap_addresses
    places = tuple(dict.fromkeys([*invite.bootstrap, *own]))
    values = {**configuration.values, "dht.bootstrap": places}
    return dataclasses.replace(configuration, values=values)
