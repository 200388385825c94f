"""The auth server's time on a machine whose clock may be wrong, may be set, and may stop in sleep.

Tokens, requests and revocations are judged by the auth server's time. It comes signed (with each
pass, and from `/v1/time`), and is continued here by a clock that cannot be set. So a wrong local
clock locks nobody out, whether it is wrong from the start, is corrected meanwhile, or drifts. The
node only reports the offset.

Once measured, `now_ms` does not follow the wall clock if there is a clock that goes on through a
suspend (Linux has one). A large offset is reported once, and again only if it has changed.

Most monotonic clocks stop while the machine sleeps. If there is no better one, and the wall clock
gets ahead of it by more than a step of NTP, that means sleep, and the wall clock is followed.
`wants_measuring` then says that the result is a guess.
"""

from __future__ import annotations

from dataclasses import dataclass

from node.net import Clocks

# The error of a measurement is at most half a round trip. With a longer one than this it would be
# worse than the clocks of most machines, and a third of the tolerance of requests.
LONGEST_ROUND_TRIP_MS = 20_000
# The offset that is reported: more than a slow link causes, a fifteenth of the tolerance of
# requests.
FAR_OFF_MS = 2_000
# A jump of the wall clock against the clock that cannot be set. NTP slews by half a millisecond a
# second and steps only above 128 ms. A second is neither: a person set the clock, or the machine
# slept.
JUMP_MS = 1_000
DRIFT_PER_SECOND_MS = 0.1  # 100 ppm: a bad quartz in a warm laptop


@dataclass(frozen=True)
class Moment:
    """Both clocks at once."""

    wall_ms: int
    elapsed_ms: int


@dataclass(frozen=True)
class ClockIsOff:
    """A message for a person about their clock. `offset_ms` is server time minus local time."""

    offset_ms: int

    def __str__(self) -> str:
        side = "behind" if self.offset_ms > 0 else "ahead of"
        return (
            f"The clock of this machine is {distance(self.offset_ms)} {side} the auth server's. "
            "potluck uses the server's time, so nothing is lost; correct the clock anyway."
        )


class ServerTime:
    """The auth server's time.

    Invariant: it is `_server_ms + (elapsed - _at.elapsed_ms)` once measured. Before that it is the
    wall clock plus the offset from the last run.
    """

    def __init__(self, clocks: Clocks, known_offset_ms: int = 0) -> None:
        self._clocks = clocks
        self._known_offset_ms = known_offset_ms
        self._at = self.moment()
        self._server_ms = 0
        self._uncertain_ms: float | None = None  # None: not measured in this run
        self._said_ms = 0
        self.wants_measuring = True
        """Whether server time is a guess: not measured yet, or the machine has slept."""

    def moment(self) -> Moment:
        return Moment(int(self._clocks.wall() * 1000), int(self._clocks.elapsed() * 1000))

    @property
    def is_measured(self) -> bool:
        return self._uncertain_ms is not None

    @property
    def offset_ms(self) -> int:
        """Server time minus this machine's wall clock now."""
        now = self.moment()
        return self._server_time_at(now) - now.wall_ms

    def now_ms(self) -> int:
        return self._server_time_at(self.moment())

    def _server_time_at(self, now: Moment) -> int:
        if self._uncertain_ms is None:
            return now.wall_ms + self._known_offset_ms
        self._notice_sleep(now)
        return self._server_ms + (now.elapsed_ms - self._at.elapsed_ms)

    def _notice_sleep(self, now: Moment) -> None:
        """Follow the wall clock if only that has gone on through a suspend."""
        if self._clocks.counts_sleep:
            return
        wall_ms = now.wall_ms - self._at.wall_ms
        elapsed_ms = now.elapsed_ms - self._at.elapsed_ms
        if abs(wall_ms - elapsed_ms) <= JUMP_MS:
            return
        # forward: it slept, and server time went on. Back: somebody set the clock, which says
        # nothing about server time.
        self._server_ms += max(wall_ms, elapsed_ms)
        self._at = now
        self.wants_measuring = True

    def is_at_least(self, server_ms: int) -> None:
        """Server time is past this: a document that the server signed then has arrived."""
        behind_ms = server_ms - self.now_ms()
        if behind_ms <= 0:
            return
        if self._uncertain_ms is None:
            self._known_offset_ms += behind_ms
        else:
            self._server_ms += behind_ms
        self.wants_measuring = True

    def measured(self, server_ms: int, asked: Moment, heard: Moment) -> bool:
        """Take the server's time, given between two moments. False if it is of no use.

        A measurement on a slow link does not replace a better one that agrees with it.
        """
        round_trip_ms = heard.elapsed_ms - asked.elapsed_ms
        if not 0 <= round_trip_ms <= LONGEST_ROUND_TRIP_MS:
            return False
        middle_ms = (asked.elapsed_ms + heard.elapsed_ms) // 2
        now_ms = server_ms + (heard.elapsed_ms - middle_ms)
        uncertain_ms = round_trip_ms / 2
        self.wants_measuring = False
        if self._uncertain_ms is not None:
            age_seconds = (heard.elapsed_ms - self._at.elapsed_ms) / 1000
            held_uncertain_ms = self._uncertain_ms + DRIFT_PER_SECOND_MS * max(0.0, age_seconds)
            agrees = abs(now_ms - self._server_time_at(heard)) <= uncertain_ms + held_uncertain_ms
            if agrees and held_uncertain_ms < uncertain_ms:
                return True
        self._server_ms, self._at, self._uncertain_ms = now_ms, heard, uncertain_ms
        self._known_offset_ms = now_ms - heard.wall_ms
        return True

    def news(self) -> ClockIsOff | None:
        """The message for a person now; None if there is none, or it was given before."""
        offset_ms = self.offset_ms
        if abs(offset_ms) <= FAR_OFF_MS:
            self._said_ms = 0
            return None
        if abs(offset_ms - self._said_ms) <= FAR_OFF_MS:
            return None
        self._said_ms = offset_ms
        return ClockIsOff(offset_ms)


def distance(milliseconds: int) -> str:
    """The offset of a clock in words for a person."""
    seconds = abs(milliseconds) / 1000
    for unit, length in (("days", 86_400.0), ("hours", 3_600.0), ("minutes", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1f} seconds"
