"""The interface of a provider of any kind: the two flows, as the login sessions use them.

A device flow is begun and then asked about until it has an answer. A browser flow is an address to
send a browser to and a code that the browser brings back. Errors are those of errors.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec

from auth.server.providers.identity import ProviderIdentity


class TokenAnswer(msgspec.Struct, frozen=True):
    """A token endpoint's answer, good or bad, in any flow."""

    access_token: str = ""
    id_token: str = ""
    error: str = ""
    error_description: str = ""
    interval: float | None = None


@dataclass(slots=True)
class DeviceGrant:
    """A device flow under way. The provider's data for it stays in this process.

    `token` is set once the person said yes, and is used up by the request that follows. An outage
    between the two must not cost the login: the provider gives a token once.
    """

    device_code: str
    user_code: str
    verification_uri: str
    verification_uri_complete: str | None
    interval: int  # seconds between two questions, as the provider wants it
    expires_in: int  # seconds
    token: TokenAnswer | None = None


@dataclass(frozen=True, slots=True)
class NotYet:
    """The person has not answered. `interval`: the seconds to wait from now on."""

    interval: int


@dataclass(frozen=True, slots=True)
class LoginAttempt:
    """One trip of one browser to the provider; each secret is used once.

    `state` finds the login again, `nonce` ties the ID token to it, `verifier` ties the code to us.
    """

    state: str
    nonce: str
    verifier: str


class Provider(Protocol):
    """The common part of all providers."""

    @property
    def id(self) -> str: ...

    @property
    def title(self) -> str: ...

    @property
    def flows(self) -> tuple[str, ...]:
        """Which of "device", "browser" and "code" it offers, the preferred one first."""

    @property
    def trouble(self) -> str:
        """Its last outage in words; empty if its last request was answered."""


class DeviceProvider(Provider, Protocol):
    async def start_device(self) -> DeviceGrant: ...

    async def ask_device(self, grant: DeviceGrant, interval: int) -> ProviderIdentity | NotYet:
        """Ask once. LoginRefused and LoginExpired are final; ProviderUnavailable is not."""


class BrowserProvider(Provider, Protocol):
    async def browser_url(self, attempt: LoginAttempt, redirect_uri: str) -> str:
        """The address to send the browser to."""

    async def finish_browser(
        self, attempt: LoginAttempt, query: Mapping[str, str], redirect_uri: str
    ) -> ProviderIdentity:
        """The person's identity, from the browser's query."""
