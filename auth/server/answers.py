"""Answers: JSON with what, why and what next, and headers that keep browsers out of it.

An `Answer` is an ASGI application of its own, like Starlette's responses. It does not use them,
because they encode and compare every header of every answer again; ours are constant.

A 403 proves nothing by itself, because any proxy can send one. A refusal carries a document that
the auth key signed; a node treats everything else, whatever its status, as an outage.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from auth.errors import AuthError

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

# No header allows another origin anything: CORS is closed. There is no Strict-Transport-Security
# either: it would count for every other port of this host, which is not ours to decide for.
ALWAYS: Mapping[str, str] = {
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
}
JSON = "application/json"
BYTES = "application/octet-stream"

_RAW_ALWAYS = [(name.encode(), value.encode()) for name, value in ALWAYS.items()]


class Answer:
    """A status, some headers and a body that is sent in one piece."""

    def __init__(
        self,
        content: bytes,
        content_type: str,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status = status
        self.content = content
        self.headers = [*_RAW_ALWAYS]
        if headers:
            # latin-1 is HTTP's encoding; our headers have no text from strangers
            own = {
                name.encode("latin-1"): value.encode("latin-1") for name, value in headers.items()
            }
            self.headers = [pair for pair in _RAW_ALWAYS if pair[0] not in own] + list(own.items())
        if status not in (204, 304):
            self.headers.append((b"content-type", content_type.encode()))
            self.headers.append((b"content-length", str(len(content)).encode()))

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
        await send({"type": "http.response.body", "body": self.content})


def json_answer(
    value: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None
) -> Answer:
    return Answer(msgspec.json.encode(value), JSON, status, headers)


def error_answer(
    error: AuthError,
    status: int,
    code: str,
    *,
    signed: str | None = None,
    retry_seconds: int | None = None,
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """The reason, for a person and for a program."""
    value: dict[str, Any] = {
        "error": code,
        "what": error.what,
        "why": error.why,
        "advice": error.advice,
    }
    if signed is not None:
        value["signed"] = signed
    all_headers = dict(headers or {})
    if retry_seconds is not None:
        all_headers["retry-after"] = str(retry_seconds)
    return json_answer(value, status, all_headers)
