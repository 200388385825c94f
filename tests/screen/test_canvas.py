"""The canvas draws the picture on a strict terminal, below the text that was there before."""

from __future__ import annotations

import random

import pytest
from rich.text import Text

from node.app.screen.canvas import BEGIN, END, Canvas, Look, Painted, paint
from node.app.screen.picture import render
from tests.screen.emulator import AT_REST, Emulator
from tests.screen.scenes import STATES

ROWS = 24


def painted(*lines: str) -> list[Painted]:
    return [paint(Text(line), Look(colour=False)) for line in lines]


def test_a_picture_stands_below_what_was_said_and_gives_way_to_the_next() -> None:
    terminal, canvas = Emulator(20, 8), Canvas()
    terminal.write("said before\r\n")
    terminal.write(canvas.draw(painted("one", "two", "three"), 20, ROWS))
    assert terminal.lines() == ["said before", "one", "two", "three"]
    terminal.write(canvas.draw(painted("1", "two"), 20, ROWS))
    assert terminal.lines() == ["said before", "1", "two"]
    assert (terminal.row, terminal.column) == (3, 0), "where the prompt would be"
    assert terminal.modes == AT_REST


def test_only_what_has_changed_is_written() -> None:
    canvas = Canvas()
    canvas.draw(painted("one", "two", "three"), 20, ROWS)
    assert canvas.draw(painted("one", "two", "three"), 20, ROWS) == ""
    assert canvas.draw(painted("one", "2", "three"), 20, ROWS) == (
        f"{BEGIN}\x1b[3A\r\n2\x1b[K\r\n\r\n{END}"
    )


def test_a_line_as_wide_as_the_terminal_keeps_its_last_character() -> None:
    terminal, canvas = Emulator(5, 4), Canvas()
    terminal.write(canvas.draw(painted("12345", "漢字x"), 5, ROWS))
    terminal.write(canvas.draw(painted("54321", "x漢字"), 5, ROWS))
    assert terminal.lines() == ["54321", "x漢字"]
    assert terminal.wrapped == 0


def test_at_the_bottom_the_terminal_scrolls_once_and_not_again() -> None:
    terminal, canvas = Emulator(20, 4), Canvas()
    terminal.write("first\r\nsecond\r\n")
    for number in range(5):
        terminal.write(canvas.draw(painted(f"{number}", "two", "three"), 20, ROWS))
    assert terminal.scrollback == ["first", "second"]
    assert terminal.lines() == ["4", "two", "three"]


def test_lines_printed_above_the_picture_stay() -> None:
    terminal, canvas = Emulator(10, 9), Canvas()
    terminal.write(canvas.draw(painted("one", "two"), 10, ROWS))
    terminal.write(canvas.erase(10, ROWS) + "an invite of 23 letters\r\n")
    terminal.write(canvas.draw(painted("one", "two"), 10, ROWS))
    assert terminal.lines() == ["an invite", "of 23 lett", "ers", "one", "two"]
    terminal.write(canvas.erase(10, ROWS))
    assert terminal.lines() == ["an invite", "of 23 lett", "ers"]
    assert canvas.erase(10, ROWS) == ""


@pytest.mark.parametrize("seed", range(3))
def test_whatever_size_it_becomes_there_is_one_picture_at_the_end(seed: int) -> None:
    choose, canvas = random.Random(seed), Canvas()
    terminal = Emulator(80, 24)
    terminal.write("said before\r\n")
    for _ in range(30):
        scene = STATES[choose.choice(list(STATES))]
        lines = render(scene, terminal.columns, terminal.rows - 1)
        size = terminal.columns, terminal.rows
        drawn = [paint(line, Look()) for line in lines]
        terminal.write(canvas.draw(drawn, *size, above=["said before"]))
        seen = terminal.lines()
        wanted = [line.plain for line in lines]
        assert seen[len(seen) - len(wanted) :] == wanted
        assert sum(" · " in line and "poem" in line for line in seen) == 1
        assert len(seen) == len(wanted) or seen[0] == "said before"
        for _ in range(choose.randrange(1, 4)):  # a window is drawn to its size in many steps
            terminal.resize(choose.randrange(20, 160), choose.randrange(4, 60))
    assert terminal.wrapped == 0


def test_a_terminal_that_was_low_for_a_moment_has_one_picture() -> None:
    """It pushed half of the picture out at its top, and has it back when it is high again."""
    terminal, canvas = Emulator(20, 10), Canvas()
    terminal.write("said before\r\n")
    lines = painted("one", "two", "three", "four")
    terminal.write(canvas.draw(lines, 20, 10))
    terminal.resize(20, 3)
    terminal.write(canvas.draw(painted("1", "2"), 20, 3, ["said before"]))
    assert terminal.lines() == ["1", "2"]
    terminal.resize(20, 10)
    terminal.write(canvas.draw(lines, 20, 10, ["said before"]))
    assert terminal.lines() == ["said before", "one", "two", "three", "four"]


def test_a_picture_that_fills_the_terminal_leaves_nothing_behind() -> None:
    terminal, canvas = Emulator(30, 3), Canvas()
    terminal.write(canvas.draw(painted("one", "two"), 30, ROWS))
    terminal.resize(40, 3)
    terminal.write(canvas.draw(painted("1", "2"), 40, ROWS))
    terminal.write(canvas.erase(40, ROWS))
    assert terminal.scrollback == terminal.lines() == []


def test_the_picture_survives_output_of_other_programs() -> None:
    terminal, canvas = Emulator(20, 9), Canvas()
    terminal.write(canvas.draw(painted("one", "two"), 20, ROWS))
    terminal.write("[1]+ Stopped\r\n$ fg\r\n")
    canvas.forget()
    terminal.write(canvas.draw(painted("one", "2"), 20, ROWS))
    assert terminal.lines() == ["one", "two", "[1]+ Stopped", "$ fg", "one", "2"]
