"""The frame fits every terminal in every state and says what to do; no stranger can spoil it."""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import pytest
from msgspec.structs import replace as changed

from lab.scenes import BACKBONE, EVENTS, SIZES, STATES, TRAINING
from node.app.screen.canvas import Look, paint
from node.app.screen.panels import Scene, SceneEvent
from node.app.screen.picture import choices, drawn, frame
from node.core.training_view import (
    ENDED,
    BatchView,
    RunPeerView,
    TrafficView,
    TrainerPhase,
    TrainerView,
)

HOSTILE = (
    "\x1b[2J\x1b]0;owned\x07\r\n\t\x9b31m",
    "漢字" * 300,
    "e" + "\u0301" * 200,
    "👩\u200d👩\u200d👧\ufe0f" * 40,
    "\U0001f1e9\U0001f1ea" * 40,
    "\u202eevil\u2066\u200b\ufeff",
    "[bold red]not markup[/]",
    "x" * 100_000,
    "",
    " ",
)
NO_NUMBERS = (math.nan, math.inf, -math.inf, -1.0, 1e300)


def text(scene: Scene, columns: int, rows: int) -> list[str]:
    return [line.plain for line in drawn(scene, columns, rows)]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("state", STATES)
def test_every_state_fills_every_size(state: str, size: tuple[int, int]) -> None:
    lines = drawn(STATES[state], *size)
    assert len(lines) == size[1]
    assert max(line.cell_len for line in lines) <= size[0]
    assert all(line.plain == line.plain.rstrip() for line in lines)
    for look in (Look(), Look(colour=False), Look(encoding="ascii"), Look(console=True)):
        painted = frame(STATES[state], *size, look)
        assert len(painted) == size[1]
        assert max(line.cells for line in painted) <= size[0]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_each_panel_and_the_help_fill_every_size(size: tuple[int, int]) -> None:
    for state in ("training", "keeping", "training and serving", "starting"):
        scene = replace(STATES[state], keys=True, said=("an invite " * 90, "second"))
        for other in (
            *(replace(scene, chosen=number) for number in range(9)),
            replace(scene, helps=True),
            replace(scene, note="paused"),
        ):
            lines = drawn(other, *size)
            assert len(lines) == size[1]
            assert max(line.cell_len for line in lines) <= size[0]


@pytest.mark.parametrize("size", SIZES[3:], ids=str)
@pytest.mark.parametrize("state", STATES)
def test_every_state_says_in_full_what_it_is_and_what_to_do(
    state: str, size: tuple[int, int]
) -> None:
    scene = STATES[state]
    shown = " ".join(" ".join(text(scene, *size)).split())
    assert f"poem · {scene.view.phase.value}" in shown
    assert scene.view.doing in shown
    assert scene.view.advice in shown
    assert "Ctrl-C" in shown or scene.view.phase in (TrainerPhase.LEAVING, *ENDED)


@pytest.mark.parametrize(
    ("state", "hint"),
    [
        ("paused", "potluck resume"),
        ("paused twice", "potluck resume"),
        ("out of schedule", "back by itself"),
        ("network lost", "back by itself"),
        ("leaving", "Ctrl-C: at once"),
        ("training", "Ctrl-C leaves"),
        ("starting", "Ctrl-C leaves"),
    ],
)
def test_the_smallest_terminal_says_it_in_short(state: str, hint: str) -> None:
    lines = text(STATES[state], 20, 5)
    assert lines[0] == f"poem · {STATES[state].view.phase.value}"
    assert any(hint in line for line in lines)


@pytest.mark.parametrize("state", ["paused", "paused twice", "out of schedule", "network lost"])
def test_a_small_terminal_says_why_nothing_is_trained(state: str) -> None:
    scene = STATES[state]
    lines = text(scene, 40, 9)
    assert scene.view.doing[:30] in lines[1]
    assert any(hint in " ".join(lines[2:4]) for hint in ("resume", "back by", "by itself"))


