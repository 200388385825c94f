"""Anybody can add up again what a keeper has added up, and a keeper that lies is found out."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import trio

from node.training.credit.service import Collector
from node.training.credit.shelf import Shelf
from node.training.credit.sums import Check, Checking, sums_of
from node.training.happenings import Happening, RecordsSummed
from protocols.accumulation.events import StepTaken
from protocols.credit.messages import OFFER, SUMS, OfferRequest, Sums, SumsRequest
from protocols.credit.record import PAGE_EPOCHS, Line, Page, sign_page
from protocols.errors import PotluckError
from protocols.identity import PeerId
from protocols.testing.world import SimulatedWorld
from tests.credit.records import IDENTITIES, KEYS, RUN, line_of
from tests.credit.test_gathering import giving_out
from tests.protocols.pair import Pair, between_two

MOST_SAMPLES = 4096
STEP = {"B": (40, 3), "C": (50, 5), "K": (0, 9)}
WORLD = SimulatedWorld()
KEEPER, ALICE = WORLD.identity_of("bob"), WORLD.identity_of("alice")  # as in `between_two`
SIGNERS = {**IDENTITIES, "K": KEEPER, "B": ALICE}


def page_by(name: str, epochs: int) -> bytes:
    """The page of one peer about several equal steps."""
    members = tuple(SIGNERS[one].public_key for one in STEP)
    lines: tuple[Line, ...] = tuple(line_of(STEP, epoch) for epoch in range(epochs))
    return sign_page(SIGNERS[name], Page(RUN, 0, members, lines))


def shelf_of(folder: Path, *pages: bytes) -> Shelf:
    shelf = Shelf(folder, RUN, KEYS["J"])
    for data in pages:
        shelf.put(data)
    return shelf


def sums_from(shelf: Shelf, steps: int) -> Sums:
    return sums_of(
        None, shelf.pages(), steps=steps, most_samples=MOST_SAMPLES, seen_by=KEEPER.peer_id
    )


def checked(mine: Shelf, theirs: Shelf, sums: Sums, *, newest_epoch: int = 40) -> tuple[Check, ...]:
    """The result of checking a keeper that gives out these records, and these sums."""

    async def put(data: bytes) -> None:
        mine.put(data)

    async def until_made(epoch: int) -> None:
        if epoch > newest_epoch:
            await trio.sleep_forever()

    async def scenario(pair: Pair) -> tuple[Check, ...]:
        giving_out(theirs, pair.answering)
        pair.answering.serve(SUMS, lambda _caller, _request: sums)
        checking = Checking(pair.asking, RUN, mine, put, None, MOST_SAMPLES, until_made)
        return await checking.check([pair.bob_id])

    return between_two(scenario)


def test_honest_sums_agree_with_records_that_were_not_here_or_have_grown(tmp_path: Path) -> None:
    theirs = shelf_of(tmp_path / "theirs", page_by("K", 9), page_by("B", 9), page_by("C", 9))
    mine = shelf_of(tmp_path / "mine", page_by("B", 12))
    (check,) = checked(mine, theirs, sums_from(theirs, 9))
    assert check.agrees, check
    assert (check.people, check.pages, check.steps) == (3, 3, 9)


def test_a_peer_that_lost_its_own_record_can_still_check(tmp_path: Path) -> None:
    theirs = shelf_of(tmp_path / "theirs", page_by("K", 9), page_by("B", 9), page_by("C", 9))
    mine = Shelf(tmp_path / "mine", RUN, ALICE.public_key)  # B's, and empty
    (check,) = checked(mine, theirs, sums_from(theirs, 9))
    assert check.agrees, check


def test_a_sum_that_differs_from_the_records_is_named(tmp_path: Path) -> None:
    theirs = shelf_of(tmp_path / "theirs", page_by("K", 9), page_by("B", 9), page_by("C", 9))
    honest = sums_from(theirs, 9)
    raised = tuple(
        msgspec.structs.replace(one, samples=10**6) if one.person == ALICE.peer_id else one
        for one in honest.sums
    )
    lying = msgspec.structs.replace(honest, sums=raised)
    (check,) = checked(shelf_of(tmp_path / "mine"), theirs, lying)
    assert check.differences == (f"{ALICE.peer_id}: 1,000,000 samples, but the records say 360",)
    without_b = tuple(one for one in honest.sums if one.person != ALICE.peer_id)
    (check,) = checked(
        shelf_of(tmp_path / "mine"), theirs, msgspec.structs.replace(honest, sums=without_b)
    )
    assert "is not in it" in check.differences[0]


def test_records_that_cannot_be_shown_prove_nothing(tmp_path: Path) -> None:
    whole = shelf_of(tmp_path / "whole", page_by("K", 9), page_by("B", 9))
    shown = shelf_of(tmp_path / "shown", page_by("K", 9), page_by("B", 3))
    (check,) = checked(shelf_of(tmp_path / "mine"), shown, sums_from(whole, 9))
    assert (check.without, check.agrees) == (1, False)


def test_records_that_a_keeper_leaves_out_are_counted(tmp_path: Path) -> None:
    theirs = shelf_of(tmp_path / "theirs", page_by("K", 9), page_by("B", 9))
    mine = shelf_of(tmp_path / "mine", page_by("C", 9))
    (check,) = checked(mine, theirs, sums_from(theirs, 9))
    assert check.left_out == 1


def test_steps_that_nobody_has_made_are_not_agreed_to(tmp_path: Path) -> None:
    theirs = shelf_of(tmp_path / "theirs", page_by("K", 9), page_by("B", 9))
    (check,) = checked(shelf_of(tmp_path / "mine"), theirs, sums_from(theirs, 9), newest_epoch=5)
    assert "9 steps, more than the run has made" in check.trouble


def test_a_peer_that_keeps_no_records_is_not_checked(tmp_path: Path) -> None:
    empty = shelf_of(tmp_path / "empty")
    assert checked(empty, empty, Sums()) == ()


# -- at the keeper


def step_taken(epoch: int, *members: PeerId) -> StepTaken:
    return StepTaken(epoch, 90.0, 0, members, (), bytes(16), 0.0, 0.0, 0.0, 0.0)


def test_a_keeper_asks_newcomers_soon_and_everybody_at_the_end(tmp_path: Path) -> None:
    asked: list[tuple[PeerId, ...]] = []
    told: list[Happening] = []

    async def gather(peers: object) -> None:
        assert isinstance(peers, set | tuple)
        asked.append(tuple(sorted(peers)))

    async def scenario(_pair: Pair) -> None:
        shelf = shelf_of(tmp_path / "shelf", page_by("K", 2), page_by("B", 2))
        collector = Collector(
            RUN, shelf.put, gather, lambda: sums_from(shelf, 2), lambda: 1, told.append, steps=2
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(collector.collect_on)
            collector.take(step_taken(0, KEEPER.peer_id, ALICE.peer_id))
            await trio.sleep(1)
            assert asked == [tuple(sorted([KEEPER.peer_id, ALICE.peer_id]))]
            collector.take(step_taken(1, KEEPER.peer_id, ALICE.peer_id))
            await trio.sleep(9)
            assert asked[1:] == [()]
            nursery.cancel_scope.cancel()

    between_two(scenario)
    summed, _at_the_end = told
    assert isinstance(summed, RecordsSummed)
    assert (summed.people, summed.helpers, summed.writers) == (2, 1, 2)


def test_a_peer_that_leaves_hands_over_only_its_own_page(tmp_path: Path) -> None:
    shelf = shelf_of(tmp_path / "shelf")
    line = line_of({"B": (1, 0)}, 9 * PAGE_EPOCHS)
    beyond = sign_page(ALICE, Page(RUN, 9, (ALICE.public_key,), (line,)))

    async def gather(_peers: object) -> None:
        raise AssertionError

    async def scenario(pair: Pair) -> None:
        collector = Collector(
            RUN, shelf.put, gather, lambda: Sums(), lambda: 40, lambda _one: None, steps=0
        )
        pair.answering.serve(OFFER, collector.offer)

        async def offer(data: bytes, run: str = RUN) -> bool:
            request = OfferRequest(run, data)
            return (await pair.asking.call(pair.bob_id, OFFER, request, timeout=9.0)).taken

        assert await offer(page_by("B", 3))
        assert not await offer(page_by("B", 2))
        assert not await offer(page_by("B", 4), run="another")
        for wrong in (page_by("C", 3), beyond, b"no page"):
            with pytest.raises(PotluckError):
                await offer(wrong)

    between_two(scenario)
    assert [(one.key, one.number) for one in shelf.listed()] == [(ALICE.public_key, 0)]


def test_sums_are_of_this_run_only(tmp_path: Path) -> None:
    async def scenario(pair: Pair) -> tuple[Sums, Sums]:
        shelf = shelf_of(tmp_path / "shelf", page_by("K", 2), page_by("B", 2))

        async def gather(_peers: object) -> None: ...

        collector = Collector(
            RUN,
            shelf.put,
            gather,
            lambda: sums_from(shelf, 2),
            lambda: 1,
            lambda _one: None,
            steps=0,
        )
        pair.answering.serve(SUMS, collector.sums)
        peer = pair.bob_id
        ours = await pair.asking.call(peer, SUMS, SumsRequest(RUN), timeout=9.0)
        other = await pair.asking.call(peer, SUMS, SumsRequest("another"), timeout=9.0)
        return ours, other

    ours, other = between_two(scenario)
    assert (len(ours.sums), other) == (3, Sums())
