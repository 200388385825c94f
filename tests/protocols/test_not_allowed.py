"""Refusals as errors: how they cross the wire, what they become there, and what is logged."""

from __future__ import annotations

import copy
import logging

import pytest
import trio
from trio.testing import MockClock

from auth.refusals import AccessRefused, Reason
from protocols.access.token_guard import AGAIN_SECONDS, MOST_COMPLAINTS, GuardComplaints
from protocols.errors import Busy, Refused, RemoteMisbehaviour, again
from protocols.guard import Exchange
from protocols.identity import PeerId
from protocols.not_allowed import AnswerNotAllowed, MalformedEnvelope, NotAllowed
from protocols.rpc import decode, encode
from protocols.rpc.messages import LONGEST_METHOD_NAME, ErrorBody
from protocols.rpc.remote_errors import describe, revive


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_crosses_the_wire_as_itself(reason: Reason) -> None:
    sent = NotAllowed("What.", why="Why.", advice="Advice.", reason=reason)
    body = decode(ErrorBody, encode(describe(sent)))
    assert body.code == f"not-allowed/{reason.value}"
    assert len(body.code) <= LONGEST_METHOD_NAME
    came = revive(body)
    assert isinstance(came, NotAllowed)
    assert (came.reason, came.by_peer, came.what, came.why, came.advice) == (
        reason,
        True,
        "What.",
        "Why.",
        "Advice.",
    )
    assert came.exit_code == 3


@pytest.mark.parametrize("code", ["not-allowed/of-a-later-version", "not-allowed/"])
def test_a_reason_that_is_not_known_is_a_refusal_all_the_same(code: str) -> None:
    came = revive(ErrorBody(code, "No."))
    assert isinstance(came, NotAllowed)
    assert came.reason is None
    assert came.by_peer


def test_a_received_refusal_is_not_passed_on_as_our_own() -> None:
    came = revive(ErrorBody("not-allowed/revoked", "Access was revoked."))
    assert describe(came).code == "failed"
    assert describe(AnswerNotAllowed("No.", reason=Reason.REVOKED)).code == "failed"
    assert not isinstance(revive(describe(came)), Refused)


def test_a_handler_may_refuse_with_a_reason_of_its_own() -> None:
    assert describe(NotAllowed("Not you.", reason=Reason.ROLE)).code == "not-allowed/role"
    assert describe(NotAllowed("Not you.")).code == "refused"


def test_a_copy_for_each_who_waits_keeps_everything_but_the_traceback() -> None:
    refusal = AnswerNotAllowed("No.", why="Why.", reason=Reason.SIGNATURE)
    refusal.instead_of(Busy("Later."))
    with pytest.raises(AnswerNotAllowed):
        raise refusal
    fresh = again(refusal)
    assert isinstance(fresh, AnswerNotAllowed)
    assert fresh.__traceback__ is None
    assert (str(fresh), fresh.reason, fresh.claimed) == (
        str(refusal),
        Reason.SIGNATURE,
        refusal.claimed,
    )
    assert copy.copy(fresh).crosses is False


def test_an_invalid_envelope_is_a_refusal_and_a_violation() -> None:
    error = MalformedEnvelope("No.", reason=Reason.MALFORMED)
    assert isinstance(error, RemoteMisbehaviour)
    assert isinstance(error, Refused)
    assert describe(error).code == "not-allowed/malformed"
    assert not isinstance(revive(describe(error)), RemoteMisbehaviour), "it says nothing of them"


def test_a_peer_that_is_refused_again_and_again_is_logged_rarely(
    caplog: pytest.LogCaptureFixture,
) -> None:
    complaints = GuardComplaints()
    exchange = Exchange(PeerId("12D3KooWmallory"), "/potluck/test/1.0.0", "do\x1b[2Jit")

    async def main() -> None:
        for _ in range(3):
            for _ in range(1000):
                complaints.about_request(exchange, AccessRefused(Reason.TOKEN_MISSING))
            await trio.sleep(AGAIN_SECONDS)
        complaints.about_request(exchange, AccessRefused(Reason.REVOKED))

    with caplog.at_level(logging.INFO, "potluck.access"):
        trio.run(main, clock=MockClock(autojump_threshold=0))
    assert len(caplog.records) == 4
    for record in caplog.records:
        assert "12D3KooWmallory" in record.getMessage()
        assert "\x1b" not in record.getMessage(), "nobody rewrites our terminal"


@pytest.mark.slow
async def test_the_memory_of_complaints_is_bounded() -> None:
    complaints = GuardComplaints()
    for number in range(MOST_COMPLAINTS + 100):
        exchange = Exchange(PeerId(str(number)), "/potluck/test/1.0.0", "it")
        complaints.about_answer(exchange, AccessRefused(Reason.TOKEN_MISSING))
    assert len(complaints) == MOST_COMPLAINTS
