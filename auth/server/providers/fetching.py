"""Requests to a provider over HTTPS, bounded in time and size whatever it answers.

Each request has one deadline for all of it, and each answer a size after which reading stops. No
redirect is followed: a provider's document names its addresses, and a secret must not be sent to
another address. Cookies are not kept, since one client serves every person's login.

The result is an answer below 500, or ProviderUnavailable: anything that is not a provider's
deliberate answer is an outage, and never a refusal.

A compressed answer can be small on the wire and huge in memory. We ask for none and accept none.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from http.cookiejar import DefaultCookiePolicy
from pathlib import Path
from typing import Final, TypeVar

import httpx2
import msgspec
import trio

from auth.server.providers.errors import (
    RETRY_SECONDS,
    ProviderMisconfigured,
    ProviderUnavailable,
    words_of_a_stranger,
)

# From the first packet to the last byte. A person waits for this, and providers answer in well
# under a second.
ANSWER_SECONDS: Final = 10.0

# The longest documents are key sets with certificate chains in them, some tens of kilobytes.
LONGEST_ANSWER_BYTES: Final = 262_144

# Over all providers: the most requests at the same time during a flood of logins.
QUESTIONS_AT_ONCE: Final = 32

# Longest wait that we believe a provider that says Retry-After.
LONGEST_RETRY_SECONDS: Final = 300

# An idle connection serves the next step of the same login, and is closed before a provider would
# close it (common servers do after five seconds): a question sent into that moment is lost.
IDLE_CONNECTION_SECONDS: Final = 1.0

T = TypeVar("T")

_log = logging.getLogger("potluck.auth.providers")


@dataclass(frozen=True, slots=True)
class ProviderAnswer:
    status: int
    body: bytes

    def read(self, kind: type[T], *, strict: bool = True) -> T | None:
        """The body as this type, or None if it is something else: not JSON, other fields, too deep.

        Not strict: a number may also be a text.
        """
        try:
            return msgspec.json.decode(self.body, type=kind, strict=strict)
        except (ValueError, RecursionError):  # every error of msgspec's is a ValueError
            return None


class Fetcher:
    """Requests to one provider. `trouble` is its last outage in words, empty after an answer."""

    def __init__(self, title: str, client: httpx2.AsyncClient, limiter: trio.CapacityLimiter):
        self.title = title
        self.trouble = ""
        self._client = client
        self._limiter = limiter

    async def get(self, url: str, *, bearer: str | None = None) -> ProviderAnswer:
        headers = {} if bearer is None else {"Authorization": f"Bearer {bearer}"}
        return await self._ask("GET", url, headers, None)

    async def post(
        self, url: str, form: Mapping[str, str], *, headers: Mapping[str, str] | None = None
    ) -> ProviderAnswer:
        return await self._ask("POST", url, headers or {}, form)

    async def _ask(
        self, method: str, url: str, headers: Mapping[str, str], form: Mapping[str, str] | None
    ) -> ProviderAnswer:
        answer = await self._answer(method, url, headers, form)
        self._note("")
        return answer

    async def _answer(
        self, method: str, url: str, headers: Mapping[str, str], form: Mapping[str, str] | None
    ) -> ProviderAnswer:
        try:
            with trio.fail_after(ANSWER_SECONDS):
                async with (
                    self._limiter,
                    self._client.stream(method, url, headers=headers, data=form) as response,
                ):
                    self._check_head(response, url)
                    return ProviderAnswer(response.status_code, await self._body(response, url))
        except trio.TooSlowError:
            raise self.unavailable(
                f"it gave no whole answer within {ANSWER_SECONDS:g} s", url
            ) from None
        except httpx2.TimeoutException:
            raise self.unavailable(f"it gave no answer within {ANSWER_SECONDS:g} s", url) from None
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
            raise self.unavailable(_reason(error), url) from error

    def _check_head(self, response: httpx2.Response, url: str) -> None:
        status = response.status_code
        if 300 <= status < 400:
            raise self.misconfigured(
                f"it answered with a redirect ({status}), and redirects are not followed", url
            )
        if status >= 500 or status == 429:
            raise self.unavailable(f"it answered with status {status}", url, _wait_asked(response))
        if response.headers.get("content-encoding", "identity") != "identity":
            raise self.unavailable("it sent a compressed answer though none was asked for", url)

    async def _body(self, response: httpx2.Response, url: str) -> bytes:
        body = bytearray()
        # Leaving the loop early would leave httpx's generators to the garbage collector, and the
        # connection open until then. A cancelled read unwinds them from the inside.
        with trio.CancelScope() as reading:
            async for piece in response.aiter_raw():
                if len(body) + len(piece) > LONGEST_ANSWER_BYTES:
                    reading.cancel()
                else:
                    body += piece
        if reading.cancel_called:
            raise self.unavailable(f"its answer is over {LONGEST_ANSWER_BYTES} bytes", url)
        return bytes(body)

    def _note(self, trouble: str) -> None:
        # A log line when it changes, not one for each login during the same outage.
        if trouble and trouble != self.trouble:
            _log.warning("%s cannot be used: %s", self.title, trouble)
        elif self.trouble and not trouble:
            _log.info("%s answers again", self.title)
        self.trouble = trouble

    def unavailable(self, why: str, url: str, retry: int = RETRY_SECONDS) -> ProviderUnavailable:
        """The error for an unusable answer. Raise it: it is noted as an outage."""
        where = f"At {words_of_a_stranger(url)}: {why}."
        self._note(where)
        return ProviderUnavailable(
            f"{self.title} cannot be asked who you are at the moment.",
            why=where,
            advice="You were not refused: try again in a minute. If it lasts, tell the moderators.",
            retry_after=retry,
        )

    def misconfigured(self, why: str, url: str) -> ProviderMisconfigured:
        """The same for an answer that needs a moderator's correction."""
        where = f"At {words_of_a_stranger(url)}: {why}."
        self._note(where)
        return ProviderMisconfigured(
            f"{self.title} cannot be asked who you are: it and this server do not fit together.",
            why=where,
            advice="You were not refused. Tell the moderators: they must mend the settings of this"
            " provider.",
        )


