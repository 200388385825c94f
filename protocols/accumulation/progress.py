"""Estimates when the next step is due, from the peers' progress slots. Pure.

    found = estimate(seen, mine, settings, now, known)
    if found.is_due: ...                     # the samples of all together reach the target
    await trio.sleep(found.read_again_in_seconds)

Every peer plans the batches of the peers in its own epoch and history (batch_plan.py), and
extrapolates each by what its slot says about its batches. So all reach the same result at nearly
the same time without a message. They read more often the nearer the step is.

A group of averaging has a limited number of places. A run with more peers is divided into cohorts,
each with a group of its own (cohorts_seen.py). All peers deal the places out by the same rule from
the same slots (`_with_places`). Peers without a place follow the run: nobody expects them in a
round or counts their samples.

In this file: `estimate` and how often to read; then places, newcomers, whose steps decide, whose
slots count. Beside it: `Known`, what a peer knows (known.py); `Estimate`, the result, and its
decisions for the training thread (estimate.py); cohorts_seen.py; staff.py.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from statistics import median_low
from typing import Final

from blake3 import blake3

from protocols.accumulation.batch_plan import (
    MANY_BATCHES,
    BatchPlan,
    Worker,
    may_be_planned,
    plan_batches,
)
from protocols.accumulation.claims import Credit, absurd_rates
from protocols.accumulation.cohorts_seen import CohortsSeen
from protocols.accumulation.estimate import (
    BROKEN_CLAIM,
    EARLY_PATIENCES,
    Estimate,
    Ignored,
    seconds_to_compute,
)
from protocols.accumulation.known import (
    LONGEST_READ_SECONDS,
    PATIENCE_SECONDS,
    Counted,
    Known,
    ProgressSettings,
    Seen,
    has_moved_along,
)
from protocols.accumulation.lineage import BACKERS, Elsewhere, behind, fork, left_alone
from protocols.accumulation.progress_slot import (
    CARRIED_SECONDS,
    LONGEST_SECONDS,
    MOST_PEERS,
    REST,
    SLOT_SECONDS,
    ProgressSlot,
    is_sum,
    publisher_of,
)
from protocols.accumulation.staff import Staff, order_in_epoch
from protocols.identity import PeerId
from protocols.moshpit.cohorts import DECISIONS_SHOWN

SHORTEST_READ_SECONDS: Final = 0.1  # about one round trip

READ_WHEN_DUE_SECONDS: Final = 0.5

READ_WHEN_CROWDED_SECONDS: Final = 0.25
"""Measured on 108 first and second steps of simulated runs (2 to 8 peers, 5 to 16 batches): one was
more than 15 % off its target with this value, and no fewer with 0.1 s; three with 0.5 s, and four
with 1 s."""

READ_AS_HEAD_SECONDS: Final = 0.25

READ_IN_COHORT_SECONDS: Final = 1.0
"""The shortest by cohorts: there are two keys to read, and the head calls its members to the round.
"""

NEW_SECONDS: Final = 2.5
"""How long a peer that has come counts as new. Peers that began together are all there by then. Of
the same 108 steps, one was that far off with this value, and two with 0.5 to 1.5 s."""

READS_BEFORE_DUE: Final = 4  # each reading leaves three quarters of the time

ALMOST_SHARE: Final = 0.98
"""By cohorts, a step is large enough if the batches that are done or under way make up this share
of the target. The sums of many cohorts are never exact, and change when peers die. Without this, a
missing thousandth is planned for the few peers that do not average yet, and all others wait for
another batch of the slowest."""

LONG_STEP_SECONDS: Final = 6.0
"""By cohorts, no list waits for newcomers that follow if the peers compute for so long between two
rounds. These have the state by then, and are expected as all others are. In a run of a thousand
there is always one in some cohort, and all others would wait for the patience in each step."""

KNOWN_SECONDS: Final = 1.0
"""All others plan with a peer this long after it has published that it is there: with short
batches, slots are read no later than that (`READ_WHEN_DUE_SECONDS`)."""

BLIND_BATCHES: Final = 4
"""How many batches a peer may begin in that time, if nobody knows how long its batches take. Of 108
such steps, one was more than 15 % off with this value, and no fewer with 8; three with 2, and seven
with 1."""

CLOSE_BEHIND: Final = 2  # epochs: a newcomer that follows step by step is never further back

WAITED_AGAIN: Final = 8.0
"""A round's list stays open for newcomers for about the patience. If none comes, no list stays open
for newcomers for this many times as long. So a peer that only claims to follow costs the run an
eighth of its time, however many names it has. (Another peer may lead and close the list at once;
then it was open for no time.)"""

FOLLOWER_AGAIN_SECONDS: Final = WAITED_AGAIN * PATIENCE_SECONDS
"""How long no round waits again for a newcomer that has come."""

ASKED_SECONDS: Final = 30.0
"""For so long after a round that failed, this peer makes no step beside one that says it is further
and has not answered yet when it was asked to show it. A head that died may have handed it on."""


def estimate(
    seen: Mapping[PeerId, Seen],
    mine: ProgressSlot,
    settings: ProgressSettings,
    now: float,
    known: Known,
    *,
    number: int = 1,
) -> Estimate:
    """The estimate from these slots at this moment, for the peer whose own slot is `mine`."""
    return _View(seen, mine, settings, now, known).estimate(number)


class _View:
    """One look at the slots.

    - `fitting`: the slots that count (cohorts_seen.py). `placed`: who may be in a round.
    - `there`: the slots of this peer's epoch and history. `here`: those of them with a place.
    - `believed`: those of `here` whose samples count. `moved`: peers that were in the last round,
      and whose slots of this epoch have not arrived.
    - `ours`, `moved_ours`: the same without the sums of other cohorts.
    - `others`: all of these as workers; `own`: this peer; `plan`: their batches, for `enough`
      samples.
    - `further`: the slots that say that the run is further.
    """

    def __init__(
        self,
        seen: Mapping[PeerId, Seen],
        mine: ProgressSlot,
        settings: ProgressSettings,
        now: float,
        known: Known,
    ) -> None:
        self._mine, self._settings, self._now, self._known = mine, settings, now, known
        alive = {peer: one for peer, one in seen.items() if now - one.at <= SLOT_SECONDS}
        fitting, self.ignored = _fitting(alive, mine, known.credit, now)
        self.cohorts = CohortsSeen(fitting, mine, settings, known, now)
        self.fitting = self.cohorts.fitting
        own_slots = {peer: one for peer, one in self.fitting.items() if not is_sum(peer)}
        places = _with_places(own_slots, mine, settings.places, now, known.me)
        self.without_place = frozenset(own_slots) - places
        self.placed = places | self.cohorts.others
        self.there = {
            peer: one
            for peer, one in self.fitting.items()
            if (one.slot.epoch, one.slot.history) == (mine.epoch, mine.history)
        }
        self.here = [
            Counted(peer, one, settings, now, known.epoch_began, self.cohorts.most_of(peer))
            for peer, one in self.there.items()
            if peer in self.placed
        ]
        self.ignored += _samples_of_the_past(self.fitting, mine, known.members)
        self.ignored += self.cohorts.refuted() + self.cohorts.doubted()
        self.believed, self.moved = self._believe()
        self.ours = [one for one in self.believed if not is_sum(one.peer)]
        self.moved_ours = [peer for peer in self.moved if not is_sum(peer)]
        self.is_alone = not (self.believed or self.moved)

        slots = [one.slot for one in self.believed]
        number = 1 + len(self.believed) + len(self.moved)
        self.staff = staff = Staff(slots, number, mine, settings, now, known)
        self.others = [staff.worker(one.peer, self.fitting[one.peer]) for one in self.believed]
        self.others += [staff.moved(peer, self.fitting[peer]) for peer in self.moved]
        self.own = staff.own()
        self.enough, self.plan = self._plan()
        self.further = [
            peer for peer, one in self.cohorts.said.items() if one.slot.epoch > mine.epoch
        ]

    def _believe(self) -> tuple[list[Counted], list[PeerId]]:
        """Those that are believed, and those that have moved. Doubted ones join the ignored."""
        mine, known, now, cohorts = self._mine, self._known, self._now, self.cohorts
        believed = []
        for one in self.here:
            is_doubted = known.credit.is_doubted(one.peer, mine.epoch, now)
            if is_doubted and one.peer not in cohorts.vouched_for:
                self.ignored.append(Ignored(one.peer, "doubted", BROKEN_CLAIM))
            else:
                believed.append(one)
        idle_cohort = known.in_vain and not any(
            one.slot.samples for one in believed if not is_sum(one.peer)
        )
        if idle_cohort:
            believed = [one for one in believed if not is_sum(one.peer)]
        moved = [
            peer
            for peer, one in self.fitting.items()
            if peer in self.placed
            and not (idle_cohort and is_sum(peer))
            and has_moved_along(cohorts.teller if peer == REST else peer, one, mine, known)
            and not known.credit.is_doubted(peer, mine.epoch, now)
        ]
        return believed, moved

    def _plan(self) -> tuple[int, BatchPlan]:
        """How many samples make up the step, and the plan for them."""
        plan_for = partial(
            plan_batches,
            [*self.others, self.own],
            order=partial(order_in_epoch, self._mine.epoch),
            patience_seconds=self._settings.patience_seconds,
        )
        enough = self._settings.target_samples
        plan = plan_for(enough)
        if self.cohorts.mine is not None:
            begun = sum(
                max(one.samples + one.under_way, one.done_by(self._now, plan.parts[one.peer]))
                for one in (*self.others, self.own)
            )
            if ALMOST_SHARE * enough <= begun < enough:
                return begun, plan_for(begun)
        return enough, plan

    def _part_beside(self) -> float:
        if not (self._settings.delayed and self._mine.batch):
            return math.inf
        comers = [(one.peer, self.fitting[one.peer]) for one in self.believed if one.will_come]
        comers += [(peer, self.fitting[peer]) for peer in self.moved]
        return self.staff.part_beside(comers, self.plan)

    def _is_new(self) -> bool:
        """Whether this peer, or another one, has just come."""
        all_here = (Seen(self._mine, self._now), *(self.fitting[one.peer] for one in self.believed))
        return self._known.known_for < NEW_SECONDS or any(
            _has_just_begun(one, self._now) for one in all_here
        )

    def _is_planned(self) -> bool:
        mine, target = self._mine, self._settings.target_samples
        knows_own = mine.batch > 0 or mine.role != "trains" or mine.samples_per_second > 0.0
        largest = max(one.batch for one in (*self.others, self.own))
        return self.plan.is_full and knows_own and may_be_planned(largest, target)

    def _rate(self) -> float:
        rates = [one.rate for one in self.believed]
        rates += [self.fitting[peer].slot.samples_per_second for peer in self.moved]
        return sum(rates) + (self._mine.samples_per_second if self._mine.role == "trains" else 0.0)

    def _company(self, lost: Elsewhere | None) -> frozenset[PeerId]:
        """The peers because of which this one makes no step alone."""
        credit, mine = self._known.credit, self._mine
        beside = {
            one.peer for one in self.here if not credit.is_given_up(one.peer, mine.epoch, self._now)
        }
        beside.update(self.moved)
        # A single peer that is further is not followed if the others are not there (lineage.py),
        # but a step alone beside it would be a fork. Nor is a step added to a state about to be
        # given up.
        beside.update(map(publisher_of, self.further))
        return frozenset(beside.union(lost.peers if lost is not None else ()))

    def _ahead(self) -> tuple[list[PeerId], list[PeerId], list[PeerId]]:
        """Three lists: peers that are further, those of them that are further by one epoch, and
        those that may be about to prove it."""
        cohorts, known, mine = self.cohorts, self._known, self._mine
        ahead = [peer for peer in self.further if peer not in cohorts.unproved]
        just_ahead = [
            peer
            for peer in ahead
            if cohorts.said[peer].slot.epoch == mine.epoch + 1 or peer in known.shown
        ]
        if cohorts.mine is None:
            # In one group nobody can show a step. A member of this peer's last round is believed
            # (lifecycle.py); of others one may lie.
            return self.further, just_ahead if len(just_ahead) >= BACKERS else [], []
        if known.failed_for is None or known.failed_for >= ASKED_SECONDS:
            return ahead, just_ahead, []
        may_be_ahead = [
            one
            for one in self.further
            if one in cohorts.unproved
            and cohorts.said[one].slot.epoch <= mine.epoch + DECISIONS_SHOWN
            and (one, mine.at, cohorts.said[one].slot.at) not in known.silent
        ]
        return ahead, just_ahead, may_be_ahead

    def _followers(self) -> frozenset[PeerId]:
        """The newcomers for which a list stays open."""
        known = self._known
        steps_are_long = self.cohorts.mine is not None and known.step_seconds >= LONG_STEP_SECONDS
        if not known.may_wait_for_follower or steps_are_long:
            return frozenset()
        return frozenset(
            peer
            for peer, one in self.fitting.items()
            if peer in self.placed
            and not is_sum(peer)
            and peer not in known.let_in
            and peer not in known.lost
            and peer not in self.moved  # it made that step with us; its slot is on its way
            and _is_close_behind(one, self._mine, self._now)
        )

    def _coming(self, followers: frozenset[PeerId]) -> frozenset[PeerId]:
        latest = self._now + self._settings.patience_seconds
        others = () if self.cohorts.mine is None else self.others
        comes_later = {
            one.peer
            for one in others
            if one.is_busy and one.free_at > latest and not self.plan.parts[one.peer]
        }
        come = {one.peer for one in self.ours if one.will_come and one.peer not in comes_later}
        return frozenset(come.union(self.moved_ours, () if self.is_alone else followers))

    def _awaited(self) -> frozenset[PeerId]:
        parts = self.plan.parts
        awaited = (
            one.peer
            for one in self.believed
            if one.is_awaited or (one.under_way and parts[one.peer] > one.slot.samples)
        )
        return frozenset(peer for peer in (*awaited, *self.moved) if not is_sum(peer))

    def estimate(self, number: int) -> Estimate:
        mine, settings, now, known = self._mine, self._settings, self._now, self._known
        cohorts, believed, others, plan = self.cohorts, self.believed, self.others, self.plan
        others_samples = sum(one.samples for one in believed)
        samples, rate = others_samples + mine.samples, self._rate()

        is_new = self._is_new()
        is_crowded = is_new and _is_crowded(believed, others, self.own, settings.target_samples)
        begins_first = not mine.samples and mine.under_way < 0.0
        is_known = known.known_for >= KNOWN_SECONDS or not others
        waits_to_be_known = is_crowded and begins_first and not is_known
        own_part = plan.parts[self.own.peer] if self._is_planned() else math.inf
        others_ready_in = _others_ready_in(others, plan, now)
        if waits_to_be_known:
            own_part, others_ready_in = 0.0, math.inf

        at, voters = mine.at, cohorts.voters()
        lost = fork(at, voters, follows=mine.follows) or left_alone(
            at, voters, follows=mine.follows
        )
        ahead, just_ahead, may_be_ahead = self._ahead()
        followers = self._followers()
        coming = self._coming(followers)
        found = Estimate(
            number=number,
            epoch=mine.epoch,
            history=mine.history,
            samples=samples,
            others_samples=others_samples,
            target_samples=settings.target_samples,
            slack=settings.target_samples - self.enough,
            rate=rate,
            due_in_seconds=seconds_to_compute(self.enough - samples, rate),
            own_part=own_part,
            part_beside=self._part_beside(),
            own_batch=mine.batch,
            own_batch_seconds=mine.batch_seconds,
            done_by_others=sum(one.done_by(now, plan.parts[one.peer]) for one in others),
            others_ready_in_seconds=others_ready_in,
            early_seconds=_early_seconds(mine, settings),
            patience_seconds=settings.patience_seconds,
            expected=1 + len(coming),
            coming=coming,
            lost=known.lost & coming,
            followers=followers,
            holds_back=self.is_alone and bool(followers),
            awaited=self._awaited(),
            averaging=frozenset(
                publisher_of(peer)
                for peer, one in self.there.items()
                if one.slot.averaging and now - one.at <= CARRIED_SECONDS
            ),
            begun=frozenset(
                publisher_of(one.peer) for one in believed if one.slot.averaging and one.will_come
            ),
            spared=mine.spared,
            company=len(self._company(lost)),
            holders=_holders(cohorts, self.placed, {*self.moved, *cohorts.moved}, mine, known, now),
            needs=known.needs,
            me=known.me,
            ahead=frozenset(map(publisher_of, ahead)),
            just_ahead=frozenset(map(publisher_of, just_ahead)),
            may_be_ahead=frozenset(map(publisher_of, may_be_ahead)),
            made=frozenset(
                (publisher_of(peer), cohorts.said[peer].slot.history)
                for peer in self.further
                if cohorts.said[peer].slot.epoch == mine.epoch + 1
            ),
            behind=behind(at, cohorts.followed(voters)),
            may_be_behind=mine.epoch == 0 and cohorts.is_open,
            fork=lost,
            peers=tuple(dict.fromkeys(map(publisher_of, cohorts.known))),
            keepers=_keepers(cohorts.known),
            keepers_here=_keepers(
                {
                    peer: one
                    for peer, one in cohorts.known.items()
                    if one.slot.at == at or peer in cohorts.moved
                }
            ),
            ignored=tuple(self.ignored),
            places=settings.places,
            has_place=known.me in self.placed,
            without_place=self.without_place,
            is_crowded=is_crowded,
            waits_to_be_known=waits_to_be_known,
            cohort=cohorts.mine,
            sum=cohorts.sum(self.ours, self.moved_ours, plan),
            rest=cohorts.rest(believed, self.moved),
            boaster=cohorts.boaster,
            unproved=cohorts.unproved,
        )
        is_due = found.is_due_with(mine.samples)
        due_in = 0.0 if is_due else found.due_in_seconds
        longest = LONGEST_READ_SECONDS
        if is_new:
            longest = READ_WHEN_CROWDED_SECONDS if is_crowded else READ_WHEN_DUE_SECONDS
        is_waited_for = self._is_waited_for(found)
        read_again_in = _read_again_in(due_in, longest, is_due=is_due)
        if is_waited_for:
            read_again_in = min(read_again_in, READ_WHEN_DUE_SECONDS)
        if found.cohort is not None:
            shortest = READ_IN_COHORT_SECONDS if found.sum is None else READ_AS_HEAD_SECONDS
            read_again_in = max(read_again_in, shortest)
        return replace(
            found,
            is_due=is_due,
            due_in_seconds=due_in,
            read_again_in_seconds=read_again_in,
            is_waited_for=is_waited_for,
        )

    def _is_waited_for(self, found: Estimate) -> bool:
        """Whether the cohort has begun a round whose list stays open for this peer, and does not
        need its batch: the sums count a first one of each member that has said nothing yet."""
        known, averaging = self._known, found.begun & found.coming
        is_first = known.failed_for is None and not found.just_ahead
        was_in_step = known.epoch_began is not None and not self._mine.follows
        is_begun = 2 * len(averaging) > len(found.coming)
        part = self._settings.target_samples / max(self._mine.step_peers, 1)
        brings_little = MANY_BATCHES * self._mine.batch <= part
        return found.cohort is not None and is_first and was_in_step and is_begun and brings_little


def _early_seconds(mine: ProgressSlot, settings: ProgressSettings) -> float:
    """How long before the others' parts are done this peer may begin the round: no longer than one
    of its batches, because if they need that long, it computes another one for this round."""
    if not settings.delayed or not mine.batch:
        return 0.0
    return min(mine.batch_seconds, EARLY_PATIENCES * settings.patience_seconds)


def _with_places(
    fitting: Mapping[PeerId, Seen], mine: ProgressSlot, places: int, now: float, me: PeerId
) -> frozenset[PeerId]:
    """The peers that may be in a round, perhaps this one among them.

    If all fit, everybody may. Otherwise the peers that made the run's steps come first, then those
    that fetched its state, then the rest; a hash decides among equals. A peer that has been silent
    for `CARRIED_SECONDS` has no place, so that another can take it.

    All peers deal the places out from the same slots. Slots take time to arrive, so two peers may
    disagree about the last places for a moment. A leader lists no more than fit
    (moshpit/gathering.py), and tells the others that the group has begun without them.
    """
    if 1 + len(fitting) <= places:
        return frozenset((me, *fitting))
    slots = {peer: one.slot for peer, one in fitting.items() if now - one.at <= CARRIED_SECONDS}
    slots[me] = mine
    return frozenset(
        sorted(slots, key=lambda one: (_seniority(slots[one]), _lot(mine.signature, one)))[:places]
    )


def _seniority(slot: ProgressSlot) -> int:
    """The smallest comes first."""
    if slot.epoch == 0:
        return 2
    return 1 if slot.follows else 0


@lru_cache(maxsize=2 * MOST_PEERS)  # of some runs: it is asked some ten times a second
def _lot(signature: bytes, peer: PeerId) -> bytes:
    return blake3(signature + peer.encode()).digest()


def _is_close_behind(seen: Seen, mine: ProgressSlot, now: float) -> bool:
    """Whether this newcomer follows the run one or two epochs behind. It may need a moment longer
    to fetch a state than the others need for a step, and would then never be in one."""
    slot, behind = seen.slot, mine.epoch - seen.slot.epoch
    return slot.follows and 1 <= behind <= CLOSE_BEHIND and now - seen.at <= CARRIED_SECONDS


def _holders(
    cohorts: CohortsSeen,
    placed: Container[PeerId],
    moved: Iterable[PeerId],
    mine: ProgressSlot,
    known: Known,
    now: float,
) -> frozenset[PeerId]:
    """Of the peers that have a place and are not behind (this one included), those that have had a
    part in steps so far. Their steps may be of another history: while there is a fork, only its
    larger side goes on. A peer that is further counts even as a follower: it may have been in the
    round that made that step. By cohorts, only their heads count."""
    voting = cohorts.voting
    present, here = set[PeerId](), set[PeerId]()
    for peer in moved:
        if peer in voting:
            present.add(publisher_of(peer))
    for peer, one in voting.items():
        if peer not in placed and not is_sum(peer):
            continue
        if one.slot.epoch < mine.epoch or known.credit.is_given_up(peer, mine.epoch, now):
            continue
        here.add(publisher_of(peer))
        is_of_the_run = one.slot.epoch > 0 and not one.slot.follows
        if is_of_the_run or one.slot.epoch > mine.epoch:
            present.add(publisher_of(peer))
    here |= present
    if cohorts.has_vote:
        here.add(known.me)
        if mine.epoch > 0 and not mine.follows:
            present.add(known.me)
    return frozenset(present or here)


def _keepers(slots: Mapping[PeerId, Seen]) -> tuple[PeerId, ...]:
    return tuple(dict.fromkeys(publisher_of(peer) for peer, one in slots.items() if one.slot.keeps))


def expected_of(
    seen: Mapping[PeerId, Seen],
    mine: ProgressSlot,
    settings: ProgressSettings,
    now: float,
    without_place: Container[PeerId] = (),
) -> dict[PeerId, int]:
    """The peers expected in a round that begins now, each with its minimum of samples."""
    here = (
        Counted(peer, one, settings, now)
        for peer, one in seen.items()
        if (one.slot.epoch, one.slot.history) == (mine.epoch, mine.history)
        and one.slot.signature == mine.signature
        and peer not in without_place
        and not is_sum(peer)
    )
    return {
        one.peer: 0 if one.slot.role == "auxiliary" else one.slot.samples + one.under_way
        for one in here
        if one.will_come
    }


def _fitting(
    alive: Mapping[PeerId, Seen], mine: ProgressSlot, credit: Credit, now: float
) -> tuple[dict[PeerId, Seen], list[Ignored]]:
    """The peers whose slots count, and the ones that are ignored."""
    ignored = []
    for peer, one in alive.items():
        refusal = credit.refusal(publisher_of(peer), now)
        if one.slot.signature != mine.signature:
            reason = "It has another model, or another kind of optimizer."
            ignored.append(Ignored(peer, "model", reason))
        elif refusal is not None:
            ignored.append(Ignored(peer, "state", refusal))
    against = {one.peer for one in ignored}
    slots = {peer: one.slot for peer, one in alive.items() if peer not in against}
    absurd = absurd_rates(slots, mine.samples_per_second)
    ignored += [Ignored(peer, "rate", reason) for peer, reason in absurd.items()]
    fitting = {peer: alive[peer] for peer in slots if peer not in absurd}
    return fitting, ignored


def _samples_of_the_past(
    fitting: Mapping[PeerId, Seen], mine: ProgressSlot, members: frozenset[PeerId]
) -> list[Ignored]:
    """Peers that still collect samples for a round that is over. One epoch behind may only mean a
    slot that has not arrived yet; and members of the last round have brought their samples,
    whatever their slots say."""
    return [
        Ignored(
            peer,
            "past",
            f"Its {one.slot.samples:,} samples are of epoch {one.slot.epoch}, which is over: "
            f"this peer is at {mine.epoch}.",
        )
        for peer, one in fitting.items()
        if one.slot.samples and one.slot.epoch < mine.epoch - 1 and peer not in members
    ]


def came_after(seen: Mapping[PeerId, Seen], mine: ProgressSlot, now: float) -> float:
    """How long after the beginning of its epoch this peer came into it, by what the others say; 0
    if they do not know either."""
    at = (mine.epoch, mine.history)
    told = [
        one.slot.epoch_seconds + max(0.0, now - one.at)
        for one in seen.values()
        if (one.slot.epoch, one.slot.history) == at and one.slot.epoch_seconds >= 0.0
    ]
    return min(median_low(told), LONGEST_SECONDS) if told else 0.0


def _has_just_begun(seen: Seen, now: float) -> bool:
    """Whether it computes its first batch, so that nobody knows yet how long its batches take."""
    slot = seen.slot
    is_first = slot.under_way >= 0.0 and not slot.samples_per_second
    return is_first and now - seen.at + slot.under_way < NEW_SECONDS


def _is_crowded(
    believed: Sequence[Counted], others: Sequence[Worker], own: Worker, target: int
) -> bool:
    """Whether a batch of this peer, plus all those that the others may begin before they know of a
    peer that has just come, exceed the target."""
    blind = {one.peer for one in believed if not one.slot.batch_seconds}
    may_begin = sum(_at_most(one, is_known=one.peer not in blind) for one in others)
    return own.batch + may_begin > target


def _at_most(worker: Worker, *, is_known: bool) -> int:
    """The most samples that it may have begun after `KNOWN_SECONDS`. `is_known`: the duration of
    its batches is known."""
    if not worker.batch:
        return worker.samples
    batches = math.ceil(KNOWN_SECONDS / worker.seconds) if is_known else BLIND_BATCHES
    return worker.samples + worker.under_way + batches * worker.batch


def _others_ready_in(others: Sequence[Worker], plan: BatchPlan, now: float) -> float:
    if not plan.is_full:
        return math.inf
    parts = plan.parts
    missing = [one for one in others if one.done_by(now, parts[one.peer]) < parts[one.peer]]
    if any(one.is_guessed for one in missing):
        return math.inf
    return max((one.ready_at(parts[one.peer]) - now for one in missing), default=0.0)


def _read_again_in(due_in: float, longest: float, *, is_due: bool) -> float:
    """Read more often the nearer the step is: some ten times in each epoch, however long it is; and
    often while peers that do not know of each other are coming."""
    if is_due:
        return READ_WHEN_DUE_SECONDS
    return min(longest, max(SHORTEST_READ_SECONDS, due_in / READS_BEFORE_DUE))
