"""How long a soak test runs: short for everybody, as long as asked with scripts/test --soak."""

from __future__ import annotations

import os
from typing import Final

import pytest

_SHORT_SECONDS: Final = 8.0
LONG_SECONDS: Final = float(os.environ.get("POTLUCK_SOAK_SECONDS", "600"))

# For `@pytest.mark.parametrize("seconds", SECONDS)`
SECONDS: Final = [
    pytest.param(_SHORT_SECONDS, id="short", marks=pytest.mark.slow),
    pytest.param(LONG_SECONDS, id="long", marks=pytest.mark.soak),
]
