"""What requests carry, read within limits: refused while it is being read, not after.

A body is JSON of at most LARGEST_BODY_BYTES, and has BODY_SECONDS to arrive, however it trickles.
Bytes travel as base64url without padding. Fields that are not known are ignored: a newer volunteer
may send more than this server understands.

Easy to get wrong: the type `application/json` is demanded. A web page may send other types to any
address in its reader's name without asking; for this one the browser asks first, and is told no.
"""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Annotated, Any, TypeVar

import msgspec
import trio
from msgspec import Meta
from starlette.requests import Request

from auth.errors import AuthError

LARGEST_BODY_BYTES = 16 * 1024  # the largest is a renewal, with some 800
BODY_SECONDS = 10.0
SHORT = 128  # characters of an id, a name or a code
LONG = 4096  # characters of a challenge, a proof or a token

_BASE64URL = r"^[A-Za-z0-9_-]*\Z"

ShortText = Annotated[str, Meta(max_length=SHORT)]
Encoded = Annotated[str, Meta(max_length=LONG, pattern=_BASE64URL)]

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class BadRequest(AuthError):
    """A request that this server does not take. `status` is HTTP's word for it."""

    exit_code = 2

    def __init__(
        self, status: int, code: str, what: str, *, why: str = "", advice: str = ""
    ) -> None:
        super().__init__(what, why=why, advice=advice)
        self.status = status
        self.code = code


class ClientLeft(Exception):
    """The client went away in the middle of its request; nobody is there to be answered."""


class ChallengeBody(msgspec.Struct):
    peer: Encoded


class LoginBody(msgspec.Struct):
    peer: Encoded
    challenge: Encoded
    proof: Encoded
    provider: ShortText
    kind: ShortText
    code: ShortText = ""


class PollBody(msgspec.Struct):
    session: ShortText


class RenewBody(msgspec.Struct):
    peer: Encoded
    challenge: Encoded
    proof: Encoded
    token: Encoded


Body = TypeVar("Body", ChallengeBody, LoginBody, PollBody, RenewBody)


async def read_json(request: Request, decoder: msgspec.json.Decoder[Body]) -> Body:
    """The body of a request, decoded. BadRequest if it is not what this address takes."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise BadRequest(
            415,
            "unsupported_type",
            "The body must be JSON, and say so.",
            why=f"Its content-type is {kind[:SHORT]!r}.",
            advice="Send `content-type: application/json`.",
        )
    content = await read_body(request)
    try:
        return decoder.decode(content)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadRequest(
            400,
            "malformed",
            "The body is not what this address takes.",
            why=str(error)[:SHORT],
            advice="It may come from another version of potluck: update the older of the two.",
        ) from None


async def read_body(request: Request) -> bytes:
    """The whole body. BadRequest as soon as it is too long, or too slow."""
    declared = request.headers.get("content-length", "0")
    if not (declared.isascii() and declared.isdigit()) or int(declared) > LARGEST_BODY_BYTES:
        raise _too_large()
    with trio.move_on_after(BODY_SECONDS):
        return await _whole_body(request.receive)
    raise BadRequest(
        408,
        "too_slow",
        f"The body did not come within {BODY_SECONDS:g} seconds.",
        advice="Try again over a better connection.",
    )


async def _whole_body(receive: Receive) -> bytes:
    content = b""
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise ClientLeft
        part: bytes = message.get("body", b"")
        content += part
        if len(content) > LARGEST_BODY_BYTES:
            raise _too_large()
        if not message.get("more_body", False):
            return content


def encoded(data: bytes) -> str:
    """Bytes as they stand in JSON."""
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode("ascii")


def decoded(text: str, field: str, sizes: range | None = None) -> bytes:
    """The bytes of a field. BadRequest if they are none, or not so many."""
    try:
        data = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except ValueError:
        raise _bad_field(field, "is not base64url without padding") from None
    if sizes is not None and len(data) not in sizes:
        raise _bad_field(field, f"has {len(data)} bytes")
    return data


def _bad_field(field: str, what: str) -> BadRequest:
    return BadRequest(
        400,
        "malformed",
        f"The field `{field}` {what}.",
        advice="It may come from another version of potluck: update the older of the two.",
    )


def _too_large() -> BadRequest:
    return BadRequest(
        413,
        "too_large",
        f"The body has more than {LARGEST_BODY_BYTES // 1024} KiB.",
        why="Nothing that a volunteer sends is that long.",
    )
