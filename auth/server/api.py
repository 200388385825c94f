"""The addresses for volunteers' nodes: logging in, passes, renewals, revocations.

Each method here is one address of the HTTP interface and reads like its description in
docs/auth-server.md. The issuer decides who may have a token, and the providers who somebody is;
here they are called in the right order. refusing.py answers refusals.

An answer can be lost on its way. So the result of a login is kept for a minute and sent again;
otherwise somebody who was let in would have to log in a second time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import trio
from starlette.requests import Request

from auth.bounded_map import BoundedMap
from auth.challenges import CHALLENGE_BYTES, LOGIN, RENEW
from auth.documents import encode
from auth.keys import PUBLIC_KEY_BYTES, SIGNATURE_BYTES
from auth.revocations import held_digest
from auth.server.answers import BYTES, Answer, json_answer
from auth.server.boundary import (
    ChallengeBody,
    LoginBody,
    PollBody,
    RenewBody,
    TooManyRequests,
    decoded,
    encoded,
    read_json,
)
from auth.server.issuing import Granted, Issuer, ProvenPeer
from auth.server.join_refused import JoinRefused
from auth.server.metrics import Metrics
from auth.server.providers.logins import (
    BrowserStarted,
    DeviceStarted,
    LoggedIn,
    Logins,
    Pending,
)
from auth.server.providers.sessions import expired
from auth.server.rate_limits import AllowedRate, RateLimit
from auth.server.refusing import ANSWERED
from auth.server.settings import Settings
from auth.statements import LONGEST_ANSWERED_BYTES
from auth.tokens import LIMIT_BYTES as TOKEN_LIMIT_BYTES

if TYPE_CHECKING:
    from auth.server.store import Store

# A lost answer is asked for again within seconds.
REMEMBER_OUTCOME_SECONDS = 60.0
ENDING_INTERVAL_SECONDS = 1
MOST_SESSIONS = 10_000  # as many as login sessions can be open

# A revoked party is refused everywhere within 60 s, so nodes ask at least every 45. Up to 2,000 of
# them ask every 10 s. With more, they ask so rarely that all together make 200 requests a second,
# an eighth of what one processor answers when each comes with a handshake of its own.
SHORTEST_POLL_SECONDS = 10
LONGEST_POLL_SECONDS = 45
POLLS_PER_SECOND = 200

_KEY = range(PUBLIC_KEY_BYTES, PUBLIC_KEY_BYTES + 1)
_PROOF = range(SIGNATURE_BYTES, SIGNATURE_BYTES + 1)
_CHALLENGE = range(CHALLENGE_BYTES, CHALLENGE_BYTES + 1)
_TOKEN = range(1, TOKEN_LIMIT_BYTES + 1)
_NONCE = range(1, LONGEST_ANSWERED_BYTES + 1)

_CHALLENGE_BODY = msgspec.json.Decoder(ChallengeBody)
_LOGIN_BODY = msgspec.json.Decoder(LoginBody)
_POLL_BODY = msgspec.json.Decoder(PollBody)
_RENEW_BODY = msgspec.json.Decoder(RenewBody)


def poll_seconds(live_tokens: int) -> int:
    """How often each of this many nodes should ask for the revocation list."""
    fair = -(-live_tokens // POLLS_PER_SECOND)
    return max(SHORTEST_POLL_SECONDS, min(LONGEST_POLL_SECONDS, fair))


@dataclass
class OpenLogin:
    """A login through a provider that somebody has begun, and its result."""

    proven: ProvenPeer
    kind: str
    forget_at: float  # at first, when the login is over in any case
    is_ending: bool = False  # the provider has identified the person, and we are deciding
    outcome: Answer | JoinRefused | None = None


class OpenLogins:
    """Our part of each login session, by session; the oldest is dropped first."""

    def __init__(self) -> None:
        self._open = BoundedMap[str, OpenLogin](MOST_SESSIONS)

    def __len__(self) -> int:
        return len(self._open)

    def find(self, session: str, now: float) -> OpenLogin | None:
        found = self._open.get(session)
        if found is not None and found.forget_at <= now:
            del self._open[session]
            return None
        return found

    def add(self, session: str, login: OpenLogin, now: float) -> None:
        while self._open and next(iter(self._open.values())).forget_at <= now:
            self._open.popitem(last=False)
        self._open[session] = login


class Api:
    """The addresses below /v1. Made by auth_server.py."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        issuer: Issuer,
        logins: Logins,
        metrics: Metrics,
        version: str,
    ) -> None:
        self._version = version
        self._store = store
        self._issuer = issuer
        self._logins = logins
        self._metrics = metrics
        self._open = OpenLogins()
        self._login_limit = RateLimit(AllowedRate.per_hour(settings.logins_per_hour_per_address))
        renewals = AllowedRate.per_hour(settings.renewals_per_hour_per_account)
        # A key that does not belong to the account any more must not use up the account's.
        self._peer_limit = RateLimit(renewals)
        self._account_limit = RateLimit(renewals)  # of the writer's thread alone

    # -- before the login has ended

    async def about(self, _request: Request) -> Answer:
        providers = [
            {"id": entry.id, "kind": entry.kind, "title": entry.title}
            for entry in self._logins.provider_list()
        ]
        return json_answer(
            {
                "run": self._store.run,
                "providers": providers,
                "fingerprint": self._store.fingerprint,
                "version": self._version,
            }
        )

    async def challenge(self, request: Request) -> Answer:
        body = await read_json(request, _CHALLENGE_BODY)
        challenge, expires_in = self._issuer.challenge(decoded(body.peer, "peer", _KEY))
        return json_answer({"challenge": encoded(challenge), "expires_in": expires_in})

    async def login(self, request: Request) -> Answer:
        site = request.scope["potluck.site"]
        _charge(self._login_limit, "logins", site, trio.current_time())
        body = await read_json(request, _LOGIN_BODY)
        proven = await self._prove(request, body, LOGIN, site)
        if body.kind == "code" and self._logins.is_code_provider(body.provider):
            granted = await self._issuer.join_by_code(proven, body.code, site)
            return self._pass(granted, "code")
        started = await self._logins.start(proven.peer, body.provider, body.kind, site)
        now = trio.current_time()
        over = now + started.expires_in + REMEMBER_OUTCOME_SECONDS
        self._open.add(started.session, OpenLogin(proven, body.kind, over), now)
        return _started(started)

    async def poll(self, request: Request) -> Answer:
        body = await read_json(request, _POLL_BODY)
        site = request.scope["potluck.site"]
        known = self._open.find(body.session, trio.current_time())
        if known is not None:
            request.scope[ANSWERED] = known.proven.challenge
            if known.is_ending:  # for another poll, whose connection may have broken
                return json_answer({"interval": ENDING_INTERVAL_SECONDS}, 202)
            if isinstance(known.outcome, JoinRefused):
                raise known.outcome.again()
            if known.outcome is not None:
                return known.outcome
        outcome = await self._logins.poll(body.session)
        if isinstance(outcome, Pending):
            return json_answer({"interval": outcome.interval}, 202)
        if known is None:
            raise expired()
        return await self._end(known, outcome, site)

    async def _end(self, login: OpenLogin, who: LoggedIn, site: str) -> Answer:
        """The provider has identified the person: admit them, or not."""
        login.is_ending = True
        try:
            granted = await self._issuer.join(login.proven, who.identity, site)
            login.outcome = self._pass(granted, login.kind)
            return login.outcome
        except JoinRefused as refused:
            login.outcome = refused.again()
            raise
        finally:
            login.is_ending = False
            if login.outcome is None:  # our own failure: they need not log in again for it
                self._logins.give_back(who.session)
            else:
                login.forget_at = trio.current_time() + REMEMBER_OUTCOME_SECONDS

    # -- after the login

    async def renew(self, request: Request) -> Answer:
        body = await read_json(request, _RENEW_BODY)
        site = request.scope["potluck.site"]
        proven = await self._prove(request, body, RENEW, site)
        token = decoded(body.token, "token", _TOKEN)
        now = trio.current_time()
        granted = await self._issuer.renew(
            proven, token, site,
            check_peer=lambda peer: _charge(self._peer_limit, "renewals", peer, now),
            check_account=lambda name: _charge(self._account_limit, "renewals", name, now),
        )  # fmt: skip
        return self._pass(granted, "renew")

    async def revocations(self, request: Request) -> Answer:
        newest = self._store.revocation_list()
        headers = {
            "potluck-poll-seconds": str(poll_seconds(self._store.live_tokens())),
            "etag": f'"{newest.number}"',
        }
        if request.headers.get("if-none-match") == headers["etag"]:
            return Answer(b"", BYTES, 304, headers)
        # Numbers alone would not do: a list with a huge one, by a stolen key, would keep all nodes
        # that hold it from the one that withdraws the key.
        held, after = (request.query_params.get(name, "") for name in ("held", "after"))
        if held == held_digest(newest.signed) or (not held and after == str(newest.number)):
            return Answer(b"", BYTES, 204, headers)
        return Answer(newest.signed, BYTES, 200, headers)

    async def keys(self, _request: Request) -> Answer:
        return json_answer({"keys": encoded(encode(self._store.keys.records))})

    async def time(self, request: Request) -> Answer:
        nonce = decoded(request.query_params.get("nonce", ""), "nonce", _NONCE)
        return json_answer({"time": encoded(self._issuer.signed_time(nonce))})

    # -- used by both

    async def _prove(
        self, request: Request, body: LoginBody | RenewBody, purpose: str, site: str
    ) -> ProvenPeer:
        challenge = decoded(body.challenge, "challenge", _CHALLENGE)
        request.scope[ANSWERED] = challenge
        return await self._issuer.prove(
            decoded(body.peer, "peer", _KEY),
            challenge,
            decoded(body.proof, "proof", _PROOF),
            purpose,
            site,
        )

    def _pass(self, granted: Granted, how: str) -> Answer:
        self._metrics.passes.labels(how).inc()
        return json_answer({"pass": encoded(granted.pass_bytes)})


def _charge(limit: RateLimit, name: str, key: str | bytes, now: float) -> None:
    wait = limit.wait_seconds(key, now)
    if wait:
        raise TooManyRequests(name, wait)


def _started(started: DeviceStarted | BrowserStarted) -> Answer:
    value: dict[str, Any] = {
        "session": started.session,
        "interval": started.interval,
        "expires_in": started.expires_in,
    }
    if isinstance(started, DeviceStarted):
        value |= {
            "kind": "device",
            "user_code": started.user_code,
            "verification_uri": started.verification_uri,
        }
        if started.verification_uri_complete is not None:
            value["verification_uri_complete"] = started.verification_uri_complete
    else:
        value |= {
            "kind": "browser",
            "url": started.url,
            "confirmation": started.confirmation,
        }
    return json_answer(value, 202)
