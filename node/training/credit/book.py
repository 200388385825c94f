"""This peer's own records of the rounds that it took part in. Pure.

    book = Book(run, identity.public_key)
    book.restore(page)                              # what was on disk
    book.note(epoch, history, shares, moment=..., ...)   # each step of the run
    for number in book.take_changed():  shelf.put_own(sign_page(identity, book.page(number, t)))

Promises: the size is bounded, whatever the run does. A page has its limits, and only the last
PAGES_HELD are held here (older ones are on disk and change no more).

A step that this peer made alone is recorded as well. It gives nobody credit, and keeps others from
claiming to have taken part in it.

A run may go back to a checkpoint and make an epoch again. The earlier line is then replaced, and
the lines after it are removed, because nobody goes on from those steps. The same holds for steps
that a peer made alone and then gave up for the others' state (`gave_up_alone`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from protocols.credit.record import (
    HISTORY_BYTES,
    LARGEST_AMOUNT,
    MOST_IN_A_LINE,
    MOST_MEMBERS,
    MOST_SERVERS,
    Line,
    Page,
    page_number,
)
from protocols.identity import PeerId, public_key_of

if TYPE_CHECKING:
    from protocols.accumulation.events import Share

NOBODY: Final[Mapping[PeerId, int]] = MappingProxyType({})

PAGES_HELD = 8  # of the newest epochs; only the last one changes, except after a step back


@dataclass
class _Draft:
    members: list[bytes] = field(default_factory=list)
    lines: dict[int, Line] = field(default_factory=dict)


class Book:
    """Invariant: every line has this peer in it."""

    def __init__(self, run: str, key: bytes) -> None:
        self._run, self._key = run, key
        self._drafts: dict[int, _Draft] = {}
        self._changed: set[int] = set()

    def restore(self, page: Page) -> None:
        """A page of ours from an earlier session."""
        lines = {line.epoch: line for line in page.lines}
        self._drafts[page.number] = _Draft(list(page.members), lines)
        self._forget_old()

    def note(
        self,
        epoch: int,
        history: bytes,
        shares: tuple[Share, ...],
        *,
        moment: int,
        of_samples: float,
        over_a_grid: bool,
        served: Mapping[PeerId, int] = NOBODY,
    ) -> bool:
        """Record a step; False if a record has no room for such a step. `served`: the rows that the
        experts of each peer have computed for it."""
        self._remove_from(epoch)
        keys = [public_key_of(one.peer) for one in shares]
        if len(keys) > MOST_IN_A_LINE or self._key not in keys:
            return False
        if len(history) != HISTORY_BYTES:
            return False
        number = page_number(epoch)
        draft = self._drafts.setdefault(number, _Draft())
        members = dict.fromkeys([*draft.members, *keys])
        if len(members) > MOST_MEMBERS:
            return False
        most = sorted(served, key=lambda peer: (-served[peer], peer))[:MOST_SERVERS]
        rows = {public_key_of(peer): served[peer] for peer in most if served[peer]}
        room = max(len(members), MOST_MEMBERS - MOST_IN_A_LINE)  # the next group may be another one
        draft.members = list(members | dict.fromkeys(rows))[:room]
        places = {key: place for place, key in enumerate(draft.members)}
        draft.lines[epoch] = Line(
            epoch,
            history,
            moment,
            _amount(of_samples),
            over_a_grid,
            tuple(places[key] for key in keys),
            tuple(_amount(one.samples) for one in shares),
            tuple(_amount(one.averaged_bytes) for one in shares),
            tuple(places[key] for key in rows if key in places),
            tuple(_amount(each) for key, each in rows.items() if key in places),
        )
        self._changed.add(number)
        self._forget_old()
        return True

    def _remove_from(self, epoch: int) -> None:
        """The run makes this epoch now: a line of it, and those after it, are of steps that it has
        gone back from. They may be on several pages."""
        for number, draft in self._drafts.items():
            for later in [one for one in draft.lines if one >= epoch]:
                del draft.lines[later]
                self._changed.add(number)

    def gave_up_alone(self) -> None:
        """This peer took the others' state. The steps that it made alone since its last step with
        others are not part of the run."""
        for number in sorted(self._drafts, reverse=True):
            lines = self._drafts[number].lines
            for epoch in sorted(lines, reverse=True):
                if len(lines[epoch].places) > 1:
                    return
                del lines[epoch]
                self._changed.add(number)

    @property
    def has_changed(self) -> bool:
        return bool(self._changed)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The pages that are held."""
        return tuple(sorted(self._drafts))

    def take_changed(self) -> list[int]:
        """The pages that have changed since the last call."""
        changed, self._changed = sorted(self._changed & self._drafts.keys()), set()
        return changed

    def not_written(self, numbers: Iterable[int]) -> None:
        """These pages could not be written: they still count as changed, if they are held."""
        self._changed.update(sorted(self._drafts.keys() & {*numbers})[-PAGES_HELD:])
        self._forget_old()

    def page(self, number: int, token: bytes = b"") -> Page:
        draft = self._drafts[number]
        lines = tuple(draft.lines[epoch] for epoch in sorted(draft.lines))
        return Page(self._run, number, tuple(draft.members), lines, token)

    def _forget_old(self) -> None:
        """Pages without lines, too: after a step back they would be the newest."""
        empty = [number for number, draft in self._drafts.items() if not draft.lines]
        for number in {*empty, *sorted(self._drafts)[:-PAGES_HELD]} - self._changed:
            del self._drafts[number]


def _amount(value: float) -> int:
    return min(max(round(value), 0), LARGEST_AMOUNT)
