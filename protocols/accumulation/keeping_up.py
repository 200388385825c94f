"""Whether a link carries enough to catch up with a run, and how much would be enough. Pure.

    demand = Demand(state_bytes, result_bytes, epoch_seconds)
    demand.needed_bytes_per_second

A newcomer fetches a state of S bytes and, for each step that the run makes meanwhile, a result of V
bytes, with a link of b bytes a second, while the run makes a step every E seconds. Of what its link
carries the part r = V / (b E) goes to new results, so it is where the run is after S / (b (1 - r)).
What it cannot hold beside the state by then it makes steps of on the way. With MOST_OF_LINK for new
results that takes ten times as long as the state alone, and

    r <= MOST_OF_LINK,   b >= V / E / MOST_OF_LINK

Without results (a run over a grid has none that could be checked) the state itself has to come in
the time of one step: b >= S / E.

Measured is what comes while this peer wants something: the time in which it has all that there is
says nothing of its link. And it is measured over all fetches until this peer makes a step: one that
is always a step behind fetches everything, again and again, and is not in.

Easy to get wrong: how long a step takes is seen from one change of the epoch to another: how far
the run was into the step in which the fetch began, nobody knows.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocols.errors import PotluckError
from protocols.identity import PeerId

ROOM_OF_STATE = 2.0
"""Results may take twice the memory of a state, before steps are made of them."""

MOST_OF_LINK = 0.9

MEASURED_SECONDS = 10.0  # what a fetch begins with is no measure of a link
PATIENT_SECONDS = 15.0  # without a byte, or with all of them and without a step
MOST_TIMES_LOST = 3  # that what follows a state could not be had any more, until it is in
SAFE_SHARE = 0.5  # of a link for new results, which leaves it room for a step that comes early
STEPS_MISSED = 8  # of the run's, with the state here: it had as many tries to be in one


class FetchFailed(PotluckError):
    """No state could be fetched. `why` has what befell each source."""

    exit_code = 4
    served_by: frozenset[PeerId] = frozenset()
    """Who has sent what it was asked for, as far as it went: it is not to blame."""


class TooSlow(FetchFailed):
    """The state and what follows it come too slowly for this peer ever to be where the run is."""

    def __init__(self, demand: Demand, bytes_per_second: float) -> None:
        needed = demand.needed_bytes_per_second
        if bytes_per_second >= needed:
            super().__init__(
                f"This peer gets {_size(bytes_per_second)} a second of the run's state, of "
                f"{_size(needed)} that are needed, and is always too late for the next step.",
                why=f"The run makes a step every {demand.epoch_seconds:.3g} s, and this peer needs "
                "longer to hear of one, to take it over and to compute a batch.",
                advice="Ask the run's organiser for a larger batch, or compute smaller batches.",
            )
            self.bytes_per_second, self.needed_bytes_per_second = bytes_per_second, needed
            return
        each = f"{_size(demand.result_bytes)} each" if demand.result_bytes else "which are not kept"
        super().__init__(
            f"This peer gets {_size(bytes_per_second)} a second of the run's state, and would need "
            f"{_size(needed)} a second to catch up.",
            why=f"The state has {_size(demand.state_bytes)}, and the run makes a step every "
            f"{demand.epoch_seconds:.3g} s, whose results ({each}) have to be fetched, too.",
            advice="Join over a faster link, or with fewer other downloads beside it; or ask the "
            "run's organiser for a larger batch, a smaller codec, or local steps.",
        )
        self.bytes_per_second = bytes_per_second
        self.needed_bytes_per_second = needed


@dataclass(frozen=True)
class Demand:
    """Of a run. `result_bytes` is 0 where its results cannot be had."""

    state_bytes: int
    result_bytes: int
    epoch_seconds: float
    most_of_link: float = MOST_OF_LINK

    @property
    def needed_bytes_per_second(self) -> float:
        if not self.result_bytes:
            return self.state_bytes / self.epoch_seconds
        return self.result_bytes / self.epoch_seconds / self.most_of_link


class KeepingUp:
    """What has come since this peer began to catch up, and how far the run has gone meanwhile."""

    def __init__(self) -> None:
        self.is_in()

    def is_in(self) -> None:
        """It has made a step with the others: what comes next begins anew."""
        self._began: float | None = None
        self.is_told = False
        """Whether it has been said that it is too slow; once is enough."""
        self._came_bytes = 0
        self._wanting, self._wanting_since, self._wanted_seconds = 0, 0.0, 0.0
        self._here_since: tuple[int, float] | None = None
        self.times_lost = 0
        """What follows a state that was being fetched could not be had any more."""
        self._epoch: int | None = None
        self._first_change: tuple[int, float] | None = None
        self._last_change = 0.0

    def wants(self, now: float) -> None:
        """Something is being fetched, until `has` is called as often."""
        if not self._wanting:
            self._wanting_since = now
        self._wanting += 1

    def has(self, now: float) -> None:
        if not self._wanting:
            return  # it is in by now, and what was wanted before counts no more
        self._wanting -= 1
        if not self._wanting:
            self._wanted_seconds += now - self._wanting_since

    def came(self, count: int) -> None:
        self._came_bytes += count

    def state_is_here(self, now: float) -> None:
        """Only results are needed from now on."""
        if self._here_since is None:
            self._here_since = self._epoch or 0, now

    def saw(self, epoch: int, now: float) -> None:
        """Where most of the up-to-date peers are."""
        if self._began is None:
            self._began = self._last_change = now
        if self._epoch is not None and epoch > self._epoch:
            self._first_change = self._first_change or (epoch, now)
            self._last_change = now
        self._epoch = max(self._epoch or 0, epoch)

    def too_slow(self, now: float, state_bytes: int, result_bytes: int) -> TooSlow | None:
        """Why it cannot go on like that; None if it can, or if too little is known."""
        epoch_seconds = self._epoch_seconds(now)
        if epoch_seconds is None or self._began is None:
            return None
        seconds = self._wanted_seconds
        if self._wanting:
            seconds += now - self._wanting_since
        share = MOST_OF_LINK if self.times_lost < MOST_TIMES_LOST else SAFE_SHARE
        demand = Demand(state_bytes, result_bytes, epoch_seconds, share)
        speed = self._came_bytes / seconds if seconds > 0.0 else 0.0
        is_starved = not self._came_bytes and now - self._began >= PATIENT_SECONDS
        is_measured = seconds >= MEASURED_SECONDS and speed < demand.needed_bytes_per_second
        is_outrun = self.times_lost >= MOST_TIMES_LOST and speed < demand.needed_bytes_per_second
        if is_starved or is_measured or is_outrun or self._is_always_late(now):
            return TooSlow(demand, speed)
        return None

    def _is_always_late(self, now: float) -> bool:
        if self._here_since is None or self._epoch is None:
            return False
        epoch, since = self._here_since
        return now - since >= PATIENT_SECONDS and self._epoch - epoch >= STEPS_MISSED

    def _epoch_seconds(self, now: float) -> float | None:
        """Of a step, once two of its ends have been seen. The one under way may be a longer one."""
        if self._first_change is None or self._epoch is None:
            return None
        first, began = self._first_change
        steps = self._epoch - first
        if not steps:
            return None
        return max((self._last_change - began) / steps, (now - began) / (steps + 1))


def _size(count: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f} bytes"
