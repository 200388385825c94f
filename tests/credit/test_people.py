"""A record is its writer's person's by the token in it, and nobody's if that does not count."""

from __future__ import annotations

import msgspec
import pytest

from auth.keys import SigningKey
from auth.roles import Role
from auth.tokens import read_token
from node.training.credit.sums import person_of, persons_of, records_of
from protocols.credit.record import Page
from protocols.identity import PeerId, peer_id_of
from tests.auth.core.people import (
    ALICE,
    ALICES_TOKEN,
    BOB,
    BOBS_TOKEN,
    OTHER_AUTH,
    YEAR,
    keyring_of,
    token_of,
)

ALICES_PEER, BOBS_PEER = peer_id_of(ALICE.public_key), peer_id_of(BOB.public_key)
PAGE = Page("sahajbert/organiser", 0, (ALICE.public_key, BOB.public_key), ())


def page_with(token: bytes) -> Page:
    return msgspec.structs.replace(PAGE, token=token)


def test_in_an_open_run_each_peer_is_a_person() -> None:
    assert person_of(None, ALICES_PEER, PAGE) == ALICES_PEER


def test_in_a_closed_run_the_token_says_who_the_writer_was() -> None:
    assert person_of(keyring_of(), ALICES_PEER, page_with(ALICES_TOKEN)) == "github:alice"


@pytest.mark.parametrize(
    "token",
    [
        b"",
        b"no token",
        BOBS_TOKEN,
        token_of(ALICE, by=OTHER_AUTH),
        token_of(ALICE, run="another"),
        token_of(ALICE, issued_ms=1),
        token_of(ALICE, roles=(Role.MONITOR,)),
        ALICES_TOKEN[:-1] + bytes([ALICES_TOKEN[-1] ^ 1]),
    ],
    ids=["none", "noise", "another's", "server", "run", "time", "role", "signature"],
)
def test_a_token_that_does_not_count_makes_nobody(token: bytes) -> None:
    assert person_of(keyring_of(), ALICES_PEER, page_with(token)) == ""


def test_a_token_that_has_run_out_still_says_who_it_was() -> None:
    old = token_of(ALICE, issued_ms=read_token(ALICES_TOKEN).issued_ms - YEAR // 2)
    assert person_of(keyring_of(), ALICES_PEER, page_with(old)) == "github:alice"


def test_a_person_without_a_record_is_named_by_the_token_that_it_showed() -> None:
    shown = {BOBS_PEER: read_token(BOBS_TOKEN)}
    records = records_of(keyring_of(), [(ALICES_PEER, page_with(ALICES_TOKEN))])
    assert persons_of(records, shown.get) == {
        ALICES_PEER: "github:alice",
        BOBS_PEER: "code:bob",
    }


def test_a_peer_that_never_showed_a_token_has_no_name() -> None:
    stranger = SigningKey(b"stranger".ljust(32, b"."))
    page = Page("sahajbert/organiser", 0, (stranger.public_key,), ())
    records = records_of(keyring_of(), [(PeerId(ALICES_PEER), page)])
    assert persons_of(records, None) == persons_of(records, lambda _peer: None) == {}
