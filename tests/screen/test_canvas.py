"""The canvas draws frames on a strict terminal, and leaves nothing of the frames before."""

from __future__ import annotations

import random

import pytest
from rich.text import Text

from lab.scenes import STATES
from node.app.screen.canvas import BEGIN, END, ENTER, LEAVE, Canvas, Look, Painted, paint
from node.app.screen.picture import frame
from tests.screen.emulator import AT_REST, SHOWN, Emulator


def painted(*lines: str) -> list[Painted]:
    return [paint(Text(line), Look(colour=False)) for line in lines]


def test_a_frame_takes_the_screen_and_gives_it_back_as_it_was() -> None:
    terminal, canvas = Emulator(20, 3), Canvas()
    terminal.write("said before\r\n")
    terminal.write(ENTER + canvas.draw(painted("one", "two", "three"), 20))
    assert terminal.lines() == ["one", "two", "three"]
    assert terminal.modes == SHOWN
    terminal.write(LEAVE)
    assert terminal.lines() == ["said before"]
    assert (terminal.row, terminal.column) == (1, 0), "where the prompt would be"
    assert terminal.modes == AT_REST
    assert terminal.scrollback == []


def test_only_what_has_changed_is_written() -> None:
    canvas = Canvas()
    canvas.draw(painted("one", "two", "three"), 20)
    assert canvas.draw(painted("one", "two", "three"), 20) == ""
    assert canvas.draw(painted("one", "2", "three"), 20) == f"{BEGIN}\x1b[2;1H2\x1b[K{END}"


def test_a_line_as_wide_as_the_terminal_keeps_its_last_character() -> None:
    terminal, canvas = Emulator(5, 2), Canvas()
    terminal.write(ENTER)
    terminal.write(canvas.draw(painted("12345", "漢字x"), 5))
    terminal.write(canvas.draw(painted("54321", "x漢字"), 5))
    assert terminal.lines() == ["54321", "x漢字"]
    assert terminal.wrapped == 0


def test_a_frame_as_high_as_the_terminal_does_not_scroll() -> None:
    terminal, canvas = Emulator(20, 3), Canvas()
    terminal.write(ENTER)
    for number in range(5):
        terminal.write(canvas.draw(painted(f"{number}", "two", "x" * 20), 20))
    assert terminal.lines() == ["4", "two", "x" * 20]
    assert terminal.scrollback == []


@pytest.mark.parametrize("seed", range(3))
def test_a_resize_leaves_nothing_behind(seed: int) -> None:
    choose, canvas = random.Random(seed), Canvas()
    terminal = Emulator(80, 24)
    terminal.write(f"said before\r\n{ENTER}")
    for _ in range(30):
        scene = STATES[choose.choice(list(STATES))]
        columns, rows = choose.choice(((80, 24), (60, 15), (131, 45), (33, 9)))
        terminal.resize(columns, rows)
        lines = frame(scene, columns, rows, Look(colour=False))
        terminal.write(canvas.draw(lines, columns))
        shown = [line.written.rstrip() for line in lines]
        while shown and not shown[-1]:
            shown.pop()
        assert terminal.lines() == shown
        assert terminal.wrapped == 0
    terminal.write(LEAVE)
    assert terminal.lines() == ["said before"]


def test_braille_is_drawn_with_what_a_terminal_has() -> None:
    assert Look(encoding="ascii").shown("⠉⣀⣿⠀╭─│━═") == "'.: +-|#="
    assert Look(console=True).shown("⠉⣀⣿⠀╭─│━═") == "'.: ┌─│█═"
    assert Look().shown("⠉⣀") == "⠉⣀"
