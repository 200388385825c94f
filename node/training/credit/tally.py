"""Adds up who contributed how much, from many records, some of which may lie. Pure.

    standings = tally(records, persons, newest_epoch=1200, most_samples=4096, seen_by=me)

The *other persons* in a step decide whether it counts for a peer. The amount is the largest that
more than half of them confirm: their lower median (`confirmed_by`). In a step that the adding peer
took part in (`seen_by`), nothing counts beyond its own record. So

- nobody's word about themselves, or about another device of theirs, counts;
- a liar changes nothing as long as most others of the step tell the truth: raising an amount takes
  more than half of the voices, lowering it takes half of them;
- if `seen_by` was in the step, no number of liars can raise an amount or make another step of it;
- of two sides of a fork, the side of `seen_by` counts, else the larger one;
- a server of experts is credited with samples of the trainers that used it (`served_by`), and so
  never by its own word;
- a step that a peer made alone is counted apart, because no other has seen its samples. It counts
  only if it is known to be part of the run: the adding peer made it itself, or its maker alone
  records that epoch and went on from it, step by step, into a step that others confirm. The number
  of its samples is the maker's own word.

One person is one voice, however many devices say the same. Service is the time between successive
confirmed steps of a person, without gaps longer than BREAK_SECONDS.

The witnesses of a person are the others who recorded a step of it. One that says less of it in any
step than is credited is against it.

Promises: the result does not depend on the order of records, nor on how often one is given. Two
peers with the same records and the same `seen_by` get the same result. The cost grows with the
number of statements, not with the number of writers times the peers they name. So a few hundred
lines of a stranger's, each naming invented peers, do not cost hours.

A peer signs the samples that it brings to a round, but nobody sees it compute them. A round counts
at most a fixed number of batches of them (`events.MOST_BATCHES`), and no more is credited:
`most_samples`. Over a grid a line lists its own group only, so a peer that it does not name may
have been there; elsewhere it means that the peer was not there. A person who does not name a peer
has a voice about it, too.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import Final, NamedTuple

from protocols.credit.messages import LARGEST_SUM
from protocols.credit.record import LARGEST_AMOUNT, Line, Page
from protocols.identity import PeerId, peer_id_of


class Amounts(NamedTuple):
    """One peer's part in one step."""

    steps: int = 0
    samples: int = 0
    averaged_bytes: int = 0


NOTHING = Amounts()


@dataclass(frozen=True)
class ToldStep:
    """A line, with the peers' names in it. `served`: the rows that servers of experts computed for
    its writer."""

    writer: PeerId
    line: Line
    shares: Mapping[PeerId, Amounts]
    served: Mapping[PeerId, int]


Voices = dict[str, list[ToldStep]]
"""The lines of one step, from the devices of each person."""


@dataclass(frozen=True)
class _Word:
    """A person's word about each peer that a device of theirs names. `denies`: no other peer was
    in the step."""

    amounts: Mapping[PeerId, Amounts]
    denies: bool


def confirmed_by(voices: Voices, persons: Mapping[PeerId, str]) -> Iterator[tuple[PeerId, Amounts]]:
    """The peers that were in a step, with the amounts that most others confirm. `persons` names the
    peers; a peer that it does not name is a person of its own."""
    if not voices:
        return
    if not _all_say_the_same(voices):
        yield from _weighed(voices, persons)
        return
    told = next(iter(voices.values()))[0]
    for peer, amounts in sorted(told.shares.items()):
        if voices.keys() != {persons.get(peer, peer)}:
            yield peer, amounts._replace(samples=min(amounts.samples, told.line.of_samples))


def served_by(
    told: ToldStep, samples: int, persons: Mapping[PeerId, str]
) -> Iterator[tuple[PeerId, int]]:
    """The servers of another person, with their parts of a writer's samples in a step: as large as
    their parts of the rows that it had computed. Together they get no more than these samples, so a
    trainer that lies has no more to give away than it has brought itself."""
    rows = sum(told.served.values())
    for server, own in sorted(told.served.items()):
        part = samples * own // max(rows, 1)
        if part and persons.get(server, server) != persons.get(told.writer, told.writer):
            yield server, part


def of_history(voices: Voices, history: bytes) -> Voices:
    """The voices for this step, without those for another side of a fork."""
    told = {
        person: [one for one in said if one.line.history == history]
        for person, said in voices.items()
    }
    return {person: said for person, said in told.items() if said}


def lower_median(values: list[int], zeros: int = 0) -> int:
    """The largest value that more than half of these values and `zeros` reach."""
    middle = (len(values) + zeros) // 2
    return sorted(values, reverse=True)[middle] if middle < len(values) else 0


