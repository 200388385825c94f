"""A keeper's sums as they are given out, and whether they are what the records come to. Pure.

    sums = sums_of(keyring, pages, steps=1200, most_samples=4096, seen_by=me)   # at the keeper
    wrong = differences(sums, added_up_again(sums, keyring, pages, ...))        # at anybody's

Sums name the pages that they were made of, each with the last epoch in it: pages grow at their end,
so whoever has a newer version cuts it there and has the same lines.

Promises: the same records give the same sums, down to the second, at everybody; what differs is
told person by person.

Easy to get wrong: who a peer is, is taken from the tokens in the pages alone. What somebody has
shown at the keeper's door, the one who checks cannot know.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import msgspec

from auth.keyring import Keyring
from node.credit.people import persons_of, records_of
from node.credit.tally import Standing, tally
from protocols.credit.messages import MOST_LISTED, MOST_SUMMED, Sum, Sums, Used
from protocols.credit.record import Page
from protocols.identity import PeerId, public_key_of

MOST_TOLD: Final = 20  # differences, in words

Pages = Iterable[tuple[PeerId, Page]]


def standings_of(
    keyring: Keyring | None, pages: Pages, *, steps: int, most_samples: int, seen_by: PeerId | None
) -> tuple[Standing, ...]:
    """What everybody gave to the run's first `steps` steps, by these pages alone."""
    records = records_of(keyring, pages)
    return tally(
        records,
        persons_of(records, None),
        newest_epoch=steps - 1,
        most_samples=most_samples,
        seen_by=seen_by,
    )


def sums_of(
    keyring: Keyring | None,
    pages: Iterable[tuple[PeerId, Page]],
    *,
    steps: int,
    most_samples: int,
    seen_by: PeerId,
) -> Sums:
    """What a keeper gives out."""
    found = [(peer, page) for peer, page in pages if page.lines][:MOST_LISTED]
    standings = standings_of(
        keyring, found, steps=steps, most_samples=most_samples, seen_by=seen_by
    )
    used = tuple(
        Used(public_key_of(peer), page.number, page.lines[-1].epoch) for peer, page in found
    )
    together = [one for one in standings if one.steps]  # what was made alone, others cannot check
    return Sums(steps, tuple(map(_sum, together[:MOST_SUMMED])), used)


def added_up_again(
    sums: Sums,
    keyring: Keyring | None,
    pages: Pages,
    *,
    most_samples: int,
    seen_by: PeerId,
) -> Sums:
    """The sums that the pages which `sums` names come to, as far as they are here."""
    last = {(used.key, used.number): used.last for used in sums.used}
    cut = [
        (peer, _up_to(page, last[place]))
        for peer, page in pages
        if (place := (public_key_of(peer), page.number)) in last
    ]
    return sums_of(keyring, cut, steps=sums.steps, most_samples=most_samples, seen_by=seen_by)


def missing(sums: Sums, pages: Pages) -> tuple[Used, ...]:
    """The pages that `sums` names and that are not here, or not as far."""
    here = {
        (public_key_of(peer), page.number): page.lines[-1].epoch
        for peer, page in pages
        if page.lines
    }
    return tuple(one for one in sums.used if here.get((one.key, one.number), -1) < one.last)


def not_used(sums: Sums, pages: Pages) -> int:
    """How many pages with lines of the summed steps are here, and are not in the sums."""
    used = {(one.key, one.number) for one in sums.used}
    return sum(
        1
        for peer, page in pages
        if page.lines
        and page.lines[0].epoch < sums.steps
        and (public_key_of(peer), page.number) not in used
    )


def differences(sums: Sums, found: Sums) -> tuple[str, ...]:
    """What the sums say otherwise than the records that they name, in words; empty: nothing."""
    said, proven = _by_person(sums), _by_person(found)
    told = list(_differences(said, proven))
    more = len(told) - MOST_TOLD
    return (*told[:MOST_TOLD], *([f"and {more:,} more"] if more > 0 else []))


def _differences(said: Mapping[str, Sum], proven: Mapping[str, Sum]) -> Iterator[str]:
    for person in sorted({*said, *proven}):
        one, other = said.get(person), proven.get(person)
        if one is None:
            yield f"{person} is not in it, and the records say {_words(other)}"
        elif other is None:
            yield f"{person} is in it, and in no record"
        elif one != other:
            for name in Sum.__struct_fields__:
                a, b = getattr(one, name), getattr(other, name)
                if a != b:
                    yield f"{person}: {a:,} {name.replace('_', ' ')}, and the records say {b:,}"


def _words(one: Sum | None) -> str:
    return "nothing" if one is None else f"{one.samples:,} samples in {one.steps:,} steps"


def _by_person(sums: Sums) -> dict[str, Sum]:
    return {one.person: one for one in sums.sums}


def _up_to(page: Page, last: int) -> Page:
    lines = tuple(line for line in page.lines if line.epoch <= last)
    return msgspec.structs.replace(page, lines=lines)


def _sum(one: Standing) -> Sum:
    return Sum(
        one.person,
        one.samples,
        one.averaged_bytes,
        one.steps,
        round(one.service_seconds),
        round(one.longest_seconds),
        len(one.devices),
    )
