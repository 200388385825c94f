"""The checks run side by side, and none can end the examination."""

from __future__ import annotations

import errno
import logging
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from node.app.doctor import CHECKS, DoctorCheck, Finding, FindingLevel, Surroundings, examine
from tests.doctor.homes import surroundings_of


def fine(topic: str) -> Finding:
    return Finding(topic, FindingLevel.OK, "It is fine.")


@pytest.mark.parametrize("level", [FindingLevel.WARNING, FindingLevel.ERROR])
def test_what_is_wrong_has_something_to_do(level: FindingLevel) -> None:
    with pytest.raises(ValueError, match="without advice"):
        Finding("disk", level, "It is full.")


async def test_a_check_that_fails_is_a_finding_and_its_traceback_is_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(_: Surroundings) -> Sequence[Finding]:
        raise ZeroDivisionError("by nought")

    async def whole(_: Surroundings) -> Sequence[Finding]:
        return [fine("memory")]

    checks = (DoctorCheck("disk", broken), DoctorCheck("memory", whole))
    with caplog.at_level(logging.ERROR):
        failed, worked = await examine(surroundings_of(tmp_path), checks)
    assert (failed.topic, failed.level) == ("disk", FindingLevel.ERROR)
    assert "ZeroDivisionError: by nought" in failed.says
    assert failed.advice
    assert worked == fine("memory")
    (record,) = caplog.records
    assert record.exc_info is not None


async def test_a_check_that_the_system_refuses_says_what_and_what_to_do(tmp_path: Path) -> None:
    async def refused(_: Surroundings) -> Sequence[Finding]:
        raise PermissionError(errno.EACCES, "Permission denied", "/etc/x")

    (finding,) = await examine(surroundings_of(tmp_path), [DoctorCheck("files", refused)])
    assert finding.says == "The operating system refused: Permission denied: /etc/x."
    assert finding.advice == "Check its owner and mode (ls -l)."


async def test_checks_run_side_by_side_until_their_deadlines(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async def endless(_: Surroundings) -> Sequence[Finding]:
        await trio.sleep_forever()
        raise AssertionError

    began = autojump_clock.current_time()
    surroundings = surroundings_of(tmp_path)
    checks = [DoctorCheck("one", endless, 3.0), DoctorCheck("two", endless, 4.0)]
    found = await examine(surroundings, checks)
    assert autojump_clock.current_time() - began == 4.0
    assert [one.level for one in found] == [FindingLevel.ERROR] * 2
    assert "more than 3 seconds" in found[0].says


async def test_findings_are_by_topic_in_the_order_of_the_checks(tmp_path: Path) -> None:
    async def server(_: Surroundings) -> Sequence[Finding]:
        return [fine("server"), fine("pass"), fine("clock")]

    async def its_pass(_: Surroundings) -> Sequence[Finding]:
        return [fine("pass")]

    checks = (DoctorCheck("pass", its_pass), DoctorCheck("server", server))
    found = await examine(surroundings_of(tmp_path), checks)
    assert [one.topic for one in found] == ["pass", "pass", "server", "clock"]


@pytest.mark.slow
def test_the_doctor_loads_neither_torch_nor_libp2p() -> None:
    """What is broken must not take the doctor down with it."""
    program = (
        "import sys, node.app.doctor as doctor\n"
        "doctor.CHECKS, doctor.look_around, doctor.write_report\n"
        "sys.exit(' '.join({'torch', 'libp2p'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stderr.strip() == ""


def test_no_two_checks_have_one_topic() -> None:
    topics = [check.topic for check in CHECKS]
    assert len(set(topics)) == len(topics)
