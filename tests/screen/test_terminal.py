"""The screen on a real pseudo-terminal."""

from __future__ import annotations

import os
import signal
import termios
from collections.abc import Sequence

import pytest
import trio
import trio.testing
from msgspec.structs import replace as changed
from rich.text import Text

from lab.scenes import EXPERTS, STATES, TRAINING
from node.app.cli.output import Output
from node.app.screen import live
from node.app.screen.canvas import BEGIN, ENTER, Look, Painted, paint
from node.app.screen.live import (
    LEAST_SECONDS,
    MOST_SECONDS,
    SHARE_OF_A_CORE,
    Screen,
    pause_after,
)
from node.app.screen.terminal import Terminal, can_read_keys, can_show, look_of
from node.core.status import NodeStatus
from node.core.training_view import TrafficView
from node.training.happenings import Notice, WillUse
from node.training.questions import PAUSE, RESUME
from protocols.errors import PotluckError
from tests.screen.emulator import AT_REST, SHOWN
from tests.screen.pseudo import Pseudo
from tests.waiting import PATIENCE_SECONDS, until


def frame(columns: int, rows: int, look: Look) -> Sequence[Painted]:
    lines = [f"{columns} by {rows}", "second", *[""] * (rows - 2)]
    return [paint(Text(line), look) for line in lines]


def test_a_frame_is_drawn_in_the_size_of_the_moment(pseudo: Pseudo) -> None:
    terminal = Terminal(pseudo.descriptor, Look())
    terminal.draw(frame)
    assert pseudo.read() == ["80 by 24", "second"]
    assert pseudo.emulator.modes == SHOWN
    pseudo.resize(40, 12)
    terminal.draw(frame)
    assert pseudo.read() == ["40 by 12", "second"]
    pseudo.set_size(0, 0)  # one that does not say
    terminal.draw(frame)
    pseudo.emulator.resize(80, 24)
    assert pseudo.read() == ["80 by 24", "second"]


async def test_a_resize_there_and_back_between_two_frames_leaves_nothing(pseudo: Pseudo) -> None:
    """The size was as before, so the lines that the terminal had cut stayed so."""
    screen = Screen(Terminal(pseudo.descriptor, Look()), lambda _text: None)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(screen.run)
        screen.show(TRAINING)
        whole = await pseudo.until("poem · training")
        pseudo.resize(40, 12)
        pseudo.resize(80, 24)
        assert pseudo.read() != whole
        signal.raise_signal(signal.SIGWINCH)
        signal.raise_signal(signal.SIGWINCH)
        await until(lambda: pseudo.read() == whole, PATIENCE_SECONDS)
        nursery.cancel_scope.cancel()


def test_printed_lines_stay_and_so_does_the_summary(pseudo: Pseudo) -> None:
    terminal = Terminal(pseudo.descriptor, Look())
    terminal.draw(frame)
    terminal.print_line("an invite\nand a second line")
    assert pseudo.read() == ["an invite", "and a second line"], "until the next frame"
    terminal.draw(frame)
    assert pseudo.read() == ["80 by 24", "second"]
    pseudo.resize(16, 24)
    terminal.print_line("that words stay whole")
    assert pseudo.read()[3:] == ["that words stay", "whole"]
    pseudo.resize(80, 24)
    terminal.draw(frame)
    terminal.end(lambda columns, _rows: [Text(f"left, {columns} wide")])
    terminal.draw(frame)  # too late
    assert pseudo.read()[-2:] == ["whole", "left, 80 wide"]
    assert pseudo.emulator.row == len(pseudo.read()), "the prompt is on a line of its own"
    assert pseudo.emulator.modes == AT_REST


def test_nothing_typed_is_echoed_meanwhile_nor_left_for_the_shell(pseudo: Pseudo) -> None:
    before = termios.tcgetattr(pseudo.descriptor)
    terminal = Terminal(pseudo.descriptor, Look())
    assert pseudo.echoes()
    terminal.draw(frame)
    assert not pseudo.echoes()
    os.write(pseudo.outside, b"rm -rf everything\n")
    assert pseudo.read() == ["80 by 24", "second"]
    terminal.restore()
    assert termios.tcgetattr(pseudo.descriptor) == before
    pseudo.read()
    assert pseudo.emulator.modes == AT_REST
    os.set_blocking(pseudo.descriptor, False)
    with pytest.raises(BlockingIOError):
        os.read(pseudo.descriptor, 100)


