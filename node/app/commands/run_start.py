"""`potluck run start`: the organiser's first peer of a run, which keeps its checkpoints.

It is `potluck join` with a head start (node/training/join/): the definition comes from the folder,
this peer may begin the run, and it continues from the newest checkpoint. While it runs, others are
invited to it; it listens on the same ports again, so that invites outlive a restart.

run.toml may have been changed since it was signed. The first start signs it; later starts refuse to
guess whether a change was meant.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import socket
from collections.abc import Container, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from node.app.cli.output import Output
from node.core.wrong_use import WrongUse
from node.run.folder import RunFolder, organiser_here, organiser_key, own_organiser

if TYPE_CHECKING:
    from auth.server.settings import ListenAddress
    from node.app.cli.line_queue import LineQueue
    from node.app.cli.parser import CommandParser, Subparsers
    from node.app.foreground import Beside
    from node.core.configuration import Configuration
    from node.core.node import Node
    from node.core.settings import Value
    from node.core.tracker import NamedTracker
    from node.run.invite import RunInvite
    from node.run.signed import SignedDefinition
    from node.training.join import Participation
    from node.training.session import TrainingSession

ORGANISERS_NAME = "organiser"  # of the account that a first start makes at the run's auth server


def add_start(actions: Subparsers) -> None:
    from node.app.commands.run import add_folder

    start = actions.add_parser(
        "start",
        help="start the run's first peer, which keeps its checkpoints",
        description="Start a run, or continue it from its newest checkpoint. This is the run's "
        "first peer: it gives the signed definition and the state to others, keeps checkpoints in "
        "DIR/checkpoints and, without --keep-only, trains as well. It signs run.toml if it is not "
        "signed yet. When it listens, it prints the invite, with a QR code on a terminal; `potluck "
        "run invite` prints it again.\n\n"
        "Keep it running, or start it again: it remembers its port, so volunteers find it again. "
        "If the run is closed and its auth server is in this home, the first start lets this node "
        "in by itself.\n\n"
        "Ctrl-C leaves after the current round and writes a last checkpoint; a second Ctrl-C "
        "leaves at once.",
        example="potluck run start poem\n"
        "potluck run start poem --keep-only --listen /ip4/0.0.0.0/tcp/4001\n"
        "potluck run start poem --announce /dns4/poem.example.org/tcp/4001 --threads 2",
    )
    add_folder(start)
    start.add_argument(
        "--keep-only",
        action="store_true",
        help="compute no samples: keep checkpoints, help to average, and serve the state",
    )
    add_http(start)
    add_flags(start)


def add_http(parser: CommandParser) -> None:
    """The address of the run's page, which is served only if it is given."""
    parser.add_argument(
        "--http",
        metavar="HOST:PORT",
        help="serve the run's page (`potluck page` opens it), /metrics, /healthz and /readyz at "
        "this address, for example 127.0.0.1:8481; a port of 0 is any that is free",
    )


def add_flags(start: CommandParser, *, without: Container[str] = ()) -> None:
    """The flags of an organiser's peer, whether it trains or only keeps, without these settings."""
    from node.app.commands.run import add_peer_flags

    start.add_argument(
        "--qr",
        action=argparse.BooleanOptionalAction,
        help="draw a QR code of the invite, or not (by default on a terminal)",
    )
    start.add_argument(
        "--from-peers",
        action="store_true",
        help="if no checkpoint is whole, take the run's state from a volunteer who has it, waiting "
        "for one if necessary, instead of beginning the run",
    )
    add_peer_flags(start, without=without)


def run(arguments: argparse.Namespace) -> int:
    from node.app.cli.listen_flag import listen_flag

    command = "potluck run start --keep-only" if arguments.keep_only else "potluck run start"
    http = None if arguments.http is None else listen_flag("--http", arguments.http)
    return start_peer(arguments, command, keeps_only=arguments.keep_only, http=http)