def test_training_shows_all_that_a_volunteer_asks_for() -> None:
    shown = "\n".join(text(STATES["training"], 80, 23))
    for part in (
        "step 312 of 2,000 ━",
        "15 % · over in 4 h 48 min",
        "loss  2.0713 in step 312",
        "75 % · next step in 2 s",
        "764 of 1,024",
        "31.2 of 92.4 /s",
        "28,160 accepted samples in 84 steps · 33 % of them",
        "3 others · 2 direct, 1 relayed",
        "bob",
        "↑ 1.23 MB/s of 2 MB/s",
        "step 312 with 4 peers, loss 2.0713: 344 of 1,024 samples are yours",
    ):
        assert part in shown


def test_a_gpus_memory_stands_beside_the_machines() -> None:
    view = changed(TRAINING, device="cuda:0", device_memory_bytes=11 * 10**9)
    shown = "\n".join(text(Scene(view, EVENTS), 100, 40))
    assert "this machine  cuda:0" in shown
    assert "478 MB · 11 GB of the GPU's" in shown


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "rows"),
    [("poem", 1), ("75 %", 6), ("loss  2.0713", 11), ("312 with 4", 13), ("others", 15), ("↑", 17)],
)
def test_the_most_important_parts_are_on_all_but_the_lowest_terminals(part: str, rows: int) -> None:
    for height in range(rows, 50):
        assert part in "\n".join(_rows(height)), height


def _rows(rows: int) -> list[str]:
    return text(STATES["training"], 60, rows)


@pytest.mark.parametrize("size", [*SIZES, (1, 1), (3, 2), (7, 40)], ids=str)
@pytest.mark.parametrize("words", HOSTILE, ids=lambda words: repr(words[:8]))
def test_strangers_words_stay_in_their_line(words: str, size: tuple[int, int]) -> None:
    peers = tuple(
        RunPeerView(peer=words, name=words, role=words, reach=words, ignored=words, samples=10**30)
        for _ in range(40)
    )
    view = changed(
        TRAINING,
        run=words,
        peer=words,
        person=words,
        doing=words,
        advice=words,
        device=words,
        checkpoint=words,
        peers=peers,
    )
    for phase in (TrainerPhase.TRAINING, TrainerPhase.REFUSED):
        scene = Scene(changed(view, phase=phase), (SceneEvent(words, words, warns=True),) * 8)
        lines = drawn(scene, *size)
        assert len(lines) == size[1]
        for line in lines:
            assert line.cell_len <= size[0]
            assert line.plain.replace("\u0301", "").isprintable()
            assert "\u0301" * 3 not in line.plain
            assert "\x1b" not in paint(line, Look(colour=False)).written


@pytest.mark.parametrize("number", NO_NUMBERS)
def test_nan_is_a_question_mark_or_left_out(number: float) -> None:
    view = changed(
        TRAINING,
        phase_seconds=number,
        loss=number,
        losses=(number, 1.0, number, 2.0),
        batch=BatchView(
            samples=number, target=8, mine=9, samples_per_second=number, seconds_to_step=number
        ),
        peers=(RunPeerView(samples_per_second=number, round_trip_ms=number),),
    )
    for size in SIZES:
        lines = drawn(Scene(view), *size)
        assert max(line.cell_len for line in lines) <= size[0]


def test_the_text_of_the_state_is_not_repeated() -> None:
    for state, words in (("network lost", "network lost: none of"), ("paused", "paused by you")):
        scene = STATES[state]
        said = words if state == "network lost" else scene.view.doing
        events = (*scene.events, SceneEvent("21:05:00", said))
        assert text(Scene(scene.view, events), 80, 23) == text(scene, 80, 23)


def test_without_a_link_nobody_knows_how_full_the_batch_is() -> None:
    shown = "\n".join(text(STATES["network lost"], 80, 23))
    assert "samples   " not in shown
    assert "next step" not in shown
    assert "step 312" in shown


def test_markup_is_shown_as_it_was_written() -> None:
    scene = Scene(changed(TRAINING, run="[bold red]poem[/]"))
    assert text(scene, 80, 23)[0].startswith(" [bold red]poem[/] · training")


def test_a_large_terminal_shows_more_events() -> None:
    events = tuple(SceneEvent("21:00:00", f"event {number} came") for number in range(60))
    for (columns, rows), least in (((80, 24), 2), ((120, 40), 6), ((250, 70), 12)):
        shown = [line for line in text(Scene(TRAINING, events), columns, rows) if "event" in line]
        assert sum(" came" in line for line in shown) >= least
        assert "event 59 came" in shown[-1]


