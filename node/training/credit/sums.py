"""A keeper's sums of the records, and checking them by adding up the same records again.

    sums = sums_of(keyring, pages, steps=1200, most_samples=4096, seen_by=me)   # at the keeper
    wrong = differences(sums, added_up_again(sums, keyring, pages, ...))        # at any peer
    for check in await Checking(rpc, run, shelf, put, keyring, ...).check(keepers):
        check.agrees

Sums name the pages that they were made from, each with the last epoch in it. Pages only grow at
their end, so a peer with a newer version cuts it there and has the same lines. The keeper is not
trusted: its sums are compared with the signed records, wherever the pages come from. If it left
records out, this peer has pages that are not among the keeper's.

Promises: the same records give the same sums at every peer, down to the second; differences are
reported person by person.

Only the tokens in the pages say which person a peer belongs to (in an open run each peer is its own
person), because a checker cannot know the tokens that peers showed to the keeper. A token in a page
has often expired; it counts as long as the key that signed it does. A keeper treats its own lines
as what it saw itself (tally.py), so its checker must treat them so, too. Otherwise the sums differ
although nobody has lied.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec
import trio

from auth.keyring import Keyring
from auth.refusals import AccessRefused
from auth.roles import may_train
from auth.tokens import Token, is_genuine, read_token
from node.training.credit.shelf import BYTES_IN_ALL, Put, Shelf, fetch_page
from node.training.credit.tally import CreditRecord, PersonStanding, tally
from protocols.blocking import in_thread
from protocols.credit.messages import MOST_LISTED, MOST_SUMMED, SUMS, Sum, Sums, SumsRequest, Used
from protocols.credit.record import Page, read_page
from protocols.errors import PotluckError
from protocols.identity import PeerId, peer_id_of, public_key_of
from protocols.rpc import Rpc


def person_of(keyring: Keyring | None, peer: PeerId, page: Page) -> str:
    """The writer of a page; empty in a closed run if no token in it is signed by an auth key.
    Without a keyring the run is open."""
    if keyring is None:
        return peer
    try:
        token = read_token(page.token)
    except AccessRefused:
        return ""
    key = keyring.allows(token)
    is_theirs = token.run == keyring.run and token.peer_id == peer
    if key is None or not is_theirs or not is_genuine(page.token, key.key):
        return ""
    return token.username if may_train(token.roles) else ""


def records_of(keyring: Keyring | None, pages: Iterable[tuple[PeerId, Page]]) -> list[CreditRecord]:
    """The pages, each with its writer's person."""
    return [CreditRecord(peer, person_of(keyring, peer, page), page) for peer, page in pages]


def persons_of(
    records: Iterable[CreditRecord], shown_by: Callable[[PeerId], Token | None] | None
) -> dict[PeerId, str]:
    """The persons behind the peers that these pages name, by the token in their own page, or else
    by the one they showed this node. Peers with neither are left out. `shown_by`: None in an open
    run, and when the result is for somebody else.
    """
    found: dict[PeerId, str] = {}
    keys: set[bytes] = set()
    for record in sorted(records, key=lambda one: (one.page.number, one.person)):
        keys.update(record.page.members)
        if record.person:
            found[record.peer] = record.person
    if shown_by is None:  # a stranger's page may name thousands, at 20 microseconds each
        return found
    for peer in map(peer_id_of, keys):
        shown = shown_by(peer)
        if shown is not None:
            found.setdefault(peer, shown.username)
    return found


MOST_TOLD: Final = 20  # differences, in words

Pages = Iterable[tuple[PeerId, Page]]


def standings_of(
    keyring: Keyring | None, pages: Pages, *, steps: int, most_samples: int, seen_by: PeerId | None
) -> tuple[PersonStanding, ...]:
    """Everybody's part in the run's first `steps` steps, by these pages alone."""
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
    """The sums that a keeper gives out."""
    found = [(peer, page) for peer, page in pages if page.lines][:MOST_LISTED]
    standings = standings_of(
        keyring, found, steps=steps, most_samples=most_samples, seen_by=seen_by
    )
    used = tuple(
        Used(public_key_of(peer), page.number, page.lines[-1].epoch) for peer, page in found
    )
    together = [one for one in standings if one.steps]  # others cannot check steps made alone
    return Sums(steps, tuple(map(_sum, together[:MOST_SUMMED])), used)


def added_up_again(
    sums: Sums,
    keyring: Keyring | None,
    pages: Pages,
    *,
    most_samples: int,
    seen_by: PeerId,
) -> Sums:
    """The sums of the pages that `sums` names, as far as they are here."""
    last = {(used.key, used.number): used.last for used in sums.used}
    cut = [
        (peer, _up_to(page, last[place]))
        for peer, page in pages
        if (place := (public_key_of(peer), page.number)) in last
    ]
    return sums_of(keyring, cut, steps=sums.steps, most_samples=most_samples, seen_by=seen_by)


def missing(sums: Sums, pages: Pages) -> tuple[Used, ...]:
    """The pages that `sums` names and that are not here, or not up to the same epoch."""
    here = {
        (public_key_of(peer), page.number): page.lines[-1].epoch
        for peer, page in pages
        if page.lines
    }
    return tuple(one for one in sums.used if here.get((one.key, one.number), -1) < one.last)


