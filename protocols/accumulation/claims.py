"""How much of what others claim is believed. Pure.

    credit = Credit()
    absurd_rates(slots, own_rate)                       # peer -> why it is not believed
    met_elsewhere(claimed, brought, alive)              # who may not be blamed
    credit.round_ended(epoch, claimed, brought, now)    # who claimed samples, and who brought them
    Brought(weights, heads, is_weighed=True)            # the same of a whole round
    credit.state_refused(peer, reason, now)             # a state that is not there
    credit.is_doubted(peer, epoch, now)                 # its samples do not count for now

    past = Past()
    past.step(weights, cohorts, seconds)                # what the last step was made of
    past.most_of(peer, steps=1.0)                       # so much it may have in this one
    past.most_of_cohort(number, since)                  # the same of a cohort, so far

    states = StateClaims(random)
    states.note(estimate.unproved, now)                 # the slots that name other states than ours
    states.to_check(now)                                # some of them, to be checked now
    states.read(place, reached_by(voters), now)         # how far the peers of a cohort are
    states.shows(name, lineage)                         # or states.is_silent(...): it cannot
    states.reached, states.shown, states.silent, states.settled, states.refuted

The threat: a peer lies in its slot, so that a round begins before there are enough samples (it
claims many), or so that others wait for it (it claims some, and never comes), or fetch a state that
does not exist. None of this can put a wrong sample into a step: the members sign the weights of a
round, and a result that is too light is not applied. So a claim is believed until it has failed.
Then it is not believed for one round, then for two, four, up to `MOST_DOUBTED_ROUNDS`. One that
came, and broke its claim once more, is doubted for twice as long. A newcomer a thousand times
faster than all others counts at once. One liar spoils 6 of the first 32 rounds at most, and one in
32 from then on.

By cohorts a failed claim costs more: the deceived come to the heads' round while the others still
compute. So there those that were in the last steps do not count for much more than they brought.
What this costs an honest run: one that has become much faster counts in full some steps late. And a
cohort whose head is doubted counts for the least that it brought to one of these steps: it has
honest members.

Any peer may publish a sum of its cohort. One that names a later state, or another one,
would have this peer drop its samples and look for that state. It is believed as far as the peers of
that cohort say the same in their own slots, which are read only then.

Easy to get wrong: an honest peer that died looks like a liar. It does not matter: it is doubted for
one round, in which its samples come on top of the target.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from random import Random
from statistics import median
from typing import Final, NamedTuple, TypeVar

from auth.bounded_map import BoundedMap
from protocols.accumulation.lineage import Lineage
from protocols.accumulation.progress_slot import ProgressSlot
from protocols.identity import PeerId
from protocols.moshpit.cohorts import MOST_COHORTS

ELSEWHERE_SHARE: Final = 1 / 3
FEWEST_ELSEWHERE: Final = 4
"""If at least so many of the living peers that were expected are not in a round that makes no step,
they have met without us. Each half of a group would doubt the other, and come without it again."""

MOST_EXCUSED_ROUNDS: Final = 2
"""So many rounds a peer may have met elsewhere, until it has kept a claim here. If four peers that
never come were always excused, rounds would begin with their samples, and none would make a step.
"""

LARGEST_RATE: Final = 1_000_000.0
"""Samples per second. No machine trains faster, and at this rate any target batch takes moments."""

RATE_FACTOR: Final = 1000.0
"""Times the median of the others. Eight large GPUs are some hundred times as fast as a laptop."""

RATES_FOR_A_MEDIAN: Final = 3  # with fewer, one peer alone would decide what is usual

KEPT_SHARE: Final = 0.5
"""A peer that brings a smaller share of what it claimed when the round began has claimed too much.
The tolerance is large because a batch may have turned out not to be finite."""

GIVEN_UP_ROUNDS: Final = 2
"""After so many rounds in a row to which it did not come, rounds do without a peer."""

MOST_DOUBTED_ROUNDS: Final = 32
DOUBTED_SECONDS: Final = 12.0
"""For each round of a doubt: it ends after so long even if the epoch does not. A round that a liar
spoils takes a second or two, so this costs at most a sixth of the time, and less and less."""
MOST_REMEMBERED: Final = 1024  # peers with a failure; as many as may have slots

STEPS_OF_THE_PAST: Final = 4  # a peer that has missed no more than these remembers them
MORE_OF_A_PEER: Final = 2.0  # and what a usual one has beside it: a first part may be small
MORE_OF_A_COHORT: Final = 1.5
MORE_AT_FIRST: Final = 0.25  # of a step: what is computed beside the round before, and by chance
"""How much more than before is believed. If the cohorts are eight, and one head claims all samples
of a step, the round begins when nine tenths of them are there."""
FASTER_COHORT: Final = 2.0  # while all its peers compute: in a step many wait for others

REFUSED_SECONDS: Final = 30.0
"""A peer whose state could not be fetched is passed over for this long, then for twice this, ..."""
LONGEST_REFUSED_SECONDS: Final = 600.0

CHECKED_AT_ONCE: Final = 4  # claims; a finding needs a quarter of the cohorts, or two
MOST_SHOWN: Final = 64  # names; the cohorts are as many
OVERDUE_SECONDS: Final = 3.0
"""While this peer averages, others may have made the step a moment sooner, and only claims that are
older than this are checked."""
SHORTEST_PAUSE_SECONDS: Final = 0.5  # between two readings of one cohort, and then twice as long
LONGEST_PAUSE_SECONDS: Final = 8.0
REMEMBERED_SECONDS: Final = 30.0  # how long a claim is remembered that is not made any more
REFUTED_SECONDS: Final = 12.0
"""A sum that has named a state for so long, and whose cohort does not have it, is told as a lie. An
honest head hands a small model down within moments; of a large one it may be told for a while, and
that does no harm."""


Silence = tuple[PeerId, Lineage, Lineage]
MOST_SILENT: Final = 256  # if more lie, the first are asked once more


class CohortPlace(NamedTuple):
    """Where the cohort of a sum publishes: by the number of cohorts that the sum says, and by the
    one that this peer knows. A step may have changed it."""

    cohorts: int
    number: int
    cohorts_here: int
    number_here: int


def absurd_rates(slots: Mapping[PeerId, ProgressSlot], own_rate: float) -> dict[PeerId, str]:
    """The peers that claim an impossible rate, each with the reason why it is not believed."""
    rates = [rate for rate in map(_fastest_rate, slots.values()) if rate > 0]
    if own_rate > 0:
        rates.append(own_rate)
    usual = median(rates) if len(rates) >= RATES_FOR_A_MEDIAN else 0.0
    found = {}
    for peer, slot in slots.items():
        rate = _fastest_rate(slot)
        if rate >= LARGEST_RATE:
            found[peer] = f"It claims {rate:,.0f} samples a second, and no machine is so fast."
        elif usual and rate > RATE_FACTOR * usual:
            found[peer] = f"It claims {rate:,.0f} samples a second, where {usual:,.1f} are usual."
    return found


def met_elsewhere(
    claimed: Iterable[PeerId], brought: Container[PeerId], alive: Container[PeerId]
) -> frozenset[PeerId]:
    """The living peers that were expected in a round without a step and were not in it, if they are
    so many that they are no liars: they have met in another group."""
    living = [one for one in claimed if one in alive]
    absent = frozenset(one for one in living if one not in brought)
    fewest = max(FEWEST_ELSEWHERE, ELSEWHERE_SHARE * len(living))
    return absent if len(absent) >= fewest else frozenset()


def _fastest_rate(slot: ProgressSlot) -> float:
    """The higher of its two rates: samples a second, and its batches, which plans use."""
    planned = slot.batch / slot.batch_seconds if slot.batch_seconds else 0.0
    return max(slot.samples_per_second, planned)


@dataclass(frozen=True)
class Brought:
    """What the members of a round have signed.

    - `weights`: the weight of each member of this peer's group.
    - `heads`: by cohorts, the weight of each head that was in their round, if it had a result.
    - `is_weighed`: the group has averaged. Who is not in it did not come.
    """

    weights: Mapping[PeerId, float] = field(default_factory=dict)
    heads: Mapping[PeerId, float] = field(default_factory=dict)
    is_weighed: bool = False


@dataclass(frozen=True)
class _Failures:
    """In how many rounds in a row a peer broke its claim, and until when it is in doubt."""

    rounds: int = 0
    doubted_until: int = 0  # the epoch from which it is believed again
    doubted_to: float = 0.0  # or the moment, whichever comes first
    came: bool = False  # it was in one of these rounds, with less than it had claimed
    excused: int = 0  # rounds in which it had met elsewhere
    fetches: int = 0
    refusals: int = 0
    refused_until: float = 0.0
    reason: str = ""

    def is_in_doubt(self, epoch: int, now: float) -> bool:
        return epoch < self.doubted_until and now < self.doubted_to


class Credit:
    """Remembers which peers broke their claims.

    Invariant: at most `MOST_REMEMBERED` peers are remembered, those that failed last.
    """

    def __init__(self) -> None:
        self._failures: OrderedDict[PeerId, _Failures] = OrderedDict()

    def round_ended(
        self,
        epoch: int,
        claimed: Mapping[PeerId, int],
        brought: Mapping[PeerId, float],
        now: float,
        elsewhere: Container[PeerId] = (),
    ) -> None:
        """A round of this epoch is over. `claimed`: the samples of the peers that were expected
        when it began. `brought`: the weight that each member signed. `elsewhere`: those that have
        met in another group."""
        for peer, samples in claimed.items():
            if peer in elsewhere and self._excuse(peer):
                continue
            if peer not in brought or brought[peer] < KEPT_SHARE * samples:
                self._failed(peer, epoch, now, came=peer in brought)
        for peer, weight in brought.items():
            claim, failures = claimed.get(peer, 0), self._failures.get(peer)
            if failures is None or weight < KEPT_SHARE * claim:
                continue
            if claim or not failures.came:  # who claims nothing shows nothing
                self._forgive(peer)

    def state_refused(self, peer: PeerId, reason: str, now: float) -> None:
        """The peer did not have the state that it claims."""
        failures = self._failures.get(peer, _Failures())
        seconds = min(LONGEST_REFUSED_SECONDS, REFUSED_SECONDS * 2.0**failures.refusals)
        refusals = min(failures.refusals + 1, 16)
        until = now + seconds
        changed = replace(
            failures, fetches=0, refusals=refusals, refused_until=until, reason=reason
        )
        self._remember(peer, changed)

    def fetch_failed(self, peer: PeerId, reason: str, now: float) -> None:
        """The peer's state could not be fetched. Once, that may be the network's fault."""
        failures = self._failures.get(peer, _Failures())
        if failures.fetches:
            self.state_refused(peer, reason, now)
        else:
            self._remember(peer, replace(failures, fetches=1))

    def refusal(self, peer: PeerId, now: float) -> str | None:
        """Why no claim of this peer counts now; None if they may count."""
        failures = self._failures.get(peer)
        if failures is None or now >= failures.refused_until:
            return None
        return f"Its state could not be had: {failures.reason}"

    def is_doubted(self, peer: PeerId, epoch: int, now: float) -> bool:
        """Whether this peer's samples do not count in this epoch."""
        failures = self._failures.get(peer)
        return failures is not None and failures.is_in_doubt(epoch, now)

    def is_given_up(self, peer: PeerId, epoch: int, now: float) -> bool:
        """Whether this peer failed so often that rounds do without it. A peer that says it is there
        and never comes must not hold up the others."""
        failures = self._failures.get(peer)
        if failures is None or not failures.is_in_doubt(epoch, now):
            return False
        return failures.rounds >= GIVEN_UP_ROUNDS

    def _excuse(self, peer: PeerId) -> bool:
        """Note that it has met elsewhere. Returns whether that is no failure."""
        before = self._failures.get(peer, _Failures())
        if before.excused == MOST_EXCUSED_ROUNDS:
            return False
        self._remember(peer, replace(before, excused=before.excused + 1))
        return True

    def _failed(self, peer: PeerId, epoch: int, now: float, *, came: bool) -> None:
        """Note a failure. Nobody waits for a peer that is in doubt already, so it could hardly
        come, and not coming is no further failure. But in another try of the same epoch it is
        enough to give the peer up."""
        before = self._failures.get(peer, _Failures())
        if before.is_in_doubt(epoch, now):
            self._remember(peer, replace(before, rounds=max(before.rounds, GIVEN_UP_ROUNDS)))
            return
        longer = 2 if came and before.rounds else 1
        doubted = min(MOST_DOUBTED_ROUNDS, longer * 2 ** min(before.rounds, 16))
        changed = replace(
            before,
            rounds=before.rounds + 1,
            came=before.came or came,
            doubted_until=epoch + doubted,
            doubted_to=now + doubted * DOUBTED_SECONDS,
        )
        self._remember(peer, changed)

    def _forgive(self, peer: PeerId) -> None:
        failures = replace(
            self._failures.pop(peer),
            rounds=0,
            came=False,
            excused=0,
            doubted_until=0,
            doubted_to=0.0,
        )
        if failures.refusals:
            self._remember(peer, failures)

    def _remember(self, peer: PeerId, failures: _Failures) -> None:
        self._failures[peer] = failures
        self._failures.move_to_end(peer)
        if len(self._failures) > MOST_REMEMBERED:
            self._failures.popitem(last=False)


