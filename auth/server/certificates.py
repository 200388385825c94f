"""The certificate for new TLS handshakes: read from files, and again when they change.

A renewal (by certbot, acme.sh, a person) replaces two files; nothing needs to be told or restarted.
The files are checked every LOOK_SECONDS. An unusable pair is reported in the log, and the previous
one stays in use.

Loading a pair into the context in use would leave half of it there if the other half is broken. So
each pair gets a context of its own, which replaces the old one. The two files are never replaced at
the same moment, so a pair that does not match is checked once more before it is reported.
"""

from __future__ import annotations

import logging
import os
import ssl
import stat
import time
from dataclasses import dataclass
from pathlib import Path

import trio
from cryptography import x509

from auth.errors import AuthError

LOOK_SECONDS = 2.0
WARN_BEFORE_SECONDS = 14 * 86_400  # ACME clients renew 30 days before; this means they do not
WARN_AGAIN_SECONDS = 86_400.0
LARGEST_CERTIFICATE_BYTES = 1 << 20  # a chain has some 10 kB; /dev/zero has more

_log = logging.getLogger("potluck.auth.certificates")

Stamp = tuple[tuple[int, int, int, int], ...]


class UnusableCertificate(AuthError):
    """A certificate or its key that no server can use."""


@dataclass(frozen=True)
class LoadedCertificate:
    """One pair, ready for handshakes."""

    context: ssl.SSLContext
    not_before_ms: int
    not_after_ms: int
    names: tuple[str, ...]


class Certificate:
    """The pair in use. UnusableCertificate from the constructor if the first one is unusable."""

    def __init__(self, certificate_file: Path, key_file: Path) -> None:
        self.certificate_file = certificate_file
        self.key_file = key_file
        self._stamp = self._look()
        self._broken: Stamp | None = None
        self._complained_of: Stamp | None = None
        self.current = load_certificate(certificate_file, key_file)
        self.reloads = 0

    @property
    def context(self) -> ssl.SSLContext:
        return self.current.context

    def is_valid_at(self, now_ms: int) -> bool:
        return self.current.not_before_ms <= now_ms < self.current.not_after_ms

    async def watch(self) -> None:
        """Check the files and the expiry date, until cancelled."""
        warned_at = float("-inf")
        while True:
            if trio.current_time() - warned_at >= WARN_AGAIN_SECONDS and self.warn_of_its_end():
                warned_at = trio.current_time()
            await trio.sleep(LOOK_SECONDS)
            await trio.to_thread.run_sync(self.reload_if_changed)

    def reload_if_changed(self) -> bool:
        """Use new files if they are usable; returns whether there were any."""
        stamp = self._look()
        if stamp == self._stamp:
            return False
        try:
            self.current = load_certificate(self.certificate_file, self.key_file)
        except UnusableCertificate as error:
            self._complain(stamp, error)
            return False
        self._stamp, self._broken, self._complained_of = stamp, None, None
        self.reloads += 1
        _log.info(
            "new certificate for %s, valid until %s",
            ", ".join(self.current.names) or "no name",
            _date(self.current.not_after_ms),
        )
        return True

    def _complain(self, stamp: Stamp, error: UnusableCertificate) -> None:
        """Report each broken pair once, and only one that stays as it is."""
        if stamp == self._broken and stamp != self._complained_of:
            self._complained_of = stamp
            _log.error(
                "the new certificate is not used, the old one (until %s) goes on: %s %s %s",
                _date(self.current.not_after_ms),
                error.what,
                error.why,
                error.advice,
            )
        self._broken = stamp

    def warn_of_its_end(self) -> bool:
        """Warn in the log if the certificate expires soon; returns whether it does."""
        left = self.current.not_after_ms / 1000 - time.time()
        if left > WARN_BEFORE_SECONDS:
            return False
        if left <= 0:
            _log.error(
                "the certificate has EXPIRED on %s: every volunteer is turned away by their own"
                " TLS. Put a new one into %s",
                _date(self.current.not_after_ms),
                self.certificate_file,
            )
        else:
            _log.warning(
                "the certificate expires in %.1f days, on %s: is its renewal still running?",
                left / 86_400,
                _date(self.current.not_after_ms),
            )
        return True

    def _look(self) -> Stamp:
        return tuple(_stamp_of(path) for path in (self.certificate_file, self.key_file))


def load_certificate(certificate_file: Path, key_file: Path) -> LoadedCertificate:
    """A TLS context of our own choosing with this pair. UnusableCertificate says what is wrong."""
    leaf = _read_leaf(certificate_file)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate_file, key_file, password=_no_password)
    except UnusableCertificate:
        raise
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise _unusable(key_file, error) from None
    warn_if_readable_by_others(key_file)
    return LoadedCertificate(
        context,
        int(leaf.not_valid_before_utc.timestamp() * 1000),
        int(leaf.not_valid_after_utc.timestamp() * 1000),
        _names_of(leaf),
    )


def warn_if_readable_by_others(key_file: Path) -> None:
    """A private key that everybody on the machine can read is not private."""
    try:
        mode = stat.S_IMODE(key_file.stat().st_mode)
    except OSError:  # just replaced: the next look sees it
        return
    if mode & 0o004:
        _log.warning("every user of this machine can read %s: chmod o-r it", key_file)


def _read_leaf(path: Path) -> x509.Certificate:
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST_CERTIFICATE_BYTES)
        return x509.load_pem_x509_certificates(content)[0]
    except OSError as error:
        raise UnusableCertificate(
            f"The certificate {path} cannot be read: {error.strerror}.",
            why="auth.toml names it as server.certificate.",
            advice="Check the path, and that the user who runs the server may read it.",
        ) from None
    except ValueError as error:
        raise UnusableCertificate(
            f"{path} is no certificate in PEM form.",
            why=str(error),
            advice="Give the full chain, as ACME clients write it (fullchain.pem).",
        ) from None


def _names_of(leaf: x509.Certificate) -> tuple[str, ...]:
    try:
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, x509.DuplicateExtension, ValueError):
        return ()
    addresses = [str(address) for address in names.get_values_for_type(x509.IPAddress)]
    return (*names.get_values_for_type(x509.DNSName), *addresses)


def _no_password() -> str:
    raise UnusableCertificate(
        "The certificate's key is encrypted.",
        why="A server that starts by itself has nobody to ask for the password.",
        advice="Store it decrypted, readable by the server's user alone (mode 0600).",
    )


def _unusable(key_file: Path, error: Exception) -> UnusableCertificate:
    reason = getattr(error, "reason", "") or getattr(error, "strerror", "") or str(error)
    if reason == "KEY_VALUES_MISMATCH":
        reason = "the key belongs to another certificate"
    return UnusableCertificate(
        f"The certificate's key {key_file} cannot be used: {reason}.",
        why="auth.toml names it as server.certificate_key.",
        advice="Give the key in PEM form that belongs to the certificate (privkey.pem).",
    )


def _stamp_of(path: Path) -> tuple[int, int, int, int]:
    try:
        status = os.stat(path)
    except OSError:
        return (0, 0, 0, 0)
    return (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)


def _date(time_ms: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(time_ms / 1000))
