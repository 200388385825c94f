"""HTTPS to the auth server, as bytes: the server's certificate, timeouts and sizes.

auth_client.py interprets the answers. Here every failure to get an answer from an auth server
becomes an `Outage`, with advice for a person: no network, no such name, no server there, a wrong
certificate, a proxy, a captive portal (a login page in front of the internet, which answers
everything with a redirect or a page of HTML), an overloaded server.

The certificate is checked before we send anything. Nothing is sent without TLS except to this
machine itself, because an enrolment code is a secret. Redirects are not followed. An answer is read
up to its size limit and within its timeout, whatever the other side does.

A 403 proves nothing, because captive portals and proxies answer 403 too. A refusal counts only if
the auth key has signed it; auth_client.py checks that.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx2
import trio

from node.net import VERSION
from protocols.errors import Unreachable

# For one whole exchange, connecting included. An auth server that asks an identity provider before
# it answers may take 30 s for that.
EXCHANGE_SECONDS = 45.0
CONNECT_SECONDS = 10.0  # name, TCP and TLS; four round trips around half the world are 1 s
# The largest answer is a pass with a full keyring or a full revocation list (60 KiB), in base64.
LARGEST_ANSWER_BYTES = 256 * 1024
CONNECTIONS = 2  # a node sends one request after another; a login may overlap with a poll
IDLE_SECONDS = 5.0  # below any server's idle timeout, to avoid closing connections


class Outage(Unreachable):
    """The auth server gave no answer of its own. This does not mean that it refuses."""

    def __init__(
        self, what: str, *, why: str = "", advice: str = "", retry_seconds: float = 0.0
    ) -> None:
        super().__init__(what, why=why, advice=advice)
        self.retry_seconds = retry_seconds
        """How long the other side asks us to wait; 0.0 if it does not."""


@dataclass(frozen=True)
class HttpAnswer:
    """The answer. `content_type` is without parameters, in lower case."""

    status: int
    content_type: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)  # names in lower case

    def document(self) -> dict[str, Any] | None:
        """The JSON object in the body; None if the body is none."""
        if self.content_type != "application/json":
            return None
        try:
            value = json.loads(self.body)
        except (ValueError, RecursionError):
            return None
        return value if isinstance(value, dict) else None


class AuthHttp:
    """Sends requests to one server. `open_auth_http` makes it."""

    def __init__(self, url: str, client: httpx2.AsyncClient) -> None:
        self.url = url
        self._client = client

    async def ask(
        self,
        method: str,
        path: str,
        *,
        content: Mapping[str, object] | None = None,
        query: Mapping[str, str] | None = None,
    ) -> HttpAnswer:
        """One request and its whole answer, whatever its status; Outage if there is none."""
        _check_private(self.url)
        body = None if content is None else json.dumps(content).encode()
        headers = {} if body is None else {"content-type": "application/json"}
        try:
            with trio.fail_after(EXCHANGE_SECONDS), _closing_what_is_cancelled() as trace:
                async with self._client.stream(
                    method,
                    self.url + path,
                    content=body,
                    headers=headers,
                    params=query,
                    extensions={"trace": trace},
                ) as response:
                    return HttpAnswer(
                        response.status_code,
                        response.headers.get("content-type", "").split(";")[0].strip().lower(),
                        await _read_within(response.aiter_bytes(), self.url),
                        {name.lower(): value for name, value in response.headers.items()},
                    )
        except trio.TooSlowError:
            raise _outage(
                self.url,
                f"it did not answer within {EXCHANGE_SECONDS:g} seconds",
                "You need not do anything: this node asks again.",
            ) from None
        except (httpx2.HTTPError, httpx2.StreamError, OSError) as error:
            raise _explained(self.url, error) from error
        except (httpx2.InvalidURL, UnicodeError) as error:
            raise _outage(self.url, f"that is no address ({error})", "Ask for a new invite.") from (
                None
            )


@asynccontextmanager
async def open_auth_http(url: str, pin: bytes = b"") -> AsyncIterator[AuthHttp]:
    """A client for this server, until the block ends.

    With `pin` the server must have the certificate with this SHA-256; names and authorities do not
    count then. Without it the system's authorities decide.
    """
    context = await trio.to_thread.run_sync(_tls_context, pin)  # reads a hundred certificates
    client = httpx2.AsyncClient(
        verify=context,
        timeout=httpx2.Timeout(EXCHANGE_SECONDS, connect=CONNECT_SECONDS),
        limits=httpx2.Limits(max_connections=CONNECTIONS, keepalive_expiry=IDLE_SECONDS),
        follow_redirects=False,
        headers={"user-agent": f"potluck/{VERSION}", "accept-encoding": "identity"},
    )
    async with client:
        yield AuthHttp(url.rstrip("/"), client)


Trace = Callable[[str, Mapping[str, Any]], Awaitable[None]]


@contextmanager
def _closing_what_is_cancelled() -> Iterator[Trace]:
    """If the task that makes a connection is cancelled, close that connection.

    The library leaves a socket open if it is cancelled in its TLS handshake (httpcore2 2.16).
    """
    made: list[Any] = []

    async def trace(event: str, facts: Mapping[str, Any]) -> None:
        if event == "connection.connect_tcp.complete":
            made.append(facts["return_value"])

    try:
        yield trace
    except BaseException:
        for stream in made:
            stream.get_extra_info("socket").close()
        raise


async def _read_within(chunks: AsyncIterator[bytes], url: str) -> bytes:
    body = bytearray()
    # The library's generators end in order only after an error inside, so not with `raise`.
    with trio.CancelScope() as too_much:
        async for chunk in chunks:
            body += chunk
            if len(body) > LARGEST_ANSWER_BYTES:
                too_much.cancel()
    if len(body) > LARGEST_ANSWER_BYTES:
        raise _outage(
            url,
            f"its answer has more than {LARGEST_ANSWER_BYTES // 1024} KiB",
            "Something else answers in its place: open the address in a browser.",
        )
    return bytes(body)


# -- certificates


def _tls_context(pin: bytes) -> ssl.SSLContext:
    if not pin:
        return httpx2.create_ssl_context()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # the pin is enough, and stronger than a name: Pinned compares it in the handshake
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.sslobject_class = _pinned_to(pin)
    return context


def _pinned_to(pin: bytes) -> type[ssl.SSLObject]:
    class Pinned(ssl.SSLObject):
        """Ends a handshake with any other certificate, before anything is sent."""

        def do_handshake(self) -> None:
            super().do_handshake()
            certificate = self.getpeercert(binary_form=True) or b""
            if not hmac.compare_digest(hashlib.sha256(certificate).digest(), pin):
                error = ssl.SSLCertVerificationError("the certificate is not the pinned one")
                error.verify_message = "it is not the certificate in the invite"
                raise error

    return Pinned


def _check_private(url: str) -> None:
    """Outage if the connection to this URL could be read on the way."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return  # no valid address; the library's error says why
    if parts.scheme == "http" and not _is_this_machine(parts.hostname or ""):
        raise _outage(
            url,
            "that is no https address, and not on this machine",
            "Everybody on the way could read the traffic, for example an enrolment code. Ask for a "
            "new invite.",
        )


