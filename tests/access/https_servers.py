"""Small HTTP servers that say what a test tells them to, with certificates of their own."""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import trio
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

REQUEST_LIMIT_BYTES = 65_536


@dataclass(frozen=True)
class Certificate:
    """A self-signed certificate for a name or an address, with its key, in PEM."""

    pem: bytes
    key_pem: bytes
    sha256: bytes

    def written_to(self, folder: Path, name: str = "server") -> tuple[Path, Path]:
        """The files of certificate and key."""
        certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
        certificate.write_bytes(self.pem)
        key.write_bytes(self.key_pem)
        key.chmod(0o600)
        return certificate, key


def make_certificate(host: str = "127.0.0.1", *, expired: bool = False) -> Certificate:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "potluck test")])
    now = datetime.datetime.now(datetime.UTC)
    begins = now - datetime.timedelta(days=40 if expired else 1)
    try:
        subject: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        subject = x509.DNSName(host)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(begins + datetime.timedelta(days=30))
        .add_extension(x509.SubjectAlternativeName([subject]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    return Certificate(
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
        hashlib.sha256(certificate.public_bytes(serialization.Encoding.DER)).digest(),
    )


def response(status: str, body: bytes = b"", *headers: str) -> bytes:
    """An HTTP/1.1 response."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


@dataclass
class ScriptedServer:
    """Its answers can be changed while it runs, and the requests are kept."""

    port: int
    says: bytes
    scheme: str = "https"
    certificate: Certificate | None = None
    asked: list[bytes] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"


Conversation = Callable[[trio.abc.Stream], Awaitable[None]]
Converse = Callable[[trio.abc.Stream, bytes], Awaitable[None]]


@asynccontextmanager
async def scripted_server(
    folder: Path,
    says: bytes = b"",
    *,
    certificate: Certificate | None = None,
    conversation: Conversation | None = None,
    converse: Converse | None = None,
) -> AsyncIterator[ScriptedServer]:
    """A server on loopback that answers every request with `says`, or as `conversation` does,
    or as `converse` does, which is given what was asked so far."""
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    scheme = "http" if certificate is None else "https"
    server = ScriptedServer(listener.socket.getsockname()[1], says, scheme, certificate)

    async def answer(stream: trio.abc.Stream) -> None:
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*certificate.written_to(folder))
            stream = trio.SSLStream(stream, context, server_side=True, https_compatible=True)
        try:
            async with stream:
                request = b""
                while b"\r\n\r\n" not in request and len(request) < REQUEST_LIMIT_BYTES:
                    some = await stream.receive_some(4096)
                    if not some:
                        return
                    request += some
                server.asked.append(request)
                if converse is not None:
                    await converse(stream, request)
                elif conversation is not None:
                    await conversation(stream)
                else:
                    await stream.send_all(server.says)
        except (trio.BrokenResourceError, trio.ClosedResourceError, ssl.SSLError):
            pass  # the client did not like us: that is what the test is about

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, answer, [listener])
        yield server
        nursery.cancel_scope.cancel()
