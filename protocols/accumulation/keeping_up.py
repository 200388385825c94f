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

Easy to get wrong: what comes also depends on how many others fetch, and on what the donors allow
for it. So this is said only of what has come over several steps of the run. And how long a step
takes is seen from one change of the epoch to another: how far the run was into the step in which
the fetch began, nobody knows.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocols.accumulation.state_account import FetchFailed

ROOM_OF_STATE = 2.0
"""Results may take twice the memory of a state, before steps are made of them."""

MOST_OF_LINK = 0.9

MEASURED_SECONDS = 10.0  # what a fetch begins with is no measure of a link


class TooSlow(FetchFailed):
    """The state and what follows it come too slowly for this peer ever to be where the run is."""

    def __init__(self, demand: Demand, bytes_per_second: float) -> None:
        needed = demand.needed_bytes_per_second
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

    @property
    def needed_bytes_per_second(self) -> float:
        if not self.result_bytes:
            return self.state_bytes / self.epoch_seconds
        return self.result_bytes / self.epoch_seconds / MOST_OF_LINK


class KeepingUp:
    """What has come over the time of a fetch, and how far the run has gone meanwhile."""

    def __init__(self, now: float) -> None:
        self._began = now
        self._epoch: int | None = None
        self._first_change: tuple[int, float] | None = None
        self._last_change = now

    def saw(self, epoch: int, now: float) -> None:
        """Where most of the up-to-date peers are."""
        if self._epoch is not None and epoch > self._epoch:
            self._first_change = self._first_change or (epoch, now)
            self._last_change = now
        self._epoch = max(self._epoch or 0, epoch)

    def too_slow(
        self, now: float, came_bytes: int, state_bytes: int, result_bytes: int
    ) -> TooSlow | None:
        """Why it cannot go on like that; None if it can, or if too little is known."""
        seconds, epoch_seconds = now - self._began, self._epoch_seconds(now)
        if epoch_seconds is None or seconds < MEASURED_SECONDS:
            return None
        demand = Demand(state_bytes, result_bytes, epoch_seconds)
        speed = came_bytes / seconds
        return TooSlow(demand, speed) if speed < demand.needed_bytes_per_second else None

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
