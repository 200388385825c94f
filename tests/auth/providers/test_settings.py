"""The settings of a [[provider]] table; anything else is named to the moderator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from auth.fields import LONGEST_USERNAME
from auth.server.providers.errors import LoginReason, LoginRefused
from auth.server.providers.identity import LONGEST_LOGIN_CHARACTERS, is_safe_login, login_from
from auth.server.providers.logins import ProviderEntry, open_logins
from auth.server.providers.settings import (
    KINDS,
    LONGEST_ID_CHARACTERS,
    PROVIDER_KEYS,
    CodeSettings,
    GithubSettings,
    OpenIdSettings,
    ProviderSettingsError,
    provider_settings,
    read_secret,
)

FOLDER = Path("/etc/potluck")
OIDC = {
    "kind": "oidc",
    "id": "corp",
    "issuer": "https://id.example.org/realms/lab",
    "client_id": "potluck",
}
GITHUB = {"kind": "github", "id": "github", "client_id": "Iv1.0"}


def read(table: dict[str, Any]) -> OpenIdSettings | GithubSettings | CodeSettings:
    return provider_settings(table, "[[provider]] number 2", FOLDER)


def test_the_least_that_each_kind_needs() -> None:
    assert read(OIDC) == OpenIdSettings(
        id="corp", issuer="https://id.example.org/realms/lab", client_id="potluck"
    )
    assert read(GITHUB) == GithubSettings(id="github", client_id="Iv1.0")
    assert read({"kind": "code", "id": "code"}) == CodeSettings(id="code")


def test_files_are_beside_the_settings_unless_they_say_otherwise() -> None:
    found = read({**OIDC, "client_secret_file": "corp.secret", "ca_file": "/srv/ca.pem"})
    assert isinstance(found, OpenIdSettings)
    assert found.client_secret_file == "/etc/potluck/corp.secret"
    assert found.ca_file == "/srv/ca.pem"


def test_every_key_is_described_and_every_described_key_exists() -> None:
    for kind, struct in KINDS.items():
        described = {key.name for key in PROVIDER_KEYS if kind in key.kinds}
        assert described == set(struct.__struct_fields__)


def test_the_described_examples_can_be_used() -> None:
    for kind in KINDS:
        table = {key.name: key.example for key in PROVIDER_KEYS if kind in key.kinds}
        assert read({**table, "kind": kind})


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ({}, "kind"),
        ({"kind": "saml"}, "saml"),
        ({"kind": ["oidc"]}, "oidc"),
        ({**OIDC, "isuer": "https://x.example.org"}, "isuer"),
        ({**OIDC, "issuer": 7}, "issuer"),
        ({"kind": "oidc", "id": "corp"}, "issuer"),
        ({**OIDC, "issuer": "http://id.example.org"}, "https://"),
        ({**OIDC, "issuer": "https://id.example.org/?realm=1"}, "query"),
        ({**OIDC, "issuer": "https://me:secret@id.example.org"}, "password"),
        ({**OIDC, "issuer": "https://id.example.org/\x1b"}, "characters"),
        ({**OIDC, "id": "Corp:1"}, "id"),
        ({**OIDC, "id": ""}, "id"),
        ({**OIDC, "id": "a" * 33}, "id"),
        ({**OIDC, "id": "code"}, "code"),
        ({**GITHUB, "id": "code"}, "code"),
        ({**OIDC, "title": "a" * 61}, "title"),
        ({**OIDC, "title": "a\nb"}, "title"),
        ({**OIDC, "client_id": ""}, "client_id"),
        ({**OIDC, "scopes": ["profile"]}, "openid"),
        ({**OIDC, "scopes": ["openid", "two words"]}, "scopes"),
        ({**OIDC, "flows": []}, "flows"),
        ({**OIDC, "flows": ["device", "device"]}, "flows"),
        ({**OIDC, "flows": ["smoke"]}, "smoke"),
        ({**OIDC, "username_claim": ""}, "username_claim"),
        ({**GITHUB, "api_url": "ftp://api.github.com"}, "api_url"),
        ({**GITHUB, "issuer": "https://github.com"}, "issuer"),
        ({"kind": "code", "id": "code", "client_id": "x"}, "client_id"),
    ],
)
def test_a_wrong_table_is_named_and_so_is_what_is_wrong(table: dict[str, Any], named: str) -> None:
    with pytest.raises(ProviderSettingsError) as wrong:
        read(table)
    assert "[[provider]] number 2" in wrong.value.what
    assert named in wrong.value.why
    assert wrong.value.advice
    assert str(wrong.value).isprintable()
    assert wrong.value.exit_code == 2


async def test_two_providers_with_one_id_are_refused() -> None:
    with pytest.raises(ProviderSettingsError, match="same id"):
        async with open_logins([CodeSettings(id="a"), CodeSettings(id="a")], "https://a.example"):
            pass


async def test_a_missing_file_of_authorities_is_named(tmp_path: Path) -> None:
    for content in (None, "no certificate"):
        file = tmp_path / "ca.pem"
        if content is not None:
            file.write_text(content)
        settings = GithubSettings(id="github", client_id="x", ca_file=str(file))
        with pytest.raises(ProviderSettingsError, match=r"ca\.pem"):
            async with open_logins([settings], "https://a.example"):
                pass


async def test_several_providers_stand_side_by_side() -> None:
    settings = [read({"kind": "code", "id": "code"}), read(OIDC), read(GITHUB)]
    async with open_logins(settings, "https://auth.example.org") as logins:
        assert logins.provider_list() == [
            ProviderEntry("code", "code", "Enrolment code"),
            ProviderEntry("corp", "device", "corp"),
            ProviderEntry("corp", "browser", "corp"),
            ProviderEntry("github", "device", "GitHub"),
        ]
        assert logins.is_code_provider("code")
        assert not logins.is_code_provider("corp")
        assert not logins.is_code_provider("nobody")


def test_a_secret_is_read_from_a_file_that_only_its_owner_reads(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("  s3cret\n")
    file.chmod(0o600)
    assert read_secret(file) == "s3cret"
    file.chmod(0o640)
    with pytest.raises(ProviderSettingsError, match="chmod 600"):
        read_secret(file)


@pytest.mark.parametrize("content", [b"", b"\n", b"a" * 5000, b"\xff\xfe", b"two\nlines"])
def test_a_file_without_a_secret_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "secret"
    file.write_bytes(content)
    file.chmod(0o600)
    with pytest.raises(ProviderSettingsError, match="secret"):
        read_secret(file)
    with pytest.raises(ProviderSettingsError, match="cannot be read"):
        read_secret(tmp_path / "elsewhere")


CLAIMS = {
    "sub": "0a1b",
    "email": "Alice@Example.org",
    "email_verified": True,
    "preferred_username": "Alice",
    "employee": 17,
}


@pytest.mark.parametrize(
    ("left_out", "claim", "login"),
    [
        ((), None, "Alice"),
        (("preferred_username",), None, "alice@example.org"),
        (("preferred_username", "email_verified"), None, "0a1b"),
        (("preferred_username", "email"), None, "0a1b"),
        ((), "sub", "0a1b"),
        ((), "email", "alice@example.org"),
        ((), "employee", "17"),
    ],
)
def test_which_claim_becomes_the_login(
    left_out: tuple[str, ...], claim: str | None, login: str
) -> None:
    assert login_from({k: v for k, v in CLAIMS.items() if k not in left_out}, claim) == login


@pytest.mark.parametrize("word", [False, "false", None, 1.5, "yes", [True]])
def test_an_address_that_nobody_verified_is_no_name(word: object) -> None:
    with pytest.raises(LoginRefused) as refused:
        login_from({**CLAIMS, "email_verified": word}, "email")
    assert refused.value.reason is LoginReason.USERNAME


@pytest.mark.parametrize(
    "name",
    ["a:b", "a b", "-a", "ａlice", "аlice", "a\x00", "a/b", "<b>", "a" * 65, True, ["a"], {"a": 1}],
)
def test_a_name_that_could_imitate_or_break_something_is_refused(name: object) -> None:
    with pytest.raises(LoginRefused) as refused:
        login_from({**CLAIMS, "preferred_username": name}, None)
    assert refused.value.reason is LoginReason.USERNAME
    assert str(refused.value).isprintable()


def test_the_longest_name_with_the_longest_provider_fits_into_a_token() -> None:
    assert LONGEST_ID_CHARACTERS + 1 + LONGEST_LOGIN_CHARACTERS <= LONGEST_USERNAME
    assert is_safe_login("a" * LONGEST_LOGIN_CHARACTERS)
