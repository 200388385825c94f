"""An OpenID Connect provider: any issuer with a discovery document, in either flow.

The auth server is the OAuth client, with a secret or without one. Both flows end alike: the token
endpoint gives an ID token, which id_tokens.py verifies, and the person's name is taken from it, or
from the userinfo endpoint if the token does not hold the claim.

Easy to get wrong: userinfo is about the owner of the access token. It may be used only if its
subject is the ID token's.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, Generic, TypeVar
from urllib.parse import quote, urlencode

import msgspec
import trio

from auth.server.providers.device_answers import (
    GRANT_TYPE,
    checked_tokens,
    denied,
    read_start,
    read_token,
    trouble,
)
from auth.server.providers.errors import (
    LoginReason,
    LoginRefused,
    ProviderUnavailable,
    words_of_a_stranger,
)
from auth.server.providers.fetching import Fetcher, ProviderAnswer
from auth.server.providers.flows import DeviceGrant, LoginAttempt, NotYet, TokenAnswer
from auth.server.providers.id_tokens import (
    KeySet,
    UnknownKey,
    fetch_keys,
    not_proven,
    verify_id_token,
)
from auth.server.providers.identity import ProviderIdentity, holds_preferred, login_from
from auth.server.providers.settings import OpenIdSettings
from auth.server.providers.web_addresses import fault_in, is_loopback_http

LONGEST_CODE_CHARACTERS: Final = 4096


class OpenIdProvider:
    def __init__(
        self,
        settings: OpenIdSettings,
        secret: str | None,
        fetcher: Fetcher,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.id, self.title, self.flows = settings.id, fetcher.title, settings.flows
        self._settings = settings
        self._secret = secret
        self._fetcher = fetcher
        self._wall_clock = wall_clock
        self._metadata = Remembered(lambda: discover(fetcher, settings.issuer))
        self._keys: Remembered[KeySet] = Remembered(self._fetch_keys)

    @property
    def trouble(self) -> str:
        return self._fetcher.trouble

    async def start_device(self) -> DeviceGrant:
        metadata = await self._metadata.get()
        url = metadata.device_authorization_endpoint
        if not url:
            raise self._fetcher.misconfigured("it has no device flow", self._settings.issuer)
        answer = await self._post(metadata, url, {"scope": " ".join(self._settings.scopes)})
        local = is_loopback_http(self._settings.issuer)
        return read_start(answer, self._fetcher, url, loopback_http=local)

    async def ask_device(self, grant: DeviceGrant, interval: int) -> ProviderIdentity | NotYet:
        metadata = await self._metadata.get()
        url = metadata.token_endpoint
        if grant.token is None:
            form = {"grant_type": GRANT_TYPE, "device_code": grant.device_code}
            answer = await self._post(metadata, url, form)
            token = read_token(answer, self._fetcher, url, title=self.title, interval=interval)
            if isinstance(token, NotYet):
                return token
            grant.token = token
        return await self._identity(metadata, grant.token, nonce=None)

    async def browser_url(self, attempt: LoginAttempt, redirect_uri: str) -> str:
        metadata = await self._metadata.get()
        url = metadata.authorization_endpoint
        if not url:
            raise self._fetcher.misconfigured("it has no browser flow", self._settings.issuer)
        question = urlencode(
            {
                "response_type": "code",
                "client_id": self._settings.client_id,
                "redirect_uri": redirect_uri,
                "scope": " ".join(self._settings.scopes),
                "state": attempt.state,
                "nonce": attempt.nonce,
                "code_challenge": challenge_of(attempt.verifier),
                "code_challenge_method": "S256",
            }
        )
        return f"{url}{'&' if '?' in url else '?'}{question}"

    async def finish_browser(
        self, attempt: LoginAttempt, query: Mapping[str, str], redirect_uri: str
    ) -> ProviderIdentity:
        metadata = await self._metadata.get()
        self._check_issuer(metadata, query.get("iss"))
        code = self._code(metadata, query)
        url = metadata.token_endpoint
        answer = await self._post(
            metadata,
            url,
            {
                "grant_type": "authorization_code",
                "code": code,
                "redirect_uri": redirect_uri,
                "code_verifier": attempt.verifier,
            },
        )
        token = answer.read(TokenAnswer, strict=False)
        if token is None:
            raise self._fetcher.unavailable("it did not answer in the form of OAuth 2.0", url)
        if token.error == "invalid_grant":
            raise self._refused_code(token.error_description or token.error)
        if token.error or answer.status >= 400:
            raise trouble(token.error, token.error_description, answer.status, self._fetcher, url)
        tokens = checked_tokens(token, self._fetcher, url)
        return await self._identity(metadata, tokens, nonce=attempt.nonce)

    def _code(self, metadata: Metadata, query: Mapping[str, str]) -> str:
        """The code in the browser's query, or an error for anything else in it."""
        error, code = query.get("error"), query.get("code", "")
        if error == "access_denied":
            raise denied(self.title)
        if error is not None:
            said, url = query.get("error_description", ""), metadata.authorization_endpoint
            raise trouble(error, said, 400, self._fetcher, url)
        if not 0 < len(code) <= LONGEST_CODE_CHARACTERS:
            raise self._refused_code("there is none")
        return code

    async def _post(self, metadata: Metadata, url: str, form: Mapping[str, str]) -> ProviderAnswer:
        """Send a form as this client, with the secret if there is one.

        The secret is in the header if the provider accepts that (RFC 6749, 2.3.1, with its odd
        escaping), and in the form only if it accepts nothing else.
        """
        client = self._settings.client_id
        if self._secret is None:
            return await self._fetcher.post(url, {**form, "client_id": client})
        ways = metadata.token_endpoint_auth_methods_supported
        if "client_secret_basic" not in ways and "client_secret_post" in ways:
            both = {"client_id": client, "client_secret": self._secret}
            return await self._fetcher.post(url, {**form, **both})
        pair = f"{quote(client, safe='')}:{quote(self._secret, safe='')}"
        proof = base64.b64encode(pair.encode()).decode()
        headers = {"Authorization": f"Basic {proof}"}
        return await self._fetcher.post(url, {**form, "client_id": client}, headers=headers)

    async def _identity(
        self, metadata: Metadata, token: TokenAnswer, *, nonce: str | None
    ) -> ProviderIdentity:
        if not token.id_token:
            raise self._fetcher.misconfigured(
                "it gave no ID token (is openid among the scopes?)", metadata.token_endpoint
            )
        claims = await self._verified(token, nonce)
        subject: str = claims["sub"]
        if not holds_preferred(claims, self._settings.username_claim):
            more = await self._userinfo(metadata, token, subject)
            if "email" in more:  # an address and its being verified come from one place
                claims = {k: claims[k] for k in claims if k not in ("email", "email_verified")}
            claims = {**claims, **more}
        return ProviderIdentity(self.id, subject, login_from(claims, self._settings.username_claim))

    async def _userinfo(
        self, metadata: Metadata, token: TokenAnswer, subject: str
    ) -> dict[str, Any]:
        url = metadata.userinfo_endpoint
        if not url:
            return {}
        answer = await self._fetcher.get(url, bearer=token.access_token)
        if answer.status != 200:
            raise self._fetcher.misconfigured(f"it answered with status {answer.status}", url)
        claims = answer.read(dict[str, Any])
        if claims is None:
            raise self._fetcher.unavailable("it did not answer with claims", url)
        if claims.get("sub") != subject:
            raise LoginRefused(
                "The provider's answers are about two people.",
                reason=LoginReason.ID_TOKEN,
                why="Its userinfo endpoint names another subject than its ID token.",
                advice="Tell the moderators: this must not happen.",
            )
        return claims

    async def _verified(self, token: TokenAnswer, nonce: str | None) -> dict[str, Any]:
        """The ID token's claims. Fetches the keys again if the token's key may be newer than
        ours."""
        for age in (None, AT_LEAST_APART_SECONDS):
            keys = await (self._keys.get() if age is None else self._keys.get(not_older_than=age))
            try:
                return verify_id_token(
                    token.id_token,
                    keys,
                    issuer=self._settings.issuer,
                    client_id=self._settings.client_id,
                    now=self._wall_clock(),
                    nonce=nonce,
                    access_token=token.access_token,
                )
            except UnknownKey:
                continue
        raise not_proven("it is signed with a key that the provider does not publish")

    async def _fetch_keys(self) -> KeySet:
        metadata = await self._metadata.get()
        return await fetch_keys(self._fetcher, metadata.jwks_uri)

    def _check_issuer(self, metadata: Metadata, issuer: str | None) -> None:
        # RFC 9207: another provider's answer must not make us send its code to this one.
        needed = metadata.authorization_response_iss_parameter_supported
        if issuer == metadata.issuer or (issuer is None and not needed):
            return
        raise LoginRefused(
            "The browser came back from another provider than it was sent to.",
            reason=LoginReason.ID_TOKEN,
            why=f"The answer names {words_of_a_stranger(str(issuer))} as its issuer.",
            advice="Begin the login again, and tell the moderators if it happens again.",
        )

    def _refused_code(self, why: str) -> LoginRefused:
        return LoginRefused(
            f"{self.title} did not take the code that the browser brought.",
            reason=LoginReason.CODE,
            why=f"It says: {words_of_a_stranger(why)}. A code works once, and for some seconds.",
            advice="Begin the login again.",
        )


