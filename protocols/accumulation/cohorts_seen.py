"""Who speaks for which cohort, and how much is believed of it. Pure.

    cohorts = CohortsSeen(fitting, mine, settings, known, now)
    cohorts.fitting          # the slots whose samples count
    cohorts.sum(...)         # what this peer says of its own cohort; None unless it is the head

A run with more peers than a group has places is divided into cohorts (moshpit/cohorts.py). A peer
reads the slots of its own cohort and one sum of each other, or what its head tells of all others
together. Their samples and rates are limited by what was brought to the last steps, if enough is
known of these (claims.py, `Past`). What the head tells is compared with the sums.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Sized
from dataclasses import replace
from typing import Final

import msgspec

from protocols.accumulation.batch_plan import BatchPlan
from protocols.accumulation.claims import CohortPlace
from protocols.accumulation.estimate import BROKEN_CLAIM, Ignored
from protocols.accumulation.known import (
    Counted,
    Known,
    OtherCohorts,
    ProgressSettings,
    Seen,
    has_moved_along,
    when_said,
)
from protocols.accumulation.lineage import BACKERS, BACKING_SHARE, Lineage, Voter, reached_by
from protocols.accumulation.progress_slot import (
    CARRIED_SECONDS,
    LARGEST_SAMPLES,
    LONGEST_SECONDS,
    REST,
    SAY_AGAIN_SECONDS,
    SLOT_SECONDS,
    ProgressSlot,
    is_sum,
    publisher_of,
)
from protocols.identity import PeerId
from protocols.moshpit.cohorts import FULL_SHARE, Cohort, cohort_of, in_order, turn_of

SUMS_PER_STEP: Final = 16
"""Into how many batches the other cohorts divide a cohort's part of a step when they plan it."""

RESTS_PER_STEP: Final = 64  # the same of the part of all other cohorts together

BOASTED_SHARE: Final = 0.25
"""A head boasts if it tells of so much more than the other cohorts' sums say, and of as large a
part of a step more."""

FRESH_SECONDS: Final = SAY_AGAIN_SECONDS + 2.0
"""How old the sums may be with which it is compared: those that living heads said last, and a
member has read lately."""


