"""A node's requests over real TLS, against SQLite on disk; answers verified as a node does."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from auth.challenges import LOGIN, RENEW, prove
from auth.documents import encode
from auth.keyring import KeyRecords, Keyring
from auth.keys import SigningKey
from auth.revocations import Revocations, held_digest
from auth.server.api import LONGEST_POLL_SECONDS, SHORTEST_POLL_SECONDS, poll_seconds
from auth.statements import open_time
from auth.tokens import sign_token
from tests.auth.web.authority import Authority
from tests.auth.web.running import (
    ACTOR,
    RUN,
    RunningServer,
    Volunteer,
    auth_server,
    decoded,
    encoded,
    metric,
)

BYTES = "application/octet-stream"


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[RunningServer]:
    async with auth_server(tmp_path, Authority(tmp_path)) as server:
        yield server


async def test_about_says_what_one_can_log_in_with(running: RunningServer) -> None:
    assert (await running.ask("GET", "/v1/about")).json() == {
        "run": RUN,
        "providers": [{"id": "code", "kind": "code", "title": "Enrolment code"}],
        "fingerprint": running.store.fingerprint,
        "version": "0",
    }


async def test_a_code_lets_in_and_the_pass_holds_all_that_a_node_needs(
    running: RunningServer,
) -> None:
    volunteer = Volunteer(running)
    assert (await volunteer.join(running.new_code(name="bob"))).status == 200
    assert volunteer.opened is not None
    received, _, token = volunteer.opened
    assert token.username == "code:bob"
    assert token.expires_ms - token.issued_ms == 3600 * 1000
    assert received.endpoints == ("/dns4/node.example.org/tcp/4001",)
    assert received.auth_url == "https://auth.example.org"
    assert received.token_grace_ms == 3600 * 1000


async def test_a_pass_is_renewed_by_one_request_again_and_again(running: RunningServer) -> None:
    volunteer = Volunteer(running)
    await volunteer.join(running.new_code())
    serials = set()
    for _ in range(5):
        assert (await volunteer.renew()).status == 200
        assert volunteer.opened is not None
        serials.add(volunteer.opened.token.serial)
    assert len(serials) == 5


async def test_a_wrong_code_is_refused_under_the_auth_keys_signature(
    running: RunningServer,
) -> None:
    volunteer = Volunteer(running)
    await volunteer.join("AAAAA-AAAAA-AAAAA-AAAAA")
    assert volunteer.refusal().code == "code-unknown"


async def test_a_denied_account_is_refused_at_renewal(running: RunningServer) -> None:
    volunteer = Volunteer(running)
    await volunteer.join(running.new_code(name="bob"))
    running.moderation.deny("code:bob", actor=ACTOR, reason="a test")
    await volunteer.renew()
    assert volunteer.refusal().code == "denied"


async def test_nobody_renews_with_the_token_of_another(running: RunningServer) -> None:
    alice, mallory = Volunteer(running), Volunteer(running)
    code = running.new_code(uses=2)
    await alice.join(code)
    await mallory.join(code)
    assert alice.opened is not None
    body = await mallory.prove(RENEW)
    token = encoded(alice.opened.access_pass.token)
    mallory.answer = await running.post("/v1/renew", {**body, "token": token})
    assert mallory.refusal().code == "token"


async def test_a_token_of_a_key_that_the_server_does_not_know_is_neither_refused_nor_a_failure(
    running: RunningServer,
) -> None:
    volunteer, stranger = Volunteer(running), SigningKey(b"s" * 32)
    await volunteer.join(running.new_code())
    assert volunteer.opened is not None
    of_stranger = msgspec.structs.replace(volunteer.opened.token, key_id=stranger.key_id)
    body = await volunteer.prove(RENEW)
    token = encoded(sign_token(of_stranger, stranger))
    answer = await running.post("/v1/renew", {**body, "token": token})
    assert (answer.status, answer.json()["error"]) == (503, "unknown_key")
    assert f"does not know the auth key {stranger.key_id.hex()}" in answer.json()["what"]
    assert "signed" not in answer.json(), "a node would end"
    assert int(answer.headers["retry-after"]) >= 60
    metrics = running.server.metrics.text().decode()
    assert metric(metrics, "potluck_auth_failures_total", kind="store") == 0
    assert metric(metrics, "potluck_auth_refusals_total", reason="unknown-key") == 1
    assert running.moderation.audit(act="refused").rows[0].reason.startswith("unknown-key: ")


async def test_a_challenge_is_good_for_one_answer(running: RunningServer) -> None:
    volunteer = Volunteer(running)
    body = {
        **await volunteer.prove(LOGIN), "provider": "code", "kind": "code",
        "code": running.new_code(uses=2),
    }  # fmt: skip
    assert (await running.post("/v1/login", body)).status == 200
    volunteer.answer = await running.post("/v1/login", body)
    assert volunteer.refusal().code == "challenge"


async def test_a_challenge_is_good_for_its_peer_and_its_purpose(running: RunningServer) -> None:
    volunteer, other = Volunteer(running), Volunteer(running)
    code = {"provider": "code", "kind": "code", "code": running.new_code()}
    stolen = {**await volunteer.prove(LOGIN), "peer": other.peer}
    other.challenge = volunteer.challenge
    other.answer = await running.post("/v1/login", {**stolen, **code})
    assert other.refusal().code == "challenge"
    volunteer.answer = await running.post("/v1/login", {**await volunteer.prove(RENEW), **code})
    assert volunteer.refusal().code == "signature"


async def test_a_proof_made_for_a_rogue_server_is_worth_nothing(running: RunningServer) -> None:
    volunteer = Volunteer(running)
    body = await volunteer.prove(LOGIN)
    rogue = prove(volunteer.key, volunteer.challenge, RUN, "a" * 26, LOGIN)
    volunteer.answer = await running.post(
        "/v1/login",
        {**body, "proof": encoded(rogue), "provider": "code", "kind": "code", "code": "x"},
    )
    assert volunteer.refusal().code == "signature"


async def test_keys_lead_from_the_invite_to_the_one_that_signs_now(running: RunningServer) -> None:
    volunteer = Volunteer(running)
    await volunteer.join(running.new_code())
    running.moderation.key_rotate(actor=ACTOR, reason="a test")
    data = decoded((await running.ask("GET", "/v1/keys")).json()["keys"])
    records = msgspec.msgpack.decode(data, type=KeyRecords)
    assert encode(records) == data
    keyring = Keyring.from_pinned(RUN, running.invited_fingerprint, records)
    assert len(keyring.records) == 2
    assert (await volunteer.renew()).status == 200, "an old invite goes on working"


async def test_the_time_comes_signed_for_the_one_who_asked(running: RunningServer) -> None:
    nonce = os.urandom(16)
    answer = (await running.ask("GET", f"/v1/time?nonce={encoded(nonce)}")).json()
    keyring = Keyring.from_pinned(RUN, running.store.fingerprint, running.store.keys.records)
    time = open_time(decoded(answer["time"]), keyring, nonce)
    assert abs(time.time_ms - running.store.clock_ms()) < 60_000
    for wrong in ("", "?nonce=", "?nonce=!!!", "?nonce=" + "A" * 500):
        assert (await running.ask("GET", "/v1/time" + wrong)).status == 400


async def test_the_newest_revocations_come_as_they_were_signed(running: RunningServer) -> None:
    volunteer = Volunteer(running)
    await volunteer.join(running.new_code(name="bob"))
    answer = await running.ask("GET", "/v1/revocations?after=-1")
    assert (answer.status, answer.headers["content-type"]) == (200, BYTES)
    number = running.store.revocation_list().number
    nothing_new = await running.ask("GET", f"/v1/revocations?after={number}")
    assert (nothing_new.status, nothing_new.body) == (204, b"")
    assert nothing_new.headers["potluck-poll-seconds"] == str(SHORTEST_POLL_SECONDS)
    running.moderation.revoke("code:bob", actor=ACTOR, reason="a test")
    answer = await running.ask("GET", f"/v1/revocations?after={number}")
    assert answer.status == 200
    revocations = Revocations(RUN)
    keyring = Keyring.from_pinned(RUN, running.store.fingerprint, running.store.keys.records)
    assert revocations.accept(answer.body, keyring)
    assert volunteer.opened is not None
    assert revocations.refuses(volunteer.opened.token)


async def test_a_list_that_is_known_is_not_sent_again(running: RunningServer) -> None:
    first = await running.ask("GET", "/v1/revocations")
    again = await running.ask("GET", "/v1/revocations", if_none_match=first.headers["etag"])
    assert (again.status, again.body) == (304, b"")


async def test_a_list_is_known_by_its_digest_and_not_by_its_number(running: RunningServer) -> None:
    """A stolen key can sign a list with a number above all."""
    newest = running.store.revocation_list()
    known = await running.ask("GET", f"/v1/revocations?held={held_digest(newest.signed)}")
    assert (known.status, known.body) == (204, b"")
    for query in (
        f"held={held_digest(b'of a thief')}",
        f"held={held_digest(b'of a thief')}&after={newest.number}",
        f"after={2**63 - 1}",
    ):
        answer = await running.ask("GET", f"/v1/revocations?{query}")
        assert (answer.status, answer.body) == (200, newest.signed)


@pytest.mark.parametrize("after", ["", "-1", "x", "9" * 400, "%00", "1.5", "٣"])
async def test_a_number_that_is_none_means_everything(running: RunningServer, after: str) -> None:
    from urllib.parse import quote

    answer = await running.ask("GET", f"/v1/revocations?after={quote(after)}")
    assert answer.status == 200


def test_polls_stay_under_a_rate_and_within_the_minute() -> None:
    assert poll_seconds(0) == poll_seconds(2_000) == SHORTEST_POLL_SECONDS
    assert poll_seconds(4_000) == 20
    assert poll_seconds(10**9) == LONGEST_POLL_SECONDS < 60


async def test_a_key_that_anybody_could_sign_for_gets_nothing(running: RunningServer) -> None:
    nobody = bytes(32)
    answer = await running.post("/v1/challenge", {"peer": encoded(nobody)})
    assert answer.status in (200, 400)
    if answer.status == 200:
        body = {
            "peer": encoded(nobody),
            "challenge": answer.json()["challenge"],
            "proof": encoded(bytes(64)),
            "provider": "code",
            "kind": "code",
            "code": running.new_code(),
        }
        assert (await running.post("/v1/login", body)).status == 403


async def test_a_session_that_nobody_knows_is_over(running: RunningServer) -> None:
    volunteer = Volunteer(running)
    answer = await volunteer.poll("x" * 22)
    assert (answer.status, answer.json()["error"]) == (410, "login_expired")
    assert "signed" not in answer.json()


async def test_a_provider_that_there_is_not_is_no_refusal(running: RunningServer) -> None:
    volunteer = Volunteer(running)
    for provider, kind in (("x", "device"), ("code", "device"), ("x", "code"), ("code", "")):
        answer = await volunteer.begin(provider, kind)
        assert (answer.status, "signed" in answer.json()) == (400, False)


async def test_each_answer_is_in_the_audit_log(running: RunningServer) -> None:
    volunteer = Volunteer(running, SigningKey(b"v" * 32))
    await volunteer.join(running.new_code())
    await volunteer.renew()
    await Volunteer(running).join("AAAAA-AAAAA-AAAAA-AAAAA")
    acts = [row.act for row in running.moderation.audit(limit=100).rows]
    for act in ("joined", "renewed", "refused"):
        assert act in acts
    assert running.moderation.verify().sound
