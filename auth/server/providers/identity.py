"""The identity of a person who logged in, and the name by which moderators know them.

An identity is (provider, subject, login). The subject is the provider's own handle for the person,
which is never reused; an account is bound to it. The login is the name that a moderator types in
`potluck auth allow`; people can often change it, and at some providers choose it freely.

An e-mail address counts only if the provider says that it verified it. Otherwise anybody could
become anybody by typing an address into a form.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from auth.server.providers.errors import LoginReason, LoginRefused, words_of_a_stranger

# Stands in tokens, in logs, on command lines and in `provider:login`: no colon, no space, nothing
# that a shell or a page would take for its own, and nothing that only looks like another letter.
LONGEST_LOGIN_CHARACTERS: Final = 64
_LOGIN: Final = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._@+-]{{0,{LONGEST_LOGIN_CHARACTERS - 1}}}\Z")

# OpenID Connect Core, section 2: at most 255 ASCII characters.
LONGEST_SUBJECT_CHARACTERS: Final = 255

DEFAULT_CLAIMS: Final = ("preferred_username", "email", "sub")


@dataclass(frozen=True, slots=True)
class ProviderIdentity:
    provider: str
    subject: str
    login: str


def is_safe_login(text: str) -> bool:
    return _LOGIN.match(text) is not None


def is_safe_subject(text: str) -> bool:
    """Whether this can be a subject: some printable ASCII, as the standard bounds it."""
    return 0 < len(text) <= LONGEST_SUBJECT_CHARACTERS and text.isascii() and text.isprintable()


def holds_preferred(claims: Mapping[str, Any], username_claim: str | None) -> bool:
    """Whether the preferred claim is among these."""
    preferred = _claims_wanted(username_claim)[0]
    return preferred in claims and (preferred != "email" or _verified(claims))


def login_from(claims: Mapping[str, Any], username_claim: str | None) -> str:
    """The login in these claims; LoginRefused if there is none.

    The first claim that is there decides: a name that is there but unsafe is refused. If the next
    claim were used, a person could choose their name.
    """
    for claim in _claims_wanted(username_claim):
        value = claims.get(claim)
        if value is None or value == "" or (claim == "email" and not _verified(claims)):
            continue
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        if isinstance(value, str) and claim == "email":
            value = value.lower()
        if not isinstance(value, str) or not is_safe_login(value):
            raise unsafe_login(claim, value)
        return value
    raise LoginRefused(
        "The provider does not say by which name you are known.",
        reason=LoginReason.USERNAME,
        why=f"It tells nothing in the claim {words_of_a_stranger(str(username_claim))}, or has not"
        " verified your e-mail address.",
        advice="Fill in your profile there and verify your address, or ask the moderators to set"
        " username_claim to another claim.",
    )


def unsafe_login(claim: str, value: object) -> LoginRefused:
    return LoginRefused(
        f"The provider names you {words_of_a_stranger(repr(value))}, which cannot be a name here.",
        reason=LoginReason.USERNAME,
        why=f"A name holds letters, digits and . _ @ + - only, at most {LONGEST_LOGIN_CHARACTERS}"
        f" of them; this one is the claim {claim}.",
        advice="Change your name at the provider, or ask the moderators to set username_claim to"
        " another claim.",
    )


def _claims_wanted(username_claim: str | None) -> tuple[str, ...]:
    return DEFAULT_CLAIMS if username_claim is None else (username_claim,)


def _verified(claims: Mapping[str, Any]) -> bool:
    return claims.get("email_verified") in (True, "true")  # some providers send the word
