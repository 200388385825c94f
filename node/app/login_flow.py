"""The work of `potluck login`: contact the server, choose a way, log in, store the pass.

It is done in three steps, so that a code can be typed at the terminal between them: check for a
pass, ask for the server's providers, and log in.

Ctrl-C may come at any moment. The pass is replaced in one step at the very end, so that there is
either the old one or the new one.
"""

from __future__ import annotations

import logging
import sys
import webbrowser
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

import trio

from auth.errors import AuthError
from auth.invites import Invite
from node.app.cli.exit_codes import DONE, FAILED
from node.app.cli.interruption import run_until_signal
from node.app.cli.output import Output
from node.app.login_inputs import CODE_VARIABLE, ask_for_code
from node.app.views.status_view import clock_words, duration, in_one_line
from node.core.access.auth_client import (
    About,
    AccessDenied,
    AuthClient,
    GrantedPass,
    OfferedProvider,
    PendingLogin,
    open_auth_client,
)
from node.core.access.login import CODE, choose_provider, finish, kept_pass
from node.core.access.membership import (
    Membership,
    membership_on_disk,
    open_membership,
    refused_by,
)
from node.core.access.pass_file import KeptPass, keep_pass, load_pass
from node.core.access.questions import RELOAD
from node.core.access.renewal import TokenStanding
from node.core.access.server_time import ServerTime
from node.core.configuration import Configuration
from node.core.control_client import NoRunningNode, ask_once
from node.core.key_file import load_identity, load_or_create_identity
from node.core.private_file import UnusableFile
from node.core.wrong_use import WrongUse
from node.net import machine_clocks
from protocols.errors import PotluckError, Unreachable
from protocols.identity import Identity

ASKING_SECONDS = 5.0  # whether a pass that seems good is; without an answer it is taken for good

log = logging.getLogger("potluck.access")


@dataclass(frozen=True)
class Wishes:
    """The choices of the command line."""

    invite: Invite | None
    code: str
    provider: str | None
    kind: str | None
    again: bool
    wait_seconds: float


def log_in(configuration: Configuration, wishes: Wishes, output: Output) -> int:
    """Do all of it. Returns the exit code."""
    invite = wishes.invite or _invite_of_pass(configuration)
    if not invite.auth_url:
        raise WrongUse(
            f"{invite.run} is an open run: there is nothing to log in to.",
            why="The invite names no auth server: everybody with a key may take part.",
            advice="Take part with `potluck listen --bootstrap ADDRESS`"
            + (f": {invite.bootstrap[0]}" if invite.bootstrap else "."),
        )
    present = _present(configuration, invite, wishes, output)
    refusals: list[AccessDenied] = []
    if present is not None and not wishes.again:
        if present.standing is TokenStanding.VALID and not present.kept.refused:
            code = _still_good(present)
            if code == DONE:
                _tell_done(configuration, output, "kept")
            if code != FAILED:  # Ctrl-C, for one
                return code
        code = _renew(present, invite, output, refusals)
        if code == DONE:
            _tell_done(configuration, output, "renewed")
        if code != FAILED:  # Ctrl-C, for one
            return code
    return _Login(configuration, invite, wishes, output, refusals).run()


def _invite_of_pass(configuration: Configuration) -> Invite:
    kept = load_pass(configuration.places.pass_file)
    if kept is None:
        raise WrongUse(
            "There is no pass here yet, so an invite is needed.",
            advice="`potluck login INVITE`: a text that begins with potluck:, or a file that "
            "contains it. The run's moderators hand them out.",
        )
    return Invite(kept.run, (), kept.auth_url, kept.fingerprint, pin=kept.pin)


def _present(
    configuration: Configuration, invite: Invite, wishes: Wishes, output: Output
) -> Membership | None:
    """The membership that there is already, if it is of this run and usable."""
    kept: KeptPass | None = None
    try:
        kept = load_pass(configuration.places.pass_file)
        if kept is not None and kept.run != invite.run and not wishes.again:
            raise WrongUse(
                f"This home is in the run {kept.run}; the invite is for {invite.run}.",
                why="One home is one node in one run.",
                advice="For a second node name another home (--home DIRECTORY); to change to this "
                "run, add --again.",
            )
        identity = load_identity(configuration.key_file)
        if kept is None or identity is None:
            return None
        if (kept.run, kept.fingerprint) != (invite.run, invite.fingerprint):
            return None
        return open_membership(configuration, identity)
    except UnusableFile as error:
        output.say(f"The present pass is replaced: {error.what} {error.why}")
        return None


