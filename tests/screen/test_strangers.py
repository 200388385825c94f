"""No name of a peer, organiser or server can move the cursor.

The output goes to a terminal that fails at anything but our own few sequences, and that counts the
lines that would have wrapped.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as changed
from rich.cells import cell_len

from lab.scenes import TRAINING
from node.app.screen.canvas import ENTER, LEAVE, Canvas, Look, paint
from node.app.screen.cells import clean
from node.app.screen.panels import Scene, SceneEvent
from node.app.screen.picture import frame
from node.app.screen.summary import summary
from node.core.display_name import short, with_names
from node.core.status import LinkStatus, NodeStatus
from node.core.training_view import RunPeerView, TrainerPhase
from tests.screen.emulator import AT_REST, SHOWN, Emulator

ESCAPES = (
    "\x1b[2J\x1b[H",
    "\x1b]0;title\x07",
    "\x9b31m",
    "\x1bP1;2q\x1b\\",
    "\r",
    "\n",
    "\b",
    "\x0e",
)
TURNS = ("\u202e", "\u2066", "\u200f", "\u061c", "\u200b", "\u200d", "\ufeff", "\ufe0f")
WIDE = ("漢", "👩\u200d👧", "🇩🇪", "e\u0301\u0301\u0301", "ﷺ", "ก็็็็", "\u1160", "\U0001f1e9")
words = st.lists(st.sampled_from((*ESCAPES, *TURNS, *WIDE)) | st.text(max_size=12), max_size=12)
LONGEST = "x" * 10_000 + "漢" * 10_000
LOOKS = (Look(), Look(colour=False, encoding="ascii"), Look(encoding="latin-1"), Look(console=True))


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    said=words.map("".join),
    columns=st.integers(1, 160),
    rows=st.integers(1, 50),
    phase=st.sampled_from(TrainerPhase),
    keeps=st.booleans(),
    look=st.sampled_from(LOOKS),
)
@example(LONGEST, 80, 23, TrainerPhase.TRAINING, True, Look())
@example(LONGEST, 20, 4, TrainerPhase.REFUSED, False, Look(encoding="ascii"))
def test_nothing_that_is_said_leaves_its_place(
    said: str, columns: int, rows: int, phase: TrainerPhase, keeps: bool, look: Look
) -> None:
    peer = RunPeerView(
        peer=said, name=said, role=said, reach="direct", ignored=said, samples=10**20
    )
    view = changed(TRAINING, phase=phase, run=said, person=said, doing=said, advice=said)
    view = changed(view, device=said, checkpoint=said, peer=said, peers=(peer,) * 3)
    view = changed(view, troubles=(said,), keeps_only=keeps, writes=said)
    status = NodeStatus(links=(LinkStatus(peer=said, reach=said),))
    events = (SceneEvent("21:00:00", said, warns=True),) * 3
    scene = Scene(view, events, node=status, said=(said,), note=said)
    terminal, canvas = Emulator(columns, rows), Canvas()
    terminal.write(ENTER)
    for chosen in (None, *range(6)):
        lines = frame(replace(scene, chosen=chosen), columns, rows, look)
        assert len(lines) == rows
        terminal.write(canvas.draw(lines, columns))
        assert terminal.modes == SHOWN
        assert terminal.wrapped == 0
    terminal.write(LEAVE)
    assert terminal.modes == AT_REST
    for line in summary(scene, "21:05:12", columns, rows):
        assert line.cell_len <= columns
        terminal.write(paint(line, look).written)
        terminal.write("\r\n")
    assert terminal.wrapped == 0


@pytest.mark.slow
@settings(max_examples=100)
@given(words.map("".join))
def test_a_clean_word_is_clean_and_no_wider_than_it_was(said: str) -> None:
    cleaned = clean(said)
    assert clean(cleaned) == cleaned
    assert all(one.isprintable() or cell_len(one) == 0 for one in cleaned)


def test_a_peer_is_called_by_its_name_and_by_the_end_of_its_id_without() -> None:
    bob, stranger = ("12D3KooW" + letter * 44 for letter in "bZ")
    peers = (RunPeerView(peer=bob, name="code:bob"), RunPeerView(peer=stranger))
    said = f"{bob} came; {stranger} did not; {short(bob)} went, and 12D3KooWbb"
    label = f"code:bob …{'b' * 8}"
    assert with_names(said, peers) == (
        f"{label} came; …{'Z' * 8} did not; {label} went, and 12D3KooWbb"
    )
    ended = with_names(f"ending everything with {bob} (code:bob) may no longer take part.", peers)
    assert ended == f"ending everything with {label} may no longer take part."
