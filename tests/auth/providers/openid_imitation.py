"""An OpenID provider on loopback that does everything right until a test has it do one thing wrong.

It is somebody else's side of the network: it shares no code with what it is there to test. A test
changes its attributes, or puts a handler of its own in `instead` under a path.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from tests.auth.providers.web_imitation import Asked, Handler, Reply, serving

NOW = 1_800_000_000.0  # the wall clock of these tests, and of this provider
CLIENT = "potluck"
CURVES = {"ES256": ec.SECP256R1(), "ES384": ec.SECP384R1(), "ES512": ec.SECP521R1()}


@cache
def private_key(algorithm: str, number: int = 0) -> Any:
    """A key for this algorithm, the same for each number in one run of the tests."""
    del number
    if algorithm == "EdDSA":
        return ed25519.Ed25519PrivateKey.generate()
    if algorithm in CURVES:
        return ec.generate_private_key(CURVES[algorithm])
    return rsa.generate_private_key(65_537, 2048)


@dataclass(frozen=True)
class SigningKey:
    id: str | None = "one"
    algorithm: str = "ES256"
    number: int = 0

    @property
    def private(self) -> Any:
        return private_key(self.algorithm, self.number)

    def published(self) -> dict[str, Any]:
        algorithm = jwt.get_algorithm_by_name(self.algorithm)
        key = json.loads(algorithm.to_jwk(self.private.public_key()))
        key.pop("key_ops", None)
        return {**key, "use": "sig"} | ({} if self.id is None else {"kid": self.id})


def as_json(value: Any, status: int = 200) -> Reply:
    return Reply(json.dumps(value).encode(), status)


@dataclass
class OpenIdImitation:
    issuer: str = ""
    document: dict[str, Any] = field(default_factory=dict)  # over what is right
    key: SigningKey = SigningKey()  # what tokens are signed with
    published: list[dict[str, Any]] | None = None  # instead of that key
    claims: dict[str, Any] = field(default_factory=dict)  # over what is right; None: left out
    header: dict[str, Any] = field(default_factory=dict)
    token: Callable[[dict[str, Any]], str] | None = None  # instead of signing
    userinfo: dict[str, Any] = field(default_factory=lambda: {"sub": "subject-1"})
    person: dict[str, Any] | None = None  # the device flow's error; None: the person said yes
    device: dict[str, Any] = field(default_factory=dict)  # over a right answer to its beginning
    instead: dict[str, Handler] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    codes: dict[str, dict[str, str]] = field(default_factory=dict)  # code -> authorisation request

    def times_asked(self, path: str) -> int:
        return sum(each.path == path for each in self.asked)

    def send_back(self, authorization_url: str) -> dict[str, str]:
        """The parameters that a browser brings to the redirect URI after the person agreed."""
        query = dict(parse_qsl(urlsplit(authorization_url).query))
        code = f"code-{len(self.codes)}"
        self.codes[code] = query
        return {"code": code, "state": query["state"], "iss": self.issuer}

    def handle(self, asked: Asked) -> Reply:
        self.asked.append(asked)
        if asked.path in self.instead:
            return self.instead[asked.path](asked)
        match asked.path:
            case "/.well-known/openid-configuration":
                return as_json(self._document())
            case "/keys":
                keys = [self.key.published()] if self.published is None else self.published
                return as_json({"keys": keys})
            case "/device":
                return as_json(self._device())
            case "/token":
                return self._token(asked)
            case "/userinfo":
                return as_json(self.userinfo)
        return Reply(status=404)

    def _document(self) -> dict[str, Any]:
        right = {
            "issuer": self.issuer,
            "jwks_uri": f"{self.issuer}/keys",
            "authorization_endpoint": f"{self.issuer}/authorize",
            "token_endpoint": f"{self.issuer}/token",
            "device_authorization_endpoint": f"{self.issuer}/device",
            "userinfo_endpoint": f"{self.issuer}/userinfo",
        }
        return {**right, **self.document}

    def _device(self) -> dict[str, Any]:
        right = {
            "device_code": "device-code-1",
            "user_code": "WDJB-MJHT",
            "verification_uri": f"{self.issuer}/connect",
            "verification_uri_complete": f"{self.issuer}/connect?code=WDJB-MJHT",
            "expires_in": 900,
            "interval": 5,
        }
        return {k: v for k, v in {**right, **self.device}.items() if v is not None}

    def _token(self, asked: Asked) -> Reply:
        nonce = None
        if asked.form.get("grant_type") == "authorization_code":
            request = self.codes.pop(asked.form["code"], None)
            verifier = asked.form.get("code_verifier", "")
            digest = hashlib.sha256(verifier.encode()).digest()
            challenge = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
            if request is None or request["code_challenge"] != challenge:
                return as_json({"error": "invalid_grant"}, 400)
            nonce = request["nonce"]
        elif self.person is not None:
            return as_json(self.person, 400)
        return as_json(
            {
                "access_token": "access-1",
                "token_type": "Bearer",
                "id_token": self.id_token(nonce),
            }
        )

    def id_token(self, nonce: str | None = None) -> str:
        right = {
            "iss": self.issuer,
            "sub": "subject-1",
            "aud": CLIENT,
            "exp": int(NOW) + 300,
            "iat": int(NOW),
            "preferred_username": "alice",
        } | ({} if nonce is None else {"nonce": nonce})
        claims = {k: v for k, v in {**right, **self.claims}.items() if v is not None}
        if self.token is not None:
            return self.token(claims)
        identified = {} if self.key.id is None else {"kid": self.key.id}
        header = {**identified, **self.header}
        content = json.dumps(claims).encode()
        return jwt.PyJWS().encode(content, self.key.private, self.key.algorithm, headers=header)


@asynccontextmanager
async def openid_imitation() -> AsyncIterator[OpenIdImitation]:
    imitation = OpenIdImitation()
    async with serving(imitation.handle) as address:
        imitation.issuer = address
        yield imitation
