"""Keep server time measured while a node runs, and tell a person once when their clock is wrong."""

from __future__ import annotations

import logging

import trio

from node.access.auth_client import AuthClient
from node.access.auth_http import Outage
from node.access.server_time import ServerTime

# How often it is looked whether the machine has slept, or its clock was set. Requests are refused
# when they are 30 s off, and a machine that wakes up is soon asked something.
LOOK_SECONDS = 5.0
LONGEST_RETRY_SECONDS = 60.0

log = logging.getLogger("potluck.access")


async def keep_time(server_time: ServerTime, client: AuthClient) -> None:
    """Measure whenever what is known is a guess. For ever.

    Each renewal measures as well, so this asks at the start and after a sleep only.
    """
    seconds = LOOK_SECONDS
    while True:
        if server_time.wants_measuring:
            try:
                await client.measure_time()
                seconds = LOOK_SECONDS
            except Outage as outage:
                log.debug("the auth server could not be asked for the time: %s", outage)
                seconds = min(LONGEST_RETRY_SECONDS, 2 * seconds)
        news = server_time.news()
        if news is not None:
            log.warning("%s", news)
        await trio.sleep(seconds)