def test_a_long_list_of_peers_leaves_room_for_the_rest() -> None:
    peers = tuple(changed(TRAINING.peers[0], peer=f"12D3Koo{n:08d}", name="") for n in range(500))
    lines = text(Scene(changed(TRAINING, peers=peers), EVENTS), 120, 39)
    assert any("500 others · 500 direct" in line for line in lines)
    assert any("more: potluck peers" in line for line in lines)
    assert "Ctrl-C leaves" in lines[-1]


def test_a_frame_of_a_thousand_peers_takes_hardly_more_than_one_of_a_hundred() -> None:
    """All the peers' names were made for each event, also for those that are not shown."""

    def calls(many: int) -> int:
        peers = tuple(changed(TRAINING.peers[0], peer=f"12D3Koo{n:09d}") for n in range(many))
        events = (SceneEvent("21:04:31", "…DqWzXn03 came"),) * 100
        scene = Scene(changed(TRAINING, peers=peers), events)
        with CallCount() as count:
            drawn(scene, 120, 40)
        return count.calls

    calls(1)  # makes what is made once
    assert calls(1_000) < 2 * calls(100)


class CallCount:
    """Of Python's functions, in this thread."""

    calls = 0

    def __enter__(self) -> CallCount:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, _frame: object, kind: str, _argument: object) -> None:
        self.calls += kind == "call"


def test_at_the_start_only_what_is_known_is_shown() -> None:
    lines = text(Scene(TrainerView(run="poem", doing="starting")), 80, 23)
    assert [line for line in lines if line][:2] == [" poem · preparing", " starting"]
    assert not any("batch" in line or "traffic" in line for line in lines)


def test_the_present_activity_is_not_repeated() -> None:
    scene = STATES["starting"]
    event = SceneEvent("21:00:00", scene.view.doing)
    lines = text(Scene(scene.view, (event,)), 80, 23)
    assert sum(scene.view.doing in line for line in lines) == 1


def test_colours_are_dropped_and_so_are_characters_that_a_terminal_lacks() -> None:
    scene = STATES["training"]
    with_colour, without, ascii_only, on_a_console = (
        "".join(line.written for line in frame(scene, 80, 40, look))
        for look in (
            Look(),
            Look(colour=False),
            Look(colour=False, encoding="ascii"),
            Look(console=True),
        )
    )
    assert "\x1b[30;42m training \x1b[0mfor 43 s" in with_colour, "a style ends with its words"
    assert "\x1b[2mgiven     \x1b[0m28,160" in with_colour
    assert "\x1b" not in without
    assert ascii_only.isascii()
    assert "####" in ascii_only
    assert "?" not in ascii_only
    assert set(on_a_console) & set("╭╮╰╯…━█═─│┌┐└┘") == set("█═─│┌┐└┘"), "those of the first PCs"
    assert not any("\u2800" <= letter <= "\u28ff" for letter in on_a_console + ascii_only)


def test_no_traffic_and_no_limits_are_not_shown() -> None:
    view = changed(TRAINING, traffic=TrafficView(sent_bytes=1_000))
    shown = text(Scene(view), 80, 40)
    assert any("traffic   ↑ 0 B/s   ↓ 0 B/s " in line for line in shown)
    assert any("in all    ↑ 1 kB   ↓ 0 B " in line for line in shown)


def test_a_wide_terminal_has_two_columns() -> None:
    lines = text(STATES["training"], 120, 40)
    assert any("─ loss " in line and "─ peers " in line for line in lines)
    assert not any(
        "─ loss " in line and "─ peers " in line for line in text(STATES["training"], 99, 40)
    )


def test_what_the_model_writes_is_shown_in_its_own_lines() -> None:
    shown = "\n".join(text(STATES["training"], 80, 40))
    assert "─ it writes ─" in shown
    assert "│ And all the night the water ran" in shown
    assert "│   beside the mill, and the tome" in shown
    assert "it writes" not in "\n".join(text(STATES["training"], 80, 24)), "there is no room"
    assert "night" in "\n".join(text(replace(STATES["training"], chosen="it writes"), 60, 15))
    nothing = changed(STATES["training"].view, writes=" \n\n")
    assert "it writes" not in "\n".join(text(Scene(nothing), 80, 40))


