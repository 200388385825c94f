"""Checks the web addresses that this server uses or shows: https, or http to itself.

Secrets are sent to the addresses in a discovery document, so each is checked as strictly as the
issuer that a moderator typed. Plain http is for a provider on this very machine, and only if the
issuer is one. Otherwise a provider's document could point our requests at services that trust
every caller from loopback.
"""

from __future__ import annotations

import ipaddress
from typing import Final
from urllib.parse import urlsplit

LONGEST_ADDRESS_CHARACTERS: Final = 2048


def fault_in(address: str, *, loopback_http: bool) -> str | None:
    """The fault of this address, as the end of a sentence; None if there is none."""
    if len(address) > LONGEST_ADDRESS_CHARACTERS:
        return f"is longer than {LONGEST_ADDRESS_CHARACTERS} characters"
    if not address.isascii() or not address.isprintable() or " " in address or "\\" in address:
        return "holds characters that no web address has"
    try:
        parts = urlsplit(address)
        host, _ = parts.hostname, parts.port  # reading the port checks it
    except ValueError:
        return "is not a web address"
    if not host:
        return "names no host"
    if parts.username is not None or parts.password is not None:
        return "carries a user name or a password"
    if "#" in address:
        return "carries a fragment (#...)"
    if parts.scheme == "https":
        return None
    if parts.scheme == "http" and loopback_http and is_loopback(host):
        return None
    return "does not begin with https://"


def is_loopback_http(address: str) -> bool:
    """Whether this is plain http to this machine."""
    parts = urlsplit(address)
    return parts.scheme == "http" and is_loopback(parts.hostname or "")


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