class Past:
    """What peers and cohorts have brought to the last steps, by the weights that they have signed.

    Who has not been in at least two of them is believed. A cohort that was in none counts as the
    others do.
    """

    def __init__(self) -> None:
        self._peers = deque[Mapping[PeerId, float]](maxlen=STEPS_OF_THE_PAST)
        self._cohorts = deque[Mapping[int, _Part]](maxlen=STEPS_OF_THE_PAST)
        self._most_samples = dict[PeerId, float]()
        self._most_parts, self._least_rates = dict[int, _Part](), dict[int, float]()
        self._usual_part = _Part(0.0, 0.0)

    def step(
        self, weights: Mapping[PeerId, float], cohorts: Mapping[int, float], seconds: float
    ) -> None:
        """A step was made of this. `seconds`: how long it was computed for; 0 if that is unknown,
        or says nothing because rounds had failed before."""
        self._peers.append(weights)
        usual = _median(weights.values())
        self._most_samples = {
            one: MORE_OF_A_PEER * max(known) + usual
            for one, known in _by_name(self._peers).items()
            if len(known) > 1 and max(known) > 0.0
        }
        if seconds > 0.0 and cohorts:
            self._cohorts.append(
                {one: _Part(weight, weight / seconds) for one, weight in cohorts.items()}
            )
            parts = _by_name(self._cohorts)
            self._most_parts = {one: _largest(known) for one, known in parts.items()}
            self._usual_part = _usual(self._cohorts[-1].values())
            self._least_rates = {
                one: min(part.rate for part in known)
                for one, known in parts.items()
                if len(known) == STEPS_OF_THE_PAST
            }

    def divided(self) -> None:
        """The run has another number of cohorts."""
        self._cohorts.clear()
        self._most_parts, self._least_rates = {}, {}
        self._usual_part = _Part(0.0, 0.0)

    def most_of(self, peer: PeerId, steps: float) -> float:
        """How many samples it may have after so many times as long as the last step took."""
        return self._most_samples.get(peer, math.inf) * max(1.0, steps)

    def rate_of(self, cohort: int) -> float:
        """How many samples per second it may compute."""
        return FASTER_COHORT * self._part_of(cohort).rate or math.inf

    def most_of_cohort(self, cohort: int, since: float | None) -> float:
        """How many samples it may have so long after the last step. None: nobody knows how long, so
        as many as in a whole step."""
        part = self._part_of(cohort)
        later = part.samples if since is None else part.rate * since
        return MORE_AT_FIRST * part.samples + MORE_OF_A_COHORT * later or math.inf

    def least_rate_of(self, cohort: int) -> float:
        """The lowest of the last steps, in samples per second; 0 if it was not in all of them. That
        much is believed of one whose head is doubted."""
        return self._least_rates.get(cohort, 0.0)

    def _part_of(self, cohort: int) -> _Part:
        part = self._most_parts.get(cohort)
        return part if part is not None and part.samples else self._usual_part


