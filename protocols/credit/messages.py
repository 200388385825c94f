"""`/potluck/credit/1.0.0`: what is asked and answered about records.

    CONTENTS   [run]                 ->  [[key, page number, digest], ...]
    PAGE       [run, key, number]    ->  [signed page]

Whoever asks sees from the digests which pages it has already.

Easy to get wrong: a peer may give out pages of others (a keeper does, for those who are gone). They
are believed for their writers' signatures, and not for who brought them.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from protocols.credit.record import (
    LARGEST_PAGE_BYTES,
    LONGEST_RUN,
    PAGE_DIGEST_BYTES,
    Key,
    PageNumber,
    RunKey,
)
from protocols.messages import Message
from protocols.method import Method

PROTOCOL = "/potluck/credit/1.0.0"

MOST_LISTED = 4096  # pages: at 3 peers those of 40,000 steps, in 250 KiB of an answer


class ContentsRequest(Message, frozen=True, gc=False):
    run: RunKey


class Listed(Message, frozen=True):
    """A page that can be had."""

    key: Key
    number: PageNumber
    digest: Annotated[bytes, Meta(min_length=PAGE_DIGEST_BYTES, max_length=PAGE_DIGEST_BYTES)]


class Contents(Message, frozen=True):
    """The newest pages, of the peer itself first. Empty where it is not in this run."""

    pages: Annotated[tuple[Listed, ...], Meta(max_length=MOST_LISTED)] = ()


class PageRequest(Message, frozen=True, gc=False):
    run: RunKey
    key: Key
    number: PageNumber


class PageResponse(Message, frozen=True, gc=False):
    """Empty where there is no such page (any more)."""

    data: Annotated[bytes, Meta(max_length=LARGEST_PAGE_BYTES)] = b""


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