def test_a_model_cannot_write_commands_for_the_terminal() -> None:
    for words in HOSTILE:
        view = changed(STATES["training"].view, writes=f"{words}\n   {words}")
        lines = text(replace(STATES["training"], view=view, chosen="it writes"), 80, 24)
        assert len(lines) == 24
        assert all(line.isprintable() and len(line) <= 80 for line in lines)


def test_a_backbone_shows_what_a_backbone_does() -> None:
    scene = STATES["keeping"]
    scene = replace(scene, view=changed(scene.view, troubles=()), node=BACKBONE)
    shown = "\n".join(text(scene, 120, 40))
    for part in (
        "backbone  healthy · 3 links",
        "new volunteers can join here",
        "step 310, written 52 s ago",
        "3 of 64",
        "12 of 128 places · 2 GB in 2026-11",
        "812 slots kept · 15 dialled back",
        "1 GB  “bob” …DqWzXn01 · direct",
    ):
        assert part in shown
    assert "accepted samples" not in shown, "it brings none"


def test_what_ails_a_backbone_is_said_on_the_smallest_terminal_too() -> None:
    assert "run.toml is gone" in "\n".join(text(STATES["keeping, and ailing"], 60, 15))


def test_the_last_key_and_all_keys_are_explained_with_their_commands() -> None:
    scene = replace(STATES["training"], keys=True)
    assert " p  pause   r  resume   q  leave   tab  panels   ?  help" in text(scene, 80, 24)[-1]
    assert (
        text(replace(scene, note="paused: potluck pause"), 80, 24)[-1] == " paused: potluck pause"
    )
    shown = "\n".join(text(replace(scene, helps=True), 80, 24))
    for part in ("potluck pause", "potluck resume", "potluck leave", "Ctrl-C"):
        assert part in shown
    assert "── loss" not in shown


def test_a_chosen_panel_has_the_whole_room() -> None:
    lines = text(replace(STATES["training"], chosen="peers"), 60, 15)
    assert any("peers  3 others" in line for line in lines)
    assert sum("…DqWzXn0" in line for line in lines) == 3
    assert not any("── loss" in line for line in lines)


def test_a_panel_stays_chosen_when_others_come_or_go() -> None:
    """It was remembered by its number, so another one was shown."""
    scene = replace(STATES["training"], chosen="peers")
    without_loss = replace(scene, view=changed(scene.view, losses=(), loss=None))
    lines = text(without_loss, 60, 15)
    assert any("peers  3 others" in line for line in lines)
    assert not any("── this machine" in line for line in lines)
    alone = replace(scene, view=changed(scene.view, peers=()))
    assert text(alone, 60, 15) == text(replace(alone, chosen=None), 60, 15), "until somebody comes"


def test_the_longest_invite_is_shown_in_full() -> None:
    """It was cut after 500 characters, without a word."""
    invite = "potluck-run:" + "x1y2" * 1_500
    scene = replace(STATES["keeping"], said=(f"an invite:\n{invite}",))
    lines = text(replace(scene, chosen="printed"), 150, 60)
    assert invite in "".join(line.strip(" │") for line in lines)
    assert any(line.strip(" │") == "an invite:" for line in lines)


def test_what_was_printed_can_be_read_again() -> None:
    invite = "potluck-run:" + "x1y2" * 60
    words = "Everybody who has this invite can take part with it"
    scene = replace(STATES["keeping"], said=("  █▀ ▄", invite, words, "漢字" * 50))
    assert choices(scene)[-1] == "printed"
    lines = text(replace(scene, chosen="printed"), 40, 40)
    assert any(line.startswith(" │   █▀ ▄ ") for line in lines), "a code keeps its margin"
    inside = [line.strip(" │") for line in lines]
    assert invite in "".join(inside)
    assert "漢字" * 50 in "".join(inside)
    assert "Everybody who has this invite can" in inside