def challenge_of(verifier: str) -> str:
    """PKCE's S256: the challenge that belongs to this verifier (RFC 7636, 4.2)."""
    digest = hashlib.sha256(verifier.encode()).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


# A provider's discovery document: its addresses (OpenID Connect Discovery 1.0).
#
# The document must name exactly the issuer that it was asked of, letter for letter. This equality
# ties the addresses in it, and later every ID token, to the provider that the moderator chose.
# Every address in it is https, or http to this machine if the issuer is that too.


WELL_KNOWN: Final = "/.well-known/openid-configuration"


class Metadata(msgspec.Struct, frozen=True):
    """The part of the document that we use; the rest is ignored."""

    issuer: str
    jwks_uri: str
    token_endpoint: str
    authorization_endpoint: str = ""
    device_authorization_endpoint: str = ""
    userinfo_endpoint: str = ""
    token_endpoint_auth_methods_supported: tuple[str, ...] = ("client_secret_basic",)
    authorization_response_iss_parameter_supported: bool = False


def document_address(issuer: str) -> str:
    return issuer.removesuffix("/") + WELL_KNOWN


async def discover(fetcher: Fetcher, issuer: str) -> Metadata:
    """The issuer's document, checked; ProviderUnavailable if there is none."""
    url = document_address(issuer)
    answer = await fetcher.get(url)
    if answer.status != 200:
        raise fetcher.misconfigured(f"it answered with status {answer.status}", url)
    metadata = answer.read(Metadata)
    if metadata is None:
        raise fetcher.unavailable("the answer is no discovery document", url)
    if metadata.issuer != issuer:
        raise fetcher.misconfigured(
            f"the document is of another issuer ({metadata.issuer!r} instead of {issuer!r})", url
        )
    local = is_loopback_http(issuer)
    for name in (
        "jwks_uri",
        "token_endpoint",
        "authorization_endpoint",
        "device_authorization_endpoint",
        "userinfo_endpoint",
    ):
        address: str = getattr(metadata, name)
        optional = not address and name not in ("jwks_uri", "token_endpoint")
        fault = None if optional else fault_in(address, loopback_http=local)
        if fault:
            raise fetcher.misconfigured(f"the document's {name} {fault}", url)
    return metadata


