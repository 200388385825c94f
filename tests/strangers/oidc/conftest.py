"""The real provider, started once for all of these tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import trio.testing

from tests.strangers.oidc.process import OpenIdStranger, install_provider
from tests.strangers.stranger import StrangerMissing


def start(cache: Path) -> OpenIdStranger:
    try:
        return OpenIdStranger(install_provider(cache))
    except StrangerMissing as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="session")
def provider(cache: Path) -> Iterator[OpenIdStranger]:
    stranger = start(cache)
    yield stranger
    stranger.stop()


@pytest.fixture
def mortal_provider(cache: Path) -> Iterator[OpenIdStranger]:
    """A provider of this test's own, which may be killed."""
    stranger = start(cache)
    yield stranger
    stranger.stop()


@pytest.fixture
def clock(mock_clock: trio.testing.MockClock) -> trio.testing.MockClock:
    """Real time that a test can put forward, so that nobody waits for an interval to pass."""
    mock_clock.rate = 1.0
    return mock_clock
