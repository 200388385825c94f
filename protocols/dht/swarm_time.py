"""The time that a swarm agrees on, though clocks are wrong.

Expiry is in swarm time: this machine's clock plus an offset, which is the median of one sample from
each peer. Each answer in the directory carries the answerer's swarm time, which is taken as that of
the middle between request and answer. If fewer than half of the asked peers lie, the median is
within the values of the honest ones. With fewer than three peers there is no majority. One peer is
believed. Two are if they agree; otherwise this machine's own clock is the third vote.

A clock within a second of the median counts as right, and is used as it is. Otherwise all nodes
would follow each other, and the measurement errors would add up: the time of the whole swarm would
drift, or could be led away, by some milliseconds with each round.

A node whose clock is hours off works. It says so once (`sample` returns a `FarOff`), and again only
if its clock was right in between.

Swarm time is not monotonic. It moves by hours when the first peers are met, in either direction. A
node must tell peers the swarm time, not its own clock: otherwise in a swarm of two, each would
follow the other's clock forever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from auth.bounded_map import BoundedMap
from protocols.identity import PeerId

PEERS_SAMPLED = 64  # far more than 20 neighbours, and cheap to take the median of
SAMPLE_LIFE_MS = 2 * 3600 * 1000  # quartz drifts some 100 ms meanwhile; wrong steps go too
LONGEST_ROUND_TRIP_MS = 10_000  # half of it is the largest error of a sample
FAR_OFF_MS = 2000  # more than links and estimates cause; short-lived slots begin to suffer
AGREE_WITHIN_MS = 2000  # two peers that differ by more disagree
RIGHT_WITHIN_MS = 1000  # slow links and idle clocks err by less, and no slot lives shorter
LARGEST_TIME_MS = 1 << 53  # later than any clock; limits the numbers that strangers can send


@dataclass(frozen=True)
class FarOff:
    """This machine's clock is far from swarm time."""

    offset_ms: int
    peers: int

    def __str__(self) -> str:
        side = "behind" if self.offset_ms > 0 else "ahead of"
        return (
            f"The clock of this machine is {_in_words(abs(self.offset_ms))} {side} the swarm's, "
            f"according to {self.peers} {'peer' if self.peers == 1 else 'peers'}. "
            "The directory uses the swarm's time, so it works, but set the clock."
        )


@dataclass(frozen=True)
class _Sample:
    offset_ms: int
    taken_ms: int


class SwarmTime:
    """Invariant: `offset_ms` follows from the samples by `offset_from`; 0 before the first."""

    def __init__(self) -> None:
        self.offset_ms = 0
        self._samples = BoundedMap[PeerId, _Sample](PEERS_SAMPLED)
        self._has_warned = False
        self._ahead_ms = 0
        """How far this machine's clock was ahead of the running one at the last sample."""

    @property
    def peers(self) -> int:
        """How many peers the estimate is from."""
        return len(self._samples)

    def now_ms(self, local_ms: int) -> int:
        """Swarm time at the time `local_ms` of this machine's clock."""
        return local_ms + self.offset_ms

    def sample(
        self, peer: PeerId, said_ms: int, asked_ms: int, heard_ms: int, running_ms: int
    ) -> FarOff | None:
        """Take a peer's swarm time from an exchange that our own clock has timed.

        `running_ms` is the time now of a clock that nobody sets.

        May return a warning for a person, once. Invalid measurements are ignored: a round trip of
        many seconds, a clock that was set back in between, an impossible time.
        """
        if not 0 <= heard_ms - asked_ms <= LONGEST_ROUND_TRIP_MS or not (
            0 <= said_ms <= LARGEST_TIME_MS
        ):
            return None
        self._forget_outdated(heard_ms, running_ms)
        self._samples[peer] = _Sample(said_ms - (asked_ms + heard_ms) // 2, heard_ms)
        self.offset_ms = offset_from([one.offset_ms for one in self._samples.values()])
        return self._warn_once()

    def _forget_outdated(self, local_ms: int, running_ms: int) -> None:
        """Drop samples that are old, or all if this machine's clock was set since the last one."""
        before, self._ahead_ms = self._ahead_ms, local_ms - running_ms
        if abs(self._ahead_ms - before) > RIGHT_WITHIN_MS:
            self._samples.clear()
        for peer, one in list(self._samples.items()):
            if local_ms - one.taken_ms > SAMPLE_LIFE_MS:
                del self._samples[peer]

    def _warn_once(self) -> FarOff | None:
        if abs(self.offset_ms) <= FAR_OFF_MS // 2:
            self._has_warned = False
        if abs(self.offset_ms) <= FAR_OFF_MS or self._has_warned:
            return None
        self._has_warned = True
        return FarOff(self.offset_ms, len(self._samples))


def offset_from(samples: Sequence[int]) -> int:
    """The offset from these samples (at least one).

    For an even number the median is the mean of the middle two. Both are within the honest values
    if fewer than half lie.
    """
    votes = sorted(samples)
    if len(votes) == 2 and votes[1] - votes[0] > AGREE_WITHIN_MS:
        votes = sorted([*votes, 0])
    middle = len(votes) // 2
    median = votes[middle] if len(votes) % 2 else (votes[middle - 1] + votes[middle]) // 2
    return 0 if abs(median) <= RIGHT_WITHIN_MS else median


def _in_words(milliseconds: int) -> str:
    seconds = milliseconds / 1000
    for unit, length in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1f} seconds"
