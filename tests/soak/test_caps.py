"""A volunteer's caps, measured from outside for eight minutes: needs root, and a machine at rest.

Its short form is tests/processes/test_capped_volunteers.py, which goes without measuring.
"""

from __future__ import annotations

import os
import sys

import pytest

from lab.bench.caps import CapsEffort, measure_caps


@pytest.mark.soak
@pytest.mark.skipif(
    not sys.platform.startswith("linux") or os.geteuid() != 0, reason="needs Linux and root"
)
async def test_no_cap_is_exceeded_in_any_ten_seconds() -> None:
    result = await measure_caps(CapsEffort())
    assert result["all_kept"], result
