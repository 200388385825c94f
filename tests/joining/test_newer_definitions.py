"""Training peers are told when the organiser signs another definition, and pass it on."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from node.app.commands.run_sign import refuse_to_part
from node.core.wrong_use import WrongUse
from node.run.definition import incompatible_parts, places_in_words, read_definition
from node.run.folder import RunFolder
from node.run.signed import SignedDefinition, read_signed, sign_definition
from node.training.join.newer import ASK_SECONDS, LOOK_SECONDS, NewerDefinition
from protocols.runs.serving import ServedDefinitions, serve_definitions
from tests.protocols.pair import Pair, between_two
from tests.runs.definitions import (
    FINGERPRINT,
    MALLORY,
    NAME,
    NOW_MS,
    ORGANISER,
    TEXT,
    changed,
    with_line,
)

SIGNED = sign_definition(TEXT, ORGANISER, now_ms=NOW_MS)
FORGED = sign_definition(TEXT, MALLORY, now_ms=NOW_MS + 9)
FASTER = sign_definition(changed("0.003", "0.01"), ORGANISER, now_ms=NOW_MS + 1)
SHORTER = sign_definition(with_line("steps = 9"), ORGANISER, now_ms=NOW_MS + 2)


class Watching:
    """A peer that trains by SIGNED, and what became of it."""

    def __init__(self, pair: Pair) -> None:
        self.told: list[str] = []
        self.kept: list[SignedDefinition] = []
        self.has_kept = trio.Event()
        self.served: ServedDefinitions = serve_definitions(pair.asking)
        signed = read_signed(SIGNED, run=NAME, organiser=FINGERPRINT)
        self.served.keep(NAME, signed.data)

        async def keep(found: SignedDefinition) -> None:
            self.kept.append(found)
            self.has_kept.set()

        self.watcher = NewerDefinition(
            pair.alice, pair.asking, self.served, signed, tell=self.told.append, keep=keep
        )


def test_a_peer_that_trains_asks_others_tells_once_and_passes_it_on() -> None:
    async def scenario(pair: Pair) -> None:
        theirs = serve_definitions(pair.answering)
        theirs.keep(NAME, SIGNED)
        await pair.alice.connect(pair.bob_id)
        one = Watching(pair)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.watcher.run, None)
            await trio.sleep(2.5 * ASK_SECONDS)
            assert not one.told
            for data in (FORGED, FASTER, FASTER, SIGNED, SHORTER):
                theirs.keep(NAME, data)
                await trio.sleep(ASK_SECONDS)
            nursery.cancel_scope.cancel()
        assert [kept.data for kept in one.kept] == [FASTER, SHORTER]
        assert len(one.told) == 2
        assert "[optimizer]" in one.told[0]
        assert "[optimizer]" not in one.told[1]
        assert one.watcher.newest.data == SHORTER

    between_two(scenario)


def test_the_organisers_own_peer_sees_what_is_signed_in_its_folder(tmp_path: Path) -> None:
    async def scenario(pair: Pair) -> None:
        folder, one = RunFolder(tmp_path), Watching(pair)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.watcher.run, folder.signed_file)
            for data in (SIGNED, b"half", FORGED, FASTER):
                folder.keep_signed(data)
                await trio.sleep(2 * LOOK_SECONDS)
            await one.has_kept.wait()  # virtual time does not see the thread that reads the file
            nursery.cancel_scope.cancel()
        assert [kept.data for kept in one.kept] == [FASTER]

    between_two(scenario)


@pytest.mark.parametrize(
    ("text", "places"),
    [
        (with_line("steps = 9\nseed = 3") + b"[checkpoints]\nkeep_last = 5", []),
        (changed("0.003", "0.01"), ["[optimizer]"]),
        (changed("batch = 64", "batch = 65"), ["batch below [training]"]),
        (with_line("width = 32", "model").replace(b"width = 16", b""), ["[model]"]),
        (TEXT + b"[averaging]\ncodec = 'none'", ["codec below [averaging]"]),
        (TEXT + b"[schedule]\nname = 'constant'", ["[schedule]"]),
    ],
)
def test_only_changes_that_affect_steps_separate_the_peers(text: bytes, places: list[str]) -> None:
    assert incompatible_parts(read_definition(TEXT), read_definition(text)) == places


def test_a_run_with_checkpoints_is_not_split_by_mistake(tmp_path: Path) -> None:
    folder, before = RunFolder(tmp_path), read_signed(SIGNED, run=NAME, organiser=FINGERPRINT)
    folder.definition_file.write_bytes(changed("0.003", "0.01"))
    refuse_to_part(folder, before)  # nobody has trained in it yet
    with folder.held(), pytest.raises(WrongUse, match="is being trained"):
        refuse_to_part(folder, before)  # who trains has written no checkpoint yet
    (folder.checkpoints / "epoch-0000000001-3fa9c1d2").mkdir(parents=True)
    with pytest.raises(WrongUse, match=r"another run: \[optimizer\] changed") as caught:
        refuse_to_part(folder, before)
    assert "--apart" in caught.value.advice
    folder.definition_file.write_bytes(with_line("steps = 9"))
    refuse_to_part(folder, before)


def test_places_are_listed_in_a_sentence() -> None:
    assert places_in_words(["a"]) == "a"
    assert places_in_words(["a", "b", "c"]) == "a, b and c"
