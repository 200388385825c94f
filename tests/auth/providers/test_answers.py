"""Any JSON answer of a provider is understood, refused, or an outage, and nothing else."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import httpx2
import msgspec
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from auth.server.providers.device_answers import read_start, read_token
from auth.server.providers.errors import LoginError
from auth.server.providers.fetching import Fetcher, ProviderAnswer
from auth.server.providers.flows import DeviceGrant, NotYet, TokenAnswer
from auth.server.providers.id_tokens import ALGORITHMS, KeySet, read_keys
from auth.server.providers.identity import is_safe_login, login_from

URL = "https://id.example.org/token"

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner),
    max_leaves=10,
)
TEXTS = st.sampled_from(
    ["", "A", "https://id.example.org/x", "slow_down", "access_denied", "5", "AQAB", "RSA", "EC"]
) | st.text(max_size=60)


def objects(*names: str) -> st.SearchStrategy[dict[str, Any]]:
    """Objects with these fields, or some of them, holding nearly what they should or anything."""
    return st.dictionaries(st.sampled_from(names), TEXTS | st.integers() | JSON)


@pytest.fixture(scope="module")
def fetcher() -> Fetcher:
    return Fetcher("Corp", httpx2.AsyncClient(), trio.CapacityLimiter(1))


@settings(max_examples=300, deadline=None)
@given(
    objects(
        "device_code", "user_code", "verification_uri", "verification_uri_complete", "expires_in",
        "interval", "error", "error_description",
    ),
    st.sampled_from([200, 400, 401, 428]),
)  # fmt: skip
@pytest.mark.slow
def test_a_device_answer_is_a_grant_or_an_outage(
    fetcher: Fetcher, content: dict[str, Any], status: int
) -> None:
    body = json.dumps(content).encode()
    with contextlib.suppress(LoginError):
        grant = read_start(ProviderAnswer(status, body), fetcher, URL, loopback_http=False)
        assert isinstance(grant, DeviceGrant)
        assert grant.user_code.isascii()
        assert grant.verification_uri.startswith("https://")
        assert 1 <= grant.interval <= 60
        assert 1 <= grant.expires_in <= 1800


@settings(max_examples=300, deadline=None)
@given(
    objects("access_token", "id_token", "error", "error_description", "interval"),
    st.sampled_from([200, 400, 401, 428]),
    st.integers(1, 60),
)
@pytest.mark.slow
def test_a_token_answer_is_a_token_a_wait_a_no_or_an_outage(
    fetcher: Fetcher, content: dict[str, Any], status: int, interval: int
) -> None:
    answer = ProviderAnswer(status, json.dumps(content).encode())
    with contextlib.suppress(LoginError):
        read = read_token(answer, fetcher, URL, title="Corp", interval=interval)
        if isinstance(read, NotYet):
            assert interval <= read.interval <= 60
        else:
            assert isinstance(read, TokenAnswer)
            assert read.access_token.isprintable()


@settings(max_examples=300, deadline=None)
@given(st.lists(objects("kty", "kid", "use", "alg", "crv", "n", "e", "x", "y") | JSON, max_size=5))
@pytest.mark.slow
def test_whatever_stands_in_a_key_set_only_usable_keys_come_out(members: list[Any]) -> None:
    raw = [msgspec.Raw(json.dumps(member).encode()) for member in members]
    keys = KeySet(tuple(read_keys(raw)))
    for algorithm in ALGORITHMS:
        for key in keys.candidates(algorithm, None):
            assert key.algorithm_name == algorithm


@settings(max_examples=300, deadline=None)
@given(
    objects("sub", "email", "email_verified", "preferred_username"),
    st.sampled_from([None, "sub", "email", "preferred_username", "x"]),
)
@pytest.mark.slow
def test_whatever_the_claims_are_a_login_is_safe(claims: dict[str, Any], claim: str | None) -> None:
    with contextlib.suppress(LoginError):
        assert is_safe_login(login_from(claims, claim))
