"""Adding up who brought what, from many records of which some may lie. Pure.

    standings = tally(records, persons, newest_epoch=1200, most_samples=4096, seen_by=me)

A step counts for a peer as the *other persons* say who were in it. Of what they say, the amount is
taken that more than half of them confirm at least: their lower median (weighing.py). And of a step
that the one who adds up was in itself (`seen_by`), nothing counts that it has not seen. So

- nobody's word about themselves, or about another device of theirs, counts;
- a liar changes nothing as long as most others of the step tell the truth: to raise an amount takes
  more than half of the voices, to lower it half of them;
- where `seen_by` was in the step, no number of liars raises anything, nor makes another step of it;
- of two sides of a fork its own counts, else the larger one;
- a step that a peer made alone counts apart, as alone: no other has seen what is in it. And it
  counts only where it is known to be of the run's line: the adding peer made it itself, or nobody
  tells of that epoch but its maker, who went on from it, step by step, into one that others
  confirm it in. Of how many samples it was, its maker alone says.

One person is one voice, whatever number of devices say the same. Service is the time between
successive confirmed steps of a person, where no gap was longer than BREAK_SECONDS.

Promises: the result does not depend on the order of records, nor on how often one is given; whoever
has the same records, and takes the same peer for `seen_by`, comes to the same.

Easy to get wrong: what somebody brings to a round is signed by them, and computed where nobody
looks. A round counts it as so many batches at most (`share.MOST_BATCHES`), and no more is credited:
`most_samples`. And over a grid a line tells of its own group only, and its silence about a peer
says nothing. Elsewhere it says that this peer was not there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final

from node.credit.weighing import (
    NOTHING,
    Amounts,
    Told,
    Voices,
    confirmed_by,
    lower_median,
    of_history,
)
from protocols.credit.messages import LARGEST_SUM
from protocols.credit.record import LARGEST_AMOUNT, Line, Page
from protocols.identity import PeerId, peer_id_of

BREAK_SECONDS: Final = 900.0
"""Without a confirmed step: a restart, a moved laptop or some failed rounds end no service."""

LONGEST_STEP_SECONDS: Final = 6 * 3600.0
"""Two steps that follow each other immediately have no break between them, in however slow a run;
but a run that nobody trained for a night gives no credit for the night."""


@dataclass(frozen=True)
class Record:
    """A page, and who wrote it. `person` is empty for a writer who is no voice."""

    peer: PeerId
    person: str
    page: Page


@dataclass(frozen=True, slots=True)
class Standing:
    """What one person gave. `helps`: all of it without samples."""

    person: str
    samples: int
    averaged_bytes: int
    steps: int
    service_seconds: float
    longest_seconds: float
    devices: tuple[PeerId, ...]
    alone_samples: int = 0
    alone_steps: int = 0

    @property
    def helps(self) -> bool:
        return not (self.samples or self.alone_samples)


@dataclass(frozen=True)
class _Step:
    """What is said of one. `seen`: by the one who adds up, if it was there."""

    epoch: int
    voices: Voices
    seen: Told | None


@dataclass(slots=True)
class _Sum:
    """Small: a stranger's pages may name hundreds of thousands. `epochs`: each once, in order;
    `devices`: perhaps several times."""

    samples: int = 0
    averaged_bytes: int = 0
    epochs: list[int] = field(default_factory=list)
    devices: list[PeerId] = field(default_factory=list)
    alone_samples: int = 0
    alone_steps: int = 0

    def add_alone(self, peer: PeerId, steps: Sequence[int]) -> None:
        """Steps that a device made alone, by their samples."""
        self.alone_samples = min(self.alone_samples + sum(steps), LARGEST_SUM)
        self.alone_steps += len(steps)
        if steps and peer not in self.devices[-1:]:
            self.devices.append(peer)


class _Alone:
    """Steps that peers made alone, until it is known whether the run went on from them. Invariant:
    those of a peer follow one another, and the last of them is at the epoch kept with them."""

    def __init__(self, seen_by: PeerId | None) -> None:
        self._seen_by = seen_by
        self._waiting: dict[PeerId, tuple[int, list[int]]] = {}

    def of(
        self, step: _Step, confirmed: Collection[PeerId], most_samples: int
    ) -> Iterator[tuple[PeerId, Sequence[int]]]:
        """The peers whose steps are now known to be the run's, with the samples of each step."""
        for peer in confirmed:
            epoch, samples = self._waiting.pop(peer, (-2, []))
            if epoch + 1 == step.epoch:
                yield peer, samples
        if len(step.voices) != 1:
            return
        ((told, *others),) = step.voices.values()
        if others or len(told.shares) != 1 or told.line.over_a_grid:
            return
        ((peer, amounts),) = told.shares.items()
        samples_now = min(amounts.samples, most_samples)
        if peer == self._seen_by:
            yield peer, [samples_now]
            return
        epoch, samples = self._waiting.get(peer, (-2, []))
        before = samples if epoch + 1 == step.epoch else []
        before.append(samples_now)
        self._waiting[peer] = step.epoch, before


