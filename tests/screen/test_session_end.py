"""The reason for the end of a session is the last line shown, with its exit code."""

from __future__ import annotations

import os

import pytest
import trio

from node.app.cli.output import Output
from node.app.screen.canvas import Look
from node.app.screen.display import (
    Display,
    LineDisplay,
    ScreenDisplay,
    happening_of,
    show_to_the_end,
    write_folded,
)
from node.app.screen.terminal import Terminal
from node.core.access.renewal import MembershipEnded
from node.core.failure import CommandFailure
from node.training.session import TrainingSession
from tests.screen.pseudo import Pseudo

THROWN_OUT = MembershipEnded(
    "This node may no longer take part in poem: Your access was revoked.",
    why="A moderator of the run decided so.",
    advice="Ask the run's moderators.",
)


async def train_until_thrown_out(display: Display) -> int:
    """As a node ends: what its nursery raises is a group, in another one."""
    session = TrainingSession(display.shown)
    session.run = "poem"
    session.entered()

    async def work() -> None:
        async with trio.open_nursery(), trio.open_nursery():
            raise THROWN_OUT

    def failed(failure: CommandFailure) -> None:
        session.happened(happening_of(failure))

    return await show_to_the_end(display, work, failed, lambda: False)


async def test_a_revoked_volunteer_is_left_with_a_picture_that_says_so(pseudo: Pseudo) -> None:
    display = ScreenDisplay(Output(), Terminal(pseudo.descriptor, Look()), pseudo.descriptor)
    assert await train_until_thrown_out(display) == 3
    lines = pseudo.read()
    assert lines[0].startswith(" poem · refused at ")
    assert lines[1:] == [
        " This node may no longer take part in poem: Your access was revoked. A",
        " moderator of the run decided so.",
        " next: Ask the run's moderators.",
    ]
    assert pseudo.echoes()
    assert pseudo.emulator.row == len(lines), "the prompt is on a line of its own"


async def test_it_is_raised_as_well_where_stderr_is_elsewhere(pseudo: Pseudo) -> None:
    reading, writing = os.pipe()
    display = ScreenDisplay(Output(), Terminal(pseudo.descriptor, Look()), writing)
    with pytest.raises(ExceptionGroup):
        await train_until_thrown_out(display)
    assert "poem · refused" in pseudo.read()[0]
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize("json", [False, True])
async def test_a_pipe_gets_a_line_of_it(json: bool, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ExceptionGroup):
        await train_until_thrown_out(LineDisplay(Output(json=json)))
    (line,) = capfd.readouterr().out.splitlines()
    if json:
        assert '"event": "failed"' in line
        assert '"refused": true' in line
    else:
        assert line.endswith(
            "refused: This node may no longer take part in poem: Your access was revoked. "
            "A moderator of the run decided so."
        )


def test_lines_on_a_terminal_are_broken_between_words(pseudo: Pseudo) -> None:
    pseudo.resize(20, 9)
    write_folded(pseudo.descriptor, "21:04:31 step 312 with 4 peers")
    assert pseudo.read() == ["21:04:31 step 312", "with 4 peers"]
