"""`/potluck/credit/1.0.0`: the messages to exchange records.

    CONTENTS   [run]                 ->  [[key, page number, digest], ...]
    PAGE       [run, key, number]    ->  [signed page]
    OFFER      [run, signed page]    ->  [taken]
    SUMS       [run]                 ->  [steps, sums, the pages that were added up]

The digests tell the asking peer which pages it already has. A peer that leaves offers its last page
to those that keep pages. SUMS returns the sums of a peer that keeps records, with the pages they
were made from, so that others can add up the same (node/training/credit/sums.py).

A peer may give out pages of others (a keeper does, for peers that are gone). A page is believed
because of its writer's signature; it does not matter which peer sent it.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from protocols.credit.record import (
    LARGEST_AMOUNT,
    LARGEST_EPOCH,
    LARGEST_PAGE_BYTES,
    LONGEST_PERSON,
    LONGEST_RUN,
    PAGE_DIGEST_BYTES,
    Amount,
    Epoch,
    Key,
    PageNumber,
    RunKey,
)
from protocols.rpc import Message, Method

PROTOCOL = "/potluck/credit/1.0.0"

MOST_LISTED = 4096  # pages: with 3 peers those of 40,000 steps, in an answer of 250 KiB
MOST_SUMMED = 1024  # persons, those with the largest sums first
LARGEST_SUM = (1 << 63) - 1


class ContentsRequest(Message, frozen=True, gc=False):
    run: RunKey


class Listed(Message, frozen=True):
    """A page that can be fetched."""

    key: Key
    number: PageNumber
    digest: Annotated[bytes, Meta(min_length=PAGE_DIGEST_BYTES, max_length=PAGE_DIGEST_BYTES)]


class Contents(Message, frozen=True):
    """The newest pages, those of the peer itself first. Empty if the peer is not in this run."""

    pages: Annotated[tuple[Listed, ...], Meta(max_length=MOST_LISTED)] = ()


class PageRequest(Message, frozen=True, gc=False):
    run: RunKey
    key: Key
    number: PageNumber


class PageResponse(Message, frozen=True, gc=False):
    """Empty if the peer does not have the page (any more)."""

    data: Annotated[bytes, Meta(max_length=LARGEST_PAGE_BYTES)] = b""


class OfferRequest(Message, frozen=True, gc=False):
    """Offers a page of the asking peer's own."""

    run: RunKey
    data: Annotated[bytes, Meta(max_length=LARGEST_PAGE_BYTES)]


class OfferResponse(Message, frozen=True, gc=False):
    """`taken`: whether the page is kept. A peer that keeps no records never does."""

    taken: bool = False


class Sum(Message, frozen=True):
    """The contribution of one person."""

    person: Annotated[str, Meta(min_length=1, max_length=LONGEST_PERSON)]
    samples: Annotated[int, Meta(ge=0, le=LARGEST_SUM)]
    averaged_bytes: Annotated[int, Meta(ge=0, le=LARGEST_SUM)]
    steps: Amount
    service_seconds: Amount
    longest_seconds: Amount
    devices: Annotated[int, Meta(ge=0, le=LARGEST_AMOUNT)]
    served_samples: Annotated[int, Meta(ge=0, le=LARGEST_SUM)] = 0


class Used(Message, frozen=True):
    """A page that was added up, with its lines up to `last`."""

    key: Key
    number: PageNumber
    last: Epoch


class SumsRequest(Message, frozen=True, gc=False):
    run: RunKey


class Sums(Message, frozen=True):
    """The sums of the run's first `steps` steps.

    A peer that has left no record is listed by its peer id. All fields are empty if nothing was
    added up yet, or if this peer keeps no records.
    """

    steps: Annotated[int, Meta(ge=0, le=LARGEST_EPOCH)] = 0
    sums: Annotated[tuple[Sum, ...], Meta(max_length=MOST_SUMMED)] = ()
    used: Annotated[tuple[Used, ...], Meta(max_length=MOST_LISTED)] = ()


CONTENTS = Method(
    PROTOCOL,
    "contents",
    ContentsRequest,
    Contents,
    request_limit_bytes=4 * LONGEST_RUN + 16,
    response_limit_bytes=64 * MOST_LISTED + 16,
)

PAGE = Method(
    PROTOCOL,
    "page",
    PageRequest,
    PageResponse,
    request_limit_bytes=4 * LONGEST_RUN + 64,
    response_limit_bytes=LARGEST_PAGE_BYTES + 16,
)

OFFER = Method(
    PROTOCOL,
    "offer",
    OfferRequest,
    OfferResponse,
    request_limit_bytes=4 * LONGEST_RUN + LARGEST_PAGE_BYTES + 16,
)

SUMS = Method(
    PROTOCOL,
    "sums",
    SumsRequest,
    Sums,
    request_limit_bytes=4 * LONGEST_RUN + 16,
    response_limit_bytes=MOST_SUMMED * (4 * LONGEST_PERSON + 73) + 64 * MOST_LISTED + 64,
)
