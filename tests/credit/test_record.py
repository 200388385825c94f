"""A page is taken when its writer has signed it and it fits together, and else by no means."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.training.credit.book import PAGES_HELD, Book
from node.training.credit.service import WRITE_SECONDS
from node.training.credit.shelf import (
    ASKED_AT_ONCE,
    BYTES_IN_ALL,
    BYTES_OF_ONE,
    GATHER_SECONDS,
    LARGEST_SHELF_BYTES,
    MOST_ASKED,
)
from node.training.credit.tally import BREAK_SECONDS, LONGEST_STEP_SECONDS
from protocols.accumulation.events import Share
from protocols.credit.messages import MOST_LISTED
from protocols.credit.record import (
    DOMAIN,
    LARGEST_PAGE_BYTES,
    MOST_IN_A_LINE,
    MOST_MEMBERS,
    MOST_SERVERS,
    PAGE_EPOCHS,
    Line,
    Page,
    SignedPage,
    WrongPage,
    page_number,
    read_page,
    sign_page,
)
from protocols.identity import peer_id_of
from protocols.rpc import encode
from tests.credit.records import HISTORY, IDENTITIES, PEERS, RUN, line_of, page_of

ME = IDENTITIES["A"]
BROUGHT = {"A": (1, 2), "B": (3, 4)}
PAGE = page_of(BROUGHT, line_of(BROUGHT))


def test_a_page_comes_back_as_it_was_signed() -> None:
    assert read_page(sign_page(ME, PAGE), RUN) == (ME.peer_id, PAGE)


def test_a_page_of_another_run_is_refused() -> None:
    with pytest.raises(WrongPage, match="another run"):
        read_page(sign_page(ME, PAGE), "poem/somebody else")


def test_a_changed_page_is_refused() -> None:
    signed = msgspec.msgpack.decode(sign_page(ME, PAGE), type=SignedPage)
    changed = encode(msgspec.structs.replace(PAGE, token=b"x"))
    with pytest.raises(WrongPage, match="not signed"):
        read_page(encode(msgspec.structs.replace(signed, page=changed)), RUN)


def test_a_page_that_is_too_large_is_not_decoded() -> None:
    with pytest.raises(WrongPage, match="bytes"):
        read_page(bytes(LARGEST_PAGE_BYTES + 1), RUN)


@given(st.binary(max_size=200))
def test_noise_is_no_page(data: bytes) -> None:
    with pytest.raises(WrongPage):
        read_page(data, RUN)


LINE = line_of(BROUGHT)


@pytest.mark.parametrize(
    "page",
    [
        Page(RUN, 0, (ME.public_key, ME.public_key), (LINE,)),
        Page(RUN, 1, PAGE.members, (LINE,)),
        Page(RUN, 0, PAGE.members, (LINE, LINE)),
        Page(RUN, 0, PAGE.members, (msgspec.structs.replace(LINE, places=(0, 0)),)),
        Page(RUN, 0, PAGE.members, (msgspec.structs.replace(LINE, places=(0, 2)),)),
        Page(RUN, 0, PAGE.members, (msgspec.structs.replace(LINE, samples=(1,)),)),
        Page(RUN, 0, (IDENTITIES["B"].public_key, IDENTITIES["C"].public_key), (LINE,)),
        Page(RUN, 0, PAGE.members, (msgspec.structs.replace(LINE, servers=(0,)),)),
        Page(RUN, 0, PAGE.members, (msgspec.structs.replace(LINE, servers=(2,), served=(1,)),)),
        Page(RUN, 0, PAGE.members, (msgspec.structs.replace(LINE, servers=(1, 1), served=(1, 1)),)),
    ],
    ids=[
        "member",
        "page",
        "epoch",
        "place",
        "beyond",
        "amounts",
        "writer",
        "served",
        "server beyond",
        "server twice",
    ],
)
def test_a_page_that_does_not_fit_together_is_refused(page: Page) -> None:
    body = encode(page)
    data = encode(SignedPage(ME.public_key, body, ME.sign(DOMAIN, body)))
    with pytest.raises(WrongPage):
        read_page(data, RUN)
    with pytest.raises(WrongPage):
        sign_page(ME, page)


# -- the book that makes pages


def note(book: Book, epoch: int, brought: dict[str, float], moment: int = 0) -> bool:
    shares = tuple(Share(PEERS[name], samples) for name, samples in brought.items())
    return book.note(
        epoch, HISTORY, shares, moment=moment, of_samples=sum(brought.values()), over_a_grid=False
    )


def test_a_book_has_the_servers_of_a_step_the_largest_first_and_room_for_the_next_group() -> None:
    book, chance = Book(RUN, ME.public_key), random.Random(1)
    strangers = [peer_id_of(chance.randbytes(32)) for _ in range(MOST_SERVERS)]
    for epoch in range(PAGE_EPOCHS):
        shares = tuple(Share(PEERS[name], 1.0) for name in "AB")
        served = dict.fromkeys(strangers, 5) | {PEERS["S"]: 9, PEERS["C"]: 0}
        strangers = [peer_id_of(chance.randbytes(32)) for _ in range(MOST_SERVERS)]
        assert book.note(
            epoch, HISTORY, shares, moment=0, of_samples=2, over_a_grid=False, served=served
        )
    page = book.page(0)
    read_page(sign_page(ME, page), RUN)
    assert [page.members[line.servers[0]] for line in page.lines] == PAGE_EPOCHS * [
        IDENTITIES["S"].public_key
    ]
    assert {line.served[0] for line in page.lines} == {9}
    assert len(page.lines[0].servers) == MOST_SERVERS
    assert len(page.members) == MOST_MEMBERS - MOST_IN_A_LINE


def test_a_line_of_a_run_without_experts_is_read_by_peers_that_know_none() -> None:
    fields = msgspec.msgpack.decode(encode(LINE))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(fields[:8]), type=Line) == LINE


def lines_of(book: Book, number: int = 0) -> dict[int, Line]:
    return {line.epoch: line for line in book.page(number).lines}


def test_a_book_has_a_line_for_every_step_and_says_which_pages_changed() -> None:
    book = Book(RUN, ME.public_key)
    assert note(book, 3, {"A": 1.0, "B": 2.0})
    assert note(book, PAGE_EPOCHS, {"C": 4.0, "A": 1.0})
    assert book.take_changed() == [0, 1]
    assert not book.has_changed
    assert lines_of(book)[3].samples == (1, 2)
    peer, page = read_page(sign_page(ME, book.page(1, b"token")), RUN)
    assert (peer, page.token, page.lines[0].samples) == (ME.peer_id, b"token", (4, 1))


def test_steps_of_others_are_in_no_book() -> None:
    book = Book(RUN, ME.public_key)
    assert not note(book, 0, {"B": 1.0, "C": 1.0})
    assert not book.has_changed


def test_steps_alone_are_written_down_until_the_run_goes_on_elsewhere() -> None:
    book = Book(RUN, ME.public_key)
    note(book, PAGE_EPOCHS - 2, {"A": 1.0, "B": 1.0})
    note(book, PAGE_EPOCHS - 1, {"A": 1.0})
    note(book, PAGE_EPOCHS, {"A": 1.0})
    read_page(sign_page(ME, book.page(1)), RUN)
    book.take_changed()
    book.gave_up_alone()
    assert book.take_changed() == [0, 1]
    assert (sorted(lines_of(book)), lines_of(book, 1)) == ([PAGE_EPOCHS - 2], {})


def test_a_run_that_goes_back_replaces_what_was_written() -> None:
    book = Book(RUN, ME.public_key)
    for epoch in range(5):
        note(book, epoch, {"A": 1.0, "B": 2.0})
    note(book, 2, {"A": 7.0, "B": 2.0}, moment=9)
    assert sorted(lines_of(book)) == [0, 1, 2]
    assert lines_of(book)[2].samples == (7, 2)


@pytest.mark.parametrize("again", [{"A": 1.0, "B": 2.0}, {"B": 2.0}])
def test_a_run_that_goes_back_by_several_pages_removes_what_came_after(
    again: dict[str, float],
) -> None:
    """Also if the step that is made again is without this peer."""
    book = Book(RUN, ME.public_key)
    for epoch in (0, 1, PAGE_EPOCHS, 2 * PAGE_EPOCHS):
        note(book, epoch, {"A": 1.0, "B": 2.0})
    book.take_changed()
    assert note(book, 1, again) is ("A" in again)
    assert book.take_changed() == [0, 1, 2]
    assert sorted(lines_of(book)) == ([0, 1] if "A" in again else [0])
    assert lines_of(book, 1) == lines_of(book, 2) == {}
    read_page(sign_page(ME, book.page(2)), RUN)


def test_a_run_that_goes_back_by_all_the_pages_held_keeps_its_new_lines() -> None:
    book = Book(RUN, ME.public_key)
    for epoch in range(10 * PAGE_EPOCHS, 20 * PAGE_EPOCHS, PAGE_EPOCHS):
        note(book, epoch, {"A": 1.0, "B": 2.0})
        book.take_changed()
    for epoch in range(3):
        note(book, epoch, {"A": 1.0, "B": 2.0})
        book.take_changed()
    assert sorted(lines_of(book)) == [0, 1, 2]
    assert book.numbers == (0,)


def test_a_book_goes_on_where_the_last_session_ended() -> None:
    first, second = Book(RUN, ME.public_key), Book(RUN, ME.public_key)
    note(first, 0, {"A": 1.0, "B": 2.0})
    second.restore(first.page(0))
    note(second, 1, {"C": 1.0, "A": 2.0})
    assert sorted(lines_of(second)) == [0, 1]
    read_page(sign_page(ME, second.page(0)), RUN)


def test_a_book_holds_the_newest_pages_only() -> None:
    book = Book(RUN, ME.public_key)
    for epoch in range(0, 20 * PAGE_EPOCHS, PAGE_EPOCHS):
        note(book, epoch, {"A": 1.0, "B": 2.0})
        assert book.take_changed() == [page_number(epoch)]
    assert lines_of(book, 19)
    assert len(book.numbers) == PAGES_HELD


def test_pages_that_could_not_be_written_stay_changed_as_long_as_they_are_held() -> None:
    book = Book(RUN, ME.public_key)
    for epoch in range(0, 20 * PAGE_EPOCHS, PAGE_EPOCHS):
        note(book, epoch, {"A": 1.0, "B": 2.0})
        book.not_written(book.take_changed())
    assert len(book.numbers) == PAGES_HELD
    assert book.take_changed() == list(book.numbers)


# -- the page that describes all this


def test_the_documentation_states_the_limits() -> None:
    text = (Path(__file__).parents[2] / "docs" / "protocols.md").read_text(encoding="utf-8")
    part = text.split("## /potluck/credit/1.0.0")[1].split("\n## ")[0]
    for stated in (
        f"up to {MOST_LISTED:,} of them",
        f"up to {LARGEST_PAGE_BYTES:,} bytes",
        f"`{DOMAIN.decode()}`",
        f"up to {MOST_MEMBERS:,} and each",
        f"epochs {PAGE_EPOCHS} × number",
        f"1 to {MOST_IN_A_LINE:,}",
        f"of up to {MOST_SERVERS} servers",
        f"more than {BREAK_SECONDS / 60:.0f} minutes",
        f"of {LONGEST_STEP_SECONDS / 3600:.0f} hours between",
        f"up to {LARGEST_SHELF_BYTES >> 20} MiB of pages",
        f"every {WRITE_SECONDS:.0f} seconds",
        f"up to {MOST_ASKED} peers, {ASKED_AT_ONCE} at once",
        f"{GATHER_SECONDS:.0f} seconds, and takes up to {BYTES_OF_ONE >> 20} MiB of one",
        f"{BYTES_IN_ALL >> 20} MiB of all",
    ):
        assert " ".join(stated.split()) in " ".join(part.split()), stated
