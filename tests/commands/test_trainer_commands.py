"""The owner's questions to a node: answered in lines that fit, whatever text others wrote."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import pytest
import trio

from node.app.cli import output
from node.app.cli.catalogue import parse
from node.app.cli.output import hung
from node.app.commands import logs, peers
from node.app.trainer_client import NothingTrains
from node.core.configuration import read_configuration
from node.core.control import Answering, ControlServer
from node.core.training_view import RunPeerView, TrainerPhase, TrainerView
from node.training.questions import LINES, VIEW
from protocols.identity import Identity

PEER = Identity.from_seed(b"eve".ljust(32)).peer_id
HOSTILE = "\x1b[2Jeve\n  paused by you\u202e"
EVE = RunPeerView(
    peer=PEER,
    name=HOSTILE,
    role="trains",
    reach="direct",
    round_trip_ms=61.25,
    epoch=1_234_567,
    samples=345,
    samples_per_second=1234.5,
    ignored=f"It claims more than can be: {HOSTILE}",
)


async def said(
    home: Path, capsys: pytest.CaptureFixture[str], words: str, **answers: Any
) -> tuple[int, str]:
    """A command's output, if the node of this home answers this."""
    environment = {"POTLUCK_HOME": str(home)}
    control = ControlServer(read_configuration(environment=environment).places.control_socket)

    def telling(value: Any) -> Any:
        async def answer_it(_arguments: Mapping[str, Any], answer: Answering) -> None:
            await answer(value)

        return answer_it

    for question, value in answers.items():
        control.add(question.replace("_", " "), telling(value))
    run, arguments = parse([*words.split(), "--home", str(home)])
    failed: list[NothingTrains] = []
    code = 0
    async with trio.open_nursery() as nursery:
        await nursery.start(control.serve)
        try:
            code = await trio.to_thread.run_sync(run, arguments)
        except NothingTrains as error:
            failed.append(error)
        nursery.cancel_scope.cancel()
    if failed:
        raise failed[0]
    return code, capsys.readouterr().out


def on_a_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    def found(_stream: TextIO) -> int:
        return columns

    for module in (output, peers, logs):
        monkeypatch.setattr(module, "columns_of", found)


VIEW_KEY, LINES_KEY = VIEW.replace(" ", "_"), LINES.replace(" ", "_")


@pytest.mark.parametrize("columns", [80, 120])
async def test_a_peers_name_is_shown_and_cannot_look_like_our_own_words(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    columns: int,
) -> None:
    on_a_terminal(monkeypatch, columns)
    ann = RunPeerView(peer=PEER, name="code:ann", role="trains", device="cuda")
    view = TrainerView(run="poem", peers=(EVE, ann))
    code, text = await said(tmp_path, capsys, "peers", **{VIEW_KEY: view})
    assert code == 0
    assert "\x1b" not in text
    assert "\u202e" not in text
    lines = text.splitlines()
    assert f"code:ann, {PEER}" in lines
    assert any("trains on cuda" in line for line in lines)
    assert all(len(line) <= columns for line in lines)
    assert not any(line.strip().endswith("eve") for line in lines), "it has broken a line"


async def test_before_the_run_is_entered_nobody_is_said_to_be_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    view = TrainerView(run="poem", phase=TrainerPhase.PREPARING, doing="looking for the others")
    _, text = await said(tmp_path, capsys, "peers", **{VIEW_KEY: view})
    assert text == "poem: not entered yet (looking for the others).\n"


async def test_no_line_of_a_log_begins_as_another_one_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = [{"time": 0.0, "words": "refused: no\n12:00:00 left\x1b[1A"}]
    code, text = await said(tmp_path, capsys, "logs", **{LINES_KEY: told})
    first, second = text.splitlines()
    assert code == 0
    assert first.endswith("refused: no")
    assert second == "         12:00:00 left\N{REPLACEMENT CHARACTER}[1A"


async def test_a_leaderboard_before_the_run_is_entered_says_that_it_is_too_early(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    view = TrainerView(run="poem", phase=TrainerPhase.PREPARING, doing="looking for the others")
    with pytest.raises(NothingTrains, match="has not entered poem yet") as caught:
        await said(tmp_path, capsys, "leaderboard", **{VIEW_KEY: view})
    assert "looking for the others" in caught.value.why


@pytest.mark.parametrize("words", ["leaderboard", "peers", "logs"])
async def test_a_node_that_does_not_train_is_told_from_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    with pytest.raises(NothingTrains, match="does not train"):
        await said(tmp_path, capsys, words)


def test_text_hangs_below_its_beginning() -> None:
    assert hung("step: ", "one two three", 13) == "step: one two\n      three"
    assert hung("at: ", "/ip4/127.0.0.1/tcp/4001", 9) == "at: /ip4/127.0.0.1/tcp/4001"
    assert hung("step: ", "one two three", None) == "step: one two three"