def _weighed(voices: Voices, persons: Mapping[PeerId, str]) -> Iterator[tuple[PeerId, Amounts]]:
    history = _history(voices)
    words = {person: _word(told) for person, told in voices.items() if _is_of(told, history)}
    for_it: defaultdict[PeerId, list[Amounts]] = defaultdict(list)
    of_those_who_deny_nobody: Counter[PeerId] = Counter()
    for person, word in words.items():
        for peer, amounts in word.amounts.items():
            if person != persons.get(peer, peer):
                for_it[peer].append(amounts)
                if not word.denies:
                    of_those_who_deny_nobody[peer] += 1
    denying, wholes = sum(word.denies for word in words.values()), _Wholes(voices)
    for peer in sorted(for_it):
        said, person = for_it.pop(peer), persons.get(peer, peer)
        own = words.get(person)
        others_denying = denying - (own is not None and own.denies)
        against = others_denying - (len(said) - of_those_who_deny_nobody[peer])
        if lower_median([one.steps for one in said], against):
            samples = lower_median([one.samples for one in said], against)
            averaged = lower_median([one.averaged_bytes for one in said], against)
            yield peer, Amounts(1, min(samples, wholes.without(person)), averaged)


def _word(told: list[ToldStep]) -> _Word:
    """The least that a device of theirs says. A device that denies a peer says that it brought
    nothing, even if another one names it."""
    denying = [one for one in told if not one.line.over_a_grid]
    if len(told) == 1:
        return _Word(told[0].shares, bool(denying))
    amounts: dict[PeerId, Amounts] = {}
    for one in told:
        for peer, found in one.shares.items():
            amounts[peer] = Amounts(*map(min, amounts.get(peer, found), found))
    named = Counter(peer for one in denying for peer in one.shares)
    return _Word(
        {
            peer: found if named[peer] == len(denying) else NOTHING
            for peer, found in amounts.items()
        },
        bool(denying),
    )