class CohortsSeen:
    """The slots that matter to this peer, and who speaks for which cohort.

    - `known`: the own slots of its cohort, and the newest sum of each other cohort.
    - `said`: these, and those without a proof.
    - `fitting`: those whose samples count. If the head of this peer's cohort tells what all other
      cohorts have together, that is `REST`, and their sums may be old. If it has died, its last
      word counts until the next one tells, or this peer has read the sums. A peer that has come
      into this epoch reads the sums itself: it cannot know whether the head has just died.
    - `others`: the names of those that are not of its cohort.
    - `teller`: the head that tells it, in the slot `told`; `boaster`: the head, if it tells of too
      much.
    - `voting`: the slots that decide whose state is the run's: of all peers, or the sums.
    - `has_vote`: this peer is one of those that decide it.
    - `unproved`: as in the estimate.
    - `moved`: the sums of heads that made the last step, and whose slots of this epoch have not
      arrived.
    - `vouched_for`: the sums of doubted heads whose cohorts were in all of the last steps. They
      count for what these brought to each.
    """

    def __init__(
        self,
        fitting: Mapping[PeerId, Seen],
        mine: ProgressSlot,
        settings: ProgressSettings,
        known: Known,
        now: float,
    ) -> None:
        self._slot, self._settings, self._known, self._now = mine, settings, known, now
        self._me, self._count, self._run = known.me, known.cohorts, settings.run
        self.teller: PeerId | None = None
        self.boaster: PeerId | None = None
        self.moved: frozenset[PeerId] = frozenset()
        self._heads: frozenset[PeerId] = frozenset()
        self._at = mine.at
        self._doubted = frozenset(
            one for one in fitting if is_sum(one) and known.credit.is_doubted(one, mine.epoch, now)
        )
        self.vouched_for = frozenset(
            one
            for one in self._doubted
            if known.epoch_began is not None and known.past.least_rate_of(self._number_of(one))
        )
        sums = {
            peer: self._credible_sum(peer, one) for peer, one in fitting.items() if is_sum(peer)
        }
        own_slots = {peer: one for peer, one in fitting.items() if not is_sum(peer)}
        self._reached, self._shown = dict(known.reached), {*known.shown.values()}
        self._lone: Mapping[PeerId, Seen] = {}
        self.told: Seen | None = None
        if self._count == 1:
            self._see_one_group(own_slots, sums)
        else:
            self._see_cohorts(fitting, own_slots, sums)

    def _see_one_group(self, own_slots: Mapping[PeerId, Seen], sums: Mapping[PeerId, Seen]) -> None:
        """Sums that are further are of a run by cohorts that this peer has not reached yet."""
        further = {peer: one for peer, one in sums.items() if one.slot.epoch > self._at.epoch}
        self.number, self.others, self.has_vote = 0, frozenset[PeerId](), True
        self.voting = self.fitting = self.known = self.said = {**own_slots, **further}
        self.unproved = self._without_proof(further)
        self._is_head = False

    def _see_cohorts(
        self,
        fitting: Mapping[PeerId, Seen],
        own_slots: Mapping[PeerId, Seen],
        sums: Mapping[PeerId, Seen],
    ) -> None:
        known, epoch = self._known, self._at.epoch
        self.number = number = self._number_of(self._me)
        ours = {
            peer: self._credible(peer, one)
            for peer, one in own_slots.items()
            if self._number_of(peer) == number
        }
        reached = reached_by(_voter(peer, one) for peer, one in ours.items())
        if reached:
            self._reached[CohortPlace(self._count, number, self._count, number)] = reached
        self.unproved = self._without_proof(sums)
        if known.failed_for is not None:
            further = {peer: one for peer, one in ours.items() if one.slot.epoch > epoch}
            self.unproved |= self._without_proof(further)

        newest = self._sums_that_count(sums)
        head = self._head_among(ours)
        self.has_vote = self._is_head = head == self._me
        before = newest.get(number)
        if self._is_head and before is not None and sums[before].slot.epoch <= epoch:
            del newest[number]  # but one that is further counts: it has made a step
        # the run is one group again, and this peer has not reached that step yet
        self._lone = lone = {
            peer: one
            for peer, one in own_slots.items()
            if one.slot.cohorts == 1 and one.slot.epoch > epoch
        }
        back = (sums[peer].slot for peer in newest.values())
        most = FULL_SHARE * self._settings.places  # so many peers a cohort has on average, or fewer
        self._back = sum(min(one.peers, most) for one in back if one.epoch <= epoch)
        if not self._are_enough(lone):
            self.unproved |= self._without_proof(lone)

        self.voting = {peer: sums[peer] for peer in newest.values()} | lone
        of_others = {
            peer: self._computing(peer, sums[peer]) for one, peer in newest.items() if one != number
        }
        self.known = {**ours, **lone, **of_others}
        self.said = {peer: fitting[peer] for peer in self.unproved} | self.known
        self.moved = frozenset(
            peer
            for peer, one in self.voting.items()
            if is_sum(peer)
            and peer not in self._doubted
            and has_moved_along(peer, one, self._slot, known)
        )
        there = frozenset(
            peer
            for peer, one in of_others.items()
            if one.slot.at == self._at and self._now - one.at <= CARRIED_SECONDS
        )
        self._heads = frozenset(
            map(publisher_of, (self.moved & of_others.keys()) | (there - self._doubted))
        )
        self._doubted_heads = frozenset(map(publisher_of, there & self.vouched_for))
        if known.epoch_began is not None:
            has_gone_on = any(one.epoch > epoch for one in reached)
            self._hear(head, ours, of_others, has_gone_on=has_gone_on)
        counted = of_others if self.told is None else {REST: self.told}
        self.others = frozenset(counted)
        self.fitting = {**ours, **lone, **counted}

    def _sums_that_count(self, sums: Mapping[PeerId, Seen]) -> dict[int, PeerId]:
        """For each cohort, by its number, the name of the sum that counts. Of two that were said
        lately, the first in order is of the head."""
        turns = {publisher_of(one): _head_turn(said.slot) for one, said in sums.items()}
        in_turn = in_order(self._run, turns, turns)
        places = {one: at for at, one in enumerate(in_turn)}

        def claim(one: PeerId) -> tuple[object, ...]:
            said, peer = sums[one], publisher_of(one)
            is_late = self._now - said.at > SAY_AGAIN_SECONDS or peer in self._known.lost
            place = 0 if is_late else -places[peer]
            credit = one not in self.unproved, one not in self._doubted
            return credit, said.slot.epoch, not is_late, place, said.at

        newest: dict[int, PeerId] = {}
        for peer in sorted(sums, key=claim):
            slot = sums[peer].slot
            if slot.cohorts == self._count or slot.epoch != self._at.epoch:
                newest[self._number_of(peer)] = peer
        return newest

    def _hear(
        self,
        head: PeerId | None,
        ours: Mapping[PeerId, Seen],
        of_others: Mapping[PeerId, Seen],
        *,
        has_gone_on: bool,
    ) -> None:
        """Find `teller` and `told`, or the `boaster`: what the head tells of the other cohorts, or
        what was told last."""
        teller, told = head, None if head is None else self._told_by(head, ours)
        if told is None and not has_gone_on:
            teller, told = self._told_last()
        if told is None:
            return
        if self._is_boasted(told, of_others):
            self.boaster = teller
        else:
            self.teller, self.told = teller, told

    def _computing(self, peer: PeerId, seen: Seen) -> Seen:
        """This sum, but one of an earlier epoch with the rate that its cohort had there on average:
        at the end of a step most peers wait."""
        slot = seen.slot
        most = self._known.past.rate_of(self._number_of(peer))
        rate = min(self._mean_rate(slot.samples), most)
        if slot.epoch >= self._at.epoch or rate <= slot.samples_per_second:
            return seen
        return replace(seen, slot=_at_rate(slot, rate, self._largest_batch))

    @property
    def _largest_batch(self) -> int:
        return self._settings.target_samples // (self._count * SUMS_PER_STEP)

    def _mean_rate(self, samples: float) -> float:
        """Samples per second of cohorts that brought so many to the last step; 0 if this peer does
        not know how long that took."""
        seconds = self._known.step_seconds
        return min(samples, self._settings.target_samples) / seconds if seconds > 0.0 else 0.0

    def _credible(self, peer: PeerId, seen: Seen) -> Seen:
        """This slot of a peer of the same cohort, with no more samples than it can have, nor a
        larger batch than it can bring."""
        slot, most = seen.slot, self.most_of(peer)
        is_here = slot.epoch == self._slot.epoch
        samples = slot.samples if is_here else slot.beside  # of this epoch
        if samples + slot.batch <= most:
            return seen
        samples = min(samples, int(most))
        batch = max(1, int(most) - samples) if slot.batch else 0
        seconds = slot.batch_seconds * batch / slot.batch if slot.batch else 0.0
        slot = msgspec.structs.replace(
            slot,
            samples=samples if is_here else slot.samples,
            beside=slot.beside if is_here else samples,
            batch=batch,
            batch_seconds=seconds,
        )
        return replace(seen, slot=slot)

    def _credible_sum(self, peer: PeerId, seen: Seen) -> Seen:
        """This sum, with no more samples than the cohort can have, nor a higher rate. Batches of a
        cohort are only a way to tell its rate."""
        slot, number, past = seen.slot, self._number_of(peer), self._known.past
        if slot.cohorts != self._count and slot.epoch >= self._slot.epoch:
            return seen
        rate = past.least_rate_of(number) if peer in self.vouched_for else past.rate_of(number)
        rate, samples = min(rate, slot.samples_per_second), slot.samples
        if slot.epoch == self._slot.epoch:
            said_at = when_said(seen, self._known.epoch_began, self._now)
            samples = int(min(self.most_of(peer, said_at), samples))
        slot = _at_rate(slot, rate, self._largest_batch)
        slot = msgspec.structs.replace(slot, samples=samples, under_way=-1.0, beside=0)
        return replace(seen, slot=slot)

    def most_of(self, name: PeerId, now: float | None = None) -> float:
        """How many samples this peer of the same cohort, or the cohort of this sum, may have now,
        or may have had at another moment, by what it has brought before."""
        known = self._known
        if self._count == 1 or name == REST:
            return math.inf
        since = None  # for how long all have computed for this epoch
        if known.epoch_began is not None:
            seconds = (self._now if now is None else now) - known.epoch_began
            since = known.head_start + max(0.0, seconds)
        if is_sum(name):
            number = self._number_of(name)
            if since is not None and name in self.vouched_for:
                return known.past.least_rate_of(number) * since
            return known.past.most_of_cohort(number, since)
        if since is None or not known.step_seconds:
            return math.inf
        return known.past.most_of(name, since / known.step_seconds)

    def _number_of(self, name: PeerId) -> int:
        return cohort_of(self._run, publisher_of(name), self._count)

    def _place_of(self, name: PeerId, slot: ProgressSlot) -> CohortPlace:
        number = cohort_of(self._run, publisher_of(name), slot.cohorts)
        return CohortPlace(slot.cohorts, number, self._count, self._number_of(name))

    def _are_enough(self, lone: Sized) -> bool:
        """Whether so many peers are believed that say the run is one group by now: then hardly any
        peer is in a cohort any more."""
        return len(lone) * BACKING_SHARE >= len(lone) + self._back

    def _without_proof(self, sums: Mapping[PeerId, Seen]) -> dict[PeerId, CohortPlace]:
        return {
            peer: self._place_of(peer, one.slot)
            for peer, one in sums.items()
            if self._is_strange(one.slot) and self._proved(peer, one.slot) is None
        }

    def _is_strange(self, slot: ProgressSlot) -> bool:
        """Whether a peer that believes it would give up its own state."""
        return slot.epoch >= self._at.epoch and slot.at != self._at

    def _proved(self, peer: PeerId, slot: ProgressSlot) -> Lineage | None:
        """What is proved of the state that this slot names: that one, or an earlier one that is
        still later than this peer's."""
        said, alone = slot.at, slot.cohorts == 1 < self._count
        reached = () if alone else self._reached.get(self._place_of(peer, slot), ())
        if said in self._shown or said in reached:
            return said
        shown = self._known.shown.get(peer)
        if shown is not None and self._at.epoch < shown.epoch <= said.epoch:
            return shown  # it made that step; whether it has made more is not known
        return reached[0] if reached and reached[0].epoch > self._at.epoch else None

    def refuted(self) -> list[Ignored]:
        return [
            Ignored(
                publisher_of(peer),
                "state",
                "It says that its cohort has a state that the peers there do not have.",
            )
            for peer in sorted(self.unproved.keys() & self._known.refuted)
            if is_sum(peer)
        ]

    def doubted(self) -> list[Ignored]:
        """Those of which no more is believed than what their cohorts have brought to the last
        steps, and those in whose place another head is believed."""
        return [
            Ignored(publisher_of(peer), "doubted", BROKEN_CLAIM)
            for peer in sorted(self._doubted)
            if peer in self.vouched_for or peer not in self.fitting
        ]

    def voters(self) -> list[Voter]:
        """Those that decide whose state is the run's."""
        found = []
        for peer, one in self.voting.items():
            voter = _voter(peer, one)
            if peer in self.moved:
                voter = voter._replace(at=self._at)
            elif is_sum(peer) and self._is_strange(one.slot):
                proved = self._proved(peer, one.slot)
                if proved is None:
                    continue
                voter = voter._replace(at=proved)
            found.append(voter)
        return found

    @property
    def is_open(self) -> bool:
        """Whether there are claims of which a proof may come."""
        return bool(self.unproved.keys() - self._known.settled)

    def followed(self, voters: Sequence[Voter]) -> list[Voter]:
        """Those of them whose later state this peer takes, if they are enough."""
        further = {one.peer for one in voters if one.at.epoch > self._at.epoch}
        further -= self._lone.keys() & self.unproved.keys()
        has_much_to_lose = self._at.epoch > 0
        if self.is_open and has_much_to_lose and len(further) < BACKERS:
            further = set()
        return [one for one in voters if one.at.epoch <= self._at.epoch or one.peer in further]

    def _head_among(self, ours: Mapping[PeerId, Seen]) -> PeerId | None:
        """The first of this cohort that is there and can be dialled. A peer that is really an epoch
        behind is none: a later one may have gone to the heads' round in its place, and all others
        must see that it has made a step."""
        mine, gone = self._slot, self._known.idle_heads | self._known.lost
        there = [
            peer
            for peer, one in ours.items()
            if (one.slot.epoch == mine.epoch or has_moved_along(peer, one, mine, self._known))
            and self._now - one.at <= CARRIED_SECONDS
            and not one.slot.client
            and peer not in gone
        ]
        turns = {peer: _head_turn(ours[peer].slot) for peer in there}
        if not mine.client:
            turns[self._me] = _head_turn(mine)
        return in_order(self._run, turns, turns)[0] if turns else None

    def _told_by(self, head: PeerId, ours: Mapping[PeerId, Seen]) -> Seen | None:
        """The slot of all other cohorts together, as this head tells it."""
        seen, mine = ours.get(head), self._slot
        if seen is None or head in self._known.boasters:
            return None
        slot = seen.slot
        is_here = (slot.epoch, slot.history) == (mine.epoch, mine.history)
        has_moved = has_moved_along(head, seen, mine, self._known)
        if not (slot.rest_cohorts and (is_here or has_moved)):
            return None
        rate = slot.rest_per_second
        if has_moved:
            rate = max(rate, self._mean_rate(slot.rest_samples))
        told = msgspec.structs.replace(
            _at_rate(slot, rate, self._settings.target_samples // RESTS_PER_STEP),
            samples=slot.rest_samples,
            role="trains",
            averaging=False,
            keeps=False,
            leaves=False,
            client=False,
            under_way=-1.0,
            spared=0,
            beside=0,
            name="",
            peers=1,
        )
        return replace(seen, slot=told)

    def _told_last(self) -> tuple[PeerId | None, Seen | None]:
        """Which head told this peer last in this epoch, and how, if that is still the newest that
        it knows of the other cohorts."""
        rest, at = self._known.rest, self._at
        if rest is None or rest.told is None or rest.told_by in self._known.boasters:
            return None, None
        told = rest.told
        counts = (
            (told.slot.at, told.slot.cohorts) == (at, self._count)
            and self._known.sums_read_at <= told.at
            and self._now - told.at <= SLOT_SECONDS
        )
        return (rest.told_by, told) if counts else (None, None)

    def _is_boasted(self, told: Seen, sums: Mapping[PeerId, Seen]) -> bool:
        """Whether the sums say something else. A cohort whose sum is older, or of another epoch,
        may have as much as is believed of it. If the head counts one without a sum here, that may
        have as much as the others: its own head may have died."""
        at = (self._slot.epoch, self._slot.history)
        if (told.slot.epoch, told.slot.history) != at:
            return False
        settings, now, began = self._settings, self._now, self._known.epoch_began
        counted, cohorts = 0.0, 0
        for peer, one in sums.items():
            if (one.slot.epoch, one.slot.history) == at and now - one.at <= FRESH_SECONDS:
                counted += Counted(peer, one, settings, now, began, self.most_of(peer)).samples
            else:
                counted += self.most_of(peer)
            cohorts += 1
        if not cohorts:
            return False
        counted *= max(1.0, min(told.slot.rest_cohorts, self._count - 1) / cohorts)
        claimed = Counted(REST, told, settings, now).samples
        most = (1.0 + BOASTED_SHARE) * counted + BOASTED_SHARE * settings.target_samples
        return claimed > most

    @property
    def mine(self) -> Cohort | None:
        """This peer's cohort, with the heads of the others that will come."""
        if self._count == 1:
            return None
        return Cohort(self.number, self._count, self._heads, self._doubted_heads)

    def rest(self, believed: Sequence[Counted], moved: Sequence[PeerId]) -> OtherCohorts | None:
        """What all other cohorts have together. Those whose sums of this epoch have not arrived go
        on as in the last one, for as long as a plan counts on them."""
        if self._count == 1:
            return None
        sums = [one for one in believed if is_sum(one.peer)]
        late = [self.fitting[peer].slot.samples_per_second for peer in moved if is_sum(peer)]
        settings, began, since = self._settings, self._known.epoch_began, 0.0
        if began is not None:
            here = min(max(0.0, self._now - began), settings.patience_seconds)
            since = self._known.head_start + here
        count = len(sums) + len(late) if self.told is None else self.told.slot.rest_cohorts
        return OtherCohorts(
            count,
            sum(one.samples for one in sums)
            + sum(min(since * rate, float(settings.target_samples)) for rate in late),
            sum(one.rate for one in sums) + sum(late),
            self.teller,
            self.told,
        )

    def sum(
        self, ours: Sequence[Counted], moved: Sequence[PeerId], plan: BatchPlan
    ) -> ProgressSlot | None:
        """What the cohort has together, if this peer is its head: in the plans of the other
        cohorts, that is one peer with small batches."""
        if not self._is_head:
            return None
        mine, now = self._slot, self._now
        busy = [one for one in ours if one.slot.under_way >= 0.0]
        rate = sum(one.rate for one in busy)
        if mine.under_way >= 0.0:
            rate += mine.samples_per_second
        # Batches under way count in full, as in every plan: they cannot be stopped.
        samples = mine.samples + (mine.batch if mine.under_way >= 0.0 else 0)
        samples += sum(min(one.begun_by(now), plan.parts[one.peer]) for one in ours)
        for peer in moved:  # its slot of this epoch has not arrived, and it computes already
            slot = self.fitting[peer].slot
            samples += min(slot.batch, plan.parts[peer])
            rate += slot.samples_per_second
        seconds, began = mine.epoch_seconds, self._known.epoch_began
        if began is not None:  # as of now, like the samples
            seconds = min(max(0.0, now - began), LONGEST_SECONDS)
        return msgspec.structs.replace(
            _at_rate(mine, rate, self._largest_batch),
            epoch_seconds=seconds,
            samples=min(samples, LARGEST_SAMPLES),
            under_way=-1.0,
            keeps=mine.keeps or any(one.slot.keeps for one in ours),
            spared=0,
            beside=0,
            name="",
            cohorts=self._count,
            peers=1 + len(ours) + len(moved),
            rest_cohorts=0,
            rest_samples=0,
            rest_per_second=0.0,
        )


def _voter(peer: PeerId, seen: Seen) -> Voter:
    return Voter(publisher_of(peer), seen.slot.at, seen.slot.follows)


def _head_turn(slot: ProgressSlot) -> int:
    return turn_of(follows=slot.follows, uplink=slot.uplink)


def _at_rate(slot: ProgressSlot, rate: float, batch: int) -> ProgressSlot:
    """The slot of many peers, as one that computes batches of this size at this rate."""
    batch = max(1, batch) if rate else 0
    seconds = min(batch / rate, LONGEST_SECONDS) if rate else 0.0
    return msgspec.structs.replace(
        slot, samples_per_second=rate, batch=batch, batch_seconds=seconds
    )
