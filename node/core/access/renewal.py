"""Renewing the token for as long as the node runs, without a person.

`RenewalSchedule` decides when (pure; times are server time in ms). A token is renewed after two
thirds of its life, a little earlier or later at random, so that nodes which started together do not
renew together for ever. If the auth server cannot be asked, the node asks again with growing delay
and goes on: until the token expires, and then for the grace that the server has stated, which every
peer grants. After that it is outside and says so, but still keeps asking: the outage may end.

`renew_for_ever` asks, and distinguishes two kinds of failure. An outage is waited out and logged,
and logged again when it begins to matter. A refusal, which only the auth key can sign, ends the
membership at once.

Delays follow the life of the token, because a delay that suits an hour is too slow for a token of
two minutes. trio's clock stops while the machine sleeps, so a timer may be long overdue after a
sleep. So no sleep here is longer than LOOK_AGAIN_SECONDS, and server time decides what is due.
"""

from __future__ import annotations

import enum
import logging
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from auth.errors import AuthError
from auth.refusals import AccessRefused, Reason
from node.core.access.auth_client import AccessDenied, AuthClient
from node.core.access.auth_http import Outage
from protocols.errors import PotluckError, Refused

if TYPE_CHECKING:
    from node.core.access.membership import Membership


RENEWED_AT = 2 / 3
# Of its life, to either side: four minutes of an hour, which spreads a thousand nodes that started
# together to four a second.
JITTER = 1 / 15

FIRST_RETRY_SECONDS = 5.0
LONGEST_RETRY_SECONDS = 300.0
# A third of a token's life is left when it is due. Retries of at most a thirtieth of its life leave
# room for ten, even for a token that lives for minutes.
LONGEST_RETRY_OF_LIFE = 1 / 30
SHORTEST_RETRY_SECONDS = 0.2
# A random part of each delay, so that not all nodes come at once when the auth server returns.
RETRY_JITTER = 0.5


class TokenStanding(enum.Enum):
    """The standing of a token at one moment."""

    VALID = "valid"
    GRACE = "grace"  # expired, and still valid because the server may be away
    OVER = "over"


@dataclass(frozen=True)
class Validity:
    """A token's times."""

    issued_ms: int
    expires_ms: int
    grace_ms: int

    @property
    def life_ms(self) -> int:
        return max(1, self.expires_ms - self.issued_ms)

    @property
    def over_ms(self) -> int:
        """From this time on no peer accepts it."""
        return self.expires_ms + self.grace_ms

    def standing(self, now_ms: int) -> TokenStanding:
        if now_ms < self.expires_ms:
            return TokenStanding.VALID
        return TokenStanding.GRACE if now_ms < self.over_ms else TokenStanding.OVER


@dataclass
class RenewalSchedule:
    """The next time to ask for a new token. Invariant: `next_ms` is that time, in server time."""

    validity: Validity
    chance: random.Random
    failures: int = 0
    next_ms: int = field(init=False)

    def __post_init__(self) -> None:
        life = self.validity.life_ms
        part = RENEWED_AT + JITTER * (2 * self.chance.random() - 1)
        self.next_ms = self.validity.issued_ms + int(life * part)

    def failed(self, now_ms: int, server_said_seconds: float = 0.0) -> float:
        """A request failed; return the seconds until the next one."""
        longest = min(LONGEST_RETRY_SECONDS, self.validity.life_ms / 1000 * LONGEST_RETRY_OF_LIFE)
        delay = min(longest, FIRST_RETRY_SECONDS * float(2 ** min(self.failures, 30)))
        delay *= 1 - RETRY_JITTER * self.chance.random()
        delay = max(delay, SHORTEST_RETRY_SECONDS, min(server_said_seconds, LONGEST_RETRY_SECONDS))
        self.failures += 1
        self.next_ms = now_ms + int(delay * 1000)
        return delay

    def at_once(self, when_ms: int) -> None:
        """Ask at this time at the latest: the token is not valid, or may not be."""
        self.next_ms = min(self.next_ms, when_ms)

    def seconds_until_next(self, now_ms: int) -> float:
        return max(0.0, (self.next_ms - now_ms) / 1000)

    def seconds_until_standing_changes(self, now_ms: int) -> float:
        """Until the token expires or its grace ends; infinite after both."""
        for moment_ms in (self.validity.expires_ms, self.validity.over_ms):
            if now_ms < moment_ms:
                return (moment_ms - now_ms) / 1000
        return float("inf")


LOOK_AGAIN_SECONDS = 10.0

log = logging.getLogger("potluck.access")


async def renew_for_ever(membership: Membership, client: AuthClient) -> None:
    """Renew until cancelled; MembershipEnded if the auth server refuses."""
    told = TokenStanding.VALID
    while True:
        await _until_due_or_changed(membership, told)
        if membership.schedule.seconds_until_next(membership.server_time.now_ms()) <= 0:
            await _renew(membership, client)
        told = _tell_standing(membership, told)


async def _until_due_or_changed(membership: Membership, told: TokenStanding) -> None:
    """Wait for the next renewal, a new standing of the token, or a changed schedule."""
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
        access_pass = membership.access_pass
        # A request that failed may have used the challenge up.
        is_used = membership.schedule.failures > 0
        challenge = b"" if is_used else access_pass.next_challenge
        granted = await client.renew(access_pass.token, challenge)
        await membership.adopt(granted.signed, granted.opened)
    except AccessDenied as denied:
        raise await _ended(membership, denied) from None
    except (Outage, PotluckError, AuthError) as error:
        if membership.following.revocations.refuses_its_owner(membership.token):
            # no peer accepts our token, and no server can give us another
            raise await _ended(membership, AccessRefused(Reason.REVOKED)) from None
        _note_outage(membership, error)
        return
    if was_in_trouble:
        log.warning("the auth server answers again; the token is renewed")


async def _ended(membership: Membership, refused: AccessDenied | AccessRefused) -> MembershipEnded:
    ended = MembershipEnded(
        f"This node may no longer take part in {membership.run_name}: {refused.what}",
        why=refused.why,
        advice=refused.advice,
    )
    await membership.remember_refusal(str(ended))
    return ended


def _note_outage(membership: Membership, error: PotluckError | AuthError) -> None:
    """Store the error, plan the next attempt, and log the first, second, fourth, … failure."""
    membership.trouble = str(error)
    server_said = error.retry_seconds if isinstance(error, Outage) else 0.0
    failures = membership.schedule.failures + 1
    now_ms = membership.server_time.now_ms()
    seconds = membership.schedule.failed(now_ms, server_said)
    if failures & (failures - 1) == 0:
        log.warning("the token is not renewed yet: %s It is tried again in %.1f s.", error, seconds)


def _tell_standing(membership: Membership, told: TokenStanding) -> TokenStanding:
    """Log that the token has expired, or that the grace is over; return the current standing."""
    standing = membership.standing
    if standing is told or standing is TokenStanding.VALID:
        return standing
    validity = membership.schedule.validity
    if standing is TokenStanding.GRACE:
        log.warning(
            "the token has expired while the auth server is away; the others accept it for another "
            "%.0f s (the grace of %s)",
            (validity.over_ms - membership.server_time.now_ms()) / 1000,
            membership.run_name,
        )
    else:
        log.warning(
            "the token and its grace are over: this node is outside of %s until the auth server "
            "answers again, and keeps asking",
            membership.run_name,
        )
    return standing


# The end of a membership: the only thing in access that ends a node.


class MembershipEnded(Refused):
    """The auth server refused, under its signature: this node no longer takes part."""