def start_peer(
    arguments: argparse.Namespace,
    command: str,
    *,
    keeps_only: bool,
    http: ListenAddress | None = None,
    defaults: Mapping[str, Value] | None = None,
) -> int:
    """The work of `run start` and `potluck backbone`, which has its own `defaults` of settings.
    `command`: the typed words before the folder. `http`: the address of the run's page."""
    from node.app.cli.configured import configuration_for
    from node.core.running_lock import hold_running_lock
    from node.core.stopping_signals import undisturbed
    from node.net import check_listening
    from node.run.trusted import trusted_modules
    from node.training.join import Participation, own_identity
    from node.training.trackers import check_trackers

    output = Output.of(arguments)
    configuration = configuration_for(arguments, defaults)
    trusted = trusted_modules(arguments.trust_module)
    folder = RunFolder(Path(arguments.folder).expanduser().absolute())
    signed = _signed(folder, configuration, trusted, shlex.quote(arguments.folder), output)
    trackers = configuration.trackers or _trackers_of_run(folder, configuration, signed, output)
    check_trackers(trackers)
    with undisturbed():
        own_identity(configuration)
        with hold_running_lock(configuration.places, configuration.key_file):
            pass  # before a code is spent
    part = Participation(
        signed.definition.name,
        signed.organiser,
        signed=signed,
        signed_file=folder.signed_file,
        trusted=trusted,
        checkpoints=folder.checkpoints,
        keeps_only=keeps_only,
        begins=True,
        from_peers=arguments.from_peers,
        trackers=trackers,
    )
    with folder.held():
        configuration = listening_as_before(configuration, folder, output)
        check_listening(configuration.listen_addresses)  # before a code is made and spent
        way_in = _way_in(configuration, signed, getattr(arguments, "home", None))
        return _run(configuration, folder, part, way_in, arguments, command, output, http)


def _run(
    configuration: Configuration,
    folder: RunFolder,
    part: Participation,
    way_in: RunInvite | None,
    arguments: argparse.Namespace,
    command: str,
    output: Output,
    http: ListenAddress | None,
) -> int:
    """Run until told to leave. Returns the exit code."""
    from node.app.foreground import nothing_beside, train_in_foreground

    assert part.signed is not None
    signed = part.signed

    async def get_in(session: TrainingSession) -> None:
        from node.training.happenings import STARTING, Preparing
        from node.training.join import enrol_with_code

        await _try_out(part, session)
        if way_in is not None:
            session.happened(Preparing("logging in at this machine's auth server"))
            await enrol_with_code(configuration, way_in, "")
        session.happened(Preparing(STARTING))

    def introduce(node: Node, lines: LineQueue) -> None:
        _introduce(node, folder, signed, arguments, lines)

    beside: Beside = nothing_beside
    if http is not None:
        beside = _page_of(http, folder, signed)
    return train_in_foreground(
        configuration,
        part,
        output,
        before=get_in,
        started=introduce,
        beside=beside,
        again=f"{command} {shlex.quote(arguments.folder)}",
    )


def _page_of(http: ListenAddress, folder: RunFolder, signed: SignedDefinition) -> Beside:
    """The task that serves the run's page."""
    from node.app.run_http import RunHttp
    from node.run.invite import write_invite

    return RunHttp(
        http,
        signed.definition.name,
        signed.organiser,
        checkpoint_seconds=signed.definition.checkpoints.every_seconds,
        folder_trouble=folder.trouble,
        invite=lambda node: write_invite(_invite_of(node, signed)),
        definition=signed.definition,
    ).serve


async def _try_out(part: Participation, session: TrainingSession) -> None:
    """Check that the checkpoints have room and the data can be read, before anybody is invited. A
    peer that only keeps the run reads no data."""
    import trio

    from models.data.clock import ReadingStopped
    from node.run.dry_run import DataTrial, DataUnreadable, check_room
    from node.training.happenings import READING, WORKING_OUT, Notice, Preparing

    assert part.signed is not None
    assert part.checkpoints is not None
    definition, checkpoints, trusted = part.signed.definition, part.checkpoints, part.trusted
    token = trio.lowlevel.current_trio_token()

    def tell(words: str) -> None:
        with suppress(trio.RunFinishedError):
            token.run_sync_soon(session.happened, Notice(words))

    session.happened(Preparing(WORKING_OUT))
    await trio.to_thread.run_sync(check_room, definition, trusted, checkpoints, tell)
    if part.keeps_only and any(checkpoints.glob("epoch-*")):
        return
    session.happened(Preparing(READING))
    trial = DataTrial(definition, trusted, tell)

    def read() -> None:
        with suppress(ReadingStopped):  # nobody waits for it any more
            trial.read()

    try:
        await trio.to_thread.run_sync(read, abandon_on_cancel=True)  # type: ignore[call-arg] # older stubs
    except DataUnreadable as error:
        if not part.keeps_only:
            raise
        session.happened(Notice(f"warning: {error.what} {error.why} This peer needs none."))
    finally:
        trial.stop()


