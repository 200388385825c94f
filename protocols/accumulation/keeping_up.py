"""Judges whether a link is fast enough to catch up with a run, and how fast it must be. Pure.

    demand = Demand(state_bytes, result_bytes, epoch_seconds)
    demand.needed_bytes_per_second

A newcomer fetches a state of S bytes, over a link of b bytes a second, while the run makes a step
every E seconds. It also fetches a result of V bytes for each of these steps. New results take the
share r = V / (b E) of the link, so the newcomer has caught up after S / (b (1 - r)). If it cannot
hold all results beside the state, it makes some steps on the way. With MOST_OF_LINK for new results
that takes ten times as long as the state alone, and

    r <= MOST_OF_LINK,   b >= V / E / MOST_OF_LINK

Without results (a run over a grid has none that can be checked), the state itself must arrive in
the time of one step: b >= S / E.

The speed is measured while this peer wants something. While it has everything there is, its link
shows nothing. Until it has a state, the wait for a place at a donor counts, too. The measurement
goes on over all fetches until this peer makes a step: a peer that is always one step behind fetches
everything, again and again, and never catches up.

Easy to get wrong: the duration of a step is measured between two changes of the epoch. It is not
known how far the run was into its step when the fetch began.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocols.errors import PotluckError
from protocols.identity import PeerId

ROOM_OF_STATE = 2.0
"""Results may take twice the memory of a state, before steps are made of them."""

MOST_OF_LINK = 0.9

MEASURED_SECONDS = 10.0  # the beginning of a fetch does not show the speed of a link
PATIENT_SECONDS = 15.0  # without a byte, or with all of them and without a step
TOLD_SECONDS = 18.0  # by when a peer that has its state but makes no step is told;
SHORTEST_PATIENCE_SECONDS = 5.0  # but it has at least so long with its state
MOST_TIMES_LOST = 3  # how often the results after a state were gone, before a step was made
SAFE_SHARE = 0.5  # of a link for new results, which leaves room for a step that comes early
STEPS_MISSED = 8  # steps of the run while the state is here: as many chances to be in one


class FetchFailed(PotluckError):
    """No state could be fetched. `why` has the failure of each source."""

    exit_code = 4
    served_by: frozenset[PeerId] = frozenset()
    """The peers that sent what they were asked for, as far as it went. They are not to blame."""


class TooSlow(FetchFailed):
    """The state and the results after it arrive too slowly for this peer ever to catch up."""

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
    """The demand of a run on a link. `result_bytes` is 0 if its results cannot be fetched."""

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
    """Measures what has arrived since this peer began to catch up, and how far the run went
    meanwhile."""

    def __init__(self) -> None:
        self.is_in()

    def is_in(self) -> None:
        """This peer has made a step with the others: measure anew from now on."""
        self._began: float | None = None
        self.is_told = False
        """Whether `TooSlow` was reported already; once is enough."""
        self._came_bytes = 0
        self._wanting, self._wanting_since, self._wanted_seconds = 0, 0.0, 0.0
        self._here_since: tuple[int, float] | None = None
        self.times_lost = 0
        """How often the results after a state were gone while it was being fetched."""
        self._epoch: int | None = None
        self._first_change: tuple[int, float] | None = None
        self._last_change = 0.0

    def wants(self, now: float) -> None:
        """Something is being fetched, until `has` has been called as often."""
        if not self._wanting:
            self._wanting_since = now
        self._wanting += 1

    def has(self, now: float) -> None:
        if not self._wanting:
            return  # it has caught up meanwhile: earlier demands no longer count
        self._wanting -= 1
        if not self._wanting:
            self._wanted_seconds += now - self._wanting_since

    def came(self, count: int) -> None:
        self._came_bytes += count

    def state_is_here(self, now: float) -> None:
        """The state is complete: only results are needed from now on."""
        if self._here_since is None:
            self._here_since = self._epoch or 0, now

    def saw(self, epoch: int, now: float) -> None:
        """Note the epoch of most up-to-date peers."""
        if self._began is None:
            self._began = self._last_change = now
        if self._epoch is not None and epoch > self._epoch:
            self._first_change = self._first_change or (epoch, now)
            self._last_change = now
        self._epoch = max(self._epoch or 0, epoch)

    def too_slow(self, now: float, state_bytes: int, result_bytes: int) -> TooSlow | None:
        """The error, if this peer cannot catch up; None if it can, or if too little is known."""
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
        is_kept_waiting = (
            self._here_since is None
            and now - self._began >= PATIENT_SECONDS
            and self._came_bytes < demand.needed_bytes_per_second * (now - self._began)
        )
        is_outrun = self.times_lost >= MOST_TIMES_LOST and speed < demand.needed_bytes_per_second
        if is_kept_waiting:
            speed = self._came_bytes / (now - self._began)
        is_told = is_starved or is_measured or is_kept_waiting or is_outrun
        if is_told or self._is_always_late(now, self._began):
            return TooSlow(demand, speed)
        return None

    def _is_always_late(self, now: float, began: float) -> bool:
        if self._here_since is None or self._epoch is None:
            return False
        epoch, since = self._here_since
        left = max(TOLD_SECONDS - (since - began), SHORTEST_PATIENCE_SECONDS)
        return now - since >= min(left, PATIENT_SECONDS) and self._epoch - epoch >= STEPS_MISSED

    def _epoch_seconds(self, now: float) -> float | None:
        """The duration of a step, once two changes of the epoch were seen. The step under way may
        take longer than those before."""
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
