"""The screen on a real pseudo-terminal."""

from __future__ import annotations

import os
import signal
import termios
from collections.abc import Iterator, Sequence

import pytest
import trio
import trio.testing
from msgspec.structs import replace as changed
from rich.text import Text

from node.app.cli.output import Output
from node.app.screen.canvas import BEGIN, Look
from node.app.screen.live import Screen
from node.app.screen.terminal import Terminal, can_show, look_of
from node.core.training_view import TrafficView
from node.training.happenings import Notice, WillUse
from tests.screen.emulator import Emulator
from tests.screen.pseudo import Pseudo
from tests.screen.scenes import STATES, TRAINING
from tests.waiting import PATIENCE_SECONDS


@pytest.fixture
def pseudo() -> Iterator[Pseudo]:
    made = Pseudo()
    yield made
    os.close(made.outside)
    os.close(made.descriptor)


def picture(columns: int, rows: int) -> Sequence[Text]:
    return [Text(f"{columns} by {rows}"), Text("second")]


def test_a_picture_is_drawn_in_the_size_of_the_moment(pseudo: Pseudo) -> None:
    terminal = Terminal(pseudo.descriptor, Look())
    terminal.draw(picture)
    assert pseudo.read() == ["80 by 23", "second"]
    pseudo.resize(40, 12)
    terminal.draw(picture)
    assert pseudo.read() == ["40 by 11", "second"]
    pseudo.set_size(0, 0)  # one that does not say
    terminal.draw(picture)
    pseudo.emulator = Emulator(80, 24)
    assert pseudo.read() == ["80 by 23", "second"]


def test_printed_lines_stay_and_the_summary_replaces_the_picture(
    pseudo: Pseudo,
) -> None:
    terminal = Terminal(pseudo.descriptor, Look())
    terminal.draw(picture)
    terminal.print_above("an invite\nand a second line")
    assert pseudo.read() == ["an invite", "and a second line", "80 by 23", "second"]
    pseudo.resize(16, 24)
    terminal.print_above("that words stay whole")
    assert pseudo.read()[3:] == ["that words stay", "whole", "16 by 23", "second"]
    pseudo.resize(80, 24)
    terminal.end(lambda columns, _rows: [Text(f"left, {columns} wide")])
    terminal.draw(picture)  # too late
    assert pseudo.read()[-2:] == ["that words stay whole", "left, 80 wide"]
    assert pseudo.emulator.row == len(pseudo.read()), "the prompt is on a line of its own"


def test_nothing_typed_is_echoed_meanwhile_nor_left_for_the_shell(pseudo: Pseudo) -> None:
    terminal = Terminal(pseudo.descriptor, Look())
    assert pseudo.echoes()
    terminal.draw(picture)
    assert not pseudo.echoes()
    os.write(pseudo.outside, b"rm -rf everything\n")
    assert pseudo.read() == ["80 by 23", "second"]
    terminal.restore()
    assert pseudo.echoes()
    os.set_blocking(pseudo.descriptor, False)
    with pytest.raises(BlockingIOError):
        os.read(pseudo.descriptor, 100)


def test_a_terminal_that_has_gone_does_not_keep_us() -> None:
    pseudo = Pseudo()
    terminal = Terminal(pseudo.descriptor, Look())
    terminal.draw(picture)
    os.close(pseudo.outside)
    terminal.print_above("nobody reads it")
    terminal.draw(picture)
    terminal.end(lambda _columns, _rows: [Text("left")])
    terminal.restore()
    os.close(pseudo.descriptor)


def test_a_screen_is_shown_only_on_a_suitable_terminal(pseudo: Pseudo) -> None:
    assert can_show(pseudo.descriptor, {"TERM": "xterm-256color"})
    assert not can_show(pseudo.descriptor, {"TERM": "dumb"})
    assert not can_show(pseudo.descriptor, {})
    reading, writing = os.pipe()
    assert not can_show(writing, {"TERM": "xterm"})
    os.close(reading)
    os.close(writing)
    assert not look_of({"NO_COLOR": "1"}, "utf-8").colour
    assert look_of({"NO_COLOR": ""}, None) == Look(colour=True, encoding="ascii")
    assert look_of({"TERM": "linux"}, "utf-8").console
    assert not Output().plain


