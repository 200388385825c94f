"""GitHub's device flow with its quirks, against an imitation of GitHub on loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio.testing

from auth.server.providers.errors import (
    LoginExpired,
    LoginReason,
    LoginRefused,
    ProviderMisconfigured,
    ProviderUnavailable,
)
from auth.server.providers.identity import ProviderIdentity
from auth.server.providers.logins import (
    DeviceStarted,
    LoggedIn,
    Logins,
    Pending,
    ProviderEntry,
    open_logins,
)
from auth.server.providers.settings import GithubSettings
from tests.auth.providers.conftest import ADDRESS, PEER, PUBLIC_URL, ask_again
from tests.auth.providers.github_imitation import CLIENT, GithubImitation, github_imitation


@pytest.fixture
async def github(clock: trio.testing.MockClock) -> AsyncIterator[GithubImitation]:
    del clock
    async with github_imitation() as running:
        yield running


@pytest.fixture
async def logins(github: GithubImitation) -> AsyncIterator[Logins]:
    settings = GithubSettings(
        id="github", client_id=CLIENT, login_url=github.url, api_url=f"{github.url}/api"
    )
    async with open_logins([settings], PUBLIC_URL) as opened:
        yield opened


async def start(logins: Logins) -> DeviceStarted:
    started = await logins.start(PEER, "github", "device", ADDRESS)
    assert isinstance(started, DeviceStarted)
    return started


async def test_a_person_is_known_by_number_and_called_by_login(
    logins: Logins, github: GithubImitation, clock: trio.testing.MockClock
) -> None:
    started = await start(logins)
    assert started.user_code == "WDJB-MJHT"
    assert started.verification_uri == "https://github.com/login/device"
    assert started.verification_uri_complete is None
    assert await ask_again(logins, clock, started) == Pending(5)
    github.error = None
    assert await ask_again(logins, clock, started) == LoggedIn(
        started.session, PEER, ProviderIdentity("github", "583231", "octocat")
    )


async def test_it_offers_the_device_flow_only(logins: Logins) -> None:
    assert logins.provider_list() == [ProviderEntry("github", "device", "GitHub")]


async def test_slow_down_takes_the_interval_that_github_names(
    logins: Logins, github: GithubImitation, clock: trio.testing.MockClock
) -> None:
    github.error = {"error": "slow_down", "interval": 17}
    assert await ask_again(logins, clock, await start(logins)) == Pending(17)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ("access_denied", LoginRefused),
        ("expired_token", LoginExpired),
        ("token_expired", LoginExpired),
        ("incorrect_device_code", LoginExpired),
        ("incorrect_client_credentials", ProviderMisconfigured),
        ("unsupported_grant_type", ProviderMisconfigured),
        ("device_flow_disabled", ProviderMisconfigured),
    ],
)
async def test_its_errors_at_status_200_mean_what_they_say(
    logins: Logins,
    github: GithubImitation,
    clock: trio.testing.MockClock,
    error: str,
    kind: type[Exception],
) -> None:
    github.error = {"error": error}
    with pytest.raises(kind) as raised:
        await ask_again(logins, clock, await start(logins))
    assert type(raised.value) is kind


async def test_an_application_without_device_flow_is_for_the_moderator(
    logins: Logins, github: GithubImitation
) -> None:
    github.start_error = "device_flow_disabled"
    with pytest.raises(ProviderMisconfigured, match="device_flow_disabled"):
        await start(logins)


@pytest.mark.parametrize(
    "user",
    [
        {},
        {"id": "1", "login": "x"},
        {"id": 0, "login": "x"},
        {"id": 10**400, "login": "x"},
        {"id": 1},
        {"login": "x"},
    ],
)
async def test_an_answer_that_names_nobody_is_an_outage(
    logins: Logins, github: GithubImitation, clock: trio.testing.MockClock, user: dict[str, Any]
) -> None:
    github.error, github.user = None, user
    with pytest.raises(ProviderUnavailable):
        await ask_again(logins, clock, await start(logins))


async def test_its_rate_limit_costs_time_and_not_the_login(
    logins: Logins, github: GithubImitation, clock: trio.testing.MockClock
) -> None:
    github.error, github.user_status = None, 403
    started = await start(logins)
    with pytest.raises(ProviderUnavailable):
        await ask_again(logins, clock, started)
    github.error, github.user_status = {"error": "incorrect_device_code"}, 200
    clock.jump(10)
    assert isinstance(await logins.poll(started.session), LoggedIn)


async def test_a_login_that_is_no_safe_name_is_refused(
    logins: Logins, github: GithubImitation, clock: trio.testing.MockClock
) -> None:
    github.error, github.user = None, {"id": 1, "login": "a:b\x1b[2J"}
    with pytest.raises(LoginRefused) as refused:
        await ask_again(logins, clock, await start(logins))
    assert refused.value.reason is LoginReason.USERNAME
    assert str(refused.value).isprintable()
