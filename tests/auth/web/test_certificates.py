from __future__ import annotations

import logging
import ssl
from pathlib import Path

import pytest

from auth.server.certificates import Certificate, UnusableCertificate, load_certificate
from tests.auth.web.authority import DAY, Authority


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def test_a_pair_is_loaded_with_its_names_and_its_time(authority: Authority) -> None:
    loaded = load_certificate(*authority.issue("127.0.0.1", "auth.example"))
    assert loaded.names == ("auth.example", "127.0.0.1")
    assert loaded.not_after_ms - loaded.not_before_ms == 61 * 86_400_000
    assert loaded.context.minimum_version == ssl.TLSVersion.TLSv1_2


def test_files_that_stay_are_not_read_again(authority: Authority) -> None:
    certificate = Certificate(*authority.issue())
    before = certificate.current
    assert not certificate.reload_if_changed()
    assert certificate.current is before


def test_new_files_take_effect(authority: Authority) -> None:
    certificate = Certificate(*authority.issue())
    before = certificate.context
    authority.issue()
    assert certificate.reload_if_changed()
    assert certificate.context is not before
    assert certificate.reloads == 1


def test_a_link_that_leads_elsewhere_is_a_change(authority: Authority, tmp_path: Path) -> None:
    for version in ("one", "two"):
        authority.issue(name=version)
    chain, key = tmp_path / "chain.pem", tmp_path / "key.pem"
    chain.symlink_to("one.pem")
    key.symlink_to("one.key")
    certificate = Certificate(chain, key)
    for link, target in ((chain, "two.pem"), (key, "two.key")):
        link.unlink()
        link.symlink_to(target)
    assert certificate.reload_if_changed()


BROKEN = {
    "rubbish": b"-----BEGIN CERTIFICATE-----\nrubbish\n-----END CERTIFICATE-----\n",
    "empty": b"",
    "binary": bytes(range(256)),
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_certificate_is_told_of_once_and_the_old_one_kept(
    authority: Authority, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    certificate_file, key_file = authority.issue()
    certificate = Certificate(certificate_file, key_file)
    before = certificate.context
    certificate_file.write_bytes(content)
    with caplog.at_level(logging.ERROR):
        for _ in range(5):
            assert not certificate.reload_if_changed()
    assert certificate.context is before
    [record] = caplog.records
    assert "the old one" in record.getMessage()
    authority.issue()
    assert certificate.reload_if_changed(), "a good one is taken afterwards"


def test_two_files_replaced_one_after_the_other_alarm_nobody(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    certificate = Certificate(*authority.issue())
    new_certificate, new_key = authority.issue(name="new")
    certificate.certificate_file.write_bytes(new_certificate.read_bytes())
    with caplog.at_level(logging.ERROR):
        assert not certificate.reload_if_changed(), "it does not fit to the old key"
        certificate.key_file.write_bytes(new_key.read_bytes())
        assert certificate.reload_if_changed()
    assert not caplog.records


def test_files_that_vanish_leave_the_old_certificate(authority: Authority) -> None:
    certificate_file, key_file = authority.issue()
    certificate = Certificate(certificate_file, key_file)
    certificate_file.unlink()
    key_file.unlink()
    assert not certificate.reload_if_changed()
    assert certificate.is_valid_at(certificate.current.not_before_ms)


def test_a_certificate_that_is_unusable_from_the_start_is_an_error(
    authority: Authority, tmp_path: Path
) -> None:
    certificate_file, key_file = authority.issue()
    other_certificate, _ = authority.issue(name="other")
    missing = tmp_path / "missing.pem"
    for pair, word in (
        ((missing, key_file), "cannot be read"),
        ((certificate_file, missing), "cannot be used"),
        ((other_certificate, key_file), "belongs to another certificate"),
        ((key_file, key_file), "no certificate"),
        ((certificate_file, certificate_file), "cannot be used"),
        ((tmp_path, key_file), "cannot be read"),
    ):
        with pytest.raises(UnusableCertificate, match=word) as caught:
            Certificate(*pair)
        assert caught.value.why
        assert caught.value.advice


def test_an_encrypted_key_is_refused_and_nobody_is_asked_for_a_password(
    authority: Authority,
) -> None:
    from cryptography.hazmat.primitives import serialization

    certificate_file, key_file = authority.issue()
    key = serialization.load_pem_private_key(key_file.read_bytes(), None)
    key_file.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    with pytest.raises(UnusableCertificate, match="encrypted"):
        Certificate(certificate_file, key_file)


@pytest.mark.parametrize(
    ("ends", "word"), [(DAY * 3, "expires in 3.0 days"), (DAY * -1 / 2, "EXPIRED"), (DAY * 30, "")]
)
def test_a_certificate_that_expires_soon_is_warned_of(
    authority: Authority, ends: object, word: str, caplog: pytest.LogCaptureFixture
) -> None:
    certificate = Certificate(*authority.issue(ends=ends))  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING):
        assert certificate.warn_of_its_end() == bool(word)
    assert word in caplog.text


def test_a_key_that_everybody_can_read_is_warned_of(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    certificate_file, key_file = authority.issue()
    key_file.chmod(0o644)
    with caplog.at_level(logging.WARNING):
        Certificate(certificate_file, key_file)
    assert "every user" in caplog.text
