"""GitHub's device flow: OAuth without OpenID, so the identity comes from its API.

GitHub follows RFC 8628 with quirks: it answers in forms unless JSON is asked for, sends its errors
with status 200, and names a few of them in its own way. There is no ID token: the access token,
which GitHub gave to our client id over a connection of ours, is sent to its API once and dropped.

A GitHub login can be changed and taken by somebody else. The subject is the numeric id, which is
never reused.
"""

from __future__ import annotations

from typing import Final

import msgspec

from auth.server.providers.device_answers import GRANT_TYPE, read_start, read_token
from auth.server.providers.fetching import Fetcher
from auth.server.providers.flows import DeviceGrant, NotYet
from auth.server.providers.identity import ProviderIdentity, is_safe_login, unsafe_login
from auth.server.providers.settings import GithubSettings
from auth.server.providers.web_addresses import is_loopback_http

MOST_IDS: Final = 1 << 63  # an id of GitHub's is a 64-bit number


class _User(msgspec.Struct, frozen=True):
    id: int
    login: str


class GithubProvider:
    flows: tuple[str, ...] = ("device",)

    def __init__(self, settings: GithubSettings, fetcher: Fetcher) -> None:
        self.id, self.title = settings.id, fetcher.title
        self._settings = settings
        self._fetcher = fetcher
        self._start_url = f"{settings.login_url}/login/device/code"
        self._token_url = f"{settings.login_url}/login/oauth/access_token"
        self._user_url = f"{settings.api_url}/user"

    @property
    def trouble(self) -> str:
        return self._fetcher.trouble

    async def start_device(self) -> DeviceGrant:
        form = {"client_id": self._settings.client_id, "scope": " ".join(self._settings.scopes)}
        answer = await self._fetcher.post(self._start_url, form)
        local = is_loopback_http(self._settings.login_url)
        return read_start(answer, self._fetcher, self._start_url, loopback_http=local)

    async def ask_device(self, grant: DeviceGrant, interval: int) -> ProviderIdentity | NotYet:
        if grant.token is None:
            url = self._token_url
            form = {
                "client_id": self._settings.client_id,
                "device_code": grant.device_code,
                "grant_type": GRANT_TYPE,
            }
            answer = await self._fetcher.post(url, form)
            token = read_token(answer, self._fetcher, url, title=self.title, interval=interval)
            if isinstance(token, NotYet):
                return token
            grant.token = token
        return await self._identity(grant.token.access_token)

    async def _identity(self, access_token: str) -> ProviderIdentity:
        answer = await self._fetcher.get(self._user_url, bearer=access_token)
        status = f"it answered with status {answer.status}"
        if answer.status == 403:  # also its answer when the rate limit is used up
            raise self._fetcher.unavailable(status, self._user_url)
        if answer.status != 200:
            raise self._fetcher.misconfigured(status, self._user_url)
        user = answer.read(_User)
        if user is None or not 0 < user.id < MOST_IDS:
            raise self._fetcher.unavailable("it did not say who this is", self._user_url)
        login = user.login.lower()  # to GitHub, Alice and alice are one
        if not is_safe_login(login):
            raise unsafe_login("login", user.login)
        return ProviderIdentity(self.id, str(user.id), login)
