"""A provider's answers in the device flow (RFC 8628), and their meaning for a login.

OpenID providers and GitHub share this. GitHub sends its errors with status 200, Google with 428,
and several have names of their own for some. So the names decide, and hardly the status.

The address and the code are shown in a volunteer's terminal. They must have the form of an address
and a code, so that nothing in them can control the terminal.
"""

from __future__ import annotations

import string
from typing import Final

import msgspec

from auth.server.providers.errors import (
    LoginError,
    LoginExpired,
    LoginReason,
    LoginRefused,
    words_of_a_stranger,
)
from auth.server.providers.fetching import Fetcher, ProviderAnswer
from auth.server.providers.flows import DeviceGrant, NotYet, TokenAnswer
from auth.server.providers.web_addresses import fault_in

GRANT_TYPE: Final = "urn:ietf:params:oauth:grant-type:device_code"

# RFC 8628, 3.2: the interval if a provider names none; 3.5: the seconds that slow_down adds.
DEFAULT_INTERVAL_SECONDS: Final = 5
SLOW_DOWN_SECONDS: Final = 5
LONGEST_INTERVAL_SECONDS: Final = 60

# A person who needs longer begins again; a provider cannot make us keep a session for longer.
LONGEST_DEVICE_SECONDS: Final = 1800

LONGEST_USER_CODE_CHARACTERS: Final = 40
LONGEST_SECRET_CHARACTERS: Final = 16_384  # tokens and codes; some providers' are signed documents

_CODE_CHARACTERS: Final = frozenset(string.ascii_letters + string.digits + "- .")

# Error names that mean that the request cannot work: the settings must be corrected.
_OURS: Final = frozenset(
    {
        "device_flow_disabled",
        "incorrect_client_credentials",
        "invalid_client",
        "invalid_request",
        "invalid_scope",
        "unauthorized_client",
        "unsupported_grant_type",
    }
)
_NOT_NOW: Final = frozenset({"server_error", "temporarily_unavailable"})


class _Start(msgspec.Struct, frozen=True):
    device_code: str = ""
    user_code: str = ""
    verification_uri: str = ""
    verification_url: str = ""  # what Google calls it
    verification_uri_complete: str | None = None
    expires_in: float = LONGEST_DEVICE_SECONDS
    interval: float | None = None
    error: str = ""
    error_description: str = ""


def read_start(
    answer: ProviderAnswer, fetcher: Fetcher, url: str, *, loopback_http: bool
) -> DeviceGrant:
    """The grant in a device authorisation answer; ProviderUnavailable when there is none."""
    start = answer.read(_Start, strict=False)  # Microsoft sends some numbers as text
    if start is None:
        raise fetcher.unavailable("it did not answer in the form of RFC 8628", url)
    if start.error or answer.status >= 400:
        raise trouble(start.error, start.error_description, answer.status, fetcher, url)
    page = start.verification_uri or start.verification_url
    complete = start.verification_uri_complete
    faulty = fault_in(page, loopback_http=loopback_http) or (
        complete is not None and fault_in(complete, loopback_http=loopback_http)
    )
    if (
        faulty
        or not 0 < len(start.device_code) <= LONGEST_SECRET_CHARACTERS
        or not 0 < len(start.user_code) <= LONGEST_USER_CODE_CHARACTERS
        or not _CODE_CHARACTERS.issuperset(start.user_code)
    ):
        raise fetcher.unavailable("its code or its address is nothing to show to people", url)
    return DeviceGrant(
        device_code=start.device_code,
        user_code=start.user_code,
        verification_uri=page,
        verification_uri_complete=complete,
        interval=_seconds(start.interval, DEFAULT_INTERVAL_SECONDS, LONGEST_INTERVAL_SECONDS),
        expires_in=_seconds(start.expires_in, LONGEST_DEVICE_SECONDS, LONGEST_DEVICE_SECONDS),
    )


def read_token(
    answer: ProviderAnswer, fetcher: Fetcher, url: str, *, title: str, interval: int
) -> TokenAnswer | NotYet:
    """The tokens, or that the person has not answered yet; raises for all other answers."""
    token = answer.read(TokenAnswer, strict=False)
    if token is None:
        raise fetcher.unavailable("it did not answer in the form of OAuth 2.0", url)
    match token.error:
        case "authorization_pending":
            return NotYet(interval)
        case "slow_down":
            asked = _seconds(token.interval, 0, LONGEST_INTERVAL_SECONDS)
            return NotYet(min(max(interval + SLOW_DOWN_SECONDS, asked), LONGEST_INTERVAL_SECONDS))
        case "access_denied" | "authorization_declined":  # the second is Microsoft's
            raise denied(title)
        case "expired_token" | "token_expired":
            raise LoginExpired(
                f"The code for {title} expired before it was used.",
                why="It was not typed in, or not confirmed there, in time.",
                advice="Begin the login again for a new code.",
            )
        case "invalid_grant" | "incorrect_device_code" | "bad_verification_code":
            raise LoginExpired(
                f"{title} no longer knows this login.",
                why="The code was used already, was withdrawn, or the provider was restarted.",
                advice="Begin the login again for a new code.",
            )
    if token.error or answer.status >= 400:
        raise trouble(token.error, token.error_description, answer.status, fetcher, url)
    return checked_tokens(token, fetcher, url)


def checked_tokens(token: TokenAnswer, fetcher: Fetcher, url: str) -> TokenAnswer:
    """A good answer, with an access token that is valid in a header."""
    access = token.access_token
    if not 0 < len(access) <= LONGEST_SECRET_CHARACTERS or not (
        access.isascii() and access.isprintable()
    ):
        raise fetcher.unavailable("it gave no access token", url)
    return token


def denied(title: str) -> LoginRefused:
    return LoginRefused(
        f"You said no at {title}.",
        reason=LoginReason.DENIED,
        why="The login was cancelled or denied there.",
        advice="If that was a mistake, begin the login again.",
    )


def trouble(error: str, description: str, status: int, fetcher: Fetcher, url: str) -> LoginError:
    """An error that the person did not cause: passing, or for a moderator to fix."""
    said = words_of_a_stranger(f"{error}: {description}" if description else error)
    if error in _NOT_NOW:
        return fetcher.unavailable(f"it answered {said}", url)
    if error in _OURS or status in (400, 401, 403, 404, 405):
        return fetcher.misconfigured(f"it answered {said or f'with status {status}'}", url)
    return fetcher.unavailable(f"it answered {said or f'with status {status}'}", url)


def _seconds(value: float | None, default: int, most: int) -> int:
    if value is None or not value > 0:  # also when it is no number
        return default
    return max(1, int(min(value, most)))