def _signed(
    folder: RunFolder,
    configuration: Configuration,
    trusted: dict[str, Path],
    typed: str,
    output: Output,
) -> SignedDefinition:
    """The last signed definition, if run.toml still matches it; if none was, sign it now."""
    from node.app.commands.run_sign import sign

    text, places = folder.text(), configuration.places
    if not folder.signed_file.exists():
        signed = sign(folder, organiser_key(places, make=True), None, trusted)
        output.say(f"signed {folder.definition_file} with the organiser's key")
        return signed
    organiser = organiser_here(places, folder)
    before = folder.signed(organiser)
    assert before is not None, "it was there a moment ago"
    if before.text != text:
        signs = f"`potluck run sign {typed}` signs the change for everybody who starts "
        raise WrongUse(
            "run.toml differs from the signed definition.",
            why=f"It was changed, and {folder.signed_file.name} has the earlier definition.",
            advice="The organiser's key is not here: get both files from the organiser again."
            if organiser is None
            else f"{signs}after that; or undo the change.",
        )
    if organiser is None:
        output.say("the organiser's key is not here: this peer can keep the run, but not change it")
    return before


def _trackers_of_run(
    folder: RunFolder, configuration: Configuration, signed: SignedDefinition, output: Output
) -> tuple[NamedTracker, ...]:
    """Those of run.toml, where its organiser is at home. Elsewhere the folder may be a stranger's,
    and a tracker writes files and contacts addresses."""
    from node.core.tracker import read_tracker

    found = tuple(read_tracker(one).below(folder.path) for one in signed.definition.tracking.track)
    if found and own_organiser(configuration.places) != signed.organiser:
        output.say(
            "run.toml names trackers, but the organiser's key is not here: nothing is written to "
            "them. Choose your own with --track, or with POTLUCK_TRACKING_TRACK."
        )
        return ()
    for one in found:
        if one.is_path and not Path(one.where).resolve().is_relative_to(folder.path.resolve()):
            raise WrongUse(
                f"The tracker {one} of run.toml leads out of the run's folder, over a link in it.",
                why="It would write into a file or a folder that is not the run's.",
                advice="Remove the link, or name the place with --track.",
            )
    if found:
        output.say(f"the figures of each step go to {', '.join(map(str, found))}")
    return found


def _way_in(
    configuration: Configuration, signed: SignedDefinition, home: str | None
) -> RunInvite | None:
    """An invite of this node's own, with a code, into a closed run that it has no pass for yet.

    WrongUse if this home is in another run, or its auth server does not run.
    """
    from node.app.commands.run_invite import auth_server_of
    from node.core.access.pass_file import load_pass
    from node.training.join import ANOTHER_HOME

    name = signed.definition.name
    kept = load_pass(configuration.places.pass_file)
    if kept is not None and kept.run != name:
        raise WrongUse(
            f"This home is in the run {kept.run}, so it cannot start {name}.",
            why="One home is one node in one run.",
            advice=ANOTHER_HOME,
        )
    here = auth_server_of(name, home)
    if here is None or kept is not None:
        return None
    from node.app.auth_acts import perform_act
    from node.app.commands.run_invite import local_access
    from node.run.invite import RunInvite

    places, settings = here
    _, nobody_serves = perform_act(places, "keys-list", {})
    if nobody_serves:
        raise WrongUse(
            f"The auth server of {name} is in this home, but is not running.",
            why="The run is closed: this peer needs a pass like everybody else.",
            advice="Start `potluck auth serve` first, in another terminal.",
        )
    access, _ = local_access(places, settings, ORGANISERS_NAME, with_code=True)
    return RunInvite(name, (), signed.organiser, 0, access)