def test_ctrl_backslash_does_not_end_the_process_while_the_screen_is_up(pseudo: Pseudo) -> None:
    """It would be at once, and the terminal would stay as it is."""
    terminal = Terminal(pseudo.descriptor, Look())
    terminal.draw(frame)
    no_key = os.fpathconf(pseudo.descriptor, "PC_VDISABLE").to_bytes(1, "little")
    assert termios.tcgetattr(pseudo.descriptor)[6][termios.VQUIT] == no_key
    terminal.restore()
    assert termios.tcgetattr(pseudo.descriptor)[6][termios.VQUIT] != no_key


def test_a_frame_that_a_restore_overtakes_is_not_drawn(pseudo: Pseudo) -> None:
    """It was written on the normal screen, which was the shell's by then."""
    terminal = Terminal(pseudo.descriptor, Look())
    pseudo.read()

    def overtaken(columns: int, rows: int, look: Look) -> Sequence[Painted]:
        terminal.restore()
        return frame(columns, rows, look)

    terminal.draw(overtaken)
    assert pseudo.read() == []
    assert pseudo.emulator.modes == AT_REST


def test_keys_come_at_once_and_reading_them_never_waits(pseudo: Pseudo) -> None:
    terminal = Terminal(pseudo.descriptor, Look(), pseudo.descriptor)
    assert terminal.typed() == b"", "nothing is read before a frame is there"
    terminal.draw(frame)
    assert terminal.typed() == b""
    pseudo.type(b"p")
    assert terminal.typed() == b"p"
    terminal.restore()
    pseudo.type(b"ls\n")
    assert terminal.typed() == b"", "those are the shell's"


def test_a_terminal_that_has_gone_does_not_keep_us() -> None:
    pseudo = Pseudo()
    terminal = Terminal(pseudo.descriptor, Look())
    terminal.draw(frame)
    os.close(pseudo.outside)
    terminal.print_line("nobody reads it")
    terminal.draw(frame)
    terminal.end(lambda _columns, _rows: [Text("left")])
    terminal.restore()
    os.close(pseudo.descriptor)


def test_a_screen_is_shown_only_on_a_suitable_terminal(pseudo: Pseudo) -> None:
    assert can_show(pseudo.descriptor, {"TERM": "xterm-256color"})
    assert not can_show(pseudo.descriptor, {"TERM": "dumb"})
    assert not can_show(pseudo.descriptor, {})
    reading, writing = os.pipe()
    assert not can_show(writing, {"TERM": "xterm"})
    assert can_read_keys(pseudo.descriptor, pseudo.descriptor)
    assert not can_read_keys(reading, pseudo.descriptor)
    another = Pseudo()
    assert not can_read_keys(another.descriptor, pseudo.descriptor)
    os.close(another.outside)
    os.close(another.descriptor)
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
    screen = Screen(terminal, terminal.print_line)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(screen.run)
        screen.show(STATES["starting"].view)
        await pseudo.until("poem · preparing")
        screen.happened(WillUse(("poem: trains on the processor", "Ctrl-C leaves")))
        assert pseudo.read() == ["poem: trains on the processor", "Ctrl-C leaves"]
        lines = await pseudo.until("── events")
        assert any("poem: trains on the processor" in line for line in lines), "it stays in sight"
        screen.happened(Notice("80 % of the quota are used"))
        screen.warn("warning: the disk is nearly full")
        screen.warn("warning: the disk is nearly full")
        screen.show(TRAINING)
        screen.show(changed(TRAINING, traffic=TrafficView()))  # the node has ended
        await pseudo.until("poem · training")
        lines = await pseudo.until("80 % of the quota are used")
        assert pseudo.emulator.normal_lines()[:2] == [
            "poem: trains on the processor",
            "Ctrl-C leaves",
        ]
        assert any("80 % of the quota are used" in line for line in lines)
        assert sum("warning: the disk is nearly full" in line for line in lines) == 1
        pseudo.resize(40, 12)
        signal.raise_signal(signal.SIGWINCH)
        await pseudo.until("764 of 1,024")
        screen.show(STATES["left"].view)
        assert await screen.end(PATIENCE_SECONDS)
        nursery.cancel_scope.cancel()
    shown = " ".join(pseudo.read())
    assert "poem · left at" in shown
    assert "28,160 samples of yours are in 84" in shown
    assert "poem · training" not in shown
    assert pseudo.echoes()
    assert pseudo.emulator.modes == AT_REST


