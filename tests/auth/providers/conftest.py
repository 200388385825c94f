"""A provider on loopback and the logins of a server that uses it.

The clock of trio goes on with real time and can be put forward by a test; the wall clock stands at
NOW, where the provider's tokens are made.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager

import pytest
import trio.testing

from auth.server.providers.logins import DeviceStarted, LoggedIn, Logins, Pending, open_logins
from auth.server.providers.settings import OpenIdSettings
from tests.auth.providers.openid_imitation import CLIENT, NOW, OpenIdImitation, openid_imitation

PUBLIC_URL = "https://auth.example.org"
PEER = bytes(range(32))
ADDRESS = "192.0.2.7"


def logins_with(*settings: OpenIdSettings) -> AbstractAsyncContextManager[Logins]:
    return open_logins(settings, PUBLIC_URL, wall_clock=lambda: NOW)


def settings_for(imitation: OpenIdImitation, **changes: object) -> OpenIdSettings:
    given = {"id": "corp", "issuer": imitation.issuer, "client_id": CLIENT, "title": "Corp"}
    return OpenIdSettings(**{**given, **changes})  # type: ignore[arg-type]


@pytest.fixture
def clock(mock_clock: trio.testing.MockClock) -> trio.testing.MockClock:
    mock_clock.rate = 1.0
    return mock_clock


@pytest.fixture
async def imitation(clock: trio.testing.MockClock) -> AsyncIterator[OpenIdImitation]:
    del clock
    async with openid_imitation() as running:
        yield running


@pytest.fixture
async def logins(imitation: OpenIdImitation) -> AsyncIterator[Logins]:
    async with logins_with(settings_for(imitation)) as opened:
        yield opened


async def start_device(logins: Logins, peer: bytes = PEER, address: str = ADDRESS) -> DeviceStarted:
    started = await logins.start(peer, "corp", "device", address)
    assert isinstance(started, DeviceStarted)
    return started


async def ask_again(
    logins: Logins, clock: trio.testing.MockClock, started: DeviceStarted
) -> Pending | LoggedIn:
    """Poll as a terminal does, one interval later."""
    clock.jump(started.interval)
    return await logins.poll(started.session)
