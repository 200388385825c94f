"""A peer's record of its rounds, in pages that it signs. Pure.

    page = Page(run, number, members, lines, token)
    data = sign_page(identity, page)
    peer, page = read_page(data, run)            # WrongPage if it is not one

A line is one committed step: its time, and for every member of the group its samples and the bytes
that it averaged for the others. All members know both from the list that they all signed, so the
lines of honest peers about one step are the same. A line proves nothing about its own writer;
node/training/credit/tally.py accounts for that. A step that the writer made alone has a line as
well, which says that nobody else was in the group.

In a run with experts a line also has the rows that each server computed for its writer's samples.
Only the writer knows them, so this part differs from the lines of the others.

A page holds PAGE_EPOCHS epochs, so that old lines need not be sent again.

A page may come from a stranger. Its size is checked before it is decoded. Its consistency is
checked before it is counted: each member once, one line for each epoch, the writer in every line.
"""

from __future__ import annotations

from typing import Annotated

from blake3 import blake3
from msgspec import Meta

from protocols.errors import MalformedMessage, PotluckError
from protocols.identity import (
    PUBLIC_KEY_BYTES,
    SIGNATURE_BYTES,
    Identity,
    PeerId,
    peer_id_of,
    verify_with_key,
)
from protocols.rpc import Message, MessageType, encode

DOMAIN = b"potluck credit page 1"

PAGE_EPOCHS = 32
"""A page of the largest group is then some 400 KiB, and one of three peers under 2 KiB."""

LARGEST_PAGE_BYTES = 512 << 10
MOST_MEMBERS = 2048  # on one page: the largest group, with room for peers that come and go
MOST_IN_A_LINE = 1024  # the largest group
MOST_SERVERS = 256  # in a line: a page of the largest group has room for so many beside it
LARGEST_AMOUNT = 10**15  # samples or bytes: float64 sums of larger ones lose units
LARGEST_EPOCH = (1 << 63) - 1
LARGEST_MOMENT = 1 << 40  # seconds since 1970
LONGEST_RUN = 192  # characters: the run's name and its organiser's fingerprint
LARGEST_TOKEN_BYTES = 512
LONGEST_PERSON = 128  # characters: a username has up to 100, a peer id some 52
HISTORY_BYTES = 16
PAGE_DIGEST_BYTES = 16  # to tell versions of a page apart; it proves nothing

RunKey = Annotated[str, Meta(min_length=1, max_length=LONGEST_RUN)]
Key = Annotated[bytes, Meta(min_length=PUBLIC_KEY_BYTES, max_length=PUBLIC_KEY_BYTES)]
Signature = Annotated[bytes, Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]
Amount = Annotated[int, Meta(ge=0, le=LARGEST_AMOUNT)]
Place = Annotated[int, Meta(ge=0, lt=MOST_MEMBERS)]
Epoch = Annotated[int, Meta(ge=0, le=LARGEST_EPOCH)]
PageNumber = Annotated[int, Meta(ge=0, le=LARGEST_EPOCH // PAGE_EPOCHS)]
Amounts = Annotated[tuple[Amount, ...], Meta(max_length=MOST_IN_A_LINE)]


class WrongPage(PotluckError):
    """The bytes are not a valid page of a record."""


class Line(Message, frozen=True):
    """One committed step.

    `places` are indices into the page's members; `samples` and `averaged_bytes` are theirs, in the
    same order. `of_samples` is the total of the step. `over_a_grid`: there were other groups, which
    this line does not cover. `servers` are indices, too, and `served` the rows that the experts of
    these have computed for the writer since its line before.
    """

    epoch: Epoch
    history: Annotated[bytes, Meta(min_length=HISTORY_BYTES, max_length=HISTORY_BYTES)]
    moment: Annotated[int, Meta(ge=0, le=LARGEST_MOMENT)]
    of_samples: Amount
    over_a_grid: bool
    places: Annotated[tuple[Place, ...], Meta(min_length=1, max_length=MOST_IN_A_LINE)]
    samples: Amounts
    averaged_bytes: Amounts
    servers: Annotated[tuple[Place, ...], Meta(max_length=MOST_SERVERS)] = ()
    served: Annotated[tuple[Amount, ...], Meta(max_length=MOST_SERVERS)] = ()


class Page(Message, frozen=True):
    """The lines from epoch `number * PAGE_EPOCHS` on.

    `token` names the writer if the run has an auth server. It is not secret.
    """

    run: RunKey
    number: PageNumber
    members: Annotated[tuple[Key, ...], Meta(max_length=MOST_MEMBERS)]
    lines: Annotated[tuple[Line, ...], Meta(max_length=PAGE_EPOCHS)]
    token: Annotated[bytes, Meta(max_length=LARGEST_TOKEN_BYTES)] = b""


class SignedPage(Message, frozen=True):
    key: Key
    page: Annotated[bytes, Meta(max_length=LARGEST_PAGE_BYTES)]
    signature: Signature


_SIGNED = MessageType(SignedPage)
_PAGE = MessageType(Page)


def page_number(epoch: int) -> int:
    return epoch // PAGE_EPOCHS


def page_digest(data: bytes) -> bytes:
    return blake3(data).digest(PAGE_DIGEST_BYTES)


def sign_page(identity: Identity, page: Page) -> bytes:
    """Sign a page of our own, and encode it. WrongPage if no peer would accept it."""
    _check(page, identity.public_key)
    body = encode(page)
    data = encode(SignedPage(identity.public_key, body, identity.sign(DOMAIN, body)))
    _check_size(data)
    return data


def read_page(data: bytes, run: str) -> tuple[PeerId, Page]:
    """The writer and the page; WrongPage unless that peer signed it for this run."""
    _check_size(data)
    try:
        signed = _SIGNED.decode(data)
        if not verify_with_key(DOMAIN, signed.key, signed.signature, signed.page):
            raise WrongPage("It was not signed by the peer that it names.")
        peer, page = peer_id_of(signed.key), _PAGE.decode(signed.page)
    except MalformedMessage as error:
        raise WrongPage(error.what) from None
    if page.run != run:
        raise WrongPage("It is of another run.")
    _check(page, signed.key)
    return peer, page


def _check_size(data: bytes) -> None:
    if len(data) > LARGEST_PAGE_BYTES:
        raise WrongPage(f"It has {len(data):,} bytes; a page has up to {LARGEST_PAGE_BYTES:,}.")


def _check(page: Page, writer: bytes) -> None:
    if len(set(page.members)) != len(page.members):
        raise WrongPage("It names a member twice.")
    place = page.members.index(writer) if writer in page.members else -1
    before = page.number * PAGE_EPOCHS - 1
    for line in page.lines:
        if not before < line.epoch < (page.number + 1) * PAGE_EPOCHS:
            raise WrongPage("Its lines are not in order, each epoch once, within the page.")
        before = line.epoch
        count = len(line.places)
        if len(line.samples) != count or len(line.averaged_bytes) != count:
            raise WrongPage("A line has not as many amounts as members.")
        if len(set(line.places)) != count or max(line.places) >= len(page.members):
            raise WrongPage("A line names a member twice, or one that the page does not have.")
        if place not in line.places:
            raise WrongPage("Its writer was not in a round that it tells of.")
        if len(line.served) != len(line.servers):
            raise WrongPage("A line has not as many amounts as servers.")
        if len(set(line.servers)) != len(line.servers):
            raise WrongPage("A line names a server twice.")
        if max(line.servers, default=0) >= len(page.members):
            raise WrongPage("A line names a server that the page does not have.")
