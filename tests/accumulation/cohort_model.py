"""The model of a run (lifecycle_model.py) with averaging by cohorts (moshpit/cohort_round.py).

A round has three parts, and anything may happen between them: a cohort averages, its head goes to
the round of all heads, and each other member takes what its head has decided. Who is a head, who is
expected and who may make a step are decisions of the product (`estimate`, `in_order`, `advance`).

`Broken` names rules that the product has, and that the model can do without: then the exploration
must find what goes wrong.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import median_low
from typing import Any

import msgspec

from protocols.accumulation.claims import CohortPlace, Credit
from protocols.accumulation.estimate import Estimate
from protocols.accumulation.known import Known, ProgressSettings, Seen
from protocols.accumulation.lifecycle import Averaged, Ending, Mode, Phase
from protocols.accumulation.lineage import Lineage, Voter, reached_by
from protocols.accumulation.progress import estimate
from protocols.accumulation.progress_slot import ProgressSlot, name_of_sum
from protocols.identity import PeerId
from protocols.moshpit.cohorts import cohort_of, in_order
from tests.accumulation.lifecycle_model import (
    Action,
    Rules,
    Sample,
    World,
    commits,
    digest_of,
    name_of,
    subsets,
    told_end,
    with_peer,
)

COHORTS = 3


class Broken(enum.Enum):
    NOTHING = "nothing"
    MEMBERS_STEP_WITHOUT_THEIR_HEAD = "a member applies what its head has not applied"
    TWO_HEADS_COUNT = "two heads of one cohort count"


@dataclass(frozen=True)
class Brings:
    """A cohort's average, at one of its members. `lost`: its link to the head is broken."""

    members: tuple[int, ...]
    samples: frozenset[Sample]
    lost: bool = False


@dataclass(frozen=True)
class Hands:
    """What a head hands down of the step after this epoch; None: there was no step."""

    epoch: int
    ended: Averaged | None
    samples: frozenset[Sample] = frozenset()


