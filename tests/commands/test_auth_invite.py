"""`potluck auth invite`: what it carries, which key it pins, and what becomes of a code in it."""

from __future__ import annotations

import datetime
import hashlib
import stat
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from auth.invites import read_invite
from auth.server.settings import Settings, settings_in
from node.app.commands.auth_init import settings_text
from node.app.commands.auth_invite import certificate_pin, fingerprint_to_pin
from protocols.errors import PotluckError
from tests.commands.moderated import answer, auth, done, made, serving

PEER = "12D3KooWKnDdG3iXw9eTFijk3EWSunZcFi54Zka4wmtqtt6rPxc8"
ENDPOINT = f"/dns4/node.example.org/tcp/4001/p2p/{PEER}"
HOUR_MS = 3_600_000


@pytest.mark.slow
def test_an_invite_says_where_to_join_and_whom_to_trust(tmp_path: Path) -> None:
    home = made(tmp_path / "home", "--endpoint", ENDPOINT)
    (key,) = answer(home, "keys", "list")["keys"]
    printed = done(home, "invite").strip()
    invite = read_invite(printed)
    assert (invite.run, invite.bootstrap) == ("ours", (ENDPOINT,))
    assert invite.auth_url == "http://127.0.0.1:8480"
    assert invite.fingerprint == key["fingerprint"]
    assert (invite.code, invite.pin) == ("", b"")
    with serving(home):
        assert done(home, "invite").strip() == printed, "the same from a running server"


@pytest.mark.slow
def test_a_code_goes_into_a_file_that_only_its_owner_reads(tmp_path: Path) -> None:
    home, file = made(tmp_path / "home"), tmp_path / "bob.invite"
    told = answer(home, "invite", "--new-code", "--name", "bob", "--file", str(file))
    invite = read_invite(file.read_text())
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    (code,) = answer(home, "codes", "list")["codes"]
    assert (code["code_id"], code["name"]) == (told["code_id"], "code:bob")
    assert invite.code
    again = auth(home, "invite", "--new-code", "--file", str(file))
    assert again.returncode == 2
    assert "already" in again.stderr
    assert answer(home, "codes", "list")["total"] == 1, "no code is made for a file that is there"


@pytest.mark.slow
def test_a_name_without_a_code_is_wrong_use(tmp_path: Path) -> None:
    completed = auth(made(tmp_path / "home"), "invite", "--name", "bob")
    assert completed.returncode == 2
    assert "--new-code" in completed.stderr


def settings(folder: Path) -> Settings:
    text = settings_text(
        {
            "run": "r",
            "public_url": "https://a.example",
            "server.certificate": "certificate.pem",
            "server.certificate_key": "key.pem",
        }
    )
    return settings_in(text.encode(), folder / "auth.toml")


def key(name: str, from_ms: int, withdrawn_ms: int | None = None) -> dict[str, Any]:
    return {"fingerprint": name, "from_ms": from_ms, "withdrawn_ms": withdrawn_ms}


@pytest.mark.parametrize(
    ("keys", "pinned"),
    [
        ([key("first", 0)], "first"),
        ([key("first", 0), key("second", 99 * HOUR_MS)], "first"),
        ([key("first", 0), key("second", 97 * HOUR_MS)], "second"),
        ([key("first", 0), key("second", 101 * HOUR_MS)], "first"),
        ([key("first", 0, 99 * HOUR_MS), key("second", 99 * HOUR_MS)], "second"),
        ([key("a", 0), key("b", 98 * HOUR_MS + 1), key("c", 99 * HOUR_MS)], "a"),
        ([key("a", 0), key("b", 97 * HOUR_MS), key("c", 99 * HOUR_MS)], "b"),
    ],
    ids=["one", "just rotated", "long ago", "not yet", "withdrawn", "twice of late", "in between"],
)
def test_the_pinned_key_leads_to_every_token_that_may_still_live(
    keys: list[dict[str, Any]], pinned: str, tmp_path: Path
) -> None:
    """Tokens live for an hour, and another one of grace; it is the hundredth hour."""
    assert fingerprint_to_pin(keys, settings(tmp_path), 100 * HOUR_MS) == pinned


def test_without_a_key_that_signs_there_is_no_invite(tmp_path: Path) -> None:
    with pytest.raises(PotluckError, match="No auth key can sign now"):
        fingerprint_to_pin([key("a", 0, 1), key("b", 5)], settings(tmp_path), 3)


def test_a_certificate_of_ones_own_is_pinned_and_one_of_an_authority_is_not(tmp_path: Path) -> None:
    assert certificate_pin(settings(tmp_path)) == b"", "there is none: a proxy has it"
    own = certificate(issuer="auth.example.org")
    (tmp_path / "certificate.pem").write_bytes(own.public_bytes(serialization.Encoding.PEM))
    der = own.public_bytes(serialization.Encoding.DER)
    assert certificate_pin(settings(tmp_path)) == hashlib.sha256(der).digest()
    bought = certificate(issuer="An Authority")
    (tmp_path / "certificate.pem").write_bytes(bought.public_bytes(serialization.Encoding.PEM))
    assert certificate_pin(settings(tmp_path)) == b""


def certificate(issuer: str) -> x509.Certificate:
    secret = ec.generate_private_key(ec.SECP256R1())
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(named("auth.example.org"))
        .issuer_name(named(issuer))
        .public_key(secret.public_key())
        .serial_number(1)
        .not_valid_before(now)
        .not_valid_after(now + datetime.timedelta(days=1))
        .sign(secret, hashes.SHA256())
    )


def named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