@pytest.mark.slow
async def test_keys_do_what_commands_do_and_say_so(
    pseudo: Pseudo, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, left = [], []

    async def ask(command: str) -> object:
        asked.append(command)
        if len(asked) == 3:
            raise PotluckError("The disk is full.", advice="Free 5 MB.")
        return {"was_paused": True, "still_closed": []}

    heard = bytearray()

    class Listening(Terminal):
        def typed(self) -> bytes:
            keys = super().typed()
            heard.extend(keys)
            return keys

    async def until_heard(keys: bytes) -> None:
        await until(lambda: heard.endswith(keys), PATIENCE_SECONDS)

    terminal = Listening(pseudo.descriptor, Look(), pseudo.descriptor)
    screen = Screen(terminal, terminal.print_line, lambda: left.append(True))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(screen.run)
        screen.show(TRAINING)
        await pseudo.until("? help".replace(" ", "  "))
        pseudo.type(b"p")
        await pseudo.until("still gets ready")
        screen.meet(NodeStatus, ask)
        pseudo.type(b"p")
        await pseudo.until("paused, as by `potluck pause`")
        pseudo.type(b"r")
        await pseudo.until("goes on, as by `potluck resume`")
        pseudo.type(b"r")
        await pseudo.until("The disk is full. Free 5 MB.")
        assert asked == [PAUSE, RESUME, RESUME]
        pseudo.type(b"?")
        await pseudo.until("keys, and the commands that do the same")
        pseudo.type(b"\t")
        lines = await pseudo.until("step 1 ")
        assert not any("─ peers" in line for line in lines)
        pseudo.type(b"\x1b[Z")
        await pseudo.until("─ peers")
        monkeypatch.setattr(live, "PASTE_SECONDS", PATIENCE_SECONDS)  # a busy machine reads late
        pseudo.type(b"quite a long text that was pasted, which has a q in its last part:")
        await pseudo.until("pasted: nothing was done")
        await until_heard(b"last part:")
        monkeypatch.setattr(live, "PASTE_SECONDS", 0.0)  # after the last part, keys are keys
        pseudo.type(b"q")
        await until_heard(b"q")
        assert not left
        pseudo.type(b"\x1b[A")  # an arrow
        await until_heard(b"\x1b[A")  # or both are read at once, like a paste
        pseudo.type(b"q")
        await pseudo.until("leaves, as by `potluck leave` or Ctrl-C")
        assert left == [True]
        await screen.end(PATIENCE_SECONDS)
        nursery.cancel_scope.cancel()
    assert pseudo.echoes()


@pytest.mark.slow
async def test_tab_goes_through_all_panels_and_back_to_them_together(pseudo: Pseudo) -> None:
    terminal = Terminal(pseudo.descriptor, Look(), pseudo.descriptor)
    screen = Screen(terminal, terminal.print_line)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(screen.run)
        screen.happened(Notice("something"))
        screen.printed("an invite")
        screen.show(TRAINING)
        await pseudo.until("─ peers")
        names = ("loss", "batch", "peers", "this machine", "it writes", "events", "printed")
        for name in names:
            pseudo.type(b"\t")
            await until(lambda name=name: _panels(pseudo) == [name], PATIENCE_SECONDS)
            if name == "peers":  # another panel comes, before this one
                screen.show(changed(TRAINING, experts=EXPERTS))
        pseudo.type(b"\t")
        await until(lambda: len(_panels(pseudo)) == 6, PATIENCE_SECONDS)
        nursery.cancel_scope.cancel()


def _panels(pseudo: Pseudo) -> list[str]:
    return [
        line.split("── ")[1].split("  ")[0].rstrip(" ─")
        for line in pseudo.read()
        if line.startswith(" ── ")
    ]


async def test_many_changes_are_few_pictures_and_none_is_no_picture(pseudo: Pseudo) -> None:
    screen = Screen(Terminal(pseudo.descriptor, Look()), lambda _text: None)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(screen.run)
        for step in range(200):
            screen.show(changed(TRAINING, epoch=step))
            await trio.lowlevel.checkpoint()
        await pseudo.until("step 199")
        for _ in range(20):
            screen.show(changed(TRAINING, epoch=199))
        await trio.testing.wait_all_tasks_blocked()
        await screen.end(PATIENCE_SECONDS)
        nursery.cancel_scope.cancel()
    pseudo.read()
    assert pseudo.written.count(BEGIN) <= 4, "the first, one in between, the last, and the end"
    assert pseudo.written.count(ENTER) == 1


def test_frames_that_take_long_are_fewer() -> None:
    assert pause_after(0.001) == LEAST_SECONDS
    assert pause_after(0.01) == 0.01 / SHARE_OF_A_CORE
    assert pause_after(5.0) == MOST_SECONDS


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
