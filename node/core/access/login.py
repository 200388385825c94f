"""Logging in: from an invite to a pass, by any way that the auth server offers.

    about = await client.meet()                  # its keys are checked against the invite
    entry = choose_provider(about.providers, has_code=bool(code))
    granted = await finish(client, entry, code, tell, wait_seconds)

Only `enrol` writes to the disk, and leaving early leaves nothing behind: a login that was begun and
not finished expires at the server.

A person needs minutes, and the network may fail meanwhile. An outage between two requests is waited
out until the login expires; only a signed refusal ends it early.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import trio

from auth.invites import Invite
from node.core.access.auth_client import (
    AccessDenied,
    AuthClient,
    GrantedPass,
    LoginNotFinished,
    OfferedProvider,
    PendingLogin,
    WrongServer,
    open_auth_client,
)
from node.core.access.auth_http import Outage
from node.core.access.pass_file import KeptPass, keep_pass
from node.core.access.server_time import ServerTime
from node.core.wrong_use import WrongUse, nearest
from node.net import machine_clocks
from protocols.identity import Identity

CODE, DEVICE, BROWSER = "code", "device", "browser"

# The longest wait that a busy server may ask for; the code itself lives for minutes.
LONGEST_WAIT_SECONDS = 60.0

Tell = Callable[[OfferedProvider, PendingLogin], None]


def kept_pass(invite: Invite, granted: GrantedPass, time: ServerTime) -> KeptPass:
    """The pass of a login, as it is kept on disk."""
    return KeptPass(
        run=invite.run,
        access_pass=granted.signed,
        fingerprint=invite.fingerprint,
        auth_url=granted.opened.access_pass.auth_url or invite.auth_url,
        pin=invite.pin,
        clock_offset_ms=time.offset_ms,
    )


async def enrol(identity: Identity, invite: Invite, pass_file: Path) -> None:
    """Log in by the code in the invite, without a person, and keep the pass."""
    time = ServerTime(machine_clocks())
    async with open_auth_client(
        identity,
        url=invite.auth_url,
        run=invite.run,
        fingerprint=invite.fingerprint,
        pin=invite.pin,
        time=time,
    ) as client:
        about = await client.meet()
        entry = choose_provider(about.providers, has_code=True, kind=CODE)
        granted = await finish(client, entry, invite.code, lambda _entry, _pending: None, 0.0)
    await trio.to_thread.run_sync(keep_pass, pass_file, kept_pass(invite, granted, time))


def choose_provider(
    entries: Sequence[OfferedProvider],
    *,
    has_code: bool,
    provider: str | None = None,
    kind: str | None = None,
) -> OfferedProvider:
    """The requested way to log in, or the one that needs the least from a person."""
    if not entries:
        raise WrongUse(
            "The auth server offers no way to log in.", advice="Ask the moderators of the run."
        )
    possible = [
        one
        for one in entries
        if (provider is None or one.id == provider) and (kind is None or one.kind == kind)
    ]
    if not possible:
        raise _no_such_way(entries, provider, kind)
    order = [CODE, DEVICE, BROWSER] if has_code else [DEVICE, BROWSER, CODE]
    known = [one for one in possible if one.kind in order]
    if not known:
        raise WrongUse(
            f"This version of potluck does not know the login {possible[0].kind[:40]!r}.",
            advice="Update potluck, or choose another way: " + _ways(entries),
        )
    return min(known, key=lambda one: order.index(one.kind))


async def finish(
    client: AuthClient, entry: OfferedProvider, code: str, tell: Tell, wait_seconds: float
) -> GrantedPass:
    """Log in by this way; `tell` gives instructions to a person if they are needed.

    Raises AccessDenied, LoginNotFinished, Outage.
    """
    begun = await client.log_in(entry, code if entry.kind == CODE else "")
    if isinstance(begun, GrantedPass):
        return begun
    tell(entry, begun)
    with trio.move_on_after(min(wait_seconds, max(begun.expires_in, 1.0))):
        return await _wait_for_person(client, begun)
    raise LoginNotFinished(
        "Nobody has finished the login in time.",
        why=f"It was valid for {min(wait_seconds, begun.expires_in):.0f} s.",
        advice="Run `potluck login` again, and log in sooner; --timeout sets how long it waits.",
    )


async def _wait_for_person(client: AuthClient, begun: PendingLogin) -> GrantedPass:
    seconds = max(1.0, min(begun.interval, LONGEST_WAIT_SECONDS))
    while True:
        await trio.sleep(seconds)
        try:
            answer = await client.poll_login(begun)
        except (AccessDenied, LoginNotFinished, WrongServer):
            raise
        except Outage as outage:
            seconds = max(seconds, min(outage.retry_seconds, LONGEST_WAIT_SECONDS))
            continue
        if isinstance(answer, GrantedPass):
            return answer
        seconds = answer


def _no_such_way(
    entries: Sequence[OfferedProvider], provider: str | None, kind: str | None
) -> WrongUse:
    wanted = " ".join(word for word in (provider, kind and f"with a {kind}") if word)
    meant = nearest(provider, [one.id for one in entries]) if provider else None
    return WrongUse(
        f"The auth server offers no login {wanted}.",
        advice=(f"Did you mean {meant}? " if meant else "") + f"There is: {_ways(entries)}.",
    )


def _ways(entries: Sequence[OfferedProvider]) -> str:
    return ", ".join(f"--provider {one.id[:40]} --with {one.kind[:40]}" for one in entries)