def _still_good(present: Membership) -> int:
    """DONE unless the auth server says that nobody accepts the pass; DONE, too, if it is away."""

    async def ask() -> int:
        with trio.move_on_after(ASKING_SECONDS):
            try:
                async with present.open_client() as client:
                    await client.meet()
                    return DONE if await refused_by(client, present) is None else FAILED
            except (PotluckError, AuthError) as error:
                log.debug("the auth server was not asked about the pass: %s", error)
        return DONE

    return run_until_signal(ask)


def _renew(
    present: Membership, invite: Invite, output: Output, refusals: list[AccessDenied]
) -> int:
    """Try without a person: an expired pass can be renewed for a while.

    Unreachable if the server is away, unless the invite names another address of it.
    """
    outages: list[Unreachable] = []

    async def renew() -> int:
        try:
            async with present.open_client() as client:
                granted = await client.renew(present.access_pass.token)
                await present.adopt(granted.signed, granted.opened)
                if present.trouble:  # a running node goes on with what it has in memory
                    raise UnusableFile(
                        present.trouble,
                        why="The auth server has renewed it, and that is lost.",
                        advice="Make room or repair the folder, and type the same command again.",
                    )
        except UnusableFile:
            raise
        except (PotluckError, AuthError) as error:
            if isinstance(error, Unreachable) and present.kept.auth_url == invite.auth_url:
                outages.append(error)
                return FAILED
            if isinstance(error, AccessDenied):
                refusals.append(error)
            output.say(f"The old pass cannot be renewed, so this node asks for a new one: {error}")
            return FAILED
        return DONE

    code = run_until_signal(renew)
    if outages:
        raise _still_without(present, outages[0])
    return code


def _still_without(present: Membership, outage: Unreachable) -> Unreachable:
    """What an outage means for a node whose pass has to be renewed."""
    status = present.status()
    state = f"expired {duration(-status.expires_in_seconds)} ago"
    if status.expires_in_seconds > 0:
        state = "was refused before"
    return Unreachable(
        f"This node's pass for {status.run} {state}, and the auth server cannot be asked for a new "
        "one.",
        why=outage.why,
        advice=f"{outage.advice} Then type the same command again: the pass is renewed by itself.",
    )