class _Part(NamedTuple):
    """A cohort's part of a step."""

    samples: float
    rate: float


Name = TypeVar("Name")
Value = TypeVar("Value")


def _by_name(steps: Iterable[Mapping[Name, Value]]) -> dict[Name, list[Value]]:
    found = dict[Name, list[Value]]()
    for step in steps:
        for one, value in step.items():
            found.setdefault(one, []).append(value)
    return found


def _largest(parts: Iterable[_Part]) -> _Part:
    samples, rates = zip(*parts, strict=True)
    return _Part(max(samples), max(rates))


def _usual(parts: Iterable[_Part]) -> _Part:
    samples, rates = zip(*parts, strict=True)
    return _Part(_median(samples), _median(rates))


def _median(values: Collection[float]) -> float:
    return median(values) if values else 0.0


@dataclass
class _Check:
    """Of one claim: when it was made first, since when without a gap, when last, when its cohort
    was read, and when to check it again."""

    place: CohortPlace
    first: float
    since: float
    made_at: float
    read_at: float = -math.inf
    again_at: float = -math.inf
    pause: float = SHORTEST_PAUSE_SECONDS


class StateClaims:
    """What is known of slots that name other states than this peer's, without a proof. Most are
    sums; the others are of peers that say they are further.

    - `reached`: which states the peers of each cohort had when this peer read their slots last.
    - `shown`: the slots whose publishers have shown a step, and where that step leads to.
    - `silent`: whose publishers could not show it: the slot's name, this peer's state, and theirs.
    - `settled`: the slots that were seen first so long ago that a proof would be there by now.
    - `refuted`: the slots that have named states for as long that their cohorts do not have.

    Invariant: `_checks` has the claims that are made now, and those that were made lately.
    """

    def __init__(self, chance: Random) -> None:
        self._chance = chance
        self.reached: BoundedMap[CohortPlace, tuple[Lineage, ...]] = BoundedMap(2 * MOST_COHORTS)
        self.shown: BoundedMap[PeerId, Lineage] = BoundedMap(MOST_SHOWN)
        self.silent: BoundedMap[Silence, None] = BoundedMap(MOST_SILENT)
        self.settled: frozenset[PeerId] = frozenset()
        self.refuted: frozenset[PeerId] = frozenset()
        self._claims: frozenset[PeerId] = frozenset()
        self._checks: dict[PeerId, _Check] = {}

    def note(self, claims: Mapping[PeerId, CohortPlace], now: float) -> None:
        """These slots, and no others, name states that are unproved; each with its cohort."""
        self._checks = checks = {
            one: check
            for one, check in self._checks.items()
            if one in claims or now - check.made_at <= REMEMBERED_SECONDS
        }
        for one, place in claims.items():
            check = checks.setdefault(one, _Check(place, now, now, now))
            if one not in self._claims:
                check.since = now
            check.place, check.made_at = place, now
        self._claims = frozenset(claims)
        self.settled = frozenset(
            one for one in claims if now - checks[one].first >= REFUTED_SECONDS
        )
        self.refuted = frozenset(
            one for one in claims if checks[one].read_at - checks[one].since >= REFUTED_SECONDS
        )

    def to_check(self, now: float, *, averages: bool = False) -> dict[PeerId, CohortPlace]:
        """Some of them: those that were checked least, and by chance among equals, so that nobody
        can foresee which. `averages`: this peer may be about to get the same state."""
        youngest = now - OVERDUE_SECONDS if averages else now
        due = [
            (check.pause, self._chance.random(), one)
            for one, check in sorted(self._checks.items())
            if one in self._claims and check.again_at <= now and check.since <= youngest
        ]
        chosen = [one for _, _, one in sorted(due)[:CHECKED_AT_ONCE]]
        for one in chosen:
            check = self._checks[one]
            check.again_at = now + check.pause
            check.pause = min(2.0 * check.pause, LONGEST_PAUSE_SECONDS)
        return {one: self._checks[one].place for one in chosen}

    def read(self, place: CohortPlace, reached: tuple[Lineage, ...], now: float) -> None:
        """The peers of this cohort have these states; none if nobody is there."""
        if reached:
            self.reached[place] = reached
        for check in self._checks.values():
            if check.place == place:
                check.read_at = now

    def shows(self, name: PeerId, step_to: Lineage) -> None:
        """The publisher of this slot has shown that a step leads to there."""
        self.shown[name] = step_to

    def is_silent(self, name: PeerId, mine: Lineage, said: Lineage) -> None:
        """It cannot show how the run has gone on from this peer's state to the one it names."""
        self.silent[name, mine, said] = None
