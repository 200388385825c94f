"""Which ID tokens prove a person, and which of the many that nearly do are refused, and why."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from hypothesis import given, settings
from hypothesis import strategies as st

from auth.server.providers.errors import LoginReason, LoginRefused
from auth.server.providers.id_tokens import (
    ALGORITHMS,
    KeySet,
    PublishedKey,
    UnknownKey,
    half_hash,
    verify_id_token,
)
from tests.auth.providers.openid_imitation import (
    CLIENT,
    NOW,
    OpenIdImitation,
    SigningKey,
    private_key,
)

ISSUER = "https://id.example.org/realms/lab"


def imitation(**changes: Any) -> OpenIdImitation:
    return OpenIdImitation(issuer=ISSUER, **changes)


def published(*keys: SigningKey) -> KeySet:
    return KeySet(tuple(_key(key.published()) for key in keys))


def _key(document: dict[str, Any]) -> PublishedKey:
    known = {name: document.get(name) for name in PublishedKey.__struct_fields__}
    return PublishedKey(**known)


def verify(token: str, keys: KeySet, **changes: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "issuer": ISSUER,
        "client_id": CLIENT,
        "now": NOW,
        "nonce": None,
        "access_token": None,
        **changes,
    }
    return verify_id_token(token, keys, **given)


def why_refused(token: str, keys: KeySet, **changes: Any) -> str:
    with pytest.raises(LoginRefused) as refused:
        verify(token, keys, **changes)
    assert refused.value.reason is LoginReason.ID_TOKEN
    assert refused.value.why.isprintable()
    return refused.value.why


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_good_token_of_each_algorithm_is_accepted(algorithm: str) -> None:
    key = SigningKey(algorithm=algorithm)
    claims = verify(imitation(key=key).id_token(), published(key))
    assert claims["sub"] == "subject-1"


@pytest.mark.parametrize(
    ("claims", "why"),
    [
        ({"aud": "another-program"}, "another program"),
        ({"aud": []}, "another program|aud"),
        ({"aud": None}, "aud"),
        ({"aud": {"potluck": 1}}, "malformed|another program"),
        ({"aud": [CLIENT, 7]}, "malformed|another program"),
        ({"aud": [CLIENT, "another-program"]}, "another program"),
        ({"aud": [CLIENT, "another-program"], "azp": "another-program"}, "another program"),
        ({"azp": "another-program"}, "another program"),
        ({"azp": ["potluck"]}, "another program"),
        ({"iss": "https://id.example.org/realms/other"}, "issued"),
        ({"iss": ISSUER + "/"}, "issued"),
        ({"iss": [ISSUER]}, "issued|malformed"),
        ({"iss": None}, "iss"),
        ({"exp": int(NOW) - 60}, "expired"),
        ({"exp": 0}, "expired"),
        ({"exp": None}, "exp"),
        ({"exp": "tomorrow"}, "exp"),
        ({"exp": True}, "exp"),
        ({"exp": float("nan")}, "exp"),
        ({"exp": float("inf")}, "exp"),
        ({"exp": 10**400}, "exp"),
        ({"iat": int(NOW) + 61}, "only in 61 s"),
        ({"iat": None}, "iat"),
        ({"iat": [1]}, "iat"),
        ({"nbf": int(NOW) + 61}, "only in 61 s"),
        ({"nbf": "x"}, "nbf"),
        ({"sub": None}, "sub"),
        ({"sub": ""}, "subject"),
        ({"sub": "a" * 256}, "subject"),
        ({"sub": "müller"}, "subject"),
        ({"sub": "a\nb"}, "subject"),
        ({"sub": 17}, "malformed|subject"),
    ],
)
def test_a_token_with_a_wrong_claim_is_refused(claims: dict[str, Any], why: str) -> None:
    key = SigningKey()
    said = why_refused(imitation(claims=claims).id_token(), published(key))
    assert any(part in said for part in why.split("|")), said


@pytest.mark.parametrize(
    "claims",
    [
        {"aud": [CLIENT]},
        {"aud": [CLIENT, "another-program"], "azp": CLIENT},
        {"azp": CLIENT},
        {"exp": int(NOW) - 59},
        {"iat": int(NOW) + 60, "nbf": int(NOW) + 60},
        {"exp": NOW + 0.5},
        {"sub": "a" * 255},
    ],
)
def test_tokens_that_the_standard_allows_are_accepted(claims: dict[str, Any]) -> None:
    key = SigningKey()
    assert verify(imitation(claims=claims).id_token(), published(key))


def _unsigned(claims: dict[str, Any]) -> str:
    return jwt.encode(claims, None, "none", headers={"kid": "one"})


def _part(value: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()


def _shared_secret(claims: dict[str, Any]) -> str:
    """HS256 with the published key as the secret: in whichever form a careless reader would use."""
    public = private_key("RS256").public_key()
    pem = public.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    body = f"{_part({'alg': 'HS256', 'kid': 'one', 'typ': 'JWT'})}.{_part(claims)}"
    mark = jwt.get_algorithm_by_name("HS256")
    signature = mark.sign(body.encode(), pem)
    return f"{body}.{base64.urlsafe_b64encode(signature).rstrip(b'=').decode()}"


@pytest.mark.parametrize("forge", [_unsigned, _shared_secret])
def test_signatures_that_anybody_can_make_are_refused(
    forge: Callable[[dict[str, Any]], str],
) -> None:
    key = SigningKey(algorithm="RS256")
    token = imitation(key=key, token=forge).id_token()
    assert "not accepted" in why_refused(token, published(key))


def test_a_symmetric_key_in_the_set_gives_nothing() -> None:
    secret = b"k" * 32
    keys = KeySet((PublishedKey(kty="oct", kid="one", alg="HS256"),))
    token = jwt.encode({"iss": ISSUER}, secret, "HS256", headers={"kid": "one"})
    assert "not accepted" in why_refused(token, keys)


def test_a_key_serves_only_the_algorithm_that_it_is_published_for() -> None:
    key = SigningKey(algorithm="RS256")
    keys = KeySet((_key({**key.published(), "alg": "PS256"}),))
    with pytest.raises(UnknownKey):
        verify(imitation(key=key).id_token(), keys)


@pytest.mark.parametrize(
    "change", [{"use": "enc"}, {"kid": "two"}, {"kty": "RSA"}, {"crv": "P-384"}, {"x": "AAAA"}]
)
def test_a_key_for_something_else_is_not_tried(change: dict[str, str]) -> None:
    key = SigningKey()
    with pytest.raises(UnknownKey):
        verify(imitation().id_token(), KeySet((_key({**key.published(), **change}),)))


def test_rsa_keys_too_short_or_too_long_are_not_tried() -> None:
    weak = rsa.generate_private_key(65_537, 1024)
    document = json.loads(jwt.get_algorithm_by_name("RS256").to_jwk(weak.public_key()))
    token = imitation(key=SigningKey(algorithm="RS256")).id_token()
    for key in (
        PublishedKey(kty="RSA", kid="one", n=document["n"], e="AQAB"),
        PublishedKey(kty="RSA", kid="one", n="_" * 1400, e="AQAB"),
        PublishedKey(kty="RSA", kid="one", n="_" * 100_000, e="AQAB"),
        PublishedKey(kty="RSA", kid="one", n=document["n"]),
        PublishedKey(kty="RSA", kid="one", n="!", e="AQAB"),
    ):
        with pytest.raises(UnknownKey):
            verify(token, KeySet((key,)))


def test_a_token_that_names_no_key_is_tried_with_each_that_fits() -> None:
    signing = SigningKey(id=None, number=1)
    token = imitation(key=signing).id_token()
    others = SigningKey(id="one"), SigningKey(algorithm="RS256"), SigningKey(id="two", number=1)
    assert verify(token, published(*others))
    assert "signature" in why_refused(token, published(SigningKey(id="one")))


def test_a_signature_by_somebody_else_is_refused() -> None:
    token = imitation(key=SigningKey(number=2)).id_token()
    assert "signature" in why_refused(token, published(SigningKey()))


@pytest.mark.parametrize("kind", ["at+jwt", "logout+jwt", 7])
def test_another_kind_of_token_is_refused(kind: object) -> None:
    token = imitation().id_token()
    _, body, signature = token.split(".")
    forged = f"{_part({'alg': 'ES256', 'kid': 'one', 'typ': kind})}.{body}.{signature}"
    said = why_refused(forged, published(SigningKey()))
    assert "kind of token" in said or "no token" in said


def test_a_token_made_for_another_login_is_refused() -> None:
    token = imitation().id_token("mine")
    assert verify(token, published(SigningKey()), nonce="mine")
    assert "nonce" in why_refused(token, published(SigningKey()), nonce="theirs")
    assert "nonce" in why_refused(imitation().id_token(), published(SigningKey()), nonce="mine")


@pytest.mark.parametrize("algorithm", ["RS256", "ES384", "PS512", "EdDSA"])
def test_an_access_token_from_elsewhere_is_refused(algorithm: str) -> None:
    key = SigningKey(algorithm=algorithm)
    claims = {"at_hash": half_hash("access-1", algorithm)}
    token = imitation(key=key, claims=claims).id_token()
    assert verify(token, published(key), access_token="access-1")
    assert "access token" in why_refused(token, published(key), access_token="access-2")


def test_the_hash_of_an_access_token_is_the_standards() -> None:
    # OpenID Connect Core 1.0, appendix A.3: the at_hash of its example
    assert half_hash("jHkWEdUXMU1BwAsC4vtUsZwnNvTIxEl0z9K3vx5KF0Y", "RS256") == (
        "77QmUPtjPfzWtF2AnpK9RQ"
    )


DEEP = base64.urlsafe_b64encode(b"[" * 20_000).decode()


@pytest.mark.parametrize(
    "token",
    ["", ".", "..", "a.b.c", "é.é.é", "a" * 40_000, f"{DEEP}.e30.AA", f"{DEEP[:9000]}.e30.AA"],
)
def test_other_text_than_a_token_is_refused(token: str) -> None:
    why_refused(token, published(SigningKey()))


def test_claims_nested_beyond_reason_are_refused() -> None:
    key = SigningKey()
    signed = jwt.PyJWS().encode(b"[" * 10_000, key.private, "ES256", headers={"kid": "one"})
    assert "malformed" in why_refused(signed, published(key))


GOOD = imitation().id_token()


@settings(max_examples=3 * settings.default.max_examples, deadline=None)
@given(st.data())
def test_no_changed_token_is_accepted_and_none_crashes(data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(GOOD) - 1))
    letter = data.draw(st.characters(max_codepoint=0x17F))
    changed = GOOD[:place] + letter + GOOD[place + 1 :]
    if _same_bytes(changed):
        return
    try:
        verify(changed, published(SigningKey()))
    except (LoginRefused, UnknownKey):
        return
    raise AssertionError(f"accepted: {changed}")


def _same_bytes(changed: str) -> bool:
    """Whether only bits changed that base64 does not use: the last letter of a part has some."""
    try:
        return [_bytes(part) for part in changed.split(".")] == [
            _bytes(part) for part in GOOD.split(".")
        ]
    except ValueError:
        return False


def _bytes(part: str) -> bytes:
    return base64.b64decode(part + "=" * (-len(part) % 4), altchars=b"-_", validate=True)


@settings(max_examples=3 * settings.default.max_examples, deadline=None)
@given(st.text(max_size=200))
def test_whatever_text_there_is_the_verifier_does_not_crash(text: str) -> None:
    with pytest.raises((LoginRefused, UnknownKey)):
        verify(text, published(SigningKey()))
