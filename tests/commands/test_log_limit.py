"""No peer can fill our disk by causing the same event all the time."""

from __future__ import annotations

import logging

import pytest

from node.app.cli.log_output import (
    LINES_AT_ONCE,
    SECONDS_PER_LINE,
    HumanFormatter,
    LogLimit,
    log_to_stderr,
)

HERE, THERE = 1, 2
BURST = int(LINES_AT_ONCE)


def record(at: float, line: int = HERE, text: str = "it broke") -> logging.LogRecord:
    made = logging.LogRecord("potluck", logging.WARNING, "place.py", line, text, None, None)
    made.created = at
    return made


def test_a_few_lines_at_once_pass_and_the_rest_of_a_flood_does_not() -> None:
    limit = LogLimit()
    passed = [limit.filter(record(0.0, text=f"text {number}")) for number in range(1000)]
    assert passed == [True] * BURST + [False] * (1000 - BURST)


@pytest.mark.slow
def test_in_the_long_run_one_line_in_a_while_passes() -> None:
    limit = LogLimit()
    day = 86_400
    passed = sum(limit.filter(record(second)) for second in range(day))
    assert BURST + day / SECONDS_PER_LINE - 2 <= passed <= BURST + day / SECONDS_PER_LINE


def test_the_next_line_that_passes_says_how_many_did_not() -> None:
    limit = LogLimit()
    for _ in range(BURST + 1234):
        limit.filter(record(0.0))
    later = record(SECONDS_PER_LINE)
    assert limit.filter(later)
    assert (
        HumanFormatter().format(later) == "warning: it broke (1,234 more like this were left out)"
    )


def test_a_flood_from_one_place_silences_no_other() -> None:
    limit = LogLimit()
    for _ in range(1000):
        limit.filter(record(0.0, HERE))
    assert limit.filter(record(0.0, THERE))


def test_a_clock_that_is_set_back_neither_breaks_it_nor_opens_the_gate() -> None:
    limit = LogLimit()
    for _ in range(BURST):
        limit.filter(record(1000.0))
    assert not limit.filter(record(0.0))
    assert limit.filter(record(SECONDS_PER_LINE))


@pytest.mark.parametrize(("debug", "lines"), [(False, BURST), (True, 500)])
def test_the_log_of_a_command_is_limited_unless_it_debugs(
    debug: bool, lines: int, capsys: pytest.CaptureFixture[str]
) -> None:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        log_to_stderr(debug=debug)
        for number in range(500):
            logging.getLogger("potluck").warning("number %d", number)
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    assert len(capsys.readouterr().err.splitlines()) == lines
