"""What most others confirm of one step, where not all say the same. Pure.

    for peer, amounts in confirmed_by(voices, persons): ...

A peer was in a step if more than half of the other persons say so, and brought what more than half
of them reach at least: their lower median. A line that does not name a peer says that it was not
there; over a grid, where a line tells of its own group only, it says nothing about it.

Promises: what it costs grows with what was said, and not with how many speak times how many they
name. A few hundred lines of a stranger's, each naming others that it made up, are no work for
hours.

Easy to get wrong: who is silent about a peer counts as well, and is not asked. It is counted.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from protocols.credit.record import Line
from protocols.identity import PeerId


class Amounts(NamedTuple):
    """Of one peer in one step."""

    steps: int = 0
    samples: int = 0
    averaged_bytes: int = 0


NOTHING = Amounts()


@dataclass(frozen=True)
class Told:
    """A line, with the peers' names in it."""

    line: Line
    shares: Mapping[PeerId, Amounts]


Voices = dict[str, list[Told]]
"""Of one step: what the devices of each person say."""


@dataclass(frozen=True)
class _Word:
    """What a person says of each peer that a device of theirs names. `denies`: whoever else there
    is was not in the step."""

    amounts: Mapping[PeerId, Amounts]
    denies: bool


def confirmed_by(voices: Voices, persons: Mapping[PeerId, str]) -> Iterator[tuple[PeerId, Amounts]]:
    """The peers that were in a step, with what most others confirm. `persons` names the peers; one
    that it does not name is a person of its own."""
    if not voices:
        return
    if not _all_say_the_same(voices):
        yield from _weighed(voices, persons)
        return
    told = next(iter(voices.values()))[0]
    for peer, amounts in sorted(told.shares.items()):
        if voices.keys() != {persons.get(peer, peer)}:
            yield peer, amounts._replace(samples=min(amounts.samples, told.line.of_samples))


def of_history(voices: Voices, history: bytes) -> Voices:
    """What is said of this step, and not of another side of a fork."""
    told = {
        person: [one for one in said if one.line.history == history]
        for person, said in voices.items()
    }
    return {person: said for person, said in told.items() if said}


def lower_median(values: list[int], zeros: int = 0) -> int:
    """The largest value that more than half of these, and of so many zeros, reach."""
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


def _word(told: list[Told]) -> _Word:
    """The least that a device of theirs says. One that denies a peer says that it brought nothing,
    also where another one names it."""
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
    """How many samples all brought to the step together, as each person says it."""

    def __init__(self, voices: Voices) -> None:
        self._said = {
            person: min(one.line.of_samples for one in told) for person, told in voices.items()
        }
        self._ordered = sorted(self._said.values(), reverse=True)
        self._first = {value: place for place, value in reversed([*enumerate(self._ordered)])}

    def without(self, person: str) -> int:
        """The lower median of all others' word; there is one."""
        if person not in self._said:
            return self._ordered[len(self._ordered) // 2]
        middle = (len(self._ordered) - 1) // 2
        return self._ordered[middle + (self._first[self._said[person]] <= middle)]


def _all_say_the_same(voices: Voices) -> bool:
    """Nearly always: then there is nothing to weigh."""
    first, *others = (one for told in voices.values() for one in told)
    line = first.line
    return all(
        (one.shares is first.shares or one.shares == first.shares)
        and one.line.history == line.history
        and one.line.of_samples == line.of_samples
        for one in others
    )


def _history(voices: Voices) -> bytes:
    """That of the most voices; none if there are two such."""
    votes = Counter(one.line.history for told in voices.values() for one in _alike(told))
    ((history, most), *rest) = [*votes.most_common(2), (b"", 0)]
    return b"" if any(count == most for _, count in rest) else history


def _alike(told: list[Told]) -> list[Told]:
    """One of what a person's devices say, if they are of one history."""
    return told[:1] if len({one.line.history for one in told}) == 1 else []


def _is_of(told: list[Told], history: bytes) -> bool:
    """All of what a person says is of this side of a fork, or nothing of it counts."""
    return all(one.line.history == history for one in told)
