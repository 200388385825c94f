"""Whose devices the peers of a run are: by the token in a page, or, in an open run, by themselves.

Easy to get wrong: a token in a page has often run out. It says who the writer was when it was
signed, and for that it counts as long as the key that signed it does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from auth.keyring import Keyring
from auth.refusals import AccessRefused
from auth.roles import may_train
from auth.tokens import Token, is_genuine, read_token
from node.credit.tally import Record
from protocols.credit.record import Page
from protocols.identity import PeerId, peer_id_of


def person_of(keyring: Keyring | None, peer: PeerId, page: Page) -> str:
    """Who wrote a page; empty in a closed run if no auth key of it says who. Without a keyring the
    run is open."""
    if keyring is None:
        return peer
    try:
        token = read_token(page.token)
    except AccessRefused:
        return ""
    key = keyring.allows(token)
    is_theirs = token.run == keyring.run and token.peer_id == peer
    if key is None or not is_theirs or not is_genuine(page.token, key.key):
        return ""
    return token.username if may_train(token.roles) else ""


def records_of(keyring: Keyring | None, pages: Iterable[tuple[PeerId, Page]]) -> list[Record]:
    """The pages, each with its writer's person."""
    return [Record(peer, person_of(keyring, peer, page), page) for peer, page in pages]


def persons_of(
    records: Iterable[Record], shown_by: Callable[[PeerId], Token | None] | None
) -> dict[PeerId, str]:
    """Who all those are that these pages name: as they signed it last, or else as they have shown
    this node. Who did neither is not named. `shown_by`: None in an open run, and to somebody else.
    """
    found: dict[PeerId, str] = {}
    keys: set[bytes] = set()
    for record in sorted(records, key=lambda one: (one.page.number, one.person)):
        keys.update(record.page.members)
        if record.person:
            found[record.peer] = record.person
    if shown_by is None:  # a stranger's page may name thousands, and 20 microseconds for each
        return found
    for peer in map(peer_id_of, keys):
        shown = shown_by(peer)
        if shown is not None:
            found.setdefault(peer, shown.username)
    return found