@dataclass(frozen=True)
class CohortRules(Rules):
    """`torn`: a link between two living peers may break in a round, too. `needs_most`: a step needs
    most of the peers of the last one, for ever (the product: for two minutes); without, most of
    the heads."""

    run: str = ""
    torn: bool = False
    needs_most: bool = False
    broken: Broken = Broken.NOTHING

    def cohort(self, number: int) -> int:
        return cohort_of(self.run, name_of(number), COHORTS)

    def in_order(self, numbers: tuple[int, ...]) -> list[int]:
        """The first of them is the head."""
        place = {name: at for at, name in enumerate(in_order(self.run, map(name_of, numbers)))}
        return sorted(numbers, key=lambda one: place[name_of(one)])

    def beginning(self) -> World:
        world = super().beginning()
        peers = tuple(replace(one, step_peers=self.size) for one in world.peers)
        return World(peers, tuple(one.slot for one in peers))

    def _estimated(
        self,
        number: int,
        mine: ProgressSlot,
        seen: dict[PeerId, Seen],
        reached: dict[CohortPlace, Lineage],
        **more: Any,
    ) -> Estimate:
        settings = ProgressSettings(self.mode.target_samples, run=self.run)
        known = Known(Credit(), me=name_of(number), cohorts=COHORTS, reached=reached, **more)
        return estimate(seen, mine, settings, 0.0, known, number=1)

    def estimate(self, world: World, number: int) -> Estimate:
        own: dict[int, dict[PeerId, Seen]] = {one: {} for one in range(COHORTS)}
        slots = [None if slot is None else by_cohorts(slot) for slot in world.board]
        for other, slot in enumerate(slots):
            if slot is not None:
                own[self.cohort(other)][name_of(other)] = Seen(slot, 0.0)
        reached = {}  # a peer reads the slots of those cohorts whose sums say that they are further
        for cohort, there in own.items():
            at = reached_by(
                Voter(peer, one.slot.at, one.slot.follows) for peer, one in there.items()
            )
            if at:
                reached[CohortPlace(COHORTS, cohort, COHORTS, cohort)] = at
        seen = dict(own[self.cohort(number)])
        seen.pop(name_of(number), None)
        for other, slot in enumerate(slots):
            if slot is None or other == number:
                continue
            beside = dict(own[self.cohort(other)])
            del beside[name_of(other)]
            told = self._estimated(other, slot, beside, reached).sum
            if told is not None:
                seen[name_of_sum(name_of(other))] = Seen(told, 0.0)
        mine = world.peers[number]
        if not self.needs_most:  # whoever says that it has made a step shows it
            shown = {peer: one.slot.at for peer, one in seen.items()}
            return self._estimated(number, by_cohorts(mine.slot), seen, reached, shown=shown)
        step_peers = mine.step_peers or median_low(
            [
                slot.step_peers
                for slot in slots
                if slot is not None and slot.at == mine.slot.at and slot.step_peers
            ]
            or [0]
        )
        asked = {
            name: one.slot.at
            for other, peer in enumerate(world.peers)
            for name in (name_of(other), name_of_sum(name_of(other)))
            if mine.has_failed and peer.alive and (one := seen.get(name)) is not None
        }
        return self._estimated(
            number,
            by_cohorts(mine.slot),
            seen,
            reached,
            needs=step_peers // 2 + 1,
            shown=asked,
            failed_for=0.0 if mine.has_failed else None,
        )

    def rounds(self, world: World) -> Iterator[Action]:
        waiting = [
            number
            for number, peer in enumerate(world.peers)
            if peer.alive and peer.life.phase is Phase.AVERAGING
        ]
        for key in sorted({world.peers[one].key[1:] for one in waiting}):
            here = [one for one in waiting if world.peers[one].key[1:] == key]
            yield from self._rounds_of(world, key[0], here)

    def _rounds_of(self, world: World, epoch: int, here: list[int]) -> Iterator[Action]:
        for cohort in range(COHORTS):
            idle = [
                one
                for one in here
                if self.cohort(one) == cohort and world.peers[one].brings is None
            ]
            for group in subsets(idle):
                yield from self._of_cohort(world, epoch, group)
        bringing = [one for one in here if world.peers[one].brings is not None]
        heads = []
        for one in bringing:
            before = self._before(world, one)
            is_lost = self.brings(world, one).lost
            if is_lost or not any(world.peers[other].alive for other in before):
                heads.append(one)
            else:
                yield from self._from_head(world, epoch, one, before)
        for group in subsets(heads):
            yield from self._of_heads(world, epoch, group)

    def brings(self, world: World, number: int) -> Brings:
        brings = world.peers[number].brings
        assert isinstance(brings, Brings)
        return brings

    def _before(self, world: World, number: int) -> list[int]:
        """The members of its cohort that are head before it."""
        in_turn = self.in_order(self.brings(world, number).members)
        return in_turn[: in_turn.index(number)]

    # -- a cohort

    def _of_cohort(self, world: World, epoch: int, group: tuple[int, ...]) -> Iterator[Action]:
        def of(counted: tuple[int, ...]) -> Brings:
            return Brings(
                counted, frozenset().union(*(world.peers[one].in_round for one in counted))
            )

        def with_average(at: World, counted: tuple[int, ...]) -> World:
            for one in counted:
                at = with_peer(at, one, replace(at.peers[one], brings=of(counted)))
            return at

        yield Action("average in the cohort", group, with_average(world, group))
        if len(group) == 1:
            return
        names = tuple(map(name_of, group))
        for one in group:
            others = tuple(other for other in group if other != one)
            in_doubt = Averaged(Ending.DISCARDED, members=names, in_doubt=True)
            left = self._end(world, one, in_doubt, epoch)
            yield Action(f"average, and {one} is left out", group, with_average(left, others))
            both = self._end(world, one, in_doubt, epoch)
            for other in others:
                average = replace(both.peers[other], brings=of(group))
                both = with_peer(both, other, average)
            yield Action(f"average, and {one} does not know", group, both)
        discarded = world
        for one in group:
            discarded = self._end(discarded, one, Averaged(Ending.DISCARDED), epoch)
        yield Action("discard", group, discarded)

    # -- the heads

    def _of_heads(self, world: World, epoch: int, group: tuple[int, ...]) -> Iterator[Action]:
        cohorts = [self.cohort(one) for one in group]
        if len(group) == 1:
            (one,) = group
            brings = self.brings(world, one)
            if brings.members == group:
                ended = Averaged(Ending.ALONE, digest=digest_of("alone", one, brings.samples))
            else:
                ended = self._no_step(world, one)
            after = self._end(world, one, ended, epoch, brings.samples)
            yield Action("is alone", group, self._handing(after, one, Hands(epoch, None)))
            return
        discarded = world
        for one in group:
            discarded = self._end(discarded, one, self._no_step(world, one), epoch)
            discarded = self._handing(discarded, one, Hands(epoch, None))
        yield Action("discard", group, discarded)
        if len(set(cohorts)) < len(cohorts) and self.broken is not Broken.TWO_HEADS_COUNT:
            return  # all discard a round with two heads of one cohort
        for counted in subsets(group):
            brought = [self.brings(world, one).samples for one in counted]
            samples = frozenset().union(*brought)
            assert sum(map(len, brought)) == len(samples), f"samples of {counted} count twice"
            yield from self._committed(world, epoch, group, counted, samples)

    def _committed(
        self,
        world: World,
        epoch: int,
        group: tuple[int, ...],
        counted: tuple[int, ...],
        samples: frozenset[Sample],
    ) -> Iterator[Action]:
        peers = sum(len(self.brings(world, one).members) for one in counted)
        for words, endings in commits(self, group, counted, samples, peers):
            after = world
            for one, ended in endings.items():
                after = self._end(after, one, ended, epoch, samples)
                life = after.peers[one].life
                applied = life.epoch > epoch or life.phase is Phase.STEPPING
                hands = None
                if ended.ending is Ending.COMMITTED and (applied or self._members_do_not_ask):
                    hands = replace(ended, handed_down=True)
                after = self._handing(after, one, Hands(epoch, hands, samples))
            yield Action(f"end as heads with {counted}{words}", group, after)

    @property
    def _members_do_not_ask(self) -> bool:
        return self.broken is Broken.MEMBERS_STEP_WITHOUT_THEIR_HEAD

    def _no_step(self, world: World, number: int) -> Averaged:
        """The end of a heads' round that made no step, for this head."""
        if not self._before(world, number):
            return Averaged(Ending.DISCARDED)
        return self._in_doubt(world, number)

    def _in_doubt(self, world: World, number: int) -> Averaged:
        found = self.estimate(world, number).cohort
        heads = () if found is None else tuple(found.heads)
        members = tuple(map(name_of, self.brings(world, number).members))
        return Averaged(Ending.DISCARDED, members=(*members, *heads), in_doubt=True)

    # -- the other members

    def _from_head(
        self, world: World, epoch: int, number: int, before: list[int]
    ) -> Iterator[Action]:
        """This member waits for the first of these that lives."""
        head = next(one for one in before if world.peers[one].alive)
        hands = world.peers[head].hands
        if isinstance(hands, Hands) and hands.epoch == epoch:
            ended = hands.ended or self._in_doubt(world, number)
            after = self._end(world, number, ended, epoch, hands.samples)
            yield Action("takes what its head decided", (number, head), after)
        if self.torn:
            lost = replace(self.brings(world, number), lost=True)
            after = with_peer(world, number, replace(world.peers[number], brings=lost))
            yield Action("loses its head", (number, head), after)

    # -- what all have in common

    def _end(
        self,
        world: World,
        number: int,
        ended: Averaged,
        epoch: int,
        samples: frozenset[Sample] = frozenset(),
    ) -> World:
        after = told_end(self, world, number, ended, epoch, samples)
        peer, had = after.peers[number], world.peers[number].steps
        came = ended.peers or 1
        step_peers, has_failed = (came, False) if peer.steps > had else (peer.step_peers, True)
        ended_at = replace(peer, brings=None, step_peers=step_peers, has_failed=has_failed)
        return with_peer(after, number, ended_at)

    def _handing(self, world: World, number: int, hands: Hands) -> World:
        return with_peer(world, number, replace(world.peers[number], hands=hands))


def by_cohorts(slot: ProgressSlot) -> ProgressSlot:
    return msgspec.structs.replace(slot, cohorts=COHORTS)


def rules_of(mode: Mode, size: int, **more: Any) -> CohortRules:
    """Rules for a run in which all cohorts have the same number of peers."""
    for number in range(10_000):
        rules = CohortRules(mode, size, run=f"run {number}", stale_slots=False, **more)
        cohorts = [rules.cohort(one) for one in range(size)]
        if all(cohorts.count(one) * COHORTS == size for one in range(COHORTS)):
            return rules
    raise AssertionError("no run divides these peers evenly")
