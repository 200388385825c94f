"""A node's membership in a few words: for `potluck status`, `whoami` and the start of a node."""

from __future__ import annotations

from typing import TYPE_CHECKING

from node.access.server_time import FAR_OFF_MS, distance

if TYPE_CHECKING:
    from node.status import MembershipStatus

OPEN_RUN = (
    "OPEN RUN: there is no auth server, everybody with a key may take part. "
    "`potluck login INVITE` makes this node part of a run that is not open."
)


def in_one_line(membership: MembershipStatus) -> str:
    """Who, in which run, for how long."""
    if membership.open:
        return OPEN_RUN
    roles = ", ".join(membership.roles)
    return f"{membership.username} ({roles}) in {membership.run}, {token_words(membership)}"


def token_words(membership: MembershipStatus) -> str:
    """How the token stands."""
    from node.commands.status_view import duration  # which imports us

    left = membership.expires_in_seconds
    if membership.standing == "valid":
        renewed = (
            f"renewed in {duration(membership.renewed_in_seconds)}"
            if membership.renewed_in_seconds > 0
            else "being renewed"
        )
        return f"token good for {duration(left)}, {renewed}"
    if membership.standing == "grace":
        more = duration(left + membership.grace_seconds)
        return f"token expired {duration(-left)} ago; taken for another {more}"
    return f"token expired {duration(-left)} ago: outside the run until it is renewed"


def clock_words(membership: MembershipStatus) -> str:
    """How far this machine's clock is off; empty if there is nothing to say."""
    offset = membership.clock_offset_ms
    if abs(offset) <= FAR_OFF_MS:
        return ""
    side = "behind" if offset > 0 else "ahead of"
    when = "" if membership.clock_measured else " (when it was measured last)"
    return f"this machine's is {distance(offset)} {side} the auth server's{when}"
