"""The owner's requests to a training node are carried out, whoever still listens."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import trio

from node.core.control import ControlServer
from node.training.owners_pause import OwnersPause
from node.training.questions import LEAVE, PAUSE, RESUME, TrainerQuestions
from node.training.session import TrainingSession
from tests.trainer.recorded import Recorded


class Asked:
    """A training node's control, without its socket."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "pause.json"
        self.session = TrainingSession(Recorded())
        self.control = ControlServer(folder / "control.sock")
        TrainerQuestions(self.control, self.session, OwnersPause(self.file))

    async def ask(self, command: str) -> Mapping[str, Any]:
        answer: Mapping[str, Any] = await self.control.ask(command)
        return answer

    async def ask_and_go(self, command: str) -> None:
        """As a client that is gone before anything is done."""
        with trio.CancelScope() as gone:
            gone.cancel()
            await self.control.ask(command)


@pytest.fixture
def asked(tmp_path: Path) -> Asked:
    return Asked(tmp_path)


async def test_a_node_leaves_although_the_client_has_gone(asked: Asked) -> None:
    async def gone(_value: Any) -> None:
        raise trio.BrokenResourceError

    with pytest.raises(trio.BrokenResourceError):
        await asked.control._handlers[LEAVE]({"at_once": True}, gone)
    assert asked.session.departure.at_once


async def test_a_pause_and_its_end_are_kept_although_the_client_has_gone(asked: Asked) -> None:
    await asked.ask_and_go(PAUSE)
    assert OwnersPause(asked.file).load(time.time())
    await asked.ask_and_go(RESUME)
    assert not asked.file.exists()


async def test_a_resume_that_cannot_be_kept_says_why(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_path: Path, **_options: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    await asked.ask(PAUSE)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", refuse)
        assert await asked.ask(RESUME) == {
            "was_paused": True,
            "still_closed": [],
            "not_kept": os.strerror(errno.EROFS),
        }
    assert (await asked.ask(RESUME))["not_kept"] == ""