def tally(
    records: Iterable[Record],
    persons: Mapping[PeerId, str],
    *,
    newest_epoch: int,
    most_samples: int = LARGEST_AMOUNT,
    seen_by: PeerId | None = None,
) -> tuple[Standing, ...]:
    """What everybody gave up to `newest_epoch`, the most samples first.

    `persons` names the peers; one that it does not name is a person of its own.
    """
    sums: defaultdict[str, _Sum] = defaultdict(_Sum)
    moments: dict[int, float] = {}
    alone = _Alone(seen_by)
    for step in _steps(records, persons, seen_by):
        if step.epoch > newest_epoch:
            continue  # nobody can have made it yet
        moments[step.epoch] = _moment(step)
        confirmed = dict(_confirmed(step, persons))
        for peer, samples in alone.of(step, confirmed, most_samples):
            sums[persons.get(peer, peer)].add_alone(peer, samples)
        for peer, amounts in confirmed.items():
            one = sums[persons.get(peer, peer)]
            one.samples += min(amounts.samples, most_samples)
            one.averaged_bytes = min(one.averaged_bytes + amounts.averaged_bytes, LARGEST_SUM)
            if step.epoch not in one.epochs[-1:]:
                one.epochs.append(step.epoch)
            if peer not in one.devices[-1:]:
                one.devices.append(peer)
    standings = [_standing(person, sums.pop(person), moments) for person in list(sums)]
    standings.sort(
        key=lambda one: (
            -one.samples,
            -one.alone_samples,
            -one.averaged_bytes,
            -one.service_seconds,
            one.person,
        )
    )
    return tuple(standings)


def _steps(
    records: Iterable[Record], persons: Mapping[PeerId, str], seen_by: PeerId | None
) -> Iterator[_Step]:
    """What is said of each step, the oldest first; of two versions of a line the newer one."""
    newest: dict[tuple[int, PeerId], tuple[str, Line, Page]] = {}
    for record in records:
        if not (record.person or record.peer == seen_by):
            continue
        # A peer is one person's at a time, or its own word would be another person's.
        person = record.person and persons.get(record.peer, record.person)
        for line in record.page.lines:
            place = line.epoch, record.peer
            before = newest.get(place)
            if before is None or _order(line, record.page) > _order(before[1], before[2]):
                newest[place] = person, line, record.page
    names = _Names()
    for epoch, places in groupby(sorted(newest), key=lambda place: place[0]):
        voices: Voices = {}
        seen: Told | None = None
        alike: dict[object, dict[PeerId, Amounts]] = {}  # most say the same, in the same order
        for place in places:
            person, line, page = newest[place]
            content = page.members, line.places, line.samples, line.averaged_bytes
            shares = alike.get(content)
            if shares is None:
                shares = alike[content] = {
                    names[key]: Amounts(1, samples, averaged)
                    for key, samples, averaged in _shares(line, page)
                }
            told = Told(line, shares)
            if person:
                voices.setdefault(person, []).append(told)
            if place[1] == seen_by:
                seen = told
        yield _Step(epoch, voices, seen)


class _Names(dict[bytes, PeerId]):
    """The peers' names by their keys: writing one costs 20 microseconds."""

    def __missing__(self, key: bytes) -> PeerId:
        name = self[key] = peer_id_of(key)
        return name


def _order(line: Line, page: Page) -> tuple[object, ...]:
    """Which of two versions counts is the same for everybody."""
    return line.moment, line.history, sorted(_shares(line, page))


def _shares(line: Line, page: Page) -> Iterator[tuple[bytes, int, int]]:
    for place, samples, averaged in zip(
        line.places, line.samples, line.averaged_bytes, strict=True
    ):
        yield page.members[place], samples, averaged


def _confirmed(step: _Step, persons: Mapping[PeerId, str]) -> Iterator[tuple[PeerId, Amounts]]:
    """The peers that were in this step, with what most others confirm, and the adding one saw."""
    seen = step.seen
    if seen is None:
        yield from confirmed_by(step.voices, persons)
        return
    voices = of_history(step.voices, seen.line.history)
    for peer, amounts in confirmed_by(voices, persons):
        found = seen.shares.get(peer, amounts if seen.line.over_a_grid else NOTHING)
        if found.steps:
            yield peer, Amounts(*map(min, amounts, found))


def _moment(step: _Step) -> float:
    """By one's own clock, or that of most others who were there."""
    if step.seen is not None:
        return step.seen.line.moment
    return lower_median([min(one.line.moment for one in told) for told in step.voices.values()])


def _standing(person: str, one: _Sum, moments: Mapping[int, float]) -> Standing:
    whole = longest = current = 0.0
    before: int | None = None
    for epoch in one.epochs:
        if before is not None:
            seconds = max(0.0, moments[epoch] - moments[before])
            limit = LONGEST_STEP_SECONDS if epoch == before + 1 else BREAK_SECONDS
            current = current + seconds if seconds <= limit else 0.0
            whole += seconds if seconds <= limit else 0.0
            longest = max(longest, current)
        before = epoch
    return Standing(
        person,
        one.samples,
        one.averaged_bytes,
        len(one.epochs),
        whole,
        longest,
        tuple(sorted(set(one.devices))),
        one.alone_samples,
        one.alone_steps,
    )
