"""A port of the router that is leased for a while: a state machine without I/O and without a clock.

    unmapped   no mapping; the routers' protocols are searched when `due` comes
    mapped     there is one; it is renewed when `due` comes, and lost at the end of its life

    either     granted             mapped, renewal due at half of its life
    unmapped   failed              unmapped, search due after a delay that doubles each time
    mapped     failed              mapped, renewal due at half of what is left of its life
    mapped     its life ends       unmapped, search due at once
    either     network changed     unmapped, search due at once
    either     router restarted    unmapped, search due at once

The caller says `asked` before it asks the router, then exactly one of `granted` and `failed`. It
calls `tick` when `next_deadline` has come. Every method takes the time, in seconds of one clock.

Promises:

- The router is asked at most once in `MIN_SECONDS_BETWEEN_ASKS`, whatever it answers or announces.
- An answer to a question from before a change of network or a restart of the router is not used:
  the mapping that it speaks of may be gone. The router is asked again.
- A node whose router never answers asks once in `LONGEST_DELAY_SECONDS`, for as long as it lives:
  the owner may switch the feature on at any time, and asking costs a few datagrams.
"""

from __future__ import annotations

import enum
import ipaddress
import math
from dataclasses import dataclass
from typing import Final

# A node that dies without a word leaves its mapping behind for that long. It is also a limit for
# how long the restart of a router that announces nothing goes unnoticed: until the next renewal.
# RFC 6886 recommends two hours, which is too long for both.
WANTED_LIFETIME_SECONDS: Final = 1200

# What the router grants is used within these limits only. Below, we would do nothing but renew;
# above, a mapping that the router lost would never be noticed.
SHORTEST_LIFETIME_SECONDS: Final = 60.0
LONGEST_LIFETIME_SECONDS: Final = 7200.0

# A router that restarts needs a minute or so, so the first delay is shorter than that. A router
# that cannot map ports will not learn it soon.
FIRST_DELAY_SECONDS: Final = 30.0
LONGEST_DELAY_SECONDS: Final = 1800.0

# A network that comes and goes, or a router that announces restarts without end, makes us ask no
# more often than this. Announcements are datagrams, which anybody in the network can forge.
MIN_SECONDS_BETWEEN_ASKS: Final = 10.0

# Clocks of routers run badly: RFC 6886, 3.6 expects at least 7/8 of our seconds from them, less 2.
_SLOWEST_ROUTER_CLOCK: Final = 7 / 8
_EPOCH_TOLERANCE_SECONDS: Final = 2.0


class MappingProtocol(enum.Enum):
    """The protocols in which a router can be asked for a mapping, the preferred one first."""

    PCP = "PCP"
    NAT_PMP = "NAT-PMP"
    UPNP = "UPnP"


@dataclass(frozen=True)
class Mapping:
    """TCP connections to the external port of the router are forwarded to our internal port.

    `lifetime_seconds` is how long the router keeps it without a renewal, counted from the last one,
    within the limits that we use.
    """

    protocol: MappingProtocol
    external_host: str
    external_port: int
    internal_port: int
    lifetime_seconds: float

    @property
    def is_public(self) -> bool:
        """Whether the external host is an address of the internet.

        It is not if the router is itself behind another router (double NAT, or the provider's NAT):
        then the mapping exists, but nobody on the internet gets to it.
        """
        return ipaddress.ip_address(self.external_host).is_global

    def leads_where(self, other: Mapping | None) -> bool:
        """Whether both say the same to those who want to dial us."""
        return other is not None and (
            (self.external_host, self.external_port, self.internal_port)
            == (other.external_host, other.external_port, other.internal_port)
        )


@dataclass(frozen=True)
class Grant:
    """A router's answer: a mapping and, in PCP and NAT-PMP, the seconds since the router began.

    A router begins to count when it starts or loses its mappings.
    """

    mapping: Mapping
    epoch_seconds: int | None = None


class MappingFailed(Exception):
    """A router grants no mapping. The message is a sentence for a person.

    `silent` means that nothing answered in this protocol, as opposed to an answer that refuses.
    """

    def __init__(self, reason: str, *, silent: bool = False) -> None:
        super().__init__(reason)
        self.silent = silent


def clamped_lifetime(seconds: float) -> float:
    """The lifetime that we reckon with, for one that a router grants."""
    return min(max(seconds, SHORTEST_LIFETIME_SECONDS), LONGEST_LIFETIME_SECONDS)


class Lease:
    """The state machine. `mapping` is None while there is none."""

    def __init__(self, now: float) -> None:
        self.mapping: Mapping | None = None
        self.due = now
        self._expires_at = math.inf
        self._asked_at = -math.inf
        self._failures = 0
        self._answer_is_stale = False
        self._clock: _RouterClock | None = None

    @property
    def next_deadline(self) -> float:
        """When `tick` is to be called, or the router to be asked."""
        return min(self.due, self._expires_at)

    def tick(self, now: float) -> None:
        """Let go of a mapping whose life has ended."""
        if now >= self._expires_at:
            self._lose_mapping(now)

    def asked(self, now: float) -> None:
        """The router is being asked, from now on."""
        self._asked_at = now
        self._answer_is_stale = False

    def granted(self, grant: Grant, now: float) -> None:
        """The router has answered the last question with a mapping."""
        if self._answer_is_stale:
            return
        life = grant.mapping.lifetime_seconds
        self.mapping = grant.mapping
        self._failures = 0
        self._expires_at = now + life
        self.due = self._spaced(now + life / 2)
        if grant.epoch_seconds is not None:
            self._clock = _RouterClock(now, grant.epoch_seconds)

    def failed(self, now: float) -> None:
        """The last question has brought no mapping, in no protocol."""
        if self._answer_is_stale:
            return
        self.tick(now)
        if self.mapping is not None:
            self.due = self._spaced(now + (self._expires_at - now) / 2)
            return
        delay = FIRST_DELAY_SECONDS * 2 ** min(self._failures, 16)
        self._failures += 1
        self.due = self._spaced(now + min(delay, LONGEST_DELAY_SECONDS))

    def network_changed(self, now: float) -> None:
        """The machine is in another network, or has slept."""
        self._failures = 0
        self._clock = None
        self._answer_is_stale = True
        self._lose_mapping(now)

    def epoch_announced(self, protocol: MappingProtocol, epoch_seconds: int, now: float) -> None:
        """The router has announced to everybody how long ago it began.

        Without a mapping that is good news too: a router that has just started may grant one.
        """
        if self.mapping is None:
            if epoch_seconds < LONGEST_DELAY_SECONDS:
                self.due = min(self.due, self._spaced(now))
        elif (
            protocol is self.mapping.protocol
            and self._clock is not None
            and self._clock.has_restarted(epoch_seconds, now)
        ):
            self._clock = None
            self._answer_is_stale = True
            self._lose_mapping(now)

    def _lose_mapping(self, now: float) -> None:
        self.mapping = None
        self._expires_at = math.inf
        self.due = self._spaced(now)

    def _spaced(self, due: float) -> float:
        return max(due, self._asked_at + MIN_SECONDS_BETWEEN_ASKS)


@dataclass(frozen=True)
class _RouterClock:
    """What the router said of its age, and when.

    Only an age that is too small is a restart. One that is too large is not: our own clock stands
    still while the machine sleeps.
    """

    heard_at: float
    epoch_seconds: int

    def has_restarted(self, epoch_seconds: int, now: float) -> bool:
        expected = self.epoch_seconds + (now - self.heard_at) * _SLOWEST_ROUTER_CLOCK
        return epoch_seconds < expected - _EPOCH_TOLERANCE_SECONDS
