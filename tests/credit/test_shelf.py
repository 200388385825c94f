"""Pages on the shelf are signed, the newest versions, kept over restarts, and limited."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
import pytest

from node.training.credit import shelf as shelves
from node.training.credit.shelf import Shelf
from protocols.credit.messages import Listed
from protocols.credit.record import (
    PAGE_EPOCHS,
    Page,
    WrongPage,
    page_digest,
    read_page,
    sign_page,
)
from tests.credit.records import IDENTITIES, KEYS, RUN, line_of, page_of

BROUGHT = {"A": (1, 2), "B": (3, 4)}


def page(epoch: int = 0, moment: int = 0, samples: int = 1) -> Page:
    brought = {**BROUGHT, "A": (samples, 2)}
    return page_of(brought, line_of(brought, epoch, moment=moment))


def signed(name: str, one: Page) -> bytes:
    return sign_page(IDENTITIES[name], one)


def open_shelf(folder: Path) -> Shelf:
    return Shelf(folder, RUN, KEYS["A"])


def test_a_page_is_there_after_a_restart(tmp_path: Path) -> None:
    assert open_shelf(tmp_path).put(signed("B", page()))
    again = open_shelf(tmp_path)
    (listed,) = again.listed()
    assert again.has(listed)
    assert read_page(again.read(listed.key, listed.number), RUN)[1] == page()
    assert [one for _, one in again.pages()] == [page()]


def test_an_older_version_replaces_no_newer_one_of_others(tmp_path: Path) -> None:
    shelf = open_shelf(tmp_path)
    assert shelf.put(signed("B", page(moment=9)))
    assert not shelf.put(signed("B", page(moment=8)))
    assert shelf.put(signed("B", page(moment=10)))


def test_of_two_versions_the_one_with_the_later_last_step_is_newer(tmp_path: Path) -> None:
    shelf = open_shelf(tmp_path)

    def ending(moment: int) -> bytes:
        lines = (line_of(BROUGHT, 0, moment=5), line_of(BROUGHT, 1, moment=moment))
        return signed("B", msgspec.structs.replace(page(), lines=lines))

    assert shelf.put(ending(8))
    assert shelf.put(ending(9))
    assert not shelf.put(ending(8))


def test_our_own_page_is_replaced_only_by_ourselves(tmp_path: Path) -> None:
    shelf = open_shelf(tmp_path)
    assert shelf.put_own(signed("A", page(moment=9)))
    assert shelf.put_own(signed("A", page(moment=8)))
    assert not shelf.put(signed("A", page(moment=9)))
    assert not shelf.put_own(signed("B", page()))
    assert shelf.own_pages(5) == [page(moment=8)]
    old = signed("A", page(moment=7))
    assert shelf.has(Listed(KEYS["A"], 0, page_digest(old)))


def test_an_unsigned_page_is_not_kept(tmp_path: Path) -> None:
    shelf = open_shelf(tmp_path)
    with pytest.raises(WrongPage):
        shelf.put(b"anything")
    assert shelf.listed() == ()


def test_files_that_are_no_pages_are_passed_over(tmp_path: Path) -> None:
    open_shelf(tmp_path).put(signed("B", page()))
    (file,) = tmp_path.iterdir()
    file.with_name("another.page").write_bytes(file.read_bytes())
    (tmp_path / "torn.page").write_bytes(file.read_bytes()[:-1])
    assert len(open_shelf(tmp_path).listed()) == 1


def test_files_that_a_killed_process_left_half_written_are_removed(tmp_path: Path) -> None:
    open_shelf(tmp_path).put(signed("B", page()))
    (file,) = tmp_path.iterdir()
    file.with_name(f".{file.name}.123.abcd").write_bytes(b"half")
    open_shelf(tmp_path)
    assert list(tmp_path.iterdir()) == [file]


def test_our_own_pages_come_first_and_the_newest_before_the_older(tmp_path: Path) -> None:
    shelf = open_shelf(tmp_path)
    for epoch in (PAGE_EPOCHS, 0):
        shelf.put(signed("B", page(epoch)))
        shelf.put_own(signed("A", page(epoch)))
    found = [(one.key, one.number) for one in shelf.listed()]
    assert found == [(KEYS["A"], 1), (KEYS["A"], 0), (KEYS["B"], 1), (KEYS["B"], 0)]


def test_the_writer_with_the_most_bytes_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = len(signed("B", page()))
    monkeypatch.setattr(shelves, "LARGEST_SHELF_BYTES", 4 * size)
    monkeypatch.setattr(shelves, "LARGEST_OWN_BYTES", 2 * size)
    shelf = open_shelf(tmp_path)
    shelf.put_own(signed("A", page()))
    for number in range(5):
        shelf.put(signed("B", page(number * PAGE_EPOCHS)))
    kept = [(one.key, one.number) for one in shelf.listed()]
    assert (KEYS["A"], 0) in kept
    assert [number for key, number in kept if key == KEYS["B"]] == [4, 3]
    assert len(list(tmp_path.iterdir())) == len(kept)


@pytest.mark.parametrize("own", [2, 4])
def test_our_own_pages_make_room_only_beyond_our_own_share(
    own: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_three(number: int) -> Page:
        brought = {**BROUGHT, "C": (5, 6)}
        return page_of(brought, line_of(brought, number * PAGE_EPOCHS, moment=0))

    size = len(signed("A", of_three(3)))
    monkeypatch.setattr(shelves, "LARGEST_SHELF_BYTES", 4 * size)
    monkeypatch.setattr(shelves, "LARGEST_OWN_BYTES", 2 * size)
    shelf = open_shelf(tmp_path)
    for number in range(own):
        shelf.put_own(signed("A", of_three(number)))
    for name, number in (("B", 0), ("C", 0), ("C", 1)):
        shelf.put(signed(name, of_three(number)))
    kept = Counter(one.key for one in shelf.listed())
    assert [kept[KEYS[name]] for name in "ABC"] == [2, 1, 1]


def test_invented_writers_displace_nobody_whom_we_have_met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shelves, "MOST_LISTED", 6)
    shelf = open_shelf(tmp_path)
    shelf.put_own(signed("A", page()))  # names B
    for number in range(3):
        shelf.put(signed("B", page(number * PAGE_EPOCHS)))
    for name in "CDEFGHIJ":
        brought = {name: (1, 0)}
        shelf.put(signed(name, page_of(brought, line_of(brought, moment=10**9))))
    kept = [one.key for one in shelf.listed()]
    assert (kept.count(KEYS["A"]), kept.count(KEYS["B"]), len(kept)) == (1, 3, 6)


def test_a_page_of_another_run_is_not_on_this_shelf(tmp_path: Path) -> None:
    other = msgspec.structs.replace(page(), run="another/organiser")
    with pytest.raises(WrongPage, match="another run"):
        open_shelf(tmp_path).put(signed("B", other))