@cache
def _system_authorities() -> ssl.SSLContext:
    """Reading a hundred of them takes 20 ms: once for all providers."""
    return httpx2.create_ssl_context()


@asynccontextmanager
async def open_client(certificate_authorities: Path | None) -> AsyncIterator[httpx2.AsyncClient]:
    """A client that verifies certificates: against the system's authorities, or those in a file."""
    if certificate_authorities is None:
        verify = _system_authorities()
    else:
        verify = ssl.create_default_context(cafile=certificate_authorities)
    async with httpx2.AsyncClient(
        verify=verify,
        follow_redirects=False,
        timeout=ANSWER_SECONDS,
        limits=httpx2.Limits(
            max_connections=QUESTIONS_AT_ONCE, keepalive_expiry=IDLE_CONNECTION_SECONDS
        ),
        headers={
            "Accept": "application/json",
            "Accept-Encoding": "identity",
            "User-Agent": "potluck-auth",  # GitHub refuses requests that name nobody
        },
    ) as client:
        client.cookies.jar.set_policy(DefaultCookiePolicy(allowed_domains=[]))
        yield client


def _wait_asked(response: httpx2.Response) -> int:
    text = response.headers.get("retry-after", "")
    if text.isascii() and text.isdigit() and len(text) < 6:
        return min(max(int(text), 1), LONGEST_RETRY_SECONDS)
    return RETRY_SECONDS


def _reason(error: Exception) -> str:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"its certificate is not valid ({words_of_a_stranger(cause.verify_message)})"
        cause = cause.__cause__ or cause.__context__
    text = words_of_a_stranger(str(error)) or type(error).__name__
    return f"the connection failed ({text})"
