"""Errors cross as codes and words: bounded, printable, and without what is nobody's business."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as some

from protocols.accumulation.keeping_up import Demand, TooSlow
from protocols.dht import SlotRefused
from protocols.dht.slots import SlotRefusal
from protocols.errors import (
    Busy,
    HandlerFailed,
    LimitExceeded,
    PotluckError,
    ProtocolMisuse,
    Refused,
    again,
)
from protocols.rpc import encode
from protocols.rpc.messages import ERROR_BODY_LIMIT_BYTES, LONGEST_ERROR_TEXT, ErrorBody
from protocols.rpc.remote_errors import CODES, describe, revive


class StaleEpoch(PotluckError):
    """An error of somebody's own protocol."""


@pytest.mark.parametrize("type_", CODES.values())
def test_our_errors_arrive_as_the_type_that_was_raised_with_their_words(
    type_: type[PotluckError],
) -> None:
    error = revive(describe(type_("what", why="why", advice="advice")))
    if type_ is HandlerFailed:
        assert type(error) is HandlerFailed
    else:
        assert type(error) is type_
        assert (error.what, error.why, error.advice) == ("what", "why", "advice")


def test_errors_of_a_method_cross_under_its_own_codes_and_as_their_parent_elsewhere() -> None:
    codes = {"stale-epoch": StaleEpoch}
    body = describe(StaleEpoch("epoch 7 is over"), codes)
    assert body.code == "stale-epoch"
    assert type(revive(body, codes)) is StaleEpoch
    assert type(revive(body)) is PotluckError
    assert describe(StaleEpoch("epoch 7 is over")).code == "failed"


def test_an_unknown_code_from_a_newer_peer_becomes_a_plain_error() -> None:
    error = revive(ErrorBody("invented-in-2031", "The moon is in the wrong phase."))
    assert type(error) is PotluckError
    assert error.what == "The moon is in the wrong phase."
    assert "invented-in-2031" in str(revive(ErrorBody("invented-in-2031")))


@pytest.mark.parametrize("type_", [ValueError, ProtocolMisuse])
def test_bugs_cross_without_a_word_of_what_they_say(type_: type[Exception]) -> None:
    body = describe(type_("the password is swordfish"))
    assert body.code == "handler-failed"
    assert b"swordfish" not in encode(body)


def test_an_error_in_the_groups_of_nurseries_is_found_when_it_is_the_only_one() -> None:
    busy = Busy("later")
    assert describe(ExceptionGroup("outer", [ExceptionGroup("inner", [busy])])).code == "busy"
    two = ExceptionGroup("both", [busy, Refused("no")])
    assert describe(two).code == "handler-failed"


@given(some.text(), some.text(), some.text())
def test_words_of_any_length_fit_what_may_be_sent(what: str, why: str, advice: str) -> None:
    body = describe(Refused(what * 50, why=why * 50, advice=advice * 50))
    assert len(body.what) <= LONGEST_ERROR_TEXT
    assert len(encode(body)) <= ERROR_BODY_LIMIT_BYTES


def test_half_a_character_in_a_file_name_does_not_stop_an_error_from_crossing() -> None:
    assert revive(describe(Refused("no such file: \udcff"))).what == "no such file: ?"


def test_words_from_a_stranger_cannot_drive_the_terminal() -> None:
    error = revive(ErrorBody("refused", "no\x1b[2J\x07\n\u202eyes"))
    assert error.what == "no [2J   yes"


def test_an_error_for_many_tasks_is_made_anew_for_each() -> None:
    error = LimitExceeded("too much", why="it was", advice="less")
    error.surely_not_executed = True
    fresh = again(error)
    assert fresh is not error
    assert str(fresh) == str(error)
    assert fresh.surely_not_executed


def test_an_error_that_is_made_of_other_things_than_words_is_raised_again_as_it_is() -> None:
    slow = TooSlow(Demand(25_000_000, 8_000_000, 2.0), 1e6)
    refused = SlotRefused(SlotRefusal.MALFORMED, "Nobody asked for that.")
    for error in (slow, refused):
        fresh = again(error)
        assert fresh is not error
        assert type(fresh) is type(error)
        assert vars(fresh) == vars(error)
        assert str(fresh) == str(error)
