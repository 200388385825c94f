"""The requests to the auth server and its answers, typed and verified.

A request ends in one of three ways: with the result, with `AccessDenied`, which only the auth key
can sign, or with `Outage`, which is everything else. So no third party can send a node away, and a
node whose server is down does not take that for a refusal.

Anything that the server says before its keys are verified proves nothing. `meet` comes first. It
fetches the keys, compares them with the invite's fingerprint, and has the server sign the time for
a nonce of ours, because the keys themselves are public and anybody can show them. Only then does
this node send anything else. Each answer is checked to be for this request (it contains our
challenge or nonce).
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import secrets
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

from auth.challenges import CHALLENGE_BYTES, LOGIN, RENEW, prove
from auth.documents import WHAT_BAD_BYTES_RAISE
from auth.errors import AuthError, UntrustedDocument
from auth.keyring import KeyRecord, KeyRecords, Keyring
from auth.keys import SigningKey
from auth.passes import OpenedPass, open_pass
from auth.revocations import held_digest
from auth.statements import open_refusal, open_time
from node.core.access.auth_http import AuthHttp, HttpAnswer, Outage, explain_answer, open_auth_http
from node.core.access.server_time import Moment, ServerTime
from protocols.errors import Refused
from protocols.identity import Identity

NONCE_BYTES = 16
DEFAULT_POLL_SECONDS = 20.0
LONGEST_SHOWN = 2048  # characters of an address or a code that is shown to a person
SHORTEST_LOGIN_POLL_SECONDS = 1
LONGEST_LOGIN_POLL_SECONDS = 60

Struct = TypeVar("Struct", bound=msgspec.Struct)

# Refusals of a request, not of the person. The right reaction is to ask again, not to give up for
# good.
ABOUT_THE_ASKING = frozenset({"clock", "too-many-requests"})

_KEYS = msgspec.msgpack.Decoder(KeyRecords)


class AccessDenied(Refused):
    """The auth server refused, under its signature. `code` is its reason for programs."""

    def __init__(self, what: str, *, why: str, advice: str, code: str) -> None:
        super().__init__(what, why=why, advice=advice)
        self.code = code


class WrongServer(Outage):
    """A server answers at the address, but not the auth server that the invite names."""


class ChallengeOver(Outage):
    """The challenge is used, too old, or from before the server was restarted."""


class LoginNotFinished(Outage):
    """The person did not finish the login in time. A new login can be started."""


class OfferedProvider(msgspec.Struct, frozen=True):
    """One way to log in."""

    id: str
    kind: str  # code, device or browser
    title: str = ""


class About(msgspec.Struct, frozen=True):
    run: str
    fingerprint: str
    providers: tuple[OfferedProvider, ...] = ()
    version: str = ""


class PendingLogin(msgspec.Struct, frozen=True):
    """A login that a person has to finish somewhere else."""

    session: str
    interval: float
    expires_in: float
    user_code: str = ""
    verification_uri: str = ""
    verification_uri_complete: str | None = None
    url: str = ""
    confirmation: str = ""


@dataclass(frozen=True)
class GrantedPass:
    """A verified pass, and the two moments between which it was made."""

    signed: bytes
    opened: OpenedPass
    asked: Moment
    heard: Moment


@dataclass(frozen=True)
class Polled:
    """A newer revocation list, if there is one, unverified; and when to ask again."""

    signed_list: bytes | None
    poll_seconds: float


class AuthClient:
    """Asks the auth server of one run for one peer. `open_auth_client` makes it."""

    def __init__(
        self, http: AuthHttp, identity: Identity, run: str, fingerprint: str, time: ServerTime
    ) -> None:
        self.run = run
        self.fingerprint = fingerprint
        self.keyring: Keyring | None = None
        """The verified keys: set by `meet`, or by a node that has them from its pass."""
        self._http = http
        self._identity = identity
        self._key = SigningKey(identity.seed)
        self._time = time
        self._login_challenge = b""

    @property
    def url(self) -> str:
        return self._http.url

    # -- first contact

    async def meet(self) -> About:
        """The server's description of itself, after it has proven to hold the invite's key."""
        self.keyring = await self._pinned(await self.keys())
        await self.measure_time()
        about = self._typed(await self._get("/v1/about"), About)
        if about.run != self.run:
            raise self._wrong_server(f"It serves the run {about.run[:64]}, not {self.run}.")
        return about

    async def _pinned(self, records: tuple[KeyRecord, ...]) -> Keyring:
        try:
            return Keyring.from_pinned(self.run, self.fingerprint, records)
        except UntrustedDocument as error:
            raise self._wrong_server(error.why) from None

    async def keys(self) -> tuple[KeyRecord, ...]:
        """The server's auth keys, unverified. A keyring accepts those that it can trust."""
        answer = await self._get("/v1/keys")
        try:
            return _KEYS.decode(self._bytes_in(answer, "keys"))
        except WHAT_BAD_BYTES_RAISE:
            raise explain_answer(self.url, answer) from None

    async def measure_time(self) -> None:
        """Ask for the time, and set `ServerTime` by it."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        asked = self._time.moment()
        answer = await self._get("/v1/time", {"nonce": _encoded(nonce)})
        heard = self._time.moment()
        try:
            said = open_time(self._bytes_in(answer, "time"), self._trusted(), nonce)
        except AuthError as error:
            raise self._wrong_server(str(error)) from None
        self._time.measured(said.time_ms, asked, heard)

    # -- getting and renewing a pass

    async def log_in(self, provider: OfferedProvider, code: str = "") -> GrantedPass | PendingLogin:
        """Begin a login. With a code it also ends here."""
        challenge = await self._challenge()
        question = self._proof(challenge, LOGIN) | {
            "provider": provider.id,
            "kind": provider.kind,
        }
        if code:
            question["code"] = code
        asked = self._time.moment()
        answer = await self._post("/v1/login", question)
        if answer.status == 202:
            self._login_challenge = challenge
            pending = self._typed(answer, PendingLogin)
            self._check_shown(pending)
            return pending
        return self._granted(answer, challenge, asked)

    def _check_shown(self, pending: PendingLogin) -> None:
        """WrongServer if a person must not be shown this.

        Another server could send a person to a page of the true server, to log in there for a key
        that is not theirs. So the page must belong to this server.
        """
        shown = (
            pending.user_code,
            pending.verification_uri,
            pending.verification_uri_complete or "",
            pending.url,
            pending.confirmation,
        )
        for text in shown:
            if len(text) > LONGEST_SHOWN or not (text.isascii() and text.isprintable()):
                raise self._wrong_server("Its message for you is not plain text.")
        if pending.url and _origin(pending.url) != _origin(self.url):
            raise self._wrong_server("Its login page is at another address than the server.")

    async def poll_login(self, pending: PendingLogin) -> GrantedPass | float:
        """Check whether the person has finished: the pass, or the seconds until the next try."""
        asked = self._time.moment()
        answer = await self._post("/v1/login/poll", {"session": pending.session})
        if answer.status == 202:
            interval = (answer.document() or {}).get("interval")
            seconds = interval if isinstance(interval, int | float) else pending.interval
            return max(SHORTEST_LOGIN_POLL_SECONDS, min(seconds, LONGEST_LOGIN_POLL_SECONDS))
        if answer.status == 410:
            raise LoginNotFinished(
                "The login was not finished in time.",
                why="The code or the page is valid only for some minutes.",
                advice="Run `potluck login` again.",
            )
        return self._granted(answer, self._login_challenge, asked)

    async def renew(self, token: bytes, challenge: bytes = b"") -> GrantedPass:
        """Get a new pass for an old token.

        `challenge` is that of the last pass, unused, which saves a request. A server that was
        restarted since does not know it any more; then a new one is asked for.
        """
        if challenge:
            with contextlib.suppress(ChallengeOver):
                return await self._renew(token, challenge)
        return await self._renew(token, await self._challenge())

    async def _renew(self, token: bytes, challenge: bytes) -> GrantedPass:
        question = self._proof(challenge, RENEW) | {"token": _encoded(token)}
        asked = self._time.moment()
        return self._granted(await self._post("/v1/renew", question), challenge, asked)

    async def _challenge(self) -> bytes:
        question = {"peer": _encoded(self._identity.public_key)}
        answer = await self._post("/v1/challenge", question)
        challenge = self._bytes_in(answer, "challenge")
        if len(challenge) != CHALLENGE_BYTES:
            raise explain_answer(self.url, answer)
        return challenge

    def _proof(self, challenge: bytes, purpose: str) -> dict[str, object]:
        proof = prove(self._key, challenge, self.run, self._believed(), purpose)
        return {
            "peer": _encoded(self._identity.public_key),
            "challenge": _encoded(challenge),
            "proof": _encoded(proof),
        }

    def _believed(self) -> str:
        """The fingerprint of a key that the server should hold.

        This is the invite's or, if that key was withdrawn, the newest that it leads to.
        """
        held = self._trusted().fingerprints
        return self.fingerprint if self.fingerprint in held or not held else held[-1]

    def _granted(self, answer: HttpAnswer, challenge: bytes, asked: Moment) -> GrantedPass:
        heard = self._time.moment()
        if answer.status == 403:
            raise self._denied(answer, challenge)
        signed = self._bytes_in(answer, "pass")
        try:
            opened = open_pass(
                signed,
                run=self.run,
                fingerprint=self.fingerprint,
                peer=self._identity.public_key,
                challenge=challenge,
            )
        except AuthError as error:
            raise self._wrong_server(str(error)) from None
        self._time.measured(opened.access_pass.server_time_ms, asked, heard)
        return GrantedPass(signed, opened, asked, heard)

    def _denied(self, answer: HttpAnswer, challenge: bytes) -> Refused | Outage:
        """The refusal in a 403 if the auth key has signed it for us; otherwise an outage."""
        try:
            refusal = open_refusal(self._bytes_in(answer, "signed"), self._trusted(), challenge)
        except (AuthError, Outage):
            return explain_answer(self.url, answer)
        if refusal.code == "challenge":
            return ChallengeOver(refusal.what, why=refusal.why, advice=refusal.advice)
        if refusal.code in ABOUT_THE_ASKING:
            return Outage(refusal.what, why=refusal.why, advice=refusal.advice)
        return AccessDenied(refusal.what, why=refusal.why, advice=refusal.advice, code=refusal.code)

    # -- revocations

    async def revocations(self, held: bytes) -> Polled:
        """The newest revocation list, unless it is the one that is held."""
        answer = await self._get("/v1/revocations", {"held": held_digest(held)})
        text = answer.headers.get("potluck-poll-seconds", "")
        seconds = float(text) if text.isascii() and text.isdigit() else DEFAULT_POLL_SECONDS
        if answer.status == 204:
            return Polled(None, seconds)
        if answer.status != 200 or answer.content_type != "application/octet-stream":
            raise explain_answer(self.url, answer)
        return Polled(answer.body, seconds)

    # -- requests

    async def _get(self, path: str, query: Mapping[str, str] | None = None) -> HttpAnswer:
        answer = await self._http.ask("GET", path, query=query)
        if answer.status not in (200, 204):
            raise explain_answer(self.url, answer)
        return answer

    async def _post(self, path: str, content: Mapping[str, object]) -> HttpAnswer:
        answer = await self._http.ask("POST", path, content=content)
        if answer.status not in (200, 202, 403, 410):
            raise explain_answer(self.url, answer)
        return answer

    def _trusted(self) -> Keyring:
        if self.keyring is None:
            raise RuntimeError("meet() comes first")
        return self.keyring

    def _bytes_in(self, answer: HttpAnswer, field: str) -> bytes:
        text = (answer.document() or {}).get(field)
        data = _decoded(text) if isinstance(text, str) else None
        if data is None:
            raise explain_answer(self.url, answer)
        return data

    def _typed(self, answer: HttpAnswer, type_: type[Struct]) -> Struct:
        try:
            return msgspec.convert(answer.document(), type_)
        except msgspec.ValidationError:
            raise explain_answer(self.url, answer) from None

    def _wrong_server(self, why: str) -> WrongServer:
        return WrongServer(
            f"The server at {self.url} is not the auth server of {self.run}.",
            why=why,
            advice="Nothing was sent to it. Check whether something is in between (open the "
            "address in a browser); otherwise ask the moderator for a new invite.",
        )


@contextlib.asynccontextmanager
async def open_auth_client(
    identity: Identity,
    *,
    url: str,
    run: str,
    fingerprint: str,
    pin: bytes = b"",
    time: ServerTime,
) -> AsyncIterator[AuthClient]:
    """A client for this server, until the block ends. Opening it sends no request.

    `pin` is the invite's: see `open_auth_http`.
    """
    async with open_auth_http(url, pin) as http:
        yield AuthClient(http, identity, run, fingerprint, time)


def _origin(url: str) -> tuple[str, str | None, int | None] | None:
    """Scheme, host and port; None for what is no address."""
    try:
        parts = urlsplit(url)
        port = parts.port or {"https": 443, "http": 80}.get(parts.scheme)
        return parts.scheme, parts.hostname, port
    except ValueError:
        return None


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode("ascii").rstrip("=")


def _decoded(text: str) -> bytes | None:
    try:
        return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except (ValueError, binascii.Error):
        return None
