"""What a peer remembers of slots and links."""

from __future__ import annotations

from typing import Final

import pytest

from protocols.accumulation.progress_slot import SAY_AGAIN_SECONDS, SLOT_SECONDS, name_of_sum
from protocols.accumulation.slots_seen import (
    LAST_WORD_SECONDS,
    MOST_UNLINKED,
    WRITE_SECONDS,
    SlotsSeen,
)
from protocols.dht import SlotEntry
from protocols.identity import PeerId
from tests.accumulation.progress_slots import slot

PEER: Final = PeerId("peer")
OFTEN_SECONDS: Final = 0.5


class Reader:
    """Reads two times a second."""

    def __init__(self) -> None:
        self.seen, self.clock, self.sequence = SlotsSeen(), 100.0, 0
        self.reads()

    def reads(self, *names: PeerId, age: float = 0.0) -> None:
        """A reading finds a new slot of each of these, of this age."""
        self.seen.begins()
        self.clock += OFTEN_SECONDS
        self.sequence += 1
        found = {one: SlotEntry(one, slot(1, 1.0), 0, self.sequence) for one in names}
        self.seen.took(found, (), self.clock, is_full=True, left=lambda _: SLOT_SECONDS - age)

    def reads_nothing_new(self, seconds: float) -> None:
        for _ in range(int(seconds / OFTEN_SECONDS)):
            self.reads()

    def age_of(self, peer: PeerId) -> float:
        return self.seen.now(self.clock) - self.seen.slots[peer].at

    def loses(self, peer: PeerId) -> None:
        self.seen.link_lost(peer, self.clock)


@pytest.mark.parametrize("name", [PEER, name_of_sum(PEER)])
def test_a_peer_whose_link_is_lost_is_lost_until_it_publishes_again(name: PeerId) -> None:
    """Also the head of another cohort, of which only the sum is read."""
    here = Reader()
    here.reads(name)
    here.loses(PEER)
    assert here.seen.lost() == {PEER}
    here.reads(name)
    assert here.seen.lost() == {PEER}, "it may have written that before"
    here.reads_nothing_new(LAST_WORD_SECONDS)
    assert here.seen.lost() == {PEER}
    here.reads(name)
    assert not here.seen.lost()


def test_a_peer_whose_slot_is_first_read_after_its_death_is_lost() -> None:
    here = Reader()
    here.loses(PEER)
    here.reads(PEER)
    assert here.seen.lost() == {PEER}


def test_a_peer_is_lost_no_more_when_the_link_is_back() -> None:
    here = Reader()
    here.loses(PEER)
    assert here.seen.linked(PEER)
    assert not here.seen.lost()
    assert not here.seen.linked(PEER)


def test_no_more_than_some_lost_links_are_remembered() -> None:
    here = Reader()
    for number in range(MOST_UNLINKED + 9):
        here.loses(PeerId(f"peer-{number}"))
    assert len(here.seen.lost()) == MOST_UNLINKED


def test_a_slot_is_as_old_as_it_says_unless_it_was_not_there_before() -> None:
    here = Reader()
    here.reads(PEER, age=4.0)
    assert here.age_of(PEER) == pytest.approx(4.0), "it may have been there for long"
    here.reads(PEER, age=0.3)
    assert here.age_of(PEER) == pytest.approx(0.3)
    here.reads(PEER, age=4.0)
    assert here.age_of(PEER) == pytest.approx(OFTEN_SECONDS + WRITE_SECONDS)


def test_a_sum_is_as_old_as_it_says_because_it_is_not_in_every_reading() -> None:
    here, name = Reader(), name_of_sum(PEER)
    for _ in range(2):
        here.reads(name, age=4.0)
        assert here.age_of(name) == pytest.approx(4.0)


@pytest.mark.parametrize(("said", "age"), [(60.0, SAY_AGAIN_SECONDS), (-60.0, 0.0)])
def test_a_wrong_clock_makes_no_slot_older_than_that_of_a_living_peer(
    said: float, age: float
) -> None:
    here = Reader()
    here.reads(PEER, age=said)
    assert here.age_of(PEER) == pytest.approx(age, abs=OFTEN_SECONDS)
