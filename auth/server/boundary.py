"""The checks of every request before it is handled, and the record of every answer.

They find its sender (perhaps behind a proxy of ours), and check how often that one asks and whether
the method is known. At the end the status and the time are counted. An unexpected error is logged
with its traceback and becomes a 500 that says nothing about it.

A limit has to be checked before the body is read. It costs a few microseconds.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec
import trio
from msgspec import Meta
from starlette.requests import Request

from auth.errors import AuthError
from auth.server.answers import Answer, error_answer
from auth.server.metrics import Metrics
from auth.server.rate_limits import AllowedRate, Network, RateLimit, asker, is_within, site_of

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

# The slowest part of a request is asking an identity provider: 30 s at the worst.
REQUEST_SECONDS = 40.0
OTHER_ROUTE = "other"
FORWARDED_HEADERS = frozenset({b"x-forwarded-for", b"forwarded", b"via"})

_log = logging.getLogger("potluck.auth.requests")


class TooManyRequests(AuthError):
    """Somebody asks too often. This is not a refusal: it passes by itself."""

    exit_code = 4

    def __init__(self, limit: str, retry_seconds: int) -> None:
        super().__init__(
            "Too many requests.",
            why=f"The limit is `{limit}`, of this address, this account or this key.",
            advice=f"Try again in {retry_seconds} s.",
        )
        self.limit = limit
        self.retry_seconds = retry_seconds


class Boundary:
    """The outermost application. `route_names` maps paths to their names in the metrics."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        metrics: Metrics,
        requests: AllowedRate,
        trusted_proxies: tuple[Network, ...],
        route_names: Mapping[str, str],
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._requests = RateLimit(requests)
        self._trusted = trusted_proxies
        self._route_names = route_names
        self._warned_of_proxy = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        began = trio.current_time()
        answered: list[int] = []

        async def send_and_note(message: Message) -> None:
            if message["type"] == "http.response.start":
                answered.append(message["status"])
            await send(message)

        with trio.move_on_after(REQUEST_SECONDS) as patience:
            refusal = self._refusal(scope, began)
            try:
                await (refusal or self._app)(scope, receive, send_and_note)
            except ClientLeft:
                pass
            except Exception as error:  # noqa: BLE001 - the last place: the server goes on
                _log.exception("%s %r failed: %r", scope["method"], scope["path"][:200], error)
                self._metrics.failures.labels("unforeseen").inc()
                if not answered:
                    await _unforeseen()(scope, receive, send_and_note)
        if patience.cancelled_caught and not answered:
            self._metrics.failures.labels("too_slow").inc()
            await _too_slow()(scope, receive, send_and_note)
        self._note(scope, answered, trio.current_time() - began)

    def _refusal(self, scope: Scope, now: float) -> Answer | None:
        """Store the sender in `scope["potluck.site"]`; an answer if that one asks too often."""
        peer = (scope.get("client") or ("unknown",))[0]
        forwarded, through_proxy = _forwarded(scope)
        address = asker(peer, forwarded, self._trusted)
        site = site_of(address)
        scope["potluck.address"] = address
        scope["potluck.site"] = site
        scope["potluck.unknown_proxy"] = through_proxy and not is_within(peer, self._trusted)
        if scope["potluck.unknown_proxy"]:
            self._warn_of_proxy(peer)
        wait = self._requests.wait_seconds(site, now)
        if wait:
            return too_many(self._metrics, site, TooManyRequests("requests", wait))
        if scope["method"] == "OPTIONS":
            return Answer(b"", "", 204, {"allow": "GET, HEAD, POST, OPTIONS"})
        return None

    def _warn_of_proxy(self, peer: str) -> None:
        if not self._warned_of_proxy:
            self._warned_of_proxy = True
            _log.warning(
                "a request came from %s with a proxy's headers, which are not believed. If that is"
                " a proxy of yours, name it in server.trusted_proxies: until then everybody behind"
                " it shares one rate limit. This is said once",
                peer,
            )

    def _note(self, scope: Scope, answered: list[int], seconds: float) -> None:
        path = scope["path"]
        name = self._route_names.get(path) or (
            "login_page" if path.startswith("/login/") else OTHER_ROUTE
        )
        self._metrics.requests.labels(name, str(answered[0]) if answered else "left").inc()
        self._metrics.seconds.labels(name).observe(seconds)


def too_many(metrics: Metrics, site: str, error: TooManyRequests) -> Answer:
    _log.warning("%s asks too often: limit %s", site, error.limit)
    metrics.limited.labels(error.limit).inc()
    return error_answer(error, 429, "too_many_requests", retry_seconds=error.retry_seconds)


def _forwarded(scope: Scope) -> tuple[str, bool]:
    """The address for which proxies say they ask, and whether there seem to be any."""
    addresses, through_proxy = [], False
    for name, value in scope["headers"]:
        if name in FORWARDED_HEADERS:
            through_proxy = True
            if name == b"x-forwarded-for":
                addresses.append(value.decode("latin-1"))
    return ",".join(addresses), through_proxy


def _unforeseen() -> Answer:
    error = AuthError(
        "The auth server failed at this request.",
        why="An unexpected error occurred; the server's log has it.",
        advice="Try again in a while; if it stays, tell the run's moderators.",
    )
    return error_answer(error, 500, "failed")


def _too_slow() -> Answer:
    error = AuthError(
        f"This took longer than {REQUEST_SECONDS:g} seconds.",
        advice="Try again in a while.",
    )
    return error_answer(error, 503, "too_slow", retry_seconds=10)


# The contents of requests, read within limits: refused while it is being read, not after.
#
# A body is JSON of at most LARGEST_BODY_BYTES, and has BODY_SECONDS to arrive, however slowly.
# Bytes travel as base64url without padding. Unknown fields are ignored: a newer volunteer may send
# more than this server understands.
#
# The type `application/json` is required. A web page may send other types to any address in its
# reader's name without asking; for this one the browser asks first, and is refused.


LARGEST_BODY_BYTES = 16 * 1024  # the largest is a renewal, with some 800
BODY_SECONDS = 10.0
SHORT = 128  # characters of an id, a name or a code
LONG = 4096  # characters of a challenge, a proof or a token

_BASE64URL = r"^[A-Za-z0-9_-]*\Z"

ShortText = Annotated[str, Meta(max_length=SHORT)]
Encoded = Annotated[str, Meta(max_length=LONG, pattern=_BASE64URL)]


class BadRequest(AuthError):
    """A request that this server does not accept. `status` is the HTTP status."""

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
    """The body of a request, decoded. BadRequest if it is not valid for this address."""
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
    """Bytes as a text in JSON."""
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode("ascii")


def decoded(text: str, field: str, sizes: range | None = None) -> bytes:
    """The bytes of a field. BadRequest if they are not base64url, or of another size."""
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
