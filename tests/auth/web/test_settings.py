"""auth.toml: the settings that are allowed in it, and the messages about all others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from auth.errors import AuthError
from auth.server.settings import (
    KEYS,
    LARGEST_SETTINGS_BYTES,
    Settings,
    SettingsError,
    listen_address,
    read_settings,
    settings_in,
)

PATH = Path("/etc/potluck/auth.toml")
LEAST = 'run = "tiny"\npublic_url = "https://auth.example"\n'


def read(text: str) -> Settings:
    return settings_in(text.encode(), PATH)


def test_two_lines_are_enough() -> None:
    settings = read(LEAST)
    assert (settings.run, settings.public_url) == ("tiny", "https://auth.example")
    assert [str(address) for address in settings.listen] == ["0.0.0.0:8443"]
    assert settings.token_life_seconds == 3600
    assert [provider.id for provider in settings.providers] == ["code"]


@pytest.mark.parametrize(
    ("typed", "origin"),
    [
        ("https://auth.example:443", "https://auth.example"),
        ("HTTPS://Auth.Example:443/", "https://auth.example"),
        ("https://Auth.Example:8443", "https://auth.example:8443"),
        ("https://[2001:DB8::1]:443", "https://[2001:db8::1]"),
        ("https://[2001:db8::1]:8443", "https://[2001:db8::1]:8443"),
        ("http://127.0.0.1:80", "http://127.0.0.1"),
        ("http://127.0.0.1:443", "http://127.0.0.1:443"),
    ],
)
def test_the_public_address_is_what_a_browser_calls_it(typed: str, origin: str) -> None:
    assert read(LEAST.replace("https://auth.example", typed)).public_url == origin


def test_every_key_has_a_meaning_and_an_example_or_a_default() -> None:
    for key in KEYS:
        assert key.what
        assert key.example or key.default is not None
    assert [key.name for key in KEYS if key.required] == ["run", "public_url"]


def test_files_lie_beside_the_settings() -> None:
    settings = read(LEAST + '[server]\ncertificate = "a.pem"\ncertificate_key = "/b/c.pem"')
    assert settings.certificate == PATH.parent / "a.pem"
    assert settings.certificate_key == Path("/b/c.pem")


@pytest.mark.parametrize("missing", ["run", "public_url"])
def test_required_settings_are_asked_for(missing: str) -> None:
    text = "\n".join(line for line in LEAST.splitlines() if not line.startswith(missing))
    with pytest.raises(SettingsError, match=f"does not say `{missing}`") as caught:
        read(text)
    assert f"{missing} = " in caught.value.advice


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("[server]\nlisen = []", "`listen`, below `[server]`"),
        ("listen = []", "`listen`, below `[server]`"),
        ("[tokens]\nlife_second = 5", "`life_seconds`, below `[tokens]`"),
        ("endpoint = []", "`endpoints`, at the top"),
        ("[token]\nlife_seconds = 60", "`life_seconds`, below `[tokens]`"),
        ("colour = 5", "`potluck auth init`"),
        ("[server.listen]\nx = 1", ""),
    ],
)
def test_a_key_that_there_is_not_is_an_error_that_names_the_nearest(line: str, meant: str) -> None:
    with pytest.raises(SettingsError) as caught:
        read(LEAST + line)
    assert meant in caught.value.advice
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ('run = "a b"', "letters, digits"),
        ('run = ""', "not empty"),
        ("run = 5", "text"),
        (f'run = "{"x" * 65}"', "64"),
        ('public_url = "auth.example"', "https://auth.example.org"),
        ('public_url = "http://auth.example"', "https"),
        ('public_url = "https://auth.example/path"', "without a path"),
        ('public_url = "https://user@auth.example"', "without a path"),
        ('public_url = "https://auth.example:port"', "https://auth.example.org"),
        ('public_url = "ftp://auth.example"', "https://auth.example.org"),
        ('endpoints = ["nowhere"]', "/dns4/"),
        ('endpoints = "/ip4/1.2.3.4"', "list"),
        (f"endpoints = {['/ip4/1'] * 17}", "at most 16"),
        ('server.listen = ["8443"]', "0.0.0.0:8443"),
        ('server.listen = ["::1:8443"]', "0.0.0.0:8443"),
        ('server.listen = ["0.0.0.0:99999"]', "0.0.0.0:8443"),
        ("server.listen = []", "at least one"),
        ("server.connections = 0", "from 1 to"),
        ("server.connections = true", "whole number"),
        ("server.connections = 1.5", "whole number"),
        ('server.trusted_proxies = ["proxy"]', "10.0.0.0/8"),
        ("tokens.life_seconds = 5", "from 10 to"),
        ("tokens.life_seconds = 99999999", "from 10 to"),
        ("tokens.grace_seconds = -1", "from 0 to"),
        ("provider = 5", "[[provider]]"),
        ('[[provider]]\nid = "a"\nkind = "code"\n[[provider]]\nid = "a"\nkind = "code"', "id each"),
        ("[[provider]]\n" * 17, "at most 16"),
        ("run = ", "not valid TOML"),
        ("\x00", "not valid TOML"),
    ],
)
def test_a_value_that_cannot_be_right_is_an_error_that_says_what_can(line: str, word: str) -> None:
    name = line.split("=")[0].strip()
    others = [one for one in LEAST.splitlines() if not one.startswith(name)]
    with pytest.raises(SettingsError) as caught:
        read("\n".join([*others, line]))
    said = str(caught.value)
    assert word in said
    assert str(PATH) in said


def test_an_unknown_key_of_a_provider_is_an_error() -> None:
    with pytest.raises(AuthError, match="issuerr") as caught:
        read(LEAST + '[[provider]]\nid = "a"\nkind = "oidc"\nissuerr = "https://a.example"\n')
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("127.0.0.1:80", "127.0.0.1", 80), ("[::1]:0", "::1", 0), ("localhost:1", "localhost", 1)],
)
def test_a_listening_address_is_read_and_written_alike(text: str, host: str, port: int) -> None:
    address = listen_address(text)
    assert (address.host, address.port, str(address)) == (host, port, text)


@given(st.binary(max_size=300))
def test_whatever_the_bytes_only_our_own_error_comes_out(content: bytes) -> None:
    with pytest.raises(AuthError):
        settings_in(content, PATH)


def test_a_file_that_is_not_there_or_no_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no settings file") as caught:
        read_settings(tmp_path / "auth.toml")
    assert "auth init" in caught.value.advice
    with pytest.raises(SettingsError, match="cannot be read"):
        read_settings(tmp_path)
    large = tmp_path / "large.toml"
    large.write_bytes(b"#" * (LARGEST_SETTINGS_BYTES + 1))
    with pytest.raises(SettingsError, match="larger"):
        read_settings(large)


def test_a_file_that_every_user_may_write_to_is_not_believed(tmp_path: Path) -> None:
    """It names who says who somebody is."""
    path = tmp_path / "auth.toml"
    path.write_text(LEAST)
    path.chmod(0o666)
    with pytest.raises(SettingsError, match="Every user") as caught:
        read_settings(path)
    assert f"chmod o-w {path}" in caught.value.advice
    path.chmod(0o644)
    assert read_settings(path).run == "tiny"
    if os.geteuid() == 0:  # only root can give a file away
        os.chown(path, 12345, -1)
        with pytest.raises(SettingsError, match="belongs to another user"):
            read_settings(path)
