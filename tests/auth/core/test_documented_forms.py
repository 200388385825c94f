"""docs/protocols.md states the right domains, fields and sizes of all signed documents."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from auth import challenges, envelopes, keyring, passes, revocations, statements, tokens
from auth.envelopes import RequestEnvelope, ResponseEnvelope
from auth.keyring import KeyRecord
from auth.passes import AccessPass
from auth.revocations import RevocationList
from auth.statements import SignedRefusal, SignedTime
from auth.tokens import Token

PAGE = Path(__file__).parents[3].joinpath("docs", "protocols.md").read_text(encoding="utf-8")

DOMAINS = [
    tokens.DOMAIN,
    envelopes.REQUEST_DOMAIN,
    envelopes.RESPONSE_DOMAIN,
    keyring.DOMAIN,
    passes.DOMAIN,
    revocations.DOMAIN,
    statements.TIME_DOMAIN,
    statements.REFUSAL_DOMAIN,
    challenges.PROOF_DOMAIN,
]

FORMS: list[tuple[str, type[msgspec.Struct], int]] = [
    ("token", Token, tokens.LIMIT_BYTES),
    ("request envelope", RequestEnvelope, envelopes.LIMIT_BYTES),
    ("response envelope", ResponseEnvelope, envelopes.LIMIT_BYTES),
    ("pass", AccessPass, passes.LIMIT_BYTES),
    ("revocation list", RevocationList, revocations.LIMIT_BYTES),
    ("signed time", SignedTime, statements.TIME_LIMIT_BYTES),
    ("signed refusal", SignedRefusal, statements.REFUSAL_LIMIT_BYTES),
]


def test_no_two_kinds_of_signature_share_a_domain() -> None:
    assert len(set(DOMAINS)) == len(DOMAINS)
    assert challenges.CHALLENGE_DOMAIN not in DOMAINS


@pytest.mark.parametrize("domain", DOMAINS, ids=lambda domain: domain.decode())
def test_each_domain_is_on_the_page(domain: bytes) -> None:
    assert f"`{domain.decode()}`" in PAGE


@pytest.mark.parametrize(("name", "form", "limit_bytes"), FORMS)
def test_each_form_is_on_the_page(name: str, form: type[msgspec.Struct], limit_bytes: int) -> None:
    rows = re.findall(rf"^\| {name} \|.*$", PAGE, re.MULTILINE)
    stated = [re.search(r"\[([^]]*)\].*?([\d,]+) bytes \|$", row) for row in rows]
    found = [(match[1].count(",") + 1, match[2]) for match in stated if match]
    fields = len(form.__struct_fields__)
    assert found == [(fields, f"{limit_bytes:,}")]


def test_a_key_record_is_on_the_page() -> None:
    match = re.search(r"\*\*key record\*\* is \[([^]]*)\]", PAGE)
    assert match
    assert match[1].count(",") + 1 == len(KeyRecord.__struct_fields__)
