"""What a peer knows when it estimates its run: the others' slots, and facts of its own. Pure.

In this file: the run's settings; `Seen`, another peer's slot; `OtherCohorts`; `Known`, all the
rest; `Counted`, how many of a peer's samples count by now.

Easy to get wrong: time is this machine's monotonic clock. A slot is as old as it says, counted from
the end of the round that began the epoch, if both peers were in that round; otherwise from when it
was first seen here. Extrapolation ends after `CARRIED_SECONDS`: a peer that is silent for that long
may be gone.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Final

from protocols.accumulation.claims import CohortPlace, Credit, Past, Silence
from protocols.accumulation.lineage import Lineage
from protocols.accumulation.progress_slot import (
    CARRIED_SECONDS,
    MOST_PEERS,
    REST,
    ProgressSlot,
    is_sum,
)
from protocols.identity import PeerId

PATIENCE_SECONDS: Final = 1.5
"""How much longer than the faster peers' batches a round waits for a slower one: a sixth of the
usual grace time, in which moshpit's lists wait for missing peers."""

LONGEST_READ_SECONDS: Final = 3.0  # extrapolation is good for longer, but a fork waits this long

NOBODY: Final = PeerId("")  # a peer whose name does not matter


@dataclass(frozen=True)
class ProgressSettings:
    """Settings of a run. All its peers have the same, except for `delayed`.

    - `target_samples`: of one round: the target batch, times the local steps.
    - `patience_seconds`: how long a round waits for peers that are slower than the others.
    - `places`: how many peers may be in a round.
    - `delayed`: this peer computes for the next epoch beside the round that ends this one.
    - `run`: its name, from which follows who is in which cohort.
    """

    target_samples: int
    patience_seconds: float = PATIENCE_SECONDS
    places: int = MOST_PEERS
    delayed: bool = False
    run: str = ""


@dataclass(frozen=True)
class Seen:
    """A slot of another peer, and when this version was first seen here (monotonic)."""

    slot: ProgressSlot
    at: float


@dataclass(frozen=True)
class OtherCohorts:
    """What `cohorts` other cohorts have together. `told_by`: the head that says so, and `told`
    the slot in which it does; None if this peer knows it from their sums."""

    cohorts: int
    samples: float
    rate: float
    told_by: PeerId | None = None
    told: Seen | None = None


@dataclass(frozen=True)
class Known:
    """The facts that a peer knows besides the others' slots.

    - `credit`: how much of the others' claims is believed.
    - `members`: the members of the round that ended the last epoch. They are in this epoch, whether
      their slots say so yet or not.
    - `me`: this peer's name.
    - `said`: what it has published last, and when: the others plan with that.
    - `epoch_began`: when that round ended; None if this peer was not in it.
    - `step_seconds`: how long this peer, and all others in that round, had computed for it; 0 if
      unknown.
    - `head_start`: how many seconds earlier this peer, and all others in that round, began to
      compute for this epoch (delayed).
    - `may_wait_for_follower`: the last round that waited for one in vain is long enough ago.
    - `let_in`: newcomers that were awaited recently, and came.
    - `known_for`: how many seconds ago this peer published that it is there.
    - `cohorts`: how many the run has in this epoch.
    - `idle_heads`: peers of this cohort that were its head and did nothing.
    - `lost`: peers whose link was lost, and that have published nothing since.
    - `boasters`: peers of this cohort that boasted lately, as its head.
    - `rest`: what the other cohorts had by the last estimate.
    - `sums_read_at`: when it began to read the sums that it has read last.
    - `needs`: as in the estimate.
    - `reached`: the states that peers of these cohorts have, by their own slots.
    - `shown`: slots whose publishers have shown a step, and where that leads to.
    - `settled`: slots that have been without a proof for long.
    - `refuted`: those whose cohorts do not have the states that they name.
    - `silent`: who could not show its step.
    - `failed_for`: how many seconds ago the last round of this epoch failed; None if none has.
      Then those that say they are further are asked to show their step.
    - `past`: what the last steps were made of.
    - `in_vain`: the last round of its cohort had no samples at all, though others claim enough for
      a step; and it has done none since. Then it believes no other cohort, and computes, unless a
      member has samples by now.
    """

    credit: Credit
    members: frozenset[PeerId] = frozenset()
    me: PeerId = NOBODY
    said: Seen | None = None
    epoch_began: float | None = None
    step_seconds: float = 0.0
    head_start: float = 0.0
    may_wait_for_follower: bool = False
    let_in: frozenset[PeerId] = frozenset()
    known_for: float = math.inf
    cohorts: int = 1
    idle_heads: frozenset[PeerId] = frozenset()
    lost: frozenset[PeerId] = frozenset()
    boasters: frozenset[PeerId] = frozenset()
    rest: OtherCohorts | None = None
    sums_read_at: float = -math.inf
    needs: int = 0
    reached: Mapping[CohortPlace, tuple[Lineage, ...]] = field(default_factory=dict)
    shown: Mapping[PeerId, Lineage] = field(default_factory=dict)
    settled: frozenset[PeerId] = frozenset()
    refuted: frozenset[PeerId] = frozenset()
    silent: Container[Silence] = ()
    failed_for: float | None = None
    past: Past = field(default_factory=Past)
    in_vain: bool = False


