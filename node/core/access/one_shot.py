"""A membership for the few seconds of one command, if no node runs that could be asked."""

from __future__ import annotations

import logging

import trio

from auth.errors import AuthError
from node.core.access.auth_client import AccessDenied
from node.core.access.membership import Membership
from node.core.access.renewal import TokenStanding
from protocols.errors import PotluckError

# A person waits for the answer. Without the server the old token is tried, and refused with words.
PATIENCE_SECONDS = 10.0

log = logging.getLogger("potluck.access")


async def renew_if_over(member: Membership) -> None:
    """Get a new token if this one has expired. AccessDenied if the server refuses."""
    if member.standing is TokenStanding.VALID and not member.kept.refused:
        return
    with trio.move_on_after(PATIENCE_SECONDS):
        try:
            async with member.open_client() as client:
                granted = await client.renew(member.access_pass.token)
                await member.adopt(granted.signed, granted.opened)
        except AccessDenied:
            raise
        except (PotluckError, AuthError) as error:
            log.warning("the access token has expired and is not renewed: %s", error)
