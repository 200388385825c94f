"""GitHub's three doors on loopback: forms unless JSON is asked for, errors with status 200.

Written from GitHub's documentation of the device flow, independently of what it is there to test.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from tests.auth.providers.web_imitation import Asked, Reply, serving

CLIENT = "Iv1.0123456789abcdef"


@dataclass
class GithubImitation:
    url: str = ""
    user: dict[str, Any] = field(default_factory=lambda: {"id": 583231, "login": "Octocat"})
    user_status: int = 200
    error: dict[str, Any] | None = field(
        default_factory=lambda: {"error": "authorization_pending", "error_description": "wait"}
    )
    start_error: str = ""
    asked: list[Asked] = field(default_factory=list)

    def handle(self, asked: Asked) -> Reply:
        self.asked.append(asked)
        if "user-agent" not in asked.headers:
            return Reply(b"Request forbidden by administrative rules.", 403)
        match asked.path:
            case "/login/device/code":
                return self._in_the_form_asked_for(asked, self._start(asked))
            case "/login/oauth/access_token":
                return self._in_the_form_asked_for(asked, self._token(asked))
            case "/api/user":
                if asked.headers.get("authorization") != "Bearer gho_secret":
                    return Reply(b'{"message": "Bad credentials"}', 401)
                return Reply(json.dumps(self.user).encode(), self.user_status)
        return Reply(b"Not Found", 404)

    def _start(self, asked: Asked) -> dict[str, Any]:
        if self.start_error:
            return {"error": self.start_error}
        if asked.form.get("client_id") != CLIENT:
            return {"error": "Not Found"}
        return {
            "device_code": "3584d83530557fdd1f46af8289938c8ef79f9dc5",
            "user_code": "WDJB-MJHT",
            "verification_uri": "https://github.com/login/device",
            "expires_in": 900,
            "interval": 5,
        }

    def _token(self, asked: Asked) -> dict[str, Any]:
        if asked.form.get("grant_type") != "urn:ietf:params:oauth:grant-type:device_code":
            return {"error": "unsupported_grant_type"}
        if self.error is not None:
            return self.error
        return {"access_token": "gho_secret", "token_type": "bearer", "scope": ""}

    def _in_the_form_asked_for(self, asked: Asked, answer: dict[str, Any]) -> Reply:
        if asked.headers.get("accept") == "application/json":
            return Reply(json.dumps(answer).encode())
        return Reply(
            urlencode(answer).encode(),
            headers={"Content-Type": "application/x-www-form-urlencoded; charset=utf-8"},
        )


@asynccontextmanager
async def github_imitation() -> AsyncIterator[GithubImitation]:
    imitation = GithubImitation()
    async with serving(imitation.handle) as address:
        imitation.url = address
        yield imitation
