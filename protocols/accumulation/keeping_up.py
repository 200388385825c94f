"""Whether a link carries enough to catch up with a run, and how much would be enough. Pure.

    demand = Demand(state_bytes, result_bytes, epoch_seconds)
    demand.needed_bytes_per_second

A newcomer fetches a state of S bytes and, for each step that the run makes meanwhile, a result of V
bytes, with a link of b bytes a second, while the run makes a step every E seconds. Of what its link
carries the part r = V / (b E) goes to new results, so the state is there after S / (b (1 - r)), and
it holds S r / (1 - r) bytes of results by then. With room for ROOM_OF_STATE · S of them

    r <= ROOM_OF_STATE / (1 + ROOM_OF_STATE),   b >= V / E · (1 + ROOM_OF_STATE) / ROOM_OF_STATE

Without results (a run over a grid has none that could be checked) the state itself has to come in
the time of one step: b >= S / E.

Easy to get wrong: what comes also depends on how many others fetch, and on what the donors allow
for it. So this is said only of what has come over several steps of the run.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocols.accumulation.state_account import FetchFailed

ROOM_OF_STATE = 2.0
"""Results may take twice the memory of a state; then two thirds of what is needed at the least are
enough headroom."""

STEPS_MEASURED = 2  # of the run: before that nothing is said of how fast it is
MEASURED_SECONDS = 10.0  # and so long: what a fetch begins with is no measure of a link


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
        return self.result_bytes / self.epoch_seconds * (1.0 + ROOM_OF_STATE) / ROOM_OF_STATE


class KeepingUp:
    """What has come over the time of a fetch, and how far the run has gone meanwhile."""

    def __init__(self, now: float) -> None:
        self._began = now
        self._first_epoch: int | None = None
        self._epoch = 0

    def saw(self, epoch: int) -> None:
        """Where most of the up-to-date peers are."""
        if self._first_epoch is None:
            self._first_epoch = epoch
        self._epoch = max(self._epoch, epoch)

    def too_slow(
        self, now: float, came_bytes: int, state_bytes: int, result_bytes: int
    ) -> TooSlow | None:
        """Why it cannot go on like that; None if it can, or if too little is known."""
        seconds = now - self._began
        steps = 0 if self._first_epoch is None else self._epoch - self._first_epoch
        if steps < STEPS_MEASURED or seconds < MEASURED_SECONDS:
            return None
        demand = Demand(state_bytes, result_bytes, seconds / steps)
        speed = came_bytes / seconds
        return TooSlow(demand, speed) if speed < demand.needed_bytes_per_second else None


def _size(count: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f} bytes"