@pytest.mark.parametrize(
    ("variables", "encoding"),
    [
        ({}, "utf-8"),
        ({"LANG": "de_DE.UTF-8"}, "utf-8"),
        ({"LC_ALL": "C.utf8", "LANG": "C"}, "utf-8"),
        ({"LC_ALL": "C"}, "ascii"),
        ({"LC_ALL": "C", "LANG": "de_DE.UTF-8"}, "ascii"),
        ({"LC_ALL": "C", "PYTHONIOENCODING": "utf-8"}, "utf-8"),
    ],
)
def test_ascii_is_used_on_request(variables: dict[str, str], encoding: str) -> None:
    assert look_of(variables, "utf-8").encoding == encoding
    assert look_of({"LANG": "de_DE.ISO-8859-1"}, "iso8859-1").encoding == "iso8859-1"


async def test_the_screen_follows_the_training_and_leaves_a_summary(pseudo: Pseudo) -> None:
    terminal = Terminal(pseudo.descriptor, Look())
    screen = Screen(terminal, terminal.print_above)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(screen.run)
        screen.show(STATES["starting"].view)
        await pseudo.until("poem · preparing")
        screen.happened(WillUse(("poem: trains on the processor", "Ctrl-C leaves")))
        screen.happened(Notice("80 % of the quota are used"))
        screen.warn("warning: the disk is nearly full")
        screen.warn("warning: the disk is nearly full")
        screen.show(TRAINING)
        screen.show(changed(TRAINING, traffic=TrafficView()))  # the node has ended
        lines = await pseudo.until("poem · training")
        assert [*pseudo.emulator.scrollback, *lines][:2] == [
            "poem: trains on the processor",
            "Ctrl-C leaves",
        ]
        assert any("80 % of the quota are used" in line for line in lines)
        assert sum("warning: the disk is nearly full" in line for line in lines) == 1
        pseudo.resize(40, 12)
        signal.raise_signal(signal.SIGWINCH)
        await pseudo.until("given 28,160 · 33 %")
        screen.show(STATES["left"].view)
        assert await screen.end(PATIENCE_SECONDS)
        nursery.cancel_scope.cancel()
    shown = " ".join(pseudo.read())
    assert "poem · left at" in shown
    assert "28,160 samples of yours are in 84" in shown
    assert "poem · training" not in shown
    assert pseudo.echoes()


async def test_many_changes_are_few_pictures_and_none_is_no_picture(pseudo: Pseudo) -> None:
    screen = Screen(Terminal(pseudo.descriptor, Look()), lambda _text: None)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(screen.run)
        for step in range(200):
            screen.show(changed(TRAINING, epoch=step))
            await trio.lowlevel.checkpoint()
        await pseudo.until("step     199")
        for _ in range(20):
            screen.show(changed(TRAINING, epoch=199))
        await trio.testing.wait_all_tasks_blocked()
        await screen.end(PATIENCE_SECONDS)
        nursery.cancel_scope.cancel()
    pseudo.read()
    assert pseudo.written.count(BEGIN) <= 4, "the first, one in between, the last, and the end"


async def test_a_paused_terminal_stops_neither_the_training_nor_the_leaving() -> None:
    pseudo = Pseudo(columns=200, rows=60)
    screen = Screen(Terminal(pseudo.descriptor, Look()), lambda _text: None)
    termios.tcflow(pseudo.descriptor, termios.TCOOFF)  # Ctrl-S
    with trio.fail_after(PATIENCE_SECONDS):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(screen.run)
            screen.show(TRAINING)
            await trio.testing.wait_all_tasks_blocked()
            assert not await screen.end(0.05), "nobody has seen it"
            nursery.cancel_scope.cancel()
    termios.tcflow(pseudo.descriptor, termios.TCOON)
    os.close(pseudo.outside)
