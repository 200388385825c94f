"""The picture fits every terminal in every state and says what to do; no stranger can spoil it."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace as changed

from node.app.screen.canvas import Look, paint
from node.app.screen.picture import Scene, SceneEvent, render
from node.core.training_view import (
    ENDED,
    BatchView,
    RunPeerView,
    TrafficView,
    TrainerPhase,
    TrainerView,
)
from tests.screen.scenes import EVENTS, SIZES, STATES, TRAINING

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
    return [line.plain for line in render(scene, columns, rows)]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("state", STATES)
def test_every_state_fits_every_size(state: str, size: tuple[int, int]) -> None:
    lines = render(STATES[state], *size)
    assert 0 < len(lines) <= size[1]
    assert max(line.cell_len for line in lines) <= size[0]
    assert all(line.plain == line.plain.rstrip() for line in lines), "a resize breaks what is there"


@pytest.mark.parametrize("size", SIZES[2:], ids=str)
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
        "step     312 of 2,000 · the run's loss 2.0713 · over in 4 h 48 min",
        "75 %  764 of 1,024 samples",
        "next step in 2 s",
        "28,160 accepted samples in 84 steps · 33 % of them",
        "3 others · 2 direct, 1 relayed",
        "bob",
        "↑ 1.23 MB/s of 2 MB/s",
        "step 312 with 4 peers, loss 2.0713: 344 of 1,024 samples are yours",
    ):
        assert part in shown


def test_a_gpus_memory_stands_beside_the_machines() -> None:
    view = changed(TRAINING, device="cuda:0", device_memory_bytes=11 * 10**9)
    (line,) = [one for one in text(Scene(view, EVENTS), 100, 40) if "cuda:0" in one]
    assert "478 MB of memory · 11 GB of the GPU's" in line


@pytest.mark.slow
def test_the_least_important_lines_are_left_out_first() -> None:
    before = 100
    for part in ("cpu", "↑", "others", "given", "loss", "75 %", "poem"):
        least = min(rows for rows in range(1, 40) if part in "\n".join(_rows(rows)))
        assert least < before, part
        before = least


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
        lines = render(scene, *size)
        assert len(lines) <= size[1]
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
        lines = render(Scene(view), *size)
        assert max(line.cell_len for line in lines) <= size[0]


def test_the_text_of_the_state_is_not_repeated() -> None:
    for state, words in (("network lost", "network lost: none of"), ("paused", "paused by you")):
        scene = STATES[state]
        said = words if state == "network lost" else scene.view.doing
        events = (*scene.events, SceneEvent("21:05:00", said))
        assert text(Scene(scene.view, events), 80, 23) == text(scene, 80, 23)


def test_without_a_link_nobody_knows_how_full_the_batch_is() -> None:
    shown = "\n".join(text(STATES["network lost"], 80, 23))
    assert "\n batch " not in shown
    assert "step     312" in shown


def test_markup_is_shown_as_it_was_written() -> None:
    scene = Scene(changed(TRAINING, run="[bold red]poem[/]"))
    assert text(scene, 80, 23)[0].startswith(" [bold red]poem[/] · training")


def test_a_long_list_of_peers_leaves_room_for_the_rest() -> None:
    peers = tuple(changed(TRAINING.peers[0], peer=f"12D3Koo{n:08d}", name="") for n in range(500))
    lines = text(Scene(changed(TRAINING, peers=peers), EVENTS), 120, 39)
    assert any("500 others · 500 direct" in line for line in lines)
    assert any("and 488 more: potluck peers" in line for line in lines)
    assert "Ctrl-C leaves" in lines[-1]


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
    lines = render(STATES["training"], 80, 23)
    with_colour = "".join(paint(line, Look()).written for line in lines)
    without = "".join(paint(line, Look(colour=False)).written for line in lines)
    ascii_only = "".join(
        paint(line, Look(colour=False, encoding="ascii")).written for line in lines
    )
    assert "\x1b[30;42m training \x1b[0mfor 43 s" in with_colour, "a style ends with its words"
    assert "\x1b[2mgiven    \x1b[0m28,160" in with_colour
    assert "\x1b" not in without
    assert "####" in ascii_only
    assert "?" not in ascii_only
    on_a_console = "".join(paint(line, Look(console=True)).written for line in lines)
    assert set(on_a_console) & set("▁▂▃▄▅▆▇█▓░…") == set("▄█▓░"), "those of the first PCs"


def test_no_traffic_and_no_limits_are_not_shown() -> None:
    view = changed(TRAINING, traffic=TrafficView(sent_bytes=1_000))
    (line,) = [line for line in text(Scene(view), 80, 23) if "traffic" in line]
    assert line == " traffic  ↑ 0 B/s, 1 kB in all   ↓ 0 B/s, 0 B in all"
