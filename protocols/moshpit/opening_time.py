"""How long the transfers of an attempt may take to open, theirs to us and ours to them.

Every member opens one to every reducer at the same time, and the first of them are full of values
before the last are open. On a slow link what is small then waits behind that, at both ends and in
both directions. So who has not opened, or not accepted, is waited for as long as something else
comes from it; who is silent is given up as soon as ever.

Easy to get wrong: a member that says something now and then and never opens must not hold up the
others. So that longer wait is no longer than the transfers that are open show the links to be full
(lateness.py), and never longer than `LONGEST_OPENING_SECONDS`.
"""

from __future__ import annotations

import trio

from protocols.moshpit.attempt import Attempt
from protocols.moshpit.lateness import STEP_SECONDS
from protocols.moshpit.part_messages import STALL_SECONDS

OPEN_SECONDS = 6.0
"""For dialling and being accepted: eight round trips of a bad link (600 ms), and the time by which
two members learn at different moments that the attempt has begun."""

LONGEST_OPENING_SECONDS = 15.0
"""For members from which other bytes come: three round trips through queues of 2.5 s each way, as
23 connections with windows of 32 KiB fill them at both ends of 5 Mb/s."""


async def watch_openings(attempt: Attempt) -> None:
    """Name who does not open or accept in time. Returns when all transfers are open."""
    while late := attempt.not_arrived() | attempt.not_accepted():
        opens_by, member = min((_opens_by(attempt, member), member) for member in late)
        if opens_by > trio.current_time():
            await trio.sleep_until(opens_by)
            continue
        within = f"within {opens_by - attempt.began:.0f} seconds"
        if member in attempt.not_arrived():
            attempt.suspect(member, "absent", f"It has not opened its transfer {within}.")
        else:
            attempt.suspect(member, "unreachable", f"It has not accepted our transfer {within}.")
        return


def _opens_by(attempt: Attempt, member: int) -> float:
    """When this member is given up, as far as is known now."""
    heard = attempt.last_heard.get(member, attempt.began)
    patience = max(attempt.began + OPEN_SECONDS, heard + STALL_SECONDS)
    longest = OPEN_SECONDS + STEP_SECONDS + attempt.lateness.usual_seconds()
    return min(patience, attempt.began + min(longest, LONGEST_OPENING_SECONDS))
