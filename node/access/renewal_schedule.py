"""When to renew a token, and where a node stands meanwhile. Pure: times are server time in ms.

A token is renewed at two thirds of its life, a little earlier or later by chance, so that nodes
which started together do not come together for ever. If the auth server cannot be asked, the
node asks again with growing delay and goes on as before: until the token expires, then for the
grace that the server has stated, which every peer grants. After that it is outside, says so, and
still keeps asking: the outage may end.

Easy to get wrong: a refusal is not an outage. This module knows only outages; whoever is refused
stops at once (renewing.py). And delays follow the life of the token: what suits an hour is too
slow for a token of two minutes.
"""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass, field

RENEWED_AT = 2 / 3
# Of its life, to either side: four minutes of an hour, over which a thousand nodes of one start
# spread to four a second.
JITTER = 1 / 15

FIRST_RETRY_SECONDS = 5.0
LONGEST_RETRY_SECONDS = 300.0
# A third of a token's life is left when it is due. Retries that are shorter than a thirtieth of
# its life leave room for ten of them, also where a token lives for minutes.
LONGEST_RETRY_OF_LIFE = 1 / 30
SHORTEST_RETRY_SECONDS = 0.2
# A random part of each delay, so that an auth server that comes back is not met by all at once.
RETRY_JITTER = 0.5


class Standing(enum.Enum):
    """Where a token stands at one moment."""

    VALID = "valid"
    GRACE = "grace"  # expired, and still good because the server may be away
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
        """From here on nobody takes it."""
        return self.expires_ms + self.grace_ms

    def standing(self, now_ms: int) -> Standing:
        if now_ms < self.expires_ms:
            return Standing.VALID
        return Standing.GRACE if now_ms < self.over_ms else Standing.OVER


@dataclass
class RenewalSchedule:
    """The next time to ask for a new token. Invariant: `next_ms` is when, in server time."""

    validity: Validity
    chance: random.Random
    failures: int = 0
    next_ms: int = field(init=False)

    def __post_init__(self) -> None:
        life = self.validity.life_ms
        part = RENEWED_AT + JITTER * (2 * self.chance.random() - 1)
        self.next_ms = self.validity.issued_ms + int(life * part)

    def failed(self, now_ms: int, server_said_seconds: float = 0.0) -> float:
        """Asking came to nothing; the seconds until the next time."""
        longest = min(LONGEST_RETRY_SECONDS, self.validity.life_ms / 1000 * LONGEST_RETRY_OF_LIFE)
        delay = min(longest, FIRST_RETRY_SECONDS * float(2 ** min(self.failures, 30)))
        delay *= 1 - RETRY_JITTER * self.chance.random()
        delay = max(delay, SHORTEST_RETRY_SECONDS, min(server_said_seconds, LONGEST_RETRY_SECONDS))
        self.failures += 1
        self.next_ms = now_ms + int(delay * 1000)
        return delay

    def at_once(self, when_ms: int) -> None:
        """Ask then at the latest: the token is of no use, or may not be."""
        self.next_ms = min(self.next_ms, when_ms)

    def seconds_until_next(self, now_ms: int) -> float:
        return max(0.0, (self.next_ms - now_ms) / 1000)

    def seconds_until_standing_changes(self, now_ms: int) -> float:
        """Until the token expires or its grace ends; infinite when both are past."""
        for moment_ms in (self.validity.expires_ms, self.validity.over_ms):
            if now_ms < moment_ms:
                return (moment_ms - now_ms) / 1000
        return float("inf")
