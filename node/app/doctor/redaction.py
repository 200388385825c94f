"""Takes out of a report what must not be in it: secrets, and what tells who somebody is.

    redaction = Redaction(secrets=(…,), people=("code:alice",), home=Path.home())
    redaction.value(status)              # the same JSON without them

The report is pasted into a public bug tracker, so everything passes through here, whatever it is.
There are two nets. What is known (the content of the secret files, names of people, the home
directory) is replaced wherever it occurs. What looks like a secret (an invite, a code, an e-mail
address, anything long that could be a key) is replaced as well, because an error text may quote one
that we do not know. A peer id stays: it is public, and without it nobody can tell two peers apart.

Of a public IP address the beginning is enough to tell a home from a data centre, and IPv4 from
IPv6. Its number tells two addresses apart. Private addresses say how a network is built, and tell
nobody who it is.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

SECRET, PERSON = "(secret)", "(person)"

# What is shorter would also be found in words that are no secret.
SHORTEST_SECRET: Final = 8
SHORTEST_NAME: Final = 3

# Fields of a node's status that name a person.
PERSONAL_FIELDS: Final = frozenset({"username", "person", "name", "said_name"})

# Users under which a service runs: their names tell nothing, and stand in many other words.
NOBODY: Final = frozenset(
    {"root", "potluck", "node", "user", "ubuntu", "debian", "admin", "runner"}
)

_BASE58: Final = "[1-9A-HJ-NP-Za-km-z]"
_PEER_ID: Final = rf"12D3KooW{_BASE58}{{44}}"
_END_OF_ID: Final = rf"…{_BASE58}{{8}}"
_PIECE: Final = re.compile(r"[A-Za-z0-9+/_=-]{12,}")
_INVITE: Final = re.compile(r"potluck(?:-run)?:[A-Za-z0-9_=-]{8,}")
_CODE: Final = re.compile(r"\b[0-9A-Za-z]{5}(?:-[0-9A-Za-z]{5}){3}\b")
# A key of 32 bytes has 43 characters in base64 and 64 in hexadecimal; a path or a name has slashes.
_LONG: Final = re.compile(rf"(?!{_PEER_ID}\b)\b[A-Za-z0-9_+=-]{{32,}}")
_EMAIL: Final = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
_LOGIN_IN_URL: Final = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_HOME_OF_SOMEBODY: Final = re.compile(r"(?:/(?:home|Users)|[A-Z]:\\Users)[/\\][^/\\\s\"']+")
_QUOTED_NAME: Final = re.compile(rf"“[^”]*”(?= {_END_OF_ID})")
_ACCOUNT: Final = re.compile(rf"\b[a-z0-9-]+:\S+(?= (?:“|{_END_OF_ID}|{re.escape(PERSON)}))")
_ACCOUNT_BEHIND: Final = re.compile(r"(?<=[^\s] )\([a-z0-9-]+:[^()\s]+\)")
_IPV4: Final = re.compile(r"(?<![\d.])\d{1,3}(?:\.\d{1,3}){3}(?![\d.])")
_IPV6: Final = re.compile(r"(?<![\w:])[0-9A-Fa-f]{0,4}(?::[0-9A-Fa-f]{0,4}){2,7}(?![\w:])")


class Redaction:
    """Invariant: the same public address has the same number everywhere in a report."""

    def __init__(
        self,
        *,
        secrets: Iterable[str] = (),
        people: Iterable[str] = (),
        homes: Iterable[Path] = (),
        users: Iterable[str] = (),
    ) -> None:
        self._secrets = [one for one in secrets if len(one) >= SHORTEST_SECRET]
        names = {one: PERSON for one in people if len(one) >= SHORTEST_NAME}
        folders = {str(one): "~" for one in homes if len(one.parts) > 1}
        self._literal = {**folders, **names, **dict.fromkeys(self._secrets, SECRET)}
        self._users = [
            re.compile(rf"(?<![A-Za-z0-9]){re.escape(one)}(?![A-Za-z0-9])", re.IGNORECASE)
            for one in users
            if len(one) >= SHORTEST_NAME and one.lower() not in NOBODY
        ]
        self._addresses: dict[str, int] = {}

    def value(self, value: Any) -> Any:
        """A value of JSON, without what it must not have. Personal fields are emptied."""
        match value:
            case str():
                return self.text(value)
            case Mapping():
                return {
                    self.text(str(key)): PERSON
                    if key in PERSONAL_FIELDS and one
                    else self.value(one)
                    for key, one in value.items()
                }
            case list() | tuple():
                return [self.value(one) for one in value]
        return value

    def text(self, text: str) -> str:
        for known in sorted(self._literal, key=len, reverse=True):
            text = text.replace(known, self._literal[known])
        text = _PIECE.sub(self._unless_of_a_secret, text)
        for pattern in (_INVITE, _CODE, _LONG):
            text = pattern.sub(SECRET, text)
        text = _LOGIN_IN_URL.sub(SECRET, text)
        text = _HOME_OF_SOMEBODY.sub("~", text)
        for pattern in (_EMAIL, _QUOTED_NAME, _ACCOUNT):
            text = pattern.sub(PERSON, text)
        text = _ACCOUNT_BEHIND.sub(PERSON, text)
        for user in self._users:
            text = user.sub(PERSON, text)
        text = _IPV4.sub(lambda found: self._shortened(found[0]), text)
        return _IPV6.sub(lambda found: self._shortened(found[0]), text)

    def _unless_of_a_secret(self, found: re.Match[str]) -> str:
        """An error text may quote a secret in part."""
        return SECRET if any(found[0] in one for one in self._secrets) else found[0]

    def _shortened(self, text: str) -> str:
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            return text
        if not address.is_global:
            return text
        number = self._addresses.setdefault(address.exploded, len(self._addresses) + 1)
        if address.version == 4:
            return f"{'.'.join(text.split('.')[:2])}.x.x(#{number})"
        return f"{':'.join(address.exploded.split(':')[:2])}:x(#{number})"