def not_used(sums: Sums, pages: Pages) -> int:
    """How many pages here have lines of the summed steps, but are not in the sums."""
    used = {(one.key, one.number) for one in sums.used}
    return sum(
        1
        for peer, page in pages
        if page.lines
        and page.lines[0].epoch < sums.steps
        and (public_key_of(peer), page.number) not in used
    )


def differences(sums: Sums, found: Sums) -> tuple[str, ...]:
    """The differences between the sums and the records that they name, in words."""
    said, proven = _by_person(sums), _by_person(found)
    told = list(_differences(said, proven))
    more = len(told) - MOST_TOLD
    return (*told[:MOST_TOLD], *([f"and {more:,} more"] if more > 0 else []))


def _differences(said: Mapping[str, Sum], proven: Mapping[str, Sum]) -> Iterator[str]:
    for person in sorted({*said, *proven}):
        one, other = said.get(person), proven.get(person)
        if one is None:
            yield f"{person} is not in it, but the records say {_words(other)}"
        elif other is None:
            yield f"{person} is in it, but in no record"
        elif one != other:
            for name in Sum.__struct_fields__:
                a, b = getattr(one, name), getattr(other, name)
                if a != b:
                    yield f"{person}: {a:,} {name.replace('_', ' ')}, but the records say {b:,}"


def _words(one: Sum | None) -> str:
    return "nothing" if one is None else f"{one.samples:,} samples in {one.steps:,} steps"


def _by_person(sums: Sums) -> dict[str, Sum]:
    return {one.person: one for one in sums.sums}


def _up_to(page: Page, last: int) -> Page:
    lines = tuple(line for line in page.lines if line.epoch <= last)
    return msgspec.structs.replace(page, lines=lines)


def _sum(one: PersonStanding) -> Sum:
    return Sum(
        one.person,
        one.samples,
        one.averaged_bytes,
        one.steps,
        round(one.service_seconds),
        round(one.longest_seconds),
        len(one.devices),
        one.served_samples,
    )


CHECK_SECONDS: Final = 15.0  # of one keeper: somebody waits for the answer
SUMS_SECONDS: Final = 10.0  # a long run's sums are 200 KiB, and may have to be made first
MOST_CHECKED: Final = 8  # keepers; a run has one or two


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """The check of one keeper. `trouble`: why it could not be checked. `differences`: where its
    sums differ from the records. `without`: pages that it claimed to have added up but could not
    show; `left_out`: pages that are here and that it has not (yet) added up."""

    keeper: str
    steps: int = 0
    people: int = 0
    pages: int = 0
    differences: tuple[str, ...] = ()
    without: int = 0
    left_out: int = 0
    trouble: str = ""

    @property
    def agrees(self) -> bool:
        return not (self.trouble or self.differences or self.without)


@dataclass(frozen=True)
class Checking:
    """Checks keepers' sums. `until_made`: waits until this peer knows of the step of an epoch."""

    rpc: Rpc
    run: str
    shelf: Shelf
    put: Put
    keyring: Keyring | None
    most_samples: int
    until_made: Callable[[int], Awaitable[None]]

    async def check(self, keepers: Iterable[PeerId]) -> tuple[Check, ...]:
        """Check each of them, in order; those that keep no records are left out of the result."""
        found = []
        for keeper in list(keepers)[:MOST_CHECKED]:
            checked = await self._check(keeper)
            if checked is not None:
                found.append(checked)
        return tuple(found)

    async def _check(self, keeper: PeerId) -> Check | None:
        trouble = "It did not answer in time."
        with trio.move_on_after(CHECK_SECONDS):
            try:
                request = SumsRequest(self.run)
                sums = await self.rpc.call(keeper, SUMS, request, timeout=SUMS_SECONDS)
                if not sums.used and not sums.sums:
                    return None
                trouble = (
                    f"It has added up {sums.steps:,} steps, more than the run has made as far as "
                    "this peer knows."
                )
                await self.until_made(sums.steps - 1)
                trouble = "The records behind its sums did not arrive in time."
                had = await self._have(keeper, sums)
                return await in_thread(self._compare, keeper, sums, had)
            except (PotluckError, OSError) as error:
                trouble = error.what if isinstance(error, PotluckError) else str(error)
        return Check(keeper=keeper, trouble=trouble)

    async def _have(self, keeper: PeerId, sums: Sums) -> list[tuple[PeerId, Page]]:
        """Fetch the pages that the keeper has beyond ours. They are kept here, too, except our own,
        of which we may have lost some."""
        left, had = BYTES_IN_ALL, []
        for used in await in_thread(lambda: missing(sums, self.shelf.pages())):
            if left <= 0:
                break
            data = await fetch_page(self.rpc, keeper, self.run, used.key, used.number)
            left -= len(data)
            if data:
                await self.put(data)
                had.append(read_page(data, self.run))
        return had

    def _compare(self, keeper: PeerId, sums: Sums, had: list[tuple[PeerId, Page]]) -> Check:
        """Blocks while signatures are verified."""
        newest = {(peer, page.number): page for peer, page in [*self.shelf.pages(), *had]}
        pages = [(peer, page) for (peer, _), page in newest.items()]
        found = added_up_again(
            sums, self.keyring, pages, most_samples=self.most_samples, seen_by=keeper
        )
        lacking = missing(sums, pages)
        return Check(
            keeper=keeper,
            steps=sums.steps,
            people=len(sums.sums),
            pages=len(sums.used),
            differences=() if lacking else differences(sums, found),
            without=len(lacking),
            left_out=not_used(sums, pages),
        )