def _is_this_machine(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


# -- why there was no answer


def _outage(url: str, why: str, advice: str, retry_seconds: float = 0.0) -> Outage:
    return Outage(
        "The auth server cannot be asked.",
        why=f"At {url}: {why}.",
        advice=advice,
        retry_seconds=retry_seconds,
    )


def _explained(url: str, error: BaseException) -> Outage:
    """The outage for an error of the HTTP library."""
    for cause in _causes(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            reason = cause.verify_message or str(cause)
            return _outage(
                url,
                f"the certificate is not accepted ({reason.strip().rstrip('.')})",
                "Something may be in between (a captive portal, a company's proxy): open the "
                "address in a browser. Or the certificate has expired, or this machine's clock is "
                "days off. Otherwise ask the moderator for a new invite.",
            )
    advice = "Check this machine's connection. If others cannot reach it either, it is down."
    if isinstance(error, httpx2.ProxyError):
        return _outage(
            url,
            f"the proxy did not let us through ({error})",
            "The environment variable HTTPS_PROXY names the proxy: correct it, or unset it.",
        )
    if isinstance(error, httpx2.TimeoutException):
        return _outage(url, "it did not answer in time", advice)
    if isinstance(error, httpx2.UnsupportedProtocol):
        return _outage(url, "that is no https address", "Ask for a new invite.")
    if isinstance(error, httpx2.ConnectError):
        return _outage(url, f"no connection ({_words_of(error)})", advice)
    return _outage(url, f"the connection broke ({_words_of(error)})", advice)


def _words_of(error: BaseException) -> str:
    words = [str(cause).strip() for cause in _causes(error)]
    return next((text.rstrip(".") for text in words if text), type(error).__name__)


def _causes(error: BaseException | None) -> list[BaseException]:
    """The error and its causes, also through trio's groups."""
    found: list[BaseException] = []
    waiting = [error]
    while waiting and len(found) < 32:
        one = waiting.pop()
        if one is None or one in found:
            continue
        found.append(one)
        if isinstance(one, BaseExceptionGroup):
            waiting += one.exceptions
        waiting += [one.__context__, one.__cause__]
    return found


def explain_answer(url: str, answer: HttpAnswer) -> Outage:
    """Why an answer is not from the auth server, or not an answer to our request."""
    status = answer.status
    if 300 <= status < 400:
        where = answer.headers.get("location", "")[:200]
        return _outage(
            url,
            f"something in between redirects us ({status}, {where or 'nowhere'})",
            "This is what a captive portal does: open any page in a browser and log in to the "
            "network, then try again.",
        )
    if status == 407:
        return _outage(
            url,
            "a proxy requires a login (407)",
            "Put the name and password into HTTPS_PROXY, or unset it.",
        )
    seconds = _retry_seconds(answer)
    if status == 503 and (answer.document() or {}).get("error") == "unknown_key":
        return Outage(
            "The auth server cannot renew this node's token.",
            why=f"At {url}: it does not know the auth key behind the token. It was probably put "
            "back from a backup that is older than that key.",
            advice="This node asks again. If it stays so, tell the run's moderators: they give the "
            "server that key again (`potluck auth keys rotate --key FILE`), or send new invites.",
            retry_seconds=seconds,
        )
    if status in (429, 503):
        return _outage(
            url,
            f"it is busy, or its identity provider does not answer ({status}{_said(answer)})",
            f"Try again in {max(seconds, 1):.0f} s.",
            seconds,
        )
    if status >= 500:
        return _outage(url, f"it has a fault of its own ({status}{_said(answer)})", _WAIT)
    if answer.document() is None:
        return _outage(
            url,
            f"a page came instead of an answer ({status}, {answer.content_type or 'no type'})",
            "Something in between answers for it, as a captive portal or a proxy does: open the "
            "address in a browser.",
        )
    return _outage(url, f"the answer does not fit the question ({status}{_said(answer)})", _UPDATE)


_WAIT = "You need not do anything; the moderator sees it in the server's log."
_UPDATE = "Both sides may run different versions: update potluck here, or ask the moderator."
LONGEST_QUOTED = 300  # characters of the text of an unproven server


def _said(answer: HttpAnswer) -> str:
    document = answer.document() or {}
    words = [document.get(name) for name in ("what", "why")]
    text = " ".join(word for word in words if isinstance(word, str) and word)[:LONGEST_QUOTED]
    return f": {text.rstrip('.')}" if text else ""


def _retry_seconds(answer: HttpAnswer) -> float:
    text = answer.headers.get("retry-after", "")
    return float(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0.0
