"""What `potluck login` does: meet the server, choose a way, log in, keep the pass.

It is done in three steps, so that a code can be typed at the terminal between them: is there a
pass already, what does the server offer, and the login itself.

Easy to get wrong: Ctrl-C may come at any moment. The pass is put in place in one step at the very
end, so that there is the old one or the new one, and never a half.
"""

from __future__ import annotations

import sys
import webbrowser
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

import trio

from auth.errors import AuthError
from auth.invites import Invite
from node.access.auth_client import (
    About,
    AccessDenied,
    AuthClient,
    Granted,
    PendingLogin,
    ProviderEntry,
    open_auth_client,
)
from node.access.login import CODE, choose_provider, finish, kept_pass
from node.access.membership import Membership, open_membership
from node.access.pass_file import KeptPass, keep_pass, load_pass
from node.access.questions import RELOAD
from node.access.renewal_schedule import Standing
from node.access.server_time import ServerTime, machine_clocks
from node.commands.exit_codes import DONE, FAILED
from node.commands.interruption import run_until_signal
from node.commands.login_inputs import CODE_VARIABLE, ask_for_code
from node.commands.membership_view import clock_words, in_one_line
from node.commands.output import Output
from node.configuration import Configuration
from node.control_client import NoRunningNode, ask_once
from node.key_file import load_identity, load_or_create_identity
from node.private_file import UnusableFile
from node.wrong_use import WrongUse
from protocols.errors import PotluckError
from protocols.identity import Identity


@dataclass(frozen=True)
class Wishes:
    """What the command line said."""

    invite: Invite | None
    code: str
    provider: str | None
    kind: str | None
    again: bool
    wait_seconds: float


def log_in(configuration: Configuration, wishes: Wishes, output: Output) -> int:
    """Do it all; the exit code."""
    invite = wishes.invite or _invite_of_pass(configuration)
    if not invite.auth_url:
        raise WrongUse(
            f"{invite.run} is an open run: there is nothing to log in to.",
            why="The invite names no auth server; everybody with a key may take part.",
            advice="Take part with `potluck listen --bootstrap ADDRESS`"
            + (f": {invite.bootstrap[0]}" if invite.bootstrap else "."),
        )
    present = _present(configuration, invite, wishes, output)
    refusals: list[AccessDenied] = []
    if present is not None and not wishes.again:
        if present.standing is Standing.VALID and not present.kept.refused:
            _tell_done(configuration, output, "kept")
            return DONE
        code = _renew(present, output, refusals)
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
            advice="`potluck login INVITE`: a text that begins with potluck:, or a file with it. "
            "The run's moderators hand them out.",
        )
    return Invite(kept.run, (), kept.auth_url, kept.fingerprint, pin=kept.pin)


def _present(
    configuration: Configuration, invite: Invite, wishes: Wishes, output: Output
) -> Membership | None:
    """The membership that there is already, if it is of this run and of use."""
    kept: KeptPass | None = None
    try:
        kept = load_pass(configuration.places.pass_file)
        if kept is not None and kept.run != invite.run and not wishes.again:
            raise WrongUse(
                f"This home is in the run {kept.run}; the invite is for {invite.run}.",
                why="One home is one node in one run.",
                advice="For a second node name another home (--home DIRECTORY); to change over, "
                "say --again.",
            )
        identity = load_identity(configuration.key_file)
        if kept is None or identity is None:
            return None
        if (kept.run, kept.fingerprint) != (invite.run, invite.fingerprint):
            return None
        return open_membership(configuration, identity)
    except UnusableFile as error:
        output.say(f"The pass that is here is replaced: {error.what} {error.why}")
        return None


def _renew(present: Membership, output: Output, refusals: list[AccessDenied]) -> int:
    """Try without a person: a pass that is over can be renewed for a while."""

    async def renew() -> int:
        try:
            async with present.open_client() as client:
                granted = await client.renew(present.access_pass.token)
                await present.adopt(granted.signed, granted.opened)
        except (PotluckError, AuthError) as error:
            if isinstance(error, AccessDenied):
                refusals.append(error)
            output.say(f"The old pass cannot be renewed, so a new one is asked for: {error}")
            return FAILED
        return DONE

    return run_until_signal(renew)


class _Login:
    """One login. The server is met first, because what it offers decides what a person is asked."""

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
        self._entry: ProviderEntry | None = None

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
            if self._refusals:  # that is why there is no pass: a code is not what is missing
                raise self._refusals[0]
            raise WrongUse(
                "An enrolment code is needed.",
                why="The server has no other way to log in, or it was asked for.",
                advice="The run's moderators hand them out (`potluck auth codes new`). Name a file "
                f"that holds it with --code-file, or put it into {CODE_VARIABLE}.",
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

    def _tell(self, entry: ProviderEntry, pending: PendingLogin) -> None:
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
        output.say(f"Waiting for up to {minutes} minutes; Ctrl-C ends it and leaves nothing.")

    def _keep(self, granted: Granted) -> None:
        path = self._configuration.places.pass_file
        keep_pass(path, kept_pass(self._invite, granted, self._time))


def _open_browser(url: str) -> None:
    """Open the page where there is a screen; the address was printed in any case."""
    if sys.stdout.isatty() and url.startswith("https://"):
        webbrowser.open(url)


def _tell_done(configuration: Configuration, output: Output, outcome: str) -> None:
    """Say as whom this node takes part, and let a running one know."""
    from node.commands.whoami import membership_on_disk

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
            f"warning: the clock: {clock}. Potluck goes by the server's; set it all the same."
        )
    if note and not output.json:
        output.say(note)


def _tell_running_node(configuration: Configuration) -> str:
    """Let the node that runs here take up the pass; what a person should know of it."""
    try:
        ask_once(configuration.places.control_socket, RELOAD)
    except NoRunningNode:
        return ""
    except PotluckError as error:
        return f"The node that runs here goes on as it was: {error}"
    return "The node that runs here has taken it up."
