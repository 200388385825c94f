"""A certificate authority of a test's own, and the certificates that it issues."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

LOOPBACK = "127.0.0.1"
DAY = datetime.timedelta(days=1)


class Authority:
    """Signs a certificate for every name. `file` is its own certificate, for clients to trust."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self.folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        own = self._built(self._key.public_key(), self._name, DAY * -1, DAY * 90, None)
        self.file = folder / f"{name}.pem"
        self.file.write_bytes(own.public_bytes(serialization.Encoding.PEM))

    def issue(
        self,
        *hosts: str,
        name: str = "server",
        begins: datetime.timedelta = DAY * -1,
        ends: datetime.timedelta = DAY * 60,
    ) -> tuple[Path, Path]:
        """Files of a new certificate and its key; written over those of the same name."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        names = x509.SubjectAlternativeName([_name_of(host) for host in hosts or (LOOPBACK,)])
        certificate = self._built(key.public_key(), subject, begins, ends, names)
        certificate_file, key_file = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        certificate_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        key_file.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        key_file.chmod(0o600)
        return certificate_file, key_file

    def trust(self) -> ssl.SSLContext:
        """The TLS context of a client that trusts only this authority."""
        return ssl.create_default_context(cafile=str(self.file))

    def _built(
        self,
        key: ec.EllipticCurvePublicKey,
        subject: x509.Name,
        begins: datetime.timedelta,
        ends: datetime.timedelta,
        names: x509.SubjectAlternativeName | None,
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + begins)
            .not_valid_after(now + ends)
            .add_extension(x509.BasicConstraints(ca=names is None, path_length=None), critical=True)
        )
        if names is not None:
            builder = builder.add_extension(names, critical=False)
        return builder.sign(self._key, hashes.SHA256())


def _name_of(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
