from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.auth.store.stores import Server, running


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "auth"


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    with running(folder) as server:
        yield server
