"""The names of accounts: `provider:login`, and a bare `login` where only one can be meant.

The provider is part of the name because alice at one provider is not alice at another. Logins are
compared without regard to case (GitHub's are that way, and two people whose logins differ only in
case should not both be on one list), and are kept in lower case.

Easy to get wrong: what a moderator types is a name, a peer id or a serial number. They are told
apart by their form, and a login that looks like one of the others has to be given in full.
"""

from __future__ import annotations

import re

import msgspec

from auth.errors import AuthError, NotAKey
from auth.fields import LONGEST_USERNAME
from auth.keys import public_key_of

LONGEST_PROVIDER = 32

_PROVIDER = re.compile(r"[a-z0-9][a-z0-9-]{0,31}\Z")
_LOGIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+~-]*\Z")
_SERIAL = re.compile(r"#?[0-9]{1,18}\Z")
_PEER_ID_START = "12D3KooW"


class NotAName(AuthError):
    """A text that cannot be the name of an account."""

    exit_code = 2


class AccountName(msgspec.Struct, frozen=True):
    provider: str
    login: str

    def __str__(self) -> str:
        return f"{self.provider}:{self.login}"


class BareName(msgspec.Struct, frozen=True):
    """A login without its provider: somebody has to find out which is meant."""

    login: str


class PeerKey(msgspec.Struct, frozen=True):
    public_key: bytes


class SerialNumber(msgspec.Struct, frozen=True):
    serial: int


Target = AccountName | BareName | PeerKey | SerialNumber


def account_name(provider: str, login: str) -> AccountName:
    """The name for a login at a provider; NotAName if it cannot stand in a token."""
    if not _PROVIDER.match(provider):
        raise NotAName(
            f"{_shown(provider)} is not the id of an identity provider.",
            why=f"Ids have lower-case letters, digits and dashes, at most {LONGEST_PROVIDER}.",
            advice="Use one of the ids in the server's settings (auth.toml), or `code`.",
        )
    if not _LOGIN.match(login) or len(provider) + 1 + len(login) > LONGEST_USERNAME:
        raise NotAName(
            f"{_shown(login)} cannot be the name of somebody who takes part.",
            why="Names have letters, digits and . _ @ + ~ - and begin with a letter or a digit; "
            f"with their provider they have at most {LONGEST_USERNAME} characters.",
            advice="Take the login exactly as the provider shows it.",
        )
    return AccountName(provider, login.lower())


def parse_name(text: str) -> AccountName | BareName:
    provider, colon, login = text.strip().partition(":")
    if colon:
        return account_name(provider, login)
    return BareName(account_name("any", provider).login)


def parse_target(text: str) -> Target:
    """What a moderator means: a serial number (`17` or `#17`), a peer id, or a name."""
    text = text.strip()
    if _SERIAL.match(text):
        return SerialNumber(int(text.lstrip("#")))
    if text.startswith(_PEER_ID_START):
        try:
            return PeerKey(public_key_of(text))
        except NotAKey as error:
            raise NotAName(error.what, why=error.why, advice=error.advice) from None
    return parse_name(text)


def _shown(text: str) -> str:
    return repr(text[:LONGEST_USERNAME])
