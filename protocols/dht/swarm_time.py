"""The time that a swarm agrees on, although clocks are wrong.

Expiry is in swarm time: this machine's clock plus an offset, which is the median of what peers
say, one sample a peer. Each answer in this room carries the answerer's swarm time; half way
between asking and hearing is when it was said. The median holds as long as fewer than half of the
peers that were asked lie: then it lies within what the honest ones say. With fewer than three
peers there is no majority among them: one is believed; two are if they agree, and otherwise this
machine's own clock is the third vote.

A clock that is within a second of the median is taken to be right, and used as it is. Otherwise
everybody would follow everybody, and the errors of each measurement would add up: the time of the
whole swarm would wander off, or be led, some milliseconds with each round.

Promise: a node whose clock is hours off works, and says so once (`sample` returns a `FarOff`),
and not again until its clock was right in between.

Easy to get wrong: swarm time is not monotonic. It moves by hours when the first peers are met, in
either direction. And what a peer is told must be swarm time, not this machine's: in a swarm of
two, each would otherwise take the other's clock for ever.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from protocols.identity import PeerId

PEERS_SAMPLED = 64  # far more than 20 neighbours, and the median of them is no work
SAMPLE_LIFE_MS = 2 * 3600 * 1000  # quartz drifts some 100 ms in that time; a wrong step goes too
LONGEST_ROUND_TRIP_MS = 10_000  # half of it is how wrong a sample can be
FAR_OFF_MS = 2000  # more than links and estimates make; short-lived slots begin to suffer
AGREE_WITHIN_MS = 2000  # two peers that differ by more contradict each other
RIGHT_WITHIN_MS = 1000  # slow links and idle clocks make less, and no slot lives shorter
LARGEST_TIME_MS = 1 << 53  # beyond any clock; keeps what strangers say out of giant arithmetic


@dataclass(frozen=True)
class FarOff:
    """This machine's clock is far from the swarm's time."""

    offset_ms: int
    peers: int

    def __str__(self) -> str:
        side = "behind" if self.offset_ms > 0 else "ahead of"
        return (
            f"The clock of this machine is {_in_words(abs(self.offset_ms))} {side} the swarm's, "
            f"by what {self.peers} {'peer says' if self.peers == 1 else 'peers say'}. "
            "The directory goes by the swarm's time, so it works; set the clock all the same."
        )


@dataclass(frozen=True)
class _Sample:
    offset_ms: int
    taken_ms: int


class SwarmTime:
    """Invariant: `offset_ms` follows from the samples by `offset_from`; 0 before the first."""

    def __init__(self) -> None:
        self.offset_ms = 0
        self._samples: OrderedDict[PeerId, _Sample] = OrderedDict()
        self._far_off_was_said = False

    @property
    def peers(self) -> int:
        """How many peers the estimate stands on."""
        return len(self._samples)

    def now_ms(self, local_ms: int) -> int:
        """Swarm time, when this machine's clock says `local_ms`."""
        return local_ms + self.offset_ms

    def sample(self, peer: PeerId, said_ms: int, asked_ms: int, heard_ms: int) -> FarOff | None:
        """Take what a peer said the swarm's time was, in an exchange timed by our own clock.

        Returns what a person should be told, once. What is no measurement is left out: a round
        trip of many seconds, a clock that was put back in between, an impossible time.
        """
        if not 0 <= heard_ms - asked_ms <= LONGEST_ROUND_TRIP_MS or not (
            0 <= said_ms <= LARGEST_TIME_MS
        ):
            return None
        self._samples[peer] = _Sample(said_ms - (asked_ms + heard_ms) // 2, heard_ms)
        self._samples.move_to_end(peer)
        while len(self._samples) > PEERS_SAMPLED:
            self._samples.popitem(last=False)
        self._forget_old(heard_ms)
        self.offset_ms = offset_from([one.offset_ms for one in self._samples.values()])
        return self._say_once()

    def _forget_old(self, local_ms: int) -> None:
        """Drop what was measured long ago, or by a clock that has been put back since."""
        for peer, one in list(self._samples.items()):
            if not 0 <= local_ms - one.taken_ms <= SAMPLE_LIFE_MS:
                del self._samples[peer]

    def _say_once(self) -> FarOff | None:
        if abs(self.offset_ms) <= FAR_OFF_MS // 2:
            self._far_off_was_said = False
        if abs(self.offset_ms) <= FAR_OFF_MS or self._far_off_was_said:
            return None
        self._far_off_was_said = True
        return FarOff(self.offset_ms, len(self._samples))


def offset_from(samples: Sequence[int]) -> int:
    """The offset that these samples (at least one) stand for.

    Of an even number the median is the mean of the middle two: both lie within what the honest
    say as long as fewer than half lie.
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
