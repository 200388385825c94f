"""Asking the others of a run for the pages of records that this peer does not have.

    unheard = await gather(rpc, peers, run, shelf, put, newest_page=37)

Promises: it ends within GATHER_SECONDS, and takes no more of one peer, and of all, than is written
here. What is not signed by whom it names is not taken, and its source is asked for nothing more.

Easy to get wrong: others have our own pages, too, as they were when they asked for them; an old one
must not take the place of ours. And a peer may name pages without end, of writers that it has made
up: so each peer has a share of its own, and pages of epochs that nobody can have made are not asked
for.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

import trio

from node.credit.shelf import Shelf
from protocols.credit.messages import CONTENTS, PAGE, ContentsRequest, Listed, PageRequest
from protocols.credit.record import WrongPage, read_page
from protocols.errors import PotluckError
from protocols.identity import PeerId, peer_id_of
from protocols.rpc import Rpc

GATHER_SECONDS = 15.0  # somebody waits for the answer
CALL_SECONDS = 8.0  # connecting over a bad link, and a question
MOST_ASKED = 128  # peers
ASKED_AT_ONCE = 8
BYTES_OF_ONE = 8 << 20
BYTES_IN_ALL = 32 << 20

Put = Callable[[bytes], Awaitable[object]]


class Gathering:
    """One gathering, over all peers."""

    def __init__(self, rpc: Rpc, run: str, shelf: Shelf, put: Put, newest_page: int) -> None:
        self._rpc, self._run, self._shelf, self._put = rpc, run, shelf, put
        self._newest_page = newest_page
        self._left = BYTES_IN_ALL
        self._asked: set[tuple[bytes, int, bytes]] = set()

    async def ask(self, peer: PeerId) -> None:
        """Take what this peer has and we do not. PotluckError if it does not answer."""
        request = ContentsRequest(self._run)
        contents = await self._rpc.call(peer, CONTENTS, request, timeout=CALL_SECONDS)
        of_this_one = BYTES_OF_ONE
        for listed in contents.pages:
            if of_this_one <= 0 or self._left <= 0:
                return
            if self._wants(listed):
                taken = await self._fetch(peer, listed)
                of_this_one -= taken
                self._left -= taken

    def _wants(self, listed: Listed) -> bool:
        place = listed.key, listed.number, listed.digest
        can_be = listed.number <= self._newest_page
        return can_be and place not in self._asked and not self._shelf.has(listed)

    async def _fetch(self, peer: PeerId, listed: Listed) -> int:
        place = listed.key, listed.number, listed.digest
        self._asked.add(place)
        try:
            data = await fetch_page(self._rpc, peer, self._run, listed.key, listed.number)
        except PotluckError:
            self._asked.discard(place)  # another may have it
            raise
        if data:
            await self._put(data)
        return len(data)


async def fetch_page(rpc: Rpc, peer: PeerId, run: str, key: bytes, number: int) -> bytes:
    """A page as this peer has it, signed by its writer; empty if it has none. WrongPage if what it
    gave is another."""
    answer = await rpc.call(peer, PAGE, PageRequest(run, key, number), timeout=CALL_SECONDS)
    if answer.data:
        writer, page = read_page(answer.data, run)
        if (writer, page.number) != (peer_id_of(key), number):
            raise WrongPage("It is another page than the one that was asked for.")
    return answer.data


async def gather(
    rpc: Rpc, peers: Iterable[PeerId], run: str, shelf: Shelf, put: Put, *, newest_page: int
) -> dict[PeerId, str]:
    """Take what these have; those who did not answer, or not rightly, with why.

    `put` puts a page on the shelf, which waits for a disk.
    """
    gathering = Gathering(rpc, run, shelf, put, newest_page)
    asked = list(dict.fromkeys(peers))[:MOST_ASKED]
    unheard = dict.fromkeys(asked, "It did not answer in time.")
    turns = trio.CapacityLimiter(ASKED_AT_ONCE)

    async def ask(peer: PeerId) -> None:
        async with turns:
            try:
                await gathering.ask(peer)
            except (PotluckError, OSError) as error:
                unheard[peer] = error.what if isinstance(error, PotluckError) else str(error)
            else:
                del unheard[peer]

    with trio.move_on_after(GATHER_SECONDS):
        async with trio.open_nursery() as nursery:
            for peer in asked:
                nursery.start_soon(ask, peer)
    return unheard
