"""Which nodes bring a revocation list to the directory, and which leave it to others."""

from __future__ import annotations

from node.core.access.revocation_follower import ENOUGH_COPIES, Copies


def kept_by(count: int, signed_list: bytes) -> Copies:
    copies = Copies("me")
    for name in range(count):
        copies.saw(name, signed_list)
    return copies


def test_nothing_is_published_before_there_is_a_list() -> None:
    assert not Copies("me").should_publish(b"")


def test_a_node_that_finds_too_few_copies_of_the_newest_list_publishes_one() -> None:
    assert kept_by(0, b"list 7").should_publish(b"list 7")
    assert kept_by(ENOUGH_COPIES - 1, b"list 7").should_publish(b"list 7")
    assert not kept_by(ENOUGH_COPIES, b"list 7").should_publish(b"list 7")


def test_older_and_forged_lists_are_no_copies() -> None:
    assert kept_by(10, b"list 6").should_publish(b"list 7")
    assert kept_by(10, b"list 7").should_publish(b"list 8")
    assert kept_by(10, b"list 7 by somebody else").should_publish(b"list 7")


def test_an_old_copy_of_our_own_is_replaced_and_a_new_one_is_left_alone() -> None:
    copies = kept_by(ENOUGH_COPIES, b"list 7")
    copies.saw("me", b"list 6")
    assert copies.should_publish(b"list 7")
    copies.saw("me", b"list 7")
    assert not copies.should_publish(b"list 7")


def test_an_expired_copy_does_not_count() -> None:
    copies = kept_by(ENOUGH_COPIES, b"list 7")
    copies.saw(0, None)
    assert copies.should_publish(b"list 7")