def listening_as_before(
    configuration: Configuration, folder: RunFolder, output: Output
) -> Configuration:
    """The configuration with the last start's ports in place of any free port. Each port is used
    once, because two addresses may overlap (0.0.0.0 includes every other)."""
    before = folder.ports()
    addresses = []
    for address in configuration.listen_addresses:
        kind, host, port = _parts(address)
        wanted = before.pop(kind, 0) if port == 0 else 0
        if wanted and not _is_free(kind, host, wanted):
            output.say(
                f"warning: earlier invites lead to port {wanted}, which another program uses now. "
                "Make new invites, or end that program and start again."
            )
            wanted = 0
        addresses.append(f"/{kind}/{host}/tcp/{wanted or port}")
    values = {**configuration.values, "network.listen": tuple(addresses)}
    return dataclasses.replace(configuration, values=values)


def _parts(address: str) -> tuple[str, str, int]:
    _, kind, host, _, port = address.split("/")
    return kind, host, int(port)


def _is_free(kind: str, host: str, port: int) -> bool:
    family = socket.AF_INET6 if kind == "ip6" else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind((host, port))
    except OSError:
        return False
    return True


def _introduce(
    node: Node,
    folder: RunFolder,
    signed: SignedDefinition,
    arguments: argparse.Namespace,
    lines: LineQueue,
) -> None:
    """The node listens: remember the ports, and print the invite."""
    from node.app.commands.run_invite import auth_server_of, wants_qr
    from node.app.views.qr import lines_that_fit
    from node.run.invite import write_invite

    addresses = node.network.addresses()
    try:
        folder.keep_ports(addresses)
    except OSError as error:
        lines.say(
            f"warning: this run's ports cannot be saved ({error.strerror}: {folder.path}). After a "
            "restart the invite may be useless: choose a port with --listen."
        )
    invite = _invite_of(node, signed)
    text = write_invite(invite)
    to_people = not getattr(arguments, "json", False)
    if to_people:  # before the text: a code can fill a terminal, and the text must stay visible
        wanted = wants_qr(arguments.qr, invite.bootstrap)
        for line in lines_that_fit(text, wanted=wanted, colour=False):
            lines.say(line)
    lines.data(
        {
            "event": "started",
            "run": invite.run,
            "organiser": invite.organiser,
            "peer_id": node.network.peer_id,
            "addresses": list(addresses),
            "closed": invite.access is not None,
            "invite": text,
        },
        text,
    )
    if to_people:
        makes_codes = auth_server_of(invite.run, getattr(arguments, "home", None)) is not None
        for line in for_people(
            invite.access is not None, makes_codes, shlex.quote(arguments.folder)
        ):
            lines.say(line)


def _invite_of(node: Node, signed: SignedDefinition) -> RunInvite:
    """The way to this node, without a code."""
    from auth.invites import Invite
    from node.app.commands.run_invite import worth_naming
    from node.run.invite import RunInvite

    access = None
    if node.membership is not None:
        kept = node.membership.kept
        access = Invite(kept.run, (), kept.auth_url, kept.fingerprint, "", kept.pin)
    addresses = worth_naming(node.network.addresses())
    return RunInvite(signed.definition.name, addresses, signed.organiser, 0, access)


def for_people(is_closed: bool, makes_codes: bool, folder: str) -> Iterator[str]:
    """How to use the invite. `makes_codes`: the run's auth server is in this home."""
    if is_closed:
        yield "The run is closed: people who can log in take part with `potluck join INVITE`."
        yield (
            f"For the others: `potluck run invite {folder} --new-code --name NAME "
            "--file NAME.invite`."
            if makes_codes
            else "The others need a code from its moderators (`potluck auth codes new`), and type "
            "`potluck join INVITE --code-file FILE`."
        )
    else:
        yield (
            "The run is open: everybody who has this invite can take part with `potluck join "
            "INVITE`. docs/moderators.md says how to close it."
        )
