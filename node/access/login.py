"""Logging in: from an invite to a pass, through whichever way the auth server offers.

    about = await client.meet()                  # its keys are checked against the invite
    entry = choose_provider(about.providers, has_code=bool(code))
    granted = await finish(client, entry, code, tell, wait_seconds)

Only `enrol` writes, and nothing is left behind by leaving in the middle: a login that was begun
and not finished ends by itself at the server.

Easy to get wrong: a person needs minutes, and a network may fail in that time. An outage between
two questions is waited out until the login's own end; only a signed refusal ends it early.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import trio

from auth.invites import Invite
from node.access.auth_client import (
    AccessDenied,
    AuthClient,
    Granted,
    LoginExpired,
    PendingLogin,
    ProviderEntry,
    WrongServer,
    open_auth_client,
)
from node.access.auth_http import Outage
from node.access.pass_file import KeptPass, keep_pass
from node.access.server_time import ServerTime, machine_clocks
from node.wrong_use import WrongUse, nearest
from protocols.identity import Identity

CODE, DEVICE, BROWSER = "code", "device", "browser"

# How much a server that is asked too often may slow us down; the code itself lives for minutes.
LONGEST_WAIT_SECONDS = 60.0

Tell = Callable[[ProviderEntry, PendingLogin], None]


def kept_pass(invite: Invite, granted: Granted, time: ServerTime) -> KeptPass:
    """What is kept of a login."""
    return KeptPass(
        run=invite.run,
        access_pass=granted.signed,
        fingerprint=invite.fingerprint,
        auth_url=granted.opened.access_pass.auth_url or invite.auth_url,
        pin=invite.pin,
        clock_offset_ms=time.offset_ms,
    )


async def enrol(identity: Identity, invite: Invite, pass_file: Path) -> None:
    """Log in with the code that is in the invite, where no person is, and keep the pass."""
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
    entries: Sequence[ProviderEntry],
    *,
    has_code: bool,
    provider: str | None = None,
    kind: str | None = None,
) -> ProviderEntry:
    """The way to log in that was asked for, or the one that asks least of a person."""
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
            f"This version of potluck cannot log in in the way {possible[0].kind[:40]!r}.",
            advice="Update potluck, or take another way: " + _ways(entries),
        )
    return min(known, key=lambda one: order.index(one.kind))


async def finish(
    client: AuthClient, entry: ProviderEntry, code: str, tell: Tell, wait_seconds: float
) -> Granted:
    """Log in by this way; `tell` shows a person what to do where one is needed.

    AccessDenied, LoginExpired, Outage.
    """
    begun = await client.log_in(entry, code if entry.kind == CODE else "")
    if isinstance(begun, Granted):
        return begun
    tell(entry, begun)
    with trio.move_on_after(min(wait_seconds, max(begun.expires_in, 1.0))):
        return await _wait_for_person(client, begun)
    raise LoginExpired(
        "Nobody has finished the login in time.",
        why=f"It was good for {min(wait_seconds, begun.expires_in):.0f} s.",
        advice="Run `potluck login` again, and be quicker; --timeout sets how long it waits.",
    )


async def _wait_for_person(client: AuthClient, begun: PendingLogin) -> Granted:
    seconds = max(1.0, min(begun.interval, LONGEST_WAIT_SECONDS))
    while True:
        await trio.sleep(seconds)
        try:
            answer = await client.poll_login(begun)
        except (AccessDenied, LoginExpired, WrongServer):
            raise
        except Outage as outage:
            seconds = max(seconds, min(outage.retry_seconds, LONGEST_WAIT_SECONDS))
            continue
        if isinstance(answer, Granted):
            return answer
        seconds = answer


def _no_such_way(
    entries: Sequence[ProviderEntry], provider: str | None, kind: str | None
) -> WrongUse:
    wanted = " ".join(word for word in (provider, kind and f"with a {kind}") if word)
    meant = nearest(provider, [one.id for one in entries]) if provider else None
    return WrongUse(
        f"The auth server has no way to log in {wanted}.",
        advice=(f"Did you mean {meant}? " if meant else "") + f"There is: {_ways(entries)}.",
    )


def _ways(entries: Sequence[ProviderEntry]) -> str:
    return ", ".join(f"--provider {one.id[:40]} --with {one.kind[:40]}" for one in entries)