class _Wholes:
    """How many samples the step had in total, as each person says."""

    def __init__(self, voices: Voices) -> None:
        self._said = {
            person: min(one.line.of_samples for one in told) for person, told in voices.items()
        }
        self._ordered = sorted(self._said.values(), reverse=True)
        self._first = {value: place for place, value in reversed([*enumerate(self._ordered)])}

    def without(self, person: str) -> int:
        """The lower median of all others' word; there is at least one."""
        if person not in self._said:
            return self._ordered[len(self._ordered) // 2]
        middle = (len(self._ordered) - 1) // 2
        return self._ordered[middle + (self._first[self._said[person]] <= middle)]


def _all_say_the_same(voices: Voices) -> bool:
    """This is nearly always so, and then there is nothing to weigh."""
    first, *others = (one for told in voices.values() for one in told)
    line = first.line
    return all(
        (one.shares is first.shares or one.shares == first.shares)
        and one.line.history == line.history
        and one.line.of_samples == line.of_samples
        for one in others
    )


def _history(voices: Voices) -> bytes:
    """The history with the most voices; none if two have as many."""
    votes = Counter(one.line.history for told in voices.values() for one in _alike(told))
    ((history, most), *rest) = [*votes.most_common(2), (b"", 0)]
    return b"" if any(count == most for _, count in rest) else history


def _alike(told: list[ToldStep]) -> list[ToldStep]:
    """One of the lines of a person's devices, if they have one history."""
    return told[:1] if len({one.line.history for one in told}) == 1 else []


def _is_of(told: list[ToldStep], history: bytes) -> bool:
    """If a person's lines are not all of this side of a fork, none of them counts."""
    return all(one.line.history == history for one in told)


BREAK_SECONDS: Final = 900.0
"""A restart, a moved laptop or some failed rounds do not end a person's service."""

LONGEST_STEP_SECONDS: Final = 6 * 3600.0
"""There is no break between two successive steps, however slow the run. But a run that nobody
trained for a night gives no credit for the night."""

MOST_WITNESSES: Final = 1024
"""The persons who are counted as witnesses: the first of them that recorded a step. A person has a
bit for each, so that a shelf full of invented persons does not take memory for their squares."""


@dataclass(frozen=True)
class CreditRecord:
    """A page and its writer. `person` is empty for a writer who has no voice."""

    peer: PeerId
    person: str
    page: Page


@dataclass(frozen=True, slots=True)
class PersonStanding:
    """The contribution of one person. `helps`: all of it without samples. `witnesses`: the others
    with records of its steps, `confirming` those of them who confirm all that is credited."""

    person: str
    samples: int
    averaged_bytes: int
    steps: int
    service_seconds: float
    longest_seconds: float
    devices: tuple[PeerId, ...]
    alone_samples: int = 0
    alone_steps: int = 0
    served_samples: int = 0
    witnesses: int = 0
    confirming: int = 0

    @property
    def helps(self) -> bool:
        return not (self.samples or self.alone_samples)


@dataclass(frozen=True)
class _Step:
    """The lines about one step. `seen`: the adding peer's own, if it was there."""

    epoch: int
    voices: Voices
    seen: ToldStep | None


@dataclass(slots=True)
class _Sum:
    """Kept small: a stranger's pages may name hundreds of thousands. `epochs`: each once, in order;
    `devices`: may have repetitions; `witnesses`, and those `against` it, as bits."""

    samples: int = 0
    averaged_bytes: int = 0
    epochs: list[int] = field(default_factory=list)
    devices: list[PeerId] = field(default_factory=list)
    alone_samples: int = 0
    alone_steps: int = 0
    served_samples: int = 0
    witnesses: int = 0
    against: int = 0

    def add_step(self, peer: PeerId, epoch: int) -> None:
        if epoch not in self.epochs[-1:]:
            self.epochs.append(epoch)
        self._add_device(peer)

    def add_alone(self, peer: PeerId, samples: int) -> None:
        """Add a step that a device made alone."""
        self.alone_samples = min(self.alone_samples + samples, LARGEST_SUM)
        self.alone_steps += 1
        self._add_device(peer)

    def add_witnesses(self, told: int, against: int = 0) -> None:
        # most steps have the same, and then no number is made anew
        if told & ~self.witnesses:
            self.witnesses = self.witnesses | told if self.witnesses else told
        self.against |= against

    def add_served(self, peer: PeerId, samples: int) -> None:
        self.served_samples = min(self.served_samples + samples, LARGEST_SUM)
        self._add_device(peer)

    def _add_device(self, peer: PeerId) -> None:
        if peer not in self.devices[-1:]:
            self.devices.append(peer)


class _Witnesses(dict[str, int]):
    """The bit of each person who recorded a step; none for those after MOST_WITNESSES."""

    def __missing__(self, person: str) -> int:
        bit = self[person] = 1 << len(self) if len(self) < MOST_WITNESSES else 0
        return bit

    def of(
        self, step: _Step, credited: Mapping[PeerId, Amounts]
    ) -> Iterator[tuple[PeerId, int, int]]:
        """Each peer that is credited, with the persons whose records tell of its part in this step,
        and those of them who say less of it."""
        voices = step.voices
        if not credited:
            return
        if _all_say_the_same(voices):
            everybody = sum({self[person] for person in voices})
            yield from ((peer, everybody, 0) for peer in credited)
            return
        history = _history(voices) if step.seen is None else step.seen.line.history
        naming: Counter[PeerId] = Counter()
        against: Counter[PeerId] = Counter()
        denying = 0
        for person, told in of_history(voices, history).items():
            word, bit = _word(told), self[person]
            denying += bit if word.denies else 0
            for peer, amounts in word.amounts.items():
                naming[peer] += bit
                if any(map(int.__lt__, amounts, credited.get(peer, NOTHING))):
                    against[peer] += bit
        for peer in credited:
            denied = denying & ~naming[peer]
            yield peer, naming[peer] | denied, against[peer] | denied


class _Alone:
    """Steps that peers made alone, until it is known whether the run went on from them. Invariant:
    the steps of a peer follow one another, and the last is at the epoch that is kept with them."""

    def __init__(self, seen_by: PeerId | None) -> None:
        self._seen_by = seen_by
        self._waiting: dict[PeerId, tuple[int, list[tuple[int, ToldStep]]]] = {}

    def of(
        self, step: _Step, confirmed: Collection[PeerId], most_samples: int
    ) -> Iterator[tuple[int, ToldStep]]:
        """The steps that are now known to be the run's, each with its samples."""
        for peer in confirmed:
            epoch, made = self._waiting.pop(peer, (-2, []))
            if epoch + 1 == step.epoch:
                yield from made
        if len(step.voices) != 1:
            return
        ((told, *others),) = step.voices.values()
        if others or len(told.shares) != 1 or told.line.over_a_grid:
            return
        ((peer, amounts),) = told.shares.items()
        samples_now = min(amounts.samples, most_samples)
        if peer == self._seen_by:
            yield samples_now, told
            return
        epoch, made = self._waiting.get(peer, (-2, []))
        before = made if epoch + 1 == step.epoch else []
        before.append((samples_now, told))
        self._waiting[peer] = step.epoch, before


def tally(
    records: Iterable[CreditRecord],
    persons: Mapping[PeerId, str],
    *,
    newest_epoch: int,
    most_samples: int = LARGEST_AMOUNT,
    seen_by: PeerId | None = None,
) -> tuple[PersonStanding, ...]:
    """Everybody's contribution up to `newest_epoch`, the most samples first.

    `persons` names the peers; a peer that it does not name is a person of its own.
    """
    sums: defaultdict[str, _Sum] = defaultdict(_Sum)
    moments: dict[int, float] = {}
    alone, witnesses = _Alone(seen_by), _Witnesses()
    for step in _steps(records, persons, seen_by):
        if step.epoch > newest_epoch:
            continue  # it cannot have been made yet
        moments[step.epoch] = _moment(step)
        confirmed = dict(_confirmed(step, persons))
        for samples, told in alone.of(step, confirmed, most_samples):
            sums[persons.get(told.writer, told.writer)].add_alone(told.writer, samples)
            for server, part in served_by(told, samples, persons):
                sums[persons.get(server, server)].add_served(server, part)
        for peer, amounts in confirmed.items():
            one = sums[persons.get(peer, peer)]
            one.samples += min(amounts.samples, most_samples)
            one.averaged_bytes = min(one.averaged_bytes + amounts.averaged_bytes, LARGEST_SUM)
            one.add_step(peer, step.epoch)
        for peer, of_it, against in witnesses.of(step, confirmed):
            sums[persons.get(peer, peer)].add_witnesses(of_it, against)
        for told in chain.from_iterable(step.voices.values()):
            brought = min(confirmed.get(told.writer, NOTHING).samples, most_samples)
            for server, part in served_by(told, brought, persons):
                one = sums[persons.get(server, server)]
                one.add_served(server, part)
                one.add_step(server, step.epoch)
                one.add_witnesses(witnesses[persons.get(told.writer, told.writer)])
    standings = [
        _standing(person, sums.pop(person), moments, witnesses.get(person, 0))
        for person in list(sums)
    ]
    standings.sort(
        key=lambda one: (
            -one.samples,
            -one.alone_samples,
            -one.served_samples,
            -one.averaged_bytes,
            -one.service_seconds,
            one.person,
        )
    )
    return tuple(standings)


def _steps(
    records: Iterable[CreditRecord], persons: Mapping[PeerId, str], seen_by: PeerId | None
) -> Iterator[_Step]:
    """The lines about each step, the oldest first; of two versions of a line the newer one."""
    newest: dict[tuple[int, PeerId], tuple[str, Line, Page]] = {}
    for record in records:
        if not (record.person or record.peer == seen_by):
            continue
        # A peer belongs to one person at a time, or its own word would be another person's.
        person = record.person and persons.get(record.peer, record.person)
        for line in record.page.lines:
            place = line.epoch, record.peer
            before = newest.get(place)
            if before is None or _order(line, record.page) > _order(before[1], before[2]):
                newest[place] = person, line, record.page
    names = _Names()
    for epoch, places in groupby(sorted(newest), key=lambda place: place[0]):
        voices: Voices = {}
        seen: ToldStep | None = None
        alike: dict[object, dict[PeerId, Amounts]] = {}  # most have the same content and order
        for place in places:
            person, line, page = newest[place]
            content = page.members, line.places, line.samples, line.averaged_bytes
            shares = alike.get(content)
            if shares is None:
                shares = alike[content] = {
                    names[key]: Amounts(1, samples, averaged)
                    for key, samples, averaged in _shares(line, page)
                }
            served = {
                names[page.members[server]]: rows
                for server, rows in zip(line.servers, line.served, strict=True)
            }
            told = ToldStep(place[1], line, shares, served)
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
    """Every peer picks the same of two versions."""
    served = [
        (page.members[one], rows) for one, rows in zip(line.servers, line.served, strict=True)
    ]
    return line.moment, line.history, sorted(_shares(line, page)), sorted(served)


def _shares(line: Line, page: Page) -> Iterator[tuple[bytes, int, int]]:
    for place, samples, averaged in zip(
        line.places, line.samples, line.averaged_bytes, strict=True
    ):
        yield page.members[place], samples, averaged


def _confirmed(step: _Step, persons: Mapping[PeerId, str]) -> Iterator[tuple[PeerId, Amounts]]:
    """The peers in this step, with what most others confirm and the adding peer saw."""
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
    """By the adding peer's own clock, or by the clock of most others who were there."""
    if step.seen is not None:
        return step.seen.line.moment
    return lower_median([min(one.line.moment for one in told) for told in step.voices.values()])


def _standing(person: str, one: _Sum, moments: Mapping[int, float], own_bit: int) -> PersonStanding:
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
    return PersonStanding(
        person,
        one.samples,
        one.averaged_bytes,
        len(one.epochs),
        whole,
        longest,
        tuple(sorted(set(one.devices))),
        one.alone_samples,
        one.alone_steps,
        one.served_samples,
        (one.witnesses & ~own_bit).bit_count(),
        (one.witnesses & ~one.against & ~own_bit).bit_count(),
    )
