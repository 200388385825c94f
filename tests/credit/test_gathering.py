"""Records come from any peer that has them, and a peer that lies about them costs little."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from node.training.credit.shelf import Shelf, gather
from protocols.credit.messages import (
    CONTENTS,
    PAGE,
    Contents,
    ContentsRequest,
    Listed,
    PageRequest,
    PageResponse,
)
from protocols.credit.record import PAGE_EPOCHS, page_digest, sign_page
from protocols.guard import Caller
from protocols.identity import PeerId
from protocols.rpc import Rpc, open_rpc
from tests.credit.records import IDENTITIES, KEYS, RUN, line_of, page_of
from tests.protocols.pair import Pair, between_two

BROUGHT = {"A": (1, 2), "B": (3, 4)}


def page_by(name: str, epoch: int = 0, moment: int = 0) -> bytes:
    line = line_of(BROUGHT, epoch, moment=moment)
    return sign_page(IDENTITIES[name], page_of(BROUGHT, line))


def shelf_with(folder: Path, *pages: bytes) -> Shelf:
    shelf = Shelf(folder, RUN, KEYS["J"])
    for data in pages:
        shelf.put(data)
    return shelf


def giving_out(shelf: Shelf, rpc: Rpc) -> None:
    def page(_caller: Caller, request: PageRequest) -> PageResponse:
        return PageResponse(shelf.read(request.key, request.number))

    rpc.serve(CONTENTS, lambda _caller, _request: Contents(shelf.listed()))
    rpc.serve(PAGE, page)


def lying(data: bytes, rpc: Rpc) -> None:
    """Lists a page of A's, and gives this instead."""
    listed = Listed(KEYS["A"], 0, page_digest(data))

    def contents(_caller: Caller, _request: ContentsRequest) -> Contents:
        return Contents((listed,))

    rpc.serve(CONTENTS, contents)
    rpc.serve(PAGE, lambda _caller, _request: PageResponse(data))


def gathered(
    shelf: Shelf, *others: Callable[[Rpc], None], newest_page: int = 0
) -> tuple[list[tuple[bytes, int]], dict[PeerId, str]]:
    """The pages on the shelf after these were asked, and the peers that were of no use."""

    async def put(data: bytes) -> None:
        shelf.put(data)

    async def scenario(pair: Pair) -> dict[PeerId, str]:
        async with AsyncExitStack() as running:
            peers = []
            for number, serve in enumerate(others):
                node = pair.world.add_node(f"other{number}")
                pair.world.introduce(pair.alice, node)
                serve(await running.enter_async_context(open_rpc(node)))
                peers.append(node.peer_id)
            return await gather(pair.asking, peers, RUN, shelf, put, newest_page=newest_page)
        raise AssertionError

    unheard = between_two(scenario)
    return [(one.key, one.number) for one in shelf.listed()], unheard


def test_pages_are_fetched_from_any_peer_that_has_them(tmp_path: Path) -> None:
    one = shelf_with(tmp_path / "one", page_by("A"))
    other = shelf_with(tmp_path / "other", page_by("B"), page_by("A"))
    mine = shelf_with(tmp_path / "mine")
    found, unheard = gathered(mine, partial(giving_out, one), partial(giving_out, other))
    assert sorted(found) == sorted([(KEYS["A"], 0), (KEYS["B"], 0)])
    assert unheard == {}


def test_a_newer_version_is_taken(tmp_path: Path) -> None:
    mine = shelf_with(tmp_path / "mine", page_by("A", moment=1))
    gathered(mine, partial(giving_out, shelf_with(tmp_path / "one", page_by("A", moment=5))))
    assert mine.read(KEYS["A"], 0) == page_by("A", moment=5)


def test_pages_that_nobody_can_have_written_yet_are_not_taken(tmp_path: Path) -> None:
    theirs = shelf_with(tmp_path / "theirs", page_by("A", PAGE_EPOCHS))
    assert gathered(shelf_with(tmp_path / "mine"), partial(giving_out, theirs))[0] == []


def test_an_unsigned_or_wrong_page_is_not_taken_and_its_sender_is_named(tmp_path: Path) -> None:
    honest = shelf_with(tmp_path / "honest", page_by("A"))
    found, unheard = gathered(
        shelf_with(tmp_path / "mine"),
        partial(lying, b"no page"),
        partial(lying, page_by("B")),
        partial(giving_out, honest),
    )
    assert found == [(KEYS["A"], 0)]
    assert len(unheard) == 2


def test_a_peer_without_records_is_named(tmp_path: Path) -> None:
    found, unheard = gathered(shelf_with(tmp_path / "mine"), lambda _rpc: None)
    assert found == []
    assert len(unheard) == 1