# One answer that many logins need: fetched once for all callers, kept for a time.
#
# A discovery document and a key set change rarely and are needed by every login. If the answer is
# too old, one caller fetches it while the others wait. A failure is kept too, for a moment: a
# hundred waiting logins must not become a hundred timeouts, one after the other.


# An hour: what providers' own cache headers commonly say; a withdrawn key is trusted no longer.
KEPT_SECONDS: Final = 3600.0

# Between two questions about the same thing, whatever makes them necessary: a token with an unknown
# key id must not let a stranger make us ask as often as they like.
AT_LEAST_APART_SECONDS: Final = 5.0

T = TypeVar("T")


class Remembered(Generic[T]):
    def __init__(self, ask: Callable[[], Awaitable[T]]) -> None:
        self._ask = ask
        self._lock = trio.Lock()
        self._value: T | None = None
        self._failure: ProviderUnavailable | None = None
        self._asked = float("-inf")  # when the value, or the failure, came

    async def get(self, *, not_older_than: float = KEPT_SECONDS) -> T:
        """The answer, fetched again if it is older than this; ProviderUnavailable.

        Within AT_LEAST_APART_SECONDS it is never fetched again; then the last result is returned.
        """
        async with self._lock:
            age = trio.current_time() - self._asked
            if self._failure is not None and age < AT_LEAST_APART_SECONDS:
                raise type(self._failure)(
                    self._failure.what,
                    why=self._failure.why,
                    advice=self._failure.advice,
                    retry_after=self._failure.retry_after,
                )
            wanted_age = max(not_older_than, AT_LEAST_APART_SECONDS)
            if self._value is None or age >= wanted_age:
                await self._refresh()
            assert self._value is not None
            return self._value

    async def _refresh(self) -> None:
        # A cancelled caller leaves no answer, so the next one asks.
        self._value = self._failure = None
        try:
            self._value = await self._ask()
        except ProviderUnavailable as failure:
            self._failure = failure
            self._asked = trio.current_time()
            raise
        else:
            self._asked = trio.current_time()
