from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.screen.pseudo import Pseudo


@pytest.fixture
def pseudo() -> Iterator[Pseudo]:
    made = Pseudo()
    yield made
    os.close(made.outside)
    os.close(made.descriptor)