class _Login:
    """One login. The server is contacted first, because a person is asked about its offers."""

    def __init__(
        self,
        configuration: Configuration,
        invite: Invite,
        wishes: Wishes,
        output: Output,
        refusals: Sequence[AccessDenied] = (),
    ) -> None:
        self._refusals = refusals
        self._configuration = configuration
        self._invite = invite
        self._wishes = wishes
        self._output = output
        self._identity = self._own_identity()
        self._time = ServerTime(machine_clocks())
        self._code = wishes.code or invite.code
        self._about: About | None = None
        self._entry: OfferedProvider | None = None

    def _own_identity(self) -> Identity:
        key_file = self._configuration.key_file
        identity = load_identity(key_file)
        if identity is None:
            identity = load_or_create_identity(key_file)
            self._output.say(f"Made a new key: {key_file}")
        return identity

    def run(self) -> int:
        code = run_until_signal(self._meet_and_choose)
        if code or self._entry is None:
            return code
        if self._entry.kind == CODE and not self._code:
            self._code = self._typed_code()
        return run_until_signal(self._log_in)

    def _typed_code(self) -> str:
        if self._output.json or sys.stdin is None or not sys.stdin.isatty():
            if self._refusals:  # there is no pass because of these; a code would not help
                raise self._refusals[0]
            raise WrongUse(
                "An enrolment code is needed.",
                why="It was asked for, or the server has no other way to log in.",
                advice="The run's moderators hand them out (`potluck auth codes new`). Put it into "
                f"a file for --code-file FILE, or into {CODE_VARIABLE}.",
            )
        return ask_for_code()

    async def _meet_and_choose(self) -> int:
        async with self._client() as client:
            self._about = await client.meet()
        entry = choose_provider(
            self._about.providers,
            has_code=bool(self._code),
            provider=self._wishes.provider,
            kind=self._wishes.kind,
        )
        self._entry = entry
        others = [f"{one.id} ({one.kind})" for one in self._about.providers if one != entry]
        if others:
            self._output.say(
                f"Logging in through {entry.title or entry.id}. Other ways: {', '.join(others)}; "
                "see --provider and --with."
            )
        return 0

    async def _log_in(self) -> int:
        assert self._entry is not None
        async with self._client() as client:
            await client.meet()
            granted = await finish(
                client, self._entry, self._code, self._tell, self._wishes.wait_seconds
            )
        await trio.to_thread.run_sync(self._keep, granted)
        _tell_done(self._configuration, self._output, "new")
        return 0

    def _client(self) -> AbstractAsyncContextManager[AuthClient]:
        invite = self._invite
        return open_auth_client(
            self._identity,
            url=invite.auth_url,
            run=invite.run,
            fingerprint=invite.fingerprint,
            pin=invite.pin,
            time=self._time,
        )

    def _tell(self, entry: OfferedProvider, pending: PendingLogin) -> None:
        """Show a person what to do."""
        output = self._output
        if output.json:
            output.data(
                {
                    "event": "login",
                    "kind": entry.kind,
                    "provider": entry.id,
                    "user_code": pending.user_code,
                    "verification_uri": pending.verification_uri,
                    "verification_uri_complete": pending.verification_uri_complete,
                    "url": pending.url,
                    "confirmation": pending.confirmation,
                    "peer_id": self._identity.peer_id,
                    "expires_in": pending.expires_in,
                },
                "",
            )
            return
        minutes = max(1, round(pending.expires_in / 60))
        if pending.user_code:
            output.say(
                f"Open {pending.verification_uri} on any device and type this code:\n\n"
                f"    {pending.user_code}\n"
            )
            if pending.verification_uri_complete:
                output.say(f"Or open {pending.verification_uri_complete}\n")
        else:
            output.say(
                f"Open {pending.url} in a browser. The page must show these words, and this "
                f"computer's key:\n\n    {pending.confirmation}\n    {self._identity.peer_id}\n"
            )
            _open_browser(pending.url)
        output.say(f"Waiting for up to {minutes} minutes; Ctrl-C cancels the login.")

    def _keep(self, granted: GrantedPass) -> None:
        path = self._configuration.places.pass_file
        keep_pass(path, kept_pass(self._invite, granted, self._time))


def _open_browser(url: str) -> None:
    """Open the page if there is a screen; the address was printed in any case."""
    if sys.stdout.isatty() and url.startswith("https://"):
        webbrowser.open(url)


def _tell_done(configuration: Configuration, output: Output, outcome: str) -> None:
    """Print the name under which this node takes part, and notify a running one."""
    _, membership = membership_on_disk(configuration)
    note = _tell_running_node(configuration)
    value = {
        "event": "logged_in",
        "outcome": outcome,
        "run": membership.run,
        "username": membership.username,
        "roles": list(membership.roles),
        "expires_in_seconds": membership.expires_in_seconds,
        "clock_offset_ms": membership.clock_offset_ms,
        "pass_file": str(configuration.places.pass_file),
        "running_node": note,
    }
    words = {"new": "Logged in: ", "renewed": "Renewed: ", "kept": "Logged in already: "}[outcome]
    output.data(value, words + in_one_line(membership))
    clock = clock_words(membership)
    if clock and not output.json:
        output.say(
            f"warning: the clock: {clock}. potluck uses the server's time; correct the clock "
            "anyway."
        )
    if note and not output.json:
        output.say(note)


def _tell_running_node(configuration: Configuration) -> str:
    """Have the node that runs here use the pass; returns words for a person."""
    try:
        ask_once(configuration.places.control_socket, RELOAD)
    except NoRunningNode:
        return ""
    except PotluckError as error:
        return f"The node that runs here has not taken it up: {error}"
    return "The node that runs here has taken it up."
