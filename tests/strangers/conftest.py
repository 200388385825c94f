"""The strangers, installed once into a cache outside the checkout and started once a session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import platformdirs
import pytest

from tests.strangers import go_stranger, javascript_stranger
from tests.strangers.go_stranger import GoStranger
from tests.strangers.javascript_stranger import JavascriptStranger
from tests.strangers.sides import Who
from tests.strangers.stranger import Stranger, StrangerMissing

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker("strangers")
            item.add_marker("slow")  # half a minute in all, and an installation the first time
            if "oidc" not in item.nodeid:
                item.add_marker(pytest.mark.xdist_group("strangers"))  # one worker starts each


@pytest.fixture(scope="session")
def cache() -> Path:
    return platformdirs.user_cache_path("potluck") / "strangers"


def start(kind: str, cache: Path) -> Stranger:
    return start_go(cache) if kind == "go" else start_javascript(cache)


def start_go(cache: Path, *flags: str) -> GoStranger:
    try:
        return GoStranger(go_stranger.install(cache), *flags)
    except StrangerMissing as missing:
        pytest.skip(str(missing))


def start_javascript(cache: Path, *arguments: str) -> JavascriptStranger:
    try:
        return JavascriptStranger(javascript_stranger.install(cache), *arguments)
    except StrangerMissing as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="session")
def javascript(cache: Path) -> Iterator[Stranger]:
    stranger = start("javascript", cache)
    yield stranger
    stranger.stop()


@pytest.fixture(scope="session")
def go(cache: Path) -> Iterator[Stranger]:
    stranger = start("go", cache)
    yield stranger
    stranger.stop()


@pytest.fixture(params=["javascript", "go"])
def mortal(request: pytest.FixtureRequest, cache: Path) -> Iterator[Stranger]:
    """A stranger of this test's own, which may be killed."""
    stranger = start(request.param, cache)
    yield stranger
    stranger.stop()


@pytest.fixture(params=["javascript", "go"])
def stranger(request: pytest.FixtureRequest) -> Stranger:
    found: Stranger = request.getfixturevalue(request.param)
    return found


@pytest.fixture(params=["we", "they"], ids=["we_dial", "they_dial"])
def dialler(request: pytest.FixtureRequest) -> Who:
    who: Who = request.param
    return who


@pytest.fixture(params=["we", "they"], ids=["we_open", "they_open"])
def opener(request: pytest.FixtureRequest) -> Who:
    who: Who = request.param
    return who
