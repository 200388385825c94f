"""How an error is answered: as a refusal that the auth key signed, an outage, or a bad request.

A volunteer's node stops for good on the first, waits and tries again on the second. So the decision
is made in this one place, by the type of the error.

A refusal is signed for one peer: it carries the challenge that the peer answered. If no challenge
is known (a poll of a session that this server has forgotten), there is no refusal.

A failure of ours must never look like a refusal. Any error that is not listed here as a refusal is
an outage.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException
from starlette.requests import Request

from auth.errors import AuthError
from auth.refusals import AccessRefused
from auth.server.answers import Answer, error_answer
from auth.server.boundary import BadRequest, TooManyRequests, encoded, too_many
from auth.server.join_refused import JoinReason, JoinRefused
from auth.server.metrics import Metrics
from auth.server.providers.errors import LoginError, LoginRefused
from auth.server.store_errors import StoreFailed

if TYPE_CHECKING:
    from auth.server.issuing import Issuer

# The key in a request's scope for the challenge that a refusal answers.
ANSWERED = "potluck.answered"
RETRY_KEY_SECONDS = 60  # a moderator has to find the file of the key
RETRY_STORE_SECONDS = 5  # a full queue is empty again in one; a full disk takes longer
UNSIGNED_STATUS = 400

_log = logging.getLogger("potluck.auth.requests")


class Refusing:
    """Turns errors into answers. Made by auth_server.py."""

    def __init__(self, issuer: Issuer, metrics: Metrics) -> None:
        self._issuer = issuer
        self._metrics = metrics

    async def answer_error(self, request: Request, error: Exception) -> Answer:
        """The answer to any AuthError that an address of the API raised."""
        match error:
            case JoinRefused(reason=JoinReason.UNKNOWN_KEY):
                self._metrics.refusals.labels(error.code).inc()
                return error_answer(error, 503, "unknown_key", retry_seconds=RETRY_KEY_SECONDS)
            case JoinRefused():
                return self._refused(request, error, error.reason.value)
            case AccessRefused():
                return self._refused(request, error, error.reason.value)
            case LoginRefused():
                try:
                    await self.tell_the_log(request, error)
                except StoreFailed as failure:  # a refusal is told only once it is in the log
                    return await self.answer_error(request, failure)
                return self._refused(request, error, f"login-{error.reason.value}")
            case TooManyRequests():
                return too_many(self._metrics, request.scope["potluck.site"], error)
            case LoginError():
                return self._not_now(error, error.status, error.code)
            case BadRequest():
                return error_answer(error, error.status, error.code)
            case StoreFailed():
                self._metrics.failures.labels("store").inc()
                return error_answer(error, 503, "store_failed", retry_seconds=RETRY_STORE_SECONDS)
            case AuthError():
                _log.error("%s %r: %s", request.method, request.scope["path"][:200], error)
                self._metrics.failures.labels("other").inc()
                return error_answer(error, 503, "failed", retry_seconds=RETRY_STORE_SECONDS)
            case _:
                raise error

    async def answer_http_exception(self, _request: Request, error: Exception) -> Answer:
        """No such address, or not with this method."""
        assert isinstance(error, HTTPException)
        headers = dict(error.headers or {})
        if error.status_code == 405:
            what = BadRequest(405, "method_not_allowed", "This address takes another method.")
        else:
            what = BadRequest(
                404,
                "not_found",
                "There is nothing at this address.",
                advice="Join this server's run with `potluck login INVITE`.",
            )
        return error_answer(what, what.status, what.code, headers=headers)

    def _refused(self, request: Request, error: AuthError, code: str) -> Answer:
        code = code.replace("_", "-")
        self._metrics.refusals.labels(code).inc()
        answered: bytes | None = request.scope.get(ANSWERED)
        if answered is None:
            return error_answer(error, UNSIGNED_STATUS, code)
        signed = self._issuer.signed_refusal(code, error, answered)
        return error_answer(error, 403, code, signed=encoded(signed))

    def _not_now(self, error: LoginError, status: int, code: str) -> Answer:
        if status >= 500:
            self._metrics.failures.labels("provider").inc()
        retry: int | None = getattr(error, "retry_after", None)
        return error_answer(error, status, code, retry_seconds=retry)

    async def tell_the_log(self, request: Request, error: LoginRefused) -> None:
        """Record a refusal by a provider, or the person there, in the audit log, once."""
        if not error.record.is_logged:
            refusal = JoinRefused(JoinReason.LOGIN, f"{error.reason.value}: {error.what}")
            site: str = request.scope["potluck.site"]
            name = error.provider or None
            await self._issuer.refused(refusal, site, peer=error.peer, name=name)
            error.record.is_logged = True
