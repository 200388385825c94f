"""docs/architecture.md names the timeouts of a round as the code has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from protocols.accumulation.driver import FIRST_RETRY_SECONDS, LONGEST_RETRY_SECONDS
from protocols.moshpit.agreement import COMPLAINT_SECONDS
from protocols.moshpit.attempt import (
    LATE_GRACE_SECONDS,
    LONGEST_OPENING_SECONDS,
    OPEN_SECONDS,
    SLACK,
    STEP_SECONDS,
)
from protocols.moshpit.closing_time import FOLLOWER_GRACE_SECONDS, FOR_MORE_SECONDS
from protocols.moshpit.coordinator import MORE_WAITS
from protocols.moshpit.handing_on import LONGEST_FETCH_SECONDS
from protocols.moshpit.member_state import Timing
from protocols.moshpit.part_messages import STALL_SECONDS
from protocols.moshpit.round import CALL_SECONDS

DOCUMENT = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
TABLE = DOCUMENT.split("## The timeouts of a round\n")[1].split("\n## ")[0]
TIMES = {1: "once", 2: "twice"}


@pytest.mark.parametrize(
    "row",
    [
        f"; {FOR_MORE_SECONDS:g} s more while some, but too few have come, if a round of",
        f"| a follower waits for its leader | its own deadline and {FOLLOWER_GRACE_SECONDS:g} s;",
        f"| a large list is handed on | {LONGEST_FETCH_SECONDS:g} s |",
        f"| a transfer opens | {OPEN_SECONDS:g} s; {LONGEST_OPENING_SECONDS:g} s while",
        f"| a transfer without a byte | {STALL_SECONDS:g} s |",
        f"| {SLACK:g} × what the plan predicts for its link, and {LATE_GRACE_SECONDS:g} to "
        f"{LATE_GRACE_SECONDS + STEP_SECONDS:g} s |",
        f"| {Timing(0.0).answer_seconds:g} s, {TIMES[MORE_WAITS]} more while",
        f"| a member or a coordinator is silent | {Timing(0.0).silence_seconds:g} s, asked once in "
        f"between; the next in order takes a silent coordinator's place after "
        f"{Timing(0.0).stagger_seconds:g} s more, and that of one that does nothing after "
        f"{Timing(0.0).idle_seconds:g} s, {Timing(0.0).idle_seconds + COMPLAINT_SECONDS:g} s if it "
        f"may exchange itself, or later while others may |",
        f"what it holds, though it could | {(1 + MORE_WAITS) * Timing(0.0).answer_seconds:g} s |",
        f"| one message of the agreement | {CALL_SECONDS:g} s |",
        f"| {Timing(0.0).closing_seconds:g} s, then the round ends in doubt |",
        f"| {FIRST_RETRY_SECONDS:g} to {LONGEST_RETRY_SECONDS:g} s |",
    ],
)
def test_numbers_are_those_of_the_code(row: str) -> None:
    assert row in TABLE
