"""Whose devices the peers of a run are: by the token in a page, or, in an open run, by themselves.

Easy to get wrong: a token in a page has often run out. It says who the writer was when it was
signed, and for that it counts as long as the key that signed it does.
"""

from __future__ import annotations

from collections.abc import Iterable

from auth.refusals import AccessRefused
from auth.tokens import is_genuine, read_token
from node.access.membership import Membership
from node.credit.tally import Record
from protocols.credit.record import Page
from protocols.identity import PeerId, peer_id_of


def person_of(member: Membership | None, peer: PeerId, page: Page) -> str:
    """Who wrote a page; empty in a closed run if no auth key of it says who."""
    if member is None:
        return peer
    try:
        token = read_token(page.token)
    except AccessRefused:
        return ""
    key = member.keyring.allows(token)
    is_theirs = token.run == member.run_name and token.peer_id == peer
    if key is None or not is_theirs or not is_genuine(page.token, key.key):
        return ""
    return token.username


def records_of(member: Membership | None, pages: Iterable[tuple[PeerId, Page]]) -> list[Record]:
    """The pages, each with its writer's person."""
    return [Record(peer, person_of(member, peer, page), page) for peer, page in pages]


def persons_of(member: Membership | None, records: Iterable[Record]) -> dict[PeerId, str]:
    """Who all those are that these pages name, as far as it is known."""
    found: dict[PeerId, str] = {}
    keys: set[bytes] = set()
    for record in sorted(records, key=lambda one: (one.page.number, one.person)):
        keys.update(record.page.members)
        if record.person:
            found[record.peer] = record.person
    for peer in map(peer_id_of, keys):
        shown = None if member is None else member.access.shown_by(peer)
        if shown is not None:
            found.setdefault(peer, shown.username)
    return found
