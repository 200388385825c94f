"""Renew the token for as long as the node runs, without a person.

The schedule (renewal_schedule.py) says when. Here it is asked, and the two ways in which it can
fail are kept apart: an outage is waited out, and said, and said again when it begins to matter; a
refusal, which only the auth key can sign, ends the membership at once.

Easy to get wrong: a machine that sleeps wakes up long after its timers should have rung, because
trio's clock sleeps with it. So nobody sleeps here for longer than LOOK_AGAIN_SECONDS, and what is
due is judged by server time.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import trio

from auth.errors import AuthError
from auth.refusals import AccessRefused, Reason
from node.access.auth_client import AccessDenied, AuthClient
from node.access.auth_http import Outage
from node.access.membership_ended import MembershipEnded
from node.access.renewal_schedule import Standing
from protocols.errors import PotluckError

if TYPE_CHECKING:
    from node.access.membership import Membership

LOOK_AGAIN_SECONDS = 10.0

log = logging.getLogger("potluck.access")


async def renew_for_ever(membership: Membership, client: AuthClient) -> None:
    """Until cancelled; MembershipEnded when the auth server refuses."""
    told = Standing.VALID
    while True:
        await _until_due_or_changed(membership, told)
        if membership.schedule.seconds_until_next(membership.server_time.now_ms()) <= 0:
            await _renew(membership, client)
        told = _tell_standing(membership, told)


async def _until_due_or_changed(membership: Membership, told: Standing) -> None:
    """Wait for the next renewal, a new standing of the token, or somebody in a hurry."""
    while membership.standing is told:
        hurry, schedule = membership.hurry, membership.schedule
        now_ms = membership.server_time.now_ms()
        seconds = schedule.seconds_until_next(now_ms)
        if seconds <= 0:
            return
        seconds = min(seconds, schedule.seconds_until_standing_changes(now_ms), LOOK_AGAIN_SECONDS)
        with trio.move_on_after(seconds):
            await hurry.wait()


async def _renew(membership: Membership, client: AuthClient) -> None:
    was_in_trouble = bool(membership.trouble)
    try:
        granted = await client.renew(membership.access_pass.token)
        await membership.adopt(granted.signed, granted.opened)
    except AccessDenied as denied:
        raise await _ended(membership, denied) from None
    except (Outage, PotluckError, AuthError) as error:
        if membership.is_revoked:
            # nobody takes our token any more, and nobody is there to give us another
            raise await _ended(membership, AccessRefused(Reason.REVOKED)) from None
        _note_outage(membership, error)
        return
    if was_in_trouble:
        log.warning("the auth server answers again; the token is renewed")


async def _ended(membership: Membership, refused: AccessDenied | AccessRefused) -> MembershipEnded:
    ended = MembershipEnded(
        f"This node is no longer let into {membership.run_name}: {refused.what}",
        why=refused.why,
        advice=refused.advice,
    )
    await membership.remember_refusal(str(ended))
    return ended


def _note_outage(membership: Membership, error: PotluckError | AuthError) -> None:
    """Remember it, plan the next attempt, and say so the first, second, fourth, … time."""
    membership.trouble = str(error)
    server_said = error.retry_seconds if isinstance(error, Outage) else 0.0
    failures = membership.schedule.failures + 1
    now_ms = membership.server_time.now_ms()
    seconds = membership.schedule.failed(now_ms, server_said)
    if failures & (failures - 1) == 0:
        log.warning("the token is not renewed yet: %s It is tried again in %.1f s.", error, seconds)


def _tell_standing(membership: Membership, told: Standing) -> Standing:
    """Say that the token has expired, or that even the grace is over; the standing now."""
    standing = membership.standing
    if standing is told or standing is Standing.VALID:
        return standing
    validity = membership.schedule.validity
    if standing is Standing.GRACE:
        log.warning(
            "the token has expired while the auth server is away; the others take it for another "
            "%.0f s (the grace of %s)",
            (validity.over_ms - membership.server_time.now_ms()) / 1000,
            membership.run_name,
        )
    else:
        log.warning(
            "the token and its grace are over: this node is outside of %s until the auth server "
            "can be asked again, and goes on trying",
            membership.run_name,
        )
    return standing
