"""The addresses to join at that an auth server gives: those that this version can dial."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from node.peer_address import parse_peer_address
from node.wrong_use import WrongUse

log = logging.getLogger("potluck.access")


def usable_endpoints(endpoints: Iterable[str]) -> tuple[str, ...]:
    """Each that is a peer's address, as this version spells it. Others are told of and left out:
    one bad line in the server's settings must not keep everybody from starting."""
    usable = []
    for text in endpoints:
        try:
            usable.append(parse_peer_address(text).text)
        except WrongUse as error:
            log.warning("an address that the auth server gave cannot be used: %s", error)
    return tuple(usable)