class Counted:
    """A peer of this epoch and history, and how many of its samples count now."""

    def __init__(
        self,
        peer: PeerId,
        seen: Seen,
        settings: ProgressSettings,
        now: float,
        began: float | None = None,
        most: float = math.inf,
    ) -> None:
        slot, target = seen.slot, float(settings.target_samples)
        self.peer, self.slot = peer, slot
        # a sum that is right may be read for the first time long after it was made
        is_read_seldom = is_sum(peer) and peer != REST
        self._said_at = when_said(seen, began, now) if is_read_seldom else seen.at
        trains = slot.role == "trains"
        self.rate = slot.samples_per_second if trains and not slot.averaging else 0.0
        carried = self.rate * min(max(0.0, now - self._said_at), CARRIED_SECONDS)
        # No peer counts for more than a whole round.
        self.samples = min(slot.samples + carried, target, most) if trains else 0.0
        self.will_come = now - seen.at <= CARRIED_SECONDS
        """A peer that was heard from lately is expected, even without samples: it is computing its
        first batch, and would never catch up if rounds went on without it. A peer that claims
        samples and does not come is doubted from then on (claims.py)."""
        self.is_awaited = self.will_come and (slot.samples > 0 or not trains)
        is_waited_out = slot.under_way >= 0.0 and slot.batch_seconds > 0.0
        self.under_way = slot.batch if is_waited_out and not slot.averaging else 0
        """Samples of a batch that the round waits for. A peer that claims one has to bring it."""

    def begun_by(self, now: float) -> int:
        """Samples of all batches that it has begun by this moment, if it keeps its pace."""
        slot = self.slot
        if not self.under_way:
            return slot.samples
        seconds = slot.under_way + min(max(0.0, now - self._said_at), CARRIED_SECONDS)
        return slot.samples + slot.batch * (1 + int(seconds / slot.batch_seconds))


def when_said(seen: Seen, began: float | None, now: float) -> float:
    """When this slot of this peer's epoch, which `began` then, was made: see the module."""
    if began is None or not seen.slot.was_in_round:
        return seen.at
    return min(began + seen.slot.epoch_seconds, seen.at + LONGEST_READ_SECONDS, now)


def has_moved_along(peer: PeerId | None, seen: Seen, mine: ProgressSlot, known: Known) -> bool:
    """Whether this peer was in the last round, and its slot is still of an earlier epoch. With
    short steps that may be even older than the round, if it was read before the round ended."""
    if peer not in known.members:
        return False
    epoch, ended = seen.slot.epoch, known.epoch_began
    is_older = epoch < mine.epoch and ended is not None and seen.at <= ended
    return epoch == mine.epoch - 1 or is_older
