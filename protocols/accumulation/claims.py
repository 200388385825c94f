"""How much of what others claim is believed. Pure.

    credit = Credit()
    absurd_rates(slots, own_rate)                       # peer -> why it is not believed
    credit.round_ended(epoch, claimed, brought)         # who claimed samples, and who brought them
    credit.state_refused(peer, reason, now)             # a state that is not there
    credit.is_doubted(peer, epoch)                      # its samples do not count for now

The threat: a peer that lies in its slot wants a round to begin before there are enough samples
(it claims many), or wants others to wait for it (it claims some, and never comes), or to send them
after a state that does not exist. None of this can put a wrong sample into a step: what a round
weighs is signed by its members, and too light a result is not applied. So a claim is believed
until it has failed; then it is not for a round, then for two, four, up to `MOST_DOUBTED_ROUNDS`. A
newcomer a thousand times faster than everybody counts at once, and one liar spoils 6 of the first
32 rounds and one in 32 from then on.

Easy to get wrong: an honest peer that died looks like a liar, and it does not matter: it is in
doubt for one round, in which its samples come on top of the target.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

from protocols.accumulation.progress_slot import ProgressSlot
from protocols.identity import PeerId

LARGEST_RATE: Final = 1_000_000.0
"""Samples per second. No machine trains faster, and no target batch lasts longer than moments."""

RATE_FACTOR: Final = 1000.0
"""Times the median of the others: eight large GPUs are some hundred times a laptop."""

RATES_FOR_A_MEDIAN: Final = 3  # with fewer, one peer would say what is usual

KEPT_SHARE: Final = 0.5
"""Of what a peer claimed when the round began: who brings less has claimed too much. More than a
hundredth is allowed for, because a batch may have turned out not to be finite."""

GIVEN_UP_ROUNDS: Final = 2
"""In a row that it was to come to and has not, and a round does without it."""

MOST_DOUBTED_ROUNDS: Final = 32
MOST_REMEMBERED: Final = 1024  # peers with a failure; as many as may have slots

REFUSED_SECONDS: Final = 30.0
"""A peer whose state could not be had is passed over for this long, then twice this, ..."""
LONGEST_REFUSED_SECONDS: Final = 600.0


def absurd_rates(slots: Mapping[PeerId, ProgressSlot], own_rate: float) -> dict[PeerId, str]:
    """Who claims to be faster than can be, and why that is not believed."""
    rates = sorted(one.samples_per_second for one in slots.values() if one.samples_per_second > 0)
    if own_rate > 0:
        rates.append(own_rate)
    usual = median(rates) if len(rates) >= RATES_FOR_A_MEDIAN else 0.0
    found = {}
    for peer, slot in slots.items():
        rate = slot.samples_per_second
        if rate >= LARGEST_RATE:
            found[peer] = f"It claims {rate:,.0f} samples a second, and no machine is so fast."
        elif usual and rate > RATE_FACTOR * usual:
            found[peer] = f"It claims {rate:,.0f} samples a second, where {usual:,.1f} are usual."
    return found


@dataclass(frozen=True)
class _Failures:
    """Rounds in a row in which a claim was not kept, and until when it is in doubt."""

    rounds: int = 0
    doubted_until: int = 0  # the epoch from which on it is believed again
    fetches: int = 0
    refusals: int = 0
    refused_until: float = 0.0
    reason: str = ""


class Credit:
    """Invariant: at most `MOST_REMEMBERED` peers are remembered, those that failed last."""

    def __init__(self) -> None:
        self._failures: OrderedDict[PeerId, _Failures] = OrderedDict()

    def round_ended(
        self, epoch: int, claimed: Mapping[PeerId, int], brought: Mapping[PeerId, float]
    ) -> None:
        """A round of this epoch is over. `claimed`: the samples of those who were expected when it
        began; `brought`: the weight of each member, as it signed it."""
        for peer, samples in claimed.items():
            if peer not in brought or brought[peer] < KEPT_SHARE * samples:
                self._failed(peer, epoch)
        for peer, weight in brought.items():
            if weight >= KEPT_SHARE * claimed.get(peer, 0) and peer in self._failures:
                self._forgive(peer)

    def state_refused(self, peer: PeerId, reason: str, now: float) -> None:
        """It did not have the state that it claims to be at."""
        failures = self._failures.get(peer, _Failures())
        seconds = min(LONGEST_REFUSED_SECONDS, REFUSED_SECONDS * 2.0**failures.refusals)
        refusals = min(failures.refusals + 1, 16)
        until = now + seconds
        changed = replace(
            failures, fetches=0, refusals=refusals, refused_until=until, reason=reason
        )
        self._remember(peer, changed)

    def fetch_failed(self, peer: PeerId, reason: str, now: float) -> None:
        """Its state could not be had this time: that may be the network's fault, once."""
        failures = self._failures.get(peer, _Failures())
        if failures.fetches:
            self.state_refused(peer, reason, now)
        else:
            self._remember(peer, replace(failures, fetches=1))

    def refusal(self, peer: PeerId, now: float) -> str | None:
        """Why nothing that this peer claims counts now; None if it may."""
        failures = self._failures.get(peer)
        if failures is None or now >= failures.refused_until:
            return None
        return f"Its state could not be had: {failures.reason}"

    def is_doubted(self, peer: PeerId, epoch: int) -> bool:
        """Whether its samples do not count in this epoch."""
        failures = self._failures.get(peer)
        return failures is not None and epoch < failures.doubted_until

    def is_given_up(self, peer: PeerId, epoch: int) -> bool:
        """Whether it failed so often that a round does without it: nobody is held up by a peer
        that says it is there and never comes."""
        failures = self._failures.get(peer)
        if failures is None or epoch >= failures.doubted_until:
            return False
        return failures.rounds >= GIVEN_UP_ROUNDS

    def _failed(self, peer: PeerId, epoch: int) -> None:
        """Who is in doubt already is not waited for, so that it could hardly come: that it has not
        is no further failure. But in another try of the same epoch it is enough to give it up."""
        before = self._failures.get(peer, _Failures())
        if epoch < before.doubted_until:
            self._remember(peer, replace(before, rounds=max(before.rounds, GIVEN_UP_ROUNDS)))
            return
        doubted = min(MOST_DOUBTED_ROUNDS, 2 ** min(before.rounds, 16))
        changed = replace(before, rounds=before.rounds + 1, doubted_until=epoch + doubted)
        self._remember(peer, changed)

    def _forgive(self, peer: PeerId) -> None:
        failures = replace(self._failures.pop(peer), rounds=0, doubted_until=0)
        if failures.refusals:
            self._remember(peer, failures)

    def _remember(self, peer: PeerId, failures: _Failures) -> None:
        self._failures[peer] = failures
        self._failures.move_to_end(peer)
        if len(self._failures) > MOST_REMEMBERED:
            self._failures.popitem(last=False)
